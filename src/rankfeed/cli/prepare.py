"""The command `prepare`: a directory that exactly one process builds."""

from pathlib import Path
from typing import Annotated

import typer

from rankfeed._util.imports import import_function
from rankfeed.cli.options import allow_imports, option
from rankfeed.cli.output import Json, show
from rankfeed.errors import ArgumentError, PrepareError, describe_error, listed

_FUNCTION_HELP = "Called with the directory to fill; or FILE.py:FUNCTION."
_KEY_HELP = "Version of the content; a directory of another key is rebuilt."
_INPUT_HELP = "Rebuild if this file or directory changed; may be repeated."


def prepare(
    function: Annotated[str, typer.Argument(metavar="MODULE:FUNCTION", help=_FUNCTION_HELP)],
    path: Annotated[str, typer.Argument(metavar="DIR", help="Directory to build.")],
    key: Annotated[str, option("TEXT", _KEY_HELP)] = "",
    retries: Annotated[int, option("N", "Further attempts if the build fails.", least=0)] = 0,
    timeout: Annotated[float | None, option("SECONDS", "Limit for waiting for a builder.", least=0)] = None,
    inputs: Annotated[list[str] | None, option("PATH", _INPUT_HELP, "--input")] = None,
    check: Annotated[bool, typer.Option("--check", help="Compare the checksums of all files.")] = False,
    json: Json = False,
) -> None:
    """Build a directory in exactly one process; all others wait.

    Example: rankfeed prepare my_package.data:build data/words --key v1
    """
    from rankfeed.prepare import prepare_once
    from rankfeed.prepare.marker import changed_files, read_marker

    allow_imports()
    try:
        build, built = import_function(function), False
    except Exception as error:  # importing runs code of the user
        raise ArgumentError(
            "the function cannot be imported", found=describe_error(error), where=function
        ) from error

    def record_and_build(staging: Path) -> None:
        nonlocal built
        built = True
        build(staging)

    folder = prepare_once(path, record_and_build, key=key, retries=retries, timeout=timeout, inputs=inputs or ())
    if check and (changed := changed_files(folder)):
        raise PrepareError(
            "files differ from those that were built",
            found=listed(changed, 8),
            where=folder,
            remedy="remove them: the next call builds the directory again",
        )
    marker = read_marker(folder)
    assert marker is not None
    figures = {
        "path": str(folder),
        "built_here": built,
        "built_on": marker.host,
        "seconds": marker.seconds,
        "files": len(marker.files),
        "bytes": sum(max(0, entry.nbytes) for entry in marker.files),
    }
    show(figures, as_json=json, title=str(folder))

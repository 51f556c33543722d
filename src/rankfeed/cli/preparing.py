"""The command prepare: have a folder built by one process, whoever else wants it too."""

import os
import sys
from importlib import import_module
from pathlib import Path
from typing import Annotated, Any

import typer

from rankfeed.cli.output import Json, show
from rankfeed.errors import ArgumentError, PrepareError


def prepare(
    function: Annotated[str, typer.Argument(help="module:function, called with the folder to write into.")],
    path: Annotated[str, typer.Argument(help="Folder to be there in the end.")],
    key: Annotated[str, typer.Option(help="What is built; a folder of another key is replaced.")] = "",
    retries: Annotated[int, typer.Option(min=0, help="How often a failing build is tried again.")] = 0,
    timeout: Annotated[float | None, typer.Option(min=0, help="Seconds to wait for another process.")] = None,
    inputs: Annotated[list[str] | None, typer.Option("--input", help="What it is built from.")] = None,
    check: Annotated[bool, typer.Option(help="Compare the bytes of all files with what was built.")] = False,
    json: Json = False,
) -> None:
    """Have a folder built by one process of many, or wait for the one that builds it.

    Example: rankfeed prepare my_package.data:build data/words --key v1
    """
    from rankfeed.prepare import prepare_once
    from rankfeed.prepare.marker import changed_files, read_marker

    build, built = _function(function), False

    def building(staging: Path) -> None:
        nonlocal built
        built = True
        build(staging)

    folder = prepare_once(path, building, key=key, retries=retries, timeout=timeout, inputs=inputs or ())
    if check and (changed := changed_files(folder)):
        raise PrepareError(
            "files are not what was built",
            found=", ".join(changed[:8]) + (", ..." if len(changed) > 8 else ""),
            where=folder,
            remedy="remove them: the next call builds anew",
        )
    marker = read_marker(folder)
    assert marker is not None
    told = {
        "path": str(folder),
        "built_here": built,
        "built_on": marker.host,
        "seconds": marker.seconds,
        "files": len(marker.files),
        "bytes": sum(max(0, entry.nbytes) for entry in marker.files),
    }
    show(told, as_json=json, title=str(folder))


def _function(name: str) -> Any:
    module, _, attribute = name.partition(":")
    if not module or not attribute:
        raise ArgumentError("this names no function", expected="module:function", found=repr(name))
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())  # as `python -m` does
    try:
        function: Any = import_module(module)
        for part in attribute.split("."):
            function = getattr(function, part)
    except (ImportError, AttributeError) as error:
        raise ArgumentError("the function cannot be imported", found=error, where=name) from error
    if not callable(function):
        raise ArgumentError("this is no function", found=type(function).__name__, where=name)
    return function

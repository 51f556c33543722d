"""What the command verify says of a data set."""

import sys
from typing import Any

import typer

from rankfeed.cli.output import bytes_of, clean, progress_bar, show
from rankfeed.diagnostics.verify.data import verify_data


def check_data(where: Any, *, resume: bool, as_json: bool, opening: dict[str, Any]) -> dict[str, Any]:
    """Read a data set wholly; exit with 1 where it is damaged.

    Returns:
        Figures for whoever goes on.
    """
    with progress_bar("reading data") as progress:
        verdict = verify_data(where, resume=resume, progress=progress, **opening)
    told = verdict.as_dict()
    if verdict.sound is False:
        if as_json:
            show({"sound": False, "files": told}, as_json=True)
        places = f"{verdict.count} place{'s' * (verdict.count > 1)}"
        typer.secho(f"rankfeed: {clean(str(where)).plain} is damaged in {places}", err=True, fg="red")
        for each in verdict.damage:
            typer.echo(f"  {clean(str(each)).plain}", err=True)
        if verdict.count > len(verdict.damage):
            typer.echo(f"  and {verdict.count - len(verdict.damage)} more", err=True)
        sys.exit(1)
    names = ("sound", "format", "pieces", "resumed", "damaged", "how")
    figures = {name: told[name] for name in names} | {"bytes": verdict.nbytes}
    return figures if as_json else {**figures, "bytes": bytes_of(verdict.nbytes)}

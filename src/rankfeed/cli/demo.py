"""The command `demo`: starts examples/demo.py, which is part of the package."""

import subprocess
import sys
from importlib.resources import files
from pathlib import Path

import typer

from rankfeed.cli.output import Json
from rankfeed.errors import SourceError


def demo(json: Json = False) -> None:
    """Train, kill the job, resume it on other ranks, and count.

    Runs examples/demo.py: 2 ranks, then 3, and each sample delivered once. The script may be copied and
    changed. It takes less than a minute and needs no network.

    Example: rankfeed demo
    """
    checkout = Path(__file__).parents[3] / "examples" / "demo.py"
    script = checkout if checkout.exists() else Path(str(files("rankfeed"))) / "examples" / "demo.py"
    if not script.exists():
        raise SourceError("this installation has no examples", where=script, remedy="run the demo in a clone")
    command = [sys.executable, str(script), *(["--json"] if json else [])]
    raise typer.Exit(subprocess.run(command, check=False).returncode)

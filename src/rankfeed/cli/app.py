"""The application: all commands, their errors and exit codes."""

import inspect as inspection
import json
import re
import sys
import traceback
from collections.abc import Callable
from typing import Annotated, Any

import typer
import typer.core

from rankfeed.cli import demo, doctor, index, inspect, plan, prepare, report, topology, verify, write
from rankfeed.errors import ArgumentError, RankfeedError, safe_str

_WIDTH = 110  # of help, at most
_INTERNAL = 70  # exit status of an internal error, as in sysexits.h
app = typer.Typer(
    name="rankfeed",
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,  # plain help: no frames, no colours, examples that can be copied
    context_settings={
        "help_option_names": ["-h", "--help"],
        "max_content_width": _WIDTH,
        "terminal_width": None if sys.stdout and sys.stdout.isatty() else _WIDTH,
    },
)
#: Typer exports no name for it: wrong options, arguments and commands.
_UsageError: Any = typer.BadParameter.__base__


@app.callback(invoke_without_command=True)
def rankfeed(
    context: typer.Context, version: Annotated[bool, typer.Option("--version", help="Print the version.")] = False
) -> None:
    """Inspect, plan, write and verify data for distributed PyTorch training.

    Exit status: 0 sound or done, 1 diseased, damaged or failed, 2 invalid arguments, 3 not proven, 70 internal
    error. With --json a command prints one JSON document, also of an error.

    Example: rankfeed inspect data/
    """
    if version:
        from rankfeed import __version__

        typer.echo(f"rankfeed {__version__}")
    elif context.invoked_subcommand is None:
        typer.echo(context.get_help())


class _Command(typer.core.TyperCommand):
    """A command whose help says ``DATA`` of an argument, where Typer says ``DATA <list[str]>``."""

    def get_help(self, ctx: Any) -> str:
        return re.sub(r"^(  [A-Z:|]+) <(?:str|list\[str\])>", r"\1", super().get_help(ctx), flags=re.MULTILINE)


_COMMANDS: tuple[Callable[..., None], ...] = (
    inspect.inspect,
    index.index,
    plan.plan,
    prepare.prepare,
    write.write,
    verify.verify,
    doctor.doctor,
    report.report,
    topology.topology,
    demo.demo,
)
for _command in _COMMANDS:
    # A line with \b keeps the lines of the following paragraph as they are.
    _help = inspection.cleandoc(_command.__doc__ or "").replace("\n\nExample:", "\n\n\b\nExample:")
    app.command(cls=_Command, help=_help)(_command)


def main() -> None:
    """Run the command; expected errors end it with one message, without a traceback."""
    try:
        code = app(standalone_mode=False)
    except RankfeedError as error:
        parts = {name: getattr(error, name) for name in ("expected", "found", "where", "remedy")}
        facts = {name: safe_str(part) for name, part in parts.items() if part is not None}
        code = _fail(2 if isinstance(error, ArgumentError) else 1, str(error), error=error.summary, **facts)
    except _UsageError as error:
        text = error.format_message().replace("Value error, ", "")
        remedy = "see " + (error.ctx.command_path if error.ctx else "rankfeed") + " --help"
        code = _fail(2, f"{text}\n  remedy: {remedy}", error=text, remedy=remedy)
    except typer.Abort:
        code = 130
    except Exception as error:
        traceback.print_exc()
        remedy = "please report it with the traceback"
        text = f"{type(error).__name__}: {safe_str(error)}"
        code = _fail(_INTERNAL, f"internal error: {text}\n  remedy: {remedy}", error="internal error", found=text)
    sys.exit(code if isinstance(code, int) else 0)


def _fail(code: int, text: str, **document: str) -> int:
    if "--json" in sys.argv:
        typer.echo(json.dumps({"ok": False, **document}))
    typer.secho(f"rankfeed: {text}", err=True, fg="red")
    return code

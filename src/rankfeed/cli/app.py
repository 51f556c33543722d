"""The ``rankfeed`` command."""

import json
import sys

import typer

from rankfeed.cli import data, doctor, indexing, inspecting, plans, preparing, report, topology, verifying
from rankfeed.cli.output import Json, show
from rankfeed.errors import ArgumentError, RankfeedError, safe_str

app = typer.Typer(
    name="rankfeed",
    help="The data feed for distributed PyTorch training.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
app.command()(inspecting.inspect)
app.command()(plans.plan)
app.command()(preparing.prepare)
app.command()(data.write)
app.command()(indexing.index)
app.command()(verifying.verify)
app.command()(report.report)
app.command()(topology.topology)
app.command()(doctor.doctor)


@app.command()
def demo(as_json: Json = False) -> None:
    """Train on real data, kill the job, resume on other ranks, and count what was delivered.

    Example: rankfeed demo
    """
    from rankfeed.cli import demo as main_job

    figures = main_job.run(lambda text: typer.echo(text, err=as_json))
    ok = not (figures["missing"] or figures["repeated"])
    show({"ok": ok, **figures}, as_json=as_json, title="proof")
    if not ok and as_json:
        raise typer.Exit(1)  # it was said, and there is one document
    if not ok:
        raise RankfeedError("samples went missing or came twice", found=str(figures))


def main() -> None:
    """Run the command; an error of ours is told without a traceback. Exit status 1, or 2 for bad arguments."""
    try:
        app()
    except RankfeedError as error:
        if "--json" in sys.argv:
            facts = {name: getattr(error, name) for name in ("expected", "found", "where", "remedy")}
            told = {name: safe_str(fact) for name, fact in facts.items() if fact is not None}
            typer.echo(json.dumps({"ok": False, "error": error.summary, **told}))
        typer.secho(f"rankfeed: {error}", err=True, fg="red")
        sys.exit(2 if isinstance(error, ArgumentError) else 1)

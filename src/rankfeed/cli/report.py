"""The command report: a plan, an audit or a run on one page."""

import webbrowser
from pathlib import Path
from typing import Annotated

import typer

from rankfeed.cli import options
from rankfeed.cli.options import option
from rankfeed.cli.output import Json, progress_bar, say, show, show_findings
from rankfeed.errors import ArgumentError
from rankfeed.topology import Topology

Paths = list[Path] | None
_STATS_HELP = "JSON lines of loader.stats(), one file per rank; may be repeated."
_OUT_HELP = "File to write: HTML, or a picture if the name ends in .png."


@options.expand_options
def report(
    data: options.PlanData = None,
    *,
    plan_options: options.PlanOptions,
    dataset_options: options.DatasetOptions,
    audit: Annotated[Paths, option("FILE", "File written by AuditReport.save; may be repeated.")] = None,
    run: Annotated[Paths, option("DIR", "Folder of ledgers of Loader(audit=FOLDER); may be repeated.")] = None,
    stats: Annotated[Paths, option("FILE", _STATS_HELP)] = None,
    out: Annotated[Path, option("FILE", _OUT_HELP, "--out")] = Path("report.html"),
    png: Annotated[Path | None, option("FILE", "Write the charts as a picture too.")] = None,
    open_page: Annotated[bool, typer.Option("--open", help="Open the page in a browser.")] = False,
    json: Json = False,
) -> None:
    """Draw a plan, an audit or a run on one HTML page that needs no network; --json prints its numbers.

    A plan is described as for the command plan: a data set or --samples, --ranks, --batch-size and so on. If the
    data have ragged columns, the lengths of some batches are read. Exit code: 1 for diseased, 3 for not proven.

    Example: rankfeed report clips --ranks 8 --batch-size 32 --out plan.html --png plan.png
    """
    from rankfeed.diagnostics import AuditReport, verify_run
    from rankfeed.diagnostics.report import audit_page, joined, plan_page, read_stats, run_page, stats_page, write

    if png is not None and png.suffix.lower() != ".png":
        raise ArgumentError("a picture is a PNG", expected="a name that ends in .png", found=png)
    targets = [out, *([png] if png else [])]
    taken = {path.resolve() for path in (*(audit or ()), *(stats or ()), Path(data or ""))}
    if len(taken.union(path.resolve() for path in targets)) < len(taken) + len(targets):
        raise ArgumentError(
            "no file is written over an input, or twice", found=targets, remedy="give another name"
        )
    pages = []
    if data is not None or plan_options.samples is not None:
        plan_options.check_data(data)
        source = None if data is None else dataset_options.open([data])
        plan = plan_options.plan(plan_options.block_sizes(source))
        schedule = plan_options.schedule(plan, Topology(world_size=plan_options.ranks))
        title = f"Plan: {data or f'{schedule.plan.num_samples:,} samples'}"
        with progress_bar("counting deliveries") as progress:
            pages.append(
                plan_page(schedule, workers=plan_options.workers, source=source, title=title, progress=progress)
            )
    for folder in run or ():
        with progress_bar("reading ledgers") as progress:
            pages.append(run_page(verify_run(folder, progress=progress)))
    pages += [audit_page(AuditReport.load(path), f"Audit: {path}") for path in audit or ()]
    if stats:
        pages.append(stats_page({str(path): read_stats(path) for path in stats}))
    if not pages:
        raise ArgumentError(
            "there is nothing to report on",
            expected="a data set, --samples, --audit, --run or --stats",
            remedy="see --help",
        )
    page = joined(pages)
    files = [str(write(page, path)) for path in targets]
    if json:
        show({"files": files, **page.as_dict()}, as_json=True)
    else:
        verdict = "" if page.verdict is None else f"{page.verdict}: "
        show_findings(page.findings, page.verdict, verdict + page.summary)
        say("written: " + ", ".join(files))
    if open_page:
        webbrowser.open(out.resolve().as_uri())
    if page.verdict is not None and page.verdict.exit_code:
        raise typer.Exit(page.verdict.exit_code)

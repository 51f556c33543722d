"""The command report: a plan, an audit or a run on one page."""

import webbrowser
from pathlib import Path
from typing import Annotated, Any

import typer

from rankfeed._util.validate import check_path
from rankfeed.cli import options
from rankfeed.cli.output import Json, progress_bar, show
from rankfeed.errors import ArgumentError

Audit = Annotated[
    list[Path] | None, typer.Option(metavar="FILE", help="File written by AuditReport.save; may be repeated.")
]
Stats = Annotated[
    list[Path] | None,
    typer.Option(metavar="FILE", help="JSON lines of loader.stats(), one file per rank; may be repeated."),
]
Run = Annotated[
    list[Path] | None,
    typer.Option(metavar="DIR", help="Folder of ledgers of Loader(audit=FOLDER); may be repeated."),
]
Out = Annotated[
    Path, typer.Option("--out", metavar="FILE", help="File to write: HTML, or a picture if the name ends in .png.")
]
Png = Annotated[Path | None, typer.Option(metavar="FILE", help="Write the charts as a picture too.")]
Open = Annotated[bool, typer.Option("--open", help="Open the page in a browser.")]


def report(
    data: options.PlanData = None,
    samples: options.Samples = None,
    blocks: options.Blocks = 1,
    ranks: options.Ranks = 1,
    workers: options.Workers = 0,
    batch_size: options.BatchSize = 1,
    shuffle: options.ShuffleKind = "global",
    seed: options.Seed = 0,
    window: options.Window = 65536,
    lanes: options.Lanes = None,
    tail: options.TailKind = "even",
    epoch: options.Epoch = 0,
    start: options.Start = 0,
    audit: Audit = None,
    run: Run = None,
    stats: Stats = None,
    out: Out = Path("report.html"),
    png: Png = None,
    open_page: Open = False,
    json: Json = False,
) -> None:
    """Draw a plan, an audit or a run on one HTML page that needs no network; --json prints its numbers.

    A plan is described as for the command plan: a data set or --samples, --ranks, --batch-size and so on. If the
    data have ragged columns, the lengths of some batches are read. Exit code: 1 for diseased, 3 for not proven.

    Example: rankfeed report clips --ranks 8 --batch-size 32 --out plan.html --png plan.png
    """
    from rankfeed.diagnostics import AuditReport, verify_run
    from rankfeed.diagnostics.report import PlannedJob, joined, page_of, read_stats, write

    if png is not None and png.suffix.lower() != ".png":
        raise ArgumentError("a picture is a PNG", expected="a name that ends in .png", found=png)
    targets = [out, *([png] if png else [])]
    _check_targets(targets, [*(audit or ()), *(stats or ()), *([Path(check_path("data", data))] if data else ())])
    pages = []
    if data is not None or samples is not None:
        sizes = options.block_sizes(data, samples, blocks)
        plan = options.make_plan(sizes, shuffle, seed, window, lanes)
        schedule: dict[str, Any] = {"workers": workers, "epoch": epoch, "start": start, "tail": tail}
        job = PlannedJob(plan, sizes, ranks, batch_size, source=_source(data), **schedule)
        with progress_bar("counting deliveries") as progress:
            title = f"Plan: {data or f'{plan.num_samples:,} samples'}"
            pages.append(page_of(job, title=title, progress=progress))
    for folder in run or ():
        with progress_bar("reading ledgers") as progress:
            pages.append(page_of(verify_run(folder, progress=progress)))
    pages += [page_of(AuditReport.load(path), title=f"Audit: {path}") for path in audit or ()]
    if stats:
        names = [path.stem for path in stats]
        if len({*names}) < len(names):  # of several launches, each with a folder
            names = [str(path) for path in stats]
        pages.append(page_of({name: read_stats(path) for name, path in zip(names, stats, strict=True)}))
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
        verdict = {} if page.verdict is None else {"verdict": page.verdict.value}
        found = {"findings": "\n".join(page.findings)} if page.findings else {}
        show({**verdict, "summary": page.summary, **found, "written": "\n".join(files)}, as_json=False)
    if open_page:
        webbrowser.open(out.resolve().as_uri())
    if page.verdict is not None and page.verdict.exit_code:
        raise typer.Exit(page.verdict.exit_code)


def _check_targets(targets: list[Path], read: list[Path]) -> None:
    """No file is written over one that is read, or twice."""
    taken = {path.resolve() for path in read}
    for path in targets:
        if path.resolve() in taken:
            raise ArgumentError("the file is an input, or written already", where=path, remedy="another name")
        taken.add(path.resolve())


def _source(data: str | None) -> Any:
    from rankfeed.sources import open as open_source

    return None if data is None else open_source(data)

"""The command report: a plan, an audit or a run on one page."""

import webbrowser
from pathlib import Path
from typing import Annotated, Any

import typer

from rankfeed._util.validate import check_path
from rankfeed.cli import options
from rankfeed.cli.output import Json, progress_bar, show
from rankfeed.errors import ArgumentError, RankfeedError

Audit = Annotated[list[Path] | None, typer.Option(help="A report that AuditReport.save wrote; may be repeated.")]
Stats = Annotated[
    list[Path] | None, typer.Option(help="JSON lines of loader.stats(), a file for each rank; may be repeated.")
]
Run = Annotated[
    list[Path] | None, typer.Option(help="Folder of ledgers that Loader(audit=FOLDER) wrote; may be repeated.")
]
Out = Annotated[Path, typer.Option("--out", help="The page to write; a picture if it ends in .png.")]
Png = Annotated[Path | None, typer.Option(help="Also draw the charts as a picture.")]
Show = Annotated[bool, typer.Option("--open", help="Open the page in a browser.")]


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
    show_page: Show = False,
    json: Json = False,
) -> None:
    """Draw a plan, an audit or a run: one HTML page that needs no network. --json prints what is on it.

    A plan is given as to the command plan: a data set or --samples, and --ranks, --batch-size and so on. Of data
    with ragged columns the lengths of some batches are read, for the padding. Exits with 1 if a promise is broken.

    Example: rankfeed report clips --ranks 8 --batch-size 32 --out plan.html --png plan.png
    """
    import msgspec

    from rankfeed.diagnostics import AuditReport
    from rankfeed.diagnostics.report import joined, of_audit, of_stats, read_stats, write

    if png is not None and png.suffix.lower() != ".png":
        raise ArgumentError("a picture is a PNG", expected="a name that ends in .png", found=png)
    targets = [path for path in (out, png) if path is not None]
    _check_targets(targets, [*(audit or ()), *(stats or ()), *([Path(check_path("data", data))] if data else ())])
    pages = [_of_run(folder) for folder in run or ()]
    pages += [of_audit(AuditReport.load(path), title=f"Audit: {path}") for path in audit or ()]
    if stats:
        names = [path.stem for path in stats]
        if len({*names}) < len(names):  # of several launches, each with a folder
            names = [str(path) for path in stats]
        of_ranks = {name: read_stats(path) for name, path in zip(names, stats, strict=True)}
        pages.append(of_stats(of_ranks, title="Rates of a run"))
    if data is not None or samples is not None:
        pages.insert(
            0,
            _of_plan(
                data,
                options.block_sizes(data, samples, blocks),
                _asked(ranks, batch_size, workers, epoch, start, tail),
                {"shuffle": shuffle, "seed": seed, "window": window, "lanes": lanes},
            ),
        )
    if not pages:
        raise ArgumentError(
            "there is nothing to report on",
            expected="a data set, --samples, --audit, --run or --stats",
            remedy="see --help",
        )
    page = joined(pages)
    written = [str(write(page, path)) for path in targets]
    if json:
        show({"files": written, "ok": page.word != "bad", **msgspec.to_builtins(page)}, as_json=True)
    else:
        charts = sum(len(part.figures) for part in page.parts)
        show({"verdict": page.verdict, "charts": charts, "written": "\n".join(written)}, as_json=False)
    if show_page:
        webbrowser.open(out.resolve().as_uri())
    if page.word == "bad" and json:
        raise typer.Exit(1)  # it is told
    if page.word == "bad":
        raise RankfeedError("the report shows a broken promise", found="; ".join(page.findings) or page.verdict)


def _check_targets(targets: list[Path], read: list[Path]) -> None:
    """No file is written over what is read, or twice."""
    taken = {path.resolve() for path in read}
    for path in targets:
        if path.resolve() in taken:
            raise ArgumentError("this file is read, or written already", where=path, remedy="name another one")
        taken.add(path.resolve())


def _asked(ranks: int, batch_size: int, workers: int, epoch: int, start: int, tail: str) -> Any:
    from rankfeed.diagnostics.report import Asked

    return Asked(ranks, batch_size, workers, epoch, start, tail)  # type: ignore[arg-type]


def _of_plan(data: str | None, sizes: Any, asked: Any, order: dict[str, Any]) -> Any:
    from rankfeed.diagnostics import verify_plan
    from rankfeed.diagnostics.report import of_plan, padding_of

    plan = options.make_plan(sizes, **order)
    padding = {}
    first = asked.schedule(plan, 0)
    if data is not None:
        from rankfeed.sources import open as open_source

        padding = padding_of(open_source(data), first)
    # Counting costs time for each rank and step too.
    small = asked.ranks * len(first) <= 200_000
    with progress_bar("counting deliveries") as progress:
        verdict = verify_plan(
            plan,
            ranks=asked.ranks,
            batch_size=asked.batch_size,
            epoch=asked.epoch,
            start=asked.start,
            tail=asked.tail,
            count=small,
            progress=progress,
        )
    return of_plan(
        plan, sizes, asked, verdict, title=f"Plan: {data or f'{plan.num_samples:,} samples'}", padding=padding
    )


def _of_run(folder: Path) -> Any:
    from rankfeed.diagnostics import verify_run
    from rankfeed.diagnostics.report import of_run
    from rankfeed.diagnostics.verify.ledgers import read_folder

    with progress_bar("reading ledgers") as progress:
        verdict = verify_run(folder, progress=progress)
    read, _ = read_folder(folder, lambda share: None)
    return of_run(verdict, read)

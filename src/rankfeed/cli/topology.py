"""The command `topology`: the rank of this process, and whether all ranks agree."""

import os
import socket
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.table import Table

from rankfeed.cli import options
from rankfeed.cli.options import option
from rankfeed.cli.output import FAINT, Json, clean, count_of, out, say, show
from rankfeed.errors import ArgumentError, RankfeedError, TopologyError
from rankfeed.topology import Topology
from rankfeed.topology.agreement import ProcessReport, find_contradictions
from rankfeed.topology.detect import detect_launcher
from rankfeed.topology.launchers import OUTER, TORCHRUN, read_launcher

#: Sample ids of a rank that are shown.
_FIRST = 8


def topology(
    check: Annotated[bool, typer.Option("--check", help="Compare all ranks of the launch.")] = False,
    data: Annotated[str | None, option("DATA", "A dataset: show what each rank reads first.")] = None,
    batch_size: options.BatchSize = 1,
    shuffle: options.ShuffleKind = "global",
    seed: options.Seed = 0,
    ranks: Annotated[int | None, option("N", "Expected number of ranks.", least=1)] = None,
    folder: Annotated[Path, option("DIR", "With --check: seen by all hosts.")] = Path(),
    job: Annotated[str, option("NAME", "With --check: the launch, if its launcher has no name.")] = "",
    timeout: Annotated[float, option("SECONDS", "Limit for waiting for ranks.", least=0)] = 60,
    json: Json = False,
) -> None:
    """Show the rank of this process, or compare all ranks.

    Prints the variables that determine the rank, and those that other launchers set.

    With --check, run under a launcher, all ranks compare their reports; rank 0 prints a table of them, and a
    contradiction ends every rank with exit status 1.

    Example: rankfeed topology
    Example: srun -n 4 rankfeed topology --check --ranks 4 --data data/ --batch-size 32
    """
    plan_options = options.PlanOptions(batch_size=batch_size, shuffle=shuffle, seed=seed)
    report, error = _report_of_this_process(data, plan_options, ranks)
    reports = _exchange(report, error, folder, job, timeout) if check else [report]
    if error is not None:
        raise error
    figures = _figures(report)
    if not check:
        show(figures if json else figures | {"pid": str(report.pid)}, as_json=json, title="topology")
    elif contradictions := find_contradictions(reports):
        raise TopologyError(
            "the ranks of this launch contradict each other",
            expected="one world, with each rank once",
            found="; ".join(contradictions),
            remedy="run the command without --check on each rank to see the variables that determine it",
        )
    elif figures["rank"] == 0:
        rows = [_row(report) for report in reports]
        if json:
            show({"ok": True, **figures, "ranks": rows}, as_json=True)
        else:
            _print_ranks(rows, figures)


def _report_of_this_process(
    data: str | None, plan_options: options.PlanOptions, ranks: int | None
) -> tuple[ProcessReport, RankfeedError | None]:
    """The report of this process, and its error, which the other ranks have to see before it is raised."""
    detected, launcher, error = None, None, None
    more: dict[str, Any] = {}
    try:
        launcher = detect_launcher(os.environ)
        detected = Topology.detect()
        if ranks is not None and detected.world_size != ranks:
            raise TopologyError(
                "unexpected number of ranks",
                expected=f"{ranks} ranks",
                found=f"{detected.world_size} (launcher {detected.launcher}; {_variables()})",
                remedy="start the processes with torchrun, srun or mpirun, or set RANK and WORLD_SIZE",
            )
        if data is not None:
            source = options.DatasetOptions().open([data])
            schedule = plan_options.schedule(plan_options.plan(source.blocks), detected)
            first = schedule.batch(0)[schedule.valid(0)].tolist() if len(schedule) else []
            more = {"data": source.fingerprint, "steps": len(schedule), "first": tuple(first[:_FIRST])}
    except RankfeedError as caught:
        error = caught
    report = ProcessReport(
        socket.gethostname(),
        os.getpid(),
        detected,
        problem="" if error is None else " ".join(str(error).split()),
        local_known=launcher is not None and None not in (launcher.local_rank, launcher.local_size),
        node_known=launcher is not None and None not in (launcher.node, launcher.num_nodes),
        **more,
    )
    return report, error


def _exchange(
    report: ProcessReport, error: RankfeedError | None, folder: Path, job: str, timeout: float
) -> list[ProcessReport]:
    """The reports of all ranks."""
    from rankfeed.diagnostics.roster import exchange_reports, roster_directory
    from rankfeed.topology.job import job_id

    launch = f"--job {job}" if job else job_id()
    if not launch:
        if report.topology is not None and report.topology.world_size > 1:
            raise error or ArgumentError(
                "nothing identifies the launch of these ranks",
                expected="a name that all ranks of this launch pass, and no other launch",
                remedy="--job NAME",
            )
        return [report]
    try:
        return exchange_reports(folder / roster_directory(launch), report, timeout)
    except TopologyError as unreached:  # an error of this process is more important
        raise error or unreached from None


def _figures(report: ProcessReport) -> dict[str, Any]:
    assert report.topology is not None
    detected = {"launcher": report.topology.launcher, **asdict(report.topology)}
    figures: dict[str, Any] = {**detected, "host": report.host, "pid": report.pid, "found_in": _variables()}
    believed = detect_launcher(os.environ)
    others = {row.name: read_launcher(row, os.environ) for row in (TORCHRUN, *OUTER)}
    others.pop("" if believed is None else believed.launcher, None)
    if also_set := {name: launcher.variables for name, launcher in others.items() if launcher is not None}:
        figures["also_set"] = also_set
    return figures | ({"steps": report.steps, "reads_first": list(report.first)} if report.data else {})


def _variables() -> str:
    """The variables that determine the rank."""
    launcher = detect_launcher(os.environ)
    if launcher is not None:
        return launcher.variables
    if "SLURM_JOB_ID" in os.environ:
        return "no variable: SLURM_JOB_ID without a step of tasks is one process (srun starts several)"
    return "no variable of a launcher: one process"


def _row(report: ProcessReport) -> dict[str, Any]:
    detected = report.topology
    assert detected is not None
    numbers = {"rank": detected.rank, "node": detected.node, "local_rank": detected.local_rank}
    more = {"reads_first": list(report.first)} if report.data else {}
    return {**numbers, "host": report.host, "pid": report.pid, **more}


def _print_ranks(rows: list[dict[str, Any]], own: dict[str, Any]) -> None:
    agree, nodes = "agrees" if len(rows) == 1 else "agree", count_of(own["num_nodes"], "node")
    say(f"{count_of(len(rows), 'rank')} {agree} ({own['launcher']}, {nodes})", style="bold")
    say(f"rank 0: {own['found_in']}", style=FAINT)
    table = Table(box=None, pad_edge=False)
    for name in rows[0]:
        table.add_column(name.replace("_", " "), overflow="fold", justify="left" if name == "host" else "right")
    for row in rows:
        cells = (" ".join(map(str, cell)) if isinstance(cell, list) else str(cell) for cell in row.values())
        table.add_row(*map(clean, cells))
    out(table)

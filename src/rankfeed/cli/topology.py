"""The command topology: where a process stands and who said so; on all ranks, whether they agree."""

import os
import socket
from collections.abc import Mapping
from dataclasses import asdict, fields
from pathlib import Path
from typing import Annotated, Any

import typer

from rankfeed.cli.output import FAINT, Json, clean, out, say, show
from rankfeed.errors import ArgumentError, RankfeedError, TopologyError
from rankfeed.topology import Topology
from rankfeed.topology.agreement import ProcessReport, find_contradictions
from rankfeed.topology.detect import detect_launcher
from rankfeed.topology.launchers import OUTER, TORCHRUN, read_launcher

#: So many of the sample ids that a rank reads first are shown.
_FIRST = 8


def topology(
    check: Annotated[bool, typer.Option("--check", help="Meet all other ranks and compare.")] = False,
    data: Annotated[str | None, typer.Option(help="A data set: show what each rank reads first.")] = None,
    batch_size: Annotated[int, typer.Option(min=1, help="Rows of a rank's batch.")] = 1,
    shuffle: Annotated[str, typer.Option(help="none, global or window.")] = "global",
    seed: Annotated[int, typer.Option(help="Seed of the order.")] = 0,
    ranks: Annotated[int | None, typer.Option(min=1, help="How many ranks there have to be.")] = None,
    folder: Annotated[Path, typer.Option(help="Where ranks meet: a folder that all hosts see.")] = Path(),
    job: Annotated[str, typer.Option(help="Name of this launch, where its launcher gives none.")] = "",
    timeout: Annotated[float, typer.Option(min=0, help="Seconds to wait for other ranks.")] = 60,
    json: Json = False,
) -> None:
    """Which rank of how many this process is, on which node, and which variables say so.

    With --check under a launcher, the ranks compare what they found, and rank 0 prints a table of them; a
    contradiction ends each rank with exit status 1. They meet in a folder: no process group is made.

    Example: rankfeed topology

    Example: srun -n 4 rankfeed topology --check --ranks 4 --data data/ --batch-size 32
    """
    me, error = _look(os.environ, data, batch_size, shuffle, seed, ranks)
    if not check:
        if error is not None:
            raise error
        assert me.topology is not None
        figures = _figures(me, os.environ, data)
        # A process is no count: it goes without commas between its digits.
        show(figures if json else figures | {"pid": str(me.pid)}, as_json=json, title="topology")
        return
    together = _together(me, error, folder, job, timeout)
    found = find_contradictions(together)
    if error is not None:
        raise error
    if found:
        raise TopologyError(
            "the ranks of this launch do not agree",
            expected="one world, with each rank once",
            found="; ".join(found),
            remedy="run the command without --check on each rank to see which variables say so",
        )
    if me.topology is not None and me.topology.rank == 0:
        _print(together, os.environ, me, data, as_json=json)


def _look(
    environ: Mapping[str, str], data: str | None, batch_size: int, shuffle: str, seed: int, ranks: int | None
) -> tuple[ProcessReport, RankfeedError | None]:
    """This process as it sees itself; an error is told to the others before it is raised."""
    here, claim, error = None, None, None
    more: dict[str, Any] = {}
    try:
        claim = detect_launcher(environ)
        here = Topology.detect(environ)
        if ranks is not None and here.world_size != ranks:
            raise TopologyError(
                "there are not as many ranks as there have to be",
                expected=f"{ranks} ranks",
                found=f"{here.world_size}, as {here.launcher} says: {_source(environ)}",
                remedy="start the processes by torchrun, srun or mpirun, or set RANK and WORLD_SIZE",
            )
        if data is not None:
            more = _first(data, here, batch_size, shuffle, seed)
    except RankfeedError as caught:
        error = caught
    seen = ProcessReport(
        socket.gethostname(),
        os.getpid(),
        here,
        "" if error is None else " ".join(str(error).split()),
        claim is not None and claim.local_rank is not None and claim.local_size is not None,
        claim is not None and claim.node is not None and claim.num_nodes is not None,
        **more,
    )
    return seen, error


def _first(data: str, here: Topology, batch_size: int, shuffle: str, seed: int) -> dict[str, Any]:
    from rankfeed.plan import Plan, Schedule
    from rankfeed.plan.plan import DEFAULT_LANES
    from rankfeed.sources import open as open_source

    source = open_source(data)
    plan = Plan(source.blocks, shuffle=shuffle, seed=seed, lanes=DEFAULT_LANES.get(shuffle, 1))  # type: ignore[arg-type]
    schedule = Schedule(plan, batch_size=batch_size, topology=here)
    first = schedule.batch(0)[schedule.valid(0)].tolist() if len(schedule) else []
    return {"data": source.fingerprint, "steps": len(schedule), "first": tuple(first[:_FIRST])}


def _together(
    me: ProcessReport, error: RankfeedError | None, folder: Path, job: str, timeout: float
) -> list[ProcessReport]:
    from rankfeed.diagnostics.roll_call import folder_of, roll_call
    from rankfeed.topology.job import job_id

    mark = f"--job {job}" if job else job_id()
    if not mark and os.environ.get("MASTER_ADDR") and os.environ.get("MASTER_PORT"):
        mark = f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}"
    if not mark:
        if me.topology is not None and me.topology.world_size > 1:
            raise error or ArgumentError(
                "nothing names the launch that these ranks belong to",
                expected="a name that all of them give, and no other job does",
                remedy="--job NAME",
            )
        return [me]
    try:
        return roll_call(folder / folder_of(mark), me, timeout)
    except TopologyError:
        if error is not None:  # its own error says more than that nobody came to hear of it
            raise error from None
        raise


def _figures(me: ProcessReport, environ: Mapping[str, str], data: str | None) -> dict[str, Any]:
    assert me.topology is not None
    figures: dict[str, Any] = asdict(me.topology)
    figures = {"launcher": figures.pop("launcher"), **figures, "host": me.host, "pid": me.pid}
    figures["found_in"] = _source(environ)
    beside = _beside(environ)
    if beside:
        figures["also_set"] = beside
    if data is not None:
        figures |= {"steps": me.steps, "reads_first": list(me.first)}
    return figures


def _source(environ: Mapping[str, str]) -> str:
    """The variables that decided."""
    claim = detect_launcher(environ)
    if claim is not None:
        return claim.variables
    if "SLURM_JOB_ID" in environ:
        return "no variable: SLURM_JOB_ID without a step of tasks is one process (srun starts several)"
    return "no variable of a launcher: one process"


def _beside(environ: Mapping[str, str]) -> dict[str, str]:
    """Variables of other launchers that are set too, by the name of the launcher."""
    believed = detect_launcher(environ)
    rows = {row.name: read_launcher(row, environ) for row in (TORCHRUN, *OUTER)}
    name = "" if believed is None else believed.launcher
    return {each: claim.variables for each, claim in rows.items() if claim is not None and each != name}


def _print(
    together: list[ProcessReport],
    environ: Mapping[str, str],
    me: ProcessReport,
    data: str | None,
    *,
    as_json: bool,
) -> None:
    rows = []
    for one in together:
        assert one.topology is not None
        places = {field.name: getattr(one.topology, field.name) for field in fields(Topology)}
        row = {name: places[name] for name in ("rank", "node", "local_rank")} | {"host": one.host, "pid": one.pid}
        rows.append(row | ({"reads_first": list(one.first)} if data is not None else {}))
    if as_json:
        from json import dumps

        typer.echo(dumps({"ok": True, **_figures(me, environ, data), "ranks": rows}))
        return
    from rich.table import Table

    assert me.topology is not None
    nodes = f"{me.topology.num_nodes} node{'s' if me.topology.num_nodes > 1 else ''}"
    say(f"{len(rows)} rank{'s' if len(rows) > 1 else ''} agree ({me.topology.launcher}, {nodes})", style="bold")
    say(f"rank 0: {_source(environ)}", style=FAINT)
    table = Table(box=None, pad_edge=False)
    for name in rows[0]:
        table.add_column(name.replace("_", " "), overflow="fold", justify="left" if name == "host" else "right")
    for row in rows:
        table.add_row(*(clean(_cell(value)) for value in row.values()))
    out(table)


def _cell(value: Any) -> str:
    return " ".join(map(str, value)) if isinstance(value, list) else str(value)

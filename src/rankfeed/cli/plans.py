"""The command plan: what a plan costs, and what it gives each rank."""

import math
import time
import tracemalloc
from typing import Annotated, Any

import numpy as np
import typer

from rankfeed.cli.output import Json, show
from rankfeed.errors import ArgumentError
from rankfeed.plan import Plan, Schedule
from rankfeed.topology import Topology

Data = Annotated[str | None, typer.Argument(help="Path of a data set; or leave it out and give --samples.")]
Samples = Annotated[float | None, typer.Option(help="Number of samples, without data; 1e12 will do.")]
Blocks = Annotated[float, typer.Option(help="Number of equal blocks that --samples are cut into.")]
Ranks = Annotated[int, typer.Option(min=1, help="World size.")]
Workers = Annotated[int, typer.Option(min=0, help="Workers of each rank.")]
BatchSize = Annotated[int, typer.Option(min=1, help="Rows of a rank's batch.")]
Shuffle = Annotated[str, typer.Option(help="none, global or window.")]
Seed = Annotated[int, typer.Option(help="Seed of the order.")]
Window = Annotated[int, typer.Option(min=1, help='Samples mixed with each other under "window".')]
Lanes = Annotated[int | None, typer.Option(help='Streams of blocks; 64 under "window", else 1, if left out.')]
Tail = Annotated[str, typer.Option(help="even, drop or pad.")]
Epoch = Annotated[int, typer.Option(min=0, help="Which epoch.")]
Start = Annotated[int, typer.Option(min=0, help="Samples already consumed in it.")]


def plan(
    data: Data = None,
    samples: Samples = None,
    blocks: Blocks = 1,
    ranks: Ranks = 1,
    workers: Workers = 0,
    batch_size: BatchSize = 1,
    shuffle: Shuffle = "global",
    seed: Seed = 0,
    window: Window = 65536,
    lanes: Lanes = None,
    tail: Tail = "even",
    epoch: Epoch = 0,
    start: Start = 0,
    json: Json = False,
) -> None:
    """Steps, shares and the cost of a plan, with data or without.

    Example: rankfeed plan --samples 1e12 --blocks 1e6 --ranks 16384 --batch-size 32 --shuffle window
    """
    sizes = sizes_of(data, samples, blocks)
    tracemalloc.start()
    try:
        began = time.perf_counter()
        made = plan_from(sizes, shuffle, seed, window, lanes)
        # The last rank: all arithmetic is at its largest there.
        schedule = _schedule(made, ranks - 1, ranks, batch_size, epoch, start, tail)
        steps = len(schedule)
        ids = schedule.batch(0) if steps else np.empty(0, np.int64)
        first_batch = time.perf_counter() - began
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    least, most = (0, 0) if not steps else _share(schedule)
    figures: dict[str, Any] = {
        "samples": made.num_samples,
        "blocks": made.num_blocks,
        "global_batch": schedule.global_batch_size,
        "steps_of_each_rank": steps,
        "steps_of_each_worker": {"least": steps // max(1, workers), "most": -(-steps // max(1, workers))},
        "samples_of_each_rank": {"least": least, "most": most},
        "left_out": made.num_samples - schedule.end,
        "last_rank_reads_first": ids[:8].tolist(),
        "seconds_to_the_first_batch": first_batch,
        "peak_planning_bytes": peak,
        "nanoseconds_an_index": _speed(made, epoch),
        "fingerprint": made.fingerprint,
    }
    show(figures, as_json=json, title="plan")


def sizes_of(data: str | None, samples: float | None, blocks: float) -> Any:
    """Samples in each block: of a data set, or as told.

    Raises:
        ArgumentError: both are given, or neither, or numbers that cannot be.
    """
    if (data is None) == (samples is None):
        raise ArgumentError("give a data set or --samples, one of both", remedy="see --help")
    if samples is None:
        from rankfeed.sources import open as open_source

        return open_source(str(data)).blocks
    if not (math.isfinite(samples) and math.isfinite(blocks)):
        raise ArgumentError("--samples and --blocks must be numbers", found=f"{samples}, {blocks}")
    total, count = int(samples), int(blocks)
    if not 1 <= count <= max(1, total):
        raise ArgumentError("--blocks does not fit", expected=f"1 to {total}", found=count)
    size, larger = divmod(total, count)
    return total if count == 1 else np.full(count, size, np.int64) + (np.arange(count) < larger)


def plan_from(sizes: Any, shuffle: str, seed: int, window: int, lanes: int | None) -> Plan:
    """The order that is asked for."""
    from rankfeed.plan.plan import DEFAULT_LANES

    if lanes is None:
        lanes = DEFAULT_LANES.get(shuffle, 1)
    return Plan(sizes, shuffle=shuffle, seed=seed, window=window, lanes=lanes)  # type: ignore[arg-type]


def _schedule(made: Plan, rank: int, ranks: int, batch_size: int, epoch: int, start: int, tail: str) -> Schedule:
    topology = Topology(rank=rank, world_size=ranks, local_rank=rank, local_world_size=ranks)
    return Schedule(
        made,
        batch_size=batch_size,
        topology=topology,
        epoch=epoch,
        start=start,
        tail=tail,  # type: ignore[arg-type]
    )


def _share(schedule: Schedule) -> tuple[int, int]:
    """Least and most samples that a rank gets in the epoch, exactly."""
    least = most = 0
    full = max(0, len(schedule) - 2)
    for step in range(full, len(schedule)):
        low = schedule.position_after(step - 1) if step else schedule.start
        size = schedule.position_after(step) - low
        least += size // schedule.world_size
        most += -(-size // schedule.world_size)
    return full * schedule.batch_size + least, full * schedule.batch_size + most


def _speed(made: Plan, epoch: int) -> dict[str, float]:
    def nanoseconds(count: int) -> float:
        positions = np.arange(min(count, made.num_samples))
        times = []
        for _ in range(7):
            began = time.perf_counter()
            made.sample_ids(epoch, positions)
            times.append(time.perf_counter() - began)
        return sorted(times)[3] / len(positions) * 1e9

    return {f"in_batches_of_{count}": nanoseconds(count) for count in (256, 16384)}

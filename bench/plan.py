"""What planning costs: nanoseconds an index, time to the first batch, memory; beside numpy's and torch's own.

Ours is measured as a loader uses it, batch after batch along an epoch, at several sizes of the data set: the cost
should not depend on them. The others make a list as long as the data set, so they are measured once each, in a
process of its own, with the peak of its memory.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import resource
import statistics
import time
import tracemalloc
from collections.abc import Callable
from typing import Any

import numpy as np

from rankfeed.plan import Plan, Schedule
from rankfeed.topology import Topology

SAMPLES = (10**6, 10**9, 10**12)
BATCHES = (256, 16_384)


def plans(samples: int) -> dict[str, Plan]:
    return {
        "global": Plan(samples, shuffle="global"),
        "window, 64 lanes": Plan(samples, shuffle="window", lanes=64),
    }


def nanoseconds(work: Callable[[int], int], runs: int, seconds: float = 0.05) -> float:
    """Median nanoseconds an index of ``work(turn)``, which returns how many indices it made."""
    work(0)
    found = []
    turn = 1
    for _ in range(runs):
        indices, start = 0, time.perf_counter_ns()
        while (spent := time.perf_counter_ns() - start) < seconds * 1e9:
            indices += work(turn)
            turn += 1
        found.append(spent / indices)
    return statistics.median(found)


def per_index(runs: int) -> list[dict[str, Any]]:
    rows = []
    for samples in SAMPLES:
        for kind, plan in plans(samples).items():
            for batch in BATCHES:
                schedule = Schedule(plan, batch_size=batch, topology=Topology(rank=3, world_size=8))
                turns = samples // batch - 1

                def sample_ids(turn: int, plan: Plan = plan, batch: int = batch, turns: int = turns) -> int:
                    first = turn % turns * batch
                    return plan.sample_ids(0, np.arange(first, first + batch)).size

                def step(turn: int, schedule: Schedule = schedule) -> int:
                    return schedule.batch(turn % len(schedule)).size

                rows.append(
                    {
                        "plan": kind,
                        "samples": samples,
                        "batch": batch,
                        "sample_ids_ns": nanoseconds(sample_ids, runs),
                        "schedule_ns": nanoseconds(step, runs),
                    }
                )
    return rows


def first_batch(samples: int, blocks: int, ranks: int, runs: int) -> dict[str, Any]:
    """Seconds and peak memory from the sizes of the blocks to the first batch of a rank."""
    sizes = np.full(blocks, samples // blocks)

    def make() -> None:
        plan = Plan(sizes, shuffle="window", lanes=64)
        Schedule(plan, batch_size=256, topology=Topology(rank=ranks - 1, world_size=ranks)).batch(0)

    seconds = []
    for _ in range(runs):
        start = time.perf_counter()
        make()
        seconds.append(time.perf_counter() - start)
    tracemalloc.start()
    make()
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    return {
        "samples": samples,
        "blocks": blocks,
        "ranks": ranks,
        "first_batch_s": statistics.median(seconds),
        "peak_mib": peak / 2**20,
    }


def rankfeed_first(samples: int) -> None:
    Schedule(Plan(samples), batch_size=256, topology=Topology(rank=1, world_size=2)).batch(0)


def numpy_permutation(samples: int) -> None:
    np.random.default_rng(0).permutation(samples)[:256].copy()


def torch_random(samples: int) -> None:
    from torch.utils.data import RandomSampler

    next(iter(RandomSampler(range(samples))))


def torch_distributed(samples: int) -> None:
    from torch.utils.data.distributed import DistributedSampler

    next(iter(DistributedSampler(range(samples), num_replicas=2, rank=1)))  # type: ignore[arg-type]


OTHERS: dict[str, Callable[[int], None]] = {
    "rankfeed": rankfeed_first,
    "numpy permutation": numpy_permutation,
    "torch RandomSampler": torch_random,
    "torch DistributedSampler": torch_distributed,
}


def alone(name: str, samples: int, answer: Any) -> None:
    """In a process of its own: time to the first index, and how much the peak of the memory grew."""
    OTHERS[name](1000)  # imports, and whatever is made once
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    start = time.perf_counter()
    OTHERS[name](samples)
    seconds = time.perf_counter() - start
    grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    answer.send((seconds, grown / 1024))


def others(runs: int) -> list[dict[str, Any]]:
    spawn = multiprocessing.get_context("spawn")
    rows = []
    for name in OTHERS:
        for samples in (10**6, 10**7):
            found = []
            for _ in range(runs):
                answers, answer = spawn.Pipe(duplex=False)
                process = spawn.Process(target=alone, args=(name, samples, answer))
                process.start()
                answer.close()
                found.append(answers.recv())
                process.join()
            seconds, grown = (statistics.median(each) for each in zip(*found, strict=True))
            rows.append({"order": name, "samples": samples, "first_index_s": seconds, "grown_mib": grown})
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=5, help="runs of each, of which the median is taken")
    parser.add_argument("--json", action="store_true", help="print JSON")
    options = parser.parse_args()
    result = {
        "per_index": per_index(options.runs),
        "large": first_batch(10**12, 10**6, 16_384, options.runs),
        "others": others(min(3, options.runs)),
    }
    if options.json:
        print(json.dumps(result))
        return
    print(f"{'plan':<18}{'samples':>10}{'batch':>8}{'sample_ids':>14}{'Schedule.batch':>18}")
    for row in result["per_index"]:
        print(
            f"{row['plan']:<18}{row['samples']:>10.0e}{row['batch']:>8,}"
            f"{row['sample_ids_ns']:>8.1f} ns/id{row['schedule_ns']:>12.1f} ns/id"
        )
    large = result["large"]
    print(
        f"\n{large['samples']:.0e} samples in {large['blocks']:.0e} blocks, {large['ranks']:,} ranks: "
        f"first batch after {large['first_batch_s']:.3f} s, peak {large['peak_mib']:.0f} MiB\n"
    )
    for row in result["others"]:
        print(
            f"{row['order']:<26}{row['samples']:>10.0e}: first index after {row['first_index_s']:.4f} s, "
            f"{row['grown_mib']:.1f} MiB"
        )


if __name__ == "__main__":
    main()

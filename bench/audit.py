"""How fast an audit counts, and in how much memory: synthetic batches of ids, each once but for a few.

The ids of an epoch are those of a shuffled plan; three of them come twice, and two do not come. What the audit
says must be just that. Peak memory is the process's own (resident, less what it had before).
"""

from __future__ import annotations

import argparse
import json
import resource
import time
from collections.abc import Iterator

import numpy as np

import rankfeed as rf

BATCH = 4096


class Batches:
    """Ids of an epoch, with what is wrong."""

    def __init__(self, samples: int) -> None:
        self.plan, self.samples = rf.Plan(samples, seed=1), samples

    def __iter__(self) -> Iterator[dict[str, np.ndarray]]:
        for start in range(2, self.samples, BATCH):  # the first two positions are left out
            yield {"sample_id": self.plan.sample_ids(0, np.arange(start, min(start + BATCH, self.samples)))}
        yield {"sample_id": self.plan.sample_ids(0, np.arange(2, 5))}


def peak() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--samples", type=int, default=10**8)
    parser.add_argument("--memory", type=int, default=256, help="MiB that counting may take")
    parser.add_argument("--folder", help="where keys lie meanwhile")
    parser.add_argument("--json", action="store_true", help="print JSON")
    options = parser.parse_args()
    batches = Batches(options.samples)
    rf.audit([{"sample_id": [0]}])  # imports
    began, before = time.perf_counter(), peak()
    for _ in batches:
        pass
    made = time.perf_counter() - began
    began = time.perf_counter()
    report = rf.audit(batches, universe=options.samples, memory=options.memory << 20, folder=options.folder)
    seconds = time.perf_counter() - began
    (epoch,) = report.epochs
    if (epoch.repeated, epoch.missing, epoch.unknown) != (3, 2, 0):
        raise SystemExit(f"miscounted:\n{report}")
    result = {
        "samples": epoch.samples,
        "seconds": seconds,
        "seconds_to_make_the_ids": made,
        "samples_per_second": epoch.samples / seconds,
        "peak_mib": (peak() - before) >> 20,
    }
    if options.json:
        print(json.dumps(result))
        return
    print(
        f"{epoch.samples:,} samples counted exactly in {seconds:.1f} s ({epoch.samples / seconds:,.0f}/s; "
        f"making the ids alone takes {made:.1f} s), {result['peak_mib']} MiB more than before"
    )


if __name__ == "__main__":
    main()

"""The command `plan`: steps, shares and cost of a plan."""

import time
import tracemalloc
from typing import Any

import numpy as np

from rankfeed.cli import options
from rankfeed.cli.output import Json, show, show_findings
from rankfeed.diagnostics.verify.plans import poor_mixture, reading_of
from rankfeed.plan import measure_quality
from rankfeed.topology import Topology


@options.expand_options
def plan(
    data: options.PlanData = None,
    *,
    plan_options: options.PlanOptions,
    dataset_options: options.DatasetOptions,
    json: Json = False,
) -> None:
    """Compute steps, shares and cost of a plan.

    Example: rankfeed plan data/ --ranks 8 --workers 2 --batch-size 32
    Example: rankfeed plan --samples 1e12 --blocks 1e6 --ranks 16384 --batch-size 32 --shuffle window
    """
    plan_options.check_data(data)
    source = None if data is None else dataset_options.open([data])
    sizes = plan_options.block_sizes(source)
    batch_size, ranks, epoch = plan_options.batch_size, plan_options.ranks, plan_options.epoch
    tracemalloc.start()
    try:
        began = time.perf_counter()
        made = plan_options.plan(sizes)
        # The last rank has the largest numbers in all computations.
        last = Topology(rank=ranks - 1, world_size=ranks)
        schedule = plan_options.schedule(made, last)
        steps = len(schedule)
        ids = schedule.batch(0) if steps else np.empty(0, np.int64)
        first_batch = time.perf_counter() - began
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    ending = range(max(0, steps - 2), steps)  # only the last two steps can be smaller
    shares = [[samples for _, samples in schedule.shares(step)] for step in ending]
    full = (steps - len(ending)) * batch_size
    workers = max(1, plan_options.workers)
    figures: dict[str, Any] = {
        "samples": made.num_samples,
        "blocks": made.num_blocks,
        "global_batch": schedule.global_batch_size,
        "steps_of_each_rank": steps,
        "steps_of_each_worker": {"least": steps // workers, "most": -(-steps // workers)},
        "samples_of_each_rank": {"least": full + sum(map(min, shares)), "most": full + sum(map(max, shares))},
        "left_out": made.num_samples - schedule.end,
        "last_rank_reads_first": ids[:8].tolist(),
        "seconds_to_the_first_batch": first_batch,
        "peak_planning_bytes": peak,
        "fingerprint": made.fingerprint,
    }
    quality = measure_quality(made, batch_size=batch_size, world_size=ranks, epoch=epoch)
    reading = reading_of(made, source, batch_size=batch_size, world_size=ranks, epoch=epoch)
    figures["mixture"] = vars(quality)
    figures["reading_of_a_rank"] = vars(reading)
    findings = [*poor_mixture(made, quality)]
    if json:
        figures["findings"] = [finding.as_dict() for finding in findings]
    show(figures, as_json=json, title="plan")
    if findings and not json:
        show_findings(findings, None, "")

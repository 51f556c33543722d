"""One rank of a job that packs: `rank_job.py SOURCE DEST TOLD FAULT PATIENCE`. What came of it goes into TOLD."""

import json
import os
import signal
import sys
import time
from pathlib import Path

import numpy as np

import rankfeed as rf

source, dest, told, fault, patience = sys.argv[1:]
here = rf.Topology.detect()
done = 0


def mapped(sample: dict[str, object], rng: np.random.Generator) -> list[dict[str, object]]:
    global done
    done += 1
    time.sleep(0.001)
    kind, _, rank = fault.partition(":")
    if kind and here.rank == int(rank) and done == 150:
        if kind == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        raise ValueError("the user's own")
    return [{"id": sample["id"], "noise": rng.random()}] * int(rng.integers(3))


if fault == "late:1" and here.rank == 1:
    time.sleep(3)
opened = rf.open(source)
if fault == "other:1" and here.rank == 1:
    opened = opened.select(range(100))
start = time.monotonic()
try:
    packed = rf.pack(
        opened,
        dest,
        runner="ranks",
        map=mapped,
        seed=4,
        shard_bytes=1000,
        patience=float(patience),
        key=os.environ.get("PACK_KEY", ""),
        progress=False,
    )
    outcome = {"fingerprint": packed.fingerprint, "calls": done}
except rf.errors.RankfeedError as error:
    outcome = {"error": str(error)}
Path(told, f"{here.rank}.json").write_text(json.dumps(outcome))

"""One rank of a job that packs: `rank_job.py SOURCE DEST TOLD FAULT PATIENCE`. What came of it goes into TOLD."""

import json
import os
import signal
import sys
import time
from pathlib import Path

import numpy as np

import rankfeed as rf


class Mapped:
    """Makes none, one or two samples of one, until the fault that it was given."""

    def __init__(self, fault: str, awaited: Path | None, happened: Path) -> None:
        self.fault = fault
        self.awaited = awaited
        self.happened = happened
        self.calls = 0

    def __call__(self, sample: dict[str, object], rng: np.random.Generator) -> list[dict[str, object]]:
        self.calls += 1
        time.sleep(0.001)
        if self.calls == 60 and self.awaited is not None:
            # Else this rank might do all of the work before the other has come to its fault.
            for _ in range(600):
                if self.awaited.exists():
                    break
                time.sleep(0.05)
        if self.calls == 150 and self.fault in ("kill", "raise"):
            self.happened.touch()
            if self.fault == "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            raise ValueError("the user's own")
        return [{"id": sample["id"], "noise": rng.random()}] * int(rng.integers(3))


def main(source: str, dest: str, told: str, fault: str, patience: str) -> None:
    here = rf.Topology.detect()
    kind, _, rank = fault.partition(":")
    mine = kind if kind and here.rank == int(rank) else ""
    if mine == "late":
        time.sleep(3)
    opened = rf.open(source)
    if mine == "other":
        opened = opened.select(range(100))
    happened = Path(told, "happened")
    mapped = Mapped(mine, happened if kind in ("kill", "raise") and not mine else None, happened)
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
        outcome: dict[str, object] = {"fingerprint": packed.fingerprint, "calls": mapped.calls}
    except rf.errors.RankfeedError as error:
        outcome = {"error": str(error)}
    Path(told, f"{here.rank}.json").write_text(json.dumps(outcome))


if __name__ == "__main__":
    main(*sys.argv[1:])

"""One loader in a process of its own: ``python -m bench.contestant PEER WORKLOAD SAMPLES FOLDER [COMMAND]``.

Without a command it reads seconds from its input, a line each, takes batches for so long, and answers with
a JSON object. The commands ``write``, ``first`` and ``resume`` do one thing and end.
"""

from __future__ import annotations

import json
import os
import pickle
import sys
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from bench.peers import PEERS, Peer
from bench.workloads import WORKLOADS, consume


def private_bytes() -> int:
    """Anonymous and shared memory of this process and its descendants."""
    parents, sizes = {}, {}
    for path in Path("/proc").glob("[0-9]*/status"):
        try:
            fields = dict(line.split(":", 1) for line in path.read_text().splitlines())
        except OSError:  # it has ended
            continue
        parents[int(path.parent.name)] = int(fields["PPid"])
        kib = [int(fields.get(each, "0").split()[0]) for each in ("RssAnon", "RssShmem")]
        sizes[int(path.parent.name)] = sum(kib) << 10
    total = 0
    for process in sizes:
        ancestor = process
        while ancestor not in (0, os.getpid()):
            ancestor = parents.get(ancestor, 0)
        total += sizes[process] if ancestor else 0
    return total


def timed(peer: Peer, seconds: float) -> dict[str, float]:
    """Samples of the epochs begun in so many seconds; the first one is left when they are over."""
    began, samples, epochs = time.perf_counter(), 0, 0
    while time.perf_counter() - began < seconds:
        for batch in peer.epoch():
            samples += consume(batch)
            if not epochs and time.perf_counter() - began > seconds:
                break
        epochs += 1
    return {"samples": samples, "seconds": time.perf_counter() - began, "bytes": private_bytes()}


def first(batches: Iterable[Any], began: float) -> dict[str, float]:
    """Seconds to the first batch."""
    consume(next(iter(batches)))
    return {"seconds": time.perf_counter() - began}


def run(peer: Peer, command: str, state: Path) -> dict[str, float]:
    """What the command says: see the module."""
    began = time.perf_counter()
    if command == "write":
        if not peer.written_by:
            peer.write()
        found = peer.state_after(peer.samples // peer.batch_size * 99 // 100)
        if found is not None:
            state.write_bytes(pickle.dumps(found))
        return {"seconds": time.perf_counter() - began}
    if command == "resume":
        return first(peer.resume(pickle.loads(state.read_bytes())), began)  # noqa: S301 - written by this file
    return first(peer.epoch(), began)


def main() -> None:
    name, workload, samples, folder, *command = sys.argv[1:]
    torch.set_num_threads(1)
    peer = PEERS[name](workload, WORKLOADS[workload], int(samples), Path(folder))
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what libraries print
    if command:
        answer = run(peer, command[0], Path(folder, f"{name}.state"))
        print(json.dumps(answer), file=answers, flush=True)
    for line in () if command else sys.stdin:
        print(json.dumps(timed(peer, float(line))), file=answers, flush=True)


if __name__ == "__main__":
    main()

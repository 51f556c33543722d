"""Each format over real ranks and every kind of worker: each sample once, the bytes of its own library.

The global batch size is fixed, so the global batches must be the same whatever the number of ranks.
"""

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from tests.launch.jobs.formats import GLOBAL_BATCH
from tests.sources import writers
from tests.sources.compare import digests
from tests.support import jobs
from tests.support.marks import slow

SCRIPT = Path(__file__).parent / "jobs" / "formats.py"
FORMATS = list(writers.FORMATS)
#: A format for each kind of worker: tables, archives, files with an index of their own.
FEW = ["lance", "webdataset", "parquet", "mds", "packed"]
#: Kind of worker and their number.
WORKERS = (("thread", 0), ("thread", 2), ("process", 2), ("stock", 0), ("stock", 2))
RANKS = (1, 2, 3, 4)
#: Steps of an epoch: the rest of the samples goes into the last two.
STEPS = -(-writers.COUNT // GLOBAL_BATCH)

Cell = dict[str, Any]
#: What each rank said of a cell.
Told = list[dict[str, Any]]


def cell(name: str, number: int, **options: Any) -> Cell:
    """A cell of a format; its kind of worker is chosen by number."""
    kind, workers = WORKERS[number % len(WORKERS)]
    return {"format": name, "kind": kind, "workers": workers, "shuffle": "global", **options}


class Table:
    """Data of every format, and launches over them."""

    def __init__(self, folder: Path, names: list[str]) -> None:
        self.folder = folder
        self.written = {name: writers.make(name, folder / "data" / name) for name in names}
        self.own = {name: dict(enumerate(digests(each.expected))) for name, each in self.written.items()}
        #: Global batches by format and order, of whichever cell was first.
        self.batches: dict[tuple[str, str], list[list[int]]] = {}
        self.tally: Counter[str] = Counter()

    def launch(self, ranks: int, cells: list[Cell], timeout: float) -> list[Told]:
        """Run cells on that many ranks, and check of each what can be said of it alone."""
        plan = self.folder / "plan.json"
        folders = {name: str(each.folder) for name, each in self.written.items()}
        plan.write_text(json.dumps({"folders": folders, "cells": cells}))
        jobs.run(jobs.torchrun(ranks, SCRIPT, plan, self.folder), self.folder / "log", timeout)
        by_rank = [json.loads((self.folder / f"rank{rank}.json").read_text()) for rank in range(ranks)]
        told = [list(each) for each in zip(*by_rank, strict=True)]
        for one, said in zip(cells, told, strict=True):
            what = {"ranks": ranks, **one}
            assert len({len(rank["steps"]) for rank in said}) == 1, f"unequal steps: {what}"
            assert all(rank["state"] == said[0]["state"] for rank in said), f"unequal states: {what}"
            for rank in said:
                own = self.own[one["format"]]
                wrong = [number for number, each in rank["digests"].items() if own[int(number)] != each]
                assert not wrong, f"samples {wrong} are not those of the format's own library: {what}"
            self.tally[one["format"]] += 1
        return told

    def whole(self, ranks: int, cells: list[Cell], timeout: float) -> None:
        """Cells that read an epoch each."""
        for one, said in zip(cells, self.launch(ranks, cells, timeout), strict=True):
            self.check_epoch({"ranks": ranks, **one}, global_batches(said))

    def check_epoch(self, what: Cell, batches: list[list[int]]) -> None:
        """Each sample once, in the steps that every other topology takes."""
        counted = Counter(sample for step in batches for sample in step)
        assert counted == Counter(range(writers.COUNT)), f"missing or repeated: {what}"
        first = self.batches.setdefault((what["format"], what["shuffle"]), batches)
        assert batches == first, f"other global batches: {what}"


def global_batches(said: Told) -> list[list[int]]:
    """Samples of each step over all ranks."""
    by_rank = (rank["steps"] for rank in said)
    return [sorted(sample for ids in step for sample in ids) for step in zip(*by_rank, strict=True)]


@pytest.mark.timeout(600)
@pytest.mark.parametrize("names", [FEW, slow(FORMATS)], ids=["few", "all"])
def test_each_format_delivers_each_sample_once_over_ranks_workers_and_a_resume(
    names: list[str], tmp_path: Path
) -> None:
    """A part of all combinations: each format's second epoch is read by 2 ranks and resumed by one.

    The one rank has another kind of worker; beside it, each number of ranks reads an epoch from its start.
    """
    order = (2, 1)
    table = Table(tmp_path, names)
    resumed: dict[str, list[list[int]]] = {name: [] for name in names}
    for leg, ranks in enumerate(order):
        parts, whole = [], []
        for number, name in enumerate(names):
            stop = {"stop": 2, "save": f"{name}.{leg}"} if leg + 1 < len(order) else {}
            load = {"load": f"{name}.{leg - 1}"} if leg else {}
            # Starting worker processes takes seconds each: here those of one format.
            start = {"start": "spawn"} if name == "lance" else {}
            parts.append(cell(name, number + leg, **load, **stop, **start))
            if (number + leg) % 2:
                whole.append(cell(name, number + leg + 2))
        told = table.launch(ranks, [*parts, *whole], 200)
        for part, said in zip(parts, told, strict=False):
            resumed[part["format"]] += global_batches(said)
        for one, said in zip(whole, told[len(parts) :], strict=True):
            table.check_epoch({"ranks": ranks, **one}, global_batches(said))
    for name, batches in resumed.items():
        table.check_epoch({"format": name, "shuffle": "global", "resumed over ranks": order}, batches)
    print(f"\n{table.tally.total()} cells: {dict(table.tally)}")


@pytest.mark.soak
@pytest.mark.parametrize("names", [FORMATS[part::4] for part in range(4)], ids="+".join)
def test_each_format_delivers_each_sample_once_in_every_combination_of_ranks_workers_and_resume(
    names: list[str], tmp_path: Path
) -> None:
    """Every number of ranks with every kind of worker, and every pair of numbers of ranks for a resume."""
    table = Table(tmp_path, names)
    halves: dict[str, list[list[int]]] = {}
    for ranks in RANKS:
        cells, stops = [], []
        for name in names:
            cells += [cell(name, number) for number in range(len(WORKERS))]
            cells += [cell(name, number, shuffle="window") for number in range(3)]
            if ranks == 2:  # new workers import everything, which takes seconds each
                cells += [cell(name, i, start=start) for i in (2, 4) for start in ("spawn", "forkserver")]
            # A state of this number of ranks for each number that resumes, after one step, some, all but one.
            stops += [
                cell(
                    name,
                    kind + after,
                    stop=(1 + kind * 2) % (STEPS - 1) + 1,
                    save=f"{name}.{ranks}.{after}.{kind}",
                )
                for kind in range(len(WORKERS))
                for after in RANKS
            ]
        table.whole(ranks, cells, 1500)
        for one, said in zip(stops, table.launch(ranks, stops, 1500), strict=True):
            halves[one["save"]] = global_batches(said)
    for ranks in RANKS:
        rests = [
            cell(name, 2 * kind + before + 1, load=f"{name}.{before}.{ranks}.{kind}")
            for name in names
            for kind in range(len(WORKERS))
            for before in RANKS
        ]
        for one, said in zip(rests, table.launch(ranks, rests, 1500), strict=True):
            table.check_epoch({"ranks": ranks, **one}, halves[one["load"]] + global_batches(said))
    print(f"\n{dict(table.tally)} cells, {len(halves)} resumptions: each of {writers.COUNT} samples once")

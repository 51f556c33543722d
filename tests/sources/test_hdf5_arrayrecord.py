"""HDF5, ArrayRecord and databases through from_dataset: each sample once, as it was written."""

import multiprocessing
import sqlite3
from collections import Counter
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
import torch
from array_record.python.array_record_data_source import ArrayRecordDataSource
from array_record.python.array_record_module import ArrayRecordWriter
from tests.support.marks import slow

import rankfeed as rf

ROWS = 61


class Lazy(torch.utils.data.Dataset[Any]):
    """Rows of files, opened in the process that reads: handles of these libraries do not survive a fork."""

    def __init__(self, opening: Callable[[], Any], read: Callable[[Any, list[int]], list[dict[str, Any]]]) -> None:
        self._opening, self._read = opening, read
        self._handle: Any = None

    def __len__(self) -> int:
        return ROWS

    def __getitem__(self, index: int) -> dict[str, Any]:
        return self.__getitems__([index])[0]

    def __getitems__(self, indices: list[int]) -> list[dict[str, Any]]:
        if self._handle is None:
            self._handle = self._opening()
        return self._read(self._handle, indices)

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_handle": None}


def read_hdf5(file: Any, indices: list[int]) -> list[dict[str, Any]]:
    rows, places = np.unique(indices, return_inverse=True)  # HDF5 takes rising numbers only
    columns = {name: file[name][rows][places] for name in file}
    return [{name: values[place] for name, values in columns.items()} for place in range(len(indices))]


def read_records(source: Any, indices: list[int]) -> list[dict[str, Any]]:
    """Records of 8 bytes for a number and a text."""
    records = source.__getitems__(indices)
    return [{"y": int.from_bytes(record[:8], "little"), "text": record[8:].decode()} for record in records]


def read_database(path: str, indices: list[int]) -> list[dict[str, Any]]:
    database = sqlite3.connect(f"file:{path}?mode=ro", uri=True)  # a handle is cheap, and is not kept
    marks = ",".join("?" * len(indices))
    texts = dict(database.execute(f"SELECT id, text FROM rows WHERE id IN ({marks})", indices))
    database.close()
    return [{"y": index, "text": texts[index]} for index in indices]


def rows() -> list[dict[str, Any]]:
    draw = np.random.default_rng(0)
    return [{"x": draw.standard_normal(3).astype(np.float32), "y": y, "text": f"row {y} ü"} for y in range(ROWS)]


def hdf5(folder: Path) -> Any:
    with h5py.File(folder / "rows.h5", "w") as file:
        file["x"] = np.stack([row["x"] for row in rows()])
        file.create_dataset("y", data=np.arange(ROWS), chunks=(7,), compression="gzip")
    return Lazy(partial(h5py.File, str(folder / "rows.h5")), read_hdf5)


def records(folder: Path) -> Any:
    paths = [str(folder / f"rows-{part}.array_record") for part in range(3)]
    for part, path in enumerate(paths):
        writer = ArrayRecordWriter(path, "group_size:4")
        for row in rows()[part * ROWS // 3 : (part + 1) * ROWS // 3]:
            writer.write(row["y"].to_bytes(8, "little") + row["text"].encode())
        writer.close()
    return Lazy(partial(ArrayRecordDataSource, paths), read_records)


def table(folder: Path) -> Any:
    database = sqlite3.connect(folder / "rows.db")
    database.execute("CREATE TABLE rows (id INTEGER PRIMARY KEY, text TEXT)")
    database.executemany("INSERT INTO rows VALUES (?, ?)", [(row["y"], row["text"]) for row in rows()])
    database.commit()
    database.close()
    return Lazy(partial(str, folder / "rows.db"), read_database)


PROCESSES = {"worker_kind": "process", "num_workers": 2}
MAKERS = {"hdf5": hdf5, "arrayrecord": records, "sqlite": table}


@pytest.mark.parametrize(
    ("kind", "workers"),
    [
        *((kind, {}) for kind in MAKERS),
        ("hdf5", PROCESSES),
        slow("arrayrecord", PROCESSES),  # spawned: each imports torch
        slow("sqlite", PROCESSES),
    ],
)
def test_rows_of_hdf5_arrayrecord_and_sqlite_are_delivered_once_and_unchanged(
    kind: str, workers: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if kind == "arrayrecord":  # its library's threads may end a child that is forked after they ran
        spawn = multiprocessing.get_context("spawn")
        monkeypatch.setattr(multiprocessing, "get_context", lambda method=None: spawn)
    dataset = MAKERS[kind](tmp_path)
    _ = dataset[0]  # open here already, as after a look at the data
    written = rows()
    seen: Counter[int] = Counter()
    steps = []
    for rank in range(2):
        source = rf.from_dataset(dataset)
        batches = list(rf.Loader(source, 4, shuffle=True, topology=rf.Topology(rank, 2), **workers))
        steps.append(len(batches))
        for batch in batches:
            seen.update(batch["y"].tolist())
            for place, y in enumerate(batch["y"].tolist()):
                if "x" in batch:
                    assert batch["x"][place].numpy().tobytes() == written[y]["x"].tobytes()
                if "text" in batch:
                    assert batch["text"][place] == written[y]["text"]
    assert seen == Counter(range(ROWS))
    assert steps[0] == steps[1]

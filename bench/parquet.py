"""Rows per second of the loader on Parquet, beside what one would use else, in one run.

- scanned: a torch DataLoader over pyarrow's dataset scanner, which reads in the files' order with all processors;
  page checksums are verified, as ours are. The better of 0 and 2 workers is what ratios are to. Each epoch is
  decoded again; ours keeps what was decoded, so that the first epoch, later ones, and three from the opening on
  are told apart.
- bare scanner: the same without a DataLoader, in one process, and without checksums: no loader, but a bound.
- buffer: a torch DataLoader over an IterableDataset that reads row groups in a drawn order through a shuffle
  buffer of 10,000 rows, as is usual.
- datasets: Hugging Face `load_dataset("parquet", streaming=True)` with a shuffle buffer of the same size, stopped
  after 20,000 rows.

Workloads: T, tokens: samples of 512 int32. R, ragged: lists of 16 to 240 float32. F, a flat table of 12 numbers.

``--large`` compares rows of a megabyte, all in one row group, with pyarrow alone: seconds from opening to the last
batch, and the peak of anonymous memory above that after imports, each run in a process of its own.

- iter_batches: pyarrow's reader in the file's order; batches are not converted.
- read_row_group: the row group is decoded as a whole, and its rows are taken in a random order.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.dataset as ds
import pyarrow.parquet as pq
import torch
import torch.utils.data
from bench.turns import in_turn, medians

import rankfeed as rf

BATCH, BUFFER, GROUP = 256, 10_000, 4_000
#: Rows after which the slowest are stopped.
ENOUGH = 20_000


def tokens(rows: int, rng: np.random.Generator) -> pa.Table:
    values = pa.array(rng.integers(0, 50_000, rows * 512, dtype=np.int32))
    return pa.table({"x": pa.FixedSizeListArray.from_arrays(values, 512)})


def ragged(rows: int, rng: np.random.Generator) -> pa.Table:
    offsets = np.concatenate([[0], np.cumsum(rng.integers(16, 241, rows))])
    values = pa.array(rng.standard_normal(int(offsets[-1]), dtype=np.float32))
    return pa.table({"x": pa.LargeListArray.from_arrays(pa.array(offsets), values)})


def flat(rows: int, rng: np.random.Generator) -> pa.Table:
    return pa.table({f"c{number}": rng.standard_normal(rows) for number in range(12)})


WORKLOADS: dict[str, tuple[Callable[..., pa.Table], int]] = {
    "T tokens": (tokens, 200_000),
    "R ragged": (ragged, 400_000),
    "F flat": (flat, 1_000_000),
}


def tensors(batch: pa.RecordBatch) -> dict[str, torch.Tensor]:
    """A batch as tensors: dense columns as they are, ragged ones padded."""
    out = {}
    for name in batch.schema.names:
        column = batch.column(name)
        if pa.types.is_fixed_size_list(column.type):
            array = column.flatten().to_numpy().reshape(len(column), -1)
        elif pa.types.is_large_list(column.type) or pa.types.is_list(column.type):
            lengths = np.diff(column.offsets.to_numpy())
            array = np.zeros((len(column), int(lengths.max())), np.float32)
            array[np.arange(array.shape[1]) < lengths[:, None]] = column.flatten().to_numpy()
        else:
            array = column.to_numpy()
        out[name] = torch.from_numpy(array if array.flags.writeable else array.copy())
    return out


def padded(rows: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
    """Rows of arrays as tensors."""
    out = {}
    for name in rows[0]:
        values = [torch.as_tensor(row[name]) for row in rows]
        same = values[0].ndim == 0 or len({len(value) for value in values}) == 1
        out[name] = torch.stack(values) if same else torch.nn.utils.rnn.pad_sequence(values, batch_first=True)
    return out


class Buffered(torch.utils.data.IterableDataset[dict[str, Any]]):
    """Row groups in a drawn order, rows drawn from a buffer."""

    def __init__(self, folder: Path) -> None:
        self.files = sorted(folder.glob("*.parquet"))

    def __iter__(self) -> Iterator[dict[str, Any]]:
        info = torch.utils.data.get_worker_info()
        number, count = (0, 1) if info is None else (info.id, info.num_workers)
        groups = [(file, group) for file in self.files for group in range(pq.ParquetFile(file).num_row_groups)]
        draw = random.Random(0)
        draw.shuffle(groups)
        held: list[dict[str, Any]] = []
        for file, group in groups[number::count]:
            table = pq.ParquetFile(file).read_row_group(group)
            columns = {name: self._rows(table.column(name).combine_chunks()) for name in table.column_names}
            for values in zip(*columns.values(), strict=True):
                row = dict(zip(columns, values, strict=True))
                if len(held) < BUFFER:
                    held.append(row)
                    continue
                place = draw.randrange(BUFFER)
                held[place], row = row, held[place]
                yield row
        draw.shuffle(held)
        yield from held

    @staticmethod
    def _rows(column: Any) -> Any:
        column = column.chunk(0) if isinstance(column, pa.ChunkedArray) else column
        if pa.types.is_fixed_size_list(column.type):
            return column.flatten().to_numpy().reshape(len(column), -1).copy()
        if pa.types.is_large_list(column.type):
            offsets = column.offsets.to_numpy()
            return np.split(column.flatten().to_numpy().copy(), (offsets - offsets[0])[1:-1])
        return column.to_numpy().copy()


class Scanned(torch.utils.data.IterableDataset[dict[str, Any]]):
    """The batches of pyarrow's scanner; a worker has every n-th file."""

    def __init__(self, folder: Path) -> None:
        self.files = [str(path) for path in sorted(folder.glob("*.parquet"))]

    def __iter__(self) -> Iterator[dict[str, Any]]:
        info = torch.utils.data.get_worker_info()
        files = self.files if info is None else self.files[info.id :: info.num_workers]
        checked = ds.ParquetFragmentScanOptions(page_checksum_verification=True)
        dataset = ds.dataset(files, format=ds.ParquetFileFormat(default_fragment_scan_options=checked))
        return (tensors(batch) for batch in dataset.to_batches(batch_size=BATCH))


def scanner(folder: Path) -> int:
    dataset = ds.dataset(folder, format="parquet")
    return sum(len(next(iter(tensors(batch).values()))) for batch in dataset.to_batches(batch_size=BATCH))


def drain(loader: Any, epochs: int = 1) -> int:
    return sum(len(next(iter(batch.values()))) for _ in range(epochs) for batch in loader)


def hugging_face(folder: Path) -> int:
    import datasets

    datasets.disable_progress_bars()
    files = {"train": [str(path) for path in sorted(folder.glob("*.parquet"))]}
    stream = datasets.load_dataset("parquet", data_files=files, split="train", streaming=True)
    stream = stream.shuffle(seed=0, buffer_size=BUFFER).with_format("numpy").take(ENOUGH)
    return drain(torch.utils.data.DataLoader(stream, batch_size=BATCH, collate_fn=padded))


def measure(name: str, scale: float, runs: int, folder: Path, *, in_order: bool = False) -> dict[str, Any]:
    make, rows = WORKLOADS[name]
    rows = max(4 * BATCH, int(rows * scale))
    rng = np.random.default_rng(0)
    group = GROUP if name != "F flat" else 10 * GROUP
    for number in range(4):
        table = make(rows // 4, rng)
        pq.write_table(table, folder / f"{number}.parquet", row_group_size=group, write_page_checksum=True)
    rows = rows // 4 * 4
    contestants: dict[str, Callable[[], int]] = {"bare scanner (in order)": lambda: scanner(folder)}
    for workers in (0, 2):
        scanned = torch.utils.data.DataLoader(Scanned(folder), batch_size=None, num_workers=workers)
        contestants[f"scanned (in order), {workers} workers"] = partial(drain, scanned)

    def ours(**options: Any) -> rf.Loader:
        source = rf.open(folder, format="parquet")
        return rf.Loader(source, BATCH, seed=1, topology=rf.Topology(), **options)

    for label, options in {
        "rankfeed, in order": {},
        "rankfeed, in order, 2 threads": {"num_workers": 2},
        "rankfeed, shuffled": {"shuffle": True},
        "rankfeed, shuffled, 2 threads": {"shuffle": True, "num_workers": 2},
    }.items():
        # Opened again, so that nothing is decoded yet; and once for all epochs, the first of which warms up.
        contestants[label] = lambda options=options: drain(ours(**options))  # type: ignore[misc]
        if not options.get("shuffle"):
            contestants[f"{label}, three epochs"] = lambda options=options: drain(ours(**options), 3)  # type: ignore[misc]
        contestants[f"{label}, later epochs"] = partial(drain, ours(**options))
    for workers in (0, 2):
        contestants[f"buffer, {workers} workers"] = lambda workers=workers: drain(  # type: ignore[misc]
            torch.utils.data.DataLoader(
                Buffered(folder),
                batch_size=BATCH,
                num_workers=workers,
                collate_fn=padded,
                persistent_workers=False,
            )
        )
    contestants["datasets, streaming"] = lambda: hugging_face(folder)

    def checked(label: str) -> int:
        done = contestants[label]()
        expected = min(rows, ENOUGH) if label.startswith("datasets") else rows
        if done != expected * (3 if label.endswith("three epochs") else 1):
            raise SystemExit(f"{label} delivered {done}, not {expected} rows an epoch")
        return done

    if in_order:
        contestants = {label: contestant for label, contestant in contestants.items() if "in order" in label}
    rates = medians(in_turn({label: partial(checked, label) for label in contestants}, runs))
    best = max(value for label, value in rates.items() if label.startswith("scanned"))
    ratios = {label: value / best for label, value in rates.items()}
    return {"workload": name, "samples": rows, "rows_per_second": rates, "ratio": ratios}


LARGE_ROW, LARGE_BATCH = 1 << 20, 8
LARGE_KINDS = ("bytes", "text", "lists", "fixed")


def large_rows(kind: str, rows: int, rng: np.random.Generator) -> pa.Table:
    """Rows of a megabyte: images or documents, or arrays of float32 as lists."""
    if kind == "bytes":
        return pa.table({"x": pa.array([rng.bytes(LARGE_ROW) for _ in range(rows)], pa.large_binary())})
    if kind == "text":
        words = np.array([f"word{number} " for number in range(5000)])
        text = ("".join(words[rng.integers(0, len(words), LARGE_ROW // 8)]) for _ in range(rows))
        return pa.table({"x": pa.array(text, pa.large_string())})
    values = pa.array(rng.standard_normal(rows * LARGE_ROW // 4, dtype=np.float32))
    if kind == "fixed":
        return pa.table({"x": pa.FixedSizeListArray.from_arrays(values, LARGE_ROW // 4)})
    return pa.table({"x": pa.LargeListArray.from_arrays(np.arange(rows + 1) * (LARGE_ROW // 4), values)})


def iterate_batches(path: str) -> int:
    file = pq.ParquetFile(path, pre_buffer=False, buffer_size=1 << 20, page_checksum_verification=True)
    return sum(len(batch) for batch in file.iter_batches(LARGE_BATCH, use_threads=False))


def take_from_row_group(path: str) -> int:
    table = pq.ParquetFile(path, page_checksum_verification=True).read_row_group(0, use_threads=False)
    order = np.random.default_rng(0).permutation(len(table))
    return sum(len(table.take(order[first : first + LARGE_BATCH])) for first in range(0, len(table), LARGE_BATCH))


def load_large(path: str, shuffle: Any) -> int:
    loader = rf.Loader(rf.open(path), LARGE_BATCH, shuffle=shuffle, ragged="list", topology=rf.Topology())
    return sum(len(batch["x"]) for batch in loader)


LARGE_CONTESTANTS: dict[str, Callable[[str], int]] = {
    "iter_batches (in order)": iterate_batches,
    "rankfeed, in order": partial(load_large, shuffle=False),
    "read_row_group (random order)": take_from_row_group,
    "rankfeed, shuffle=True": partial(load_large, shuffle=True),
    "rankfeed, shuffle='global'": partial(load_large, shuffle="global"),
}


def anonymous_bytes() -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith("RssAnon"))


def contend(label: str, path: str) -> dict[str, float]:
    """Seconds and peak memory of one contestant, in this process."""
    for module in ("loading", "sources.parquet.parquet_source"):  # which rankfeed imports at the first use
        importlib.import_module(f"rankfeed.{module}")
    before, done = anonymous_bytes(), threading.Event()
    peak = before

    def sample() -> None:
        nonlocal peak
        while not done.wait(0.002):
            peak = max(peak, anonymous_bytes())

    sampler = threading.Thread(target=sample, daemon=True)  # an error ends the process
    sampler.start()
    began = time.perf_counter()
    rows = LARGE_CONTESTANTS[label](path)
    seconds = time.perf_counter() - began
    done.set()
    sampler.join()
    return {"rows": rows, "seconds": seconds, "MiB": (peak - before) / 2**20}


def measure_large(kind: str, mib: int, runs: int, folder: Path) -> dict[str, Any]:
    path = folder / "large.parquet"
    pq.write_table(large_rows(kind, mib, np.random.default_rng(0)), path, row_group_size=mib)
    results: dict[str, list[dict[str, float]]] = {label: [] for label in LARGE_CONTESTANTS}
    for _ in range(runs):
        for label, measured in results.items():
            command = [sys.executable, "-m", "bench.parquet", "--contestant", label, str(path)]
            measured.append(
                json.loads(subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout)
            )
            if measured[-1]["rows"] != mib:
                raise SystemExit(f"{label} delivered {measured[-1]['rows']}, not {mib} rows")
    middle = {
        label: {key: statistics.median(run[key] for run in measured) for key in ("seconds", "MiB")}
        for label, measured in results.items()
    }
    return {"workload": f"{kind} of 1 MiB", "MiB": mib, "contestants": middle}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--scale", type=float, default=1.0, help="share of the full number of samples")
    parser.add_argument("--runs", type=int, default=3, help="counted runs of each (after one to warm up)")
    parser.add_argument("--in-order", action="store_true", help="leave out what shuffles")
    parser.add_argument("--only", choices=[name.split()[0] for name in WORKLOADS], help="one workload")
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument(
        "--large", nargs="*", choices=LARGE_KINDS, help="rows of a megabyte of these kinds, or all"
    )
    parser.add_argument("--mib", type=int, default=480, help="size of the row group with --large")
    parser.add_argument("--contestant", nargs=2, metavar=("LABEL", "PATH"), help="one run of --large")
    options = parser.parse_args()
    if options.contestant is not None:
        print(json.dumps(contend(*options.contestant)))
        return
    if options.large is not None:
        for kind in options.large or LARGE_KINDS:
            with tempfile.TemporaryDirectory() as folder:
                row = measure_large(kind, options.mib, options.runs, Path(folder))
            print(json.dumps(row) if options.json else f"{row['workload']}, {row['MiB']} MiB", flush=True)
            for label, figures in {} if options.json else row["contestants"].items():
                print(f"  {label:<32} {figures['seconds']:7.2f} s {figures['MiB']:8,.0f} MiB", flush=True)
        return
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    results = []
    for name in WORKLOADS:
        if options.only and not name.startswith(options.only):
            continue
        with tempfile.TemporaryDirectory() as folder:
            results.append(measure(name, options.scale, options.runs, Path(folder), in_order=options.in_order))
        if not options.json:
            row = results[-1]
            print(f"{name} ({row['samples']:,} samples)")
            for label, ratio in row["ratio"].items():
                print(f"  {label:<45} {row['rows_per_second'][label]:>12,.0f} rows/s   {ratio:5.2f}")
    if options.json:
        print(json.dumps(results))


if __name__ == "__main__":
    main()

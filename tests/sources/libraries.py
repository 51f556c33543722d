"""Each format written and read by its own library."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.csv
import pyarrow.dataset
import pyarrow.json
import pyarrow.parquet as pq
from tests.sources.rows import SCHEMA, Samples, pieces, rows_of, table

import rankfeed as rf

# Lance: fragments of unequal sizes, rows deleted from two of them.


def write_lance(folder: Path, rows: Samples, **options: Any) -> None:
    import lance

    path = str(folder / "data.lance")
    # Twelve rows more than wanted, in two places, are written and deleted again.
    surplus = [{**row, "y": np.int64(-1)} for row in rows[:12]]
    for number, piece in enumerate(pieces(rows)):
        extra = {0: surplus[:5], 2: surplus[5:]}.get(number, [])
        mixed = [*piece[:7], *extra, *piece[7:]]
        lance.write_dataset(table(mixed), path, mode="append" if number else "create", **options)
    lance.dataset(path).delete("y = -1")


def append_lance(folder: Path, rows: Samples) -> None:
    import lance

    lance.write_dataset(table(rows), str(folder / "data.lance"), mode="append")


def read_lance(folder: Path) -> Samples:
    import lance

    return rows_of(lance.dataset(str(folder / "data.lance")).to_table())


# WebDataset: tar files of 25 samples and one of 3.


def write_tar(folder: Path, rows: Samples, first: int = 0) -> None:
    import webdataset as wds

    with wds.ShardWriter(
        f"{folder}/shard-%03d.tar", maxcount=25, verbose=0, start_shard=first, mtime=1.0
    ) as writer:
        for row in rows:
            content = {"cls": int(row["y"]), "v.npy": row["v"], "x.npy": row["x"], "tokens.npy": row["tokens"]}
            writer.write({"__key__": f"{row['y']:06d}", **content, "txt": row["text"], "raw.bin": row["raw"]})


def read_tar(folder: Path) -> Samples:
    import webdataset as wds

    shards = sorted(map(str, folder.glob("*.tar")))
    decoded = wds.WebDataset(shards, shardshuffle=False, empty_check=False).decode()
    return [
        {
            name: np.int64(value) if isinstance(value, int) else value
            for name, value in sample.items()
            if name not in ("__url__", "__local_path__")
        }
        for sample in decoded
    ]


# Parquet: a folder by hive partitions with row groups of unequal sizes; and one file, compressed, with checksums.


def write_hive(folder: Path, rows: Samples) -> None:
    for number, piece in enumerate(pieces(rows)):
        part = folder / f"part={number}"
        part.mkdir()
        pq.write_table(table(piece), part / "data.parquet", row_group_size=11 + number)


def append_hive(folder: Path, rows: Samples) -> None:
    (folder / "part=4").mkdir()
    pq.write_table(table(rows), folder / "part=4" / "data.parquet")


def read_hive(folder: Path) -> Samples:
    # Left alone, pyarrow takes the numbers in folder names for int32.
    partitioning = pyarrow.dataset.partitioning(pa.schema({"part": pa.int64()}), flavor="hive")
    return rows_of(pyarrow.dataset.dataset(folder, partitioning=partitioning).to_table())


def write_parquet(folder: Path, rows: Samples) -> None:
    path = folder / "data.parquet"
    with pq.ParquetWriter(path, SCHEMA, compression="zstd", write_page_checksum=True) as writer:
        for piece in pieces(rows):
            writer.write_table(table(piece))


# Arrow IPC: the file and the stream format, compressed and not; several record batches.


def arrow_writer(suffix: str, stream: bool, compression: str | None) -> Callable[[Path, Samples], None]:
    def write(folder: Path, rows: Samples) -> None:
        options = pa.ipc.IpcWriteOptions(compression=compression)
        new = pa.ipc.new_stream if stream else pa.ipc.new_file
        for half, some in enumerate((pieces(rows)[:3], pieces(rows)[3:])):
            path = folder / f"{half}{suffix}"
            with pa.OSFile(str(path), "wb") as sink, new(sink, SCHEMA, options=options) as writer:
                for piece in some:
                    writer.write_table(table(piece), max_chunksize=30)

    return write


def arrow_reader(suffix: str, stream: bool) -> Callable[[Path], Samples]:
    def read(folder: Path) -> Samples:
        found: Samples = []
        for path in sorted(folder.glob(f"*{suffix}")):
            with pa.OSFile(str(path)) as file:
                found += rows_of((pa.ipc.open_stream if stream else pa.ipc.open_file)(file).read_all())
        return found

    return read


# Hugging Face datasets: a folder of three shards.


def write_hf(folder: Path, rows: Samples) -> None:
    import datasets

    datasets.disable_progress_bars()
    dataset = datasets.Dataset(table(rows))
    # The order on disk is not the order they came in: shuffled, and shuffled back by a mapping of indices.
    order = np.random.default_rng(1).permutation(len(rows))
    dataset.select(order).select(np.argsort(order)).save_to_disk(folder / "saved", num_shards=3)


def read_hf(folder: Path) -> Samples:
    import datasets

    return rows_of(datasets.load_from_disk(str(folder / "saved")).with_format("arrow")[:])


# MosaicML's MDS, as it is and compressed.


def mds_writer(compression: str | None) -> Callable[[Path, Samples], None]:
    def write(folder: Path, rows: Samples) -> None:
        from tests.sources.streaming_mds import MDSWriter

        arrays = {"v": "ndarray:float32:4", "x": "ndarray:float32", "tokens": "ndarray:int32"}
        columns = {"y": "int64", **arrays, "text": "str", "raw": "bytes"}
        hashes = ["xxh64"] if compression else []
        with MDSWriter(
            out=str(folder / "mds"), columns=columns, compression=compression, hashes=hashes, size_limit=6000
        ) as writer:
            for row in rows:
                # MDS refuses arrays without elements.
                full = {
                    name: row[name] if len(row[name]) else np.ones_like(row[name], shape=(1, *row[name].shape[1:]))
                    for name in arrays
                }
                writer.write({**{name: row[name] for name in columns}, **full})

    return write


def read_mds(folder: Path) -> Samples:
    from streaming.base.compression import decompress
    from tests.sources.streaming_mds import LocalDataset

    with TemporaryDirectory() as copy:
        # Its reader of local folders takes shards decompressed, as its downloads leave them.
        shutil.copytree(folder / "mds", copy, dirs_exist_ok=True)
        for path in Path(copy).glob("*.mds.zstd"):
            path.with_suffix("").write_bytes(decompress("zstd", path.read_bytes()))
        return [dict(sample) for sample in LocalDataset(local=copy)]


# Text: no arrays in CSV; lists of lists in JSON lines.


def write_csv(folder: Path, rows: Samples) -> None:
    for number, piece in enumerate((rows[:60], rows[60:])):
        flat = [
            {"y": row["y"], "f": float(row["v"][0]), "flag": row["flag"], "text": row["text"]} for row in piece
        ]
        pyarrow.csv.write_csv(pa.Table.from_pylist(flat), folder / f"{number}.csv")


def read_csv(folder: Path) -> Samples:
    return [row for path in sorted(folder.glob("*.csv")) for row in rows_of(pyarrow.csv.read_csv(path))]


def write_jsonl(folder: Path, rows: Samples) -> None:
    import polars

    names = ["y", "flag", "v", "tokens", "text"]
    # Lists that are empty in every row of a file would have no type.
    for number, piece in enumerate((rows[:60], rows[60:])):
        polars.from_arrow(table(piece).select(names)).write_ndjson(folder / f"{number}.jsonl")


def read_jsonl(folder: Path) -> Samples:
    return [row for path in sorted(folder.glob("*.jsonl")) for row in rows_of(pyarrow.json.read_json(path))]


# rankfeed's own: packed (Arrow files, read by pyarrow), .npz files, and two sources joined.


def write_packed(folder: Path, rows: Samples) -> None:
    rf.pack([dict(row) for row in rows], folder / "packed", shard_bytes=4000, progress=False)


def read_packed(folder: Path) -> Samples:
    found: Samples = []
    for path in sorted((folder / "packed").glob("*.arrow")):
        with pa.OSFile(str(path)) as file:
            found += rows_of(pa.ipc.open_file(file).read_all())
    return [{**row, "flag": np.bool_(row["flag"])} for row in found]  # Arrow's bits are no numpy array


def write_npz(folder: Path, rows: Samples) -> None:
    for row in rows:
        arrays = {name: row[name] for name in ("y", "flag", "v", "x", "tokens")}
        np.savez(folder / f"{row['y']}.npz", **arrays)


def read_npz(folder: Path) -> Samples:
    found = []
    for path in sorted(folder.glob("*.npz"), key=lambda each: int(each.stem)):
        with np.load(path) as arrays:
            found.append({name: arrays[name] for name in arrays.files})
    return found


def write_npy(folder: Path, rows: Samples) -> None:
    np.save(folder / "rows.npy", np.stack([row["v"] for row in rows]))


# PyTorch Geometric: graphs of different sizes in a list, saved and loaded by torch.


def write_graphs(folder: Path, rows: Samples) -> None:
    import torch
    from torch_geometric.data import Data, InMemoryDataset

    graphs = []
    for row in rows:
        count = len(row["x"]) + 1
        edges = torch.tensor([[i, (i + 1) % count] for i in range(count)]).T
        nodes = torch.from_numpy(np.vstack([row["x"], row["v"][None, :3]]))
        graphs.append(Data(x=nodes, edge_index=edges, y=torch.tensor([int(row["y"])])))
    (folder / "processed").mkdir()
    InMemoryDataset.save(graphs, str(folder / "processed" / "data.pt"))


def read_graphs(folder: Path) -> Samples:
    return [graph.to_dict() for graph in graphs(folder)]


def graphs(folder: Path) -> Any:
    from torch_geometric.data import InMemoryDataset

    dataset = InMemoryDataset()
    dataset.load(str(folder / "processed" / "data.pt"))
    return dataset

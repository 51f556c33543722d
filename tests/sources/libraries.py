"""Each format written and read by its own library."""

from __future__ import annotations

import io
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
    for index, piece in enumerate(pieces(rows)):
        extra = {0: surplus[:5], 2: surplus[5:]}.get(index, [])
        mixed = [*piece[:7], *extra, *piece[7:]]
        lance.write_dataset(table(mixed), path, mode="append" if index else "create", **options)
    lance.dataset(path).delete("y = -1")


def append_lance(folder: Path, rows: Samples) -> None:
    import lance

    lance.write_dataset(table(rows), str(folder / "data.lance"), mode="append")


def read_lance(folder: Path) -> Samples:
    import lance

    return rows_of(lance.dataset(str(folder / "data.lance")).to_table())


# WebDataset: tar files of 25 samples and one of 3.


def tar_writer(
    members: Callable[[dict[str, Any]], dict[str, Any]], first: int = 0, suffix: str = ".tar"
) -> Callable[[Path, Samples], None]:
    def write(folder: Path, rows: Samples) -> None:
        import webdataset as wds

        shards = f"{folder}/shard-%03d{suffix}"
        with wds.ShardWriter(shards, maxcount=25, verbose=0, start_shard=first, mtime=1.0) as writer:
            for row in rows:
                writer.write({"__key__": f"{row['y']:06d}", "cls": int(row["y"]), **members(row)})

    return write


def arrays_of(row: dict[str, Any]) -> dict[str, Any]:
    arrays = {f"{name}.npy": row[name] for name in ("v", "x", "tokens")}
    return {**arrays, "txt": row["text"], "raw.bin": row["raw"]}


def read_tar(folder: Path, pattern: str = "*.tar", decode: bool = True) -> Samples:
    """Samples of tars, decoded or with the files in them as bytes."""
    import webdataset as wds

    shards = sorted(map(str, folder.glob(pattern)))
    dataset = wds.WebDataset(shards, shardshuffle=False, empty_check=False)
    hidden = ("__url__", "__local_path__")
    samples = [
        {name: value for name, value in sample.items() if name not in hidden}
        for sample in (dataset.decode() if decode else dataset)
    ]
    return [{**sample, "cls": np.int64(sample["cls"])} for sample in samples]


# Parquet: a folder by hive partitions with row groups of unequal sizes; and one file, compressed, with checksums.


def write_hive(folder: Path, rows: Samples) -> None:
    for index, piece in enumerate(pieces(rows)):
        part = folder / f"part={index}"
        part.mkdir()
        pq.write_table(table(piece), part / "data.parquet", row_group_size=11 + index)


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


def write_parquet_lz4(folder: Path, rows: Samples, **options: Any) -> None:
    """Row groups of 25 rows in pages of a few, dictionaries among them."""
    pq.write_table(
        table(rows), folder / "data.parquet", row_group_size=25, data_page_size=256, compression="lz4", **options
    )


def read_parquet(folder: Path) -> Samples:
    return rows_of(pq.ParquetFile(folder / "data.parquet", page_checksum_verification=True).read())


# Arrow IPC: the file and the stream format, compressed and not; several record batches.


def arrow_writer(suffix: str, stream: bool, compression: str | None) -> Callable[[Path, Samples], None]:
    def write(folder: Path, rows: Samples) -> None:
        options = pa.ipc.IpcWriteOptions(compression=compression)
        new = pa.ipc.new_stream if stream else pa.ipc.new_file
        for half, selection in enumerate((pieces(rows)[:3], pieces(rows)[3:])):
            path = folder / f"{half}{suffix}"
            with pa.OSFile(str(path), "wb") as sink, new(sink, SCHEMA, options=options) as writer:
                for piece in selection:
                    writer.write_table(table(piece), max_chunksize=30)

    return write


def arrow_reader(suffix: str, stream: bool) -> Callable[[Path], Samples]:
    def read(folder: Path) -> Samples:
        result: Samples = []
        for path in sorted(folder.glob(f"*{suffix}")):
            with pa.OSFile(str(path)) as file:
                result += rows_of((pa.ipc.open_stream if stream else pa.ipc.open_file)(file).read_all())
        return result

    return read


def write_dictionaries(folder: Path, rows: Samples) -> None:
    """A stream with texts by their numbers in a dictionary, compressed."""
    result = table(rows)
    texts = result["text"].dictionary_encode()
    result = result.set_column(result.schema.get_field_index("text"), "text", texts).unify_dictionaries()
    options = pa.ipc.IpcWriteOptions(compression="lz4")
    with pa.ipc.new_stream(str(folder / "0.arrows"), result.schema, options=options) as writer:
        writer.write_table(result, max_chunksize=30)


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
        from tests.sources.mds.streaming_mds import MDSWriter

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
    from tests.sources.mds.streaming_mds import LocalDataset

    with TemporaryDirectory() as copy:
        # Its reader of local folders takes shards decompressed, as its downloads leave them.
        shutil.copytree(folder / "mds", copy, dirs_exist_ok=True)
        for path in Path(copy).glob("*.mds.zstd"):
            path.with_suffix("").write_bytes(decompress("zstd", path.read_bytes()))
        return [dict(sample) for sample in LocalDataset(local=copy)]


# Images and sound: encoded files in tars, in Hugging Face datasets and in MDS.


def image_file(row: dict[str, Any], kind: str) -> bytes:
    """A small image of its own size for each row."""
    from PIL import Image

    rng = np.random.default_rng(int(row["y"]))
    out = io.BytesIO()
    Image.fromarray(rng.integers(0, 256, (4 + row["y"] % 5, 6, 3), np.uint8)).save(out, kind)
    return out.getvalue()


def sound_file(row: dict[str, Any], kind: str) -> bytes:
    """A short sound of its own length for each row."""
    import soundfile

    rng = np.random.default_rng(int(row["y"]))
    out = io.BytesIO()
    soundfile.write(out, rng.uniform(-1, 1, (50 + int(row["y"]), 2)), 8000, format=kind)
    return out.getvalue()


def pixels(data: bytes) -> Any:
    from PIL import Image

    return np.array(Image.open(io.BytesIO(data)).convert("RGB"))


def images_of(row: dict[str, Any]) -> dict[str, Any]:
    kinds = {"png": "PNG", "jpg": "JPEG", "gif": "GIF", "tif": "TIFF", "webp": "WEBP"}
    return {name: image_file(row, kind) for name, kind in kinds.items()}


def sounds_of(row: dict[str, Any]) -> dict[str, Any]:
    return {name: sound_file(row, kind) for name, kind in {"wav": "WAV", "flac": "FLAC", "ogg": "OGG"}.items()}


def read_tar_images(folder: Path) -> Samples:
    return [
        {name: value if name in ("__key__", "cls") else pixels(value) for name, value in row.items()}
        for row in read_tar(folder, decode=False)
    ]


def read_tar_sounds(folder: Path) -> Samples:
    import soundfile

    result = []
    for row in read_tar(folder, decode=False):
        sample = {"__key__": row.pop("__key__"), "cls": row.pop("cls")}
        for name, value in row.items():
            samples, rate = soundfile.read(io.BytesIO(value), dtype="float32", always_2d=True)
            sample |= {name: samples, f"{name}.rate": np.int64(rate)}
        result.append(sample)
    return result


def write_hf_files(folder: Path, rows: Samples) -> None:
    import datasets

    datasets.disable_progress_bars()
    file = pa.struct({"bytes": pa.binary(), "path": pa.string()})
    stored = pa.table(
        {
            "y": pa.array([int(row["y"]) for row in rows]),
            "image": pa.array([{"bytes": image_file(row, "PNG"), "path": None} for row in rows], file),
            "sound": pa.array([{"bytes": sound_file(row, "WAV"), "path": None} for row in rows], file),
        }
    )
    features = {"y": datasets.Value("int64"), "image": datasets.Image(), "sound": datasets.Audio()}
    dataset = datasets.Dataset(stored, datasets.DatasetInfo(features=datasets.Features(features)))
    dataset.save_to_disk(folder / "saved", num_shards=2)


def read_hf_files(folder: Path) -> Samples:
    import datasets

    rows = datasets.load_from_disk(str(folder / "saved")).with_format("arrow")[:].to_pylist()
    return [
        {"y": np.int64(row["y"]), "image": row["image"]["bytes"], "sound": row["sound"]["bytes"]} for row in rows
    ]


def write_mds_images(folder: Path, rows: Samples) -> None:
    from PIL import Image
    from tests.sources.mds.streaming_mds import MDSWriter

    columns = {"y": "int64", "png": "png", "jpeg": "jpeg", "pil": "pil"}
    with MDSWriter(out=str(folder / "mds"), columns=columns, size_limit=20000) as writer:
        for row in rows:
            image = Image.open(io.BytesIO(image_file(row, "PNG")))
            writer.write({"y": row["y"], "png": image, "jpeg": image, "pil": image})


# Text: no arrays in CSV; lists of lists in JSON lines.


def write_csv(folder: Path, rows: Samples) -> None:
    for index, piece in enumerate((rows[:60], rows[60:])):
        scalars = table(piece).select(["y", "flag", "text"])
        first = pa.array([float(row["v"][0]) for row in piece])
        pyarrow.csv.write_csv(scalars.add_column(1, "f", first), folder / f"{index}.csv")


def read_csv(folder: Path) -> Samples:
    return _joined([pyarrow.csv.read_csv(path) for path in sorted(folder.glob("*.csv"))])


def write_jsonl(folder: Path, rows: Samples) -> None:
    import polars

    names = ["y", "flag", "v", "tokens", "text"]
    # Lists that are empty in every row of a file would have no type.
    for index, piece in enumerate((rows[:60], rows[60:])):
        polars.from_arrow(table(piece).select(names)).write_ndjson(folder / f"{index}.jsonl")


def read_jsonl(folder: Path) -> Samples:
    return _joined([pyarrow.json.read_json(path) for path in sorted(folder.glob("*.jsonl"))])


def _joined(files: list[pa.Table]) -> Samples:
    """Tables whose types were found by looking at each file, in types that hold all of them."""
    return rows_of(pa.concat_tables(files, promote_options="permissive"))


# rankfeed's own: packed (Arrow files, read by pyarrow), .npz files, and two sources joined.


def write_packed(folder: Path, rows: Samples) -> None:
    rf.write([dict(row) for row in rows], folder / "packed", shard_bytes=4000, progress=False)


def read_packed(folder: Path) -> Samples:
    rows = arrow_reader(".arrow", stream=False)(folder / "packed")
    return [{**row, "flag": np.bool_(row["flag"])} for row in rows]  # Arrow's bits are no numpy array


def write_npz(folder: Path, rows: Samples) -> None:
    for row in rows:
        np.savez(folder / f"{row['y']}.npz", **{name: row[name] for name in ("y", "flag", "v", "x", "tokens")})


def read_npz(folder: Path) -> Samples:
    result = []
    for path in sorted(folder.glob("*.npz"), key=lambda item: int(item.stem)):
        with np.load(path) as arrays:
            result.append({name: arrays[name] for name in arrays.files})
    return result


def write_npy_fortran(folder: Path, rows: Samples) -> None:
    """Of another byte order, the first dimension fastest."""
    np.save(folder / "rows.npy", np.asfortranarray([[row["v"], -row["v"]] for row in rows], dtype=">f8"))


def write_npz_rows(folder: Path, rows: Samples) -> None:
    """All rows in one archive, compressed."""
    np.savez_compressed(folder / "rows.npz", **{name: [row[name] for row in rows] for name in ("y", "flag", "v")})


def read_npz_rows(folder: Path) -> Samples:
    with np.load(folder / "rows.npz") as arrays:
        columns = {name: arrays[name] for name in arrays.files}
    return [dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)]


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

"""Loaders that are compared, each in the configuration that is its own best on a machine with few cores.

Each class writes the samples in its own format (`write`, once) and iterates over batches in a shuffled order
(`epoch`). Libraries are imported inside, since each loader runs in an environment of its own, and since the time
of the import belongs to the first batch. Worker processes of torch's DataLoader, which most peers use, are slower
than none on every workload here; "mapped, 2 workers" shows by how much.
"""

from __future__ import annotations

import io
import itertools
import os
from collections.abc import Iterable, Iterator
from importlib import import_module
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
from bench.workloads import WORKLOADS, Array, Workload
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import BatchSampler, DataLoader, RandomSampler

SEED = 1


def collate(rows: list[Any]) -> Any:
    """A batch of rows: a list of bytes, a stacked or a padded tensor."""
    if isinstance(rows[0], bytes):
        return rows
    tensors = [torch.from_numpy(row) if row.flags.writeable else torch.tensor(row) for row in rows]
    return torch.stack(tensors) if tensors[0].ndim == 1 else pad_sequence(tensors, batch_first=True)


class Peer:
    """A loader over one workload in a folder."""

    packages: ClassVar[tuple[str, ...]] = ()  # of its environment, beside torch and NumPy; empty: our own
    order = "global"
    written_by = ""  # the peer whose files it reads, if they are not its own
    workloads: ClassVar[tuple[str, ...]] = tuple(WORKLOADS)

    def __init__(self, name: str, workload: Workload, samples: int, folder: Path) -> None:
        self.name, self.workload, self.samples, self.folder = name, workload, samples, folder
        self.batch_size = workload.batch_size

    def write(self) -> None:
        """Write the samples."""
        raise NotImplementedError

    def epoch(self) -> Iterable[Any]:
        """Batches of one epoch."""
        raise NotImplementedError

    def state_after(self, batches: int) -> Any:
        """What a checkpoint in the middle of an epoch has of the loader; None if it cannot be saved."""
        return None

    def resume(self, state: Any) -> Iterable[Any]:
        """The rest of the epoch."""
        raise NotImplementedError

    @property
    def rows(self) -> Iterator[Any]:
        return self.workload.rows(self.samples)


class Checkpointed(Peer):
    """A loader that saves and restores its position itself; used in a process that did nothing else."""

    def state_after(self, batches: int) -> Any:
        loader: Any = self.epoch()
        exhaust(itertools.islice(loader, batches))
        return loader.state_dict()

    def resume(self, state: Any) -> Iterable[Any]:
        loader: Any = self.epoch()
        loader.load_state_dict(state)
        return loader  # type: ignore[no-any-return]


class Mapped(Peer):
    """What a user writes by hand: one flat file, offsets, a memory map and torch's DataLoader."""

    workers = 0

    def write(self) -> None:
        lengths = []
        with (self.folder / "values").open("wb") as file:
            for row in self.rows:
                file.write(row)
                lengths.append(len(row))
        np.save(self.folder / "offsets.npy", np.concatenate([[0], np.cumsum(lengths)]))

    def open(self) -> None:
        dtypes = {"ragged": np.float32, "tokens": np.int32, "bytes": np.uint8}
        shapes = {"ragged": (-1, 64), "tokens": (-1, 512), "bytes": (-1,)}
        values = np.memmap(self.folder / "values", dtypes[self.name], "r")
        self.values: Array = np.asarray(values).reshape(shapes[self.name])
        self.offsets = np.load(self.folder / "offsets.npy").tolist()

    def __len__(self) -> int:
        return self.samples

    def __getitem__(self, ids: list[int]) -> Any:
        if self.name == "tokens":
            return torch.from_numpy(self.values[ids])
        rows = [self.values[self.offsets[each] : self.offsets[each + 1]] for each in ids]
        return collate([row.tobytes() for row in rows] if self.name == "bytes" else rows)

    def batches_of_ids(self) -> Iterable[list[int]]:
        return BatchSampler(RandomSampler(range(self.samples)), self.batch_size, drop_last=False)

    def epoch(self) -> Iterable[Any]:
        if not hasattr(self, "loader"):
            self.open()
            workers: dict[str, Any] = {"num_workers": self.workers, "persistent_workers": self.workers > 0}
            sampler: Any = self.batches_of_ids()
            self.loader: Any = DataLoader(self, batch_size=None, sampler=sampler, **workers)  # type: ignore[arg-type]
        return self.loader  # type: ignore[no-any-return]


class MappedWorkers(Mapped):
    """The same with two worker processes."""

    written_by = "mapped"
    workers = 2


class Reference(Mapped):
    """One thread that gathers with NumPy into one buffer, which it reuses; the order is known beforehand."""

    written_by = "mapped"

    def epoch(self) -> Iterable[Any]:
        if not hasattr(self, "ids"):
            self.open()
            self.ids = np.random.default_rng(SEED).permutation(self.samples)
            shape = {"ragged": (self.batch_size, 240, 64), "tokens": (self.batch_size, 512), "bytes": (6_400_000,)}
            self.buffer: Array = np.empty(shape[self.name], self.values.dtype)
        for start in range(0, self.samples, self.batch_size):
            yield self.gather(self.ids[start : start + self.batch_size])

    def gather(self, ids: Array) -> Any:
        values, buffer, offsets = self.values, self.buffer, self.offsets
        if self.name == "tokens":
            return np.take(values, ids, axis=0, out=buffer[: len(ids)], mode="clip")
        if self.name == "bytes":
            at, views = 0, []
            for low, high in ((offsets[each], offsets[each + 1]) for each in ids.tolist()):
                views.append(buffer[at : at + high - low])
                views[-1][:] = values[low:high]
                at += high - low
            return views
        longest = 0
        for slot, each in enumerate(ids.tolist()):
            low, high = offsets[each], offsets[each + 1]
            longest = max(longest, high - low)
            buffer[slot, : high - low] = values[low:high]
            buffer[slot, high - low :] = 0
        return buffer[: len(ids), :longest]


class Rankfeed(Checkpointed):
    """rankfeed's Loader; data in four shards; byte strings as views."""

    options: ClassVar[dict[str, Any]] = {}
    bytes_as = "view"

    def write(self) -> None:
        import rankfeed as rf

        size = {"ragged": 656, "tokens": 820, "bytes": 1200}[self.name] * self.samples // self.workload.samples
        rows = ({"x": row} for row in self.rows)
        rf.write(rows, self.folder / "data", shard_bytes=max(1, size // 4) << 20, progress=False)

    def epoch(self) -> Iterable[Any]:
        if not hasattr(self, "loader"):
            import rankfeed as rf

            source = rf.open(self.folder / "data")
            rank, ranks = int(os.environ["BENCH_RANK"]), int(os.environ["BENCH_RANKS"])
            topology = rf.Topology(rank=rank, world_size=ranks, local_rank=rank, local_world_size=ranks)
            options = {"topology": topology, "bytes_as": self.bytes_as, **self.options}
            self.loader = rf.Loader(source, self.batch_size, shuffle=True, seed=SEED, **options)
        return self.loader  # type: ignore[return-value]


class RankfeedBytes(Rankfeed):
    """The same with byte strings as objects, the default."""

    written_by = "rankfeed"
    workloads = ("bytes",)
    bytes_as = "bytes"


class RankfeedThreads(Rankfeed):
    """The same with two threads."""

    written_by = "rankfeed"
    options: ClassVar[dict[str, Any]] = {"num_workers": 2}


class RankfeedProcesses(Rankfeed):
    """The same with two worker processes."""

    written_by = "rankfeed"
    options: ClassVar[dict[str, Any]] = {"num_workers": 2, "worker_kind": "process"}


class HuggingFace(Peer):
    """datasets as Arrow tables, batches of ids by torch's DataLoader: its fastest way."""

    packages = ("datasets",)

    def write(self) -> None:
        from datasets import Dataset, Features, List, Value

        kind = {
            "ragged": List(List(Value("float32"), length=64)),
            "tokens": List(Value("int32"), length=512),
            "bytes": Value("binary"),
        }[self.name]
        Dataset.from_list([{"x": row} for row in self.rows], features=Features({"x": kind})).save_to_disk(
            str(self.folder / "data")
        )

    def epoch(self) -> Iterable[Any]:
        if not hasattr(self, "loader"):
            import datasets

            dataset: Any = datasets.load_from_disk(str(self.folder / "data")).with_format("arrow")
            sampler = BatchSampler(RandomSampler(dataset), self.batch_size, drop_last=False)
            self.loader: Any = DataLoader(dataset, batch_size=None, sampler=sampler, collate_fn=of_arrow)
        return self.loader  # type: ignore[no-any-return]


def of_arrow(table: Any) -> Any:
    """The column of a table or record batch as a batch."""
    column = table["x"]
    column = column.combine_chunks() if hasattr(column, "combine_chunks") else column
    if hasattr(column.type, "list_size"):
        return torch.tensor(column.flatten().to_numpy().reshape(len(column), -1))
    if not hasattr(column.type, "value_type"):
        return column.to_pylist()
    values = torch.tensor(column.flatten().flatten().to_numpy().reshape(-1, 64))
    lengths = np.diff(column.offsets.to_numpy()).tolist()
    return pad_sequence(list(values.split(lengths)), batch_first=True)


class TorchdataNodes(Checkpointed, Mapped):
    """torchdata's nodes over the memory map written by hand."""

    packages = ("torchdata",)
    written_by = "mapped"

    def epoch(self) -> Iterable[Any]:
        if not hasattr(self, "loader"):
            from torchdata.nodes import Loader, Mapper, SamplerWrapper

            self.open()
            self.loader = Loader(Mapper(SamplerWrapper(self.batches_of_ids()), self.__getitem__))
        return self.loader  # type: ignore[no-any-return]


class Spdl(Mapped):
    """SPDL's pipeline with two threads over the memory map written by hand."""

    packages = ("spdl",)
    written_by = "mapped"

    def epoch(self) -> Iterable[Any]:
        from spdl.pipeline import PipelineBuilder

        if not hasattr(self, "values"):
            self.open()
        builder: Any = PipelineBuilder().add_source(iter(self.batches_of_ids()))
        pipeline = builder.pipe(self.__getitem__, concurrency=2).add_sink(4).build(num_threads=2)
        with pipeline.auto_stop():
            yield from pipeline.get_iterator(timeout=60)


class MosaicML(Peer):
    """MosaicML Streaming."""

    packages = ("mosaicml-streaming",)
    order = "blocks"

    def write(self) -> None:
        from tests.sources.mds.streaming_mds import MDSWriter  # `import streaming` needs a torchvision with CUDA

        kind = {"ragged": "ndarray:float32", "tokens": "ndarray:int32:512", "bytes": "bytes"}[self.name]
        with MDSWriter(out=str(self.folder / "data"), columns={"x": kind}) as writer:
            for row in self.rows:
                writer.write({"x": row})

    def dataset(self) -> Any:
        from tests.sources.mds.streaming_mds import streaming_dataset

        import_module("streaming.base.util").clean_stale_shared_memory()  # of processes that were killed
        return streaming_dataset()(
            local=str(self.folder / "data"), batch_size=self.batch_size, shuffle=True, shuffle_seed=SEED
        )

    def loader(self, dataset: Any) -> Iterable[Any]:
        return DataLoader(dataset, self.batch_size, collate_fn=of_samples)

    def epoch(self) -> Iterable[Any]:
        if not hasattr(self, "data"):
            self.data = self.dataset()
        return self.loader(self.data)

    def state_after(self, batches: int) -> Any:
        dataset = self.dataset()
        exhaust(itertools.islice(self.loader(dataset), batches))
        return dataset.state_dict(batches * self.batch_size, from_beginning=True)

    def resume(self, state: Any) -> Iterable[Any]:
        dataset = self.dataset()
        dataset.load_state_dict(state)
        return self.loader(dataset)


def of_samples(samples: list[dict[str, Any]]) -> Any:
    """A batch of samples that are dicts."""
    return collate([sample["x"] for sample in samples])


class LitData(Checkpointed):
    """LitData's StreamingDataset and StreamingDataLoader."""

    packages = ("litdata",)
    order = "chunks, then inside"

    def write(self) -> None:
        from litdata.streaming.cache import Cache

        cache = Cache(str(self.folder / "data"), chunk_bytes=64 << 20)
        for number, row in enumerate(self.rows):
            cache[number] = {"x": row}
        cache.done()
        cache.merge()

    def epoch(self) -> Iterable[Any]:
        if not hasattr(self, "loader"):
            from litdata import StreamingDataLoader, StreamingDataset

            dataset = StreamingDataset(str(self.folder / "data"), shuffle=True, seed=SEED)
            self.loader = StreamingDataLoader(dataset, batch_size=self.batch_size, collate_fn=of_samples)
        return self.loader  # type: ignore[no-any-return]


class WebDataset(Peer):
    """WebDataset: shards in a shuffled order and a buffer of 1,000 samples."""

    packages = ("webdataset",)
    order = "shards, then a buffer"

    @property
    def extension(self) -> str:
        return "bin" if self.name == "bytes" else "npy"

    @property
    def shards(self) -> list[str]:
        return sorted(str(path) for path in self.folder.glob("*.tar"))

    def write(self) -> None:
        import webdataset

        pattern, size = f"{self.folder}/%04d.tar", 64 << 20
        with webdataset.ShardWriter(pattern, maxcount=10**9, maxsize=size, verbose=0) as writer:
            for number, row in enumerate(self.rows):
                writer.write({"__key__": f"{number:08d}", self.extension: row})

    def epoch(self) -> Iterable[Any]:
        import webdataset

        data: Any = webdataset.WebDataset(self.shards, shardshuffle=True, seed=SEED).shuffle(1000)
        return data.map(lambda sample: of_member(sample[self.extension])).batched(  # type: ignore[no-any-return]
            self.batch_size, collation_fn=collate
        )


def of_member(member: Any) -> Any:
    """A member of a tar shard as an array or bytes."""
    data = member.read() if hasattr(member, "read") else member
    return np.load(io.BytesIO(data)) if data[:6] == b"\x93NUMPY" else data


class Wids(WebDataset):
    """wids: random access to the tar shards of WebDataset, without copying them."""

    packages = ("wids",)
    written_by = "webdataset"
    order = "chunks of 2,000"

    def __len__(self) -> int:
        return self.samples

    def __getitem__(self, index: int) -> Any:
        return of_member(self.data[index][f".{self.extension}"])

    def epoch(self) -> Iterable[Any]:
        import wids
        from wids.wids import IndexedTarSamples

        if not hasattr(self, "data"):
            listing = []
            for shard in self.shards:
                index = IndexedTarSamples(path=shard)
                listing.append({"url": shard, "nsamples": len(index)})
                index.close()
            options: dict[str, Any] = {"lru_size": 200, "transformations": [lambda sample: sample], "keep": True}
            self.data: Any = wids.ShardListDataset(listing, cache_dir=str(self.folder), **options)
        sampler = list(wids.ChunkedSampler(self.data, chunksize=2000, shuffle=True))
        return DataLoader(self, self.batch_size, sampler=sampler, collate_fn=collate)  # type: ignore[arg-type]


class Lance(Peer):
    """Lance's iterable dataset with batches in a shuffled order."""

    packages = ("pylance",)
    order = "batches"

    def write(self) -> None:
        import lance
        import pyarrow as pa

        kind = {
            "ragged": pa.list_(pa.list_(pa.float32(), 64)),
            "tokens": pa.list_(pa.int32(), 512),
            "bytes": pa.large_binary(),
        }[self.name]
        field = pa.field("x", kind, metadata={"lance-encoding:compression": "none"})
        schema = pa.schema([field])
        rows, made = self.rows, iter(lambda: list(itertools.islice(rows, 2_000)), [])

        def table(part: list[Any]) -> Any:
            if self.name == "bytes":
                return pa.record_batch([pa.array(part, kind)], schema=schema)
            flat = pa.array(np.concatenate(part).reshape(-1))
            column = pa.FixedSizeListArray.from_arrays(flat, 512 if self.name == "tokens" else 64)
            if self.name == "ragged":
                column = pa.ListArray.from_arrays(np.cumsum([0, *map(len, part)]).astype(np.int32), column)
            return pa.record_batch([column], schema=schema)

        lance.write_dataset((table(part) for part in made), str(self.folder / "data"), schema=schema)

    def epoch(self) -> Iterable[Any]:
        from lance.sampler import ShardedBatchSampler
        from lance.torch.data import LanceDataset

        sampler = ShardedBatchSampler(0, 1, randomize=True, seed=SEED)
        dataset = LanceDataset(
            str(self.folder / "data"),
            self.batch_size,
            sampler=sampler,
            to_tensor_fn=lambda batch, **_: of_arrow(batch),
        )
        return DataLoader(dataset, batch_size=None)


class Grain(Peer):
    """Grain's MapDataset over an ArrayRecord file."""

    packages = ("grain", "array-record")

    def write(self) -> None:
        from array_record.python.array_record_module import ArrayRecordWriter

        writer = ArrayRecordWriter(str(self.folder / "data.array_record"), "group_size:1,uncompressed")
        for row in self.rows:
            writer.write(row if isinstance(row, bytes) else row.tobytes())
        writer.close()

    def decoded(self, record: bytes) -> Any:
        if self.name == "bytes":
            return record
        if self.name == "tokens":
            return np.frombuffer(record, np.int32)
        return np.frombuffer(record, np.float32).reshape(-1, 64)

    def epoch(self) -> Any:
        import grain

        if not hasattr(self, "dataset"):
            source = grain.sources.ArrayRecordDataSource([str(self.folder / "data.array_record")])
            dataset = grain.MapDataset.source(source).shuffle(seed=SEED).map(self.decoded)
            self.dataset = dataset.batch(self.batch_size, batch_fn=collate).to_iter_dataset()
        return iter(self.dataset)

    def state_after(self, batches: int) -> Any:
        return self.epoch().get_state() | {"next_index": batches}  # reading them takes minutes

    def resume(self, state: Any) -> Iterable[Any]:
        iterator = self.epoch()
        iterator.set_state(state)
        return iterator  # type: ignore[no-any-return]


def exhaust(batches: Iterable[Any]) -> None:
    """Take all batches."""
    for _ in batches:
        pass


PEERS: dict[str, type[Peer]] = {
    "reference": Reference,
    "mapped": Mapped,
    "mapped, 2 workers": MappedWorkers,
    "rankfeed": Rankfeed,
    "rankfeed, bytes objects": RankfeedBytes,
    "rankfeed, 2 threads": RankfeedThreads,
    "rankfeed, 2 processes": RankfeedProcesses,
    "torchdata nodes": TorchdataNodes,
    "spdl": Spdl,
    "datasets": HuggingFace,
    "litdata": LitData,
    "lance": Lance,
    "wids": Wids,
    "grain": Grain,
    "mosaicml-streaming": MosaicML,
    "webdataset": WebDataset,
}

"""Megatron Energon's loaders, in an environment of its own."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tests.zoo.data import BATCH, ROWS, folder, place


def prepared() -> str:
    """6 tar shards, and what `energon prepare` writes beside them."""

    def write(path: Path) -> None:
        import webdataset as wds
        from megatron.energon.flavors.webdataset.prepare import WebdatasetPreparator

        names = [f"{index}.tar" for index in range(6)]
        for shard, name in enumerate(names):
            with wds.TarWriter(str(path / name)) as out:
                for row in range(shard * ROWS // 6, (shard + 1) * ROWS // 6):
                    out.write({"__key__": f"k{row:04d}", "txt": str(row)})
        WebdatasetPreparator.prepare_dataset(path, names, split_parts_ratio=[("train", 1.0)], workers=1)
        kind = "sample_type: {__module__: megatron.energon, __class__: TextSample}\nfield_map: {text: txt}\n"
        (path / ".nv-meta" / "dataset.yaml").write_text(kind)

    return str(folder("energon", write))


class Numbered:
    """Its batches, with the ids where one looks for them."""

    def __init__(self, loader: Any) -> None:
        self.loader = loader

    def __iter__(self) -> Iterator[Any]:
        for batch in self.loader:
            yield {"sample_id": [int(text) for text in batch.text]}


def loader(num_workers: int, ranks: tuple[int, int], **options: Any) -> Any:
    from megatron.energon import WorkerConfig, get_loader, get_train_dataset

    rank, world = ranks
    config = WorkerConfig(rank=rank, world_size=world, num_workers=num_workers)
    options = {"shuffle_buffer_size": None, "max_samples_per_sequence": None} | options
    return Numbered(get_loader(get_train_dataset(prepared(), worker_config=config, batch_size=BATCH, **options)))


def one_epoch(num_workers: int) -> Any:
    """`repeat=False`, which its documentation has for finetuning: sound."""
    return loader(num_workers, place(), repeat=False)


def for_ever(num_workers: int) -> Any:
    """The default: a training set has no end."""
    return loader(num_workers, place())


def every_rank_the_first(num_workers: int) -> Any:
    """A WorkerConfig that was written for one process: every rank reads everything."""
    return loader(num_workers, (0, 1), repeat=False)

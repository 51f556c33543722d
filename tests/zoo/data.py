"""What the zoo reads: numbers from 0 on, each a sample, as every library likes them; written when first read."""

from __future__ import annotations

import getpass
import os
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch.utils.data import get_worker_info

import rankfeed as rf

#: Even over 2 ranks with 2 workers of 5 samples a batch.
ROWS = 120
BATCH = 5


def place() -> tuple[int, int]:
    """This rank, and the number of ranks."""
    if dist.is_initialized():
        return dist.get_rank(), dist.get_world_size()
    return int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))


def worker() -> tuple[int, int]:
    """This worker, and the number of workers."""
    info = get_worker_info()
    return (info.id, info.num_workers) if info else (0, 1)


def sample(sample_id: int) -> dict[str, Any]:
    return {"sample_id": sample_id, "x": np.float32(sample_id) / 2}


def collate(samples: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
    """A batch: of each sample its id, besides what its library adds."""
    return {"sample_id": torch.tensor([int(row["sample_id"]) for row in samples])}


def folder(name: str, write: Callable[[Path], object]) -> Path:
    """Where a data set lies; written by the first process that needs it."""
    root = Path(
        os.environ.get("RANKFEED_ZOO") or Path(tempfile.gettempdir()) / f"rankfeed-zoo-{getpass.getuser()}"
    )
    return rf.prepare_once(root / name, write)


def tars(shards: int) -> list[str]:
    """Tar shards of WebDataset, equal in size."""

    def write(path: Path) -> None:
        import webdataset as wds

        for shard in range(shards):
            with wds.TarWriter(str(path / f"{shard:03d}.tar")) as out:
                for row in range(shard * ROWS // shards, (shard + 1) * ROWS // shards):
                    out.write({"__key__": f"k{row:04d}", "cls": row})

    return sorted(map(str, folder(f"tars-{shards}", write).glob("*.tar")))


def lance_table(fragments: int) -> str:
    """A Lance table of equal fragments."""

    def write(path: Path) -> None:
        import lance
        import pyarrow as pa

        ids = pa.array(range(ROWS), pa.int64())
        table = pa.table({"sample_id": ids, "x": pa.array(np.arange(ROWS, dtype=np.float32))})
        lance.write_dataset(
            table, str(path / "rows.lance"), max_rows_per_file=ROWS // fragments, max_rows_per_group=2
        )

    return str(folder(f"lance-{fragments}", write) / "rows.lance")


def parquet(files: int) -> list[str]:
    """Parquet files of equal length."""

    def write(path: Path) -> None:
        import pyarrow as pa
        import pyarrow.parquet as pq

        for file in range(files):
            ids = range(file * ROWS // files, (file + 1) * ROWS // files)
            pq.write_table(pa.table({"sample_id": pa.array(ids, pa.int64())}), path / f"{file:03d}.parquet")

    return sorted(map(str, folder(f"parquet-{files}", write).glob("*.parquet")))


def mds(rows: int = ROWS) -> Path:
    """MosaicML's shards."""

    def write(path: Path) -> None:
        from tests.sources.mds.streaming_mds import write as write_mds

        write_mds(path / "mds", {"sample_id": "int"}, [{"sample_id": row} for row in range(rows)], size_limit=400)

    return folder(f"mds-{rows}", write) / "mds"


def packed() -> Path:
    """Shards of our own."""

    def write(path: Path) -> None:
        rf.write(map(sample, range(ROWS)), path / "rows", workers=0, progress=False)

    return folder("packed", write) / "rows"

"""`rf.DistributedBatchSampler` with map-style datasets of wids, Lance and Hugging Face in a stock DataLoader."""

import json
from collections import Counter
from pathlib import Path
from typing import Any

import datasets
import lance
import pyarrow as pa
import pytest
import wids
from lance.torch.data import SafeLanceDataset
from tests.support.tar import write_tar
from torch.utils.data import DataLoader

import rankfeed as rf

SAMPLES, SHARD = 53, 20


def id_of(sample: dict[str, Any]) -> dict[str, Any]:
    return {"id": int(sample[".cls"].read())}


def wids_dataset(folder: Path) -> Any:
    shards = []
    for first in range(0, SAMPLES, SHARD):
        ids = range(first, min(first + SHARD, SAMPLES))
        path = folder / f"shard-{first}.tar"
        write_tar(path, {f"{sample_id:06d}.cls": b"%d" % sample_id for sample_id in ids})
        shards.append({"url": path.name, "nsamples": len(ids), "filesize": path.stat().st_size})
    index = {"__kind__": "wids-shard-index-v1", "wids_version": 1, "shardlist": shards}
    (folder / "wids.json").write_text(json.dumps(index))
    # By a local name of its own, wids copies shards into a cache folder.
    return wids.ShardListDataset(str(folder / "wids.json"), localname=lambda url: url, transformations=[id_of])


def lance_dataset(folder: Path) -> Any:
    lance.write_dataset(pa.table({"id": range(SAMPLES)}), str(folder / "rows"), max_rows_per_file=SHARD)
    return SafeLanceDataset(str(folder / "rows"))


def hugging_face_dataset(folder: Path) -> Any:
    datasets.Dataset.from_dict({"id": range(SAMPLES)}).save_to_disk(str(folder / "rows"), num_shards=3)
    return datasets.load_from_disk(str(folder / "rows"))


# Lance opens its table in the parent, and some workers that are forked then die of a segmentation fault in it.
@pytest.mark.parametrize(
    ("make", "workers"),
    [
        (wids_dataset, 0),
        (wids_dataset, 2),
        (lance_dataset, 0),
        (hugging_face_dataset, 0),
        (hugging_face_dataset, 2),
    ],
)
def test_batch_sampler_over_wids_lance_and_hugging_face_reads_each_sample_once_in_equal_steps(
    make: Any, workers: int, tmp_path: Path
) -> None:
    dataset = make(tmp_path)
    epochs = []
    for epoch in range(2):
        job = []
        for rank in range(2):
            topology = rf.Topology(rank=rank, world_size=2)
            sampler = rf.DistributedBatchSampler(dataset, 4, shuffle=True, seed=2, topology=topology)
            sampler.set_epoch(epoch)
            loader = DataLoader(dataset, batch_sampler=sampler, num_workers=workers)
            job.append([batch["id"].tolist() for batch in loader])
        once = Counter(sample_id for batches in job for batch in batches for sample_id in batch)
        assert once == Counter(range(SAMPLES))
        assert len(job[0]) == len(job[1])
        epochs.append(job)
    assert epochs[0] != epochs[1]

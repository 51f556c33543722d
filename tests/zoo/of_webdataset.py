"""WebDataset's pipelines and wids, over tar shards."""

from __future__ import annotations

from typing import Any

from tests.zoo import of_torch
from tests.zoo.data import BATCH, ROWS, collate, place, tars


def numbered(item: dict[str, Any]) -> dict[str, Any]:
    return {"sample_id": int(item["cls"])}


def loader(dataset: Any, num_workers: int, multiprocessing_context: Any) -> Any:
    samples = dataset.decode().map(numbered)
    return of_torch.loader(samples, num_workers, multiprocessing_context, collate_fn=collate)


def pipeline(shards: int, **options: Any) -> Any:
    import webdataset as wds

    return wds.WebDataset(tars(shards), **({"shardshuffle": False, "nodesplitter": wds.split_by_node} | options))


def split_by_node(num_workers: int, multiprocessing_context: Any) -> Any:
    """12 shards on 2 ranks with 2 workers: sound."""
    return loader(pipeline(12), num_workers, multiprocessing_context)


def no_nodesplitter(num_workers: int, multiprocessing_context: Any) -> Any:
    """WebDataset refuses several ranks without a nodesplitter."""
    import webdataset as wds

    return loader(pipeline(12, nodesplitter=wds.shardlists.single_node_only), num_workers, multiprocessing_context)


def nodesplitter_off(num_workers: int, multiprocessing_context: Any) -> Any:
    """`nodesplitter=None`, to be rid of that error: every rank reads everything."""
    return loader(pipeline(12, nodesplitter=None), num_workers, multiprocessing_context)


def workersplitter_off(num_workers: int, multiprocessing_context: Any) -> Any:
    """`workersplitter=None`: every worker reads its rank's whole share."""
    return loader(pipeline(12, workersplitter=None), num_workers, multiprocessing_context)


def five_shards(num_workers: int, multiprocessing_context: Any) -> Any:
    """5 shards on 2 ranks: 72 samples for one, 48 for the other."""
    return loader(pipeline(5), num_workers, multiprocessing_context)


def three_shards(num_workers: int, multiprocessing_context: Any) -> Any:
    """3 shards for 4 workers: WebDataset raises where there are none."""
    return loader(pipeline(3), num_workers, multiprocessing_context)


def five_shards_with_epoch(num_workers: int, multiprocessing_context: Any) -> Any:
    """`with_epoch` makes steps equal: of the longer rank it leaves out, of the shorter it repeats."""
    workers = max(1, num_workers)
    return loader(pipeline(5).repeat().with_epoch(ROWS // 2 // workers), num_workers, multiprocessing_context)


def resampled(num_workers: int, multiprocessing_context: Any) -> Any:
    """Shards drawn with replacement: some samples come often, some never."""
    dataset = pipeline(24, resampled=True, nodesplitter=None, seed=1)
    return loader(dataset.with_epoch(ROWS // 2 // max(1, num_workers)), num_workers, multiprocessing_context)


def ours(num_workers: int, multiprocessing_context: Any) -> Any:
    """5 shards by rankfeed's stage for WebDataset's pipelines: sound."""
    import webdataset as wds

    from rankfeed.integrations.webdataset import ShardedSamples

    stage = ShardedSamples(tars(5), BATCH, shuffle="global", seed=1)
    dataset = wds.DataPipeline(stage, wds.decode(), wds.map(numbered), wds.batched(BATCH, collation_fn=collate))
    made = of_torch.loader(dataset, num_workers, multiprocessing_context, batch_size=None)
    made.set_epoch = stage.set_epoch  # type: ignore[attr-defined]  # what a training loop would call
    return made


def index(shards: int) -> Any:
    return [{"url": url, "nsamples": ROWS // shards} for url in tars(shards)]


class Wids:
    """wids gives keys with a dot, and copies local tars unless an option says that they are local."""

    def __init__(self, shards: int) -> None:
        import wids

        self.data = wids.ShardListDataset(index(shards), keep=True)

    def __len__(self) -> int:
        return len(self.data)

    def __getitem__(self, position: int) -> dict[str, Any]:
        return {"sample_id": int(self.data[position][".cls"])}


def wids_distributed(num_workers: int, multiprocessing_context: Any) -> Any:
    """wids with its own sampler for ranks, chunks that divide evenly: sound."""
    import wids

    rank, world = place()
    sampler = wids.DistributedChunkedSampler(Wids(5), num_replicas=world, rank=rank, chunksize=12, shuffle=True)
    return of_torch.loader(Wids(5), num_workers, multiprocessing_context, sampler=sampler)


def wids_chunked(num_workers: int, multiprocessing_context: Any) -> Any:
    """wids with the sampler that knows no ranks."""
    import wids

    sampler = wids.ChunkedSampler(Wids(5), chunksize=12, shuffle=True, seed=1)
    return of_torch.loader(Wids(5), num_workers, multiprocessing_context, sampler=sampler)

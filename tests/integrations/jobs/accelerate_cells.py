"""Run by torchrun: accelerate_cells.py OUT JOB [ARGUMENTS], which writes OUT/JOB-WORLDSIZE-RANK.json."""

import gc
import itertools
import json
import math
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed.nn  # now: once there is a group, this keeps it, and gloo's threads, to the end
import webdataset
from accelerate import Accelerator
from accelerate.utils import DataLoaderConfiguration
from torch.utils.data import DataLoader, IterableDataset

import rankfeed as rf
from rankfeed.integrations.accelerate import accelerated
from rankfeed.integrations.webdataset import NodeSplitter, ShardedSamples

OUT, JOB = Path(sys.argv[1]), sys.argv[2]
SAMPLES, BATCH = 53, 4


def source(samples: int = SAMPLES) -> rf.Source:
    return rf.from_dataset([{"id": i, "x": torch.tensor([i / 7.0])} for i in range(samples)])


def loader_for(accelerator: Accelerator, **options: Any) -> Any:
    options = {"batch_size": BATCH, "shuffle": True, "seed": 3, **options}
    return accelerated(rf.Loader(source(options.pop("samples", SAMPLES)), **options), accelerator)


def trained(accelerator: Accelerator) -> Any:
    """A model and its optimizer, prepared."""
    model = torch.nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    return accelerator.prepare(model, optimizer)


def one_pass(
    accelerator: Accelerator, loader: Any, model: Any, optimizer: Any, most: int = 10**9
) -> dict[str, Any]:
    """Train for an epoch, or for some steps of it: what this rank was given, and when the optimizer stepped."""
    ids, synced, ends = [], [], []
    gradients = accelerator.gradient_state
    for step, batch in enumerate(loader):
        with accelerator.accumulate(model):
            accelerator.backward(model(batch["x"]).square().mean())
            optimizer.step()
            optimizer.zero_grad()
        ids.append(batch["id"].tolist())
        synced.append(accelerator.sync_gradients)
        ends.append(gradients.end_of_dataloader)
        if step + 1 == most:
            break
    return {"ids": ids, "synced": synced, "ends": ends, "left_behind": gradients.in_dataloader}


def epochs() -> Any:
    """Two epochs of training under every way in which Accelerate could share batches out."""
    results = []
    for split, dispatch, even in itertools.product((False, True), (None, False, True), (False, True)):
        config = DataLoaderConfiguration(split_batches=split, dispatch_batches=dispatch, even_batches=even)
        accelerator = Accelerator(cpu=True, gradient_accumulation_steps=3, dataloader_config=config)
        ours = loader_for(accelerator, num_workers=2 if even else 0)
        model, optimizer = trained(accelerator)
        assert accelerator.prepare(ours) is ours
        with accelerator.join_uneven_inputs([model], even_batches=even):
            passes = [one_pass(accelerator, ours, model, optimizer) for _ in range(2)]
        results.append({"split": split, "dispatch": dispatch, "even": even, "passes": passes})
        accelerator.free_memory()
    return results


def metrics() -> Any:
    """The same evaluation of sizes up to 40, with what all ranks got gathered by Accelerate's own method."""
    accelerator = Accelerator(cpu=True)
    results = []
    for tail, samples, batch_size in itertools.product(("even", "pad", "drop"), range(1, 41), (1, 3)):
        if samples < accelerator.num_processes and tail != "pad":
            continue
        case = {"tail": tail, "samples": samples, "batch_size": batch_size}
        loader = accelerator.prepare(loader_for(accelerator, **case))
        ids, values, names, losses = [], [], [], 0
        for batch in loader:
            together = accelerator.gather_for_metrics({"id": batch["id"], "x": (batch["x"],)})
            ids += together["id"].tolist()
            values += together["x"][0].double().flatten().tolist()
            names += accelerator.gather_for_metrics([f"sample {i}" for i in batch["id"].tolist()])
            objects = accelerator.gather_for_metrics(batch["id"].tolist(), use_gather_object=True)
            assert objects == together["id"].tolist()
            losses += len(accelerator.gather_for_metrics(batch["x"].mean()).reshape(-1))
        wanted = math.fsum(torch.tensor(i / 7.0).double().item() for i in ids)
        of_each_step = losses == len(loader.loader) * accelerator.num_processes
        sums = {"sum": math.fsum(values), "wanted": wanted, "losses_each_step": of_each_step}
        results.append({**case, "ids": ids, "names": names, **sums})
    return results


def lengths() -> Any:
    """In the last step, where ranks have other numbers of rows: tensors of other lengths, and objects."""
    accelerator = Accelerator(cpu=True)
    results = []
    for samples, tail in ((5, "even"), (15, "even"), (5, "pad")):
        for batch in loader_for(accelerator, samples=samples, tail=tail):
            last = batch["id"]
            if not accelerator.gradient_state.end_of_dataloader:
                continue
            whole = {length: accelerator.gather_for_metrics(torch.ones(length)) for length in (1, 2, 3, 7)}
            mixed = accelerator.gather_for_metrics({"id": last, "repeated": torch.ones(()).repeat(5)})
            named = {f"class {i}": "of two" for i in range(2)}
            tables = accelerator.gather_for_metrics(named, use_gather_object=True)
            try:
                accelerator.gather_for_metrics(torch.ones(accelerator.process_index + 5))
                error = ""
            except rf.errors.ArgumentError as refused:
                error = str(refused)
            whole_ranks = [len(gathered) // length for length, gathered in whole.items()]
            counts = {"rows": len(last), "whole": whole_ranks, "repeated": len(mixed["repeated"])}
            results.append({**counts, "ids": sorted(mixed["id"].tolist()), "tables": tables, "error": error})
    return results


def save() -> Any:
    """Train some steps of the second epoch, and save."""
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    loader, evaluation = loader_for(accelerator), loader_for(accelerator, samples=9, tail="pad")
    model, optimizer = trained(accelerator)
    first = one_pass(accelerator, loader, model, optimizer)
    for _ in evaluation:
        pass
    second = one_pass(accelerator, loader, model, optimizer, most=3)
    accelerator.save_state(str(OUT / "checkpoint"))
    accelerator.wait_for_everyone()
    return {"first": first, "second": second, "state": loader.state_dict(), "step": accelerator.step}


def load() -> Any:
    """Go on from there, in the way of Accelerate's own examples: load, then skip what the epoch had."""
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    loader, evaluation = loader_for(accelerator), loader_for(accelerator, samples=9, tail="pad")
    model, optimizer = trained(accelerator)
    accelerator.load_state(str(OUT / "checkpoint"))
    state, step = loader.state_dict(), accelerator.step
    if sys.argv[3] == "skip":
        assert accelerator.skip_first_batches(loader, 3) is loader
    rest = one_pass(accelerator, loader, model, optimizer)
    after = one_pass(accelerator, loader, model, optimizer)
    return {"state": state, "step": step, "rest": rest, "after": after, "evaluation": evaluation.epoch}


class Stream(IterableDataset[int]):
    def __iter__(self) -> Any:
        return iter(rf.split(range(SAMPLES)))


def by_batches(workers: int) -> DataLoader[int]:
    sampler = rf.DistributedBatchSampler(SAMPLES, BATCH)
    return DataLoader(range(SAMPLES), batch_sampler=sampler, num_workers=workers)


#: DataLoaders that hold a rank's share already.
SHARED: dict[str, Callable[[], DataLoader[int]]] = {
    "batches": lambda: by_batches(0),
    "workers": lambda: by_batches(1),
    "ids": lambda: DataLoader(range(SAMPLES), sampler=rf.DistributedSampler(SAMPLES), batch_size=BATCH),
    "stream": lambda: DataLoader(Stream(), batch_size=BATCH),
    "stream in workers": lambda: DataLoader(Stream(), batch_size=BATCH, num_workers=1),
}


def wrapped() -> Any:
    """The DataLoaders of SHARED, given to prepare."""
    results = []
    for dispatch in (None, False, True):
        config = DataLoaderConfiguration(dispatch_batches=dispatch)
        accelerator = Accelerator(cpu=True, dataloader_config=config)
        for name, make in SHARED.items():
            if (name == "stream in workers" and dispatch is not False) or (name == "ids" and dispatch):
                continue  # an error of rank 0 alone, which ends the job: see `dispatched`
            alone = sum(len(batch) for batch in make())
            try:
                next(iter(accelerator.prepare(make())))
                error = ""
            except rf.errors.ArgumentError as refused:
                error = str(refused)
            results.append({"name": name, "dispatch": dispatch, "error": error, "alone": alone})
    return results


def dispatched() -> Any:
    """Rank 0 alone reads, of a share, and is to deal it out to all."""
    accelerator = Accelerator(cpu=True, dataloader_config=DataLoaderConfiguration(dispatch_batches=True))
    shards = [str(OUT / f"{number}.tar") for number in range(2)]
    if accelerator.is_main_process:
        for number, shard in enumerate(shards):
            with webdataset.TarWriter(shard) as writer:
                writer.write({"__key__": str(number), "cls": number})
    accelerator.wait_for_everyone()
    pipelines = {
        "nodesplitter": lambda: webdataset.WebDataset(shards, nodesplitter=NodeSplitter(), shardshuffle=False),
        "sharded samples": lambda: webdataset.DataPipeline(ShardedSamples(shards), webdataset.decode()),
    }
    name = sys.argv[3]
    loader = SHARED[name]() if name in SHARED else DataLoader(pipelines[name](), batch_size=1)
    next(iter(accelerator.prepare(loader)))


if __name__ == "__main__":
    torch.manual_seed(0)
    jobs = (epochs, metrics, lengths, save, load, wrapped, dispatched)
    result = {job.__name__: job for job in jobs}[JOB]()
    rank, world_size = torch.distributed.get_rank(), torch.distributed.get_world_size()
    (OUT / f"{JOB}-{world_size}-{rank}.json").write_text(json.dumps(result))
    gc.collect()  # the model: as long as it lives, so do gloo's threads
    torch.distributed.destroy_process_group()

"""Every framework and every way to start workers, one after the other in the ranks of one launch.

frameworks.py OUT MASTER [--name NAME] [--kill STEP] CELL...

A CELL is FRAMEWORK:START:WORKERS: a function below, how workers start, how many. With ":launcher" behind it there
is no process group before the first batch: the rank is found by what the launcher says.
MASTER (ADDRESS:PORT) is where ranks meet, unless the launcher says so.
With a name of the run there are checkpoints, and cells go on from those of the runs before. What each rank is
given lies in OUT/CELL/NAME (see progress.py). In each cell the victim is killed in the given step: in a fork of
its rank, and in the last cell in the rank itself, with which the launch ends.
"""

import argparse
import gc
import logging
import multiprocessing
import os
import sys
import warnings
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.nn  # now: once there is a group, this keeps it, and gloo's threads, to the end
from progress import EPOCHS, EVERY, ROWS, SAMPLES, WHOLE, Job
from torch.utils.data import DataLoader

import rankfeed as rf

sys.path.append(str(Path(__file__).parents[3]))  # for tests

#: What a framework needs that takes long to import: once for all forks.
PACKAGES = {
    "fsdp": ["torch.distributed.fsdp"],
    "lightning": ["lightning"],
    "accelerate": ["accelerate", "rankfeed.integrations.accelerate"],
    "transformers": ["transformers.trainer", "rankfeed.integrations.transformers"],
    "pyg": ["torch_geometric.loader"],
    "pyg_seeds": ["torch_geometric.loader"],
    "webdataset": ["webdataset", "rankfeed.integrations.webdataset"],
    "stateful": ["torchdata.stateful_dataloader"],
}


class Numbers(torch.utils.data.Dataset[dict[str, Any]]):
    """A map-style Dataset, importable by workers that are spawned."""

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {"id": index, "x": torch.tensor([float(index)]), "labels": index % 2}


def feed(job: Job, **options: Any) -> rf.Loader:
    return rf.Loader(
        rf.from_dataset(Numbers()), ROWS, shuffle=True, num_workers=job.workers, worker_kind="process", **options
    )


def ids_of(batch: Any) -> list[int]:
    ids: list[int] = batch["id"].tolist()
    return ids


def epochs_of(
    job: Job,
    loader: Any,
    save: Callable[[int], Any],
    *,
    told: Any = None,
    ids: Callable[[Any], list[int]] = ids_of,
    train: Callable[[Any], Any] | None = None,
) -> None:
    """A training loop; ``save`` gives the place in the data after a number of steps of the pass."""
    for epoch in range(job.epoch, EPOCHS):
        if told is not None:
            told.set_epoch(epoch)
        for step, batch in enumerate(loader, 1):
            job.meet()
            job.given(epoch, ids(batch))
            if train is not None:
                train(batch)
            job.taken(lambda step=step: save(step))


def go_on(job: Job, stateful: Any) -> Any:
    """What has a state, where the checkpoint says."""
    if job.state is not None:
        stateful.load_state_dict(job.state)
    return stateful


def sampled(job: Job, sampler: Any, loader: Any, **more: Any) -> None:
    """A training loop over a loader of torch's kind, whose place the sampler keeps."""
    go_on(job, sampler)
    job.found(sampler.topology.launcher)
    epochs_of(job, loader, sampler.state_dict, **more)


def loaded(job: Job, loader: rf.Loader, **more: Any) -> None:
    go_on(job, loader)
    job.found(loader.topology.launcher)
    epochs_of(job, loader, lambda _: loader.state_dict(), **more)


def trained(job: Job, model: torch.nn.Module, loader: rf.Loader) -> None:
    loaded(job, loader, train=lambda batch: model(batch["x"]).sum().backward())


def loader(job: Job) -> None:
    loaded(job, feed(job))


def batch_sampler(job: Job) -> None:
    sampler = rf.DistributedBatchSampler(Numbers(), ROWS, shuffle=True)
    sampled(job, sampler, DataLoader(Numbers(), batch_sampler=sampler, num_workers=job.workers))


def sampler(job: Job) -> None:
    sampler = rf.DistributedSampler(Numbers(), ROWS, shuffle=True)
    sampled(job, sampler, DataLoader(Numbers(), ROWS, sampler=sampler, num_workers=job.workers), told=sampler)


def stateful(job: Job) -> None:
    from torchdata.stateful_dataloader import StatefulDataLoader

    sampler = rf.DistributedBatchSampler(Numbers(), ROWS, shuffle=True)
    loader = go_on(job, StatefulDataLoader(Numbers(), batch_sampler=sampler, num_workers=job.workers))
    job.found(sampler.topology.launcher)
    epochs_of(job, loader, lambda _: loader.state_dict(), told=sampler)


def pyg(job: Job) -> None:
    """Graphs of one node."""
    from torch_geometric.data import Data
    from torch_geometric.loader import DataLoader

    graphs = [Data(id=torch.tensor([number]), num_nodes=1) for number in range(SAMPLES)]
    sampler = rf.DistributedBatchSampler(graphs, ROWS, shuffle=True)
    sampled(job, sampler, DataLoader(graphs, batch_sampler=sampler, num_workers=job.workers))


def pyg_seeds(job: Job) -> None:
    """Seed nodes alone: what is sampled around them is up to PyG."""
    from tests.support.alone import Alone
    from torch_geometric.data import Data
    from torch_geometric.loader import NodeLoader

    from rankfeed.integrations.pyg import NodeSeeds

    graph = Data(x=torch.ones(SAMPLES, 1), edge_index=torch.empty(2, 0, dtype=torch.long))
    nodes = torch.arange(SAMPLES)
    seeds = NodeSeeds(nodes, ROWS)
    loader = NodeLoader(graph, Alone(), input_nodes=nodes, batch_sampler=seeds, num_workers=job.workers)
    sampled(job, seeds, loader, ids=lambda batch: batch.n_id[: batch.batch_size].tolist())


def webdataset(job: Job) -> None:
    """A pipeline over tar shards, with the stage that deals samples."""
    import webdataset as wds

    from rankfeed.integrations.webdataset import ShardedSamples

    stage = ShardedSamples(str(OUT / "shards" / "*.tar"), ROWS, shuffle=True)
    pipeline = wds.DataPipeline(stage, wds.decode(), wds.to_tuple("cls"), wds.batched(ROWS))
    loader = wds.WebLoader(pipeline, batch_size=None, num_workers=job.workers)
    sampled(job, stage, loader, told=stage, ids=lambda batch: [int(each) for each in batch[0]])


def ddp(job: Job) -> None:
    trained(job, torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(1, 1)), feed(job))


def fsdp(job: Job) -> None:
    """Sharded over a mesh all of whose ranks read different data."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("dp",))
    model = torch.nn.Linear(1, 4)
    fully_shard(model, mesh=mesh)
    trained(job, model, feed(job, topology=rf.Topology.from_mesh(mesh, "dp")))


def lightning(job: Job) -> None:
    import lightning as L
    from lightning.fabric.plugins.environments import SLURMEnvironment, TorchElasticEnvironment
    from lightning.pytorch.callbacks import ModelCheckpoint
    from tests.integrations.jobs.lightning_module import QUIET, LinearModule

    from rankfeed.integrations.lightning import LoaderCheck

    class Model(LinearModule):
        def training_step(self, batch: Any) -> torch.Tensor:
            job.given(self.current_epoch, ids_of(batch))
            return self.layer(batch["x"]).sum()

    steps = {"every_n_train_steps": job.every or None, "save_top_k": -1}
    saver = ModelCheckpoint(dirpath=job.checkpoints, filename="{step}", **steps)
    here = job.here
    # Of MPI Lightning knows through mpi4py alone; the names that torchrun sets are here under every launcher.
    slurm = SLURMEnvironment.detect()
    environment = SLURMEnvironment(auto_requeue=False) if slurm else TorchElasticEnvironment()
    L.Trainer(
        accelerator="cpu",
        strategy="ddp",
        devices=here.local_world_size,
        num_nodes=here.num_nodes,
        max_epochs=EPOCHS,
        plugins=[environment],
        callbacks=[saver, LoaderCheck()] if job.every else [],
        enable_checkpointing=bool(job.every),
        **QUIET,
    ).fit(Model(), feed(job), ckpt_path=job.latest)


def accelerate(job: Job) -> None:
    from accelerate import Accelerator

    from rankfeed.integrations.accelerate import accelerated

    accelerator = Accelerator(cpu=True)
    ours = accelerated(feed(job), accelerator)
    model, loader = accelerator.prepare(torch.nn.Linear(1, 1), ours)

    def save(_: int) -> str:
        folder = str(job.checkpoints.parent / f"accelerate-{job.step}")
        accelerator.save_state(folder)
        accelerator.wait_for_everyone()
        return folder

    if job.state is not None:
        accelerator.load_state(job.state)
    epochs_of(job, loader, save, train=lambda batch: accelerator.backward(model(batch["x"]).sum()))
    accelerator.free_memory()


def transformers(job: Job) -> None:
    import transformers as hf

    from rankfeed.integrations.transformers import FeedMixin

    class Model(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = torch.nn.Linear(1, 1)

        def forward(self, x: torch.Tensor, id: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
            return {"loss": self.layer(x).mean()}

    class Trainer(FeedMixin, hf.Trainer):
        def training_step(self, model: Any, inputs: Any, *rest: Any, **more: Any) -> Any:
            job.given(self._feed.loader.epoch, ids_of(inputs))
            return super().training_step(model, inputs, *rest, **more)

    arguments = hf.TrainingArguments(
        output_dir=str(job.checkpoints),
        use_cpu=True,
        num_train_epochs=EPOCHS,
        per_device_train_batch_size=ROWS,
        save_strategy="steps" if job.every else "no",
        save_steps=job.every or 500,
        logging_strategy="no",
        report_to=[],
        disable_tqdm=True,
    )
    trainer = Trainer(model=Model(), args=arguments, train_dataset=feed(job))
    trainer.train(resume_from_checkpoint=None if job.latest is None else str(job.latest))


def run(cell: str, job: Job) -> None:
    framework, start, _, *launcher = cell.split(":")
    multiprocessing.set_start_method(start, force=True)
    if not launcher:
        job.meet()
    globals()[framework](job)
    if state := sys.modules.get("accelerate.state"):  # with its state, the loaders of later cells are refused
        state.AcceleratorState._reset_state(reset_partial_state=True)


def leave() -> None:
    gc.collect()  # the model: as long as it lives, so do gloo's threads
    if dist.is_initialized():
        dist.destroy_process_group()


def main(out: Path, cells: list[str], name: str, kill: int) -> None:
    here = rf.Topology.detect()
    for cell in cells:
        folder, (framework, _, workers, *launcher) = out / cell.replace(":", "-"), cell.split(":")
        forked = cell != cells[-1] if kill else bool(launcher)
        store = folder / f"{name}.store" if forked or kill else None
        job = Job(folder, name, here, int(workers), 0 if name == WHOLE else EVERY, kill, store)
        if not forked:
            run(cell, job)
            dist.barrier()
            continue
        for package in PACKAGES.get(framework, []):
            import_module(package)

        def work(cell: str = cell, job: Job = job) -> None:
            run(cell, job)
            leave()

        job.in_child(work)
    leave()


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    parser = argparse.ArgumentParser()
    parser.add_argument("out", type=Path)
    parser.add_argument("master")
    parser.add_argument("cells", nargs="+")
    parser.add_argument("--name", default=WHOLE)
    parser.add_argument("--kill", type=int, default=0)
    given = parser.parse_args()
    OUT = given.out
    address, _, port = given.master.rpartition(":")
    os.environ.setdefault("MASTER_ADDR", address)
    os.environ.setdefault("MASTER_PORT", port)
    main(OUT, given.cells, given.name, given.kill)

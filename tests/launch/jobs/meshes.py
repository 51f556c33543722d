"""Meshes of four ranks, one after the other: meshes.py OUT CELL..., run by torchrun; a CELL is a function below.

Each rank writes OUT/CELL-RANK.json: for each epoch, the sample ids of its steps. OUT/shares-RANK.json says which
share it takes itself for, by some sets of dimensions.
"""

import json
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.nn  # now: once there is a group, this keeps it, and gloo's threads, to the end
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import PipelineStage, ScheduleGPipe
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import rankfeed as rf

SAMPLES, ROWS, WIDTH, EPOCHS = 47, 3, 8, 2
#: Epochs and batches.
Batches = Iterator[tuple[int, dict[str, torch.Tensor]]]


def batches(mesh: DeviceMesh, *dims: str, **options: Any) -> Batches:
    """Of the loader of this rank, data differing along some dimensions of the mesh."""
    rows = [{"id": each, "x": torch.arange(WIDTH) + 100.0 * each} for each in range(SAMPLES)]
    topology = rf.Topology.from_mesh(mesh, dims)
    loader = rf.Loader(rf.from_dataset(rows), ROWS, shuffle=True, num_workers=2, topology=topology, **options)
    for epoch in range(EPOCHS):
        for batch in loader:
            yield epoch, batch


def layers() -> torch.nn.Sequential:
    return torch.nn.Sequential(torch.nn.Linear(WIDTH, 4), torch.nn.Linear(4, WIDTH))


def mesh_of(first: str, second: str) -> DeviceMesh:
    return init_device_mesh("cpu", (2, 2), mesh_dim_names=(first, second))


def data_tensor() -> Batches:
    """FSDP2 over one dimension, the layers' tensors split along the other."""
    mesh = mesh_of("dp", "tp")
    model = parallelize_module(layers(), mesh["tp"], {"0": ColwiseParallel(), "1": RowwiseParallel()})
    fully_shard(model, mesh=mesh["dp"])
    for epoch, batch in batches(mesh, "dp"):
        model(batch["x"]).sum().backward()
        yield epoch, batch


def data_context() -> Batches:
    """FSDP2 over both dimensions at once; along one of them each rank takes its part of every row."""
    mesh = mesh_of("dp", "cp")
    model = torch.nn.Linear(WIDTH // 2, 4)
    fully_shard(model, mesh=mesh["dp", "cp"]._flatten("dp_cp"))
    for epoch, batch in batches(mesh, "dp"):
        mine = batch["x"].chunk(2, dim=1)[mesh.get_local_rank("cp")].contiguous()
        model(mine).sum().backward()
        parts = [torch.empty_like(mine) for _ in range(2)]
        dist.all_gather(parts, mine, group=mesh.get_group("cp"))
        assert torch.equal(torch.cat(parts, dim=1), batch["x"]), "the parts of the peers are of one batch"
        yield epoch, batch


def pipeline_data() -> Batches:
    """Two stages: the first takes the rows of its batch, and the last one the targets of its own."""
    mesh = mesh_of("pp", "dp")
    here, same = mesh.get_local_rank("pp"), torch.nn.Linear(WIDTH, WIDTH, bias=False)
    torch.nn.init.eye_(same.weight)
    stage = PipelineStage(same, here, 2, torch.device("cpu"), group=mesh.get_group("pp"))
    seen: list[tuple[torch.Tensor, torch.Tensor]] = []

    def loss(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        seen.append((output.detach(), target))
        return output.sum()

    schedule = ScheduleGPipe(stage, n_microbatches=ROWS, loss_fn=loss)
    for epoch, batch in batches(mesh, "dp", tail="pad"):  # the stages have agreed on shapes
        schedule.step(batch["x"]) if here == 0 else schedule.step(target=batch["x"])
        last = seen[-ROWS:]  # before its first step it asks for shapes, with other numbers
        assert all(torch.equal(*each) for each in last), "what went into the first stage the last one reads"
        assert len(last) == ROWS * here
        yield epoch, batch


def replicated_sharded() -> Batches:
    """Sharded by FSDP2 along one dimension and replicated along the other: data differ along both."""
    mesh = mesh_of("replicate", "shard")
    model = layers()
    fully_shard(model, mesh=mesh)
    for epoch, batch in batches(mesh, "replicate", "shard"):
        model(batch["x"]).sum().backward()
        yield epoch, batch


def shares() -> dict[str, list[int]]:
    mesh = mesh_of("dp", "tp")
    found = {dims: rf.Topology.from_mesh(mesh, dims.split(",")) for dims in ("dp", "tp", "dp,tp", "tp,dp")}
    found["of a part"] = rf.Topology.from_mesh(mesh["dp"], "dp")  # cut down to it before
    return {dims: [here.rank, here.world_size] for dims, here in found.items()}


def ids_of(batch: dict[str, torch.Tensor]) -> list[int]:
    ids: list[int] = (batch["id"][batch["valid"]] if "valid" in batch else batch["id"]).tolist()
    return ids


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    dist.init_process_group("gloo")
    for cell in sys.argv[2:]:
        steps: list[list[list[int]]] = [[] for _ in range(EPOCHS)]
        for epoch, batch in globals()[cell]():
            steps[epoch].append(ids_of(batch))
        (Path(sys.argv[1]) / f"{cell}-{dist.get_rank()}.json").write_text(json.dumps(steps))
        dist.barrier()
    (Path(sys.argv[1]) / f"shares-{dist.get_rank()}.json").write_text(json.dumps(shares()))
    dist.destroy_process_group()

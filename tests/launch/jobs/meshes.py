"""Loaders of four ranks in meshes, one mesh after the other: meshes.py OUT, run by torchrun.

Each rank writes OUT/RANK.json: by name of the mesh, for each epoch, the sample ids of its steps; and its share of
the data by several sets of dimensions.
"""

import json
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

import rankfeed as rf

SAMPLES, ROWS, EPOCHS = 47, 3, 2
#: Names of the two dimensions of a mesh, those along which data differ, options of the loader.
MESHES: dict[str, tuple[tuple[str, str], list[str], dict[str, Any]]] = {
    "data_tensor": (("dp", "tp"), ["dp"], {}),
    "data_context": (("dp", "cp"), ["dp"], {}),
    "pipeline_data": (("pp", "dp"), ["dp"], {"tail": "pad"}),  # stages agree on shapes
    "replicated_sharded": (("replicate", "shard"), ["replicate", "shard"], {}),
}


def epochs(mesh: Any, dims: list[str], options: dict[str, Any]) -> list[list[list[int]]]:
    topology = rf.Topology.from_mesh(mesh, dims)
    source = rf.from_dataset([{"id": sample_id} for sample_id in range(SAMPLES)])
    loader = rf.Loader(source, ROWS, shuffle=True, num_workers=2, topology=topology, **options)
    steps = []
    for _ in range(EPOCHS):
        steps.append([])
        for batch in loader:
            ids = batch["id"]
            gathered = [torch.empty_like(ids) for _ in range(dist.get_world_size() // topology.world_size)]
            for name in {*mesh.mesh_dim_names} - {*dims}:
                dist.all_gather(gathered, ids, group=mesh.get_group(name))
                assert all(torch.equal(ids, peer) for peer in gathered), "peers read one batch at a time"
            steps[-1].append((ids[batch["valid"]] if "valid" in batch else ids).tolist())
    return steps


def shares() -> dict[str, list[int]]:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    found = {dims: rf.Topology.from_mesh(mesh, dims.split(",")) for dims in ("dp", "tp", "dp,tp", "tp,dp")}
    found["of a part"] = rf.Topology.from_mesh(mesh["dp"], "dp")  # cut down to it before
    return {dims: [here.rank, here.world_size] for dims, here in found.items()}


if __name__ == "__main__":
    dist.init_process_group("gloo")
    told: dict[str, Any] = {"shares": shares()}
    for name, (names, dims, options) in MESHES.items():
        told[name] = epochs(init_device_mesh("cpu", (2, 2), mesh_dim_names=names), dims, options)
    (Path(sys.argv[1]) / f"{dist.get_rank()}.json").write_text(json.dumps(told))
    dist.destroy_process_group()

"""Run by torchrun on two ranks: audits of some loaders; what came of each goes into OUT/RANK.json."""

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.utils.data import DataLoader, DistributedSampler

import rankfeed as rf


def findings(make: Callable[[], rf.AuditReport]) -> Any:
    try:
        return {finding.code: finding.severity for finding in make().findings}
    except rf.errors.RankfeedError as error:
        return str(error)


def failing(rank: int) -> Any:
    yield {"sample_id": [rank]}
    if rank:
        raise ValueError("the user's own")


def main(out: Path) -> None:
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    data: Any = [{"sample_id": i} for i in range(7)]
    sampler = rf.DistributedBatchSampler(data, 2, shuffle=True)
    padding: Any = DistributedSampler(data, shuffle=False)
    mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("dp", "tp"))
    peers = rf.Loader(
        rf.from_dataset(data), 2, topology=rf.Topology.from_mesh(mesh, "dp"), id_column="number", shuffle=True
    )
    uneven = [{"sample_id": [step * 2 + rank]} for step in range(4 - rank)]
    told = {
        "ours": findings(
            lambda: rf.audit(rf.Loader(rf.from_dataset(data), 2, id_column="number", shuffle=True), epochs=2)
        ),
        "sampler": findings(
            lambda: rf.audit(
                DataLoader(data, batch_sampler=sampler), epochs=2, before_epoch=sampler.set_epoch, universe=7
            )
        ),
        "peers": findings(lambda: rf.audit(peers, epochs=2)),
        "unsharded": findings(lambda: rf.audit(DataLoader(data, 2))),
        "padding": findings(lambda: rf.audit(DataLoader(data, 1, sampler=padding))),
        "uneven": findings(lambda: rf.audit(uneven)),
        "failing": findings(lambda: rf.audit(failing(rank))),
        "other kind": findings(lambda: rf.audit(uneven, universe=["a"])),
        "other universe": findings(lambda: rf.audit(uneven, universe=[8, None][rank])),
        "other folder": findings(lambda: rf.audit(uneven, folder=[None, "/nowhere"][rank])),
        "no number": findings(lambda: rf.audit(uneven, universe=[8, 2.5][rank])),  # type: ignore[arg-type]
        "mixed keys": findings(lambda: rf.audit([{"sample_id": [1]}, {"sample_id": [[1, "a"][rank]]}])),
        "other epochs": findings(lambda: rf.audit(uneven, epochs=1 + rank)),
    }
    (out / f"{rank}.json").write_text(json.dumps(told))
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]))

"""A training function of Ray Train on two workers: ray_train.py OUT. Each tells the sample ids of its steps.

First two epochs of a Loader, then DataLoaders with either sampler, prepared; then what is said to a Loader.
"""

import json
import sys
from pathlib import Path
from typing import Any

import ray
from ray.train import RunConfig, ScalingConfig
from ray.train.torch import TorchConfig, TorchTrainer, prepare_data_loader, prepare_model

SAMPLES, EPOCHS = 47, 2


def train(config: dict[str, Any]) -> None:
    import torch
    from torch.utils.data import DataLoader

    import rankfeed as rf

    model = prepare_model(torch.nn.Linear(1, 1))
    loader = rf.Loader(rf.from_dataset([{"id": i, "x": torch.ones(1)} for i in range(SAMPLES)]), 3, shuffle=True)
    steps: list[list[list[int]]] = []
    for _ in range(EPOCHS):
        steps.append([])
        for batch in loader:
            model(batch["x"]).sum().backward()
            steps[-1].append(batch["id"].tolist())
    data = [{"id": i} for i in range(SAMPLES)]
    sampler = rf.DistributedSampler(data, 3, shuffle=True)
    batch_sampler = rf.DistributedBatchSampler(data, 3, shuffle=True)
    for prepared in (
        prepare_data_loader(DataLoader(data, 3, sampler=sampler)),
        prepare_data_loader(DataLoader(data, batch_sampler=batch_sampler), add_dist_sampler=False),
    ):
        steps.append([batch["id"].tolist() for batch in prepared])
    try:
        prepare_data_loader(loader)
    except rf.errors.ArgumentError as error:
        said = str(error)
    here = loader.topology
    (Path(config["out"]) / f"{here.rank}-of-{here.world_size}.json").write_text(json.dumps([steps, said]))


if __name__ == "__main__":
    ray.init(num_cpus=4, include_dashboard=False, log_to_driver=False)
    TorchTrainer(
        train,
        train_loop_config={"out": sys.argv[1]},
        torch_config=TorchConfig(backend="gloo"),
        scaling_config=ScalingConfig(num_workers=2),
        run_config=RunConfig(storage_path=sys.argv[1]),
    ).fit()
    ray.shutdown()

"""A training function of Ray Train on two workers: ray_train.py OUT. Each tells the sample ids of its steps.

First two epochs of a Loader, then DataLoaders with either sampler, prepared; then what is said to a Loader.
A second job fails after a few steps of an epoch, and is started again by Ray.
"""

import json
import sys
from pathlib import Path
from typing import Any

import ray
from ray.train import Checkpoint, FailureConfig, RunConfig, ScalingConfig, get_checkpoint, report
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


def train_again(config: dict[str, Any]) -> None:
    import torch

    import rankfeed as rf

    loader = rf.Loader(rf.from_dataset([{"id": i} for i in range(SAMPLES)]), 3, shuffle=True)
    checkpoint = get_checkpoint()
    said = None
    if checkpoint is not None:
        try:
            next(iter(loader))
        except rf.errors.StateError as error:
            said = str(error)
        loader.load_state_dict(torch.load(Path(checkpoint.path) / "loader.pt"))
    ids = []
    for step, batch in enumerate(loader):
        ids += batch["id"].tolist()
        if checkpoint is None and step == 2:
            (Path(config["out"]) / f"first-{loader.topology.rank}.json").write_text(json.dumps(ids))
            folder = Path(config["out"]) / f"saved-{loader.topology.rank}"
            folder.mkdir()
            torch.save(loader.state_dict(), folder / "loader.pt")
            report({}, checkpoint=Checkpoint.from_directory(folder))
            raise RuntimeError("a fault")
    (Path(config["out"]) / f"second-{loader.topology.rank}.json").write_text(json.dumps([ids, said]))


if __name__ == "__main__":
    ray.init("local", num_cpus=4, include_dashboard=False, log_to_driver=False)
    for job, failures in ((train, 0), (train_again, 1)):
        TorchTrainer(
            job,
            train_loop_config={"out": sys.argv[1]},
            torch_config=TorchConfig(backend="gloo"),
            scaling_config=ScalingConfig(num_workers=2),
            run_config=RunConfig(storage_path=sys.argv[1], failure_config=FailureConfig(max_failures=failures)),
        ).fit()
    ray.shutdown()

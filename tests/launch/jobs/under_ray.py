"""Ray Train starts the ranks: under_ray.py RANKS SCRIPT ARGUMENTS... runs the script on each of its workers."""

import sys
from typing import Any

import ray
from ray.train import FailureConfig, RunConfig, ScalingConfig
from ray.train.torch import TorchConfig, TorchTrainer


def on_worker(script: dict[str, Any]) -> None:
    import runpy
    import sys
    from pathlib import Path

    sys.argv = script["argv"]
    sys.path.insert(0, str(Path(sys.argv[0]).parent))
    runpy.run_path(sys.argv[0], run_name="__main__")


if __name__ == "__main__":
    ranks, out = int(sys.argv[1]), sys.argv[3]
    ray.init(num_cpus=ranks + 1, include_dashboard=False, log_to_driver=False)
    TorchTrainer(
        on_worker,
        train_loop_config={"argv": sys.argv[2:]},
        torch_config=TorchConfig(backend="gloo"),
        scaling_config=ScalingConfig(num_workers=ranks),
        run_config=RunConfig(storage_path=out, failure_config=FailureConfig(max_failures=0)),
    ).fit()

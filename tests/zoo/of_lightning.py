"""What Lightning's Trainer makes of a DataLoader (use_distributed_sampler=True, the default)."""

from __future__ import annotations

from typing import Any

from tests.zoo.data import ROWS, place
from tests.zoo.of_torch import Fixed, Rows, Sample, Stream, loader
from torch.utils.data import Sampler


def processed(of: Any) -> Any:
    """The loader that the Trainer would read in training, by the Trainer's own means."""
    from lightning.pytorch import Trainer
    from lightning.pytorch.strategies import DDPStrategy
    from lightning.pytorch.trainer.states import RunningStage

    _, world = place()
    strategy = DDPStrategy(process_group_backend="gloo")
    quiet = {
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
    }
    trainer = Trainer(accelerator="cpu", devices=world, strategy=strategy, **quiet)  # type: ignore[arg-type]
    strategy.set_world_ranks()
    return trainer._data_connector._prepare_dataloader(of, shuffle=True, mode=RunningStage.TRAINING)


def shuffled(num_workers: int, multiprocessing_context: Any) -> Any:
    """A plain DataLoader, which Lightning gives a DistributedSampler: sound."""
    return processed(loader(Rows(), num_workers, multiprocessing_context, shuffle=True))


class Shard(Sampler[int]):
    """A sampler of the user's own that reads its rank's share, and is no DistributedSampler."""

    def __init__(self) -> None:
        rank, world = place()
        self.numbers = range(rank, ROWS, world)

    def __iter__(self) -> Any:
        return iter(self.numbers)

    def __len__(self) -> int:
        return len(self.numbers)


class Share(Rows):
    """A data set that is its rank's share."""

    def __init__(self) -> None:
        rank, world = place()
        super().__init__(ROWS // world)
        self.numbers = range(rank, ROWS, world)

    def __getitem__(self, index: int) -> Sample:
        return super().__getitem__(self.numbers[index])


def sampler_that_shards(num_workers: int, multiprocessing_context: Any) -> Any:
    """The user's sampler shards, and Lightning wraps it to shard again."""
    return processed(loader(Rows(), num_workers, multiprocessing_context, sampler=Shard()))


def data_that_shard(num_workers: int, multiprocessing_context: Any) -> Any:
    """The data set is a share already, and gets a DistributedSampler."""
    return processed(loader(Share(), num_workers, multiprocessing_context, shuffle=True))


def sampler_left_alone(num_workers: int, multiprocessing_context: Any) -> Any:
    """A DistributedSampler is left alone, and so is what its set_epoch lacks."""
    rank, world = place()
    return processed(loader(Rows(), num_workers, multiprocessing_context, sampler=Fixed(Rows(), world, rank)))  # type: ignore[arg-type]


def stream_left_alone(num_workers: int, multiprocessing_context: Any) -> Any:
    """Lightning shares out no stream: one that knows no ranks is read by each."""
    return processed(loader(Stream(ranks=False), num_workers, multiprocessing_context))

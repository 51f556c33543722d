"""Streams of other libraries in a Loader, and a Loader of a stream in other libraries' loops."""

from __future__ import annotations

import itertools
import json
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import rankfeed as rf
from rankfeed.errors import ArgumentError


def numbers(row: Any) -> Any:
    return row if isinstance(row, torch.Tensor) else row["x"]


def stopped_and_resumed(make: Callable[[], Any], size: int, own: bool) -> None:
    """Four steps on two ranks, and the rest on three; then an epoch from its start."""
    seen: list[int] = []
    state: dict[str, Any] = {}
    for rank in range(2):
        loader = rf.Loader(rf.from_iterable(make), 3, topology=rf.Topology(rank=rank, world_size=2))
        for batch in itertools.islice(iter(loader), 4):
            seen += numbers(batch).tolist()
        state = loader.state_dict()
        assert (state["own"] is not None) == own
    for rank in range(3):
        loader = rf.Loader(rf.from_iterable(make), 2, topology=rf.Topology(rank=rank, world_size=3))
        loader.load_state_dict(json.loads(json.dumps(state)))
        for batch in loader:
            seen += numbers(batch).tolist()
        assert numbers(next(iter(loader))).tolist()[0] == rank
    assert Counter(seen) == Counter(range(size))


def rows(shards: list[int]) -> Iterator[dict[str, int]]:
    for shard in shards:
        yield from ({"x": shard * 10 + row} for row in range(10))


def test_a_streaming_data_set_of_hugging_face_resumes_by_its_own_state() -> None:
    datasets = pytest.importorskip("datasets")

    def make() -> Any:
        return datasets.IterableDataset.from_generator(rows, gen_kwargs={"shards": [0, 1, 2, 3]})

    stopped_and_resumed(make, 40, own=True)
    stopped_and_resumed(lambda: iter(make()), 40, own=False)
    bare = make()
    loader = rf.Loader(rf.from_iterable(bare), 4)
    next(it := iter(loader))
    next(it)
    loader.load_state_dict(loader.state_dict())
    for first in (8, 0):
        seen = [number for batch in loader for number in numbers(batch).tolist()]
        assert seen == list(range(first, 40))


def test_a_graph_of_torchdata_resumes_by_its_own_state() -> None:
    nodes = pytest.importorskip("torchdata.nodes")
    stopped_and_resumed(lambda: nodes.Loader(nodes.IterableWrapper(range(40))), 40, own=True)


def test_a_pipeline_of_webdataset_keeps_its_dicts_and_tuples(tmp_path: Path) -> None:
    wds = pytest.importorskip("webdataset")
    with wds.TarWriter(str(tmp_path / "a.tar")) as writer:
        for number in range(20):
            writer.write({"__key__": f"{number:04d}", "cls": number, "json": {"a": number}})

    def pipeline() -> Any:
        path = str(tmp_path / "a.tar")
        return wds.WebDataset(path, shardshuffle=False, nodesplitter=lambda urls: urls).decode()

    loader = rf.Loader(rf.from_iterable(pipeline), 4, topology=rf.Topology(rank=1, world_size=2))
    assert [batch["cls"].tolist() for batch in loader] == [[1, 3, 5, 7], [9, 11, 13], [15, 17, 19]]
    first = next(iter(rf.Loader(rf.from_iterable(lambda: pipeline().to_tuple("cls", "__key__")), 2)))
    assert isinstance(first, tuple)
    assert first[0].tolist() == [0, 1]
    assert first[1] == ["0000", "0001"]


def test_lightning_trains_on_a_stream_and_accelerate_leaves_it_alone(tmp_path: Path) -> None:
    lightning = pytest.importorskip("lightning")
    accelerate = pytest.importorskip("accelerate")
    seen: list[list[int]] = []

    class Model(lightning.LightningModule):  # type: ignore[misc, name-defined]
        def __init__(self) -> None:
            super().__init__()
            self.layer = torch.nn.Linear(1, 1)

        def on_train_epoch_start(self) -> None:
            seen.append([])

        def training_step(self, batch: Any, _: int) -> Any:
            seen[-1] += (batch["x"] - 100 * batch["epoch"]).tolist()
            return self.layer(batch["x"][:, None].float()).mean()

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), 0.01)

    def stream(epoch: int) -> Iterator[dict[str, int]]:
        return ({"x": 100 * epoch + number, "epoch": epoch} for number in range(9))

    quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False, "accelerator": "cpu"}

    loader = rf.Loader(rf.from_iterable(stream), 2)
    given = {"max_epochs": 2, "enable_checkpointing": False, "default_root_dir": str(tmp_path)}
    trainer = lightning.Trainer(**quiet, **given)
    trainer.fit(Model(), loader)
    assert seen == [list(range(9))] * 2
    prepared = accelerate.Accelerator(cpu=True).prepare(loader)
    assert prepared is loader


def stream_loader() -> rf.Loader:
    return rf.Loader(rf.from_iterable(lambda: ({"x": number} for number in range(9))), 2)


def test_an_accelerator_says_how_a_stream_is_taken_there_and_keeps_its_place(tmp_path: Path) -> None:
    accelerate = pytest.importorskip("accelerate")
    from rankfeed.integrations.accelerate import accelerated

    first, second = stream_loader(), stream_loader()
    accelerator = accelerate.Accelerator(cpu=True)
    with pytest.raises(ArgumentError, match=r"register_for_checkpointing\(loader\)"):
        accelerated(first, accelerator)
    accelerator.register_for_checkpointing(first)
    seen = [number for batch in itertools.islice(first, 2) for number in batch["x"].tolist()]
    accelerator.save_state(str(tmp_path))
    resumed = accelerate.Accelerator(cpu=True)
    resumed.register_for_checkpointing(second)
    resumed.load_state(str(tmp_path))
    assert seen + [number for batch in second for number in batch["x"].tolist()] == list(range(9))


@pytest.mark.parametrize("fed", [stream_loader(), stream_loader().source], ids=["loader", "stream"])
def test_a_trainer_of_transformers_says_that_it_takes_no_stream(fed: Any, tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    from rankfeed.integrations.transformers import FeedMixin

    class Trainer(FeedMixin, transformers.Trainer):  # type: ignore[misc, name-defined]
        pass

    given = {"model": torch.nn.Linear(1, 1), "args": transformers.TrainingArguments(str(tmp_path), use_cpu=True)}
    with pytest.raises(ArgumentError, match="cannot train on a stream"):
        Trainer(**given, train_dataset=fed)
    with pytest.raises(ArgumentError, match="cannot train on a stream"):
        Trainer(**given, eval_dataset={"held": fed}).evaluate()

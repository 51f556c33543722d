"""Streams of other libraries in a Loader, and a Loader of a stream in other libraries' loops."""

from __future__ import annotations

import itertools
import json
import random
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import rankfeed as rf
from rankfeed.errors import ArgumentError, StateError


def numbers(batches: Iterable[Any]) -> list[int]:
    tensors = [batch if isinstance(batch, torch.Tensor) else batch["x"] for batch in batches]
    return [number for tensor in tensors for number in tensor.ravel().tolist()]


def stopped_and_resumed(make: Callable[[], Any], size: int, own: bool) -> None:
    """Four steps on two ranks, and the rest on three; then an epoch from its start."""
    seen: list[int] = []
    state: dict[str, Any] = {}
    for rank in range(2):
        loader = rf.Loader(rf.from_iterable(make), 3, topology=rf.Topology(rank=rank, world_size=2))
        seen += numbers(itertools.islice(iter(loader), 4))
        state = loader.state_dict()
        assert (state["own"] is not None) == own
    for rank in range(3):
        loader = rf.Loader(rf.from_iterable(make), 2, topology=rf.Topology(rank=rank, world_size=3))
        loader.load_state_dict(json.loads(json.dumps(state)))
        seen += numbers(loader)
        assert numbers(itertools.islice(loader, 1))[0] == rank
    assert Counter(seen) == Counter(range(size))


def rows(shards: list[int]) -> Iterator[dict[str, int]]:
    for shard in shards:
        yield from ({"x": shard * 10 + row} for row in range(10))


def test_a_hugging_face_iterable_dataset_resumes_by_its_own_state_dict() -> None:
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
        assert numbers(loader) == list(range(first, 40))


def test_a_torchdata_nodes_graph_resumes_by_its_own_state_dict() -> None:
    nodes = pytest.importorskip("torchdata.nodes")
    stopped_and_resumed(lambda: nodes.Loader(nodes.IterableWrapper(range(40))), 40, own=True)


def test_a_webdataset_pipeline_as_a_stream_gives_batches_of_dicts_or_tuples(tmp_path: Path) -> None:
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


def test_resuming_an_unseeded_webdataset_shuffle_raises_state_error(tmp_path: Path) -> None:
    wds = pytest.importorskip("webdataset")
    with wds.TarWriter(str(tmp_path / "a.tar")) as writer:
        for number in range(40):
            writer.write({"__key__": f"{number:04d}", "cls": number})

    def pipeline(rng: random.Random | None = None) -> Any:
        return wds.WebDataset(str(tmp_path / "a.tar"), shardshuffle=False).shuffle(20, rng=rng).decode()

    def resumed(open_stream: Callable[[], Any]) -> list[int]:
        first, second = (rf.Loader(rf.from_iterable(open_stream), 4, topology=rf.Topology()) for _ in range(2))
        seen = [x for batch in itertools.islice(iter(first), 3) for x in batch["cls"].tolist()]
        second.load_state_dict(json.loads(json.dumps(first.state_dict())))
        return seen + [x for batch in second for x in batch["cls"].tolist()]

    with pytest.raises(StateError, match="in another order"):
        resumed(pipeline)
    assert Counter(resumed(lambda: pipeline(random.Random(7)))) == Counter(range(40))


def test_lightning_trains_on_a_stream_loader_and_accelerate_prepare_returns_it_unchanged(tmp_path: Path) -> None:
    lightning = pytest.importorskip("lightning")
    accelerate = pytest.importorskip("accelerate")
    from tests.integrations.jobs.lightning_module import QUIET, LinearModule

    seen: list[list[int]] = []

    class Model(LinearModule):
        def on_train_epoch_start(self) -> None:
            seen.append([])

        def training_step(self, batch: Any, _: int) -> Any:
            seen[-1] += (batch["x"] - 100 * batch["epoch"]).tolist()
            return self.layer(batch["x"][:, None].float()).mean()

    def stream(epoch: int) -> Iterator[dict[str, int]]:
        return ({"x": 100 * epoch + number, "epoch": epoch} for number in range(9))

    loader = rf.Loader(rf.from_iterable(stream), 2)
    given = {"accelerator": "cpu", "enable_checkpointing": False, "default_root_dir": str(tmp_path)}
    lightning.Trainer(max_epochs=2, **given, **QUIET).fit(Model(), loader)
    assert seen == [list(range(9))] * 2
    assert accelerate.Accelerator(cpu=True).prepare(loader) is loader


def stream_loader() -> rf.Loader:
    return rf.Loader(rf.from_iterable(lambda: ({"x": number} for number in range(9))), 2)


def test_accelerated_on_a_stream_raises_and_register_for_checkpointing_resumes_it(tmp_path: Path) -> None:
    accelerate = pytest.importorskip("accelerate")
    from rankfeed.integrations.accelerate import accelerated

    first, second = stream_loader(), stream_loader()
    accelerator = accelerate.Accelerator(cpu=True)
    with pytest.raises(ArgumentError, match=r"register_for_checkpointing\(loader\)"):
        accelerated(first, accelerator)
    accelerator.register_for_checkpointing(first)
    seen = numbers(itertools.islice(first, 2))
    accelerator.save_state(str(tmp_path))
    resumed = accelerate.Accelerator(cpu=True)
    resumed.register_for_checkpointing(second)
    resumed.load_state(str(tmp_path))
    assert seen + numbers(second) == list(range(9))


@pytest.mark.parametrize("fed", [stream_loader(), stream_loader().source], ids=["loader", "stream"])
def test_a_transformers_trainer_with_a_stream_raises_argument_error(fed: Any, tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    from tests.integrations.jobs.transformers_feed import Trainer

    given = {"model": torch.nn.Linear(1, 1), "args": transformers.TrainingArguments(str(tmp_path), use_cpu=True)}
    with pytest.raises(ArgumentError, match="cannot train on a stream"):
        Trainer(**given, train_dataset=fed)
    with pytest.raises(ArgumentError, match="cannot train on a stream"):
        Trainer(**given, eval_dataset={"held": fed}).evaluate()


def shuffled(datasets: Any, first: int = 0, seed: int | None = 1) -> Any:
    data = datasets.IterableDataset.from_generator(rows, gen_kwargs={"shards": [first, first + 1]})
    return data.shuffle(seed=seed, buffer_size=8)


class Wrapper:
    """A stream of the user's own that passes on the state of a dataset."""

    def __init__(self, dataset: Any) -> None:
        self.parts = [dataset]

    def __iter__(self) -> Iterator[Any]:
        return iter(self.parts[0])

    def state_dict(self) -> Any:
        return self.parts[0].state_dict()

    def load_state_dict(self, state: Any) -> None:
        self.parts[0].load_state_dict(state)


SHUFFLED: dict[str, Callable[[Any], Any]] = {
    "shuffle": shuffled,
    "map": lambda datasets: shuffled(datasets).map(lambda row: {"x": row["x"]}),
    "filter and take": lambda datasets: shuffled(datasets).filter(lambda row: row["x"] % 5 > 0).take(14),
    "batch": lambda datasets: shuffled(datasets).batch(2),
    "arrow": lambda datasets: (
        datasets.Dataset.from_dict({"x": list(range(20))}).to_iterable_dataset(2).shuffle(seed=3, buffer_size=4)
    ),
    "interleave": lambda datasets: datasets.interleave_datasets(
        [shuffled(datasets), shuffled(datasets, 2)],
        probabilities=[0.4, 0.6],
        seed=2,
        stopping_strategy="all_exhausted",
    ),
    "concatenate": lambda datasets: datasets.concatenate_datasets([shuffled(datasets), shuffled(datasets, 2)]),
    "inside an object": lambda datasets: Wrapper(shuffled(datasets)),
}


@pytest.mark.parametrize("name", SHUFFLED)
@pytest.mark.parametrize("epoch", [0, 2])
@pytest.mark.parametrize("as_object", [True, False], ids=["object", "function"])
def test_a_hugging_face_shuffle_buffer_resumes_with_the_remaining_samples_in_order(
    name: str, epoch: int, as_object: bool
) -> None:
    datasets = pytest.importorskip("datasets")

    def loader() -> rf.Loader:
        made = SHUFFLED[name](datasets) if as_object else lambda: SHUFFLED[name](datasets)
        feed = rf.Loader(rf.from_iterable(made), 3)
        feed.set_epoch(epoch)
        return feed

    whole = numbers(loader())
    for steps in (1, 3):
        first, second = loader(), loader()
        seen = numbers(itertools.islice(first, steps))
        second.load_state_dict(json.loads(json.dumps(first.state_dict())))
        assert seen + numbers(second) == whole
    assert name == "shuffle" or len(whole) > 12


def test_a_shuffle_buffer_state_saved_by_an_earlier_version_resumes_by_counting_samples() -> None:
    datasets = pytest.importorskip("datasets")
    dataset = shuffled(datasets)
    whole = [row["x"] for row in dataset]
    list(itertools.islice(iter(dataset), 6))
    loader = rf.Loader(rf.from_iterable(lambda: shuffled(datasets)), 3)
    earlier = {"position": 6, "steps": 2, "at": 6, "own": dataset.state_dict()}
    loader.load_state_dict({**loader.state_dict(), **earlier})
    assert numbers(loader) == whole[6:]


def test_an_unseeded_shuffle_buffer_resumes_with_the_same_object_and_else_raises_state_error() -> None:
    datasets = pytest.importorskip("datasets")
    dataset = shuffled(datasets, seed=None)
    streams = dataset, dataset, shuffled(datasets, 0, None)
    first, again, other = (rf.Loader(rf.from_iterable(stream), 3) for stream in streams)
    seen = numbers(itertools.islice(first, 2))
    state = first.state_dict()
    again.load_state_dict(state)
    assert Counter(seen + numbers(again)) == Counter(range(20))
    other.load_state_dict(state)
    with pytest.raises(StateError, match=r"(?s)same in another order.*give its shuffle a fixed seed"):
        next(iter(other))

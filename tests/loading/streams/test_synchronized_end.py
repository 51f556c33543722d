"""The agreed stop, with ranks that are threads of this process and a council that they hold between them."""

from __future__ import annotations

import gc
import itertools
import json
import random
import threading
import weakref
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch.distributed as dist

import rankfeed as rf
from rankfeed.errors import StreamError
from rankfeed.loading import rank_group
from rankfeed.loading.rank_group import TorchRankGroup
from rankfeed.loading.streams import feed as stream_feed

#: Seconds after which a rank that waits alone fails its test instead of hanging it.
PATIENCE = 60


class Table:
    """What the threads of a test meet at; counts how often."""

    def __init__(self, ranks: int) -> None:
        self.ranks = ranks
        self.meetings = 0
        self._barrier = threading.Barrier(ranks, action=self._met)
        self._said: list[Any] = [None] * ranks
        self._heard: list[Any] = []

    def _met(self) -> None:
        self.meetings += 1
        self._heard = list(self._said)

    def exchange(self, rank: int, value: Any) -> list[Any]:
        self._said[rank] = value
        self._barrier.wait(PATIENCE)
        heard = self._heard
        self._barrier.wait(PATIENCE)
        return heard


class Seat:
    def __init__(self, table: Table, rank: int) -> None:
        self.table, self.rank = table, rank

    def all_equal(self, ordinary: bool, word: int) -> bool:
        heard = self.table.exchange(self.rank, (ordinary, word))
        return all(answer == heard[0] for answer in heard) and heard[0][0]

    def gather(self, value: Any) -> list[Any]:
        return self.table.exchange(self.rank, value)


@pytest.fixture
def together(monkeypatch: pytest.MonkeyPatch) -> Callable[..., list[Any]]:
    """Run a function of (rank, topology) on ``ranks`` ranks at once; what each returned or raised."""

    def run(ranks: int, function: Callable[[rf.Topology], Any]) -> list[Any]:
        table = Table(ranks)

        def group(topology: rf.Topology, *, sharded: bool) -> Seat | None:
            return Seat(table, topology.rank) if ranks > 1 else None

        monkeypatch.setattr(stream_feed, "stream_group", group)

        def attempt(rank: int) -> Any:
            try:
                return function(rf.Topology(rank=rank, world_size=ranks))
            except rf.errors.RankfeedError as error:
                return error

        with ThreadPoolExecutor(ranks) as pool:
            return list(pool.map(attempt, range(ranks), timeout=PATIENCE * 2))

    return run


def counted(batches: Any) -> list[list[int]]:
    return [batch["x"][batch["valid"]].tolist() if "valid" in batch else batch["x"].tolist() for batch in batches]


def until_error(loader: rf.Loader) -> tuple[int, str]:
    """How many batches there are, and the error after them."""
    steps = 0
    try:
        for _ in loader:
            steps += 1
    except rf.errors.RankfeedError as error:
        return steps, str(error)
    return steps, ""


def own(lengths: tuple[int, ...], failing: dict[int, int] | None = None) -> Any:
    """A stream for each rank, of that many samples; some fail at some sample."""

    def stream(shard: tuple[int, int]) -> Iterator[dict[str, int]]:
        rank, count = shard
        assert count == len(lengths)
        for number in range(lengths[rank]):
            if (failing or {}).get(rank) == number:
                raise ValueError(f"shard {rank} is broken")
            yield {"x": rank + count * number}

    return rf.from_iterable(stream)


def everything(lengths: tuple[int, ...]) -> Counter[int]:
    ranks = len(lengths)
    return Counter(rank + ranks * number for rank in range(ranks) for number in range(lengths[rank]))


def resumed(together: Any, lengths: tuple[int, ...], batch: int, tail: Any, stop: int, **options: Any) -> int:
    """Read to a step, and on from its state; checks the whole and returns the steps."""

    def read(topology: rf.Topology) -> Any:
        loader: Any = rf.Loader(own(lengths), batch, tail=tail, topology=topology, id_column="id", **options)
        batches = list(itertools.islice(iter(loader), stop))
        state = json.dumps(loader.state_dict())
        other: Any = rf.Loader(own(lengths), batch, tail=tail, topology=topology, id_column="id")
        other.load_state_dict(json.loads(state))
        other.set_epoch(0)  # of its end, nothing is left
        batches += list(other)
        assert all(len(each["x"]) == batch for each in batches)
        assert tail == "drop" or all(len(each["valid"]) == batch for each in batches)
        for each in batches:
            rows = each["valid"] if tail == "pad" else slice(None)
            assert each["x"][rows].tolist() == each["id"][rows].tolist()
        return batches, state

    found = together(len(lengths), read)
    assert not any(isinstance(outcome, Exception) for outcome in found), found
    steps = {len(batches) for batches, _ in found}
    assert len(steps) == 1
    assert len({state for _, state in found}) == 1
    seen = Counter(number for batches, _ in found for rows in counted(batches) for number in rows)
    if tail == "pad":
        assert steps == {-(-max(lengths) // batch)}
        assert seen == everything(lengths)
    else:
        assert steps == {min(lengths) // batch}
        assert seen == everything((min(lengths) // batch * batch,) * len(lengths))
    return steps.pop()


@pytest.mark.parametrize("tail", ["drop", "pad"])
def test_ranks_with_streams_of_different_lengths_stop_at_the_same_step_and_resume_at_any_step(
    together: Any, tail: Any
) -> None:
    for lengths in ((0, 5), (4, 4), (7, 3), (1, 0, 6), (5, 5, 2)):
        for batch in (1, 2, 3):
            steps = resumed(together, lengths, batch, tail, 0)
            for stop in range(1, steps + 1):
                resumed(together, lengths, batch, tail, stop)


@pytest.mark.soak
def test_ranks_with_randomly_uneven_streams_take_equal_steps_and_resume_without_loss(together: Any) -> None:
    rng = random.Random(1)
    for _ in range(400):
        lengths = tuple(rng.randrange(40) for _ in range(rng.randrange(2, 5)))
        if any(lengths):
            batch, tail = rng.randrange(1, 5), rng.choice(["drop", "pad"])
            steps = min(lengths) // batch if tail == "drop" else -(-max(lengths) // batch)
            stop = rng.randrange(1 + steps)
            resumed(together, lengths, batch, tail, stop, num_workers=rng.randrange(3))
    print("\n400 uneven jobs of 2 to 4 ranks, each stopped and resumed: equal steps, none lost, none repeated")


def test_the_number_of_workers_changes_neither_steps_nor_batches_of_uneven_streams(together: Any) -> None:
    for tail in ("drop", "pad"):
        found = []
        for workers in (0, 1, 3):

            def read(topology: rf.Topology, workers: int = workers, tail: Any = tail) -> Any:
                # As many on each rank as its number says: the window has to be agreed on.
                number = workers and workers + topology.rank
                loader: Any = rf.Loader(own((9, 22)), 2, tail=tail, topology=topology, num_workers=number)
                return counted(loader)

            found.append(together(2, read))
        assert found[0] == found[1] == found[2]


def test_a_stream_error_on_one_rank_is_raised_on_all_ranks_after_the_same_number_of_steps(together: Any) -> None:
    for workers, (tail, at, steps) in itertools.product(
        (0, 2), (("drop", 5, 2), ("pad", 5, 2), ("pad", 0, 0), ("drop", 20, 4), ("pad", 20, 10))
    ):

        def read(topology: rf.Topology, workers: int = workers, tail: Any = tail, at: int = at) -> Any:
            stream = own((9, 30, 25), {1: at})
            return until_error(rf.Loader(stream, 2, tail=tail, topology=topology, num_workers=workers))

        found = together(3, read)
        assert [done for done, _ in found] == [steps] * 3
        if (tail, at) == ("drop", 20):
            assert [said for _, said in found] == [""] * 3  # rank 0 stops the job before
            continue
        assert "ValueError: shard 1 is broken" in found[1][1]
        for rank in (0, 2):
            assert "the stream of rank 1 failed, so all ranks stop" in found[rank][1]
            assert "ValueError: shard 1 is broken" in found[rank][1]


def test_a_transform_error_on_one_rank_raises_an_error_on_all_ranks(together: Any) -> None:
    def failing(sample: dict[str, int]) -> dict[str, float]:
        return {"x": 1 / (sample["x"] - 5)}

    def read(topology: rf.Topology) -> Any:
        return list(rf.Loader(own((9, 9)), 2, tail="drop", topology=topology, transform=failing))

    found = together(2, read)
    assert "the transform raised" in str(found[1])
    assert "stream of rank 1 failed" in str(found[0])
    assert "ZeroDivisionError" in str(found[0])


def test_a_transform_error_in_a_padding_batch_is_raised_on_all_ranks_after_the_same_steps(together: Any) -> None:
    for workers in (0, 2):

        def read(topology: rf.Topology, workers: int = workers) -> Any:
            seen: Counter[int] = Counter()

            def failing(sample: dict[str, int]) -> dict[str, int]:
                seen[sample["x"]] += 1
                if topology.rank == 0 and seen[sample["x"]] > 5:
                    raise ValueError("no room for another copy")
                return sample

            options: Any = {"tail": "pad", "topology": topology, "transform": failing, "num_workers": workers}
            return until_error(rf.Loader(own((3, 30)), 2, **options))

        found = together(2, read)
        assert found[0][0] == found[1][0] == 3
        assert "no room for another copy" in found[0][1]
        assert "the stream of rank 0 failed, so all ranks stop" in found[1][1]
        assert "no room for another copy" in found[1][1]


def test_ranks_that_read_different_streams_raise_stream_error(together: Any) -> None:
    orders = [random.Random(seed).sample(range(40), 40) for seed in range(2)]
    for streams, said in (
        ([range(40), range(36)], "rank 1 read 36 samples up to this step|rank 1 read 34 samples up to this step"),
        ([range(40), range(45)], "rank 1 read"),
        (orders, "read different samples at"),
        ([range(0), range(9)], "yielded nothing|stream of rank 0 failed"),
    ):
        for tail in ("even", "drop", "pad"):

            def read(topology: rf.Topology, streams: Any = streams, tail: Any = tail) -> Any:
                mine = [{"x": number} for number in streams[topology.rank]]
                return list(rf.Loader(rf.from_iterable(mine), 2, tail=tail, topology=topology))

            found = together(2, read)
            assert all(isinstance(outcome, StreamError) for outcome in found), found
            for each in found:
                assert any(part in str(each) for part in said.split("|")), each


def test_a_single_sample_that_differs_between_ranks_raises_stream_error_in_its_global_batch(together: Any) -> None:
    def read(topology: rf.Topology) -> Any:
        mine = [{"x": -number if number == 7 and topology.rank else number} for number in range(40)]
        return list(rf.Loader(rf.from_iterable(mine), 2, num_workers=2, topology=topology))

    for each in together(2, read):  # two workers: steps 1 and 2 are agreed on at once
        assert isinstance(each, StreamError)
        assert "read different samples at 11 or before" in str(each)


def test_ranks_sharing_one_stream_deliver_every_sample_once_in_equal_steps(together: Any) -> None:
    for workers in (0, 2):

        def read(topology: rf.Topology, workers: int = workers) -> Any:
            stream = rf.from_iterable(lambda: ({"x": number} for number in range(41)))
            loader: Any = rf.Loader(stream, 2, topology=topology, num_workers=workers)
            return [counted(loader) for _ in range(2)]

        found = together(2, read)
        for epoch in range(2):
            seen = Counter(number for rank in range(2) for rows in found[rank][epoch] for number in rows)
            assert seen == Counter(range(41))
            assert len(found[0][epoch]) == len(found[1][epoch]) == 11


def test_ranks_with_different_epochs_or_batch_sizes_raise_an_error_when_a_stream_begins(together: Any) -> None:
    def read(topology: rf.Topology, epochs: tuple[int, ...] = (0, 3), batches: tuple[int, ...] = (2, 2)) -> Any:
        loader: Any = rf.Loader(own((9, 9)), batches[topology.rank], tail="drop", topology=topology)
        loader.set_epoch(epochs[topology.rank])
        return list(loader)

    for found in (together(2, read), together(2, lambda topology: read(topology, (0, 0), (2, 4)))):
        assert all("begin the stream at different positions" in str(outcome) for outcome in found)
    assert "batch_size: 2 on rank 0, 4 on rank 1" in str(found[0])


def test_breaking_out_of_a_stream_on_all_ranks_does_not_block_the_next_iteration(together: Any) -> None:
    def read(topology: rf.Topology) -> Any:
        loader: Any = rf.Loader(own((9, 30)), 2, tail="pad", topology=topology, num_workers=2)
        left = [len(list(itertools.islice(iter(loader), steps))) for steps in (1, 2, 3, 5, 0)]
        return left, counted(loader)

    found = together(2, read)
    assert [outcome[0] for outcome in found] == [[1, 2, 3, 5, 0]] * 2
    assert Counter(number for outcome in found for rows in outcome[1] for number in rows) == everything((9, 30))


SHORT = {
    "shared": rf.from_iterable(lambda: ({"x": number} for number in range(10))),
    "own": own((3, 3, 3)),
    "empty on some ranks": own((0, 3, 0)),
    "a map source": rf.from_dataset([{"x": number} for number in range(10)]),
}


@pytest.mark.parametrize("name", SHORT)
def test_data_smaller_than_one_global_batch_give_zero_steps_with_tail_drop(name: str, together: Any) -> None:
    def epochs(topology: rf.Topology) -> tuple[list[int], int]:
        loader = rf.Loader(SHORT[name], batch_size=4, tail="drop", topology=topology)
        return [len(list(loader)) for _ in range(2)], loader.epoch

    assert together(3, epochs) == [([0, 0], 2)] * 3


def test_empty_streams_on_all_ranks_raise_an_error(together: Any) -> None:
    for tail in ("drop", "pad"):
        found = together(
            2, lambda topology, tail=tail: list(rf.Loader(own((0, 0)), 2, tail=tail, topology=topology))
        )
        assert all("the streams of all ranks are empty" in str(outcome) for outcome in found)


def test_destroying_the_process_group_also_frees_the_rank_group_of_rankfeed() -> None:
    """Otherwise its threads still free tensors at interpreter exit, which can abort the process."""
    for _ in range(2):
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        council = TorchRankGroup("rank 0 of 1")
        assert council.all_equal(ordinary=True, word=7)
        assert council.gather("here") == ["here"]
        job, ours = weakref.ref(dist.group.WORLD), weakref.ref(rank_group._groups[dist.group.WORLD])
        dist.destroy_process_group()
        gc.collect()
        assert (job(), ours()) == (None, None)
        assert not rank_group._groups

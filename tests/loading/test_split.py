"""split() hands every item of a stream to one worker of one rank, ranks first."""

from __future__ import annotations

import itertools
from collections import Counter
from typing import Any

import pytest
import torch.utils.data
from hypothesis import given
from hypothesis import strategies as st
from tests.loading.feeds import ranks
from tests.support.marks import soak

from rankfeed.loading import split
from rankfeed.topology import Topology


@given(st.integers(0, 80), st.integers(1, 5), st.integers(1, 4))
def test_split_gives_every_item_to_one_worker_and_nearly_equal_totals_to_ranks(
    items: int, world_size: int, num_workers: int
) -> None:
    totals, everything = [], Counter[int]()
    for topology in ranks(world_size):
        mine: list[int] = []
        for worker in range(num_workers):
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(Topology, "worker", staticmethod(lambda worker=worker: (worker, num_workers)))
                mine += split(range(items), topology=topology)
        totals.append(len(mine))
        everything.update(mine)
    assert everything == Counter(range(items))
    assert max(totals) - min(totals) <= 1


@pytest.mark.parametrize("method", ["fork", soak("spawn")])
def test_split_divides_the_items_of_a_rank_between_dataloader_workers(method: str) -> None:
    for num_workers in (0, 1, 2):
        options: Any = {"num_workers": num_workers, "multiprocessing_context": method if num_workers else None}
        datasets = [split(range(23), topology=topology) for topology in ranks(2)]
        shares = [list(torch.utils.data.DataLoader(dataset, None, **options)) for dataset in datasets]
        assert [len(share) for share in shares] == [12, 11]
        assert Counter(itertools.chain(*shares)) == Counter(range(23))


def test_split_gives_all_items_of_the_rank_in_each_epoch_with_persistent_workers() -> None:
    dataset = split(range(11), topology=Topology(rank=1, world_size=2))
    loader = torch.utils.data.DataLoader(dataset, batch_size=None, num_workers=2, persistent_workers=True)
    for _ in range(2):
        assert sorted(loader) == [1, 3, 5, 7, 9]


def test_split_can_be_iterated_repeatedly_and_works_on_an_endless_iterable() -> None:
    dataset = split(range(5), topology=Topology())
    assert list(dataset) == list(dataset) == [0, 1, 2, 3, 4]
    endless = split(_Endless(), topology=Topology(rank=1, world_size=4))
    assert list(itertools.islice(iter(endless), 3)) == [1, 5, 9]


class _Endless:
    def __iter__(self) -> Any:
        return itertools.count()

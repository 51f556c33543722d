"""Sources that decode chunks: every row is correct for any cache, and the cache stays within its limit."""

import multiprocessing
import threading
from collections import Counter
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.support.jobs import until

import rankfeed as rf
from rankfeed.columns.columns import ColumnBuffer
from rankfeed.columns.field import Field
from rankfeed.errors import CorruptError, SourceError
from rankfeed.sources.chunked import ChunkCache, ChunkedSource


def rows_of(ids: Any, names: tuple[str, ...]) -> dict[str, ColumnBuffer]:
    text = [str(sample_id) for sample_id in ids.tolist()]
    offsets = np.concatenate([[0], np.cumsum([len(item) for item in text])]).astype(np.int64)
    columns = {
        "x": ColumnBuffer(ids**2),
        "text": ColumnBuffer(np.frombuffer("".join(text).encode(), np.uint8), offsets),
    }
    return {name: columns[name] for name in names}


class Squares(ChunkedSource):
    """Row i is i squared, and a text of it; counts the chunks it decodes."""

    fields: Mapping[str, Field] = {"x": Field("dense", "int64"), "text": Field("str")}  # type: ignore[assignment]
    fingerprint = "5"  # type: ignore[assignment]

    def __init__(self, rows: list[int], cache_bytes: int = 1 << 20, bad: int = -1) -> None:
        self._init_chunks(rows, cache_bytes)
        self.bad = bad
        self.decoded: list[int] = []

    @property
    def blocks(self) -> Any:
        return np.diff(self._chunk_starts)

    def _load_chunk(self, number: int, names: tuple[str, ...]) -> dict[str, ColumnBuffer]:
        self.decoded.append(number)
        if number == self.bad:
            raise CorruptError("chunk is damaged", where=f"chunk {number}")
        return rows_of(np.arange(*self._chunk_starts[number : number + 2]), names)


class Taking(Squares):
    """As before, but single rows can be read as well."""

    taken = 0

    def _take(self, ids: Any, names: tuple[str, ...]) -> dict[str, ColumnBuffer]:
        assert ids.tolist() == sorted(Counter(ids.tolist()))
        self.taken += len(ids)
        return rows_of(ids, names)


def check(source: Squares, ids: list[int]) -> None:
    batch = source.fetch(ids)
    assert list(batch["x"].rows()) == [sample_id**2 for sample_id in ids]
    assert list(batch["text"].rows()) == [str(sample_id) for sample_id in ids]


@given(
    rows=st.lists(st.integers(0, 9), min_size=1, max_size=12).filter(any),
    cache=st.sampled_from([0, 100, 1 << 20]),
    kind=st.sampled_from([Squares, Taking]),
    data=st.data(),
)
def test_rows_are_correct_for_any_cache_size(rows: list[int], cache: int, kind: type[Squares], data: Any) -> None:
    source = kind(rows, cache)
    for _ in range(4):
        check(source, data.draw(st.lists(st.integers(0, sum(rows) - 1), min_size=1, max_size=30)))


def test_each_chunk_is_decoded_once_if_all_fit_the_cache() -> None:
    source = Squares([5] * 20)
    for item in np.random.default_rng(0).permutation(100).reshape(-1, 4).tolist():
        check(source, item)
    assert Counter(source.decoded) == Counter(range(20))


def test_the_chunk_cache_never_exceeds_cache_bytes() -> None:
    source = Squares([100] * 20, cache_bytes=4000)
    for start in range(0, 2000, 50):
        source.fetch(range(start, start + 50), ["x"])
        assert sum(entry.nbytes for entry in source._cache._entries.values()) <= 4000
    assert Counter(source.decoded) == Counter(range(20))


@pytest.mark.parametrize("order", [{"shuffle": "global"}, {"shuffle": "window", "window": 300, "lanes": 8}])
def test_shuffled_epochs_with_half_of_the_data_cached_rarely_decode_a_chunk_again(order: dict[str, Any]) -> None:
    source = Taking([100] * 50, cache_bytes=20_000)  # half of 50 chunks of 800 bytes
    loader = rf.Loader(source, 8, columns=["x"], id_column="id", topology=rf.Topology(), **order)
    for _ in range(2):
        assert Counter(row for batch in loader for row in batch["id"].tolist()) == Counter(range(5000))
    assert len(source.decoded) < 150  # no chunk is decoded again and again
    assert source.taken < 8000


def test_chunks_read_completely_by_an_epoch_are_evicted_first_and_decoded_once() -> None:
    source = Taking([100] * 50, cache_bytes=4000)
    for _ in rf.Loader(source, 8, columns=["x"], topology=rf.Topology()):
        pass
    assert Counter(source.decoded) == Counter(range(50))
    assert source.taken == 0


@pytest.mark.filterwarnings("error")
def test_chunks_read_completely_by_one_batch_are_evicted_first_and_decoded_once() -> None:
    source = Squares([10] * 200, cache_bytes=2000)
    for first in range(0, 2000, 25):
        check(source, [*range(first, first + 25)])
    assert Counter(source.decoded) == Counter(range(200))


def test_chunks_of_which_another_worker_reads_half_are_evicted() -> None:
    source = Taking([100] * 50, cache_bytes=8000)
    for start in range(0, 5000, 16):  # every other batch, as one of two worker processes reads
        source.fetch(range(start, start + 8), ["x"])
    assert source.taken < 500


def test_a_cache_too_small_for_a_global_shuffle_causes_one_warning() -> None:
    source = Squares([100] * 50, cache_bytes=4000)
    with pytest.warns(UserWarning, match=r"cache_bytes=4000[\s\S]*window=") as warned:
        for _ in rf.Loader(source, 8, columns=["x"], shuffle="global", topology=rf.Topology()):
            pass
    assert len(warned) == 1


def test_threads_decode_each_chunk_once_and_get_correct_rows() -> None:
    source = Squares([50] * 4)
    orders = [np.random.default_rng(seed).permutation(200).tolist() for seed in range(40)]
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda order: check(source, order), orders))
    assert Counter(source.decoded) == Counter(range(4))


def test_expected_chunks_are_decoded_before_they_are_fetched() -> None:
    source = Squares([5] * 4)
    source.expect([6, 1], None)
    source._cache._pool.shutdown(wait=True)  # type: ignore[union-attr]
    assert Counter(source.decoded) == Counter([0, 1])
    check(source, [6, 1])
    assert Counter(source.decoded) == Counter([0, 1])


def test_no_more_chunks_are_decoded_ahead_than_fit_the_cache() -> None:
    source = Squares([100] * 16, cache_bytes=2000)
    source.expect(range(0, 1600, 100), ["x"])
    until(lambda: not source._cache._pending)
    source._cache._pool.shutdown(wait=True)  # type: ignore[union-attr]
    assert len(source.decoded) <= 2


def test_all_expected_chunks_are_decoded_ahead_if_they_fit_the_cache() -> None:
    source = Squares([5] * 8)
    source.expect(range(0, 40, 5))
    until(lambda: len(source.decoded) == 8)
    assert Counter(source.decoded) == Counter(range(8))


def test_an_error_of_loading_a_chunk_is_raised_in_every_thread_that_waits_for_it() -> None:
    cache, waiting = ChunkCache(1 << 20), threading.Barrier(4)

    def load(index: int, names: tuple[str, ...]) -> dict[str, ColumnBuffer]:
        raise SourceError("no such chunk", where="chunk 3")

    def ask(_: int) -> str:
        waiting.wait(10)
        with pytest.raises(SourceError) as raised:
            cache.get((3, ()), load)
        return str(raised.value)

    with ThreadPoolExecutor(4) as pool:
        assert list(pool.map(ask, range(4))) == ["no such chunk\n  where: chunk 3"] * 4


def test_a_damaged_chunk_decoded_ahead_raises_only_when_it_is_fetched() -> None:
    source = Squares([5] * 4, bad=2)
    source.expect([11])
    source._cache._pool.shutdown(wait=True)  # type: ignore[union-attr]
    check(source, [0, 19])
    with pytest.raises(CorruptError, match="chunk 2"):
        source.fetch([11])


def _finds(cache: ChunkCache, queue: Any) -> None:
    with ThreadPoolExecutor(4) as pool:
        queue.put(list(pool.map(lambda index: cache.find([(index, ())], [1]), range(4))))


def test_threads_of_a_forked_child_use_the_cache_whose_lock_the_parent_holds() -> None:
    cache, context = ChunkCache(100), multiprocessing.get_context("fork")
    queue = context.Queue()
    child = context.Process(target=_finds, args=(cache, queue))
    with cache._lock:  # as a thread that decodes ahead may, while another one forks
        child.start()
        # It was renewed before any thread ran: one that comes second must not find half of it.
        assert queue.get(timeout=600) == [[None]] * 4
    child.join(600)
    assert child.exitcode == 0


def test_a_loader_calls_expect_with_the_ids_in_the_order_of_reading() -> None:
    source = Squares([10] * 10)
    expected: list[int] = []
    source.expect = lambda ids, columns=None: expected.extend(ids)  # type: ignore[method-assign]
    loader = rf.Loader(source, 5, shuffle="window", window=10, lanes=2, id_column="id", topology=rf.Topology())
    ids = [row for batch in loader for row in batch["id"].tolist()]
    assert Counter(ids) == Counter(range(100))
    assert expected == ids


def wide(data_bytes: int) -> Squares:
    """A source whose data may be larger than what is kept."""
    source = Squares([100] * 50)
    source.decoded_bytes = data_bytes
    source._init_chunks([100] * 50)
    return source


def test_the_default_window_suits_the_cache_for_data_larger_than_it() -> None:
    def window(source: rf.Source, **options: Any) -> Any:
        return rf.Loader(source, 8, topology=rf.Topology(), **options).plan.describe().get("window")

    small, large = wide(1 << 20), wide(100 << 30)
    assert window(small, shuffle=True) is None  # a global shuffle
    chosen = window(large, shuffle=True)
    assert 1 <= chosen <= 100
    assert window(large.select(range(500)), shuffle=True) == chosen
    assert window(rf.concat([small, large]), shuffle=True) == chosen
    assert window(large, shuffle=True, window=5000) == 5000
    assert window(large, shuffle="window") == 65536

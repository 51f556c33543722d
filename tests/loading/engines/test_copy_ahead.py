"""Batches whose rows are only copied: by threads of the native library, which never wait for the GIL."""

from __future__ import annotations

import itertools
import json
import os
import textwrap
import time
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import torch
from tests.loading.feeds import same
from tests.support.jobs import run_python
from tests.support.marks import slow

import rankfeed as rf
from rankfeed._util.native import native_library
from rankfeed._util.process_info import cpus_per_process
from rankfeed.columns.pointers import PendingCopies, RowPointers
from rankfeed.errors import CorruptError

pytestmark = pytest.mark.skipif(native_library() is None, reason="needs the native library")
COUNT = 300


@pytest.fixture(scope="module", params=["small", "large", "bytes"])
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Rows of a few bytes, of 16 KiB and more, and byte strings beside text; threads share large batches."""
    made = tmp_path_factory.mktemp(request.param)
    rng = np.random.default_rng(3)
    size = 9 if request.param == "small" else 4096
    rows: list[dict[str, Any]]
    if request.param == "bytes":
        rows = [{"raw": rng.bytes(100 + i * 997 % 80_000), "name": f"sämple {i}"} for i in range(COUNT)]
    else:
        rows = [{"x": np.full(size, i, np.float32), "r": np.full((1 + i % 7, size), i)} for i in range(COUNT)]
    rf.write(rows, made / "data", shard_bytes=4_000_000, progress=False)
    return made / "data"


def loader(folder: Path, **options: Any) -> rf.Loader:
    return rf.Loader(rf.open(folder), 8, shuffle="global", seed=4, topology=rf.Topology(), **options)


def without_copies_ahead(folder: Path, **options: Any) -> rf.Loader:
    """The same batches, each built when it is requested, as a function of the user's may change it."""
    return loader(folder, batch_transform=lambda batch: batch, **options)


@pytest.mark.parametrize("workers", [0, slow(1), 3])
@pytest.mark.parametrize("options", [{}, {"bytes_as": "view"}, {"ragged": "nested"}, {"ragged": "list"}])
def test_batches_copied_ahead_equal_batches_copied_on_demand(
    folder: Path, workers: int, options: dict[str, Any]
) -> None:
    ours, theirs = loader(folder, num_workers=workers, **options), without_copies_ahead(folder, **options)
    for _ in range(2):
        kept = list(ours)  # none is overwritten by a later one
        expected = list(theirs)
        assert len(kept) == len(expected)
        for one, other in zip(kept, expected, strict=True):
            assert list(one) == list(other)
            assert same(one, other)


def test_breaking_out_of_an_iteration_with_pending_copies_does_not_corrupt_a_kept_batch(folder: Path) -> None:
    ours = loader(folder, num_workers=2)
    expected = next(iter(without_copies_ahead(folder)))
    for taken in range(20):
        batches = iter(ours)
        first = next(batches)
        for _ in itertools.islice(batches, taken % 4):
            pass
        del batches
        assert same(first, expected)


@pytest.mark.parametrize("workers", [0, 2])
def test_the_first_next_call_starts_copies_of_later_batches(
    folder: Path, workers: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    if workers == 0 and cpus_per_process(1) == 1:
        pytest.skip("needs a second CPU")
    begun, add = list[PendingCopies](), PendingCopies.add
    monkeypatch.setattr(PendingCopies, "add", lambda self, *args: (begun.append(self), add(self, *args)))
    next(iter(loader(folder, num_workers=workers)))
    assert len(Counter(map(id, begun))) >= 2


@pytest.mark.parametrize("folder", ["small"], indirect=True)
def test_only_ranks_that_share_cpus_request_longer_scheduler_time_slices(folder: Path) -> None:
    script = f"""
        import os, re
        import rankfeed as rf
        def slice():
            return re.findall("se.slice.* ([0-9]+)", open("/proc/self/sched").read())
        os.nice(3)
        print(*slice(), os.nice(0))
        for ranks in (os.cpu_count(), os.cpu_count() + 1):
            shared = rf.Topology(rank=0, world_size=ranks, local_rank=0, local_world_size=ranks)
            next(iter(rf.Loader(rf.open({str(folder)!r}), 8, topology=shared)))
            print(*slice(), os.nice(0))
    """
    found = Path("/proc/self/sched")
    if not found.exists() or "se.slice" not in found.read_text():
        pytest.skip("this system has time slices of one length")
    if len(os.sched_getaffinity(0)) < (os.cpu_count() or 1):
        pytest.skip("processes of this machine are bound to some CPUs")
    before, one_each, shared = map(str.split, run_python(textwrap.dedent(script)).splitlines())
    assert before == one_each
    assert shared == ["20000000", before[1]]  # 3 more than that of the tests


@pytest.mark.parametrize("folder", ["small"], indirect=True)
def test_no_batch_is_copied_ahead_without_workers_and_a_second_cpu(folder: Path) -> None:
    """With as many ranks as CPUs, and with a process bound to one CPU."""
    script = f"""
        import os
        import rankfeed as rf
        from rankfeed.columns.pointers import PendingCopies
        begun, add = [], PendingCopies.add
        PendingCopies.add = lambda self, *args: (begun.append(self), add(self, *args))
        for ranks in (os.cpu_count(), 1):
            if ranks == 1:
                os.sched_setaffinity(0, {{min(os.sched_getaffinity(0))}})
            alone = rf.Topology(rank=0, world_size=ranks, local_rank=0, local_world_size=ranks)
            print(sum(1 for _ in rf.Loader(rf.open({str(folder)!r}), 8, topology=alone)) > 0, len(begun))
    """
    if not hasattr(os, "sched_setaffinity") or len(os.sched_getaffinity(0)) < (os.cpu_count() or 1):
        pytest.skip("processes of this machine are bound to some CPUs, or cannot be")
    assert run_python(textwrap.dedent(script)) == "True 0\n" * 2


@pytest.mark.parametrize("workers", [0, 2])
def test_a_truncated_file_raises_corrupt_error_after_the_readable_batches(tmp_path: Path, workers: int) -> None:
    rows = ({"x": np.full(4096, i, np.float32)} for i in range(400))
    rf.write(rows, tmp_path / "data", shard_bytes=2_000_000, progress=False)
    ours = rf.Loader(rf.open(tmp_path / "data"), 32, num_workers=workers, topology=rf.Topology())
    counted: Counter[float] = Counter()
    batches = iter(ours)
    counted.update(next(batches)["x"][:, 0].tolist())
    os.truncate(max((tmp_path / "data").glob("*.arrow")), 4096)
    values = itertools.chain.from_iterable(batch["x"][:, 0].tolist() for batch in batches)
    with pytest.raises(CorruptError):
        counted.update(values)
    assert counted
    assert counted == Counter(range(len(counted)))


def copies(count: int) -> tuple[PendingCopies, list[np.ndarray[Any, Any]], np.ndarray[Any, Any]]:
    values = np.arange(1 << 20).reshape(64, -1)
    rows = RowPointers.into(values, np.arange(64), np.ones(64, np.int64))
    outs = [np.zeros_like(values) for _ in range(count)]
    pending = PendingCopies(2)
    for out in outs:
        rows.copy_rows(out, pending)
    return pending, outs, values


def test_a_thread_that_waits_for_pending_copies_helps_copying() -> None:
    def share() -> float:
        pending, outs, values = copies(20)
        before = time.thread_time()
        assert pending.wait()
        used = time.thread_time() - before
        assert all((out == values).all() for out in outs)
        return used / (used + pending.seconds)

    # On a busy machine the others may have made all of them before this thread waits.
    assert any(share() > 0.05 for _ in range(50))


def test_a_forked_child_does_not_hang_on_pending_copies_of_its_parent() -> None:
    for _ in range(5):
        pending, outs, values = copies(20)
        child = os.fork()
        if child == 0:
            pending.wait()  # whether they were made is not known
            again, mine, _ = copies(3)
            os._exit(0 if again.wait() and all((out == values).all() for out in mine) else 1)
        assert os.waitpid(child, 0)[1] == 0
        assert pending.wait()
        assert all((out == values).all() for out in outs)


def test_copies_are_made_synchronously_if_no_copy_thread_can_start(monkeypatch: pytest.MonkeyPatch) -> None:
    class Library:
        def __getattr__(self, name: str) -> Any:
            return (lambda *_: 0) if name == "rankfeed_submit" else getattr(native_library(), name)

    monkeypatch.setattr("rankfeed.columns.pointers.native_library", Library)
    _, outs, values = copies(3)
    assert all((out == values).all() for out in outs)


@pytest.mark.parametrize("folder", ["bytes"], indirect=True)
def test_a_process_exits_cleanly_while_copies_are_pending(folder: Path) -> None:
    script = f"""
        import rankfeed as rf
        batches = iter(rf.Loader(rf.open({str(folder)!r}), 8, num_workers=2, topology=rf.Topology()))
        print(len(next(batches)))
    """
    run_python(textwrap.dedent(script))  # fails unless the exit status is 0


def test_hugging_face_indices_copied_ahead_are_complete_before_rows_are_looked_up(tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets")
    folder, order = tmp_path / "data", np.random.default_rng(1).permutation(30_000)
    datasets.Dataset.from_dict({"n": np.arange(30_000)}).save_to_disk(folder)
    table = pa.table({"indices": pa.array(order, pa.uint64())})
    with pa.ipc.new_stream(str(folder / "indices.arrow"), table.schema) as writer:
        writer.write_table(table)
    state = json.loads((folder / "state.json").read_text())
    state["_indices_data_files"] = [{"filename": "indices.arrow"}]
    (folder / "state.json").write_text(json.dumps(state))
    ours = rf.Loader(rf.open(folder), 64, num_workers=2, topology=rf.Topology())
    assert np.array_equal(np.concatenate([batch["n"].numpy() for batch in ours]), order)


def test_stats_count_copy_time_as_source_seconds(folder: Path) -> None:
    ours = loader(folder, num_workers=1)
    found = PendingCopies.wait

    def slow(self: PendingCopies) -> bool:
        made = found(self)
        self.seconds += 1.0
        return made

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(PendingCopies, "wait", slow)
        steps = sum(1 for _ in ours)
    assert ours.stats()["source_seconds"] > steps / 40  # several steps are one copy


def test_two_concurrent_iterators_give_equal_batches_while_torch_uses_threads(folder: Path) -> None:
    ours = loader(folder, num_workers=2)
    steps = 0
    for one, other in zip(ours, ours, strict=True):
        assert same(one, other)
        torch.ones(300, 300) @ torch.ones(300, 300)
        steps += 1
    assert steps == -(-COUNT // 8)

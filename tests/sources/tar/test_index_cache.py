"""Indexes are created once, stored where writing is allowed, and used only if complete and of this shard."""

import dataclasses
import multiprocessing
import os
import shutil
import signal
import time
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from tests.support.tar import write_tar

import rankfeed as rf
from rankfeed.errors import CorruptError, SourceError
from rankfeed.sources.tar import index_cache
from rankfeed.sources.tar.index_cache import IndexCache, index_places
from rankfeed.sources.tar.tar_index import decode, encode, read_summary, scan
from rankfeed.storage.checksum import digest_of


def write_names(path: Path, *names: str) -> Path:
    """An archive of empty files."""
    return write_tar(path, dict.fromkeys(names, b""))


@pytest.fixture
def shard(tmp_path: Path) -> Path:
    return write_names(tmp_path / "a.tar", "1.a", "1.b", "2.a", "3.b", "3.a")


@pytest.fixture
def read_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Writing into the folder of the shard is not allowed."""
    real = os.access
    monkeypatch.setattr(os, "access", lambda path, mode: Path(path) != tmp_path and real(path, mode))


def keys(shard: Path, cache_dir: Path | None = None) -> list[str]:
    """The keys of the samples of a shard, by its index."""
    index = IndexCache(cache_dir).load(str(shard))
    return [index.key(row) for row in range(index.summary.samples)]


def test_an_encoded_index_is_decoded_to_the_same_members(shard: Path, tmp_path: Path) -> None:
    index = scan(str(shard))
    content = encode(index)
    again = decode(np.frombuffer(content, np.uint8))
    assert again is not None
    assert again.summary == index.summary
    rows = np.array([2, 0, 1])
    for name, sizes in (("a", [0, 0, 0]), ("b", [0, 0, -1]), ("c", [-1, -1, -1])):
        for item in (index, again):
            starts, result = item.locate(name, rows)
            assert result.tolist() == sizes
            assert (starts[result >= 0] % 512 == 0).all()
    assert [again.key(row) for row in range(3)] == ["1", "2", "3"]
    (tmp_path / "i").write_bytes(content)
    assert read_summary(str(tmp_path / "i")) == index.summary


def test_scanned_offsets_are_those_of_a_tar_idx_file(shard: Path) -> None:
    assert scan(str(shard)).offsets.tolist() == [0, 1024, 1536, 2560]


def test_a_truncated_or_damaged_index_is_not_decoded(shard: Path, tmp_path: Path) -> None:
    content = encode(scan(str(shard)))
    for size in range(len(content)):
        assert decode(np.frombuffer(content[:size], np.uint8)) is None
    for place in range(len(content)):
        bad = bytearray(content)
        bad[place] ^= 4
        assert decode(np.frombuffer(bytes(bad), np.uint8)) is None
    assert decode(np.frombuffer(content + b"\0", np.uint8)) is None


@pytest.mark.usefixtures("read_only")
def test_the_index_of_read_only_data_is_stored_in_the_cache_directory(
    shard: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    IndexCache(tmp_path / "cache").summaries([str(shard)])
    assert index_places(str(shard), tmp_path / "cache")[1].is_file()
    assert not index_places(str(shard), None)[0].exists()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "home"))
    assert keys(shard) == ["1", "2", "3"]
    assert list((tmp_path / "home").rglob("a.tar.rankfeed"))
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(SourceError, match="cache_dir="):
        keys(shard, tmp_path / "file" / "no")


def test_an_index_is_rebuilt_when_its_shard_changes(shard: Path) -> None:
    store = IndexCache()
    store.summaries([str(shard)])
    write_names(shard, "1.a", "2.a", "4.c")
    assert store.summaries([str(shard)])[0].samples == 3
    assert [item.name for item in store.load(str(shard)).summary.extensions] == ["a", "c"]
    write_names(shard, "7.a")
    assert keys(shard) == ["7"]


def test_a_shard_touched_while_it_is_indexed_gets_an_index(shard: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As when it is copied again: its content is written, then its time is set."""
    changes = iter(range(3))

    def scan_and_touch(tar: str) -> Any:
        index = scan(tar)
        if (change := next(changes, None)) is not None:
            os.utime(tar, ns=(change, change))
        return index

    monkeypatch.setattr(index_cache, "scan", scan_and_touch)
    assert len(IndexCache().load(str(shard)).offsets) == len(scan(str(shard)).offsets)


def test_the_index_of_another_shard_is_not_used(shard: Path, tmp_path: Path) -> None:
    other = write_names(tmp_path / "b.tar", "9.z")
    IndexCache().summaries([str(shard), str(other)])
    shutil.copy(index_places(str(other), None)[0], index_places(str(shard), None)[0])
    assert keys(shard) == ["1", "2", "3"]


def test_a_shard_replaced_by_another_of_the_same_size_and_time_is_an_error(shard: Path) -> None:
    assert [sample["__key__"] for sample in rf.open(shard, missing="mask")] == ["1", "2", "3"]
    result = shard.stat()
    write_names(shard, "1.a", "1.b", "4.a", "3.b", "3.a")
    os.utime(shard, ns=(result.st_atime_ns, result.st_mtime_ns))
    with pytest.raises(CorruptError, match=r"not the one that was indexed[\s\S]*a\.tar[\s\S]*touch"):
        rf.open(shard, missing="mask").fetch([0])


def test_processes_that_index_a_shard_at_once_leave_one_index(tmp_path: Path) -> None:
    shard = write_names(tmp_path / "a.tar", *(f"{n}.txt" for n in range(500)))
    context = multiprocessing.get_context("fork")
    results: multiprocessing.Queue[int] = context.Queue()
    children = [context.Process(target=lambda: results.put(len(keys(shard)))) for _ in range(4)]
    for child in children:
        child.start()
    assert [results.get(timeout=600) for _ in children] == [500] * 4
    for child in children:
        child.join(timeout=60)
    left = sorted(path.name for path in tmp_path.iterdir() if not path.name.endswith(".lock"))
    assert left == ["a.tar", "a.tar.rankfeed"]


def test_a_process_that_waits_for_the_index_lock_logs_it_and_resumes_when_the_holder_is_killed(
    shard: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    context = multiprocessing.get_context("fork")
    ready = context.Event()

    def hold() -> None:
        with index_cache.locked(tmp_path / ".rankfeed-index.lock", "nothing"):
            ready.set()
            time.sleep(100)

    holder = context.Process(target=hold)
    holder.start()
    assert ready.wait(600)
    monkeypatch.setattr(index_cache, "_REPORT_SECONDS", 0.2)
    said: list[str] = []

    def warned(message: str, *about: object) -> None:
        said.append(message % about)
        holder.kill()

    monkeypatch.setattr(index_cache._log, "warning", warned)
    assert keys(shard) == ["1", "2", "3"]
    holder.join(timeout=60)
    assert holder.exitcode == -9
    assert [str(tmp_path) in item for item in said] == [True]


@pytest.mark.usefixtures("read_only")
def test_a_damaged_index_beside_read_only_data_is_replaced_by_one_in_the_cache_directory(
    shard: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    content = bytearray(encode(scan(str(shard))))
    content[-1] ^= 1  # what the header says is right
    beside = index_places(str(shard), None)[0]
    beside.write_bytes(content)
    assert keys(shard, tmp_path / "cache") == ["1", "2", "3"]
    assert beside.read_bytes() == bytes(content)
    monkeypatch.setattr(index_cache, "scan", None)
    assert keys(shard, tmp_path / "cache") == ["1", "2", "3"]


def test_an_index_whose_file_name_a_directory_has_is_stored_in_the_cache(shard: Path, tmp_path: Path) -> None:
    index_places(str(shard), None)[0].mkdir()
    assert keys(shard, tmp_path / "cache") == ["1", "2", "3"]
    assert index_places(str(shard), tmp_path / "cache")[1].is_file()


def test_a_named_pipe_with_the_file_name_of_the_index_does_not_block_indexing(shard: Path) -> None:
    os.mkfifo(index_places(str(shard), None)[0])
    assert keys(shard) == ["1", "2", "3"]


@pytest.mark.parametrize("change", [{"repeated": (0, 3)}, {"repeated": (-1, 0)}, {"name": "__key__"}])
def test_an_index_header_with_invalid_values_is_rejected(change: dict[str, Any], shard: Path) -> None:
    index = scan(str(shard))
    summary = index.summary
    if "name" in change:
        first, *others = summary.extensions
        change = {"extensions": [msgspec.structs.replace(first, **change), *others]}
    forged = dataclasses.replace(index, summary=msgspec.structs.replace(summary, **change))
    path = index_places(str(shard), None)[0]
    path.write_bytes(encode(forged))
    assert read_summary(str(path)) is None


def test_index_arrays_with_right_checksums_and_places_outside_the_archive_are_rejected(shard: Path) -> None:
    index = scan(str(shard))

    def is_believed(**arrays: Any) -> bool:
        forged = dataclasses.replace(index, **arrays)
        names = ("offsets", "key_offsets", "rows", "starts", "sizes", "keys")
        digest = digest_of(b"".join(getattr(forged, name).tobytes() for name in names))
        forged = dataclasses.replace(forged, summary=msgspec.structs.replace(index.summary, digest=digest))
        return decode(np.frombuffer(encode(forged), np.uint8)) is not None

    assert is_believed()
    for name in ("offsets", "key_offsets", "rows", "starts", "sizes"):
        for place, value in ((0, -1), (1, -1), (1, 2**63 - 1), (-1, 2**40)):
            forged = getattr(index, name).copy()
            forged[place] = value
            assert not is_believed(**{name: forged})
    # Differences of these numbers overflow, and are not negative.
    assert not is_believed(key_offsets=np.array([0, 2**63 - 1, -(2**63), index.summary.key_bytes]))


def test_a_shard_is_indexed_after_an_indexer_was_killed(shard: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Killed when the bytes are written and not yet in their place."""
    monkeypatch.setattr(os, "replace", lambda *_: os.kill(os.getpid(), signal.SIGKILL))
    child = multiprocessing.get_context("fork").Process(target=IndexCache().load, args=(str(shard),))
    child.start()
    child.join(timeout=60)
    assert child.exitcode == -9
    monkeypatch.undo()
    assert keys(shard) == ["1", "2", "3"]

"""Indexes are created once, stored where writing is allowed, and used only if complete and of this shard."""

import dataclasses
import multiprocessing
import os
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
from rankfeed.sources.tar import index_cache as tar_store
from rankfeed.sources.tar.index_cache import IndexCache, index_places
from rankfeed.sources.tar.tar_index import decode, encode, read_summary, scan
from rankfeed.storage.checksum import digest_of


def write_names(path: Path, *names: str) -> Path:
    """An archive of empty files."""
    return write_tar(path, dict.fromkeys(names, b""))


@pytest.fixture
def shard(tmp_path: Path) -> Path:
    return write_names(tmp_path / "a.tar", "1.a", "1.b", "2.a", "3.b", "3.a")


def test_an_index_is_read_back_as_it_was_written(shard: Path, tmp_path: Path) -> None:
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


def test_offsets_are_those_of_a_tar_idx(shard: Path) -> None:
    assert scan(str(shard)).offsets.tolist() == [0, 1024, 1536, 2560]


def test_an_index_that_is_not_whole_is_not_believed(shard: Path, tmp_path: Path) -> None:
    content = encode(scan(str(shard)))
    for size in range(len(content)):
        assert decode(np.frombuffer(content[:size], np.uint8)) is None
    for place in range(len(content)):
        bad = bytearray(content)
        bad[place] ^= 4
        assert decode(np.frombuffer(bytes(bad), np.uint8)) is None
    assert decode(np.frombuffer(content + b"\0", np.uint8)) is None


def test_it_is_stored_in_the_cache_folder_if_the_data_folder_is_read_only(
    shard: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = os.access
    monkeypatch.setattr(os, "access", lambda path, mode: Path(path) != tmp_path and real(path, mode))
    IndexCache(tmp_path / "cache").summaries([str(shard)])
    assert index_places(str(shard), tmp_path / "cache")[1].is_file()
    assert not index_places(str(shard), None)[0].exists()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "home"))
    assert IndexCache().load(str(shard)).summary.samples == 3
    assert list((tmp_path / "home").rglob("a.tar.rankfeed"))
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(SourceError, match="cache_dir="):
        IndexCache(tmp_path / "file" / "no").load(str(shard))


def test_it_is_renewed_when_the_shard_changes(shard: Path) -> None:
    store = IndexCache()
    store.summaries([str(shard)])
    write_names(shard, "1.a", "2.a", "4.c")
    assert store.summaries([str(shard)])[0].samples == 3
    assert [item.name for item in store.load(str(shard)).summary.extensions] == ["a", "c"]
    write_names(shard, "7.a")
    assert store.load(str(shard)).summary.samples == 1


def test_it_is_made_of_a_shard_whose_time_changes_meanwhile(shard: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As when it is copied again: its content is written, then its time is set."""
    scan, changes = tar_store.scan, iter(range(3))

    def scan_and_touch(tar: str) -> Any:
        index = scan(tar)
        if (change := next(changes, None)) is not None:
            os.utime(tar, ns=(change, change))
        return index

    monkeypatch.setattr(tar_store, "scan", scan_and_touch)
    assert len(IndexCache().load(str(shard)).offsets) == len(scan(str(shard)).offsets)


def test_an_index_of_another_shard_is_not_taken(shard: Path, tmp_path: Path) -> None:
    other = write_names(tmp_path / "b.tar", "9.z")
    store = IndexCache()
    store.summaries([str(shard), str(other)])
    places = [index_places(str(path), None)[0] for path in (shard, other)]
    places[0].write_bytes(places[1].read_bytes())
    assert store.load(str(shard)).key(0) == "1"


def test_an_index_of_another_archive_of_the_same_size_and_time_is_not_used(shard: Path) -> None:
    """Both may be those of a file that was unpacked or copied."""
    assert [sample["__key__"] for sample in rf.open(shard, missing="mask")] == ["1", "2", "3"]
    result = shard.stat()
    write_names(shard, "1.a", "1.b", "4.a", "3.b", "3.a")
    os.utime(shard, ns=(result.st_atime_ns, result.st_mtime_ns))
    with pytest.raises(CorruptError, match=r"not the one that was indexed[\s\S]*a\.tar[\s\S]*touch"):
        rf.open(shard, missing="mask").fetch([0])


def _index(tar: str, results: "multiprocessing.Queue[int]") -> None:
    results.put(IndexCache().load(tar).summary.samples)


def test_many_processes_index_a_shard_once(tmp_path: Path) -> None:
    shard = write_names(tmp_path / "a.tar", *(f"{n}.txt" for n in range(500)))
    context = multiprocessing.get_context("fork")
    results: multiprocessing.Queue[int] = context.Queue()
    children = [context.Process(target=_index, args=(str(shard), results)) for _ in range(4)]
    for child in children:
        child.start()
    assert [results.get(timeout=600) for _ in children] == [500] * 4
    for child in children:
        child.join(timeout=60)
    left = sorted(path.name for path in tmp_path.iterdir() if not path.name.endswith(".lock"))
    assert left == ["a.tar", "a.tar.rankfeed"]


def _hold(folder: str, ready: "multiprocessing.Queue[int]") -> None:
    with tar_store.locked(Path(folder, ".rankfeed-index.lock"), "nothing"):
        ready.put(1)
        time.sleep(100)


def test_who_waits_says_for_what_and_goes_on_when_the_other_is_killed(
    shard: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    context = multiprocessing.get_context("fork")
    ready: multiprocessing.Queue[int] = context.Queue()
    holder = context.Process(target=_hold, args=(str(tmp_path), ready))
    holder.start()
    ready.get(timeout=600)
    monkeypatch.setattr(tar_store, "_REPORT_SECONDS", 0.2)
    said: list[str] = []

    def warned(message: str, *about: object) -> None:
        said.append(message % about)
        holder.kill()

    monkeypatch.setattr(tar_store._log, "warning", warned)
    assert IndexCache().load(str(shard)).summary.samples == 3
    holder.join(timeout=60)
    assert holder.exitcode == -9
    assert [str(tmp_path) in item for item in said] == [True]


def test_a_damaged_index_that_cannot_be_removed_is_made_anew_elsewhere(
    shard: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    IndexCache().summaries([str(shard)])
    beside = index_places(str(shard), None)[0]
    content = bytearray(beside.read_bytes())
    content[-1] ^= 1  # what the header says is right
    beside.write_bytes(content)
    real = os.access
    monkeypatch.setattr(os, "access", lambda path, mode: Path(path) != tmp_path and real(path, mode))
    store = IndexCache(tmp_path / "cache")
    assert [store.load(str(shard)).key(row) for row in range(3)] == ["1", "2", "3"]
    assert beside.read_bytes() == bytes(content)
    monkeypatch.setattr(tar_store, "scan", None)
    assert store.load(str(shard)).summary.samples == 3


def test_it_goes_to_the_cache_folder_where_its_name_beside_is_taken(shard: Path, tmp_path: Path) -> None:
    index_places(str(shard), None)[0].mkdir()
    store = IndexCache(tmp_path / "cache")
    assert store.load(str(shard)).summary.samples == 3
    assert index_places(str(shard), tmp_path / "cache")[1].is_file()


def test_a_pipe_in_the_place_of_an_index_is_not_waited_for(shard: Path) -> None:
    os.mkfifo(index_places(str(shard), None)[0])
    assert IndexCache().load(str(shard)).summary.samples == 3


@pytest.mark.parametrize("change", [{"repeated": (0, 3)}, {"repeated": (-1, 0)}, {"name": "__key__"}])
def test_a_header_that_means_no_good_is_not_believed_though_its_checksum_is_right(
    change: dict[str, Any], shard: Path
) -> None:
    index = tar_store.scan(str(shard))
    summary = index.summary
    if "name" in change:
        first, *others = summary.extensions
        change = {"extensions": [msgspec.structs.replace(first, **change), *others]}
    forged = dataclasses.replace(index, summary=msgspec.structs.replace(summary, **change))
    path = index_places(str(shard), None)[0]
    path.write_bytes(encode(forged))
    assert read_summary(str(path)) is None


def test_numbers_outside_the_archive_are_not_believed_though_the_checksums_are_right(shard: Path) -> None:
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


def test_a_process_that_is_killed_while_it_indexes_leaves_nothing_in_the_way(
    shard: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Killed when the bytes are written and not yet in their place."""
    monkeypatch.setattr(os, "replace", lambda *_: os.kill(os.getpid(), signal.SIGKILL))
    child = multiprocessing.get_context("fork").Process(target=IndexCache().load, args=(str(shard),))
    child.start()
    child.join(timeout=60)
    assert child.exitcode == -9
    monkeypatch.undo()
    assert IndexCache().load(str(shard)).summary.samples == 3

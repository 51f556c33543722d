"""A file is there whole or not at all."""

import os
import threading
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from rankfeed.storage.checksum import digest_of
from rankfeed.storage.commit import atomic_file, make_directory, write_atomic


def test_a_concurrent_reader_sees_only_complete_versions_of_a_file(tmp_path: Path) -> None:
    path = tmp_path / "file"
    write_atomic(path, b"0" * 100_000)
    stop = threading.Event()

    def writer() -> None:
        for i in range(1, 60):
            write_atomic(path, str(i % 10).encode() * 100_000)
        stop.set()

    thread = threading.Thread(target=writer)
    thread.start()
    while not stop.is_set():
        content = path.read_bytes()
        assert len(content) == 100_000
        assert len(set(content)) == 1
    thread.join()
    assert os.listdir(tmp_path) == ["file"]


def test_an_atomic_write_that_fails_leaves_the_old_file(tmp_path: Path) -> None:
    path = tmp_path / "file"
    write_atomic(path, b"old")

    def fail() -> None:
        with atomic_file(path) as file:
            file.write(b"half of the n")
            raise KeyError

    with pytest.raises(KeyError):
        fail()
    assert path.read_bytes() == b"old"
    assert os.listdir(tmp_path) == ["file"]


def test_a_digest_of_several_pieces_depends_on_their_boundaries() -> None:
    assert digest_of(b"ab", b"c") != digest_of(b"a", b"bc")


def test_make_directory_succeeds_though_others_remove_the_parent(tmp_path: Path) -> None:
    path, create, races = tmp_path / "staging" / "ranks", os.mkdir, list(range(6))

    def create_late(target: str | os.PathLike[str], *arguments: Any, **options: Any) -> None:
        if os.fspath(target) == os.fspath(path) and races:
            races.pop()
            with suppress(OSError):
                path.parent.rmdir()
        create(target, *arguments, **options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "mkdir", create_late)
        make_directory(path)
    assert path.is_dir()
    assert not races

"""Files read by calls, or from the part of them that stays mapped."""

import gc
import os
from pathlib import Path

import pytest

from rankfeed.errors import CorruptError, SourceError
from rankfeed.storage import map_file, mapped
from rankfeed.storage.region import File, Region

CONTENT = bytes(range(250)) * 40


@pytest.fixture
def path(tmp_path: Path) -> Path:
    path = tmp_path / "content"
    path.write_bytes(CONTENT)
    return path


@pytest.fixture(autouse=True)
def none_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    gc.collect()  # what earlier tests left
    monkeypatch.setattr(mapped, "_residency", mapped._Residency())


@pytest.mark.parametrize("kept", [0, 1, 4096, 5000, len(CONTENT) - 1, len(CONTENT), 1 << 30])
@pytest.mark.parametrize("base", [0, 7])
def test_every_byte_is_the_same_wherever_the_kept_part_ends(
    kept: int, base: int, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mapped, "KEPT_BYTES", kept)
    file = File(path, map_file(path))
    assert len(file.kept) == min(kept, len(CONTENT))
    region = Region(file, base)
    edges = sorted({0, 1, kept - base - 3, kept - base, 4000, 4999, len(CONTENT) - base - 5})
    for offset in (edge for edge in edges if 0 <= edge <= len(CONTENT) - base):
        for size in (0, 1, 5, 300):
            wanted = CONTENT[base + offset : base + offset + size]
            if len(wanted) < size:
                continue
            assert region.read(size, offset) == wanted
            buffer = bytearray(size)
            region.read_into(memoryview(buffer), offset)
            assert buffer == wanted


@pytest.mark.parametrize("kept", [0, 5000, 1 << 30])
def test_an_end_that_comes_too_early_is_an_error_and_no_short_row(
    kept: int, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mapped, "KEPT_BYTES", kept)
    region = Region(File(path, map_file(path)), 10)
    with pytest.raises(CorruptError, match="ends too early"):
        region.read(300, len(CONTENT) - 200)
    with pytest.raises(CorruptError, match="ends too early"):
        region.read_into(memoryview(bytearray(300)), len(CONTENT) - 200)


def test_what_the_system_refuses_names_file_and_offset(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mapped, "KEPT_BYTES", 0)
    file = File(path)
    folder = os.open(path.parent, os.O_RDONLY)
    os.dup2(folder, file.handle)  # which cannot be read from
    os.close(folder)
    region = Region(file, 10)
    for read in (lambda: region.read(5, 7), lambda: region.read_into(memoryview(bytearray(5)), 7)):
        with pytest.raises(SourceError, match=r"cannot be read[\s\S]*directory[\s\S]*content, offset 17"):
            read()


def test_what_is_kept_is_bounded_over_all_files_and_given_back(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mapped, "KEPT_BYTES", len(CONTENT) + 1000)
    data = map_file(path)
    first, second, third = (File(path, data) for _ in range(3))
    assert [len(file.kept) for file in (first, second, third)] == [len(CONTENT), 1000, 0]
    assert len(File(path).kept) == 0
    del first
    gc.collect()
    assert len(File(path, data).kept) == len(CONTENT)
    handle = second.handle
    del second
    gc.collect()
    with pytest.raises(OSError, match="Bad file"):
        os.fstat(handle)

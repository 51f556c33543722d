"""Adding to a packed data set: what is there stays as it is, and what is added is added once."""

import os
from collections import Counter
from contextlib import suppress
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import rankfeed as rf
from rankfeed.building import last_moves
from rankfeed.building import staging as staging_module
from rankfeed.errors import PackError

packing_module = import_module("rankfeed.building.packing")


def rows(first: int, last: int) -> list[dict[str, Any]]:
    return [{"id": i, "x": np.full(3, i, np.int32)} for i in range(first, last)]


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(folder.iterdir()) if path.is_file()}


def ids(source: rf.Source) -> list[int]:
    return [int(sample["id"]) for sample in source]


@pytest.fixture
def base(tmp_path: Path) -> Path:
    rf.pack(rows(0, 100), tmp_path / "p", shard_bytes=500, progress=False)
    return tmp_path / "p"


def test_rows_are_added_and_the_old_shards_are_not_touched(base: Path, tmp_path: Path) -> None:
    before = contents(base)
    stamps = {path.name: path.stat().st_mtime_ns for path in base.glob("*.arrow")}
    opened = rf.open(base)
    packed = rf.pack(rows(100, 150), base, shard_bytes=500, append=True, progress=False)
    assert ids(packed) == list(range(150))
    assert {name: data for name, data in contents(base).items() if name in stamps} == {
        name: data for name, data in before.items() if name in stamps
    }
    assert {name: (base / name).stat().st_mtime_ns for name in stamps} == stamps
    assert ids(opened) == list(range(100))  # whoever had it open goes on reading what it opened
    more = rf.pack(rf.open(base).select(range(20, 40)), base, append=True, workers=0, progress=False)
    assert Counter(ids(more)) == Counter([*range(150), *range(20, 40)])
    assert not (base / ".rankfeed-pack").exists()


def test_an_input_that_can_be_told_is_not_added_twice(base: Path, tmp_path: Path) -> None:
    first = rf.pack(rows(100, 130), tmp_path / "first", progress=False)
    second = rf.pack(rows(130, 160), tmp_path / "second", progress=False)
    for source in (first, second, first, second):
        packed = rf.pack(source, base, append=True, progress=False)
    assert ids(packed) == list(range(160))
    for how in ({"shard_bytes": 200}, {"order": "shuffled"}):  # the same rows, in other shards or another order
        packed = rf.pack(first, base, append=True, progress=False, **how)  # type: ignore[arg-type]
    assert ids(packed) == list(range(160))
    for _ in range(2):
        packed = rf.pack(iter(rows(160, 170)), base, append=True, key="friday", progress=False)
    assert ids(packed) == list(range(170))


@pytest.mark.parametrize("kind", ["rows", "source"])
def test_an_append_goes_on_from_any_rename_and_adds_once(
    kind: str, base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Killed(BaseException):
        pass

    replace, count, limit, killed = os.replace, 0, 0, True

    def stopping(source: Path, target: Path) -> None:
        nonlocal count, killed
        if count == limit:
            killed = True
            raise Killed
        count += 1
        replace(source, target)

    new = rows(100, 160)
    given = rf.pack(new, tmp_path / "new", progress=False)
    before = contents(base)
    while killed:
        for name in contents(base):
            (base / name).unlink()
        for name, data in before.items():
            (base / name).write_bytes(data)
        limit, count, killed = limit + 1, 0, False
        with monkeypatch.context() as patch, suppress(Killed):
            patch.setattr("os.replace", stopping)
            arguments: dict[str, Any] = {"shard_bytes": 300, "append": True, "workers": 0, "progress": False}
            rf.pack(iter(new) if kind == "rows" else given, base, **arguments)
        if killed:
            assert ids(rf.open(base)) == list(range(100))
            rf.pack(iter(new) if kind == "rows" else given, base, **arguments)
        assert ids(rf.open(base)) == list(range(160))
    assert limit > 9
    assert not (base / ".rankfeed-pack").exists()


def test_an_append_that_is_interrupted_again_while_it_is_known_again_adds_once(
    base: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Killed(BaseException):
        pass

    def killed(*_: Any) -> None:
        raise Killed

    for module, name in ((last_moves, "finish"), (packing_module, "_parts"), (packing_module, "_parts")):
        with monkeypatch.context() as patch, suppress(Killed):
            patch.setattr(module, name, killed)
            rf.pack(iter(rows(100, 160)), base, append=True, progress=False)
    assert ids(rf.pack(iter(rows(100, 160)), base, append=True, progress=False)) == list(range(160))
    assert not (base / ".rankfeed-pack").exists()


def test_rows_that_do_not_fit_are_refused_and_nothing_changes(base: Path) -> None:
    before = contents(base)
    for other, said in (
        ([{"id": 1, "x": np.zeros(4, np.int32)}], "'x'"),
        ([{"id": 1, "x": np.zeros(3)}], "'x'"),
        ([{"id": 1}], "'x'"),
        ([{"id": "one", "x": np.zeros(3, np.int32)}], "'id'"),
    ):
        with pytest.raises(PackError, match=said):
            rf.pack(other, base, append=True, progress=False)
        assert ids(rf.open(base)) == list(range(100))
    assert contents(base).items() >= before.items()
    rf.pack(rows(100, 101), base, append=True, progress=False, resume=False)
    assert ids(rf.open(base)) == list(range(101))


def test_narrow_rows_are_stored_as_the_data_set_has_them(tmp_path: Path) -> None:
    rf.pack([{"x": np.arange(n, dtype=np.int64)} for n in (1, 2)], tmp_path / "p", progress=False)
    packed = rf.pack([{"x": np.arange(3, dtype=np.int8)}] * 2, tmp_path / "p", append=True, progress=False)
    assert [sample["x"].tolist() for sample in packed] == [[0], [0, 1], [0, 1, 2], [0, 1, 2]]


def test_whole_numbers_that_lose_digits_are_not_appended_to_floats(tmp_path: Path) -> None:
    rf.pack([{"x": 0.5}], tmp_path / "p", progress=False)
    before = contents(tmp_path / "p")
    with pytest.raises(PackError, match="digits"):
        rf.pack([{"x": 2**53 + 1}], tmp_path / "p", append=True, progress=False)
    assert contents(tmp_path / "p") == before


def test_there_must_be_something_to_append_to(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "empty").mkdir()
    for name in ("new", "empty"):
        with pytest.raises(PackError, match="no finished data set"):
            rf.pack(rows(0, 1), tmp_path / name, append=True, progress=False)
    assert not (tmp_path / "new").exists()
    with monkeypatch.context() as patch:
        patch.setattr(packing_module, "commit", lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            rf.pack(rows(0, 9), tmp_path / "half", progress=False)
    with pytest.raises(PackError, match="no finished data set"):
        rf.pack(rows(0, 1), tmp_path / "half", append=True, progress=False)


def test_a_data_set_that_was_added_to_is_not_taken_for_its_beginning(base: Path) -> None:
    rf.pack(rows(100, 110), base, append=True, progress=False)
    with pytest.raises(PackError, match="another input"):
        rf.pack(rows(0, 100), base, shard_bytes=500, progress=False)
    assert len(rf.open(base)) == 110


def test_two_writers_of_one_part_leave_the_same_bytes(tmp_path: Path) -> None:
    from rankfeed.building.stretches import chunks_of_rows, cut

    (chunk,) = cut(chunks_of_rows(enumerate(rows(0, 10)), 1 << 20, "row"), 1 << 20)
    one = staging_module.write_part(tmp_path, 0, 0, chunk)
    (tmp_path / one.shard.path).with_suffix(".json").unlink()  # the other has not seen the record yet
    assert staging_module.write_part(tmp_path, 0, 0, chunk) == one
    (other,) = cut(chunks_of_rows(enumerate(rows(1, 11)), 1 << 20, "row"), 1 << 20)
    assert staging_module.write_part(tmp_path, 0, 0, other).shard.path != one.shard.path
    assert staging_module.is_whole(tmp_path, one)

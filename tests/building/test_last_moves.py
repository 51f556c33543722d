"""The last moves of a pack, killed at each of them: made once, by whichever call comes next, or not at all."""

from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

import rankfeed as rf
from rankfeed.errors import PackError

pack_module = import_module("rankfeed.building.pack")
STAGING = ".rankfeed-pack"


class Killed(BaseException):
    pass


def rows(first: int, last: int) -> list[dict[str, int]]:
    return [{"id": i} for i in range(first, last)]


def pack(given: Any, dest: Path, **options: Any) -> rf.Source:
    return rf.pack(given, dest, shard_bytes=200, workers=0, progress=False, **options)


def ids(source: rf.Source) -> list[int]:
    return [int(sample["id"]) for sample in source]


def visible(folder: Path) -> list[Path]:
    return [path for path in folder.iterdir() if path.name != STAGING]


def killed_after(moves: int, monkeypatch: pytest.MonkeyPatch, work: Callable[[], object]) -> None:
    """Do some work, which is dead once it has moved so many shards (-1: just before its manifest)."""
    replace, made = import_module("os").replace, 0

    def stopping(source: Path, target: Path) -> None:
        nonlocal made
        if Path(target).name.startswith("shard-"):
            if made == moves:
                raise Killed
            made += 1
        elif Path(target).name == "rankfeed.json":
            raise Killed
        replace(source, target)

    with monkeypatch.context() as patch, suppress(Killed):
        patch.setattr("os.replace", stopping)
        work()


@pytest.fixture
def base(tmp_path: Path) -> Path:
    pack(rows(0, 100), tmp_path / "p")
    return tmp_path / "p"


def another_append(base: Path) -> list[int]:
    pack(rows(300, 330), base, append=True)
    return [*range(300, 330)]


def two_appends(base: Path) -> list[int]:
    return [*another_append(base), *(pack(rows(400, 401), base, append=True) and [400])]


def an_append_that_is_killed_as_well(base: Path) -> list[int]:
    with pytest.raises(KeyError, match="the user's own"):
        pack(breaking(rows(500, 560)), base, append=True)
    with pytest.raises(PackError, match="an interrupted pack of another input"):
        pack(rf.open(base).select(slice(0, 5)), base, append=True)
    pack(rows(500, 560), base, append=True)
    return [*range(500, 560)]


def an_append_of_a_source(base: Path) -> list[int]:
    given = pack(rows(600, 640), base.with_name("other"))
    pack(given, base, append=True)
    pack(given, base, append=True)  # is in it: nothing is added, and nothing forgotten
    return [*range(600, 640)]


def a_call_that_is_refused(base: Path) -> list[int]:
    with pytest.raises(PackError, match="another input"):
        pack(rows(0, 100), base)
    return []


def breaking(samples: list[dict[str, int]]) -> Any:
    yield from samples
    raise KeyError("the user's own")


@pytest.mark.parametrize(
    "between",
    [another_append, two_appends, an_append_that_is_killed_as_well, an_append_of_a_source, a_call_that_is_refused],
)
@pytest.mark.parametrize("moves", [0, 1, -1])
def test_an_append_whose_moves_another_call_made_is_added_once(
    between: Callable[[Path], list[int]], moves: int, base: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    new = rows(100, 160)
    killed_after(moves, monkeypatch, lambda: pack(iter(new), base, append=True))
    assert ids(rf.open(base)) == [*range(100)]
    added = between(base)
    assert ids(rf.open(base)) == [*range(160), *added]
    assert ids(pack(iter(new), base, append=True)) == [*range(160), *added]
    assert not (base / STAGING).exists()
    assert ids(pack(iter(new), base, append=True)) == [*range(160), *added, *range(100, 160)]  # meant, this time


def test_of_two_appends_of_the_same_rows_that_were_killed_each_is_known_once(
    base: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = rows(100, 160), rows(200, 260)
    for given in (first, second):
        killed_after(1, monkeypatch, partial(pack, iter(given), base, append=True))
    for given in (second, first):
        packed = pack(iter(given), base, append=True)
    assert ids(packed) == [*range(160), *range(200, 260)]
    assert not (base / STAGING).exists()


@pytest.mark.parametrize("moves", [0, 1, -1])
def test_no_manifest_is_made_for_shards_that_are_nowhere(
    moves: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    dest = tmp_path / "p"
    killed_after(moves, monkeypatch, lambda: pack(rows(0, 100), dest))
    for path in visible(dest):  # as `rm -r dest/*` does, which spares the hidden folder
        path.unlink()
    assert ids(pack(rows(0, 100), dest)) == [*range(100)]
    assert not (dest / STAGING).exists()


def test_nor_for_those_of_an_append_whose_data_set_is_gone(base: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    killed_after(1, monkeypatch, lambda: pack(rows(100, 160), base, append=True))
    for path in visible(base):
        path.unlink()
    with pytest.raises(PackError, match="no finished data set to append to"):
        pack(rows(100, 160), base, append=True)
    with pytest.raises(PackError, match="an interrupted pack of another input"):
        pack(rows(0, 30), base)
    assert ids(pack(rows(0, 30), base, resume=False)) == [*range(30)]


def test_a_cut_shard_is_not_committed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    dest = tmp_path / "p"
    killed_after(2, monkeypatch, lambda: pack(rows(0, 100), dest))
    shard = dest / "shard-00000.arrow"
    shard.write_bytes(shard.read_bytes()[:-1])
    assert Counter(ids(pack(rows(0, 100), dest))) == Counter(range(100))


def test_each_of_the_last_moves_is_a_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Others give a process up that takes none."""
    dest, taken = tmp_path / "p", 0

    def step(_: object) -> None:
        nonlocal taken
        taken += 1

    killed_after(-1, monkeypatch, lambda: pack(rows(0, 1000), dest))
    count = len(list(dest.glob("shard-*.arrow")))
    monkeypatch.setattr(pack_module._Local, "step", step)
    pack(rows(0, 1000), dest)
    assert count > 30
    assert taken >= count

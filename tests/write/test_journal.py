"""The last moves of a pack, killed at each of them: made once, by whichever call comes next, or not at all."""

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

import rankfeed as rf
from rankfeed.errors import CorruptError, PackError

last_moves = import_module("rankfeed.building.last_moves")
packing = import_module("rankfeed.building.packing")
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


def an_append_that_another_call_finished(base: Path, monkeypatch: pytest.MonkeyPatch) -> list[dict[str, int]]:
    new = rows(100, 160)
    killed_after(1, monkeypatch, lambda: pack(iter(new), base, append=True))
    pack(rows(300, 330), base, append=True)
    return new


def test_what_is_remembered_of_a_data_set_is_forgotten_with_it(
    base: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    new = an_append_that_another_call_finished(base, monkeypatch)
    for path in visible(base):
        path.unlink()
    pack(rows(0, 100), base)
    assert ids(pack(iter(new), base, append=True)) == [*range(160)]
    assert not (base / STAGING).exists()


def test_and_where_an_older_state_of_it_was_put_back(base: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    older = {path: path.read_bytes() for path in visible(base)}
    new = an_append_that_another_call_finished(base, monkeypatch)
    for path in visible(base):
        path.unlink()
    for path, content in older.items():
        path.write_bytes(content)
    assert ids(pack(iter(new), base, append=True)) == [*range(160)]


@pytest.mark.parametrize("wrong", [OSError("the end could not be told"), Killed()], ids=["fails", "is killed"])
def test_an_append_whose_session_ends_badly_after_its_moves_is_known_again(
    wrong: BaseException, base: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As that of ranks does, when one of them has nothing of the data set that is there."""

    @contextmanager
    def session(*_: object) -> Iterator[None]:
        yield
        raise wrong

    new = rows(100, 160)
    for _ in range(2):
        with monkeypatch.context() as patch, suppress(PackError, Killed):
            patch.setattr(pack_module._Local, "session", session)
            pack(iter(new), base, append=True)
    assert ids(pack(iter(new), base, append=True)) == [*range(160)]
    assert not (base / STAGING).exists()


def test_a_key_that_comes_with_the_second_call_is_written_down(
    base: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    new = rows(100, 160)
    killed_after(1, monkeypatch, lambda: pack(iter(new), base, append=True))
    for _ in range(2):
        assert ids(pack(iter(new), base, append=True, key="friday")) == [*range(160)]


def test_rows_whose_files_are_taken_away_are_not_said_to_be_there(
    base: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write = last_moves.write_atomic

    def taking(path: Path, content: bytes) -> None:
        write(path, content)
        (base / STAGING / "job.json").unlink(missing_ok=True)

    with monkeypatch.context() as patch:
        patch.setattr(last_moves, "write_atomic", taking)
        with pytest.raises(PackError, match="not there any more"):
            pack(rows(100, 160), base, append=True)
    assert ids(rf.open(base)) == [*range(100)]


def test_a_staging_folder_is_locked_until_nothing_else_is_in_it(
    base: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    unlink, seen = Path.unlink, []

    def looking(self: Path, *arguments: Any, **more: Any) -> None:
        if self.name == "lock":
            seen.append([path.name for path in self.parent.iterdir()])
        unlink(self, *arguments, **more)

    monkeypatch.setattr(Path, "unlink", looking)
    pack(rows(100, 160), base, append=True)
    assert seen == [["lock"]]


def test_a_call_that_fails_at_the_moves_of_another_leaves_them_to_the_next(
    base: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    new = rows(100, 160)
    killed_after(1, monkeypatch, lambda: pack(iter(new), base, append=True))
    for module, name in ((last_moves, "write_atomic"), (last_moves, "empty"), (last_moves.os, "replace")):
        with monkeypatch.context() as patch:
            patch.setattr(module, name, failing)
            with pytest.raises(PackError):
                pack(rows(0, 100), base)
    assert ids(pack(iter(new), base, append=True)) == [*range(160)]


def failing(*_: object) -> None:
    raise OSError(28, "No space left on device")


def test_moves_are_not_made_among_other_data(base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    killed_after(0, monkeypatch, lambda: pack(rows(100, 160), base, append=True))
    other = tmp_path / "other"
    pack(rows(1000, 1100), other)  # of the same sizes
    for path in visible(other):
        path.replace(base / path.name)
    with suppress(PackError):
        pack(rows(0, 100), base)
    assert ids(rf.open(base)) == [*range(1000, 1100)]


def test_an_append_whose_data_set_cannot_be_opened_at_the_end_is_known_again(
    base: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened, count = packing.PackedSource, 0

    def opening(folder: Path) -> Any:
        nonlocal count
        count += 1
        if count == 2:  # first the data set to append to
            raise OSError(24, "Too many open files")
        return opened(folder)

    with monkeypatch.context() as patch:
        patch.setattr(packing, "PackedSource", opening)
        with pytest.raises(PackError, match="Too many open files"):
            pack(rows(100, 160), base, append=True)
    assert ids(pack(rows(100, 160), base, append=True)) == [*range(160)]


def test_moves_that_were_made_are_known_though_a_shard_is_away_for_a_while(
    base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def killed(*_: object) -> None:
        raise Killed

    with monkeypatch.context() as patch, suppress(Killed):
        patch.setattr(last_moves, "empty", killed)
        pack(rows(100, 160), base, append=True)
    away = (base / "shard-00001.arrow").rename(tmp_path / "away")
    with pytest.raises((PackError, CorruptError)):
        pack(rows(100, 160), base, append=True)
    away.rename(base / "shard-00001.arrow")
    assert ids(pack(rows(100, 160), base, append=True)) == [*range(160)]
    assert not (base / STAGING).exists()


@pytest.mark.parametrize("key", ["", "friday"])
def test_an_append_is_not_taken_for_done_where_older_data_were_put_back_while_it_was_packed(
    key: str, base: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    older = (base / "rankfeed.json").read_bytes()
    new = an_append_that_another_call_finished(base, monkeypatch)

    def restoring() -> Iterator[dict[str, int]]:
        yield from new
        (base / "rankfeed.json").write_bytes(older)

    with pytest.raises(PackError, match="not there any more"):
        pack(restoring(), base, append=True, key=key)
    assert (base / "rankfeed.json").read_bytes() == older


def test_a_memory_goes_once_the_manifest_names_its_rows(base: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    new = an_append_that_another_call_finished(base, monkeypatch)
    for _ in range(2):
        with monkeypatch.context() as patch, suppress(Killed):
            patch.setattr(packing, "forget", killing)
            pack(iter(new), base, append=True, key="friday")
    assert len(pack(iter(new), base, append=True, key="friday")) == 190
    assert not (base / STAGING).exists()
    assert len(pack(iter(new), base, append=True)) == 250, "meant, this time"


def killing(*_: object) -> None:
    raise Killed


def test_a_call_that_failed_before_its_first_part_stands_in_nobodys_way(
    base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    new = an_append_that_another_call_finished(base, monkeypatch)
    with pytest.raises(PackError, match="no samples"):
        pack(iter([]), base, append=True, key="nothing")
    assert ids(pack(iter(new), base, append=True)) == [*range(160), *range(300, 330)]
    with pytest.raises(KeyError):
        pack(breaking([]), tmp_path / "new", key="one")
    assert ids(pack(rows(0, 3), tmp_path / "new", key="two")) == [0, 1, 2]


def test_what_comes_too_late_leaves_no_folder(base: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    @contextmanager
    def session(_: object, staging: Path) -> Iterator[None]:
        yield
        (staging / "00000-00000-late.arrow").touch()  # of a rank whose work fell to others

    monkeypatch.setattr(pack_module._Local, "session", session)
    pack(rows(100, 160), base, append=True)
    assert not (base / STAGING).exists()


def test_a_session_that_fails_after_moves_that_the_manifest_names_leaves_no_folder(
    base: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    @contextmanager
    def session(*_: object) -> Iterator[None]:
        yield
        raise PackError("a rank has nothing of it")

    monkeypatch.setattr(pack_module._Local, "session", session)
    with pytest.raises(PackError, match="nothing of it"):
        pack(rows(100, 160), base, append=True, key="friday")
    assert not (base / STAGING).exists()
    assert ids(rf.open(base)) == [*range(160)]


def test_what_is_remembered_lasts_while_the_data_are_away(
    base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    new = an_append_that_another_call_finished(base, monkeypatch)
    aside = tmp_path / "aside"
    aside.mkdir()
    for path in visible(base):
        path.rename(aside / path.name)
    with pytest.raises(PackError, match="no finished data set to append to"):
        pack(iter(new), base, append=True)
    for path in visible(aside):
        path.rename(base / path.name)
    assert len(pack(iter(new), base, append=True)) == 190


def test_a_memory_that_was_named_goes_though_its_call_was_killed_in_between(
    base: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    new = an_append_that_another_call_finished(base, monkeypatch)
    unlink = Path.unlink

    def killed(self: Path, *arguments: Any, **more: Any) -> None:
        if self.name.startswith("made-"):
            raise Killed
        unlink(self, *arguments, **more)

    with monkeypatch.context() as patch, suppress(Killed):
        patch.setattr(Path, "unlink", killed)
        pack(iter(new), base, append=True, key="friday")
    assert len(pack(iter(new), base, append=True, key="friday")) == 190
    assert not (base / STAGING).exists()
    assert len(pack(iter(new), base, append=True)) == 250, "meant, this time"


def test_another_call_leaves_the_finished_parts_of_an_append_that_was_interrupted(
    base: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(KeyError):
        pack(breaking(rows(100, 160)), base, append=True)
    staged = sorted(path.name for path in (base / STAGING).glob("*.arrow"))
    pack(rows(0, 100), base)
    with pytest.raises(PackError, match="other rows"):
        pack(rows(0, 90), base)
    assert staged == sorted(path.name for path in (base / STAGING).glob("*.arrow"))
    assert len(staged) > 1
    assert ids(pack(rows(100, 160), base, append=True)) == [*range(160)]
    assert not (base / STAGING).exists()


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

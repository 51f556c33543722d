"""A commit that is killed at any of its renames is completed by whichever call comes next, once, or not at all."""

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from itertools import count
from pathlib import Path
from typing import Any

import msgspec
import pytest
from tests.support.values import column_of
from tests.writer.test_interrupted import Killed, breaking, killed_at

import rankfeed as rf
from rankfeed.errors import ArgumentError, CorruptError, WriteError
from rankfeed.sources.packed import PackedSource
from rankfeed.storage.lease import HeldLease
from rankfeed.writer import coordinator, journal

STAGING = ".rankfeed-write"


def rows(first: int, last: int) -> list[dict[str, int]]:
    return [{"id": i} for i in range(first, last)]


def write(given: Any, dest: Path, **options: Any) -> rf.Source:
    if options.get("append"):
        options = {"key": "new", **options}
    return rf.write(given, dest, shard_bytes=200, workers=0, progress=False, **options)


def append(base: Path, **options: Any) -> rf.Source:
    """Append the rows 100 to 159."""
    return write(iter(rows(100, 160)), base, append=True, **options)


def visible(folder: Path) -> list[Path]:
    return [path for path in folder.iterdir() if path.name != STAGING]


def killed_after(renames: int, work: Callable[[], object]) -> None:
    """Run a process that dies after it renamed a number of shards (-1: just before the manifest)."""
    shards = count()

    def is_end(_: int, target: Path) -> bool:
        return (target.name.startswith("shard-") and next(shards) == renames) or target.name == "rankfeed.json"

    killed_at(is_end, work)


@pytest.fixture
def base(tmp_path: Path) -> Path:
    write(rows(0, 100), tmp_path / "p")
    return tmp_path / "p"


def another_append(base: Path) -> list[int]:
    write(rows(300, 330), base, append=True, key="other")
    return [*range(300, 330)]


def two_appends(base: Path) -> list[int]:
    return [*another_append(base), *(write(rows(400, 401), base, append=True, key="third") and [400])]


def an_interrupted_append(base: Path) -> list[int]:
    with pytest.raises(KeyError, match="the user's own"):
        write(breaking(rows(500, 560)), base, append=True, key="other")
    with pytest.raises(WriteError, match="an unfinished write of another input"):
        write(rf.open(base).select(slice(0, 5)), base, append=True, key="")
    write(rows(500, 560), base, append=True, key="other")
    return [*range(500, 560)]


def an_append_of_a_source(base: Path) -> list[int]:
    given = write(rows(600, 640), base.with_name("other"))
    write(given, base, append=True, key="")
    write(given, base, append=True, key="")  # is in it: nothing is added
    return [*range(600, 640)]


def a_refused_write(base: Path) -> list[int]:
    with pytest.raises(WriteError, match="another input"):
        write(rows(0, 100), base)
    return []


@pytest.mark.parametrize(
    "between", [another_append, two_appends, an_interrupted_append, an_append_of_a_source, a_refused_write]
)
@pytest.mark.parametrize("renames", [0, 1, -1])
def test_an_interrupted_append_committed_by_others_is_added_once(between: Any, renames: int, base: Path) -> None:
    killed_after(renames, lambda: append(base))
    assert column_of(rf.open(base), "id") == [*range(100)]
    added = between(base)
    assert column_of(rf.open(base), "id") == [*range(160), *added]
    assert column_of(append(base), "id") == [*range(160), *added]
    assert not (base / STAGING).exists()


@pytest.mark.parametrize("given", ["iterable", "dataset", "map"])
def test_an_append_of_an_iterable_dataset_or_map_needs_a_key(given: str, base: Path) -> None:
    source: Any = rows(100, 160)
    options: dict[str, Any] = {}
    if given == "dataset":
        source = rf.from_dataset(source)
    elif given == "map":
        source, options = rf.open(base), {"map": dict}
    with pytest.raises(ArgumentError, match=r"append=True needs a key[\s\S]*key="):
        write(source, base, append=True, key="", **options)
    assert len(rf.open(base)) == 100


@pytest.mark.parametrize("renames", [0, 1, -1])
def test_a_resumed_write_replaces_committed_shards_that_were_deleted(renames: int, tmp_path: Path) -> None:
    dest = tmp_path / "p"
    killed_after(renames, lambda: write(rows(0, 100), dest))
    for path in visible(dest):  # as `rm -r dest/*` does, which spares the hidden directory
        path.unlink()
    assert column_of(write(rows(0, 100), dest), "id") == [*range(100)]
    assert not (dest / STAGING).exists()


def test_an_interrupted_append_whose_dataset_was_deleted_raises(base: Path) -> None:
    killed_after(1, lambda: append(base))
    for path in visible(base):
        path.unlink()
    with pytest.raises(WriteError, match="no finished dataset to append to"):
        append(base)
    with pytest.raises(WriteError, match="an unfinished write of another input"):
        write(rows(0, 30), base)
    assert column_of(write(rows(0, 30), base, resume=False), "id") == [*range(30)]


def test_a_resumed_commit_replaces_a_truncated_shard(tmp_path: Path) -> None:
    dest = tmp_path / "p"
    killed_after(2, lambda: write(rows(0, 100), dest))
    shard = dest / "shard-00000.arrow"
    shard.write_bytes(shard.read_bytes()[:-1])
    assert Counter(column_of(write(rows(0, 100), dest), "id")) == Counter(range(100))


def test_an_append_is_added_again_after_an_older_state_of_the_dataset_was_restored(base: Path) -> None:
    older = {path: path.read_bytes() for path in visible(base)}
    killed_after(1, lambda: append(base))
    another_append(base)
    for path in visible(base):
        path.unlink()
    for path, content in older.items():
        path.write_bytes(content)
    assert column_of(append(base), "id") == [*range(160)]


def killed(*_: object) -> None:
    raise Killed


def ended_by(error: BaseException) -> Callable[..., Any]:
    """A progress bar that ends badly, after the commit."""

    @contextmanager
    def bar(*_: object, **__: object) -> Iterator[Callable[[int], None]]:
        yield lambda _: None
        raise error

    return bar


def opened_once() -> Callable[[Path], Any]:
    """Opens the dataset to append to, and not the one with the rows."""
    folders: list[Path] = []

    def opened(folder: Path) -> Any:
        folders.append(folder)
        if len(folders) == 2:
            raise OSError(24, "Too many open files")
        return PackedSource(folder)

    return opened


#: Where an append is interrupted: the object, its attribute, and what it is then.
INTERRUPTED: dict[str, tuple[Any, str, Callable[[], Any]]] = {
    "before its shards are written": (coordinator.StagedWrite, "run", lambda: killed),
    "before its commit": (journal, "complete_commit", lambda: killed),
    "before the record of its commit is removed": (journal, "clear", lambda: killed),
    "after its commit": (coordinator, "progress_bar", lambda: ended_by(Killed())),
    "by an error after its commit": (coordinator, "progress_bar", lambda: ended_by(OSError("cannot close"))),
    "when the dataset is opened": (coordinator, "PackedSource", opened_once),
}


@pytest.mark.parametrize("place", INTERRUPTED)
def test_an_append_that_is_interrupted_twice_is_added_once(place: str, base: Path) -> None:
    target, name, replacement = INTERRUPTED[place]
    for expected in (pytest.raises((WriteError, Killed)), suppress(WriteError, Killed)):
        with pytest.MonkeyPatch.context() as patch, expected:  # type: ignore[attr-defined]
            patch.setattr(target, name, replacement())
            append(base)
    assert column_of(append(base), "id") == [*range(160)]
    assert not (base / STAGING).exists()


def test_staged_files_removed_before_the_commit_are_an_error(base: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_record = journal.write_record

    def removing(path: Path, record: Any) -> None:
        write_record(path, record)
        for staged in (base / STAGING).glob("*.arrow"):
            staged.unlink()

    monkeypatch.setattr(journal, "write_record", removing)
    with pytest.raises(WriteError, match="are gone"):
        append(base)
    assert column_of(rf.open(base), "id") == [*range(100)]


@pytest.mark.parametrize("surplus", [1, 7, 100])
def test_a_journal_of_more_shards_than_its_manifest_has_is_discarded(surplus: int, base: Path) -> None:
    killed_after(0, lambda: append(base))
    path = base / STAGING / "commit.json"
    stored: Any = journal.read_record(path, journal.CommitJournal)
    size = len(stored.manifest.shards) + surplus - len(stored.staged)
    names = [*stored.staged, *(f"absent-{index}.arrow" for index in range(size))]
    journal.write_record(path, msgspec.structs.replace(stored, staged=names))
    assert not journal.complete_commit(base / STAGING, int)
    assert not path.exists()
    assert column_of(append(base), "id") == [*range(160)]


def test_an_append_removes_its_lease_last_of_its_staged_files(base: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    unlink, seen = Path.unlink, []

    def looking(self: Path, *arguments: Any, **more: Any) -> None:
        if self.name == "lease":
            seen.append([path.name for path in self.parent.parent.iterdir()])
        unlink(self, *arguments, **more)

    monkeypatch.setattr(Path, "unlink", looking)
    append(base)
    assert seen == [["lease"]]


def test_the_next_call_completes_a_commit_that_another_call_failed_to_complete(base: Path) -> None:
    def failing(*_: object) -> None:
        raise OSError(28, "No space left on device")

    killed_after(1, lambda: append(base))
    for module, name in ((journal, "write_atomic"), (journal, "clear"), (journal.os, "replace")):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(module, name, failing)
            with pytest.raises(WriteError):
                write(rows(0, 100), base)
    assert column_of(append(base), "id") == [*range(160)]


def test_an_interrupted_append_is_not_committed_to_another_dataset(base: Path, tmp_path: Path) -> None:
    killed_after(0, lambda: append(base))
    other = tmp_path / "other"
    write(rows(1000, 1100), other)  # of the same sizes
    for path in visible(other):
        path.replace(base / path.name)
    with suppress(WriteError):
        write(rows(0, 100), base)
    assert column_of(rf.open(base), "id") == [*range(1000, 1100)]


def test_a_commit_completes_after_a_missing_shard_is_put_back(base: Path, tmp_path: Path) -> None:
    with pytest.MonkeyPatch.context() as patch, suppress(Killed):
        patch.setattr(journal, "clear", killed)
        append(base)
    away = (base / "shard-00001.arrow").rename(tmp_path / "away")
    with pytest.raises((WriteError, CorruptError)):
        append(base)
    away.rename(base / "shard-00001.arrow")
    assert column_of(append(base), "id") == [*range(160)]
    assert not (base / STAGING).exists()


def test_an_append_to_a_dataset_that_is_replaced_during_the_append_raises(base: Path) -> None:
    older = (base / "rankfeed.json").read_bytes()
    another_append(base)

    def restoring() -> Iterator[dict[str, int]]:
        yield from rows(100, 160)
        (base / "rankfeed.json").write_bytes(older)

    with pytest.raises(WriteError, match="are gone"):
        write(restoring(), base, append=True)
    assert (base / "rankfeed.json").read_bytes() == older


def test_a_write_that_failed_before_its_first_shard_does_not_block_the_next(base: Path, tmp_path: Path) -> None:
    with pytest.raises(WriteError, match="no samples"):
        write(iter([]), base, append=True, key="nothing")
    assert column_of(append(base), "id") == [*range(160)]
    with pytest.raises(KeyError):
        write(breaking([]), tmp_path / "new", key="one")
    assert column_of(write(rows(0, 3), tmp_path / "new", key="two"), "id") == [0, 1, 2]


def test_an_append_removes_shards_that_are_staged_too_late(base: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    @contextmanager
    def bar(*_: object, **__: object) -> Iterator[Callable[[int], None]]:
        yield lambda _: None
        (base / STAGING / "00000-00000-late.arrow").touch()  # of a rank whose task was reassigned

    monkeypatch.setattr(coordinator, "progress_bar", bar)
    append(base)
    assert not (base / STAGING).exists()


def test_other_writes_keep_the_staged_shards_of_an_interrupted_append(base: Path) -> None:
    with pytest.raises(KeyError):
        write(breaking(rows(100, 160)), base, append=True)
    staged = sorted(path.name for path in (base / STAGING).glob("*.arrow"))
    write(rows(0, 100), base)
    with pytest.raises(WriteError, match="other rows"):
        write(rows(0, 90), base)
    assert staged == sorted(path.name for path in (base / STAGING).glob("*.arrow"))
    assert len(staged) > 1
    assert column_of(append(base), "id") == [*range(160)]
    assert not (base / STAGING).exists()


def test_a_commit_renews_its_lease_at_each_rename(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Other ranks take over a commit without progress."""
    dest, taken = tmp_path / "p", 0

    def renew(_: object) -> None:
        nonlocal taken
        taken += 1

    killed_after(-1, lambda: write(rows(0, 1000), dest))
    count = len(list(dest.glob("shard-*.arrow")))
    monkeypatch.setattr(HeldLease, "renew", renew)
    write(rows(0, 1000), dest)
    assert count > 30
    assert taken >= count

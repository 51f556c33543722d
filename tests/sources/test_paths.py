"""Which files are meant: each of them once, in the order that was asked for."""

import glob
import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.sources import writers

import rankfeed as rf
from rankfeed._util.imports import need
from rankfeed.errors import MissingExtraError, SourceError
from rankfeed.sources.paths import braces, common_root, expand, files_in, natural


def touch(folder: Path, *names: str) -> list[str]:
    for name in names:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(b"")
    return [str(folder / name) for name in names]


def test_a_glob_is_in_natural_order_and_lists_and_braces_in_the_given_order(tmp_path: Path) -> None:
    nine, ten, hundred = touch(tmp_path, "a-9", "a-10", "a-100")
    assert expand(tmp_path / "a-*") == [nine, ten, hundred]
    assert expand([hundred, nine, ten]) == [hundred, nine, ten]
    assert expand(f"{tmp_path}/a-{{100,9}}") == [hundred, nine]


def test_an_existing_file_named_like_a_pattern_is_that_file(tmp_path: Path) -> None:
    (path,) = touch(tmp_path, "a{1,2}[b]*")
    assert expand(path) == [path]


@given(first=st.integers(0, 1200), last=st.integers(0, 1200), width=st.integers(1, 6))
def test_brace_ranges_keep_their_width_and_direction(first: int, last: int, width: int) -> None:
    step = 1 if last >= first else -1
    names = list(braces(f"x{{{first:0{width}d}..{last:0{width}d}}}y"))
    assert [int(name[1:-1]) for name in names] == list(range(first, last + step, step))
    if width == 6:
        assert {len(name) for name in names} == {8}


def test_the_first_brace_varies_slowest() -> None:
    assert list(braces("{a,b}-{08..10}")) == ["a-08", "a-09", "a-10", "b-08", "b-09", "b-10"]
    assert list(braces("plain{}")) == ["plain{}"]


def test_files_in_leaves_out_hidden_files_and_folders(tmp_path: Path) -> None:
    names = touch(tmp_path, "2.x", "10.x", "in/1.x")
    touch(tmp_path, ".hidden.x", "_tmp.x", "y", "_in/3.x")
    assert files_in(tmp_path, (".x",)) == names[:2]
    assert files_in(tmp_path, (".x",), recursive=True) == names
    with pytest.raises(SourceError, match="nowhere"):
        files_in(tmp_path / "nowhere", (".x",))


def test_common_root_of_paths_is_the_deepest_folder_that_contains_all(tmp_path: Path) -> None:
    paths = touch(tmp_path, "a/1", "b/2")
    assert [os.path.relpath(path, common_root(paths)) for path in paths] == ["a/1", "b/2"]


@given(st.lists(st.text(alphabet="a1²③０_", max_size=6)))
def test_natural_order_of_any_names_does_not_depend_on_the_input_order(names: list[str]) -> None:
    assert sorted(sorted(names), key=natural) == sorted(sorted(names, reverse=True), key=natural)


def test_the_error_for_a_missing_library_names_the_extra_that_installs_it() -> None:
    with pytest.raises(MissingExtraError, match=r"rankfeed\[lance\]"):
        need("no_such_library", extra="lance")


def test_a_named_pipe_raises_source_error_without_blocking(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "t.parquet")
    for where in (tmp_path / "t.parquet", [tmp_path / "t.parquet"], tmp_path / "*.parquet"):
        with pytest.raises(SourceError, match="neither a file nor a folder"):
            rf.open(where)


PATTERNS = {name: form.where for name, form in writers.FORMATS.items() if "*" in form.where}


@pytest.mark.parametrize("name", PATTERNS)
@pytest.mark.parametrize("folder", ["run[1]", "run{1,2}", "run[1]{1..2}"])
def test_a_glob_in_a_folder_named_like_a_glob_has_a_working_remedy(name: str, folder: str, tmp_path: Path) -> None:
    written = writers.make(name, tmp_path / folder)
    for pattern in (f"{written.folder}/{PATTERNS[name]}", [f"{written.folder}/{PATTERNS[name]}"]):
        with pytest.raises(SourceError, match=r"glob\.escape") as caught:
            rf.open(pattern)
        call = str(caught.value.remedy).partition(": ")[2]
        opened = eval(call, {"rankfeed": rf, "glob": glob})  # noqa: S307
        assert len(opened) == len(written.expected)


@pytest.mark.parametrize("name", writers.BY_PATH)
def test_files_in_a_folder_named_like_a_pattern_are_opened(name: str, tmp_path: Path) -> None:
    written = writers.make(name, tmp_path / "run[1]{a,b}")
    where = PATTERNS.get(name)
    paths = written.folder / writers.FORMATS[name].where if where is None else sorted(written.folder.glob(where))
    assert len(rf.open(paths)) == len(written.expected)


def test_the_error_for_a_pattern_without_matches_has_no_remedy(tmp_path: Path) -> None:
    for pattern in ("*.npy", "{a,b}.npy", "a[12]/*.npy"):
        with pytest.raises(SourceError) as caught:
            rf.open(f"{tmp_path}/{pattern}")
        assert caught.value.remedy is None


def test_expand_leaves_out_files_that_rankfeed_writes_beside_data(tmp_path: Path) -> None:
    (data,) = touch(tmp_path, "a.tar")
    names = ["a.tar.rankfeed", ".rankfeed-index.lock", ".rankfeed-prepared.json", ".tmp-host-17-0123abcd"]
    names += ["0-alone-01234567.rankfeed-ledger", "rankfeed.json", ".rankfeed-write/shard-00000.arrow"]
    written = touch(tmp_path, *names)
    assert expand(f"{tmp_path}/*") == expand(f"{tmp_path}/a*") == expand(f"{tmp_path}/**/*") == [data]
    assert expand([*written, data]) == expand(sorted(tmp_path.iterdir())) == [data]
    assert files_in(tmp_path, ("",), recursive=True, skip=()) == [data]
    for paths in (written, written[0], f"{tmp_path}/*.rankfeed"):
        with pytest.raises(SourceError, match=r"not data[\s\S]*rankfeed[\s\S]*remedy"):
            expand(paths)
    (hidden,) = touch(tmp_path, ".rankfeed-experiment/a.tar")  # folders of the user
    assert expand(hidden) == [hidden]
    (inside,) = touch(tmp_path, "own.rankfeed/a.tar")
    assert expand(tmp_path / "own.rankfeed") == [str(tmp_path / "own.rankfeed")]
    assert expand(f"{tmp_path}/own*/*") == [inside]

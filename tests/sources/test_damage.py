"""A file that is cut or removed is an error that names it, in every format."""

import pickle
import re
import shutil
from pathlib import Path

import pytest
from tests.sources import writers
from tests.support.marks import slow

from rankfeed.errors import CorruptError, RankfeedError, SourceError

#: Formats whose index lists the files and their sizes.
INDEXED = ("packed", "mds", "mds_zstd", "lance")
#: Text has no end that could be missing.
WITH_AN_END = [name for name in [*writers.BY_PATH, "npz_rows"] if name not in ("csv", "jsonl")]


def largest(folder: Path) -> Path:
    """The file of a dataset that holds most of its rows."""
    return max((path for path in folder.rglob("*") if path.is_file()), key=lambda path: path.stat().st_size)


def cuts(name: str, content: bytes) -> list[int]:
    """Sizes to which a file is cut, all of which lack a part of the data or of the end of the file."""
    if name == "lance":  # which is opened in a process of its own
        return [0, len(content) // 2, len(content) - 1]
    if name == "webdataset":  # behind the last member there are zeros alone
        return [0, 3, 512, *range(700, len(content.rstrip(b"\0")), len(content) // 9)]
    size = len(content)
    return [0, 3, 12, 40, *range(100, size, size // 7), size - 500, size - 9, size - 8, size - 4, size - 1]


@pytest.mark.parametrize("name", [slow(name) if name == "lance" else name for name in WITH_AN_END])
def test_the_error_for_a_file_truncated_at_any_size_names_the_file(name: str, tmp_path: Path) -> None:
    written = writers.make(name, tmp_path / "data")
    path = largest(written.folder)
    content = path.read_bytes()
    opened = written.open()
    for size in cuts(name, content):
        path.unlink()
        path.write_bytes(content[:size])
        with pytest.raises(SourceError, match=re.escape(path.name)) as caught:  # noqa: PT012
            source = written.open()
            source.fetch(range(len(source))).samples()
        assert caught.value.remedy, size
    with pytest.raises(SourceError, match=re.escape(path.name)):
        pickle.loads(pickle.dumps(opened)).fetch(range(writers.COUNT)).samples()


@pytest.mark.parametrize("name", writers.BY_PATH)
def test_errors_for_a_removed_or_enlarged_file_or_a_removed_dataset_name_it(name: str, tmp_path: Path) -> None:
    written = writers.make(name, tmp_path / "data")
    travelling = pickle.dumps(written.open())
    path = largest(written.folder)
    content = path.read_bytes()
    path.unlink()
    with pytest.raises(SourceError, match=re.escape(path.name)):
        pickle.loads(travelling).fetch(range(writers.COUNT)).samples()
    if name in INDEXED:
        with pytest.raises(SourceError, match=rf"missing[\s\S]*{re.escape(path.name)}"):
            written.open()
        path.write_bytes(content + b"\0")
        with pytest.raises(CorruptError, match=rf"size[\s\S]*{re.escape(path.name)}"):
            written.open()
    shutil.rmtree(written.folder)
    with pytest.raises(RankfeedError, match="data"):
        pickle.loads(travelling).fetch([0]).samples()
    assert not written.folder.exists()

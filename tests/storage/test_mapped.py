"""Mapped files read as the file, and a truncated one is an error instead of a crash."""

import os
from pathlib import Path

import numpy as np
import pytest
from tests.support.jobs import run_python

from rankfeed._util.native import native_library
from rankfeed.columns.pointers import file_of
from rankfeed.errors import CorruptError, SourceError
from rankfeed.storage.mapped import check_not_truncated, map_file


def test_a_mapped_file_is_a_read_only_array_of_its_bytes(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"abc")
    array = map_file(tmp_path / "file")
    assert array.tobytes() == b"abc"
    assert not array.flags.writeable
    (tmp_path / "empty").write_bytes(b"")
    assert len(map_file(tmp_path / "empty")) == 0


def test_mapping_a_missing_file_or_a_directory_raises(tmp_path: Path) -> None:
    with pytest.raises(SourceError, match="nowhere"):
        map_file(tmp_path / "nowhere")
    with pytest.raises(SourceError):
        map_file(tmp_path)


def test_a_truncated_mapped_file_raises_but_a_deleted_one_does_not(tmp_path: Path) -> None:
    path = tmp_path / "numbers"
    np.arange(4096).tofile(path)
    values = map_file(path).view(np.int64)[10:].reshape(-1, 2)
    check_not_truncated(file_of(values), path)
    check_not_truncated(file_of(values.copy()), path)
    path.unlink()
    check_not_truncated(file_of(values), path)  # the mapping keeps the file
    np.arange(4096).tofile(path)
    values = map_file(path).view(np.int64)[10:]
    os.truncate(path, 8000)
    with pytest.raises(CorruptError, match=r"32768 bytes[\s\S]*8000 bytes[\s\S]*numbers"):
        check_not_truncated(file_of(values), path)


READS_TRUNCATED_PAGES = """
import os, sys
import numpy as np
from rankfeed._util.native import lost_mappings
from rankfeed.columns.pointers import file_of
from rankfeed.errors import CorruptError
from rankfeed.storage.mapped import check_not_truncated, map_file

folder, page = sys.argv[1], os.sysconf("SC_PAGESIZE")
values = []
for name in "abc":
    path = os.path.join(folder, name)
    np.full(4 * page // 8 + 10, 7).tofile(path)
    values.append(map_file(path).view(np.int64))
assert [file_of(array).is_lost for array in values] == [False, False, False] and not lost_mappings().value
os.truncate(os.path.join(folder, "b"), page + 8)
assert values[1][: page // 8 + 1].sum() == 7 * (page // 8 + 1) and not file_of(values[1]).is_lost
assert values[1][:].sum() == 7 * (page // 8 + 1)  # zeros instead of SIGBUS
os.truncate(os.path.join(folder, "b"), 4 * page + 80)  # its size is right again
assert [file_of(array).is_lost for array in values] == [False, True, False] and lost_mappings().value == 1
assert values[0].sum() == values[2].sum() == 7 * len(values[0])
try:
    check_not_truncated(file_of(values[1]), "b")
except CorruptError as error:
    assert "pages that cannot be read" in str(error)
else:
    raise SystemExit("no error")
del values[1]
again = map_file(os.path.join(folder, "b")).view(np.int64)  # its guard is used again
assert again[0] == 7 and again[-1] == 0 and not file_of(again).is_lost
if os.fork() == 0:
    os.truncate(os.path.join(folder, "c"), 0)
    assert values[1].sum() == 0 and file_of(values[1]).is_lost
    os._exit(3)
assert os.waitstatus_to_exitcode(os.wait()[1]) == 3 and not file_of(values[1]).is_lost
print("done")
"""


@pytest.mark.skipif(native_library() is None, reason="needs the native library")
def test_truncated_pages_of_a_mapped_file_read_as_zeros_and_mark_it_as_lost(tmp_path: Path) -> None:
    assert run_python(READS_TRUNCATED_PAGES, tmp_path) == "done\n"

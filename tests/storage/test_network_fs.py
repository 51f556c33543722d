"""Files on network file systems."""

import errno

from rankfeed.storage.network_fs import is_gone


def test_is_gone_is_true_for_missing_and_stale_files_only() -> None:
    errors = [FileNotFoundError(), NotADirectoryError(), OSError(errno.ESTALE, ""), PermissionError()]
    assert [is_gone(error) for error in errors] == [True, True, True, False]

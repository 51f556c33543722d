"""Files on network file systems."""

import errno

from rankfeed.storage.network_fs import is_gone


def test_a_file_that_another_host_removed_is_gone() -> None:
    errors = [FileNotFoundError(), NotADirectoryError(), OSError(errno.ESTALE, ""), PermissionError()]
    assert [is_gone(error) for error in errors] == [True, True, True, False]

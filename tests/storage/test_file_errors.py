"""Exceptions of the operating system and of libraries become errors that name the file and the remedy."""

import zlib
from pathlib import Path

import pytest

from rankfeed.errors import ArgumentError, CorruptError, SourceError
from rankfeed.storage.file_errors import file_errors


def test_a_missing_file_is_a_source_error_and_not_corrupt(tmp_path: Path) -> None:
    path = tmp_path / "missing"
    with (
        pytest.raises(SourceError, match=r"cannot be read[\s\S]*No such file[\s\S]*missing") as caught,
        file_errors(path),
    ):
        path.read_bytes()
    assert not isinstance(caught.value, CorruptError)


@pytest.mark.parametrize("error", [OSError("bad magic number"), zlib.error("bad magic number\nmore")])
def test_an_error_of_a_format_library_becomes_a_corrupt_error_with_file_and_remedy(error: Exception) -> None:
    with pytest.raises(CorruptError, match=r"damaged[\s\S]*bad magic number\n  where: a[\s\S]*fetch the file"):  # noqa: SIM117
        with file_errors("a", zlib.error):
            raise error
    with pytest.raises(CorruptError, match="remedy: another copy"), file_errors("a", remedy="another copy"):
        raise OSError


def test_file_errors_passes_other_errors_unchanged() -> None:
    with pytest.raises(ArgumentError, match="ours"), file_errors("a", ValueError):
        raise ArgumentError("ours")
    with pytest.raises(ValueError, match="theirs"), file_errors("a", zlib.error):
        raise ValueError("theirs")

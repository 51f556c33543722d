"""Functions named on a command line."""

import sys
from pathlib import Path

import pytest

from rankfeed._util.functions import import_function


@pytest.fixture(autouse=True)
def _own_modules(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", [*sys.path])


@pytest.mark.parametrize("name", ["train.py", "01_digits.py", "train-ddp.py"])
def test_a_file_need_not_have_the_name_of_an_identifier(name: str, tmp_path: Path) -> None:
    (tmp_path / name).write_text("class Data:\n    @staticmethod\n    def make():\n        return __name__\n")
    assert import_function(f"{tmp_path / name}:Data.make")() == name[:-3]


def test_a_file_of_a_package_is_imported_as_a_part_of_it(tmp_path: Path) -> None:
    (tmp_path / "parts_of_it").mkdir()
    (tmp_path / "parts_of_it" / "__init__.py").write_text("")
    (tmp_path / "parts_of_it" / "digits.py").write_text("def make():\n    return __name__\n")
    assert import_function(f"{tmp_path}/parts_of_it/digits.py:make")() == "parts_of_it.digits"


@pytest.mark.parametrize(
    ("name", "error", "text"),
    [
        ("json:nothing", AttributeError, "nothing"),
        ("json:__name__", TypeError, "not a function but str"),
        ("json", ValueError, "expected module:function"),
        ("{}/missing.py:make", FileNotFoundError, "missing.py"),
        ("{}/json.py:make", ImportError, "another name"),
        ("{}/train.v2.py:make", ImportError, "another name"),
    ],
)
def test_what_cannot_be_imported(name: str, error: type[Exception], text: str, tmp_path: Path) -> None:
    for file in ("json.py", "train.v2.py"):
        (tmp_path / file).write_text("def make():\n    pass\n")
    with pytest.raises(error, match=text):
        import_function(name.format(tmp_path))

"""Functions named on a command line."""

import sys
from pathlib import Path

import pytest

from rankfeed._util.imports import import_function


@pytest.fixture(autouse=True)
def _own_modules(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", [*sys.path])


@pytest.mark.parametrize("name", ["train.py", "01_digits.py", "train-ddp.py"])
def test_a_file_need_not_have_the_name_of_an_identifier(name: str, tmp_path: Path) -> None:
    (tmp_path / name).write_text("class Data:\n    @staticmethod\n    def make():\n        return __name__\n")
    assert import_function(f"{tmp_path / name}:Data.make")() == name[:-3]


@pytest.mark.parametrize(("name", "module"), [("json.py", "json_"), ("train.v2.py", "train_v2_")])
def test_a_file_that_has_no_module_name_of_its_own(name: str, module: str, tmp_path: Path) -> None:
    (tmp_path / name).write_text("def make():\n    return __name__, __file__\n")
    assert import_function(f"{tmp_path / name}:make")() == (module, str(tmp_path / name))
    del sys.modules[module]


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
    ],
)
def test_what_cannot_be_imported(name: str, error: type[Exception], text: str, tmp_path: Path) -> None:
    with pytest.raises(error, match=text):
        import_function(name.format(tmp_path))

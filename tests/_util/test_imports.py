"""Functions named on a command line."""

import sys
from pathlib import Path

import pytest

from rankfeed._util.imports import import_function


@pytest.fixture(autouse=True)
def _own_modules(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", [*sys.path])


@pytest.mark.parametrize("name", ["train.py", "01_digits.py", "train-ddp.py"])
def test_import_function_accepts_file_names_that_are_no_identifiers(name: str, tmp_path: Path) -> None:
    (tmp_path / name).write_text("class Data:\n    @staticmethod\n    def make():\n        return __name__\n")
    assert import_function(f"{tmp_path / name}:Data.make")() == name[:-3]


@pytest.mark.parametrize(("name", "module"), [("json.py", "json_"), ("train.v2.py", "train_v2_")])
def test_a_file_named_like_another_module_or_with_a_dot_is_imported_under_another_name(
    name: str, module: str, tmp_path: Path
) -> None:
    (tmp_path / name).write_text("def make():\n    return __name__, __file__\n")
    assert import_function(f"{tmp_path / name}:make")() == (module, str(tmp_path / name))
    del sys.modules[module]


def test_import_function_imports_a_file_of_a_package_under_its_package_name(tmp_path: Path) -> None:
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
def test_import_function_raises_for_a_missing_function_module_or_file(
    name: str, error: type[Exception], text: str, tmp_path: Path
) -> None:
    with pytest.raises(error, match=text):
        import_function(name.format(tmp_path))

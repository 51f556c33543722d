"""Imports of functions that are named on a command line, and of optional libraries."""

import sys
from collections.abc import Callable
from importlib import import_module
from importlib.util import module_from_spec, spec_from_file_location
from operator import attrgetter
from pathlib import Path
from types import ModuleType
from typing import Any

from rankfeed.errors import MissingExtraError


def import_function(name: str) -> Callable[..., Any]:
    """The function ``module:function``, or ``file.py:function``, imported from the folder as a script is."""
    module, _, attribute = name.rpartition(":")
    if not (module and attribute):
        raise ValueError(f"expected module:function or file.py:function, found {name!r}")
    imported = _import_file(Path(module).resolve()) if module.endswith(".py") else import_module(module)
    function = attrgetter(attribute)(imported)
    if not callable(function):
        raise TypeError(f"{name} is not a function but {type(function).__name__}")
    return function  # type: ignore[no-any-return]


def _import_file(file: Path) -> ModuleType:
    """Import a file by its name, by which spawned processes import it, too, unless that is another module's."""
    if not file.is_file():
        raise FileNotFoundError(file)
    name, folder = file.stem, file.parent
    while (folder / "__init__.py").exists():
        name, folder = f"{folder.name}.{name}", folder.parent
    sys.path.insert(0, str(folder))
    if "." not in file.stem:
        module = import_module(name)
        if Path(getattr(module, "__file__", None) or "").resolve() == file:
            return module
    spec: Any = spec_from_file_location(f"{file.stem.replace('.', '_')}_", file)
    sys.modules[spec.name] = module = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def need(module: str, extra: str) -> Any:
    """Import a module of an optional dependency; a MissingExtraError names the extra if it is not installed."""
    try:
        return import_module(module)
    except ModuleNotFoundError as error:
        if error.name is None or error.name.split(".")[0] != module.split(".")[0]:
            raise  # installed, but one of its own dependencies is missing
        raise MissingExtraError(
            f"{module} is not installed",
            expected=f"the extra {extra!r}",
            remedy=f"pip install 'rankfeed[{extra}]'",
        ) from error

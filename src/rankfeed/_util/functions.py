"""Importing functions that are named on a command line."""

import importlib
import sys
from collections.abc import Callable
from operator import attrgetter
from pathlib import Path
from typing import Any


def import_function(name: str) -> Callable[..., Any]:
    """The function ``module:function``, or ``file.py:function``, imported from the folder as a script is.

    Raises:
        ImportError: the module's name cannot be imported, or is that of another module.
        FileNotFoundError: there is no such file.
        AttributeError: the module has no such function.
        TypeError, ValueError: it is no function, or ``name`` has another form.

    Examples:
        >>> import_function("json:JSONDecoder.decode").__name__
        'decode'
    """
    module, _, attribute = name.rpartition(":")
    if not (module and attribute):
        raise ValueError(f"expected module:function or file.py:function, found {name!r}")
    if module.endswith(".py"):
        module = _module_of(Path(module).resolve())
    function = attrgetter(attribute)(importlib.import_module(module))
    if not callable(function):
        raise TypeError(f"{name} is not a function but {type(function).__name__}")
    return function  # type: ignore[no-any-return]


def _module_of(file: Path) -> str:
    """Name of a file's module, which other processes can import by it, too."""
    if not file.is_file():
        raise FileNotFoundError(file)
    module, folder = file.stem, file.parent
    while (folder / "__init__.py").exists():
        module, folder = f"{folder.name}.{module}", folder.parent
    sys.path.insert(0, str(folder))
    known = None if "." in file.stem else getattr(importlib.import_module(module), "__file__", None)
    if Path(known or "").resolve() != file:
        raise ImportError(f"{file.stem} is no name of a module, or that of another: give {file.name} another name")
    return module

"""Pickles functions of ``__main__``, lambdas and closures by value, and large arrays out of band."""

import io
import pickle
import sys
from collections.abc import Collection
from contextlib import suppress
from typing import Any

import cloudpickle

_MAIN_MODULES = ("__main__", "__mp_main__")  # the second one in a process that multiprocessing spawned


class _Pickler(cloudpickle.Pickler):  # type: ignore[misc]
    by_name: Collection[str] = ()

    def reducer_override(self, value: Any) -> Any:
        if isinstance(value, type) and value.__module__ in _MAIN_MODULES and value.__qualname__ in self.by_name:
            return _main_class, (value.__module__, value.__qualname__)
        torch: Any = sys.modules.get("torch")
        is_tensor = torch is not None and type(value) is torch.Tensor
        # torch would copy the bytes of a tensor into the pickle; as a numpy array they stay out of band.
        if is_tensor and not value.requires_grad and value.layout is torch.strided:
            with suppress(TypeError, RuntimeError):  # bfloat16, nested, conjugated: numpy has no such arrays
                return torch.from_numpy, (value.contiguous().numpy(),)
        return super().reducer_override(value)


def main_classes() -> frozenset[str]:
    """Names of the classes that ``__main__`` defines."""
    main = dict(vars(sys.modules["__main__"]))
    classes = ((name, member) for name, member in main.items() if isinstance(member, type))
    return frozenset(name for name, cls in classes if cls.__module__ in _MAIN_MODULES and cls.__qualname__ == name)


def _main_class(module: str, name: str) -> Any:
    return getattr(sys.modules[module], name)


def dumps(value: Any, by_name: Collection[str] = ()) -> tuple[bytes, list[memoryview]]:
    """The pickle of a value, and the buffers of its arrays and tensors, for ``pickle.loads(..., buffers=...)``.

    Classes of ``__main__`` go ``by_name`` where the receiver has defined them: by value, the attributes of the
    receiver's own class would be replaced.
    """
    main = sys.modules.get("__mp_main__")  # __main__ of a process that multiprocessing spawned
    if main is not None:
        cloudpickle.register_pickle_by_value(main)
    buffers: list[pickle.PickleBuffer] = []
    file = io.BytesIO()
    pickler = _Pickler(file, protocol=5, buffer_callback=buffers.append)
    pickler.by_name = by_name
    pickler.dump(value)
    return file.getvalue(), [buffer.raw() for buffer in buffers]

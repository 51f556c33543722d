"""Pickles functions of ``__main__``, lambdas and closures by value, and large arrays out of band."""

from __future__ import annotations

import io
import pickle
import sys
from contextlib import suppress
from typing import Any

import cloudpickle


class _Pickler(cloudpickle.Pickler):  # type: ignore[misc]
    def reducer_override(self, value: Any) -> Any:
        torch: Any = sys.modules.get("torch")
        is_tensor = torch is not None and type(value) is torch.Tensor
        # torch would copy the bytes of a tensor into the pickle; as a numpy array they stay out of band.
        if is_tensor and not value.requires_grad and value.layout is torch.strided:
            with suppress(TypeError, RuntimeError):  # bfloat16, nested, conjugated: numpy has no such arrays
                return torch.from_numpy, (value.contiguous().numpy(),)
        return super().reducer_override(value)


def dumps(value: Any) -> tuple[bytes, list[memoryview]]:
    """The pickle of a value, and the buffers of its arrays and tensors, for ``pickle.loads(..., buffers=...)``.

    Examples:
        >>> import numpy as np
        >>> content, buffers = dumps(lambda: np.zeros(1000))
        >>> pickle.loads(content, buffers=buffers)().shape
        (1000,)
    """
    main = sys.modules.get("__mp_main__")  # __main__ of a process that multiprocessing spawned
    if main is not None:
        cloudpickle.register_pickle_by_value(main)
    buffers: list[pickle.PickleBuffer] = []
    file = io.BytesIO()
    _Pickler(file, protocol=5, buffer_callback=buffers.append).dump(value)
    return file.getvalue(), [buffer.raw() for buffer in buffers]

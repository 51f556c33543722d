"""Finds random generators of torch, numpy and Python, and reads and sets their states."""

import random
from typing import Any

import numpy as np


def is_generator(value: Any) -> bool:
    """Whether an object is a random generator whose state can be set."""
    import torch

    # By type: some objects that torch's modules hold answer isinstance slowly, or with a warning.
    kind = type(value)
    kinds = random.Random, np.random.Generator, np.random.RandomState
    return kind is torch.Generator or (issubclass(kind, kinds) and kind is not random.SystemRandom)


def global_generators() -> dict[str, Any]:
    """The generators behind the functions of torch, numpy and random."""
    import torch

    of_python = random.getstate.__self__  # type: ignore[attr-defined]
    return {"torch": torch.default_generator, "numpy": np.random.mtrand._rand, "random": of_python}


def state_of(generator: Any) -> Any:
    """The state of a generator, which pickle writes as equal bytes if it is equal."""
    import torch

    if isinstance(generator, torch.Generator):
        return generator.get_state().numpy().tobytes()
    return (
        generator.bit_generator.state if isinstance(generator, np.random.Generator) else generator.__getstate__()
    )


def set_state(generator: Any, state: Any) -> None:
    """Return a generator to a state that `state_of` returned."""
    import torch

    if isinstance(generator, torch.Generator):
        generator.set_state(torch.frombuffer(bytearray(state), dtype=torch.uint8))
    elif isinstance(generator, np.random.Generator):
        generator.bit_generator.state = state
    else:
        generator.__setstate__(state)

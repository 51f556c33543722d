"""What a loader and its samplers declare."""

from contextlib import suppress
from typing import Any


def samplers_of(loader: Any) -> list[Any]:
    """The sampler of a loader, its batch sampler, and those inside."""
    batches = attribute(loader, "batch_sampler")
    found = [attribute(loader, "sampler"), batches]
    for _ in range(3):  # Accelerate puts one around another
        batches = attribute(batches, "batch_sampler") or attribute(batches, "sampler")
        found.append(batches)
    return [each for each in found if each is not None]


def drops_remainder(loader: Any) -> bool:
    """Whether it leaves out the remainder of an epoch (``drop_last``, ``tail="drop"``)."""
    places = (loader, *samplers_of(loader))
    return any(attribute(each, "drop_last") is True for each in places) or attribute(loader, "tail") == "drop"


def draws_with_replacement(loader: Any) -> bool:
    """Whether a sampler says so, or is a weighted one."""
    return any(
        attribute(each, "replacement") is True or type(each).__name__.startswith("Weighted")
        for each in samplers_of(loader)
    )


def attribute(thing: Any, name: str) -> Any:
    """None where there is none, or where the property raises."""
    with suppress(Exception):
        return getattr(thing, name, None)
    return None

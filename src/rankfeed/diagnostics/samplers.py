"""Reads what a loader and its samplers declare: workers, shuffling, replacement, drop_last."""

from collections.abc import Sequence
from contextlib import suppress
from typing import Any

from rankfeed.diagnostics.deliveries import LoaderTraits


def traits_of(loader: Any, workers: int | None = None) -> LoaderTraits:
    """What a loader declares; ``workers`` if that is known better."""
    from torch.utils.data import IterableDataset

    samplers = samplers_of(loader)
    declared = attribute(loader, "num_workers") if workers is None else workers
    return LoaderTraits(
        declared if isinstance(declared, int) else 0,
        drops=attribute(loader, "tail") == "drop"
        or any(attribute(place, "drop_last") is True for place in (loader, *samplers)),
        replaces=any(
            attribute(sampler, "replacement") is True or type(sampler).__name__.startswith("Weighted")
            for sampler in samplers
        ),
        shuffles=_shuffles(loader, samplers),
        indexed=any(not isinstance(inner.dataset, IterableDataset) for inner in dataloaders(loader)),
    )


def samplers_of(loader: Any) -> list[Any]:
    """The sampler of a loader, its batch sampler, and those inside."""
    batches = attribute(loader, "batch_sampler")
    samplers = [attribute(loader, "sampler"), batches]
    for _ in range(3):  # Accelerate puts one around another
        batches = attribute(batches, "batch_sampler") or attribute(batches, "sampler")
        samplers.append(batches)
    return [sampler for sampler in samplers if sampler is not None]


def _shuffles(loader: Any, samplers: Sequence[Any]) -> bool | None:
    """By the samplers or the dataset (MosaicML's); None if they do not say."""
    names = {"RandomSampler": True, "SequentialSampler": False}
    unused = len(samplers) > 1 and samplers[0] is attribute(loader, "sampler")  # torch's, beside one of batches
    declared = [getattr(sampler, "shuffle", names.get(type(sampler).__name__)) for sampler in samplers[unused:]]
    declared.append(attribute(attribute(loader, "dataset"), "shuffle"))
    return True if any(value is True for value in declared) else False if False in declared else None


def dataloaders(loader: Any) -> list[Any]:
    """The torch DataLoaders that a loader is or wraps."""
    from torch.utils.data import DataLoader

    wrapped = [loader]
    for value in getattr(loader, "__dict__", {}).values():
        wrapped += value if isinstance(value, (list, tuple)) else [value]
    return [candidate for candidate in wrapped if isinstance(candidate, DataLoader)]


def attribute(thing: Any, name: str) -> Any:
    """None where there is none, or where the property raises."""
    with suppress(Exception):
        return getattr(thing, name, None)
    return None

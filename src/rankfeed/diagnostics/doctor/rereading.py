"""Reads batches of a recorded loader twice from the same random state, and collates their samples one by one."""

import copy
import gc
import pickle
import sys
from collections.abc import Iterator, Sequence
from contextlib import suppress
from types import ModuleType
from typing import Any

from rankfeed.diagnostics.batch_columns import columns
from rankfeed.diagnostics.doctor import rows as shapes
from rankfeed.diagnostics.doctor.records import CollatedAlone, ReadAgain, Step
from rankfeed.diagnostics.generators import global_generators, is_generator, set_state, state_of
from rankfeed.diagnostics.samplers import attribute
from rankfeed.diagnostics.tagged import Origin

#: Batches that are read again, if that takes no longer than this many seconds.
BATCHES, _SECONDS = 4, 1.0
#: Objects among which generators are searched, nearest first, and entries of a container that is searched.
_OBJECTS, _ENTRIES = 20_000, 1000


def reread(loader: Any, waited: float, *, copies: bool = True) -> Iterator[ReadAgain | CollatedAlone]:
    """What the first batches hold if they are read again.

    ``waited``: seconds that a batch took; ``copies``: whether the dataset may be copied.
    """
    origin = attribute(loader, "collate_fn")
    if not isinstance(origin, Origin) or not origin.kept:  # not recorded
        return
    origin.kept[max(1, int(_SECONDS / max(waited, 1e-6))) :] = []
    generators = _generators(origin)
    with suppress(Exception):  # a dataset may serve its loader only
        yield _read_again(origin, generators, copies=copies)
    with suppress(Exception):  # a collate function may need several samples
        before = pickle.dumps([*map(state_of, generators)])
        batches = [samples for _, samples, are_several in origin.kept if are_several]
        together = [_step(origin.collate(copy.deepcopy(samples)), len(samples)) for samples in batches]
        alone = [[_step(origin.collate([copy.deepcopy(sample)]), 1) for sample in samples] for samples in batches]
        yield CollatedAlone(together, alone, drew=pickle.dumps([*map(state_of, generators)]) != before)


def _read_again(origin: Origin, generators: Sequence[Any], *, copies: bool) -> ReadAgain:
    states = [*map(state_of, generators)]
    first = _read(origin, origin.dataset)
    later = [*map(state_of, generators)]
    drew = pickle.dumps(later) != pickle.dumps(states)
    _restore(generators, states)
    again = _read(origin, origin.dataset)
    if drew and copies:
        with suppress(Exception):  # of objects that cannot be copied
            _restore(generators, states)
            datasets = [copy.deepcopy(origin.dataset) for _ in range(2)]
            # With other random numbers, as those from before may be what was written into the dataset.
            _restore(generators, later)
            _read(origin, origin.dataset)
            steps = []
            for dataset in (*datasets, origin.dataset):
                _restore(generators, states)
                steps.append(_read(origin, dataset))
            if steps[0] == steps[1] != steps[2]:
                return ReadAgain(steps[0], steps[2], drew, changes_dataset=True)
    return ReadAgain(first, again, drew)


def _restore(generators: Sequence[Any], states: Sequence[Any]) -> None:
    for generator, state in zip(generators, states, strict=True):
        set_state(generator, state)


def _read(origin: Origin, dataset: Any) -> list[Step]:
    return [_step(origin.collate(samples), count) for samples, count in _samples(origin, dataset)]


def _samples(origin: Origin, dataset: Any) -> Iterator[tuple[Any, int]]:
    """The samples of each batch as collate is given them, and their number."""
    for indices, samples, are_several in origin.kept:
        if dataset is None or indices is None:
            yield copy.deepcopy(samples), len(indices or samples)
        elif not are_several:
            yield dataset[indices], len(indices)
        elif callable(several := getattr(dataset, "__getitems__", None)):
            yield several(indices), len(indices)
        else:
            yield [dataset[index] for index in indices], len(indices)


def _step(batch: Any, rows: int) -> Step:
    fields = shapes.unmasked(columns(batch, rows))
    return Step(fields=shapes.hashed(fields), ends=shapes.all_ends(fields))


def _generators(origin: Origin) -> list[Any]:
    """The global generators, those of modules, and those that the dataset and the collate function can reach."""
    reached: list[Any] = [origin.dataset, origin.collate]
    seen = {id(thing) for thing in reached}
    for thing in reached:  # which grows
        if len(reached) > _OBJECTS:
            break
        if isinstance(thing, (list, tuple, dict, set)) and len(thing) > _ENTRIES:
            continue  # data
        new = [target for target in gc.get_referents(thing) if gc.is_tracked(target) or is_generator(target)]
        new = [target for target in new if id(target) not in seen and not isinstance(target, (type, ModuleType))]
        seen.update(map(id, new))
        reached += new
    reached += [value for module in [*sys.modules.values()] for value in getattr(module, "__dict__", {}).values()]
    reached += global_generators().values()
    return [*{id(generator): generator for generator in reached if is_generator(generator)}.values()]

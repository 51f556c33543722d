"""What any loader really delivers, on all ranks: every sample counted, exactly."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from rankfeed._util.validate import check_callable, check_int, check_iterable, check_optional, check_path, invalid
from rankfeed.diagnostics.audit.audited import AuditReport, EpochReport, Repeat
from rankfeed.diagnostics.audit.counting import Count, Dealt, bits_for, count, distinct
from rankfeed.diagnostics.audit.processes import Processes
from rankfeed.diagnostics.audit.reading import Reading, Told, ours
from rankfeed.diagnostics.audit.universe import Universe
from rankfeed.diagnostics.keys import USUAL, Key
from rankfeed.errors import AuditError
from rankfeed.plan import Plan

if TYPE_CHECKING:
    from rankfeed.loading import Loader

#: Places that are named of a sample that came more than once.
_PLACES = 4


def audit(
    loader: Iterable[Any],
    *,
    key: Key = USUAL,
    epochs: int = 1,
    universe: int | Iterable[Any] | None = None,
    before_epoch: Callable[[int], object] | None = None,
    max_steps: int | None = None,
    memory: int = 256 << 20,
    folder: str | Path | None = None,
) -> AuditReport:
    """Read a loader to its end, whoever made it, and count what it delivers; on all ranks together.

    A collective: every process of the job calls it, with its own loader. Meanwhile keys are kept on disk, twice 8
    bytes for a sample with a whole number for an id, twice 16 for others.

    Args:
        loader: any iterable of batches: ours, a torch DataLoader, or anybody's.
        key: where a batch has its samples' ids: a field's name (in dicts, in objects, in lists of dicts), a place
            in a tuple, or a function of the batch. Batches without the usual name are known by a hash of what each
            sample holds: two samples with equal content count as one then. A `Loader` has its own ``id_column``.
        epochs: how often to read it.
        universe: which samples should come in each epoch: their ids, or a number n for 0 to n - 1. If left out,
            what came in any of the epochs should come in each; of a `Loader` it is known.
        before_epoch: called with the epoch's number before each, where a training loop does so (``set_epoch``).
        max_steps: end each epoch after so many steps; a loader that has no end needs it.
        memory: bytes to count in, about.
        folder: where keys are kept meanwhile; the system's folder of temporary files if None.

    Returns:
        the same report on all ranks.

    Raises:
        AuditError: a loader raised an error, on any rank; batches have no such key; several processes and no
            process group of torch.distributed.
        ArgumentError: an argument that cannot be meant.

    Examples:
        >>> import rankfeed as rf
        >>> class Careless:
        ...     def __iter__(self):
        ...         yield {"sample_id": [0, 1, 2]}
        ...         yield {"sample_id": [2, 4]}
        >>> print(rf.audit(Careless(), universe=5))
        1 rank, samples known by their ids
        epoch 0: 5 samples, 4 different, 1 missing, 1 repeated; 2 steps a rank
        - epoch 0: 1 of 5 deliveries repeat a sample: 2 at rank 0, step 0, row 2; rank 0, step 1, row 0
        - epoch 0: 1 samples did not come: 3
    """
    processes = Processes.here()
    with ExitStack() as stack:
        reading: Reading
        expected: Universe

        def begin() -> tuple[object, ...]:
            nonlocal reading, expected, epochs, max_steps, memory
            epochs, max_steps, memory = _check(loader, key, epochs, before_epoch, max_steps, memory, folder)
            own = ours(loader)
            found, due = (key, universe) if own is None else _of_ours(own, key, universe)
            expected = Universe(due)
            scratch = stack.enter_context(tempfile.TemporaryDirectory(prefix="rankfeed-audit-", dir=folder))
            reading = Reading(loader, found, Path(scratch), processes.rank)
            return epochs, memory, max_steps, expected.known, expected.size

        def read() -> Told:
            for epoch in range(epochs):
                if before_epoch is not None:
                    before_epoch(epoch)
                reading.read(max_steps)
            return reading.told()

        asked = processes.each(begin, "the audit could not begin")
        if len({*asked}) > 1:
            raise AuditError(
                "ranks were asked for different audits",
                expected="the same epochs, memory, max_steps and universe on all of them",
                found=dict(enumerate(asked)),
            )
        told: list[Told] = processes.each(read, "the loader failed")
        _refuse(told)
        return _counted(processes, reading, told, expected, memory)


def _check(
    loader: Any, key: Any, epochs: Any, before_epoch: Any, max_steps: Any, memory: Any, folder: Any
) -> tuple[int, int | None, int]:
    """The counts, once all arguments are known to be valid."""
    check_iterable("loader", loader, "an iterable of batches")
    if isinstance(key, bool | np.bool_) or not (isinstance(key, str | int | np.integer) or callable(key)):
        raise invalid("key", "the name of a field, its place in a tuple, or a function of the batch", key)
    check_optional(check_callable, "before_epoch", before_epoch)
    check_optional(check_path, "folder", folder)
    return (
        check_int("epochs", epochs, at_least=1, at_most=10**6),
        check_optional(check_int, "max_steps", max_steps, at_least=1),
        check_int("memory", memory, at_least=1),
    )


def _of_ours(loader: Loader, key: Key, universe: Any) -> tuple[Key, Any]:
    """Where our own loader has its ids, and which they are."""
    own = loader.id_column
    if own is None or key not in (USUAL, own):
        return key, universe
    plan = getattr(loader, "plan", None)
    if universe is None and type(plan) is Plan and loader.tail != "drop" and not loader.state_dict()["position"]:
        return own, plan.num_samples
    return own, universe


def _counted(
    processes: Processes, reading: Reading, told: Sequence[Told], expected: Universe, memory: int
) -> AuditReport:
    first = {each.share: each.rank for each in reversed(told)}
    # Of processes that read one share (tensor-parallel peers) one counts.
    counted = [each for each in told if each.share is None or first[each.share] == each.rank]
    traces = reading.traces if processes.rank in [each.rank for each in counted] else []
    came_as = max(each.width for each in told)
    width = came_as or expected.width or 1
    bits = bits_for(sum(each.samples for each in counted) + expected.size, width, memory)
    dealt = [Dealt(reading.scratch, f"epoch-{epoch}", width, bits) for epoch in range(len(reading.traces))]
    declared = Dealt(reading.scratch, "universe", width, bits) if expected.known else None

    def deal() -> None:
        expected.check(came_as)
        for each, trace in zip(dealt, reading.traces, strict=True):
            each.deal(trace.chunks() if traces and trace.width else ())
        if declared is not None and processes.rank == 0:
            declared.deal(expected.chunks())

    processes.each(deal, "keys could not be sorted")
    counts = [Count.none(width)] * len(dealt)
    for number in range(1 << bits):
        parts = processes.to_first([each.read(number) for each in dealt])
        if parts is not None:
            came = [np.concatenate(of_epoch) for of_epoch in zip(*parts, strict=True)]
            due, _ = distinct(np.concatenate(came) if declared is None else declared.read(number))
            counts = [so_far.plus(count(each, due)) for so_far, each in zip(counts, came, strict=True)]
    counts = processes.of_first(counts)
    places = processes.all(
        [trace.places(each.repeated_keys, _PLACES) for trace, each in zip(traces, counts, strict=False)]
    )
    known = expected.known or len(counts) > 1
    return AuditReport(
        by_content=any(each.by_content for each in told),
        cut=any(each.cut for each in told),
        epochs=tuple(
            EpochReport(
                epoch,
                each.deliveries,
                each.unique,
                each.missing if known else None,
                each.unknown if known else None,
                tuple(one.epochs[epoch] for one in counted),
                tuple(_repeats(each, [of_rank[epoch] for of_rank in places if of_rank], expected)),
                expected.names(each.missing_keys),
                expected.names(each.unknown_keys),
            )
            for epoch, each in enumerate(counts)
        ),
    )


def _repeats(each: Count, places: Sequence[Any], expected: Universe) -> Iterator[Repeat]:
    for number, (name, times) in enumerate(zip(expected.names(each.repeated_keys), each.times, strict=True)):
        found = [place for of_rank in places for place in of_rank[number]]
        yield Repeat(name, times, tuple(found[:_PLACES]))


def _refuse(told: Sequence[Told]) -> None:
    if len({each.width for each in told if each.width}) > 1:
        raise AuditError("keys are whole numbers on some ranks and not on others", remedy="give all the same key=")
    shares: dict[int, Told] = {}
    for each in told:
        if each.share is not None:
            first = shares.setdefault(each.share, each)
            if [epoch.orders[-1] for epoch in first.epochs] != [epoch.orders[-1] for epoch in each.epochs]:
                raise AuditError(
                    "parallel peers were given different samples",
                    expected="the same batches on all processes of a data-parallel rank",
                    where=f"processes {first.rank} and {each.rank}",
                )

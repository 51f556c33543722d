"""The loader: a source, a plan and a place in it, iterated."""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Literal, Never, Self, cast, get_args

import torch
from torch.utils.data import Dataset

from rankfeed._util.trainer import refuse_trainer_without_mixin
from rankfeed._util.validate import check_choice, check_instance, check_optional
from rankfeed.errors import ArgumentError
from rankfeed.loading import audit as proof
from rankfeed.loading import state as states
from rankfeed.loading.collate import Batch, RaggedAs, check_ragged
from rankfeed.loading.device import device_of
from rankfeed.loading.engine import Engine, InlineEngine, ThreadEngine
from rankfeed.loading.frameworks import AmongFrameworks, refuse_if_checkpoint_ignored, refuse_if_passed_by
from rankfeed.loading.iteration import Iteration
from rankfeed.loading.ledger import folder_of
from rankfeed.loading.maker import Made, Maker
from rankfeed.loading.options import (
    WorkerKind,
    agreed_layout,
    check_batch_size,
    check_column_names,
    check_functions,
    check_topology,
    check_workers,
    plan_of,
    refuse_unknown,
    source_of,
)
from rankfeed.loading.placed import Placed
from rankfeed.loading.processes import ProcessEngine
from rankfeed.loading.randomness import kept_globals
from rankfeed.loading.standing import Standing
from rankfeed.loading.stats import Stats
from rankfeed.loading.stream import Stream
from rankfeed.loading.stream_loader import StreamLoader
from rankfeed.plan import Cursor, Plan, Schedule, Tail
from rankfeed.plan.plan import DEFAULT_WINDOW
from rankfeed.sources import Source
from rankfeed.topology import Topology

#: Lanes taken over from a state: one made by hand must not ask for an array of any length.
_MOST_LANES = 2**20
#: Steps of each worker that a source is told of beforehand, at least and at most.
_AHEAD, _MOST_AHEAD = 4, 64


class Loader(Standing, Placed, AmongFrameworks):
    """Feeds one rank its share of a data set, batch by batch.

    Iterating yields this rank's batches of one epoch, each a dict of tensors (see ``ragged``). When an epoch is
    exhausted the loader moves on to the next; after a break, iterating begins the same epoch anew.

    Args:
        source: what :func:`rankfeed.open` returned, or any source; a map-style torch Dataset, which
            :func:`rankfeed.from_dataset` wraps; or a stream of :func:`rankfeed.from_iterable`, whose loader has no
            length.
        batch_size: rows of this rank's batches.
        shuffle: False, True (the kind that suits the source), "global" or "window".
        seed: of the order and of all random streams.
        tail: how an epoch ends where the global batch doesn't divide it (see :class:`rankfeed.Schedule`).
        window: samples mixed with each other under "window", about; fewer with ``shuffle=True`` where rows are
            large and only whole chunks of them can be read, unless you choose a number.
        lanes: streams of blocks read at the same time; part of the order. 64 for "window", else 1.
        plan: an order of your own, instead of shuffle, window and lanes.
        columns: names of the columns to read; None for all.
        transform: called with each sample (a dict), or with the sample and a numpy Generator that belongs to
            (seed, epoch, sample id); returns the new sample.
        batch_transform: called with each batch, or with the batch and a Generator.
        collate_fn: makes a batch of a list of samples, instead of the loader's own way.
        ragged: "pad" (with ``<name>_lengths``), "nested" (jagged nested tensors) or "list".
        pad_to: under "pad", rows are padded to a multiple of so many elements: few shapes, for ``torch.compile``.
        num_workers: threads or processes that make batches ahead; 0 makes each when it is asked for.
        worker_kind: "thread" or "process". What is delivered is the same.
        prefetch_factor: batches that each worker makes ahead. A worker process makes batches of more than 64 KiB
            only one ahead, whatever the number: it waits until the loader has taken the last one. Threads make as
            many ahead as this says.
        device: where tensors go; to an accelerator through pinned memory, without waiting.
        topology: rank and world size; found from the environment at the first ``len`` or ``iter`` if left out.
        on_error: "raise".
        id_column: name of a column to add, with the sample ids (int64).
        audit: True counts what is delivered, and compares it with the plan at the end of each epoch. A folder:
            each rank keeps a ledger in it, on disk at each step, for ``rankfeed verify``.

    Raises:
        ArgumentError: an argument has an invalid type or value, or is one of torch's DataLoader (``drop_last``,
            ``pin_memory``, ...): names the equivalent.
        PlanError: no samples; fewer samples than ranks (at the first ``len`` or ``iter``).

    Examples:
        >>> import rankfeed as rf
        >>> source = rf.from_dataset([{"x": float(i)} for i in range(5)])
        >>> loader = rf.Loader(source, batch_size=2)
        >>> for batch in loader:
        ...     print(batch["x"].tolist())
        [0.0, 1.0]
        [2.0, 3.0]
        [4.0]
        >>> loader.epoch
        1
    """

    def __new__(cls, source: Any = None, *arguments: Any, **options: Any) -> Self:
        """A stream has neither a plan nor a length, and a loader of its own."""
        if cls is Loader and isinstance(source, Stream):
            return cast("Self", StreamLoader(source, *arguments, **options))
        return super().__new__(cls)

    def __init__(
        self,
        source: Source | Stream | Dataset[Any],
        batch_size: int = 1,
        *,
        shuffle: bool | Literal["global", "window"] = False,
        seed: int = 0,
        tail: Tail = "even",
        window: int = DEFAULT_WINDOW,
        lanes: int | None = None,
        plan: Plan | None = None,
        columns: Sequence[str] | None = None,
        transform: Callable[..., Any] | None = None,
        batch_transform: Callable[..., Any] | None = None,
        collate_fn: Callable[[list[Any]], Any] | None = None,
        ragged: RaggedAs = "pad",
        pad_to: int = 1,
        num_workers: int = 0,
        worker_kind: WorkerKind = "thread",
        prefetch_factor: int = 2,
        device: str | torch.device | None = None,
        topology: Topology | None = None,
        on_error: Literal["raise"] = "raise",
        id_column: str | None = None,
        audit: bool | str | os.PathLike[str] = False,
        **unknown: Never,
    ) -> None:
        super().__init__()
        refuse_unknown(unknown)
        if isinstance(source, Stream):
            raise ArgumentError(
                "a stream has a loader of its own, from which no class is derived",
                found=type(self).__name__,
                remedy="wrap what rankfeed.Loader(stream) returns",
            )
        self.source = source = source_of(source)
        self.batch_size = check_batch_size(batch_size)
        self.tail: Tail = check_choice("tail", tail, get_args(Tail))
        self.num_workers, self.worker_kind, self.prefetch_factor = check_workers(
            num_workers, worker_kind, prefetch_factor
        )
        self.device = device_of(device)
        self.id_column, self.audit, self.ledger = id_column, audit, folder_of(audit)
        self.audit_report: proof.EpochAudit | None = None
        check_choice("on_error", on_error, ("raise",))
        ragged, pad_to = check_ragged(ragged, pad_to)
        check_functions(transform=transform, batch_transform=batch_transform, collate_fn=collate_fn)
        self._topology = check_topology(topology)
        check_optional(check_instance, "plan", plan, kind=Plan, expected="a rankfeed.Plan")
        if plan is not None and (shuffle is not False or lanes is not None):
            raise ArgumentError("a plan brings its own order", remedy="leave out shuffle and lanes, or the plan")
        self._lanes_given = lanes is not None or plan is not None
        self.plan = plan if plan is not None else plan_of(source, shuffle, seed, window, lanes)
        if self.plan.num_samples != len(source):
            raise ArgumentError(
                "the plan is not of this source",
                expected=f"a plan of {len(source)} samples",
                found=f"one of {self.plan.num_samples}",
            )
        columns = check_column_names(source, columns, id_column, self.tail, ragged)
        layout = None
        if transform is None and collate_fn is None:
            with kept_globals():  # wrapped Datasets are asked for a few samples, which may draw random numbers
                layout = agreed_layout(source, columns)
        stride = max(1, self.num_workers) if self.worker_kind == "process" else 1
        self._maker = Maker(
            source=source,
            columns=columns,
            transform=transform,
            batch_transform=batch_transform,
            collate_fn=collate_fn,
            ragged=ragged,
            pad_to=pad_to,
            seed=self.plan.seed,
            id_column=id_column,
            seed_globals=self.num_workers == 0 or self.worker_kind == "process",
            ahead=_steps_ahead(source.prefetch_distance, self.batch_size, stride),
            stride=stride,
            layout=layout,
            fixed=layout is not None,
        )
        self._engine: Engine | None = None
        self._stats = Stats()

    def __len__(self) -> int:
        """Steps of the epoch in hand: those done and those left."""
        refuse_trainer_without_mixin("a rankfeed.Loader", is_share=True)
        return self._begun.steps + len(self._schedule())

    def __iter__(self) -> Iterator[Batch]:
        refuse_if_passed_by(self)
        if self._is_new:
            refuse_if_checkpoint_ignored(self)
        turn = self._next_turn()
        return Iteration(self, self._schedule(), turn)

    def state_dict(self) -> dict[str, Any]:
        """Where the job stands, after the last delivered step: JSON-able, under 1 KiB, the same on every rank.

        Raises:
            CorruptError: a file that is being read was rewritten in place since the data were opened.
        """
        return self._state_at(self._cursor)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on where a state was taken, on whatever number of ranks, workers and batch size.

        Raises:
            StateError: it belongs to other data or another plan; says what differs.
        """
        parsed = states.parse(state)
        plan = self.plan
        lanes = parsed.plan.get("lanes")
        if not self._lanes_given and isinstance(lanes, int) and 1 <= lanes <= _MOST_LANES:
            # Lanes are part of the order: a job goes on with those it began with.
            plan = Plan(self.source.blocks, shuffle=plan.shuffle, seed=plan.seed, window=plan.window, lanes=lanes)
        cursor = states.check(parsed, plan.describe(), self.source.fingerprint)
        self.plan = plan
        self._go_to(cursor)

    def stats(self) -> dict[str, int | float]:
        """Epoch, steps, samples, rates, time waited for data, cache hits, padding, private memory of this rank."""
        return self._stats.as_dict()

    def _state_at(self, cursor: Cursor) -> dict[str, Any]:
        self.source.check_unchanged()
        return states.save(cursor, self.plan.describe(), self.source.fingerprint)

    def _schedule(self) -> Schedule:
        return Schedule(
            self.plan,
            batch_size=self.batch_size,
            topology=self.topology,
            epoch=self._begun.epoch,
            start=self._begun.position,
            tail=self.tail,
        )

    def _run(self, schedule: Schedule) -> Iterator[Made]:
        if self._engine is None:
            self._engine = self._make_engine()
        return self._engine.run(schedule)

    def _make_engine(self) -> Engine:
        if self.num_workers == 0:
            return InlineEngine(self._maker)
        if self.worker_kind == "thread":
            return ThreadEngine(self._maker, self.num_workers, self.prefetch_factor)
        return ProcessEngine(self._maker, self.num_workers, self.prefetch_factor)

    def _begin(self, turn: int) -> Schedule | None:
        """The steps that an iteration begins with, from where the loader stands; None if another has the turn."""
        if self._turn != turn:
            return None
        self._under_way = True
        schedule = self._schedule()
        self._stats.begins(schedule.epoch, self._begun.steps, len(schedule))
        return schedule

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "_engine": None, "_stats": Stats()}  # what runs stays behind


# What help() and editors show: they ask __new__ first.
Loader.__new__.__signature__ = inspect.signature(Loader.__init__)  # type: ignore[attr-defined]


def _steps_ahead(samples: int, batch_size: int, stride: int) -> int:
    """How many steps before its turn the source is told of a batch: a multiple of ``stride``."""
    return stride * min(_MOST_AHEAD, max(_AHEAD, -(-samples // (batch_size * stride))))

"""The loader: batches of one rank, from a source or a stream."""

from __future__ import annotations

import copy
import os
import reprlib
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal, Never, get_args

import torch
from torch.utils.data import Dataset

from rankfeed._util.trainer import refuse_trainer_without_mixin
from rankfeed._util.validate import check_callable, check_choice, check_instance, check_int, check_optional
from rankfeed.errors import ArgumentError, StreamError, safe_repr
from rankfeed.loading._compat import (
    DataLoaderAttributeError,
    DataLoaderCompat,
    refuse_copies_in_workers,
    refuse_ignored_checkpoint,
    refuse_unprepared,
)
from rankfeed.loading.batch_builder import BatchBuilder
from rankfeed.loading.collate import Batch, BytesAs, RaggedAs, check_ragged
from rankfeed.loading.device import check_device
from rankfeed.loading.epoch import EpochProgress, iterate_epoch
from rankfeed.loading.lazy_topology import LazyTopology
from rankfeed.loading.map_feed import MapFeed
from rankfeed.loading.options import (
    FeedOptions,
    WorkerKind,
    as_source,
    check_column_names,
    check_drop_behind,
    check_id_column,
    concat_layout,
    ledger_folder,
    make_plan,
    open_properties,
    refuse_options_for_stream,
    refuse_unknown_options,
)
from rankfeed.loading.stats import LoaderStats
from rankfeed.loading.streams.stream import Stream
from rankfeed.plan import Cursor, Plan, Schedule, Tail
from rankfeed.plan.plan import DEFAULT_WINDOW
from rankfeed.sources import Source
from rankfeed.sources.torch_dataset import TorchDatasetSource
from rankfeed.topology import Topology

if TYPE_CHECKING:  # imported when they are needed: the first batch does not wait for them
    from rankfeed.loading.audit import EpochAudit
    from rankfeed.loading.streams.feed import StreamFeed

#: Steps of each worker that are announced to a source, at least and at most.
_MIN_PREFETCH_STEPS, _MAX_PREFETCH_STEPS = 4, 64
_REPR = reprlib.Repr()
_REPR.maxother = 120


class LengthUnknownError(StreamError, TypeError):
    """The loader of a stream has no length, as a DataLoader over an IterableDataset has none."""


class Loader(DataLoaderCompat):
    """Delivers one rank's share of a dataset, batch by batch.

    Iterating yields this rank's batches of one epoch, each a dict of tensors (see ``ragged``). After the last
    batch of an epoch the loader moves on to the next epoch, even if a loop that counts steps does not ask for
    another batch (a stream has to be asked); after a break before it, iterating begins the same epoch again.
    An iterator that raised an error raises at each further ``next`` too: no step is skipped. ``state_dict`` then
    returns the position before the step that failed.

    The loader of a stream has no length and no plan, and does not take ``shuffle``, ``window``, ``lanes``,
    ``plan``, ``columns`` and ``audit``. Its ranks take the same number of steps too: if ``torch.distributed`` is
    initialised, they agree on the next steps before they deliver them, so none continues alone when a stream
    ends, fails, or differs between ranks.

    Args:
        source: what :func:`rankfeed.open` returned, or any source; a map-style torch Dataset, which
            :func:`rankfeed.from_dataset` wraps; or a stream of :func:`rankfeed.from_iterable`.
        batch_size: rows of this rank's batches.
        shuffle: False; "global" (all samples); "window" (blocks, which are read in one piece, and samples within
            windows of them); True ("global" if samples are read singly or all data take at most 512 MiB when they
            are decoded, else "window").
        seed: of the order and of all random streams.
        tail: how an epoch ends if the global batch does not divide it: "even", "drop" or "pad" (see
            :class:`rankfeed.Schedule`). If each rank has its own stream: "drop" (stop after the last step that is
            full on every rank) or "pad" (continue until the streams of all ranks have ended).
        window: approximate number of samples that "window" mixes with each other. If left out, ``shuffle=True``
            uses fewer for large rows that can only be read in chunks.
        lanes: independent streams of blocks that are read side by side; part of the order, so do not derive it
            from the number of ranks. 64 for "window", else 1. A loaded state decides what ``shuffle=True`` and
            omitted lanes leave open.
        plan: your own order, instead of shuffle, window and lanes.
        columns: names of the columns to read, in the order of the batch; None for all. The mask of a column is
            read with it.
        transform: called with each sample (a dict), or with the sample and a numpy Generator that is keyed by
            (seed, epoch, sample id); returns the new sample, which is copied: the next one may use its memory
            again (with worker threads, memory of the thread: several call the transform at the same time).
        batch_transform: called with each batch, or with the batch and a Generator. It must return new memory for
            each batch, or change the batch in place: workers build later batches while the loop uses this one.
        collate_fn: called with a list of samples; returns the batch, instead of the loader's own collation.
            Samples that are dicts have the ``id_column``. A batch of ``collate_fn`` or ``batch_transform`` must
            have a row for each sample. That is proven by the id column, if the batch has it, or by the number of
            rows: the first dimension that all its arrays have in common. Of other batches the counts are "not
            proven". Rows must be in the order of the samples, unless the batch has the id column.
        ragged: "pad" (with ``<name>_lengths``), "nested" (jagged nested tensors) or "list".
        pad_to: under "pad", rows are padded to a multiple of this number: few shapes, for ``torch.compile``.
        bytes_as: "bytes" (a list of byte strings, each of which is a copy) or "view" (a list of uint8 arrays over
            one buffer, which is used again when the last of them is gone); text is a list of str in both cases.
            Without effect on a ``collate_fn``.
        drop_behind: whether to drop the pages of the rows of a batch from the kernel's page cache once they are
            copied: for data larger than memory that are read once, in place (Parquet files are not). In order next
            to nothing stays. Of a shuffled epoch up to 0.4 of the pages do, since the disk reads around each row.
            Needs the native library.
        num_workers: threads or processes that build batches ahead; 0 builds each when it is requested. With 0,
            rows that are only copied are copied one batch ahead (several small ones) by a native thread, if this
            process has more than one CPU. A stream is read once per rank, by one thread.
        worker_kind: "thread" or "process"; the batches are the same.
        prefetch_factor: batches that each worker builds ahead (a process: at most 64); more of small ones, built
            several at once.
        device: device that tensors are moved to; an accelerator asynchronously, through pinned memory.
        topology: rank and world size; detected at the first ``len`` or ``iter`` if left out.
        on_error: only "raise".
        id_column: name of a column to add, with the sample ids (int64); of a stream, with the position of each
            sample (where each rank has its own: position * world_size + rank). A ``collate_fn`` may return the
            column itself, in any order, and the mask ``valid`` follows it; a ``batch_transform`` that changes the
            order of rows has to do so in both columns.
        audit: True: count the delivered samples, and compare them with the plan at the end of each epoch. A
            directory: each rank records its steps there in a ledger (a file) for ``rankfeed verify``.

    Raises:
        ArgumentError: an argument has an invalid type or value, cannot be used with a stream, or is one of torch's
            DataLoader (``drop_last``, ``pin_memory``, ...): names the equivalent.
        PlanError: no samples; fewer samples than ranks (at the first ``len`` or ``iter``).
        StreamError: while iterating: the stream of some rank failed (raised on all ranks), is empty or exhausted;
            the ranks read different streams or begin at different positions; a rank ended.
        TopologyError: ranks have their own streams, and ``torch.distributed`` is not initialised.
        TransformError: while iterating: a function of the user raised, or returned a batch that lacks rows.

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
        bytes_as: BytesAs = "bytes",
        drop_behind: bool = False,
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
        refuse_unknown_options(unknown, Loader.__init__)
        stream = source if isinstance(source, Stream) else None
        if stream is None:
            data = as_source(source)
        else:
            from rankfeed.loading.streams.feed import StreamFeed, StreamSource

            data = StreamSource(stream.declared)
        #: What it delivers: a source or a stream.
        self.source: Any = data if stream is None else stream
        self._topology = LazyTopology(topology)
        options = FeedOptions(batch_size, tail, num_workers, worker_kind, prefetch_factor, self._topology)
        self.batch_size, self.tail, self.num_workers = options.batch_size, options.tail, options.num_workers
        self.worker_kind, self.prefetch_factor = options.worker_kind, options.prefetch_factor
        self.device, self.id_column, self.audit = check_device(device), id_column, audit
        ledger = ledger_folder(audit)
        check_choice("on_error", on_error, ("raise",))
        ragged, pad_to = check_ragged(ragged, pad_to)
        functions = {"transform": transform, "batch_transform": batch_transform, "collate_fn": collate_fn}
        for name, function in functions.items():
            check_optional(check_callable, name, function)
        check_optional(check_instance, "plan", plan, kind=Plan, expected="a rankfeed.Plan")
        check_id_column(id_column)
        uses_processes = self.num_workers > 0 and self.worker_kind == "process"
        builder = BatchBuilder(
            source=data,
            transform=transform,
            batch_transform=batch_transform,
            collate_fn=collate_fn,
            ragged=ragged,
            pad_to=pad_to,
            drop_behind=check_drop_behind(data, drop_behind),
            bytes_as=check_choice("bytes_as", bytes_as, get_args(BytesAs)),
            seed=check_int("seed", seed),
            id_column=id_column,
            seed_globals=self.num_workers == 0 or uses_processes,
        )
        self._feed: MapFeed | StreamFeed
        if stream is not None:
            refuse_options_for_stream(
                shuffle=shuffle, window=window, lanes=lanes, plan=plan, columns=columns, audit=audit
            )
            self._feed = StreamFeed(stream, builder, options)
        else:
            if plan is not None and (shuffle is not False or lanes is not None):
                raise ArgumentError("a plan defines the order", remedy="leave out shuffle and lanes, or the plan")
            properties: tuple[str, ...] = ()
            if plan is None:
                plan = make_plan(data, shuffle, seed, window, lanes)
                properties = open_properties(shuffle, window, lanes)
            if plan.num_samples != len(data):
                raise ArgumentError(
                    "the plan belongs to another source",
                    expected=f"a plan of {len(data)} samples",
                    found=f"one of {plan.num_samples}",
                )
            builder.seed = plan.seed
            is_transformed = transform is not None
            builder.columns = check_column_names(
                data, columns, id_column, self.tail, ragged, is_transformed=is_transformed
            )
            if transform is None and collate_fn is None:
                builder.layout = concat_layout(data, builder.columns)
                builder.has_layout = builder.layout is not None
            builder.stride = self.num_workers if uses_processes else 1
            steps = -(-data.prefetch_distance // (self.batch_size * builder.stride))
            builder.prefetch_steps = builder.stride * min(_MAX_PREFETCH_STEPS, max(_MIN_PREFETCH_STEPS, steps))
            self._feed = MapFeed(
                plan, builder, options, open_properties=properties, audit=audit is True, ledger=ledger
            )
        #: Where the loader is; advanced by its latest iteration.
        self.progress = EpochProgress()
        self._stats = LoaderStats(num_workers)

    def __len__(self) -> int:
        """Steps of the current epoch: those done and those left."""
        begun = self.progress.after_loading(self.progress.begun, self._feed.is_end)
        steps_left = self._feed.steps_left(begun)
        if steps_left is None:
            raise LengthUnknownError("the loader of a stream has no length", found=repr(self.source))
        refuse_trainer_without_mixin("a rankfeed.Loader", is_share=True)
        return begun.steps + steps_left

    def __getitem__(self, index: object) -> Never:
        """Refuse to be indexed, as torch's DataLoader does with its dataset."""
        raise ArgumentError(
            "a rankfeed.Loader cannot be indexed, nor be the dataset of a torch DataLoader: it yields batches",
            found=f"loader[{index!r:.80}]",
            remedy="iterate the Loader itself: for batch in loader; its source can be indexed: loader.source",
        )

    def __iter__(self) -> Iterator[Batch]:
        refuse_copies_in_workers(self)
        if not self.is_stream:
            refuse_unprepared(self)
            if self.progress.is_new:
                refuse_ignored_checkpoint(self)
        return iterate_epoch(self._feed, self.progress, self._stats, self.device)

    def __repr__(self) -> str:
        # Neither resolves the topology nor reads data.
        source = self.source
        if isinstance(source, TorchDatasetSource):  # may wrap a list of a million samples
            text = f"from_dataset({_REPR.repr(source.dataset)})"
        else:
            text = safe_repr(source)
        facts: dict[str, object] = {"batch_size": self.batch_size, "tail": self.tail}
        if self._feed.plan is not None:
            facts |= {"shuffle": self._feed.plan.shuffle, "seed": self._feed.plan.seed}
        facts["num_workers"] = self.num_workers
        if self.num_workers:
            facts["worker_kind"] = self.worker_kind
        if self.device is not None:
            facts["device"] = str(self.device)
        options = ", ".join(f"{name}={value!r}" for name, value in facts.items())
        cursor = self.progress.cursor
        return f"Loader({' '.join(text.split())}, {options}; epoch {cursor.epoch}, {cursor.steps} steps done)"

    @property
    def is_stream(self) -> bool:
        """Whether it delivers a stream, so that it has no length and no plan."""
        return self._feed.plan is None

    @property
    def plan(self) -> Plan:
        """The order; a stream has none."""
        if self._feed.plan is None:
            raise DataLoaderAttributeError("the loader of a stream has no plan", found=repr(self.source))
        return self._feed.plan

    @property
    def topology(self) -> Topology:
        """Rank and world size, detected when they are first needed."""
        return self._topology.resolve()

    @property
    def audit_report(self) -> EpochAudit | None:
        """The last epoch's audit, with ``audit=True``."""
        return self._feed.audit_report

    @property
    def epoch(self) -> int:
        """The current epoch, or the one that the next iteration delivers."""
        return self.progress.after_loading(self.progress.cursor, self._feed.is_end).epoch

    def set_epoch(self, epoch: int) -> None:
        """Go to the start of another epoch; in the current one a loaded position is kept.

        After a state of the last step of an epoch, ``epoch`` is the next one. ``set_epoch`` of the epoch that has
        ended keeps its end: iterating delivers nothing, and then moves on.
        """
        self.progress.set_epoch(epoch)

    def state_dict(self) -> dict[str, Any]:
        """The position after the last delivered step: JSON-able, the same on every rank.

        Under 1 KiB, plus a stream's own state if it has one.

        Raises:
            CorruptError: a file that is being read was rewritten in place since the data were opened.
        """
        return self.state_at(self.progress.cursor)

    def state_at(self, cursor: Cursor) -> dict[str, Any]:
        """The state of another position of this loader, such as ``loader.progress.previous``."""
        return self._feed.state_at(cursor)

    def schedule_at(self, cursor: Cursor) -> Schedule:
        """The steps from a position to the end of its epoch; a stream has none."""
        return cursor.schedule(self.plan, self.batch_size, self.topology, self.tail)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue where a state was taken, on any number of ranks and workers and with any batch size.

        After the last step of an epoch that is the first batch of the next one. A stream continues by its own
        state, by ``start``, or by skipping samples.

        Raises:
            StateError: it belongs to other data or another plan, or to streams of another number of ranks; says
                what differs.
        """
        self.progress.load(self._feed.load_state(state))

    def stats(self) -> dict[str, int | float]:
        """Epoch, steps, samples, rates, time waited for data, cache hits, padding, private memory of this rank.

        ``unproven_samples`` counts samples that went into batches of which it is not known whether they have all
        of their samples (see ``collate_fn``).
        """
        return self._stats.as_dict()

    @property
    def unproven_samples(self) -> Counter[str]:
        """The ``unproven_samples`` of `stats` by the function that returned their batches."""
        return self._stats.unproven.copy()

    def __getstate__(self) -> dict[str, Any]:
        progress, feed = copy.copy(self.progress), copy.copy(self._feed)
        return {**self.__dict__, "progress": progress, "_feed": feed, "_stats": LoaderStats(self.num_workers)}

"""The batch of a step, made from plan and source alone: fetch, transform, collate.

What a step's batch holds depends on nothing else, so any engine may make it, anywhere, twice if need be.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from rankfeed.columns import Allocate, BufferPool, Columns, Field, Layout, Mismatch, Ragged, copy_sample
from rankfeed.columns.layout import (
    dotted_name,
    flat_fields,
    infer_layout,
    is_unknown,
    leaves,
    map_leaves,
    resolve_dtypes,
)
from rankfeed.errors import ArgumentError, RankfeedError, TransformError, safe_str
from rankfeed.loading.collate import Padding, RaggedAs, check_collated, collate, collate_samples
from rankfeed.loading.misfits import misfit
from rankfeed.loading.randomness import kept_globals, seed_globals
from rankfeed.plan import RngStreams, Schedule, wants_rng
from rankfeed.sources import Source
from rankfeed.sources.chunked import LOOKUPS
from rankfeed.sources.scan import MORE_PROBES, PROBES, probe_ids

Int64 = npt.NDArray[np.int64]

#: Calls in which a source is told of the steps that lie ahead: one for each step costs a fifth of a small batch.
_TELLINGS = 8


@dataclass(frozen=True)
class Made:
    """The batch of a step.

    Attributes:
        step: which, counted from the schedule's start.
        batch: what the user gets.
        sample_ids: int64, the samples in it that count (rows that only fill are left out).
        rows: with those that fill.
        padding: bytes of ragged padding and of all ragged columns, for the loader's statistics.
        lookups: rows that were found decoded, and all rows read of chunks; also for these.
    """

    step: int
    batch: Any
    sample_ids: Int64
    rows: int
    padding: tuple[int, int] = (0, 0)
    lookups: tuple[int, int] = (0, 0)


@dataclass(frozen=True)
class Share:
    """What a rank takes of a step.

    Attributes:
        step: which, counted from where the iteration began.
        ids: int64, the samples.
        valid: bool, which of them count; the others only fill.
        rank: whose share it is.
        epoch: of which epoch.
        position: the epoch's count of samples before them.
        filled: whether rows of some rank only fill, or may.
        samples: of a stream, the samples themselves: there is nowhere to fetch them from.
        layout: of a stream, what its batches hold, as all ranks agreed.
        observes: whether what the samples hold is wanted (`Maker.observed`), not a batch of them.
    """

    step: int
    ids: Int64
    valid: npt.NDArray[np.bool_]
    rank: int
    epoch: int
    position: int
    filled: bool
    samples: Sequence[Any] | None = None
    layout: Layout | None = None
    observes: bool = False

    @classmethod
    def of(cls, schedule: Schedule, step: int) -> Share:
        """What a schedule says."""
        return cls(
            step,
            schedule.batch(step),
            schedule.valid(step),
            schedule.rank,
            schedule.epoch,
            schedule.first_position(step),
            schedule.is_filled(step),
        )

    @property
    def where(self) -> str:
        """How an error says where it was."""
        return f"rank {self.rank}, epoch {self.epoch}, step {self.step}"


@dataclass
class Maker:
    """Makes batches. Pickles: a worker process gets one, with a source that opens itself there.

    Args:
        seed_globals: whether torch's, numpy's and random's global generators are seeded for each sample; not
            where threads share them.
        ahead: the source is told what the step after so many reads; a multiple of ``stride``.
        stride: a worker process makes one step in so many, and tells its own copy of the source of these alone.
        layout: of the samples, once it is fixed (see `fix_layout`); None where batches are made of columns, by
            ``collate_fn``, or by the source's own ``collate``.
        fixed: whether the layout is.
    """

    source: Source
    columns: Sequence[str] | None
    transform: Callable[..., Any] | None
    batch_transform: Callable[..., Any] | None
    collate_fn: Callable[[list[Any]], Any] | None
    ragged: RaggedAs
    pad_to: int
    seed: int
    id_column: str | None
    seed_globals: bool
    ahead: int = 0
    stride: int = 1
    layout: Layout | None = None
    fixed: bool = False
    allocate: Allocate = field(default_factory=lambda: BufferPool().allocate)

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in self.__dict__.items() if name != "allocate"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state, allocate=BufferPool().allocate)

    def make(self, schedule: Schedule, step: int) -> Made:
        """The batch of one step.

        Raises:
            TransformError: a transform or collate function raised; names sample, step and rank.
            RankfeedError: the data cannot be read.
        """
        if self.ahead and self.source.prefetch_distance:
            self._tell(schedule, step)
        made = self.make_share(Share.of(schedule, step))
        if step + self.stride >= len(schedule):  # the last one that this process makes
            self.source.check_unchanged()
        return made

    def make_share(self, share: Share) -> Made:
        """The batch of a share.

        Raises:
            TransformError, RankfeedError: as of :meth:`make`.
        """
        if share.observes:
            return Made(share.step, self.observed(share), share.ids, 0)
        if not self.fixed and share.samples is None:
            self.fix_layout()
        hits, lookups = LOOKUPS.so_far
        ids, valid, where = share.ids, share.valid, share.where
        padding = (0, 0)
        seeded = self.seed_globals and self._runs_user_code
        with kept_globals() if seeded else nullcontext():
            rows = self._rows(share)
            if seeded:
                seed_globals(RngStreams("batch", self.seed, share.epoch).word(share.position))
            batch: Any
            if isinstance(rows, Columns) and self.collate_fn is None:
                batch = self._tensors(rows, where)
                padding = _padding(rows, self.pad_to) if self.ragged == "pad" else (0, 0)
            else:
                batch, padding = self._collated(self._samples(rows), share)
            self._add_columns(batch, ids, valid, where, filled=share.filled)
            if self.batch_transform is not None:
                streams = RngStreams("batch", self.seed, share.epoch)
                batch = self._batch_transformed(batch, streams, share.position, where)
        delivered = ids if valid.all() else ids[valid]
        found = LOOKUPS.so_far[0] - hits, LOOKUPS.so_far[1] - lookups
        return Made(share.step, batch, delivered, len(ids), padding, found)

    def _tell(self, schedule: Schedule, step: int) -> None:
        """Tell the source of steps that come so much later, a few at a time; at the start, of all until then."""
        ahead = self.ahead // self.stride
        few = max(1, ahead // _TELLINGS)
        done = step // self.stride
        if done % few:
            return
        for after in range(ahead - ahead % few if done else 0, ahead + 1, few):
            first = step + after * self.stride
            steps = range(first, min(first + few * self.stride, len(schedule)), self.stride)
            if steps:
                self.source.expect(np.concatenate([schedule.batch(each) for each in steps]), self.columns)

    @property
    def _runs_user_code(self) -> bool:
        functions = (self.transform, self.batch_transform, self.collate_fn)
        return self.source.runs_user_code or any(function is not None for function in functions)

    @property
    def _by_sample(self) -> bool:
        """Whether a batch is made of samples one by one, whose fields have to be learned from some of them."""
        if self.collate_fn is not None:
            return False
        if self.transform is not None or self.source.declared is not None:
            return True
        return self.source.collate is None and not self.source.as_dicts

    def fix_layout(self) -> None:
        """Learn the fields of all batches, once: from eight samples, evenly spaced, or from what is declared.

        A pure function of the data and the seed, so that it finds the same on every rank and after every resume.
        Samples that cannot be read are left to the steps that deliver them.

        Raises:
            RankfeedError: the samples have nothing in common, or none can be read.
        """
        if self.fixed or not self._by_sample:
            self.fixed = True
            return
        declared = self.source.declared
        if declared is not None and declared.layout is not None:
            self.layout, self.fixed = declared.layout, True
            return
        for count in (PROBES, MORE_PROBES):
            ids, samples = self._probed(probe_ids(len(self.source), count))
            try:
                layout = self.layout_of(samples)
            except Mismatch as error:
                if self.source.collate is not None:
                    self.fixed = True
                    return
                raise misfit(self, error, f"sample {ids[error.row]}, read before the first step") from error
            if not any(is_unknown(leaf) for _, leaf in leaves(layout)):
                break
        if self.source.collate is None or flat_fields(layout) is not None:
            self.layout = resolve_dtypes(layout)
        self.fixed = True

    def layout_of(self, samples: Sequence[Any]) -> Layout:
        """What samples that are read and transformed have in common.

        Raises:
            Mismatch: nothing; or torch cannot collate what numpy cannot hold.
        """
        layout = infer_layout(samples, self._known, loose=self.ragged == "list")
        arrays = [
            dotted_name(path)
            for path, leaf in leaves(layout)
            if leaf.how == "arrays" or leaf.field.kind == "ragged"
        ]
        wrong = [
            name for name in (self.source.declared.ragged if self.source.declared else ()) if name not in arrays
        ]
        if wrong:
            found = ", ".join(f"{dotted_name(path)!r}: {leaf}" for path, leaf in leaves(layout))
            raise Mismatch.of("ragged= names what is no array", (), "names", expected=wrong, found=found)
        if self.source.collate is None:
            map_leaves(samples, layout, check_collated)
        return layout

    @property
    def _known(self) -> dict[str, Field]:
        """Fields that are ragged, or objects, whatever some samples show."""
        if self.source.declared is not None:
            return {name: Field("ragged") for name in self.source.declared.ragged}
        if not self.source.as_dicts:
            return {}
        return {name: field for name, field in self.source.fields.items() if field.kind in ("ragged", "object")}

    def _probed(self, ids: Int64) -> tuple[list[int], list[Any]]:
        """Samples read and transformed as in epoch 0, and their ids; those that raise left out, unless all do."""

        def share(some: Int64) -> Share:
            return Share(0, some, np.ones(len(some), np.bool_), 0, 0, 0, False)

        if self.source.supports_batched_getitem:
            found, samples, failed = self._tried([share(ids)])
            if failed is None:
                return found, samples
        found, samples, failed = self._tried(share(ids[row : row + 1]) for row in range(len(ids)))
        if failed is not None and not samples:
            raise failed
        return found, samples

    def observed(self, share: Share) -> Layout | RankfeedError | None:
        """What the samples of a stream's share hold, transformed; what is wrong with them; None if there are none.

        Samples that the transform fails on are left to the batch that they are in.
        """
        given = share.samples or ()
        ids, samples, _ = self._tried(
            replace(share, ids=share.ids[row : row + 1], samples=[copy_sample(given[row])])
            for row in range(len(given))
        )
        try:
            return self.layout_of(samples) if samples else None
        except Mismatch as error:
            return misfit(self, error, f"sample {ids[error.row]}, {share.where}")

    def _tried(self, shares: Iterable[Share]) -> tuple[list[int], list[Any], Exception | None]:
        """The samples of shares, transformed, with no effect on what is drawn later; and the first error."""
        trial = replace(self, seed_globals=True)
        found: list[int] = []
        samples: list[Any] = []
        failed: Exception | None = None
        with kept_globals():
            for share in shares:
                try:
                    samples += trial._samples(trial._rows(share))
                    found += share.ids.tolist()
                except Exception as error:
                    failed = failed or error
        return found, samples, failed

    def _rows(self, share: Share) -> Columns | Sequence[Any]:
        """The samples of a batch, transformed; as columns where the source has them."""
        rows = self._read(share.ids, share.epoch) if share.samples is None else share.samples
        if self.transform is None:
            return rows
        samples = self._samples(rows)
        # A transform may work in place, and what has a collation of its own is handed out by reference.
        return self.transformed(samples if self.source.collate is None else map(copy_sample, samples), share)

    def transformed(self, samples: Iterable[Any], share: Share) -> list[Any]:
        """What the transform makes of the samples of a share.

        Raises:
            TransformError: it raised, or returned nothing; names the sample.
        """
        assert self.transform is not None
        streams = RngStreams("sample", self.seed, share.epoch)
        transform, with_rng, where = self.transform, wants_rng(self.transform), share.where
        done = []
        for sample_id, sample in zip(share.ids.tolist(), samples, strict=True):
            if self.seed_globals:
                seed_globals(streams.word(sample_id))
            try:
                done.append(transform(sample, streams.generator(sample_id)) if with_rng else transform(sample))
            except (Exception, SystemExit) as error:
                raise _blamed("the transform raised", error, f"sample {sample_id}, {where}") from error
            if done[-1] is None and self.collate_fn is None:
                raise TransformError(
                    "the transform returned None",
                    expected="the new sample",
                    where=f"sample {sample_id}, {where}",
                    remedy="return the sample at its end; to leave samples out, give a collate_fn that does",
                )
        return done

    def _read(self, ids: Int64, epoch: int) -> Columns | Sequence[Any]:
        if not (self.source.runs_user_code and self.seed_globals):
            return self._fetch(ids)
        streams = RngStreams("read", self.seed, epoch)
        if self.source.supports_batched_getitem:  # what it draws for a batch, it draws in one go
            seed_globals(streams.word(int(ids[0])))
            return self._fetch(ids)
        samples: list[Any] = []
        for sample_id in ids.tolist():
            seed_globals(streams.word(sample_id))
            samples += self._samples(self._fetch(np.array([sample_id])))
        if self.source.declared is not None or not self.source.as_dicts:
            return samples
        return Columns.from_samples(samples, self.source.fields)

    def _fetch(self, ids: Int64) -> Columns | Sequence[Any]:
        """Samples as they are, where the user's code returns them; else columns."""
        if self.source.declared is not None:
            return self.source.samples(ids, self.columns)
        rows = self.source.fetch(ids, self.columns)
        return rows if self.source.as_dicts else rows[""].rows()

    @staticmethod
    def _samples(rows: Columns | Sequence[Any]) -> Sequence[Any]:
        return rows.samples() if isinstance(rows, Columns) else rows

    def _tensors(self, rows: Columns, where: str) -> dict[str, Any]:
        try:
            return collate(rows, self.ragged, self.allocate, pad_to=self.pad_to)
        except ArgumentError as error:
            raise _blamed("the samples could not be collated", error, where) from error

    def _collated(self, samples: Sequence[Any], share: Share) -> tuple[Any, Padding]:
        layout = share.layout or self.layout
        try:
            if self.collate_fn is not None:
                return self.collate_fn(list(samples)), (0, 0)
            if layout is None and self.source.collate is not None:
                return self.source.collate(samples), (0, 0)
            assert layout is not None, "the layout is fixed before the first batch"
            return collate_samples(samples, layout, self.ragged, self.allocate, pad_to=self.pad_to)
        except Mismatch as error:
            raise misfit(self, error, f"sample {share.ids[error.row]}, {share.where}", layout) from error
        except (Exception, SystemExit) as error:
            raise _blamed("the samples could not be collated", error, share.where) from error

    def _batch_transformed(self, batch: Any, streams: RngStreams, position: int, where: str) -> Any:
        function = self.batch_transform
        assert function is not None
        try:
            return function(batch, streams.generator(position)) if wants_rng(function) else function(batch)
        except (Exception, SystemExit) as error:
            raise _blamed("the batch transform raised", error, where) from error

    def _add_columns(
        self, batch: Any, ids: Int64, valid: npt.NDArray[np.bool_], where: str, *, filled: bool
    ) -> None:
        extra: dict[str, npt.NDArray[Any]] = {}
        if self.id_column is not None:
            extra[self.id_column] = ids
        if filled:
            extra["valid"] = valid
        if not extra:
            return
        annotate: Callable[[Any, str, Any], None] | None = dict.__setitem__
        if not isinstance(batch, dict):
            annotate = self.source.annotate if self.collate_fn is None else None
        if annotate is None:
            # Under "even" this is the step of a job resumed with fewer samples than ranks: all ranks come here.
            raise TransformError(
                f"a batch that is no dict has no room for {' and '.join(map(repr, extra))}",
                expected="samples that are dicts, or a collate_fn that returns one",
                found=type(batch).__name__,
                where=where,
                remedy=None if self.id_column else "or resume on no more ranks than there are samples left",
            )
        for name, values in extra.items():
            if name in batch:
                raise TransformError(
                    "a column of the batch has a name that the loader needs",
                    found=repr(name),
                    where=where,
                    remedy="rename the column, or choose another id_column",
                )
            annotate(batch, name, torch.from_numpy(values))


def _padding(rows: Columns, pad_to: int) -> tuple[int, int]:
    """Bytes of padding and of everything in the padded columns."""
    waste = total = 0
    for column in rows.values():
        if column.__class__ is Ragged:  # isinstance is slow with abstract classes, and columns may be many
            cells = len(column) * column.longest(pad_to)
            values = column.parts[0].values  # of no elements, maybe
            cell = values.dtype.itemsize * math.prod(values.shape[1:])
            total += cells * cell
            waste += (cells - int(column.lengths.sum())) * cell
    return waste, total


def _blamed(summary: str, error: BaseException, where: str) -> TransformError:
    return TransformError(summary, found=f"{type(error).__name__}: {safe_str(error)}", where=where)

"""The batch of a step, made from plan and source alone: fetch, transform, collate.

What a step's batch holds depends on nothing else, so any engine may make it, anywhere, twice if need be.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from rankfeed.columns import Allocate, BufferPool, Columns, Ragged
from rankfeed.errors import ArgumentError, RankfeedError, TransformError, safe_str
from rankfeed.loading.collate import RaggedAs, collate, collate_samples
from rankfeed.loading.randomness import kept_globals, seed_globals
from rankfeed.plan import Schedule, Streams, wants_rng
from rankfeed.sources import Source
from rankfeed.sources.lookups import LOOKUPS

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
    """

    step: int
    ids: Int64
    valid: npt.NDArray[np.bool_]
    rank: int
    epoch: int
    position: int
    filled: bool
    samples: Sequence[Any] | None = None

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
        if self.ahead and self.source.looks_ahead:
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
        hits, lookups = LOOKUPS.so_far
        ids, valid, where = share.ids, share.valid, share.where
        padding = (0, 0)
        seeded = self.seed_globals and self._runs_user_code
        with kept_globals() if seeded else nullcontext():
            rows = self._rows(share)
            if seeded:
                seed_globals(Streams("batch", self.seed, share.epoch).word(share.position))
            if isinstance(rows, Columns) and self.collate_fn is None:
                batch: Any = self._tensors(rows, where)
                padding = _padding(rows, self.pad_to) if self.ragged == "pad" else (0, 0)
            else:
                samples = rows.samples() if isinstance(rows, Columns) else rows
                batch = self._collated(samples, where)
            self._add_columns(batch, ids, valid, where, filled=share.filled)
            if self.batch_transform is not None:
                streams = Streams("batch", self.seed, share.epoch)
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

    def _rows(self, share: Share) -> Columns | Sequence[Any]:
        """The samples of a batch, transformed: as columns where they have some."""
        ids, epoch, where = share.ids, share.epoch, share.where
        rows = self._read(ids, epoch) if share.samples is None else share.samples
        if self.transform is None:
            return rows if share.samples is None else self._given(share.samples)
        streams = Streams("sample", self.seed, epoch)
        transform, with_rng = self.transform, wants_rng(self.transform)
        done = []
        for sample_id, sample in zip(ids.tolist(), self._samples(rows), strict=True):
            if self.seed_globals:
                seed_globals(streams.word(sample_id))
            try:
                done.append(transform(sample, streams.generator(sample_id)) if with_rng else transform(sample))
            except Exception as error:
                raise _blamed("the transform raised", error, f"sample {sample_id}, {where}") from error
            if done[-1] is None and self.collate_fn is None:
                raise TransformError(
                    "the transform returned None",
                    expected="the new sample",
                    where=f"sample {sample_id}, {where}",
                    remedy="return the sample at its end; to leave samples out, give a collate_fn that does",
                )
        try:
            return self._as_columns(done)
        except RankfeedError as error:
            raise _blamed("what the transform returned fits in no columns", error, where) from error

    def _given(self, samples: Sequence[Any]) -> Columns | Sequence[Any]:
        """Samples of a stream, as columns if they fit in some."""
        try:
            return self._as_columns(samples)
        except (ArgumentError, TypeError):  # as of a wrapped Dataset: torch may find a way
            return samples

    def _read(self, ids: Int64, epoch: int) -> Columns | Sequence[Any]:
        if not (self.source.runs_user_code and self.seed_globals):
            return self._plain(self.source.fetch(ids, self.columns))
        streams = Streams("read", self.seed, epoch)
        if self.source.takes_batches:  # what it draws for a batch, it draws in one go
            seed_globals(streams.word(int(ids[0])))
            return self._plain(self.source.fetch(ids, self.columns))
        samples: list[Any] = []
        for sample_id in ids.tolist():
            seed_globals(streams.word(sample_id))
            samples += self._samples(self._plain(self.source.fetch([sample_id], self.columns)))
        # Dicts that fit in no columns, nested ones for one, stay as they are, as they do without seeding.
        return samples if "" in self.source.fields else self._as_columns(samples)

    @staticmethod
    def _plain(columns: Columns) -> Columns | Sequence[Any]:
        """A wrapped Dataset's own samples (tuples, say), where they are no dicts."""
        return columns[""].rows() if "" in columns else columns

    @staticmethod
    def _samples(rows: Columns | Sequence[Any]) -> Sequence[Any]:
        return rows.samples() if isinstance(rows, Columns) else rows

    def _as_columns(self, samples: Sequence[Any]) -> Columns | Sequence[Any]:
        if self.collate_fn is not None or not all(isinstance(sample, dict) for sample in samples):
            return samples
        return Columns.from_samples(samples, self.source.fields)

    def _tensors(self, rows: Columns, where: str) -> dict[str, Any]:
        try:
            return collate(rows, self.ragged, self.allocate, pad_to=self.pad_to)
        except ArgumentError as error:
            raise _blamed("the samples could not be collated", error, where) from error

    def _collated(self, samples: Sequence[Any], where: str) -> Any:
        try:
            if self.collate_fn is not None:
                return self.collate_fn(list(samples))
            return (self.source.collate or collate_samples)(samples)
        except Exception as error:
            raise _blamed("the samples could not be collated", error, where) from error

    def _batch_transformed(self, batch: Any, streams: Streams, position: int, where: str) -> Any:
        function = self.batch_transform
        assert function is not None
        try:
            return function(batch, streams.generator(position)) if wants_rng(function) else function(batch)
        except Exception as error:
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


def _blamed(summary: str, error: Exception, where: str) -> TransformError:
    return TransformError(summary, found=f"{type(error).__name__}: {safe_str(error)}", where=where)

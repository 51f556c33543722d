"""Builds the batch of a step: fetch, transform, collate.

A batch is a pure function of the plan, the source and the step, so any engine may build it, anywhere, twice if
necessary.
"""

import copy
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from rankfeed._util.global_rng import preserve_rng_state, rng_states, seed_global_rngs
from rankfeed._util.native import native_library
from rankfeed._util.signals import reraise_interrupt
from rankfeed.columns.buffers import BufferPool
from rankfeed.columns.columns import Allocate, Columns
from rankfeed.columns.field import Field
from rankfeed.columns.layout import (
    Branch,
    Layout,
    Mismatch,
    copy_sample,
    dotted_name,
    flat_fields,
    infer_layout,
    is_unknown,
    leaves,
    map_leaves,
    resolve_dtypes,
)
from rankfeed.columns.pointers import PendingCopies
from rankfeed.errors import ArgumentError, RankfeedError, SourceError, StreamError, TransformError, safe_str
from rankfeed.loading.collate import (
    LEAVE_OUT,
    BytesAs,
    Padding,
    RaggedAs,
    batch_field,
    check_collated,
    check_order,
    check_rows,
    collate,
    collate_samples,
    collate_steps,
    name_conflict,
    valid_rows,
)
from rankfeed.loading.row_lookup import RowLookup
from rankfeed.plan import RngStreams, Schedule, wants_rng
from rankfeed.sources import Source
from rankfeed.sources.chunked import LOOKUPS
from rankfeed.sources.source import MORE_PROBES, PROBES, Declared, Int64, probe_ids

_UNCHANGED = nullcontext()
#: A suggested fields= with more entries is shortened.
_MAX_FIELDS_SHOWN = 8
#: Later steps are announced to the source in this many calls: one call per step costs a fifth of a small batch.
_PREFETCH_CALLS = 8
#: Bytes and number of the batches that are built at once: a batch that is kept keeps the memory of the others.
_BYTES_AT_ONCE, _MAX_AT_ONCE = 4 << 20, 32
#: Samples whose use of global generators is watched, and seconds after each in which nothing else may use them.
_SAMPLES_WATCHED, _MAX_PAUSE = 3, 0.05


class StageSeconds(NamedTuple):
    """How long the parts of a batch took; rows that are copied as they are belong to ``source``."""

    stream: float = 0.0  # reading the samples of a stream, by one thread
    source: float = 0.0
    transform: float = 0.0
    collate: float = 0.0


class BatchResult(NamedTuple):
    """The batch of a step, which is counted from the start of the iteration."""

    step: int
    batch: Any  # what the user gets
    sample_ids: Int64  # without padding rows
    seconds: StageSeconds
    padding: Padding = (0, 0)
    lookups: tuple[int, int] = (0, 0)  # rows whose chunk was already decoded, and all rows read from chunks
    #: The user's function after which it is not known whether the batch has all of its samples; empty if it has.
    unproven: str = ""


class BatchSpec(NamedTuple):
    """What a rank reads at a step."""

    step: int
    ids: Int64
    valid: npt.NDArray[np.bool_] | None  # False for padding rows; None if no rank has any at this step
    rank: int
    epoch: int
    position: int  # samples of the epoch before them
    samples: Sequence[Any] | None = None  # of a stream, whose samples cannot be fetched by id
    rows: Columns | None = None  # if they were looked up before
    read_seconds: float = 0.0  # that reading the samples of a stream took

    @property
    def where(self) -> str:
        return f"rank {self.rank}, epoch {self.epoch}, step {self.step}"


@dataclass
class BatchBuilder:
    """Builds batches. It pickles: a worker process gets a copy, with a source that opens its files there."""

    source: Source  # of the samples, except those that come with the BatchSpec
    transform: Callable[..., Any] | None
    batch_transform: Callable[..., Any] | None
    collate_fn: Callable[[list[Any]], Any] | None
    ragged: RaggedAs
    pad_to: int
    seed: int
    id_column: str | None
    seed_globals: bool  # not in threads, which share the global generators
    columns: Sequence[str] | None = None
    bytes_as: BytesAs = "bytes"
    drop_behind: bool = False
    prefetch_steps: int = 0  # how many steps ahead reads are announced to the source; a multiple of stride
    stride: int = 1  # a worker process builds one step in `stride`, and announces only these to its source
    #: Of single samples; None where batches are built from columns, by collate_fn, or by the source's own collate.
    layout: Layout | None = None
    has_layout: bool = False  # whether layout is final
    step_bytes: int = 0  # of the last step, if batches of several steps can be built at once
    allocate: Allocate = field(default_factory=lambda: BufferPool().allocate)

    def __post_init__(self) -> None:
        self._transform_wants_rng = self.transform is not None and wants_rng(self.transform)
        self._batch_transform_wants_rng = self.batch_transform is not None and wants_rng(self.batch_transform)

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in self.__dict__.items() if name not in ("allocate", "_lookup")}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state, allocate=BufferPool().allocate)

    @cached_property
    def _lookup(self) -> RowLookup | None:
        if not self.source.reads_in_place or self.source.declared is not None:
            return None
        return RowLookup(self.source, self.columns, self.stride)

    def build_steps(self, schedule: Schedule, steps: range) -> Iterator[BatchResult]:
        """The batches of some steps, small ones built several at once."""
        while steps:
            results = self.first_steps(schedule, steps)
            steps = steps[len(results) :]
            results.reverse()
            while results:  # none is held that the consumer is done with
                yield results.pop()

    def first_steps(
        self, schedule: Schedule, steps: range, copies: PendingCopies | None = None
    ) -> list[BatchResult]:
        """The batch of the first of some steps, and those of the next ones if they are built together.

        With ``copies`` they are complete when these have been waited for.
        """
        most = min(_MAX_AT_ONCE, _BYTES_AT_ONCE // self.step_bytes) if self.step_bytes else 1
        results = self._copy_steps(schedule, steps[:most], copies) if most > 1 else []
        results = results or [self.build_step(schedule, steps[0], copies)]
        if self._row_bytes is not None:
            self.step_bytes = self._row_bytes * schedule.batch_size + results[-1].padding[1]
        return results

    def _copy_steps(self, schedule: Schedule, steps: range, copies: PendingCopies | None) -> list[BatchResult]:
        """The batches of some steps, whose rows are copied by one call; none if that fails."""
        if schedule.is_filled(steps[-1]):
            return []
        began = time.perf_counter()
        assert self._lookup is not None
        try:
            ids, rows, ends = self._lookup.rows(schedule, steps)
            edges = [0, *ends]
            batches = collate_steps(rows, edges, self.allocate, copies, pad_to=self.pad_to)
        except Exception as error:  # which the step that it belongs to raises
            reraise_interrupt(error)
            return []
        seconds = StageSeconds(source=(time.perf_counter() - began) / len(batches))
        results = []
        for step, (batch, padding), first, last in zip(steps, batches, edges, ends, strict=False):
            results.append(BatchResult(step, batch, ids[first:last], seconds, padding))
        if results[-1].step + self.stride >= len(schedule):
            self.source.check_unchanged()
        return results

    @cached_property
    def _row_bytes(self) -> int | None:
        """Bytes of the dense columns of a sample; None if batches of several steps cannot be copied at once."""
        if not self._only_copies or self.drop_behind:
            return None
        fields = {name: self.source.fields[name] for name in self.columns or self.source.fields}
        kinds = {"dense", "ragged"} if self.ragged == "pad" else {"dense"}
        if any(field.kind not in kinds or f"{name}_lengths" in fields for name, field in fields.items()):
            return None
        return sum(field.row_bytes() for field in fields.values() if field.kind == "dense")

    def build_step(self, schedule: Schedule, step: int, copies: PendingCopies | None = None) -> BatchResult:
        if self.prefetch_steps and self.source.prefetch_distance:
            self._announce(schedule, step)
        began = time.perf_counter()
        valid = schedule.valid(step) if schedule.is_filled(step) else None
        if self._lookup is None:
            ids, rows = schedule.batch(step), None
        else:
            ids, rows, _ = self._lookup.rows(schedule, range(step, step + 1))
        if rows is not None and valid is None and self._only_copies:
            form: dict[str, Any] = {"pad_to": self.pad_to, "bytes_as": self.bytes_as}
            batch, padding = collate(rows, self.ragged, self.allocate, copies, **form)
            seconds = StageSeconds(source=time.perf_counter() - began)
            result = BatchResult(step, batch, ids, seconds, padding)
        else:
            first = schedule.first_position(step)
            spec = BatchSpec(step, ids, valid, schedule.rank, schedule.epoch, first, rows=rows)
            result = self.build(spec, began)
        if self.drop_behind and rows is not None:
            rows.advise(drop=True)
        if step + self.stride >= len(schedule):  # the last step that this process builds
            self.source.check_unchanged()
        return result

    def build(self, spec: BatchSpec, began: float | None = None) -> BatchResult:
        """Build a batch, which was ``began`` at a time of ``perf_counter`` (now if None)."""
        began = time.perf_counter() if began is None else began
        if not self.has_layout and spec.samples is None:
            self.fix_layout()
        hits, lookups = LOOKUPS.so_far
        seeded = self.seed_globals and self._runs_user_code
        with preserve_rng_state() if seeded else _UNCHANGED:
            rows = self._read_rows(spec)
            read = time.perf_counter()
            rows = self._transform_rows(rows, spec)
            transformed = time.perf_counter()
            if seeded:
                streams = RngStreams("batch", self.seed, spec.epoch)
                seed_global_rngs(streams.word(spec.position))
            samples = None if self.collate_fn is None else list(_as_samples(rows))
            batch, padding = self._collate(rows if samples is None else self._with_ids(samples, spec), spec)
            unproven = "" if samples is None else self._check_rows(batch, spec, "collate_fn")
            self._add_columns(batch, samples, spec)
            collated = time.perf_counter()
            if self.batch_transform is not None:
                streams = RngStreams("batch", self.seed, spec.epoch)
                generator = (streams.generator(spec.position),) if self._batch_transform_wants_rng else ()
                try:
                    batch = self.batch_transform(batch, *generator)
                except (Exception, SystemExit) as error:
                    raise _user_error("the batch transform raised", error, spec.where) from error
                unproven = unproven or self._check_rows(batch, spec, "batch_transform")
        delivered = spec.ids if spec.valid is None else spec.ids[spec.valid]
        row_lookups = LOOKUPS.so_far[0] - hits, LOOKUPS.so_far[1] - lookups
        source, collating = read - began, collated - transformed
        if isinstance(rows, Columns) and self.collate_fn is None:
            source, collating = source + collating, 0.0
        transforming = time.perf_counter() - collated + transformed - read
        seconds = StageSeconds(spec.read_seconds, source, transforming, collating)
        return BatchResult(spec.step, batch, delivered, seconds, padding, row_lookups, unproven)

    def fix_layout(self) -> None:
        """Infer the fields of all batches once: from what is declared, or from eight evenly spaced samples."""
        # A pure function of the data and the seed, so that every rank and every resumed job infers the same.
        if self.has_layout or not self._is_collated_by_sample:
            self.has_layout = True
            return
        declared = self.source.declared
        if declared is not None and declared.layout is not None:
            self.layout, self.has_layout = declared.layout, True
            if self.columns is not None and self.transform is None and isinstance(self.layout, Branch):
                parts = self.layout.parts
                self.layout = Branch(self.layout.kind, {name: parts[name] for name in self.columns})
            return
        for count in (PROBES, MORE_PROBES):
            probes = probe_ids(len(self.source), count)
            ids, samples, failure = self._try_samples(BatchSpec(0, probes, None, 0, 0, 0))
            if failure is not None and not samples:
                raise failure
            try:
                layout = self._layout_of(samples)
            except Mismatch as error:
                if self.source.collate is not None:
                    self.has_layout = True
                    return
                where = f"{self.source.name_of(ids[error.row])}, read before the first step"
                raise self.field_error(error, where) from error
            if not any(is_unknown(leaf) for _, leaf in leaves(layout)):
                break
        if self.source.collate is None or flat_fields(layout) is not None:
            self.layout = resolve_dtypes(layout)
        self.has_layout = True

    def warn_of_shared_rngs(self) -> bool:
        """Warn if samples draw from global generators, which threads share; returns whether they do."""
        if self.seed_globals or not (self.source.runs_user_code or self.transform is not None):
            return False
        drawn = {"torch", "numpy.random", "random"}
        with preserve_rng_state():
            for sample_id in probe_ids(len(self.source), _SAMPLES_WATCHED).tolist():
                before, began = rng_states(), time.perf_counter()
                try:
                    self._rows(BatchSpec(0, np.array([sample_id]), None, 0, 0, 0))
                except Exception as error:  # which the step raises that the sample belongs to
                    reraise_interrupt(error)
                    return False
                after = rng_states()
                drawn = {name for name in drawn if after[name] != before[name]}
                if not drawn:
                    return False
                # Generators that other threads of the program use change without the sample, too.
                time.sleep(min(time.perf_counter() - began, _MAX_PAUSE))
                now = rng_states()
                drawn = {name for name in drawn if now[name] == after[name]}
        if drawn:
            owner = "the transform" if not self.source.runs_user_code else "the Dataset or the transform"
            warnings.warn(
                f"{owner} draws from the global generators of {' and '.join(sorted(drawn))}, which worker threads "
                "share: the samples differ in each run. Use the generator of transform(sample, rng), or "
                "worker_kind='process', which seeds the global generators for each sample.",
                stacklevel=2,
            )
        return bool(drawn)

    def layout_of(self, spec: BatchSpec) -> Layout | RankfeedError | None:
        """The layout of a stream's samples after the transform; the error if they differ; None without samples."""
        ids, transformed, _ = self._try_samples(spec)
        try:
            return self._layout_of(transformed) if transformed else None
        except Mismatch as error:
            return self.field_error(error, f"sample {ids[error.row]}, {spec.where}")

    def field_error(self, error: Mismatch, where: str, layout: Layout | None = None) -> RankfeedError:
        """The error to raise for a sample that does not fit the others, or the ``layout`` of the batches."""
        declared = self.source.declared
        owner = declared.what if declared is not None else "the Dataset"
        kind: type[RankfeedError] = StreamError if owner == "the stream" else SourceError
        if self.transform is not None:
            kind, owner = TransformError, "the transform"
        if layout is None:
            summary = f"samples of {owner} do not have the same fields: {error.summary}"
        else:
            summary = f"a sample of {owner} does not fit the fields of the batches: {error.summary}"
        return kind(
            summary,
            expected=error.expected,
            found=error.found,
            where=f"{error.where}, {where}" if error.where else where,
            remedy=_remedy(error, declared, self.ragged, layout),
        )

    def _announce(self, schedule: Schedule, step: int) -> None:
        """Tell the source about later steps, a few at a time; at the first step, about all of them until then."""
        ahead, done = self.prefetch_steps // self.stride, step // self.stride
        group = max(1, ahead // _PREFETCH_CALLS)
        if done % group:
            return
        for after in range(ahead - ahead % group if done else 0, ahead + 1, group):
            first = step + after * self.stride
            steps = range(first, min(first + group * self.stride, len(schedule)), self.stride)
            if steps:
                self.source.expect(np.concatenate([schedule.batch(later) for later in steps]), self.columns)

    @cached_property
    def copies_in_threads(self) -> bool:
        """Whether building a batch is little more than copies, which need no thread of Python."""
        return self._only_copies and not self.drop_behind and native_library() is not None

    @cached_property
    def _only_copies(self) -> bool:
        """Whether a batch consists of the columns of rows that are read in place, and nothing else."""
        return self._lookup is not None and not self._runs_user_code and self.id_column is None

    @cached_property
    def _runs_user_code(self) -> bool:
        functions = (self.transform, self.batch_transform, self.collate_fn)
        return self.source.runs_user_code or any(function is not None for function in functions)

    @property
    def _is_collated_by_sample(self) -> bool:
        """Whether batches are collated from single samples, whose fields have to be inferred."""
        if self.collate_fn is not None:
            return False
        if self.transform is not None or self.source.declared is not None:
            return True
        return self.source.collate is None and not self.source.as_dicts

    @property
    def infers_fields(self) -> bool:
        """Whether `fix_layout` reads some samples."""
        declared = self.source.declared
        return self._is_collated_by_sample and (declared is None or declared.layout is None)

    def _layout_of(self, samples: Sequence[Any]) -> Layout:
        """The common layout of transformed samples; raises Mismatch if there is none."""
        declared, fields = self.source.declared, {}
        if declared is not None:
            fields = {name: Field("ragged") for name in declared.ragged}
        elif self.source.as_dicts:
            kinds = ("ragged", "object")
            fields = {name: field for name, field in self.source.fields.items() if field.kind in kinds}
        layout = infer_layout(samples, fields, loose=self.ragged == "list")
        named = {dotted_name(path): leaf for path, leaf in leaves(layout)}
        arrays = [name for name, leaf in named.items() if leaf.how == "arrays" or leaf.field.kind == "ragged"]
        wrong = [name for name in (declared.ragged if declared is not None else ()) if name not in arrays]
        if wrong:
            summary = "ragged= names a field that is not an array"
            description = ", ".join(f"{name!r}: {leaf}" for name, leaf in named.items())
            raise Mismatch.of(summary, (), "names", expected=wrong, found=description)
        if self.source.collate is None:
            map_leaves(samples, layout, check_collated)
        return layout

    def _try_samples(self, spec: BatchSpec) -> tuple[list[int], list[Any], Exception | None]:
        """Samples transformed one by one, the ids of those that did not fail, and the first error."""
        trial = copy.copy(self)
        trial.seed_globals = True
        sample_ids: list[int] = []
        transformed: list[Any] = []
        first_error: Exception | None = None
        with preserve_rng_state():
            if spec.samples is None and self.source.supports_batched_getitem:
                try:
                    return spec.ids.tolist(), list(_as_samples(trial._rows(spec))), None
                except Exception as error:
                    reraise_interrupt(error)
            for row, sample_id in enumerate(spec.ids.tolist()):
                samples = None if spec.samples is None else [copy_sample(spec.samples[row])]
                try:
                    row_spec = spec._replace(ids=spec.ids[row : row + 1], samples=samples)
                    transformed += _as_samples(trial._rows(row_spec))
                    sample_ids.append(sample_id)
                except Exception as error:
                    reraise_interrupt(error)
                    first_error = first_error or error
        return sample_ids, transformed, first_error

    def _rows(self, spec: BatchSpec) -> Columns | Sequence[Any]:
        return self._transform_rows(self._read_rows(spec), spec)

    def _read_rows(self, spec: BatchSpec) -> Columns | Sequence[Any]:
        if spec.rows is not None:
            return spec.rows
        if spec.samples is not None:
            return spec.samples
        ids = spec.ids
        if not (self.source.runs_user_code and self.seed_globals):
            return self._fetch(ids)
        streams = RngStreams("read", self.seed, spec.epoch)
        if self.source.supports_batched_getitem:  # one call reads them all
            seed_global_rngs(streams.word(int(ids[0])))
            return self._fetch(ids)
        samples: list[Any] = []
        for sample_id in ids.tolist():
            seed_global_rngs(streams.word(sample_id))
            samples += _as_samples(self._fetch(np.array([sample_id])))
        if self.source.declared is not None or not self.source.as_dicts:
            return samples
        return Columns.from_samples(samples, self.source.fields)

    def _transform_rows(self, rows: Columns | Sequence[Any], spec: BatchSpec) -> Columns | Sequence[Any]:
        if self.transform is None:
            return rows
        samples: Iterable[Any] = _as_samples(rows)
        if self.source.collate is not None:
            samples = map(copy_sample, samples)  # they are shared by reference, and a transform may work in place
        transform = self.transform
        streams, with_rng = RngStreams("sample", self.seed, spec.epoch), self._transform_wants_rng
        transformed = []
        for sample_id, sample in zip(spec.ids.tolist(), samples, strict=True):
            if self.seed_globals:
                seed_global_rngs(streams.word(sample_id))
            try:
                result = transform(sample, streams.generator(sample_id)) if with_rng else transform(sample)
            except (Exception, SystemExit) as error:
                where = f"{self.source.name_of(sample_id)}, {spec.where}"
                raise _user_error("the transform raised", error, where) from error
            if result is None and self.collate_fn is None:
                raise TransformError(
                    "the transform returned None",
                    expected="the new sample",
                    where=f"{self.source.name_of(sample_id)}, {spec.where}",
                    remedy=f"return the sample; {LEAVE_OUT}",
                )
            transformed.append(copy_sample(result))  # the transform may write the next one to the same memory
        return transformed

    def _fetch(self, ids: Int64) -> Columns | Sequence[Any]:
        """Columns, or the samples as the user's code returns them."""
        if self.source.declared is not None:
            return self.source.samples(ids, self.columns)
        rows = self.source.fetch(ids, self.columns)
        return rows if self.source.as_dicts else rows[""].rows()

    def _collate(self, rows: Columns | Sequence[Any], spec: BatchSpec) -> tuple[Any, Padding]:
        layout = self.layout
        form: dict[str, Any] = {"pad_to": self.pad_to, "bytes_as": self.bytes_as}
        try:
            if self.collate_fn is not None:
                return self.collate_fn(list(rows)), (0, 0)
            if isinstance(rows, Columns):
                return collate(rows, self.ragged, self.allocate, **form)
            if layout is None and self.source.collate is not None:
                return self.source.collate(rows), (0, 0)
            assert layout is not None, "the layout is fixed before the first batch"
            return collate_samples(rows, layout, self.ragged, self.allocate, **form)
        except Mismatch as error:
            where = f"{self.source.name_of(int(spec.ids[error.row]))}, {spec.where}"
            raise self.field_error(error, where, layout) from error
        except (Exception, SystemExit) as error:
            if isinstance(rows, Columns) and not isinstance(error, ArgumentError):
                raise  # of the source, whose rows are read here
            raise _user_error("the samples could not be collated", error, spec.where) from error

    def _with_ids(self, samples: Sequence[Any], spec: BatchSpec) -> Sequence[Any]:
        """The samples for a collate_fn; dicts with the id column, so that its batch can prove what it has."""
        if self.id_column is None:
            return samples
        with_ids = []
        for sample_id, sample in zip(spec.ids.tolist(), samples, strict=True):
            if isinstance(sample, dict):
                if self.id_column in sample:
                    raise name_conflict(self.id_column, spec.where, TransformError)
                sample = copy.copy(sample)
                sample[self.id_column] = sample_id
            with_ids.append(sample)
        return with_ids

    def _check_rows(self, batch: Any, spec: BatchSpec, function: str) -> str:
        """The function, if it is not known whether its batch has all samples; empty if it has."""
        return "" if check_rows(batch, spec.ids, self.id_column, function, spec.where) else function

    def _add_columns(self, batch: Any, samples: Sequence[Any] | None, spec: BatchSpec) -> None:
        """Add the ids and the mask, unless a collate_fn has returned the ids of its ``samples``."""
        extra: dict[str, npt.NDArray[Any]] = {}
        name = self.id_column
        ids = None if name is None or samples is None else batch_field(batch, name)
        if name is not None and ids is None:
            extra[name] = spec.ids
        if spec.valid is not None:
            extra["valid"] = spec.valid if ids is None else valid_rows(ids, spec.ids, spec.valid)
        if not extra:
            return
        if samples is not None and ids is None:
            check_order(batch, samples, spec.ids, spec.where)
        annotate: Callable[[Any, str, Any], None] | None = dict.__setitem__
        if not isinstance(batch, dict):
            annotate = self.source.annotate if self.collate_fn is None else None
        if annotate is None:
            # With tail="even" this is the step of a resumed job with fewer samples than ranks, on every rank.
            raise TransformError(
                f"{' and '.join(map(repr, extra))} cannot be added to a batch that is not a dict",
                expected="samples that are dicts, or a collate_fn that returns one",
                found=type(batch).__name__,
                where=spec.where,
                remedy=None if self.id_column else "or resume on at most as many ranks as samples are left",
            )
        for name, values in extra.items():
            if name in batch:
                raise name_conflict(name, spec.where, TransformError)
            annotate(batch, name, torch.from_numpy(values.copy()))


def _as_samples(rows: Columns | Sequence[Any]) -> Sequence[Any]:
    return rows.samples() if isinstance(rows, Columns) else rows


def _user_error(summary: str, error: BaseException, where: str) -> TransformError:
    return TransformError(summary, found=f"{type(error).__name__}: {safe_str(error)}", where=where)


def _remedy(error: Mismatch, declared: Declared | None, ragged: str, layout: Layout | None) -> str:
    name = dotted_name(error.path)
    key = error.path[0] if len(error.path) == 1 and isinstance(error.path[0], int) else name
    if error.cure == "keys":
        return "return the same keys for every sample, or pass a collate_fn to the Loader"
    if error.cure == "names":
        return "leave it out of ragged="
    if error.cure == "list":
        if ragged == "list":
            return "pass a collate_fn to the Loader"
        return 'use Loader(..., ragged="list"), which delivers lists of tensors, or pass a collate_fn'
    if error.cure == "ragged":
        if declared is None or not error.path:
            return f"return {name or 'it'} as a list (lists are ragged in every batch), or pass a collate_fn"
        if declared.layout is not None:
            return f'declare it in fields=: {key!r}: "{error.becomes}"'
        names = [int(name) if name.isdigit() else name for name in declared.ragged]
        return f"rankfeed.{declared.call}, ragged={[*names, key]!r})"
    if error.cure == "type" and error.becomes:
        fields = flat_fields(layout) if layout is not None else None
        if declared is not None and declared.what == "the Dataset" and len(error.path) == 1 and fields is not None:
            types = {key: str(field) for key, field in fields.items()} | {name: error.becomes}
            suffix = ""
            if len(types) > _MAX_FIELDS_SHOWN:
                types, suffix = {name: error.becomes}, ", ..."
            text = ", ".join(f"{key!r}: {kind!r}".replace("'", '"') for key, kind in types.items())
            return f"rankfeed.{declared.call}, fields={{{text}{suffix}}})"
        return f"return {name or 'it'} as {error.becomes} for every sample, or pass a collate_fn"
    return "convert it to the type of the others, or pass a collate_fn to the Loader"

"""Stages that stand where a WebDataset pipeline's shard list and tar reader stood, and deal samples.

What a worker of a rank reads is arithmetic: the rank's steps are those of a :class:`rankfeed.Schedule`, and
worker w of n has the steps w, w + n, w + 2n... A DataLoader asks its workers in turn, so the batches of a rank
come in the same order however many workers there are.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from itertools import islice
from typing import Any, get_args

import numpy as np
import numpy.typing as npt
from torch.utils.data import IterableDataset

from rankfeed._util.validate import check_choice, check_int
from rankfeed.columns import Field
from rankfeed.errors import PlanError, StateError
from rankfeed.integrations.draws import Draws
from rankfeed.integrations.passes import Passes
from rankfeed.loading._compat import refuse_double_sharding
from rankfeed.loading.lazy_topology import LazyTopology, check_topology
from rankfeed.loading.options import check_batch_size, make_plan
from rankfeed.loading.state import decode_state, encode_state, resume_cursor
from rankfeed.plan import Cursor, Plan, Schedule, Tail
from rankfeed.plan.plan import Int64
from rankfeed.sources import Source, open
from rankfeed.sources.source import check_columns
from rankfeed.topology import Topology

#: Samples fetched at once: enough to spread the cost of a call, few enough to come quickly.
_TOGETHER = 64

Urls = str | os.PathLike[str] | Sequence[str | os.PathLike[str]]
Bools = npt.NDArray[np.bool_]


class ShardedSamples(IterableDataset[dict[str, Any]]):
    """First stage of a ``wds.DataPipeline``: this worker's samples, as WebDataset's own reader would give them.

    Each sample is a dict of ``__key__``, ``__url__`` and the bytes under each extension, ready for ``wds.decode``
    and all that comes after it. Every sample goes to one worker of one rank, and the totals of ranks differ by at
    most one, whatever the number and size of shards.

    An order belongs to an epoch. Call :meth:`set_epoch` before each: workers, also persistent ones, follow it.
    Without, each pass that a process begins is its next epoch, which workers that live for one pass cannot count.

    Args:
        urls_or_source: tar shards (path, list, glob or brace pattern), or any source.
        batch_size: samples in a batch that is made behind this stage (``wds.batched(n)``, or the DataLoader's
            batch_size): then all ranks make equally many batches. None: nothing is promised of batches.
        shuffle: False, True (what suits the source), "global" or "window".
        seed: of the order.
        tail: the end of an epoch whose samples the ranks' batches do not divide: "even" (the last batch of every
            rank is smaller), "drop", or "pad" (samples then have a ``__valid__``, False on those that only fill).
        columns: the extensions wanted; None for all.
        window: samples mixed with each other under "window".
        lanes: independent streams of the order; a property of the data set, never of the topology.
        topology: rank and world size; found when iteration starts, or when it is pickled, if left out.

    Raises:
        SourceError: the shards cannot be read.
        PlanError: when iteration starts: fewer samples than ranks, or a rest that makes no equal batches.

    Examples:
        >>> import rankfeed as rf
        >>> source = rf.from_dataset([{"__key__": str(i), "cls": b"%d" % i} for i in range(5)])
        >>> stage = ShardedSamples(source, topology=rf.Topology(rank=1, world_size=2))
        >>> [sample["cls"] for sample in stage]
        [b'1', b'3', b'4']
    """

    def __init__(
        self,
        urls_or_source: Urls | Source,
        batch_size: int | None = None,
        *,
        shuffle: bool | str = False,
        seed: int = 0,
        tail: Tail = "even",
        columns: Sequence[str] | None = None,
        window: int = 65536,
        lanes: int | None = None,
        topology: Topology | None = None,
    ) -> None:
        source = _opened(urls_or_source)
        plan = make_plan(source, shuffle, seed, window, lanes)
        self._init_stage(source, plan, batch_size, tail, columns, topology)

    def _init_stage(
        self,
        source: Source,
        plan: Plan | Draws,
        batch_size: int | None,
        tail: Tail,
        columns: Sequence[str] | None,
        topology: Topology | None,
    ) -> None:
        self.source, self.plan = source, plan
        self.tail: Tail = check_choice("tail", tail, get_args(Tail))
        self.batch_size = None if batch_size is None else check_batch_size(batch_size)
        self._masks = _masks(source)
        self._columns = None if columns is None else self._with_what_belongs(columns)
        self._topology = LazyTopology(topology)
        self._passes = Passes(plan.shuffle != "none")

    @property
    def topology(self) -> Topology:
        """Rank and world size, detected when they are first needed."""
        return self._topology.resolve()

    @property
    def epoch(self) -> int:
        """The epoch of the next pass that this process begins."""
        return self._passes.next.epoch

    def set_epoch(self, epoch: int) -> None:
        """Every pass from now on is this epoch; a loaded position in it stays."""
        epoch = check_int("epoch", epoch, at_least=0)
        if not self._passes.told or epoch != self.epoch:
            self._passes.go_to(Cursor(epoch))

    def num_batches(self) -> int:
        """Batches that every rank makes in the next pass.

        Raises:
            PlanError: no ``batch_size`` was given.
        """
        if self.batch_size is None:
            raise PlanError("the number of batches is known only where batch_size is given")
        return len(_Steps(self, self._passes.next, self.topology))

    def share(self, topology: Topology | None = None, *, worker: int = 0, num_workers: int = 1) -> list[Int64]:
        """Ids of the samples that a worker of a rank reads in the next pass, batch by batch; no data are read."""
        num_workers = check_int("num_workers", num_workers, at_least=1)
        worker = check_int("worker", worker, at_least=0, at_most=num_workers - 1)
        steps = _Steps(self, self._passes.next, check_topology(topology) or self.topology)
        return [ids for ids, _ in steps.dealt(worker, num_workers)]

    def __iter__(self) -> Iterator[dict[str, Any]]:
        worker, num_workers = Topology.worker()
        steps = _Steps(self, self._passes.begin(), self.topology)
        return self._read(steps.dealt(worker, num_workers))

    def _read(self, steps: Iterator[tuple[Int64, Bools]]) -> Iterator[dict[str, Any]]:
        refuse_double_sharding(self.topology)  # now: whoever takes the samples stands above only when one is taken
        together = max(1, _TOGETHER // (self.batch_size or 1))
        group = list(islice(steps, together))
        while group:
            following = list(islice(steps, together))
            if following:
                self.source.expect(np.concatenate([ids for ids, _ in following]), self._columns)
            ids, valid = (np.concatenate(each) for each in zip(*group, strict=True))
            for sample, is_one in zip(self._samples(ids), valid.tolist(), strict=True):
                yield {**sample, "__valid__": is_one} if self.tail == "pad" else sample
            group = following

    def _with_what_belongs(self, columns: Sequence[str]) -> list[str]:
        """The columns to read for those asked for: with what names a sample, and says what it has."""
        fields = self.source.fields
        asked = check_columns(columns, fields)
        self._masks = {name: mask for name, mask in self._masks.items() if name in asked}
        belonging = [name for name in fields if name.startswith("__") or name in self._masks.values()]
        return list(dict.fromkeys([*belonging, *asked]))

    def _samples(self, ids: Int64) -> list[dict[str, Any]]:
        """Samples as WebDataset's reader gives them: a member that one lacks is not in its dict."""
        samples = self.source.fetch(ids, self._columns).samples()
        for name, mask in self._masks.items():
            for sample in samples:
                if not sample.pop(mask):
                    del sample[name]
        if hasattr(self.source, "shards_of"):
            for sample, shard in zip(samples, self.source.shards_of(ids), strict=True):
                sample["__url__"] = sample["__local_path__"] = shard
        return samples

    def state_dict(self, delivered_steps: int) -> dict[str, Any]:
        """Where the job stands, the same on every rank.

        Args:
            delivered_steps: batches that the training loop has had in the epoch's pass; workers read ahead, so
                that only the loop can tell.

        Raises:
            StateError: ``set_epoch`` was not called, or ``batch_size`` not given, so that nobody knows.
        """
        if not self._passes.told or self.batch_size is None:
            raise StateError(
                "this stage does not know where the job stands",
                expected="a batch_size, and set_epoch() called before each epoch",
                found=f"batch_size={self.batch_size}, set_epoch() {'' if self._passes.told else 'not '}called",
            )
        cursor, steps = self._passes.next, check_int("delivered_steps", delivered_steps, at_least=0)
        position = _Steps(self, cursor, self.topology).position_after(steps)
        place = Cursor(cursor.epoch, position, cursor.steps + steps)
        return encode_state(place, self.plan.describe(), self.source.fingerprint)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on where a state was taken, on whatever number of ranks and workers, with whatever batch size.

        What is left is dealt as a whole epoch is: a rest that makes no equal batches is refused there.

        Raises:
            StateError: it belongs to other data or another plan; says what differs.
        """
        self._passes.go_to(resume_cursor(decode_state(state), self.plan.describe(), self.source.fingerprint))


class Resampled(ShardedSamples):
    """First stage of a ``wds.DataPipeline``: samples drawn anew each epoch, with or without replacement.

    All ranks draw from one stream: draw i of an epoch is a function of (seed, epoch, i), and i says which rank
    reads it. ``epoch_size`` counts the draws of the whole job, where WebDataset's ``with_epoch(n)`` counts those
    of each worker. All else is as with :class:`ShardedSamples`.

    Args:
        urls_or_source: tar shards (path, list, glob or brace pattern), or any source.
        batch_size: as of :class:`ShardedSamples`.
        epoch_size: draws in an epoch, over all ranks; None for as many as there are samples.
        replacement: True: every draw is independent. False: a sample is drawn again only when all have been.
        seed: of the draws.
        tail: as of :class:`ShardedSamples`.
        columns: the extensions wanted; None for all.
        topology: rank and world size; found when iteration starts, or when it is pickled, if left out.

    Examples:
        >>> import rankfeed as rf
        >>> source = rf.from_dataset([{"__key__": str(i), "cls": b"%d" % i} for i in range(5)])
        >>> ranks = [Resampled(source, epoch_size=8, topology=rf.Topology(rank=rank, world_size=2))
        ...          for rank in range(2)]
        >>> [len(list(rank)) for rank in ranks]
        [4, 4]
    """

    def __init__(
        self,
        urls_or_source: Urls | Source,
        batch_size: int | None = None,
        *,
        epoch_size: int | None = None,
        replacement: bool = True,
        seed: int = 0,
        tail: Tail = "even",
        columns: Sequence[str] | None = None,
        topology: Topology | None = None,
    ) -> None:
        source = _opened(urls_or_source)
        draws = Draws(len(source), epoch_size, replacement=replacement, seed=seed)
        self._init_stage(source, draws, batch_size, tail, columns, topology)


class _Steps:
    """The batches of a rank in one pass: a schedule's full steps, and the rest of the epoch as one smaller step.

    The pipeline behind the stage cuts the stream into batches by itself, so only the last may be smaller.
    """

    def __init__(self, stage: ShardedSamples, begin: Cursor, topology: Topology) -> None:
        facts: dict[str, Any] = {
            "batch_size": stage.batch_size or 1,
            "topology": topology,
            "epoch": begin.epoch,
        }
        plan, even = stage.plan, stage.tail == "even"
        self._full = Schedule(plan, start=begin.position, tail="drop" if even else stage.tail, **facts)
        self._last: Schedule | None = None
        rest = plan.num_samples - self._full.end
        if even and rest:
            self._last = Schedule(plan, start=self._full.end, **facts)
            if stage.batch_size is not None and rest < topology.world_size:
                raise PlanError(
                    "the samples cannot be dealt in equal steps",
                    expected=f"none left after the full steps, or {topology.world_size} at least, one a rank",
                    found=f"{rest} of {plan.num_samples}, with batch_size={stage.batch_size}",
                    remedy='tail="drop" leaves them out, tail="pad" fills up with marked samples; or take another '
                    "batch_size, or fewer ranks",
                )

    def __len__(self) -> int:
        return len(self._full) + (self._last is not None)

    def position_after(self, steps: int) -> int:
        """Samples consumed after some steps, counted from the epoch's start."""
        if steps == 0:
            return self._full.start
        if self._last is not None and steps == len(self):
            return self._last.end
        return self._full.position_after(steps - 1)

    def dealt(self, worker: int, num_workers: int) -> Iterator[tuple[Int64, Bools]]:
        """Ids of a worker's batches, and which are samples and not fillers."""
        for step in range(worker, len(self), num_workers):
            if step < len(self._full):
                yield self._full.batch(step), self._full.valid(step)
            elif self._last is not None:
                valid = self._last.valid(0)  # a rank that has no sample of the rest gets no stand-in here
                yield self._last.batch(0)[valid], valid[valid]


def _opened(urls_or_source: Urls | Source) -> Source:
    if isinstance(urls_or_source, Source):
        return urls_or_source
    # As WebDataset reads: samples may lack members that others have, and a key may come twice.
    options: dict[str, Any] = {"decode": False, "missing": "mask", "duplicate_keys": "keep"}
    return open(urls_or_source, format="webdataset", **options)


def _masks(source: Source) -> dict[str, str]:
    """Columns that not all samples have, and the column that says which do."""
    masks = {name: f"{name}_valid" for name in source.fields}
    there = Field("dense", "bool")
    return {name: mask for name, mask in masks.items() if source.fields.get(mask) == there}

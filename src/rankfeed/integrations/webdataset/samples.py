"""Stages that replace the shard list and the tar reader of a WebDataset pipeline, and shard samples.

The steps of a rank are those of a :class:`rankfeed.Schedule`, and worker w of n has the steps w, w + n, w + 2n...
A DataLoader takes batches from its workers in turn, so the batches of a rank come in the same order for any number
of workers.
"""

from collections.abc import Iterator, Mapping, Sequence
from itertools import islice
from typing import Any, get_args

import numpy as np
import numpy.typing as npt
from torch.utils.data import IterableDataset

from rankfeed._util.validate import check_bool, check_choice, check_int, check_optional
from rankfeed.columns.field import Field
from rankfeed.errors import PlanError, StateError
from rankfeed.integrations.shared_epoch import SharedEpoch
from rankfeed.loading._compat import refuse_double_sharding
from rankfeed.loading.lazy_topology import LazyTopology
from rankfeed.loading.options import make_plan, open_properties
from rankfeed.loading.state import encode_state, resume
from rankfeed.plan import Cursor, Schedule, Tail
from rankfeed.plan.permutation import Key, mix, permutation
from rankfeed.plan.plan import Int64
from rankfeed.plan.schedule import MAX_BATCH_SIZE, ScheduleTail
from rankfeed.sources import Source, open
from rankfeed.sources.paths import Paths
from rankfeed.sources.source import check_columns
from rankfeed.topology import Topology

#: Samples fetched in one call: enough to spread its cost, few enough for a quick first sample.
_FETCH_SIZE = 64


class ShardedSamples(IterableDataset[dict[str, Any]]):
    """First stage of a ``wds.DataPipeline``: this worker's samples, as WebDataset's own reader returns them.

    Each sample is a dict of ``__key__``, ``__url__`` and the bytes under each extension, ready for ``wds.decode``
    and the stages after it. Every sample goes to one worker of one rank, and the totals of ranks differ by at most
    one, for any number and size of shards.

    Each epoch has its own order. Call :meth:`set_epoch` before each: workers, also persistent ones, follow it.
    Without it, each iteration is the next epoch (but see `SharedEpoch` for scripts that set torch's seed each
    time).

    Args:
        urls_or_source: tar shards (path, list, glob or brace pattern), or any source.
        batch_size: samples in the batches built after this stage (``wds.batched(n)``, or the DataLoader's
            batch_size): then all ranks have the same number of batches. None: it may differ.
        shuffle: False, True (what suits the source), "global" or "window".
        seed: of the order.
        tail: how an epoch ends that is not a multiple of the global batch: "even" (the last batch of every rank is
            smaller), "drop", or "pad" (samples then have a ``__valid__``, False for padding).
        columns: the extensions wanted; None for all.
        window: samples mixed with each other under "window".
        lanes: independent streams of the order; a property of the dataset, never of the topology.
        topology: rank and world size; detected when iteration starts, or when it is pickled, if left out.

    Raises:
        SourceError: the shards cannot be read.
        PlanError: when iteration starts: fewer samples than ranks, or a rest that cannot be divided into equal
            batches.

    Examples:
        >>> import rankfeed as rf
        >>> source = rf.from_dataset([{"__key__": str(i), "cls": b"%d" % i} for i in range(5)])
        >>> stage = ShardedSamples(source, topology=rf.Topology(rank=1, world_size=2))
        >>> [sample["cls"] for sample in stage]
        [b'1', b'3', b'4']
    """

    def __init__(
        self,
        urls_or_source: Paths | Source,
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
        source = urls_or_source
        if not isinstance(source, Source):
            # As WebDataset reads: samples may lack members that others have, and keys may repeat.
            source = open(source, format="webdataset", decode=False, missing="mask", duplicate_keys="keep")
        self.source = source
        self.plan: Any = make_plan(source, shuffle, seed, window, lanes)
        self._open_properties = open_properties(shuffle, window, lanes)
        self.tail: Tail = check_choice("tail", tail, get_args(Tail))
        self.batch_size = check_optional(check_int, "batch_size", batch_size, at_least=1, at_most=MAX_BATCH_SIZE)
        fields, flag = source.fields, Field("dense", "bool")
        requested = check_columns(columns, fields)
        #: Columns that some samples lack, and the mask column of each.
        self._masks = {name: f"{name}_valid" for name in requested if fields.get(f"{name}_valid") == flag}
        # The key of a sample and the masks are always read.
        needed = [name for name in fields if name.startswith("__") or name in self._masks.values()]
        self._columns = None if columns is None else list(dict.fromkeys([*needed, *requested]))
        self._topology = LazyTopology(topology)
        self._epochs = SharedEpoch()

    @property
    def topology(self) -> Topology:
        """Rank and world size, detected when they are first needed."""
        return self._topology.resolve()

    @property
    def epoch(self) -> int:
        """The epoch of the next iteration."""
        return self._epochs.next().epoch

    def set_epoch(self, epoch: int) -> None:
        """Every iteration from now on is this epoch; a loaded position in it is kept."""
        epoch = check_int("epoch", epoch, at_least=0)
        if not self._epochs.is_set or epoch != self.epoch:
            self._epochs.set(Cursor(epoch), every=True)

    def num_batches(self) -> int:
        """Batches of every rank in the next iteration.

        Raises:
            PlanError: no ``batch_size`` was given.
        """
        if self.batch_size is None:
            raise PlanError("the number of batches is not known without batch_size", remedy="pass batch_size=")
        return len(self._schedule(self._epochs.next(), self.topology))

    def share(self, topology: Topology | None = None, *, worker: int = 0, num_workers: int = 1) -> list[Int64]:
        """Ids of the samples that a worker of a rank reads in the next iteration, batch by batch."""
        num_workers = check_int("num_workers", num_workers, at_least=1)
        worker = check_int("worker", worker, at_least=0, at_most=num_workers - 1)
        schedule = self._schedule(self._epochs.next(), LazyTopology(topology).given or self.topology)
        return [schedule.batch(step) for step in range(worker, len(schedule), num_workers)]

    def __iter__(self) -> Iterator[dict[str, Any]]:
        topology = self.topology
        schedule = self._schedule(self._epochs.begin(topology.rank), topology)
        worker, num_workers = topology.worker()
        steps = range(worker, len(schedule), num_workers)
        return self._read((schedule.batch(step), schedule.valid(step)) for step in steps)

    def _schedule(self, begun: Cursor, topology: Topology) -> Schedule:
        """The batches of a rank; the pipeline after the stage divides its samples into batches."""
        tail: ScheduleTail = "rest" if self.tail == "even" else self.tail
        schedule = begun.schedule(self.plan, self.batch_size or 1, topology, tail)
        if self.batch_size is not None and schedule.is_uneven:
            raise PlanError(
                "the samples cannot be divided into equal steps",
                expected=f"none left after the full steps, or one for each of {topology.world_size} ranks",
                found=f"{len(schedule.global_batch(len(schedule) - 1))} of {self.plan.num_samples}, with "
                f"batch_size={self.batch_size}",
                remedy='tail="drop" leaves them out, tail="pad" pads with marked samples; or use another '
                "batch_size, or fewer ranks",
            )
        return schedule

    def _read(self, steps: Iterator[tuple[Int64, npt.NDArray[np.bool_]]]) -> Iterator[dict[str, Any]]:
        refuse_double_sharding(self.topology)  # now: the consumer is among the callers only when it takes a sample
        together = max(1, _FETCH_SIZE // (self.batch_size or 1))
        group = list(islice(steps, together))
        while group:
            following = list(islice(steps, together))
            if following:
                self.source.expect(np.concatenate([ids for ids, _ in following]), self._columns)
            ids, valid = (np.concatenate(arrays) for arrays in zip(*group, strict=True))
            for sample, is_valid in zip(self._samples(ids), valid.tolist(), strict=True):
                yield {**sample, "__valid__": is_valid} if self.tail == "pad" else sample
            group = following

    def _samples(self, ids: Int64) -> list[dict[str, Any]]:
        """Samples as WebDataset's reader returns them: a missing member is not in the dict."""
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
        """The position in the data, the same on every rank.

        Args:
            delivered_steps: batches that the training loop has received in this iteration; workers read ahead, so
                only the loop knows.

        Raises:
            StateError: ``set_epoch`` was not called, or ``batch_size`` not given, so that the position is unknown.
        """
        is_set = self._epochs.is_set
        if not is_set or self.batch_size is None:
            raise StateError(
                "this stage does not know the position in the data",
                expected="a batch_size, and set_epoch() called before each epoch",
                found=f"batch_size={self.batch_size}, set_epoch() {'' if is_set else 'not '}called",
            )
        cursor, steps = self._epochs.next(), check_int("delivered_steps", delivered_steps, at_least=0)
        after = cursor.after(self._schedule(cursor, self.topology), steps)
        return encode_state(after, self.plan.describe(), self.source.fingerprint)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue where a state was taken, on any number of ranks and workers and with any batch size.

        The rest of the epoch is divided as a whole epoch is: one that makes no equal batches is refused.

        Raises:
            StateError: it belongs to other data or another plan; says what differs.
        """
        _, plan, cursor = resume(state, self.plan, self.source, self._open_properties)
        if plan.describe() != self.plan.describe() and self._epochs.has_begun:
            raise StateError(
                "a state in another order was loaded after the first iteration began",
                remedy="make the stage and its DataLoader again, and load the state before the first iteration",
            )
        self.plan = plan
        self._epochs.set(cursor, every=True)


class Resampled(ShardedSamples):
    """First stage of a ``wds.DataPipeline``: samples drawn at random in each epoch, with or without replacement.

    All ranks draw from one sequence: draw i of an epoch is a function of (seed, epoch, i), and i determines the
    rank. ``epoch_size`` counts the draws of the whole job, where WebDataset's ``with_epoch(n)`` counts those of
    each worker. All other arguments are those of :class:`ShardedSamples`.

    Args:
        epoch_size: draws in an epoch, over all ranks; None for as many as there are samples.
        replacement: True: every draw is independent. False: a sample is drawn again only when all have been.

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
        urls_or_source: Paths | Source,
        batch_size: int | None = None,
        *,
        epoch_size: int | None = None,
        replacement: bool = True,
        seed: int = 0,
        tail: Tail = "even",
        columns: Sequence[str] | None = None,
        topology: Topology | None = None,
    ) -> None:
        super().__init__(urls_or_source, batch_size, seed=seed, tail=tail, columns=columns, topology=topology)
        self.plan = ResamplingPlan(len(self.source), epoch_size, replacement=replacement, seed=seed)


class ResamplingPlan:
    """Which sample is drawn at a position of an epoch, as a pure function.

    Without replacement, draws ``k * population`` to ``(k + 1) * population - 1`` of an epoch are a permutation of
    the population. Draws of different (seed, epoch) are independent.
    """

    def __init__(
        self, population: int, epoch_size: int | None = None, *, replacement: bool = True, seed: int = 0
    ) -> None:
        self.population = check_int("population", population, at_least=1)
        size = check_optional(check_int, "epoch_size", epoch_size, at_least=1, at_most=2**62)
        self.num_samples = self.population if size is None else size
        self.replacement = check_bool("replacement", replacement)
        self.seed = check_int("seed", seed)

    def describe(self) -> dict[str, int | str]:
        """What the draws depend on."""
        return {
            "samples": self.num_samples,
            "shuffle": "resampled" if self.replacement else "redealt",
            "seed": self.seed,
            "population": self.population,
        }

    def sample_ids(self, epoch: int, positions: npt.ArrayLike) -> Int64:
        """The samples drawn at some positions of an epoch: int64, in [0, population)."""
        draws = np.asarray(positions, np.int64)
        if not self.replacement:
            rounds, places = np.divmod(draws, self.population)
            key = Key.of("redealt", self.seed, epoch)
            return permutation(places, self.population, key, tweaks=mix(rounds.view(np.uint64)))
        first, second = (np.uint64(word) for word in Key.of("resampled", self.seed, epoch).rounds[:2])
        bits = mix(mix(draws.view(np.uint64) + first) ^ second)
        # The modulo bias is at most one in 2**64 / population.
        return (bits % np.uint64(self.population)).astype(np.int64)

    def step_ids(self, epoch: int, starts: Int64, size: int, first: int, last: int) -> Int64:
        """The samples of rows of steps, in the order of their positions: int64 [steps, last - first]."""
        return self.sample_ids(epoch, starts[:, None] + np.arange(first, last))

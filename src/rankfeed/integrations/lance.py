"""A sampler for Lance's own loader: each row once, in equal steps, whatever ranks, workers and start method."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from typing import Any, Literal, get_args

import numpy as np

from rankfeed._util.validate import check_bool, check_choice, check_int, check_optional, invalid
from rankfeed.integrations.lance_epochs import Epochs
from rankfeed.loading._compat import refuse_double_sharding
from rankfeed.loading.lazy_topology import LazyTopology
from rankfeed.plan import Plan, Schedule, Tail
from rankfeed.sources.extras import need
from rankfeed.sources.lance_process import Beside, forked_from_lance
from rankfeed.sources.lance_table import Facts, LanceTable
from rankfeed.sources.source import Int64
from rankfeed.topology import Topology

#: Batches read ahead of need, at most: each is in memory.
_AHEAD = 4
#: Runs of rows that are shuffled, at most: memory is linear in them.
_MOST_RUNS = 1 << 20


class ShardedSampler:
    """The rows of this rank and worker, for ``lance.torch.data.LanceDataset(..., sampler=...)``.

    Every row is delivered once an epoch; all ranks take the same number of steps, and as many rows but for one.
    At each step a rank gets the same rows whatever the number and kind of workers: the DataLoader takes batches
    from its workers in turn, and so they are dealt. Rank and worker are asked for when iteration starts; the rank
    travels to workers that are spawned.

    An epoch is an iteration that was begun: the next one has another order, with or without :meth:`set_epoch`, of
    which workers that live on hear too. Only where torch's seed is set to the same number before each epoch,
    workers that are new in each cannot tell it from the last one: there :meth:`set_epoch` is needed.

    Args:
        shuffle: whether rows come in a keyed order; without, as they lie.
        run: rows that lie together and stay together under shuffle: fewer mix better and read slower. A batch's
            if left out; 1 mixes all rows. (A table is cut into a million runs at most, by taking longer ones.)
        seed: of the order.
        tail: "even": the last step is smaller, by ranks equal to one; where fewer rows than ranks are left, they
            make the step before larger by one row on some ranks. "drop": leaves out what makes no full step.
        topology: rank and world size; found when iteration starts if left out.

    Raises:
        ArgumentError, PlanError: an argument cannot be used; fewer rows than ranks (when iteration starts).

    Examples:
        >>> import tempfile, lance, pyarrow as pa
        >>> from lance.torch.data import LanceDataset
        >>> path = tempfile.mkdtemp() + "/numbers.lance"
        >>> _ = lance.write_dataset(pa.table({"x": range(10)}), path)
        >>> sampler = ShardedSampler(topology=Topology(rank=1, world_size=2))
        >>> [batch.tolist() for batch in LanceDataset(path, batch_size=2, sampler=sampler)]
        [[2, 3], [6, 7], [9]]
    """

    def __init__(
        self,
        *,
        shuffle: bool = False,
        run: int | None = None,
        seed: int = 0,
        tail: Literal["even", "drop"] = "even",
        topology: Topology | None = None,
    ) -> None:
        shuffle = check_bool("shuffle", shuffle)
        if check_choice("tail", tail, get_args(Tail)) == "pad":
            raise invalid("tail", '"even" or "drop": Lance\'s batches have no mask', tail)
        need("lance.sampler", extra="lance").Sampler.register(type(self))
        self.shuffle = shuffle
        self.run = check_optional(check_int, "run", run, at_least=1, at_most=2**62)
        self.seed = check_int("seed", seed)
        self.tail: Literal["even", "drop"] = tail
        self._topology = LazyTopology(topology)
        self._epochs = Epochs()

    @property
    def topology(self) -> Topology:
        """Rank and world size, detected when they are first needed."""
        return self._topology.resolve()

    @property
    def epoch(self) -> int:
        """The epoch that the next iteration delivers."""
        return self._epochs.next(self.topology.rank)

    def set_epoch(self, epoch: int) -> None:
        """Have the next iteration deliver this epoch, and those after it the following ones."""
        self._epochs.set(check_int("epoch", epoch, at_least=0))

    def __call__(
        self,
        dataset: Any,
        *_: Any,
        batch_size: int = 128,
        columns: Sequence[str] | dict[str, str] | None = None,
        filter: Any = None,
        batch_readahead: int = 16,
        with_row_id: bool | None = False,
        **__: Any,
    ) -> Iterator[Any]:
        """The `pyarrow.RecordBatch`es of this rank and worker; what Lance's loader calls.

        Raises:
            PlanError: there are fewer rows than ranks.
            RankfeedError: the table cannot be read.
        """
        refuse_double_sharding(self.topology)
        worker, num_workers = Topology.worker()
        epoch = self._epochs.begin(self.topology.rank)
        with ExitStack() as stack:
            call = _reader(dataset, stack)
            found: Facts = call("facts", filter)
            steps = Steps(self._plan(found, batch_size), batch_size, self.topology, epoch, self.tail)
            names = dataset.schema.names if columns is None else columns

            def read(step: int) -> Any:
                ids = steps.batch(step)
                rows = ids if found.chosen is None else found.chosen[ids]
                return call("batch", rows, names, bool(with_row_id))

            ahead = max(1, min(_AHEAD, batch_readahead))
            pool = ThreadPoolExecutor(ahead, thread_name_prefix="rankfeed-lance")
            stack.callback(pool.shutdown, cancel_futures=True)
            waiting: deque[Future[Any]] = deque()
            for step in range(worker, len(steps), num_workers):
                waiting.append(pool.submit(read, step))
                if len(waiting) > ahead:
                    yield waiting.popleft().result()
            while waiting:
                yield waiting.popleft().result()

    def _plan(self, found: Facts, batch_size: int) -> Plan:
        counts = rows_of(found)
        total = int(counts.sum())
        run = max(self.run or batch_size, -(-total // _MOST_RUNS) if self.run != 1 else 1)
        if not self.shuffle or run == 1:
            return Plan(total, shuffle="global" if self.shuffle else "none", seed=self.seed)
        # Windows of one sample: runs change places, and rows stay where they are in them.
        return Plan(runs_of(counts, run), shuffle="window", window=1, seed=self.seed)


class Steps:
    """The steps of a rank, such that no two of them could be taken for one.

    Lance's loader joins batches as long as they fit in one. So the rest of an epoch is one step behind the full
    ones; where it has too few rows for all ranks, it is part of the last full one.

    Args: as of :class:`rankfeed.Schedule`.

    Examples:
        >>> steps = Steps(Plan(9, shuffle="none"), 2, Topology(rank=1, world_size=2), 0, "even")
        >>> [steps.batch(step).tolist() for step in range(len(steps))]
        [[2, 3], [6, 7, 8]]
    """

    def __init__(
        self, plan: Plan, batch_size: int, topology: Topology, epoch: int, tail: Literal["even", "drop"]
    ) -> None:
        def schedule(tail: Literal["even", "drop"], start: int = 0) -> Schedule:
            return Schedule(plan, batch_size=batch_size, topology=topology, epoch=epoch, start=start, tail=tail)

        self._full = schedule("drop")
        self._rest = None
        rest = plan.num_samples - self._full.end
        if tail == "even" and rest:
            self._rest = schedule("even", self._full.end)
        self._joined = self._rest is not None and rest < topology.world_size

    def __len__(self) -> int:
        return len(self._full) + (self._rest is not None and not self._joined)

    def batch(self, step: int) -> Int64:
        """Sample ids of this rank at a step: int64."""
        if self._rest is None or step < len(self) - 1:
            return self._full.batch(step)
        rest = self._rest.batch(0)[self._rest.valid(0)]
        return np.concatenate([self._full.batch(step), rest]) if self._joined else rest


def rows_of(found: Facts) -> Int64:
    """Rows of each fragment that are delivered: int64."""
    if found.chosen is None:
        return found.rows
    ends = np.cumsum(found.rows)
    return np.diff(found.chosen.searchsorted(ends), prepend=0)


def runs_of(counts: Int64, run: int) -> Int64:
    """Rows of each run, if fragments of so many rows are cut into runs: int64.

    Examples:
        >>> runs_of(np.array([5, 0, 4]), 2).tolist()
        [2, 2, 1, 2, 2]
    """
    pieces = -(-counts // run)
    sizes = np.full(int(pieces.sum()), run, np.int64)
    ends = np.cumsum(pieces)[pieces > 0] - 1
    sizes[ends] = (counts - (pieces - 1) * run)[pieces > 0]
    return sizes


def _reader(dataset: Any, stack: ExitStack) -> Callable[..., Any]:
    """How to call methods of :class:`LanceTable` on a data set that Lance's loader brings along.

    A worker that was forked got one that was open in its parent: nothing can be read with it but its name.
    """
    if forked_from_lance():
        beside = Beside(dataset.uri, dataset.version)
        stack.callback(beside.close)
        return beside.call
    table = LanceTable(dataset.uri, dataset.version, dataset)
    return lambda method, *arguments: getattr(table, method)(*arguments)

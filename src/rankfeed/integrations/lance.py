"""A sampler for the PyTorch dataset of Lance, by rankfeed's plan: each row once, in equal steps on all ranks."""

from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing
from typing import Any, Literal

import numpy as np

from rankfeed._util.imports import need
from rankfeed._util.threads import run_ahead
from rankfeed._util.validate import check_bool, check_choice, check_int, check_optional
from rankfeed.integrations.shared_epoch import SharedEpoch
from rankfeed.loading._compat import refuse_double_sharding
from rankfeed.loading.lazy_topology import LazyTopology
from rankfeed.plan import Cursor, Plan, Schedule
from rankfeed.sources.lance.lance_table import IsolatedTable, LanceTable, TableInfo, forked_from_lance
from rankfeed.sources.source import Int64, even_blocks
from rankfeed.topology import Topology

#: Batches read ahead at most.
_MAX_READ_AHEAD = 4
#: Runs of rows at most: memory is linear in them.
_MAX_RUNS = 1 << 20


class ShardedSampler:
    """The rows of this rank and worker, for ``lance.torch.data.LanceDataset(..., sampler=...)``.

    Every row is delivered once per epoch; all ranks take the same number of steps, and their rows differ by at
    most one. At each step a rank gets the same rows for any number and kind of workers, since the DataLoader takes
    batches from its workers in turn. Rank and worker are resolved when iteration starts; the rank is pickled for
    workers that are spawned.

    Each iteration is an epoch with its own order, also without :meth:`set_epoch`, which persistent workers follow
    too. Only where torch's seed is set to the same number before each epoch, new workers cannot distinguish it
    from the last one: there :meth:`set_epoch` is needed.

    Args:
        shuffle: whether to shuffle rows by a keyed order.
        run: neighbouring rows that stay together under shuffle: fewer mix better and read slower. The batch size
            if left out; 1 mixes all rows. (A table has at most a million runs; they are longer if necessary.)
        seed: of the order.
        tail: "even": the last step is smaller, and the ranks differ by at most one row; where fewer rows than
            ranks are left, they join the step before on some ranks. "drop": leaves out what makes no full step.
            Lance's batches have no mask, so there is no "pad".
        topology: rank and world size; detected when iteration starts if left out.

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
        self.shuffle = check_bool("shuffle", shuffle)
        self.tail: Literal["even", "drop"] = check_choice("tail", tail, ("even", "drop"))
        need("lance.sampler", extra="lance").Sampler.register(type(self))
        self.run = check_optional(check_int, "run", run, at_least=1, at_most=2**62)
        self.seed = check_int("seed", seed)
        self._topology = LazyTopology(topology)
        self._epochs = SharedEpoch()

    @property
    def topology(self) -> Topology:
        """Rank and world size, detected when they are first needed."""
        return self._topology.resolve()

    @property
    def epoch(self) -> int:
        """The epoch that the next iteration delivers."""
        return self._epochs.next(self.topology.rank).epoch

    def set_epoch(self, epoch: int) -> None:
        """Let the next iteration be this epoch, and those after it the following ones."""
        self._epochs.set(Cursor(check_int("epoch", epoch, at_least=0)))

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
        """The `pyarrow.RecordBatch`es of this rank and worker; called by Lance's loader.

        Raises:
            PlanError: there are fewer rows than ranks.
            RankfeedError: the table cannot be read.
        """
        topology = self.topology
        refuse_double_sharding(topology)
        worker, num_workers = Topology.worker()
        begun = self._epochs.begin(topology.rank)
        with ExitStack() as stack:
            if forked_from_lance():  # of a dataset that was open in the parent, only the name can be read
                reader: Any = stack.enter_context(closing(IsolatedTable(dataset.uri, dataset.version)))
            else:
                reader = LanceTable(dataset.uri, dataset.version, dataset)
            table: TableInfo = reader.call("info", filter)
            plan = self._plan(table, batch_size)
            steps = begun.schedule(plan, batch_size, topology, "rest" if self.tail == "even" else "drop")
            names = dataset.schema.names if columns is None else columns

            def read(step: int) -> Any:
                ids = ids_at(steps, step)
                rows = ids if table.chosen is None else table.chosen[ids]
                return reader.call("batch", rows, names, bool(with_row_id))

            ahead = max(1, min(_MAX_READ_AHEAD, batch_readahead))
            pool = ThreadPoolExecutor(ahead, thread_name_prefix="rankfeed-lance")
            stack.callback(pool.shutdown, cancel_futures=True)
            own_steps = range(worker, num_batches(steps), num_workers)
            yield from run_ahead(own_steps, lambda step: pool.submit(read, step), ahead)

    def _plan(self, table: TableInfo, batch_size: int) -> Plan:
        counts = table.rows  # of each fragment
        if table.chosen is not None:
            counts = np.diff(table.chosen.searchsorted(np.cumsum(table.rows)), prepend=0)
        total = int(counts.sum())
        run = max(self.run or batch_size, -(-total // _MAX_RUNS) if self.run != 1 else 1)
        if not self.shuffle or run == 1:
            return Plan(total, shuffle="global" if self.shuffle else "none", seed=self.seed)
        # Windows of one sample: runs are permuted, and the rows in them are not.
        return Plan(runs_of(counts, run), shuffle="window", window=1, seed=self.seed)


def num_batches(steps: Schedule) -> int:
    """Batches of a rank; a last step that has too few rows for all ranks joins the one before."""
    # So no two batches fit into one: Lance's loader would join them.
    return len(steps) - steps.is_uneven


def ids_at(steps: Schedule, index: int) -> Int64:
    """Row numbers of a batch: int64."""
    ids = steps.batch(index)
    return np.concatenate([ids, steps.batch(index + 1)]) if steps.is_uneven and index == len(steps) - 2 else ids


def runs_of(counts: Int64, run: int) -> Int64:
    """Rows of each run, if fragments of these sizes are divided into runs: int64."""
    return np.concatenate([np.empty(0, np.int64), *(even_blocks(rows, run) for rows in counts.tolist())])

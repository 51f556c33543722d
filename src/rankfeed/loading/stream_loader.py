"""The loader of a stream: what a Loader is, for samples that nobody can count or fetch by number."""

from __future__ import annotations

import logging
from collections.abc import Callable, Generator, Iterator, Mapping
from concurrent.futures import Future, wait
from contextlib import closing
from dataclasses import replace
from functools import partial
from typing import Any, Literal, get_args

import torch

from rankfeed._util.validate import check_choice, check_int
from rankfeed.columns import Layout
from rankfeed.errors import ArgumentError, safe_repr
from rankfeed.loading import stream_state as states
from rankfeed.loading.collate import Batch, RaggedAs, check_ragged
from rankfeed.loading.device import device_of, to_device
from rankfeed.loading.epochs import EpochSetter
from rankfeed.loading.frameworks import AmongFrameworks
from rankfeed.loading.maker import Maker
from rankfeed.loading.options import (
    check_batch_size,
    check_functions,
    check_id_column,
    check_topology,
    check_workers,
    refuse_unknown,
)
from rankfeed.loading.placed import Placed
from rankfeed.loading.standing import Standing
from rankfeed.loading.stats import Stats
from rankfeed.loading.stream import Stream
from rankfeed.loading.stream_council import agreed_layout, begin_together, council
from rankfeed.loading.stream_feed import PlacedBatch, StreamFeed, Unfetched
from rankfeed.loading.stream_shares import Cut
from rankfeed.loading.stream_stop import Stop
from rankfeed.loading.stream_workers import ProcessMake
from rankfeed.plan import Cursor, Tail
from rankfeed.plan.plan import DEFAULT_WINDOW
from rankfeed.topology import Topology

_log = logging.getLogger("rankfeed")
#: Seconds between messages about a read that is waited for.
_SAYS = 10.0
#: What only a source that can be read by number has: the value that asks for nothing, and what to do instead.
_OF_A_SOURCE: dict[str, tuple[Any, str]] = {
    "shuffle": (False, "shuffle inside the stream, with one seed on all ranks (a factory is given the epoch)"),
    "window": (DEFAULT_WINDOW, "shuffle inside the stream"),
    "lanes": (None, "leave it out"),
    "plan": (None, "leave it out"),
    "columns": (None, "let the stream yield what you need"),
    "audit": (False, "rankfeed.audit(loader) counts what any loader delivers"),
}


class StreamLoader(Standing, Placed, AmongFrameworks):
    """Feeds one rank its share of a stream. Made by ``rankfeed.Loader(rankfeed.from_iterable(...), ...)``.

    It is iterated, stopped and resumed as a :class:`rankfeed.Loader` is, but has no length. Every rank takes the
    same number of steps: where ``torch.distributed`` is initialised, all ranks agree on each stretch of steps
    before the first of them is delivered, so that none goes on alone when a stream ends, fails, or differs
    between ranks.

    Args:
        stream: what :func:`rankfeed.from_iterable` returned.
        batch_size: rows of this rank's batches.
        tail: how an epoch ends. "even": the last two steps share what is left after the full ones, over all ranks
            (for a stream that all ranks read; not where each has its own). "drop": after the last step that is
            full on every rank. "pad": when the streams of all ranks have ended; rows that only fill are masked by
            ``valid``.
        seed: of the generators of transforms, which are keyed by (seed, epoch, place in the stream).
        id_column: name of a column to add, with the place of each sample in the stream (where each rank has its
            own: place * world_size + rank).
        others: as of :class:`rankfeed.Loader`; with workers the stream is read once a rank, by one thread ahead of
            them. Arguments of a Loader that need samples by number are refused.

    Raises:
        ArgumentError: an argument cannot be meant for a stream.
        TopologyError: ranks have a stream each, and ``torch.distributed`` is not initialised.
        StreamError: the stream of some rank failed (raised on all ranks), is empty or used up; the ranks read
            different streams or do not begin at one place; a rank is gone.
    """

    def __init__(
        self,
        stream: Stream,
        batch_size: int = 1,
        *,
        tail: Tail = "even",
        seed: int = 0,
        transform: Callable[..., Any] | None = None,
        batch_transform: Callable[..., Any] | None = None,
        collate_fn: Callable[[list[Any]], Any] | None = None,
        ragged: RaggedAs = "pad",
        pad_to: int = 1,
        num_workers: int = 0,
        worker_kind: Literal["thread", "process"] = "thread",
        prefetch_factor: int = 2,
        device: str | torch.device | None = None,
        topology: Topology | None = None,
        on_error: Literal["raise"] = "raise",
        id_column: str | None = None,
        **others: Any,
    ) -> None:
        super().__init__()
        _refuse(others)
        self.source = stream
        self.batch_size = check_batch_size(batch_size)
        self.tail: Tail = check_choice("tail", tail, get_args(Tail))
        if stream.sharded and self.tail == "even":
            raise ArgumentError(
                "ranks that have a stream each cannot share out its end evenly",
                expected='tail="drop" (all stop after the last step that is full everywhere) or "pad" (all go on, '
                "with masked rows, until the last has ended)",
                found='tail="even"',
                remedy="choose one of them, or leave out the factory's parameter shard and yield the whole stream "
                "on every rank",
            )
        self.seed = check_int("seed", seed)
        self.num_workers, self.worker_kind, self.prefetch_factor = check_workers(
            num_workers, worker_kind, prefetch_factor
        )
        self.device = device_of(device)
        self.id_column = id_column
        check_choice("on_error", on_error, ("raise",))
        ragged, pad_to = check_ragged(ragged, pad_to)
        check_id_column(id_column)
        check_functions(transform=transform, batch_transform=batch_transform, collate_fn=collate_fn)
        self._topology = check_topology(topology)
        self._maker = Maker(
            source=Unfetched(stream.declared),
            columns=None,
            transform=transform,
            batch_transform=batch_transform,
            collate_fn=collate_fn,
            ragged=ragged,
            pad_to=pad_to,
            seed=self.seed,
            id_column=id_column,
            seed_globals=self.num_workers == 0 or self.worker_kind == "process",
        )
        #: What the samples of all batches hold, from the first batch on.
        self._layout: Layout | None = None
        #: Worker processes of an iteration that came to its end, for the next one.
        self._workers: ProcessMake | None = None
        #: The end of a read that was under way when an iteration was left.
        self._reading: Future[None] | None = None
        self._stats = Stats()

    @property
    def batch_sampler(self) -> EpochSetter:
        """Where frameworks look for ``batch_sampler.sampler`` to call ``set_epoch``: takes that, and no more."""
        return EpochSetter(self, self.batch_size)

    def __iter__(self) -> Iterator[Batch]:
        turn = self._next_turn()
        return self._deliver(turn, self._begun)

    def state_dict(self) -> dict[str, Any]:
        """Where the job stands, after the last delivered step, the same on every rank: JSON-able.

        Under 1 KiB, and what the stream's own state takes, if it has one.
        """
        return self._state_at(self._cursor)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on where a state was taken, by the stream's own state, by ``start``, or by skipping samples.

        Raises:
            StateError: it belongs to another seed, or to streams of another number of ranks.
        """
        self._go_to(states.load(state, self.seed, self._shards))

    def stats(self) -> dict[str, int | float]:
        """Those of :meth:`Loader.stats`; of how many steps an epoch has nobody knows (0)."""
        return self._stats.as_dict()

    @property
    def _shards(self) -> int:
        return self.topology.world_size if self.source.sharded else 0

    def _state_at(self, cursor: Cursor) -> dict[str, Any]:
        return states.save(cursor, self.seed, self._shards)

    def _deliver(self, turn: int, begun: Cursor) -> Iterator[Any]:
        if self._turn == turn:
            self._under_way = True
            begun = self._begun
        step = 0
        self._stats.begins(begun.epoch, begun.steps)
        with closing(self._run(begun)) as batches:
            while True:
                self._stats.asked()
                try:
                    made, place = next(batches)
                    batch = made.batch if self.device is None else to_device(made.batch, self.device)
                except BaseException as error:
                    self._stats.answered()
                    if isinstance(error, StopIteration):
                        break
                    raise
                step += 1
                self._stats.delivered(made)
                full = begun.position + step * self.batch_size * self._shards
                self._moved(turn, full if self._shards else place.read)
                if self._turn == turn:
                    now = self._cursor
                    self._cursor = states.StreamCursor(now.epoch, now.position, now.steps, place.saved)
                yield batch
        self._exhausted(turn)

    def _run(self, begun: Cursor) -> Generator[PlacedBatch, None, None]:
        """All batches of what is left of an epoch."""
        topology, stream = self.topology, self.source
        self._wait_for_reading()
        ranks = topology.world_size
        start = begun.position // ranks if stream.sharded else begun.position
        cut = Cut(self.batch_size, topology.rank, ranks, stream.sharded, self.tail, begun.epoch, start)
        depth = self.num_workers * self.prefetch_factor
        window = max(1, depth)
        together = council(topology, sharded=stream.sharded)
        if together is not None:
            stand = {
                "epoch": begun.epoch,
                "samples read": begun.position,
                "batch_size": self.batch_size,
                "tail": self.tail,
                "world size": ranks,
                "streams": self._shards,
                "fields": "to be agreed on" if self._layout is None else self._layout,
            }
            window = begin_together(together, topology.rank, stand, ranks, window)
        make, workers = self._maker.make_share, None
        if self.num_workers and self.worker_kind == "process":
            workers, self._workers = self._workers, None
            if workers is None or not workers.ours:
                workers = ProcessMake(self._maker, topology.rank, self.num_workers)
        saved = states.saved_at(begun)
        opened = partial(stream.open, epoch=begun.epoch, shard=(topology.rank, ranks), start=start, saved=saved)
        filling = replace(self._maker, seed_globals=False)
        feed = StreamFeed(opened, cut, filling, workers or make, self.num_workers, depth)
        try:
            if self._layout is None and self._maker.collate_fn is None:
                own = feed.observe(all_ranks=together is None and ranks > 1)
                self._layout = agreed_layout([own] if together is None else together.gather(own), own, self._maker)
            feed.layout = self._layout
            pads = self.tail == "pad"
            yield from feed if together is None else Stop(feed, together, window, pads, not stream.sharded)
            self._workers, workers = self._workers or workers, None
        finally:
            if workers is not None:
                workers.close()
            feed.close()
            self._reading = feed.reading

    def _wait_for_reading(self) -> None:
        """Two iterations must not read a stream at once: it may share what it reads from."""
        reading, self._reading = self._reading, None
        waited = 0.0
        while reading is not None and not wait([reading], _SAYS).done:
            waited += _SAYS
            _log.warning(
                "rank %d cannot begin the stream again: an earlier iteration was left %.0f s ago while the stream "
                "was producing a sample, and it has not returned yet",
                self.topology.rank,
                waited,
            )

    def __getstate__(self) -> dict[str, Any]:
        return {
            **super().__getstate__(),
            "_workers": None,
            "_reading": None,
            "_stats": Stats(),
        }  # what runs stays behind


def _refuse(options: Mapping[str, Any]) -> None:
    """Refuse what a stream cannot have."""
    for name, value in options.items():
        if name not in _OF_A_SOURCE:
            refuse_unknown({name: value})
        nothing, remedy = _OF_A_SOURCE[name]
        if value is not nothing and not (type(value) is type(nothing) and value == nothing):
            raise ArgumentError(
                f"a stream has no {name}: its samples come in its own order, once, and cannot be read by number",
                found=f"{name}={safe_repr(value)}",
                remedy=remedy,
            )

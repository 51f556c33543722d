"""The ranks of a job, talking through torch.distributed; and whether they stand at one place to begin with."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist

from rankfeed.columns import Layout, Mismatch
from rankfeed.columns.layout import join_layouts, resolve_dtypes
from rankfeed.errors import RankfeedError, StreamError, TopologyError, safe_str
from rankfeed.loading.maker import Maker
from rankfeed.loading.misfits import misfit
from rankfeed.loading.stream_stop import Council
from rankfeed.topology import Topology

#: For the job's process group a group of ours for the same processes: on the CPU whatever the job's is, and apart
#: from it, so that nothing we say gets between what the job says. It goes when the job destroys its own: gloo's
#: threads give back tensors, and in an interpreter that is just ending that would abort the process.
_ours: WeakKeyDictionary[Any, Any] = WeakKeyDictionary()


class TorchCouncil:
    """All processes of ``torch.distributed``, over gloo.

    Args:
        where: how an error says which rank this is.
    """

    def __init__(self, where: str) -> None:
        self._where = where

    def alike(self, ordinary: bool, word: int) -> bool:
        """Whether all ranks say ``ordinary`` and the same ``word``: one reduction of three numbers."""
        told = torch.tensor([int(ordinary), word, -word])
        with self._together():
            dist.all_reduce(told, dist.ReduceOp.MIN, _group())
        least, low, high = told.tolist()
        return bool(least) and low == -high

    def gather(self, value: Any) -> list[Any]:
        """What each process said."""
        told: list[Any] = [None] * dist.get_world_size()
        with self._together():
            dist.all_gather_object(told, value, _group())
        return told

    @contextmanager
    def _together(self) -> Iterator[None]:
        try:
            yield
        except RuntimeError as error:
            raise StreamError(
                "another rank is gone, or was waited for too long, while the ranks agreed on their next steps",
                found=f"{type(error).__name__}: {(safe_str(error).splitlines() or [''])[0]}",
                where=self._where,
                remedy="see what the other ranks logged: the first error there is the cause; all ranks have to "
                "iterate the loader, and to leave it, at the same steps",
            ) from error


def council(topology: Topology, *, sharded: bool) -> Council | None:
    """How the ranks of this job agree; None where there is one rank, or each knows for itself what all will do.

    Raises:
        TopologyError: streams differ between ranks, and torch.distributed is not there.
    """
    if topology.world_size == 1:
        return None
    size = dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1
    if size % topology.world_size == 0:
        return TorchCouncil(f"rank {topology.rank} of {topology.world_size}")
    if sharded:
        raise TopologyError(
            "ranks that have a stream each must tell each other when it ends",
            expected=f"torch.distributed, initialised with {topology.world_size} processes",
            found="not initialised" if size == 1 else f"{size} processes",
            remedy="call torch.distributed.init_process_group('gloo') first, or leave out the factory's parameter "
            "shard and yield the whole stream on every rank",
        )
    return None


def begin_together(council: Council, rank: int, stand: Mapping[str, Any], world_size: int, window: int) -> int:
    """Make sure that all ranks begin an iteration at one place.

    Args:
        council: of all ranks.
        rank: of this process.
        stand: what has to be the same on all of them, by names that an error can use.
        world_size: ranks there are.
        window: steps that this rank would agree on at once.

    Returns:
        the smallest window of all.

    Raises:
        StreamError: they do not, and where; or some rank is there twice.
    """
    told: list[tuple[int, dict[str, Any], int]] = council.gather((rank, dict(stand), window))
    first, theirs, _ = told[0]
    for other, stands, _ in told[1:]:
        differing = [name for name in theirs if theirs[name] != stands.get(name)]
        if differing:
            raise StreamError(
                "the ranks do not begin at one place",
                found="; ".join(
                    f"{name}: {theirs[name]} on rank {first}, {stands.get(name)} on rank {other}"
                    for name in differing
                ),
                remedy="make the loader alike on every rank, and load the same state everywhere",
            )
    counts = [sum(each == number for each, *_ in told) for number in range(world_size)]
    if len(set(counts)) > 1:
        raise StreamError(
            "the processes do not share out the ranks",
            expected=f"ranks 0 to {world_size - 1}, each as often",
            found=sorted(each for each, *_ in told),
            remedy="leave topology out, so that it is found",
        )
    return min(each for *_, each in told)


def agreed_layout(told: Sequence[Layout | RankfeedError | None], own: object, maker: Maker) -> Layout | None:
    """What the first batches of all ranks have in common, the same on every rank; None if there is no sample.

    Args:
        told: what each process found in its own (`StreamFeed.observe`).
        own: what this process found.
        maker: of this process.

    Raises:
        RankfeedError: they have nothing in common, or those of one rank have not; on every rank.
    """
    if isinstance(own, RankfeedError):
        raise own
    found: Layout | None = None
    for process, each in enumerate(told):
        if isinstance(each, RankfeedError):
            summary = f"the samples of process {process} do not go together, so all ranks stop"
            raise StreamError(summary, found=each)
        try:
            if each is not None:
                found = each if found is None else join_layouts(found, each, loose=maker.ragged == "list")
        except Mismatch as error:
            raise misfit(maker, error, f"first batch of process {process}, and those before it") from error
    return None if found is None else resolve_dtypes(found)


def _group() -> Any:
    world = dist.group.WORLD
    if world not in _ours:
        _ours[world] = dist.new_group(backend="gloo")
    return _ours[world]

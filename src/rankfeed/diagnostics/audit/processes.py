"""The processes that an audit asks together: those of torch.distributed, or this one alone."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

from rankfeed.errors import AuditError, RankfeedError, safe_str
from rankfeed.topology import Topology

_T = TypeVar("_T")


@dataclass(frozen=True)
class Processes:
    """This process among all."""

    rank: int
    world_size: int

    @classmethod
    def here(cls) -> Processes:
        """Find them.

        Raises:
            AuditError: there are several, and no process group to ask them by.
        """
        here = Topology.detect()
        if here.world_size > 1 and not _together():
            raise AuditError(
                "an audit of several ranks asks all of them, and there is no process group",
                found=f"rank {here.rank} of {here.world_size}, as {here.launcher} says",
                remedy='torch.distributed.init_process_group("gloo") before it',
            )
        return cls(here.rank, here.world_size)

    def each(self, work: Callable[[], _T], summary: str) -> list[_T]:
        """Have each process do its work.

        Args:
            work: of this one.
            summary: what is said where it fails.

        Returns:
            what came of it on each process.

        Raises:
            AuditError: it failed, on any of them; raised on all.
        """
        done, failed = None, ""
        cause: BaseException | None = None
        try:
            done = work()
        except BaseException as error:  # the others are waiting, and are told of an interruption, too
            failed, cause = f"{type(error).__name__}: {safe_str(error)}", error
        told = self.all((failed, done))
        alone = self.world_size == 1 and isinstance(cause, RankfeedError)
        if cause is not None and (alone or not isinstance(cause, Exception)):
            raise cause
        for rank, (failed, _) in enumerate(told):
            if failed:
                raise AuditError(f"{summary} on rank {rank}", found=failed) from cause
        return [done for _, done in told]

    def all(self, mine: Any) -> list[Any]:
        """What each process has, on all of them."""
        if self.world_size == 1:
            return [mine]
        import torch.distributed as dist

        found: list[Any] = [None] * self.world_size
        dist.all_gather_object(found, mine)
        dist.barrier()  # gloo's thread needs Python's lock once more: nobody may end right here
        return found

    def to_first(self, mine: Any) -> list[Any] | None:
        """What each process has, on the first of them; None on the others."""
        if self.world_size == 1:
            return [mine]
        import torch.distributed as dist

        found: list[Any] | None = [None] * self.world_size if self.rank == 0 else None
        dist.gather_object(mine, found)
        return found

    def of_first(self, mine: Any) -> Any:
        """What the first has."""
        if self.world_size == 1:
            return mine
        import torch.distributed as dist

        box = [mine]
        dist.broadcast_object_list(box)
        return box[0]


def _together() -> bool:
    import torch.distributed as dist

    return dist.is_available() and dist.is_initialized()

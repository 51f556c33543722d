"""The processes of an audit: those of torch.distributed, or this one alone."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

from rankfeed.errors import AuditError, RankfeedError, safe_str
from rankfeed.loading.rank_group import TorchRankGroup, is_distributed
from rankfeed.topology import Topology

_T = TypeVar("_T")


@dataclass(frozen=True)
class AuditProcesses:
    """This process among all."""

    rank: int
    world_size: int

    @classmethod
    def detect(cls) -> AuditProcesses:
        """Find them."""
        here = Topology.detect()
        if here.world_size > 1 and not is_distributed():
            raise AuditError(
                "an audit of several ranks needs a process group",
                found=f"rank {here.rank} of {here.world_size}, as {here.launcher} says",
                remedy='call torch.distributed.init_process_group("gloo") before it',
            )
        return cls(here.rank, here.world_size)

    def gather(self, value: _T) -> list[_T]:
        """The values of all processes, on each of them."""
        if self.world_size == 1:
            return [value]
        group = TorchRankGroup(f"rank {self.rank} of {self.world_size}")
        values = group.gather(value)
        group.barrier()  # gloo's thread needs the GIL once more: no process may end right here
        return values

    def each(self, work: Callable[[], _T], summary: str) -> list[_T]:
        """Run a function in each process; if it fails in one, all of them raise."""
        result: Any = None
        failed, cause = "", None
        try:
            result = work()
        except BaseException as error:  # an interruption, too: the others wait
            failed, cause = f"{type(error).__name__}: {safe_str(error)}", error
        results = self.gather((failed, result))
        alone = self.world_size == 1 and isinstance(cause, RankfeedError)
        if cause is not None and (alone or not isinstance(cause, Exception)):
            raise cause
        for rank, (failed, _) in enumerate(results):
            if failed:
                raise AuditError(f"{summary} on rank {rank}", found=failed) from cause
        return [each for _, each in results]

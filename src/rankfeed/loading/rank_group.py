"""Communication between the ranks of a job through torch.distributed."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist

from rankfeed.errors import StreamError, safe_str
from rankfeed.topology import process_group

#: For the job's process group a gloo group of the same processes: on the CPU for any backend of the job, and
#: separate, so that our messages do not interleave with the job's. It is freed when the job destroys its own
#: group: gloo's threads release tensors, which aborts the process if the interpreter is already finalizing.
_groups: WeakKeyDictionary[Any, Any] = WeakKeyDictionary()


class TorchRankGroup:
    """All processes of ``torch.distributed``, over gloo; each calls the same methods in the same order."""

    def __init__(self, where: str) -> None:
        self._where = where

    def all_equal(self, ordinary: bool, word: int) -> bool:
        """Whether every process passes ``ordinary=True`` and the same ``word`` (of 62 bits)."""
        numbers = torch.tensor([int(ordinary), word, -word])
        with self._collective() as group:
            dist.all_reduce(numbers, dist.ReduceOp.MIN, group)
        least, low, high = numbers.tolist()
        return bool(least) and low == -high

    def gather(self, value: Any) -> list[Any]:
        values: list[Any] = [None] * dist.get_world_size()
        with self._collective() as group:
            dist.all_gather_object(values, value, group)
        return values

    def gather_last(self, value: Any) -> list[Any]:
        """The same before a process may end: gloo's thread needs the GIL once more to release the tensors."""
        values = self.gather(value)
        with self._collective() as group:
            dist.barrier(group)
        return values

    @contextmanager
    def _collective(self) -> Iterator[Any]:
        world = dist.group.WORLD
        try:
            if world not in _groups:
                _groups[world] = dist.new_group(backend="gloo")
            yield _groups[world]
        except RuntimeError as error:
            raise StreamError(
                "a collective between the ranks failed: another rank ended, or did not reach it in time",
                found=f"{type(error).__name__}: {(safe_str(error).splitlines() or [''])[0]}",
                where=self._where,
                remedy="see the logs of the other ranks: the first error there is the cause; all ranks have to "
                "iterate the loader, and to leave it, at the same steps",
            ) from error


def process_count() -> int:
    """Processes of ``torch.distributed``; 1 where it is not initialised."""
    group = process_group()
    return 1 if group is None else group[1]

"""``Lockstep``: a loader wrapper under which a hang ends with an error that names the rank and the cause."""

from collections import Counter
from collections.abc import Iterable, Iterator
from functools import partial
from types import TracebackType
from typing import TYPE_CHECKING, Any, Generic, Self, TypeVar

from rankfeed._util.validate import check_bool, check_iterable, check_name, check_seconds
from rankfeed.errors import ArgumentError
from rankfeed.topology import process_group

if TYPE_CHECKING:
    from rankfeed.diagnostics.lockstep.rank_monitor import RankMonitor

_T = TypeVar("_T")
#: Loops of each name that began here: ranks begin them in the same order, so that equal numbers belong together.
_created: Counter[str] = Counter()


class Lockstep(Generic[_T]):
    """Watches the ranks of a job while they train, through the store of torch.distributed, without a collective.

    When a rank fails, ends before the others, is killed, or lets others wait beyond the limit, all ranks print
    which rank, on which host, in which step, and why. A rank whose training thread is in Python raises this as a
    LockstepError at its next step; a rank that hangs, or is blocked in a collective, ends with exit code 86.
    Without a process group, or alone in it, Lockstep does nothing.

    Wrap a loader, and put a ``with`` around everything that trains: an error in it is published at once, and an
    error of a collective that another rank caused is raised as that. Without the ``with``, an error is published
    when it ends the process. Attributes of the loader (``set_epoch``, ``state_dict``...) are passed through.

    A rank waits for another one if it is in a collective that the other one has not entered, by the numbers that
    torch counts in each process group; if there are no such numbers, if it is in a later step. Ranks that are all
    busy do not wait, however long. Ranks in different collectives are a hang too. A rank that blocks others in a
    point-to-point call is not seen.

    Args:
        loader: any iterable of batches; None if `step` is called by hand.
        name: of this loop, the same on all ranks. Loops of the same name are matched in the order in which ranks
            begin them; pass names where that may differ.
        limit: seconds (3 or more) that ranks may wait for another one before it is blamed: longer than whatever
            one rank does while others wait (a long step, a checkpoint). What is certain (a rank failed, was
            killed, ran out of data) needs no limit and is reported within seconds.
        uneven: ranks may take different numbers of steps, since no step waits for another rank, or under
            ``torch.distributed.algorithms.Join``.
        grace: seconds (at most ``limit``) in which a rank that is busy may reach its next step and raise, before
            it ends too.

    Raises:
        ArgumentError: an argument is invalid.
        LockstepError: from the loop, as described.

    Examples:
        >>> with Lockstep([[1, 2], [3]]) as batches:
        ...     list(batches)
        [[1, 2], [3]]
    """

    def __init__(
        self,
        loader: Iterable[_T] | None = None,
        *,
        name: str = "loop",
        limit: float = 300.0,
        uneven: bool = False,
        grace: float = 30.0,
    ) -> None:
        if loader is not None:
            check_iterable("loader", loader, "an iterable of batches")
        self.loader = loader
        self._name = check_name("name", name)
        self._options: dict[str, Any] = {
            "limit": check_seconds("limit", limit, at_least=3),
            "uneven": check_bool("uneven", uneven),
            "grace": check_seconds("grace", grace, at_least=1),
        }
        self._monitor: RankMonitor | None = None
        self._begun = False

    def wait(self) -> None:
        """A pass begins or a step is over, and data are waited for; if no loader shows it."""
        if (monitor := self._checked()) is not None:
            monitor.local.wait()

    def step(self) -> None:
        """A step begins; if no loader shows it."""
        if (monitor := self._checked()) is not None:
            monitor.local.step()

    def work(self) -> None:
        """What follows still belongs to the step that was begun, such as an evaluation."""
        if self._monitor is not None and self._monitor.local.is_inside:
            self._monitor.local.work()

    def end_pass(self) -> None:
        """A pass over the data is over; if no loader shows it."""
        if self._monitor is not None:
            self._monitor.end_pass("ended")

    def __iter__(self) -> Iterator[_T]:
        if self.loader is None:
            raise ArgumentError("there is no loader to iterate over", remedy="Lockstep(loader), or call step()")
        monitor = self._watched()
        return iter(self.loader) if monitor is None else self._pass(monitor, self.loader)

    def _pass(self, monitor: "RankMonitor", loader: Iterable[_T]) -> Iterator[_T]:
        monitor.check()
        local = monitor.local
        local.begin_pass()
        current_pass = local.progress.passes
        try:
            for batch in loader:
                if monitor.cause is not None:  # the loader may have swallowed the error
                    monitor.check()
                local.step()
                yield batch
                if monitor.cause is not None:
                    monitor.check()
                local.wait()
        except GeneratorExit:
            if local.progress.passes == current_pass:  # an iterator may be collected after the next one has begun
                monitor.end_pass("left")
            raise
        except BaseException as error:
            monitor.fail(error)
            raise
        if local.progress.passes == current_pass:
            monitor.end_pass("ended")

    def __enter__(self) -> Self:
        self._watched()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        monitor = self._monitor
        if monitor is None:
            return
        # Entering again begins another loop: other ranks may still be leaving this one.
        self._monitor, self._begun = None, False
        if error is None or (isinstance(error, SystemExit) and not error.code):
            monitor.close()
            monitor.check()
        else:
            monitor.fail(error)

    def __del__(self) -> None:
        monitor = self.__dict__.get("_monitor")
        if monitor is not None and not monitor.over:
            monitor.close(0.0)

    def __len__(self) -> int:
        return len(self.loader)  # type: ignore[arg-type]  # as the loader itself answers

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or self.__dict__.get("loader") is None:
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        return getattr(self.loader, name)

    def __reduce__(self) -> tuple[Any, ...]:
        return partial(Lockstep, name=self._name, **self._options), (self.loader,)

    def _watched(self) -> "RankMonitor | None":
        """The monitor of this rank, which is begun at the first call; None if there is no other rank."""
        group = None if self._begun else process_group()
        if group is None:
            return self._monitor
        if group[1] > 1:
            from rankfeed.diagnostics.lockstep.rank_monitor import RankMonitor

            index, _created[self._name] = _created[self._name], _created[self._name] + 1
            self._monitor = RankMonitor(f"{self._name}/{index}", **self._options)
        self._begun = True
        return self._monitor

    def _checked(self) -> "RankMonitor | None":
        """The monitor, inside a pass."""
        monitor = self._watched()
        if monitor is not None:
            monitor.check()
            if not monitor.local.is_inside:
                monitor.local.begin_pass()
        return monitor

"""Watch the ranks of a running job: a hang becomes an error that says which rank stopped, where and why."""

from __future__ import annotations

import sys
import weakref
from collections import Counter
from collections.abc import Iterable, Iterator
from types import TracebackType
from typing import TYPE_CHECKING, Any, Generic, Literal, Self, TypeVar

from rankfeed._util.validate import check_bool, check_choice, check_iterable, check_name, check_seconds
from rankfeed.errors import ArgumentError, LockstepError

if TYPE_CHECKING:
    from rankfeed.diagnostics.lockstep.watch import Watch

_T = TypeVar("_T")
#: How many of each name have been made here: ranks make them in one order, so that equal numbers belong together.
_made: Counter[str] = Counter()


class Lockstep(Generic[_T]):
    """Watches the ranks of a job while they train, over the store of torch.distributed: no collective.

    When a rank fails, ends before the others, is killed, or is waited for beyond the limit, all ranks raise a
    LockstepError that says which rank, on which host, in which step, why, and the last lines of its traceback or
    of its stack. Without a process group, or alone in it, it does nothing.

    Wrap a loader, and put a ``with`` around all that trains: what fails in there is told to the others at once,
    and what fails because of another rank is raised as that. Without the ``with``, an error is told when it ends
    the process. Attributes of the loader (``set_epoch``, ``state_dict``, ``sampler``...) are handed through.

    A rank raises where it is: in Python, asleep or waiting for data by a signal (SIGURG, unless that is taken; in
    another thread than the main one as soon as it is back in Python); in a collective by ending that: NCCL's by an
    abort, gloo's by shutting down the connections between the ranks. The process group is of no more use then.

    Args:
        loader: any iterable of batches; None where `step` is called by hand.
        name: of this loop, the same on all ranks. Loops of one name are told apart by the order in which ranks
            begin them; give names where that may differ.
        limit: seconds (3 or more) that ranks may wait for another one before it is blamed: longer than the longest
            step, and than whatever one rank does while others wait (checkpoints, evaluation). What is certain (a
            rank failed, was killed, ran out of data) needs no limit, and is raised within seconds.
        uneven: ranks may take different numbers of steps, since no step waits for another rank, or under
            ``torch.distributed.algorithms.Join``.
        on_stuck: what to do with a process that cannot be made to raise: "exit" ends it with code 86, after it has
            said why on stderr; "raise" leaves it as it is, and it raises if it ever comes back.
        grace: seconds that it is given before that.

    Raises:
        ArgumentError: a limit or a choice that cannot be meant.
        LockstepError: from the loop, as described.

    Examples:
        >>> with Lockstep([[1, 2], [3]]) as batches:
        ...     for batch in batches:
        ...         print(batch)
        [1, 2]
        [3]
    """

    def __init__(
        self,
        loader: Iterable[_T] | None = None,
        *,
        name: str = "loop",
        limit: float = 300.0,
        uneven: bool = False,
        on_stuck: Literal["exit", "raise"] = "exit",
        grace: float = 30.0,
    ) -> None:
        if loader is not None:
            check_iterable("loader", loader, "an iterable of batches")
        name = check_name("name", name)
        limit = check_seconds("limit", limit, at_least=3)
        uneven = check_bool("uneven", uneven)
        on_stuck = check_choice("on_stuck", on_stuck, ("exit", "raise"))
        grace = check_seconds("grace", grace, at_least=1)
        self.loader = loader
        self._name = name
        self._choices = limit, uneven, on_stuck, grace
        self._watch: Watch | None = None
        self._begun = False
        self._collected: weakref.finalize[..., Lockstep[_T]] | None = None

    def wait(self) -> None:
        """Say that a pass begins or a step is over, and data are waited for; where no loader tells it."""
        watch = self._watched()
        if watch is not None:
            self._check(watch)
            if not watch.here.inside:
                watch.here.begin()
            watch.here.state = "data"

    def step(self) -> None:
        """Say that a step begins, where there is no loader to tell it by.

        Raises:
            LockstepError: as described.

        Examples:
            >>> with Lockstep(limit=60) as lockstep:
            ...     for _ in range(3):
            ...         lockstep.step()
        """
        watch = self._watched()
        if watch is not None:
            self._check(watch)
            if not watch.here.inside:
                watch.here.begin()
            watch.here.step += 1
            watch.here.state = "step"

    def work(self) -> None:
        """Say that what follows still belongs to the step that was begun, such as an evaluation."""
        if self._watch is not None and self._watch.here.inside:
            self._watch.here.state = "step"

    def end_pass(self) -> None:
        """Say that a pass over the data is over, where there is no loader to tell it by."""
        if self._watch is not None:
            self._watch.end_pass("ended")

    def __iter__(self) -> Iterator[_T]:
        if self.loader is None:
            raise ArgumentError("there is no loader to iterate over", remedy="Lockstep(loader), or call step()")
        watch = self._watched()
        return iter(self.loader) if watch is None else self._pass(watch, self.loader)

    def _pass(self, watch: Watch, loader: Iterable[_T]) -> Iterator[_T]:
        self._check(watch)
        here = watch.here
        here.begin()
        lap = here.lap
        try:
            for batch in loader:
                if watch.verdict is not None:  # the loader may have swallowed it
                    self._check(watch)
                here.step += 1
                here.state = "step"
                yield batch
                if watch.verdict is not None:
                    self._check(watch)
                here.state = "data"
        except GeneratorExit:
            if here.lap == lap:  # an iterator may be collected when the next one is at work already
                watch.end_pass("left")
            raise
        except BaseException as error:
            self._fail(watch, error)
            raise
        if here.lap == lap:
            watch.end_pass("ended")

    def __enter__(self) -> Self:
        self._watched()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        watch = self._watch
        if watch is None:
            return
        # Who enters again is watched anew: others may still be on their way out.
        self._watch, self._begun = None, False
        if error is None or (isinstance(error, SystemExit) and not error.code):
            watch.close()
            if self._collected is not None:
                self._collected.detach()
            self._check(watch)
        else:
            self._fail(watch, error)

    def __len__(self) -> int:
        return len(self.loader)  # type: ignore[arg-type]  # as the loader itself answers

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or self.__dict__.get("loader") is None:
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        return getattr(self.loader, name)

    def __reduce__(self) -> tuple[Any, ...]:
        limit, uneven, on_stuck, grace = self._choices
        choices = {"name": self._name, "limit": limit, "uneven": uneven, "on_stuck": on_stuck, "grace": grace}
        return _again, (self.loader, choices)

    def _watched(self) -> Watch | None:
        """The watch over this rank, begun now if it was not; None where nobody is to be waited for."""
        distributed = sys.modules.get("torch.distributed")
        if (
            self._begun
            or distributed is None
            or not distributed.is_available()
            or not distributed.is_initialized()
        ):
            return self._watch
        if distributed.get_world_size() > 1:
            from rankfeed.diagnostics.lockstep.watch import Terms, Watch

            number, _made[self._name] = _made[self._name], _made[self._name] + 1
            self._watch = Watch(f"{self._name}/{number}", Terms(*self._choices))
            self._collected = weakref.finalize(self, self._watch.close, 0.0)
        self._begun = True
        return self._watch

    def _check(self, watch: Watch) -> None:
        error = watch.error()
        if error is not None:
            watch.linger()
            raise error

    def _fail(self, watch: Watch, error: BaseException) -> None:
        """Tell the others of an error; raise what it comes from, where that is another rank."""
        if isinstance(error, LockstepError):
            watch.acknowledge()
        told = watch.fail(error)
        if told is not None:
            raise told from error


def _again(loader: Any, choices: dict[str, Any]) -> Lockstep[Any]:
    return Lockstep(loader, **choices)

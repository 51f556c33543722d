"""Any iterable of samples, opened anew for each epoch, at its start or where a checkpoint was taken."""

from __future__ import annotations

import copy
import inspect
import logging
import time
import warnings
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any, cast

import msgspec

from rankfeed.columns import Field
from rankfeed.errors import ArgumentError, StateError, StreamError, describe_error, safe_str
from rankfeed.sources.source import Declared

_log = logging.getLogger("rankfeed")
#: What a factory may ask for, by the names of its parameters.
_OFFERED = ("epoch", "shard", "start")
#: Samples skipped in one go, and seconds after which it is said how far that is.
_SKIP, _SAYS = 1 << 16, 10.0


@dataclass(frozen=True)
class Saved:
    """What a stream's own ``state_dict`` said once so many samples of the epoch were read; JSON."""

    at: int
    content: bytes


class Stream:
    """Samples of unknown number, in the order in which they come. Made by :func:`from_iterable`.

    Attributes:
        sharded: whether each rank has a stream of its own, its share; else all ranks read the same one.
        declared: fields that are ragged, whatever the first batch shows.
        fields: these by name.
    """

    def __init__(
        self, factory: Callable[..., Iterable[Any]] | Iterable[Any], ragged: Sequence[str | int] = ()
    ) -> None:
        made = isinstance(factory, type) or (callable(factory) and not hasattr(factory, "__iter__"))
        if not made and not hasattr(factory, "__iter__"):
            raise ArgumentError(
                "this is no stream",
                expected="a function that returns an iterable of samples",
                found=type(factory).__name__,
            )
        self._factory: Callable[..., Iterable[Any]] = cast(Any, factory) if made else _Again(factory)
        self._asks = _asks(self._factory)
        self.sharded = "shard" in self._asks
        self.declared = Declared("the stream", "from_iterable(factory", None, Declared.names(ragged))
        self.fields = {name: Field("ragged") for name in self.declared.ragged}
        #: An iterator that was handed out cannot be begun again.
        self._given: object = None

    def __repr__(self) -> str:
        return f"from_iterable({self._factory!r})"

    def open(
        self, *, epoch: int = 0, shard: tuple[int, int] = (0, 1), start: int = 0, saved: Saved | None = None
    ) -> Reader:
        """Begin an epoch, or go on in it.

        Args:
            epoch: handed to a factory that asks for it.
            shard: (index, count) of the share; handed to a factory that asks for it.
            start: samples of this stream that were read before.
            saved: the stream's own state at that place or before it.

        Raises:
            StreamError: the factory raised, or returned what it returned before and is used up.
            StateError: the stream ends before that place.
        """
        offered = {"epoch": epoch, "shard": shard, "start": start}
        where = f"epoch {epoch}, rank {shard[0]}"
        if self.sharded:  # a state of its own is one rank's, and no part of one that is the same on all
            saved = None
        try:
            made = self._factory(**{name: offered[name] for name in self._asks})
            if "epoch" not in self._asks and hasattr(made, "set_epoch"):
                made.set_epoch(epoch)
            iterator = iter(made) if saved is None or not _stateful(made) else None
        except (Exception, SystemExit) as error:
            raise _raised("the factory of the stream raised", error, where) from error
        if iterator is made:
            if made is self._given:
                raise StreamError(
                    "an iterator can be read once, and this one has been begun before",
                    found=f"the same {type(made).__name__} again",
                    where=where,
                    remedy="give a function that opens the stream anew each time it is called",
                )
            self._given = made
        if "start" in self._asks:
            return Reader(iter(made) if iterator is None else iterator, None, start, where)
        owner: Any = made if _stateful(made) else iterator if _stateful(iterator) else None
        if self.sharded:
            owner = None
        at = 0
        if saved is not None and owner is not None:
            try:
                owner.load_state_dict(msgspec.json.decode(saved.content))
                iterator = iter(made) if iterator is None else iterator
            except (Exception, SystemExit) as error:
                raise _raised("the stream does not take its own state back", error, where) from error
            at = saved.at
        assert iterator is not None
        reader = Reader(iterator, owner, at, where)
        reader.skip(start - at)
        if reader.read < start and not self.sharded:
            raise StateError(
                "the checkpoint lies beyond the end of the stream",
                expected=f"at least {start} samples",
                found=reader.read,
                where=where,
            )
        return reader


class Reader:
    """A stream under way: counts what is read of it.

    Attributes:
        read: samples of the epoch's stream read, or skipped.
        last: the sample read last, in a list; an empty list before the first.
    """

    def __init__(self, iterator: Iterator[Any], owner: Any, read: int, where: str) -> None:
        self.read = read
        self.last: list[Any] = []
        self._iterator, self._owner, self._where = iterator, owner, where
        self._kept: list[Any] = []
        self._keep = 0

    def keep(self, number: int) -> None:
        """Keep the next ``number`` samples for `kept`."""
        self._keep = number

    def kept(self) -> list[Any]:
        """Those that were kept, which are let go here; no more are kept."""
        kept, self._kept, self._keep = self._kept, [], 0
        return kept

    def __iter__(self) -> Reader:
        return self

    def __next__(self) -> Any:
        try:
            sample = next(self._iterator)
        except StopIteration:
            raise
        except (Exception, SystemExit) as error:
            raise _raised("the stream raised", error, f"sample {self.read}, {self._where}") from error
        self.read += 1
        self.last = [sample]
        if self._keep > len(self._kept):
            self._kept.append(sample)
        return sample

    def skip(self, number: int) -> None:
        """Read on, and keep nothing but the last sample; less where the stream ends."""
        began = said = time.monotonic()
        until = self.read + number
        while self.read < until:
            few = min(_SKIP, until - self.read)
            try:
                some = deque(enumerate(islice(self._iterator, few), 1), maxlen=1)
            except (Exception, SystemExit) as error:
                where = f"after sample {self.read}, {self._where}"
                raise _raised("the stream raised while it was skipped", error, where) from error
            if some:
                self.read += some[0][0]
                self.last = [some[0][1]]
            if not some or some[0][0] < few:
                return
            if time.monotonic() - said > _SAYS:
                said = time.monotonic()
                left = (until - self.read) * (said - began) / max(1, self.read - until + number)
                _log.warning(
                    "skipping to a checkpoint: %d of %d samples, some %.0f s left (%s)",
                    self.read,
                    until,
                    left,
                    self._where,
                )

    def saved(self) -> Saved | None:
        """The stream's own state at this place, if it has one that JSON can hold."""
        if self._owner is None:
            return None
        try:
            state = self._owner.state_dict()
            content = msgspec.json.encode(state)
            if msgspec.json.decode(content) == state:
                return Saved(self.read, content)
            found = "JSON changes it"
        except Exception as error:
            found = f"{type(error).__name__}: {safe_str(error)}"
        warnings.warn(
            f"the stream's own state_dict() cannot be kept ({found}): a job that resumes will read "
            "from the start of the epoch, and skip",
            stacklevel=2,
        )
        self._owner = None
        return None

    def close(self) -> None:
        """Let a generator run its ``finally``."""
        if isinstance(self._iterator, Generator):
            self._iterator.close()


def from_iterable(
    factory: Callable[..., Iterable[Any]] | Iterable[Any], *, ragged: Sequence[str | int] = ()
) -> Stream:
    """A stream of samples whose number nobody knows, for a :class:`rankfeed.Loader`.

    Every rank reads the whole stream and takes its samples by counting (sample i of a global batch is rank
    i mod world_size's), so the factory has to yield the same on all ranks. One that can do better has a parameter
    named ``shard``, and yields the share of rank ``index`` of ``count`` alone, as long as it comes.

    Args:
        factory: called for each epoch, returns an iterable of samples: dicts, tuples, whatever can be collated. It
            is given by name those of these parameters that it has: ``epoch`` (int), ``shard`` (two ints, index and
            count), ``start`` (int, samples of its stream to leave out: a faster way to resume). An iterable by
            itself will do, if it can be iterated anew; an iterator is good for one epoch.
        ragged: names of fields (positions, in a tuple) whose first dimension differs, though the first batch might
            not show it. The fields of all batches are those of the first one over all ranks.

    Raises:
        ArgumentError: it is neither, or has parameters that nobody fills in.

    Examples:
        >>> import rankfeed as rf
        >>> stream = from_iterable(lambda: ({"x": number} for number in range(7)))
        >>> loader = rf.Loader(stream, batch_size=2, topology=rf.Topology(rank=1, world_size=2))
        >>> [batch["x"].tolist() for batch in loader]
        [[1, 3], [5]]
    """
    return Stream(factory, ragged)


class _Again:
    """An iterable by itself, as a factory."""

    def __init__(self, iterable: Any) -> None:
        self._iterable = iterable

    def __call__(self) -> Any:
        # One that is told a place keeps it, and would begin the next epoch there.
        return copy.copy(self._iterable) if hasattr(self._iterable, "load_state_dict") else self._iterable

    def __repr__(self) -> str:
        return repr(self._iterable)


def _asks(factory: Callable[..., Any]) -> tuple[str, ...]:
    """Which of what is offered a factory has parameters for."""
    try:
        parameters = inspect.signature(factory).parameters.values()
    except (TypeError, ValueError):  # of some builtin functions it cannot be told
        return ()
    needed = [
        each.name
        for each in parameters
        if each.default is each.empty
        and each.kind not in (each.VAR_POSITIONAL, each.VAR_KEYWORD)
        and (each.name not in _OFFERED or each.kind is each.POSITIONAL_ONLY)
    ]
    if needed:
        raise ArgumentError(
            "the factory of a stream has parameters that nobody fills in",
            expected=f"none but {', '.join(_OFFERED)}",
            found=", ".join(needed),
            remedy="bind them with functools.partial",
        )
    return tuple(each.name for each in parameters if each.name in _OFFERED)


def _stateful(stream: object) -> bool:
    return hasattr(stream, "state_dict") and hasattr(stream, "load_state_dict")


def _raised(summary: str, error: BaseException, where: str) -> StreamError:
    return StreamError(summary, found=describe_error(error), where=where)

"""Any iterable of samples, opened for each epoch, at its start or at the position of a checkpoint."""

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
#: Parameters that a factory may have.
_FACTORY_PARAMETERS = ("epoch", "shard", "start")
#: Samples skipped in one call, and seconds between messages about the progress.
_SKIP_CHUNK, _REPORT_INTERVAL = 1 << 16, 10.0


@dataclass(frozen=True)
class StreamSnapshot:
    """The stream's own ``state_dict``, as JSON, after a number of samples of the epoch were read."""

    num_read: int
    content: bytes


class Stream:
    """Samples of unknown number, in the order in which they come. Made by :func:`from_iterable`.

    Attributes:
        sharded: whether each rank has a stream of its own; otherwise all ranks read the same one.
        declared: fields that are ragged, even if the first batch does not show it.
        fields: these by name.
    """

    def __init__(
        self, factory: Callable[..., Iterable[Any]] | Iterable[Any], ragged: Sequence[str | int] = ()
    ) -> None:
        is_factory = isinstance(factory, type) or (callable(factory) and not hasattr(factory, "__iter__"))
        if not is_factory and not hasattr(factory, "__iter__"):
            raise ArgumentError(
                "this is no stream",
                expected="a function that returns an iterable of samples",
                found=type(factory).__name__,
            )
        self._factory: Callable[..., Iterable[Any]] = (
            cast(Any, factory) if is_factory else _IterableFactory(factory)
        )
        self._parameters = _factory_parameters(self._factory)
        self.sharded = "shard" in self._parameters
        self.declared = Declared("the stream", "from_iterable(factory", None, Declared.names(ragged))
        self.fields = {name: Field("ragged") for name in self.declared.ragged}
        #: The last iterator that the factory returned: it cannot be begun again.
        self._used: object = None

    def __repr__(self) -> str:
        return f"from_iterable({self._factory!r})"

    def open(
        self,
        *,
        epoch: int = 0,
        shard: tuple[int, int] = (0, 1),
        start: int = 0,
        snapshot: StreamSnapshot | None = None,
    ) -> StreamReader:
        """Begin an epoch, or continue it."""
        arguments = {"epoch": epoch, "shard": shard, "start": start}
        where = f"epoch {epoch}, rank {shard[0]}"
        if self.sharded:  # its state is that of one rank, and a checkpoint is the same on all ranks
            snapshot = None
        try:
            iterable = self._factory(**{name: arguments[name] for name in self._parameters})
            if "epoch" not in self._parameters and hasattr(iterable, "set_epoch"):
                iterable.set_epoch(epoch)
            iterator = iter(iterable) if snapshot is None or not _is_stateful(iterable) else None
        except (Exception, SystemExit) as error:
            raise _stream_error("the factory of the stream raised", error, where) from error
        if iterator is iterable:
            if iterable is self._used:
                raise StreamError(
                    "an iterator can be read only once, and this one was begun before",
                    found=f"the same {type(iterable).__name__} again",
                    where=where,
                    remedy="pass a function that opens the stream each time it is called",
                )
            self._used = iterable
        if "start" in self._parameters:
            return StreamReader(iter(iterable) if iterator is None else iterator, None, start, where)
        owner: Any = iterable if _is_stateful(iterable) else iterator if _is_stateful(iterator) else None
        if self.sharded:
            owner = None
        num_read = 0
        if snapshot is not None and owner is not None:
            try:
                owner.load_state_dict(msgspec.json.decode(snapshot.content))
                iterator = iter(iterable) if iterator is None else iterator
            except (Exception, SystemExit) as error:
                raise _stream_error("load_state_dict() of the stream raised", error, where) from error
            num_read = snapshot.num_read
        assert iterator is not None
        reader = StreamReader(iterator, owner, num_read, where)
        reader.skip(start - num_read)
        if reader.num_read < start and not self.sharded:
            raise StateError(
                "the position of the checkpoint is beyond the end of the stream",
                expected=f"at least {start} samples",
                found=reader.num_read,
                where=where,
            )
        return reader


class StreamReader:
    """An open stream; counts the samples read.

    Attributes:
        num_read: samples of the epoch that were read or skipped.
        last: the last sample, in a list; an empty list before the first one.
    """

    def __init__(self, iterator: Iterator[Any], owner: Any, num_read: int, where: str) -> None:
        self.num_read = num_read
        self.last: list[Any] = []
        self._iterator, self._owner, self._where = iterator, owner, where
        self._recorded: list[Any] = []
        self._to_record = 0

    def record(self, number: int) -> None:
        """Keep the next ``number`` samples for `take_recorded`."""
        self._to_record = number

    def take_recorded(self) -> list[Any]:
        """The recorded samples; ends the recording."""
        recorded, self._recorded, self._to_record = self._recorded, [], 0
        return recorded

    def __iter__(self) -> StreamReader:
        return self

    def __next__(self) -> Any:
        try:
            sample = next(self._iterator)
        except StopIteration:
            raise
        except (Exception, SystemExit) as error:
            raise _stream_error("the stream raised", error, f"sample {self.num_read}, {self._where}") from error
        self.num_read += 1
        self.last = [sample]
        if self._to_record > len(self._recorded):
            self._recorded.append(sample)
        return sample

    def skip(self, number: int) -> None:
        """Read ``number`` samples, fewer where the stream ends, and keep only the last one."""
        started = reported = time.monotonic()
        first, end = self.num_read, self.num_read + number
        while self.num_read < end:
            chunk = min(_SKIP_CHUNK, end - self.num_read)
            try:
                skipped = deque(enumerate(islice(self._iterator, chunk), 1), maxlen=1)
            except (Exception, SystemExit) as error:
                where = f"after sample {self.num_read}, {self._where}"
                raise _stream_error("the stream raised while samples were skipped", error, where) from error
            if skipped:
                self.num_read += skipped[0][0]
                self.last = [skipped[0][1]]
            if not skipped or skipped[0][0] < chunk:
                return
            now = time.monotonic()
            if now - reported > _REPORT_INTERVAL:
                reported = now
                left = (end - self.num_read) * (now - started) / (self.num_read - first)
                _log.warning(
                    "skipping to the position of the checkpoint: %d of %d samples, about %.0f s left (%s)",
                    self.num_read,
                    end,
                    left,
                    self._where,
                )

    def snapshot(self) -> StreamSnapshot | None:
        """The stream's own state at this position; None if there is none, or none that JSON can represent."""
        if self._owner is None:
            return None
        try:
            state = self._owner.state_dict()
            content = msgspec.json.encode(state)
            if msgspec.json.decode(content) == state:
                return StreamSnapshot(self.num_read, content)
            found = "JSON changes it"
        except Exception as error:
            found = f"{type(error).__name__}: {safe_str(error)}"
        warnings.warn(
            f"the stream's own state_dict() cannot be saved ({found}): a job that resumes will read "
            "from the start of the epoch and skip",
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
    """A stream of samples of unknown length, for a :class:`rankfeed.Loader`.

    Every rank reads the whole stream and takes its samples by counting (sample i of a global batch belongs to rank
    i mod world_size), so the factory must yield the same samples on all ranks. A factory with a parameter named
    ``shard`` yields the share of rank ``index`` of ``count`` only, of any length.

    Args:
        factory: called for each epoch, returns an iterable of samples: dicts, tuples, or anything that can be
            collated. It is passed by name those of these parameters that it has: ``epoch`` (int), ``shard`` (two
            ints, index and count), ``start`` (int, samples of its stream to leave out, which makes resuming
            faster). An iterable works too, if it can be iterated repeatedly; an iterator lasts for one epoch.
        ragged: names of fields (positions, in a tuple) whose first dimension varies, even if the first batch does
            not show it. The fields of all batches are those of the first one over all ranks.

    Raises:
        ArgumentError: it is neither, or has other parameters without a default.

    Examples:
        >>> import rankfeed as rf
        >>> stream = from_iterable(lambda: ({"x": number} for number in range(7)))
        >>> loader = rf.Loader(stream, batch_size=2, topology=rf.Topology(rank=1, world_size=2))
        >>> [batch["x"].tolist() for batch in loader]
        [[1, 3], [5]]
    """
    return Stream(factory, ragged)


class _IterableFactory:
    """Returns an iterable each time it is called."""

    def __init__(self, iterable: Any) -> None:
        self._iterable = iterable

    def __call__(self) -> Any:
        # An iterable that has loaded a state keeps it, and would begin the next epoch there.
        return copy.copy(self._iterable) if hasattr(self._iterable, "load_state_dict") else self._iterable

    def __repr__(self) -> str:
        return repr(self._iterable)


def _factory_parameters(factory: Callable[..., Any]) -> tuple[str, ...]:
    """Which of the parameters for factories this one has."""
    try:
        parameters = inspect.signature(factory).parameters.values()
    except (TypeError, ValueError):  # some builtin functions have no signature
        return ()
    unknown = [
        each.name
        for each in parameters
        if each.default is each.empty
        and each.kind not in (each.VAR_POSITIONAL, each.VAR_KEYWORD)
        and (each.name not in _FACTORY_PARAMETERS or each.kind is each.POSITIONAL_ONLY)
    ]
    if unknown:
        raise ArgumentError(
            "the factory of a stream has unknown parameters without a default",
            expected=f"only {', '.join(_FACTORY_PARAMETERS)}",
            found=", ".join(unknown),
            remedy="bind them with functools.partial",
        )
    return tuple(each.name for each in parameters if each.name in _FACTORY_PARAMETERS)


def _is_stateful(stream: object) -> bool:
    return hasattr(stream, "state_dict") and hasattr(stream, "load_state_dict")


def _stream_error(summary: str, error: BaseException, where: str) -> StreamError:
    return StreamError(summary, found=describe_error(error), where=where)

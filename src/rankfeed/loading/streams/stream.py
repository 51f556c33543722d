"""Any iterable of samples, opened for each epoch, at its start or at the position of a checkpoint."""

from __future__ import annotations

import copy
import inspect
import logging
import time
import warnings
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import islice
from typing import Any, cast

import msgspec
import numpy as np
import torch

from rankfeed._util.signals import reraise_interrupt
from rankfeed.columns.field import Field
from rankfeed.errors import ArgumentError, StateError, StreamError, describe_error, safe_str
from rankfeed.loading._compat import has_shuffle_buffer
from rankfeed.sources.source import Declared
from rankfeed.storage.checksum import digest_of

_log = logging.getLogger("rankfeed")
#: Parameters that a factory may have.
_FACTORY_PARAMETERS = ("epoch", "shard", "start")
#: Samples skipped between looks at the clock, and seconds between messages about the progress.
_SKIP_CHUNK, _REPORT_INTERVAL = 1 << 16, 10.0
#: Samples before a position whose fingerprint tells the order of a stream.
_SAMPLES_COMPARED = 3
#: Characters or bytes of a string, and elements of a list, that are part of a fingerprint.
_LENGTH_COMPARED, _ELEMENTS_COMPARED = 4096, 64
_INTEGERS = frozenset({torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool})


@dataclass(frozen=True)
class StreamSnapshot:
    """The stream's own ``state_dict``, as JSON, after a number of samples of the epoch were read."""

    num_read: int
    content: bytes


@dataclass(frozen=True)
class StreamPosition:
    """A position in a stream, such as that after a step."""

    num_read: int  # samples of the stream before it
    snapshot: StreamSnapshot | None = None  # the stream's own state there or before it
    fingerprint: str = ""  # of the last samples, if all ranks read them (see `StreamReader.fingerprint`)


START = StreamPosition(0)


class Stream:
    """Samples of unknown number, in the order in which they come. Made by :func:`from_iterable`."""

    def __init__(
        self, factory: Callable[..., Iterable[Any]] | Iterable[Any], ragged: Sequence[str | int] = ()
    ) -> None:
        is_factory = isinstance(factory, type) or (callable(factory) and not hasattr(factory, "__iter__"))
        if not is_factory and not hasattr(factory, "__iter__"):
            raise ArgumentError(
                "this is not a stream",
                expected="a function that returns an iterable of samples",
                found=type(factory).__name__,
            )
        self._given = factory
        self._factory: Callable[..., Any] = cast(Any, factory) if is_factory else partial(_rewound, factory)
        self._parameters = _factory_parameters(self._factory)
        #: Whether each rank has a stream of its own; otherwise all ranks read the same one.
        self.sharded = "shard" in self._parameters
        self.declared = Declared("the stream", "from_iterable(factory", None, Declared.names(ragged))
        self.fields = {name: Field("ragged") for name in self.declared.ragged}
        #: The last iterator that the factory returned: it cannot be begun again.
        self._used: object = None

    def __repr__(self) -> str:
        return f"from_iterable({self._given!r})"

    def open(self, *, epoch: int = 0, shard: tuple[int, int] = (0, 1), at: StreamPosition = START) -> StreamReader:
        """Open it at a position."""
        start, snapshot = at.num_read, at.snapshot
        arguments = {"epoch": epoch, "shard": shard, "start": start}
        where = f"epoch {epoch}, rank {shard[0]}"
        # The state of a stream of one rank is not kept: a checkpoint is the same on all ranks.
        keeps_state = not self.sharded and "start" not in self._parameters
        own = None if snapshot is None else msgspec.json.decode(snapshot.content)
        step = "the factory of the stream"
        try:
            iterable: Any = self._factory(**{name: arguments[name] for name in self._parameters})
            if "epoch" not in self._parameters and hasattr(iterable, "set_epoch"):
                iterable.set_epoch(epoch)
            keeps_state = keeps_state and not has_shuffle_buffer(iterable)
            loads = keeps_state and own is not None
            resumes = loads and _is_stateful(iterable)
            if resumes:
                step = "load_state_dict() of the stream"
                iterable.load_state_dict(own)
            iterator = iter(iterable)
            if loads and not resumes and _is_stateful(iterator):
                step, resumes = "load_state_dict() of the stream", True
                iterator.load_state_dict(own)
        except (Exception, SystemExit) as error:
            raise _stream_error(f"{step} raised", error, where) from error
        if iterator is iterable and not resumes:
            if iterable is self._used:
                raise StreamError(
                    "an iterator can be read only once, and this one was begun before",
                    found=f"the same {type(iterable).__name__} again",
                    where=where,
                    remedy="pass a function that opens the stream each time it is called",
                )
            self._used = iterable
        if "start" in self._parameters:
            return StreamReader(iterator, None, start, where)
        owner = iterable if _is_stateful(iterable) else iterator if _is_stateful(iterator) else None
        loaded = snapshot if resumes else None
        num_read = 0 if loaded is None else loaded.num_read
        reader = StreamReader(iterator, owner if keeps_state else None, num_read, where, loaded)
        reader.skip(start - num_read)
        if reader.num_read < start and not self.sharded:
            raise StateError(
                "the position of the checkpoint is beyond the end of the stream",
                expected=f"at least {start} samples",
                found=reader.num_read,
                where=where,
            )
        read = reader.fingerprint()
        if (
            at.fingerprint not in ("", read) and not resumes and next(reader, None) is not None
        ):  # else the epoch has ended: nothing can be lost
            raise StateError(
                "the stream yields other samples than in the job that saved, or the same in another order, so "
                "that skipping as many would lose some and repeat others",
                expected=f"samples before position {start} with the fingerprint {at.fingerprint}",
                found=read,
                where=where,
                remedy="let the stream yield the same order whenever it is opened: give its shuffle a fixed seed, "
                "or one that depends on the epoch; if only the content of samples is random, give them a __key__",
            )
        return reader


class StreamReader:
    """An open stream; counts the samples read."""

    def __init__(
        self, iterator: Iterator[Any], owner: Any, num_read: int, where: str, loaded: StreamSnapshot | None = None
    ) -> None:
        self._loaded = loaded
        self.num_read = num_read  # samples of the epoch that were read or skipped
        self._recent: deque[Any] = deque(maxlen=_SAMPLES_COMPARED)
        self.recorded: list[Any] | None = None  # if not None, all samples read
        self._iterator, self._owner, self._where = iterator, owner, where

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
        self._recent.append(sample)
        if self.recorded is not None:
            self.recorded.append(sample)
        return sample

    @property
    def last(self) -> list[Any]:
        """The last sample; empty before the first one."""
        return [self._recent[-1]] if self._recent else []

    def fingerprint(self) -> str:
        """A hash of the last samples, by which ranks and jobs compare their streams; "" if some were not read."""
        is_complete = len(self._recent) == min(self.num_read, _SAMPLES_COMPARED)
        return samples_fingerprint(self._recent) if is_complete else ""

    def skip(self, count: int) -> None:
        """Read ``count`` samples, fewer where the stream ends, and keep only the last one."""
        started = reported = time.monotonic()
        for done, _ in enumerate(islice(self, count), 1):
            if done % _SKIP_CHUNK == 0 and (now := time.monotonic()) - reported > _REPORT_INTERVAL:
                reported = now
                _log.warning(
                    "skipping to the position of the checkpoint: %d of %d samples, about %.0f s left (%s)",
                    done,
                    count,
                    (count - done) * (now - started) / done,
                    self._where,
                )

    def snapshot(self) -> StreamSnapshot | None:
        """The stream's own state at this position; None if there is none, or none that JSON can represent."""
        if self._owner is None:
            return None
        if self._loaded is not None and self._loaded.num_read == self.num_read:
            return self._loaded  # some streams take it in with the first sample only (Hugging Face datasets 5.2)
        try:
            state = self._owner.state_dict()
            content = msgspec.json.encode(state)
            if msgspec.json.decode(content) == state:
                return StreamSnapshot(self.num_read, content)
            problem = "JSON changes it"
        except Exception as error:
            reraise_interrupt(error)
            problem = f"{type(error).__name__}: {safe_str(error)}"
        warnings.warn(
            f"the stream's own state_dict() cannot be saved ({problem}): a job that resumes will read "
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


def _rewound(iterable: Any) -> Any:
    # An iterable that has loaded a state keeps it, and would begin the next epoch there.
    return copy.copy(iterable) if hasattr(iterable, "load_state_dict") else iterable


def _factory_parameters(factory: Callable[..., Any]) -> tuple[str, ...]:
    """Which of the parameters for factories this one has."""
    try:
        parameters = inspect.signature(factory).parameters.values()
    except (TypeError, ValueError):  # some builtin functions have no signature
        return ()
    unknown = [
        parameter.name
        for parameter in parameters
        if parameter.default is parameter.empty
        and parameter.kind not in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD)
        and (parameter.name not in _FACTORY_PARAMETERS or parameter.kind is parameter.POSITIONAL_ONLY)
    ]
    if unknown:
        raise ArgumentError(
            "the factory of a stream has unknown parameters without a default",
            expected=f"only {', '.join(_FACTORY_PARAMETERS)}",
            found=", ".join(unknown),
            remedy="bind them with functools.partial",
        )
    return tuple(parameter.name for parameter in parameters if parameter.name in _FACTORY_PARAMETERS)


def samples_fingerprint(samples: Iterable[Any]) -> str:
    """A hash by which streams are compared: of the samples' keys, or of their strings and integers.

    Floats and arrays of several elements are left out, since a stream may draw them at random: different samples
    may have equal fingerprints, but streams with different fingerprints are different.
    """
    pieces: list[bytes] = []
    for sample in samples:
        has_key = isinstance(sample, Mapping) and "__key__" in sample
        _add_pieces(sample["__key__"] if has_key else sample, pieces)
    return digest_of(b"".join(pieces))


def _add_pieces(value: Any, pieces: list[bytes]) -> None:
    """Append the strings and integers of a sample, of long ones the beginning and the length."""
    if isinstance(value, str):
        pieces += b"s%d:" % len(value), value[:_LENGTH_COMPARED].encode(errors="replace")
    elif isinstance(value, int):
        pieces.append(b"i%d," % value)
    elif isinstance(value, dict):
        for name, part in value.items():
            _add_pieces(name, pieces)
            _add_pieces(part, pieces)
    elif isinstance(value, (bytes, bytearray)):
        pieces += b"b%d:" % len(value), bytes(value[:_LENGTH_COMPARED])
    elif isinstance(value, (list, tuple)):
        pieces.append(b"l%d:" % len(value))
        for part in value[:_ELEMENTS_COMPARED]:
            _add_pieces(part, pieces)
    elif isinstance(value, (np.generic, np.ndarray)):
        if value.size == 1 and value.dtype.kind in "iub":
            _add_pieces(value.item(), pieces)
    elif isinstance(value, torch.Tensor):
        if value.numel() == 1 and value.dtype in _INTEGERS:
            _add_pieces(value.item(), pieces)
    elif isinstance(value, Mapping):
        _add_pieces(dict(value), pieces)


def _is_stateful(stream: object) -> bool:
    return hasattr(stream, "state_dict") and hasattr(stream, "load_state_dict")


def _stream_error(summary: str, error: BaseException, where: str) -> StreamError:
    return StreamError(summary, found=describe_error(error), where=where)

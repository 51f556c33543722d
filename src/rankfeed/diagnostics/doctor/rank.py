"""One rank of a run: builds the user's loader, reads it as a training loop does, and reports what it receives."""

import atexit
import faulthandler
import gc
import inspect
import io
import multiprocessing
import os
import pickle
import signal
import time
import traceback
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from itertools import compress
from pathlib import Path
from typing import Any

import numpy as np

from rankfeed._util.imports import import_function
from rankfeed._util.workers import Channel
from rankfeed.diagnostics.batch_columns import columns
from rankfeed.diagnostics.doctor import inspection
from rankfeed.diagnostics.doctor import rows as shapes
from rankfeed.diagnostics.doctor.records import Built, Event, Job, Phase, Record, RowKey, RunFailure, Step
from rankfeed.diagnostics.doctor.rereading import BATCHES, reread
from rankfeed.diagnostics.keys import USUAL, Key, ids_in, key_array, required_ids
from rankfeed.diagnostics.samplers import attribute
from rankfeed.diagnostics.tagged import Tagged, record
from rankfeed.errors import AuditError, safe_str

#: Longer text is reported as a digest; characters of a line that is shown.
_LONG, _LINE = 200, 500
#: Modules that call the user's code, which tracebacks leave out.
_CALLERS = (__name__, import_function.__module__, "importlib")
#: Bytes of data above which a dataset is not copied.
_COPIED = 256 << 20
#: Seconds between measurements of memory, and how much longer than a measurement the pause is.
_PAUSE, _RARELY = 0.2, 10


def run_rank(job: Job, message: bytearray, channel: Channel) -> None:
    """Runs in a worker process: the first message says which rank it is, the second one that it may end."""
    if not message:
        atexit._run_exitfuncs()  # what loaders clean up in the end
        os._exit(0)
    rank, environ, output = pickle.loads(message)  # noqa: S301  (from our own code)
    os.setsid()
    for descriptor in (1, 2):
        os.dup2(os.open(output, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600), descriptor)
    os.environ.update(environ)
    # Where processes that are killed leave their sockets: a directory that is deleted after the run.
    multiprocessing.current_process()._config["tempdir"] = os.path.dirname(output)  # type: ignore[attr-defined]
    np.random.seed()  # as in a process that begins; Python's own generator does so by itself
    faulthandler.register(signal.SIGUSR1, all_threads=False)
    read(job, rank, lambda record: channel.send(pickle.dumps(record)))


def read(job: Job, rank: int, report: Callable[[Record], object]) -> None:
    """Do a rank's part of a run; the variables of torchrun are set."""
    reader = LoaderReader(job, rank, report)
    try:
        reader.init_group()
        with reader.memory:
            reader.read()
        report(Event("done"))
    except BaseException as error:  # SystemExit of the user's code, too
        reader.report_handles()
        ours = reader.phase == Phase.IDS and isinstance(error, AuditError)
        text = _encodable(f"{type(error).__name__}: {safe_str(error)}").strip()
        # From the user's code on; what a DataLoader's worker raised has its traceback in the text.
        first = None if ours or "\nOriginal Traceback" in text else error.__traceback__
        while first is not None and first.tb_frame.f_globals.get("__name__", "").startswith(_CALLERS):
            first = first.tb_next
        lines = traceback.format_exception(type(error), error, first) if first is not None else []
        trace = _encodable("".join(lines)).splitlines()
        if len(text) > 2000:  # the error that a worker raised comes after its traceback
            text = f"{text[:200]}\n  ...\n{text[-1800:].partition(chr(10))[2] or text[-1800:]}"
        report(RunFailure("raised", reader.phase, text, [line[:_LINE] for line in trace[-10:]]))


class LoaderReader:
    """Reads the loader of a factory and reports each batch."""

    def __init__(self, job: Job, rank: int, report: Callable[[Record], object]) -> None:
        self.job, self.rank, self.report = job, rank, report
        self.phase: str = Phase.START
        self._key: Key | None = job.key
        self._subset: list[int] | None = None
        self._seconds_of_a_batch = 0.0  # the last one
        self._ours = False
        self._handles: inspection.Handles | None = None
        self._measure_at = 0.0
        self.memory = inspection.ImportMeter()

    def init_group(self) -> None:
        import torch
        import torch.distributed as dist
        import torch.multiprocessing

        torch.seed()  # as in a process that begins
        dist.init_process_group("gloo")
        dist.barrier()  # all are connected before a factory may end one of them
        make = dist.init_process_group

        def init_process_group(*args: Any, **options: Any) -> None:
            if not dist.is_initialized():
                make(*args, **options)

        dist.init_process_group = init_process_group  # factories from training scripts may call it, too
        torch.multiprocessing.set_start_method(self.job.start_method, force=True)

    def read(self) -> None:
        self._enter(Phase.IMPORT)
        factory = import_function(self.job.factory)
        gc.freeze()  # so that a collection in a forked worker does not copy these pages
        loader, built = self._build(factory, 0)
        self.report(built)
        self._set_epoch(loader, 0)
        if self.job.resume is not None:
            import torch

            self._enter(Phase.STATE)
            states = sorted(Path(self.job.resume).glob("*.pt"), key=lambda path: int(path.stem))
            loader.load_state_dict(torch.load(states[self.rank % len(states)], weights_only=False))
        for epoch in range(self.job.epochs):
            if epoch and "epoch" in _accepted(factory):
                loader, _ = self._build(factory, epoch)
            if epoch:
                self._set_epoch(loader, epoch)
            self.report(Event("epoch", epoch))
            self.report(inspection.sizes(self.memory.bytes()))
            whole = self._epoch(loader, epoch, length=built.length, resumes=built.resumes and not epoch)
            self.report(Event("whole" if whole else "cut"))
            if not whole:
                return
        if self.job.reads_again:
            self._enter("reading batches again")
            for again in reread(loader, self._seconds_of_a_batch, copies=built.bytes < _COPIED):
                self.report(again)

    def _enter(self, phase: str) -> None:
        self.phase = phase
        self.report(phase)

    def _set_epoch(self, loader: Any, epoch: int) -> None:
        if self.job.set_epoch:
            self._enter(f"calling set_epoch({epoch})")
            inspection.set_epoch(loader, epoch)

    def _build(self, factory: Callable[..., Any], epoch: int) -> tuple[Any, Built]:
        from torch.utils.data import DataLoader

        self._enter("in the factory")
        job, accepted = self.job, _accepted(factory)
        known: dict[str, Any] = {"num_workers": job.workers, "workers": job.workers, "epoch": epoch}
        known |= {"rank": self.rank, "world_size": job.ranks, "start_method": job.start_method}
        known |= {"multiprocessing_context": job.start_method if job.workers else None}
        start, before = time.perf_counter(), self.memory.bytes()
        loader = factory(**{name: value for name, value in known.items() if name in accepted})
        grown, seconds = self.memory.bytes() - before, time.perf_counter() - start
        if isinstance(loader, tuple) and len(loader) == 2 and isinstance(loader[0], Iterable):
            batches, key = loader
            if isinstance(key, (str, int)) or (callable(key) and not hasattr(key, "__iter__")):
                loader, self._key = batches, key if self._key is None else self._key
        iterable = hasattr(loader, "__iter__") or hasattr(loader, "__getitem__")
        if isinstance(loader, (Mapping, str, bytes)) or not iterable:
            raise TypeError(f"the factory returned no iterable of batches but {type(loader).__name__}")
        if isinstance(loader, (tuple, list)) and any(isinstance(part, DataLoader) for part in loader):
            raise TypeError(f"the factory returned {len(loader)} things, with loaders among them: return one")
        if self._key is None and isinstance(own := attribute(loader, "id_column"), str):
            self._key = own
        self._ours = type(loader).__module__.startswith("rankfeed.")
        if not job.workers:
            inspection.without_workers(loader)
        built = inspection.described(loader, seconds=seconds, grown=grown, start_method=job.start_method)
        self._subset = inspection.subset(loader)
        record(loader, keep=BATCHES if job.reads_again else 0)
        return loader, built

    def _epoch(self, loader: Any, epoch: int, *, length: int | None, resumes: bool) -> bool:
        """Read an epoch; whether to its end."""
        job, deadline = self.job, time.monotonic() + self.job.max_seconds
        self._enter(f"in epoch {epoch}, step 0")
        self._handles = inspection.Handles() if job.start_method == "fork" and not epoch else None
        state: bytes | None = None
        start = time.perf_counter()
        for steps, batch in enumerate(iter(loader), 1):
            self._seconds_of_a_batch = waited = time.perf_counter() - start
            if state is not None:  # there is a batch to resume with
                Path(str(job.states), f"{self.rank}.pt").write_bytes(state)
                self.report(Event("state", steps - 1))
            if steps > job.max_steps or time.monotonic() > deadline:
                return False
            self.report(self._step(batch, waited))
            if self._handles is not None and steps in (1, 4):
                self._handles.look_at_children()
            # Of an unknown length, the last power of two is half an epoch or more.
            is_half = steps.bit_count() == 1 if length is None else steps == max(1, length // 2)
            state = self._state(loader) if resumes and job.states is not None and is_half else None
            self._enter(f"in epoch {epoch}, step {steps}")
            if (now := time.monotonic()) > self._measure_at:
                self.report(inspection.sizes(self.memory.bytes()))
                after = time.monotonic()
                self._measure_at = after + max(_PAUSE, _RARELY * (after - now))
            time.sleep(job.step_seconds)
            start = time.perf_counter()
        self.report(inspection.sizes(self.memory.bytes()))
        self.report_handles()
        return True

    def report_handles(self) -> None:
        """Report the files that workers read through one handle, also if reading failed while they live."""
        if self._handles is not None:
            self._handles.look_at_children()
            for moved in self._handles.moved():
                self.report(moved)
            self._handles = None

    def _state(self, loader: Any) -> bytes | None:
        """The state of a loader; None if it wraps something that has none."""
        import torch

        self._enter("taking the state")
        try:
            state = loader.state_dict()
        except (AttributeError, NotImplementedError):
            return None
        content = io.BytesIO()
        torch.save(state, content)
        return content.getvalue()

    def _step(self, batch: Any, waited: float) -> Step:
        origin = batch if isinstance(batch, Tagged) else Tagged(batch, None)
        batch, indices = origin.batch, origin.indices
        before, self.phase = self.phase, Phase.IDS
        ids = self._ids(batch)
        self.phase = before
        fields = columns(batch, len(indices) if indices is not None else None)
        if self._ours and isinstance(batch, dict) and "valid" in batch:
            kept = np.asarray(batch["valid"], bool)  # other rows are padding
            fields = {
                name: column[kept] if isinstance(column, np.ndarray) else [*compress(column, kept)]
                for name, column in fields.items()
            }
            ids = None if ids is None else [*compress(ids, kept)]
        hashes = shapes.hashed(fields)
        shingles, tokens = ([], 0) if ids is not None or indices is not None else shapes.tokens(fields)
        return Step(
            rows=len(ids) if ids is not None else next(map(len, hashes.values()), None),
            ids=ids,
            indices=indices,
            dropped=origin.dropped,
            base=[self._subset[index] for index in indices or ()] if self._subset is not None else None,
            fields=hashes,
            ends={} if ids is not None else shapes.all_ends(fields),
            shingles=shingles,
            tokens=tokens,
            waited=waited,
            worker=origin.worker,
            streams=origin.streams,
        )

    def _ids(self, batch: Any) -> list[RowKey] | None:
        """Declared ids; None if the key was not declared and the usual one does not exist."""
        if self._key is None:
            with suppress(AuditError, TypeError):
                return _named(values) if (values := ids_in(batch, USUAL)) is not None else None
            return None
        if isinstance(self._key, str) and ":" in self._key:
            self._key = import_function(self._key)
        return _named(required_ids(batch, self._key))


def _accepted(factory: Callable[..., Any]) -> set[str]:
    with suppress(ValueError, TypeError):  # something built in
        kinds = (inspect.Parameter.KEYWORD_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
        parameters = inspect.signature(factory).parameters.values()
        return {parameter.name for parameter in parameters if parameter.kind in kinds}
    return set()


def _named(values: Any) -> list[RowKey]:
    """Ids that are numbers or short text as they are, others by their digests."""
    keys = key_array(values)
    if keys.dtype.kind == "i":
        numbers: list[RowKey] = keys.tolist()
        return numbers
    if isinstance(values, (list, tuple)) and all(isinstance(key, str) and len(key) < _LONG for key in values):
        return [_encodable(key) for key in values]
    return [key.hex() for key in keys.tolist()]


def _encodable(text: str) -> str:
    """Without the lone surrogates that file names may have and terminals may not."""
    return text.encode("utf-8", "backslashreplace").decode()

"""Examines any loader: runs its factory in real processes in several ways, and says what is wrong with it."""

import inspect
import sys
from collections.abc import Callable, Iterable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from math import inf
from pathlib import Path
from typing import Any

import msgspec

from rankfeed.diagnostics.doctor.cpus import cpus
from rankfeed.diagnostics.doctor.diagnosis import diagnose
from rankfeed.diagnostics.doctor.findings import Finding
from rankfeed.diagnostics.doctor.observed import Job
from rankfeed.diagnostics.doctor.probes import Probes
from rankfeed.diagnostics.doctor.seen import ProbeSeen
from rankfeed.errors import ArgumentError

#: Notes that say that not all was counted.
UNPROVEN = ("not-counted", "never-ends")
START_METHODS = ("fork", "spawn", "forkserver")


@dataclass(frozen=True)
class Examination:
    """What the doctor says of a loader.

    Attributes:
        factory: what was examined.
        findings: the gravest first.
        probes: what was seen.
    """

    factory: str
    findings: tuple[Finding, ...]
    probes: tuple[ProbeSeen, ...]

    @property
    def ok(self) -> bool:
        """Whether there are no errors."""
        return all(finding.severity != "error" for finding in self.findings)

    @property
    def sound(self) -> bool:
        """Whether there are neither errors nor warnings."""
        return all(finding.severity == "note" for finding in self.findings)

    @property
    def summary(self) -> str:
        """A line: what was done, and what came of it."""
        epochs = max((len(each) for probe in self.probes for each in (probe.epochs,)), default=0)
        first = self.probes[0].job if self.probes else None
        done = "nothing was read"
        if first is not None:
            methods = dict.fromkeys(probe.job.start_method for probe in self.probes)
            done = f"{first.ranks} ranks, {first.workers} workers, {' and '.join(methods)}, {epochs} epochs"
        counts = [
            f"{number} {name}{'s' if number > 1 else ''}"
            for name in ("error", "warning")
            if (number := sum(finding.severity == name for finding in self.findings))
        ]
        if counts:
            return f"{' and '.join(counts)} ({done})"
        notes = {finding.code for finding in self.findings}
        known = not notes & {*UNPROVEN, "missing-samples"}
        return f"{'sound: each sample once an epoch' if known else 'nothing wrong was found'} ({done})"

    def as_dict(self) -> dict[str, Any]:
        """All of it, JSON-able."""
        return {
            "factory": self.factory,
            "ok": self.ok,
            "sound": self.sound,
            "findings": [finding.as_dict() for finding in self.findings],
            "probes": [probe.figures() for probe in self.probes],
        }

    def __str__(self) -> str:
        return "\n".join([*map(str, self.findings), self.summary])


def examine(
    factory: str | Callable[..., Iterable[Any]],
    *,
    ranks: int = 2,
    workers: int = 2,
    start_methods: Sequence[str] = ("fork", "spawn"),
    epochs: int = 3,
    key: str | int | None = None,
    timeout: float = 60.0,
    max_steps: int = 1000,
    max_seconds: float = 60.0,
    step_seconds: float = 0.0,
    set_epoch: bool = True,
    resume_ranks: int | None = None,
    progress: Callable[[str], object] = lambda text: None,
    probes: Probes | None = None,
) -> Examination:
    """Run a loader's factory on several ranks and say what is wrong with what it delivers.

    All that is started here is ended here, whatever the factory does.

    Args:
        factory: ``module:function`` or ``file.py:function``, or a function at the top of a module. It is called on
            each rank and may take any of ``num_workers``, ``multiprocessing_context``, ``epoch``, ``rank`` and
            ``world_size`` by name. It returns an iterable of batches, or a pair of that and `key`.
        ranks: processes, on this machine, in one process group (gloo).
        workers: what it gets as ``num_workers``.
        start_methods: of processes: "fork", "spawn", "forkserver".
        epochs: how often the loader is read with the first of them; with others twice at most.
        key: where a batch has its samples' ids, as of `rankfeed.audit`; if None, "sample_id", or a hash of it all.
        timeout: seconds for the factory, for the first batch and for each next.
        max_steps: an epoch is cut after so many.
        max_seconds: an epoch is cut after so long.
        step_seconds: how long training takes for a batch, to see whether it would wait.
        set_epoch: whether the training loop calls ``set_epoch`` where there is one.
        resume_ranks: go on from a checkpoint on so many ranks, too.
        progress: told what is done.
        probes: what runs them, for several examinations with one import of torch.

    Raises:
        ArgumentError: an argument that cannot be meant.
        AuditError: no process could be started.
    """
    name = factory if isinstance(factory, str) else _name_of(factory)
    others = {} if resume_ranks is None else {"resume_ranks": resume_ranks}
    _check(name, ranks=ranks, workers=workers, epochs=epochs, max_steps=max_steps, **others)
    for value in (timeout, max_seconds, step_seconds or 1):
        if not 0 < value < inf:
            raise ArgumentError("a time is more than 0 seconds, and has an end", found=value)
    if not isinstance(key, (str, int, type(None))):
        raise ArgumentError(
            "a key is the name or place of a field",
            found=repr(key),
            remedy="have the factory return (batches, key), where key may be a function",
        )
    if not start_methods or not {*start_methods} <= {*START_METHODS}:
        raise ArgumentError("these are no start methods", expected=START_METHODS, found=start_methods)
    with nullcontext(probes) if probes is not None else Probes() as running:
        states = running.new_folder()
        job = Job(
            name="",
            factory=name,
            path=[path for path in sys.path if path],
            ranks=ranks,
            workers=workers,
            start_method=start_methods[0],
            epochs=epochs,
            timeout=timeout,
            max_steps=max_steps,
            max_seconds=max_seconds,
            key=key,
            set_epoch=set_epoch,
            step_seconds=step_seconds,
        )

        def run(**changes: Any) -> ProbeSeen:
            this = msgspec.structs.replace(job, **changes)
            this = msgspec.structs.replace(this, name=_called(this))
            progress(this.name)
            return running.run(this)

        seen = [run(states=str(states))]
        again: list[ProbeSeen] = []
        first = seen[0]
        endless = any(epoch.cut for rank in first.ranks for epoch in rank.epochs) and not first.beginnings
        if any(rank.epochs for rank in first.ranks) and not endless:
            for method in start_methods[1:]:
                seen.append(run(start_method=method, epochs=min(2, epochs)))
        if first.ok and len(first.epochs) == epochs:
            if workers:
                seen.append(run(workers=0, epochs=1))
            if ranks > 1:
                seen.append(run(ranks=1, workers=0, epochs=1))
            if all(rank.state_after is not None for rank in first.ranks):
                again.append(run(resume=str(states), epochs=1))
                elastic = all(rank.built is not None and rank.built.elastic for rank in first.ranks)
                other = resume_ranks or (max(1, ranks - 1) if elastic else ranks)
                if other != ranks:
                    again.append(run(resume=str(states), ranks=other, epochs=1))
    return Examination(name, diagnose(seen, cpus(), again), (*seen, *again))


def _called(job: Job) -> str:
    ranks = f"{job.ranks} rank{'s' if job.ranks > 1 else ''}"
    workers = f"{job.workers} workers ({job.start_method})" if job.workers else "no workers"
    return f"{'resumed, ' if job.resume else ''}{ranks}, {workers}"


def _name_of(factory: Callable[..., Any]) -> str:
    try:
        file, name = inspect.getsourcefile(inspect.unwrap(factory)), factory.__qualname__
    except (TypeError, AttributeError):
        file, name = None, ""
    if file is None or not Path(file).is_file() or "<" in name or inspect.ismethod(factory):
        raise ArgumentError(
            "other processes cannot import this factory",
            expected="a function at the top of a module",
            found=name or repr(factory),
        )
    return f"{Path(file).resolve()}:{name}"


def _check(name: str, **counts: Any) -> None:
    module, _, attribute = name.rpartition(":")
    if not module or not attribute:
        raise ArgumentError("this names no function", expected="module:function or file.py:function", found=name)
    for what, value in counts.items():
        least = 0 if what == "workers" else 1
        if not isinstance(value, int) or value < least:
            raise ArgumentError(f"{what} is a whole number of {least} or more", found=repr(value))

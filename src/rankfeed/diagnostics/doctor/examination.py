"""``examine``: runs the factory of any loader in real processes and judges what the loader delivers."""

import inspect
import tempfile
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from rankfeed._util.validate import check_choice, check_int, check_optional, check_seconds, invalid
from rankfeed.diagnostics.doctor.diagnosis import diagnose
from rankfeed.diagnostics.doctor.processes import run_job
from rankfeed.diagnostics.doctor.records import Job, Phase, RunLog
from rankfeed.diagnostics.doctor.resources import cpus
from rankfeed.diagnostics.findings import Finding, Judged
from rankfeed.errors import ArgumentError

START_METHODS = ("fork", "spawn", "forkserver")
#: What a caller may allow.
ALLOWED = ("shared", "shared-samples", "shared-batches", "replacement", "partial")
#: Names of the control runs begin with it.
_CONTROL = "control"


@dataclass(frozen=True)
class Examination(Judged):
    """The doctor's verdict of a loader.

    Attributes:
        factory: what was examined.
        findings: the most severe first.
        runs: what was observed.
    """

    factory: str
    findings: tuple[Finding, ...] = ()
    runs: tuple[RunLog, ...] = ()

    @property
    def summary(self) -> str:
        """One line: the verdict, the configurations that were run, and what they were compared with."""
        names = {run.job.name: "" if run.ok or run.cut else ": failed" for run in self.runs}
        others = (name + failed for name, failed in names.items() if not name.startswith(_CONTROL))
        configurations = "; ".join(others) or "nothing"
        meaning = ": each rank and worker delivers its share of what one process delivers"
        compared = ". Compared with: one process that reads everything, run twice (the control)"
        with_control = compared if any(name.startswith(_CONTROL) for name in names) else ""
        return f"{self.verdict}{meaning if self.verdict.sound else ''}. Run: {configurations}{with_control}"

    def as_dict(self) -> dict[str, Any]:
        """JSON-able."""
        return {"factory": self.factory, **self.verdict_as_dict(), "runs": [run.as_dict() for run in self.runs]}

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
    universe: int | None = None,
    allow: Iterable[str] = (),
    timeout: float = 60.0,
    max_steps: int = 1000,
    max_seconds: float = 60.0,
    step_seconds: float = 0.0,
    set_epoch: bool = True,
    other_ranks: int = 3,
    resume_ranks: int | None = None,
    progress: Callable[[str], object] = lambda text: None,
    preload: Sequence[str] = (),
) -> Examination:
    """Run a loader's factory on several ranks and judge what it delivers.

    It runs with the requested ranks and workers, on 3 ranks of which each seems to be on a node of its own
    (``LOCAL_RANK`` is 0) without workers, and twice on one rank without workers: this control says what there is
    to deliver. Every process that is started here is ended here.

    Args:
        factory: ``module:function`` or ``file.py:function``, or a function at the top of a module. It is called on
            each rank with those of ``num_workers``, ``multiprocessing_context``, ``epoch``, ``rank`` and
            ``world_size`` that it names, and returns an iterable of batches, or a pair of that and `key`. All
            epochs iterate the same object, unless the function names ``epoch``.
        ranks: processes, on this machine, in one process group (gloo).
        workers: passed as ``num_workers``.
        start_methods: of processes: "fork", "spawn", "forkserver".
        epochs: how often the loader is read with the first of them; with others once.
        key: ids of the samples: a path in the batch (``"id"``, ``"0.sample_id"``, ``"meta.k"``, 1) or
            ``"module:function"``; if None, ``sample_id``, else dataset indices, else content.
        universe: number of samples, if ids are 0 to n - 1.
        allow: "shared-samples" (or "shared") if ranks read the same samples on purpose (full validation on every
            rank), "shared-batches" if they do step by step (tensor-parallel peers), "replacement" if samples are
            drawn with replacement on purpose, "partial" if each epoch reads another part of the dataset on
            purpose.
        timeout: seconds for the factory and for each batch.
        max_steps: an epoch is cut after this many.
        max_seconds: an epoch is cut after this long.
        step_seconds: time that training takes for a batch, to see whether it would wait.
        set_epoch: whether ``set_epoch`` is called before each epoch where it exists.
        other_ranks: ranks of the run on several nodes; 1: leave it out.
        resume_ranks: resume from a checkpoint on this number of ranks, too.
        progress: called with the name of each run.
        preload: modules to import once, before ranks are forked, for many examinations that need the same.

    Raises:
        ArgumentError: an argument is invalid, or the function cannot be imported.
        WorkerError: no process could be started.
    """
    name = factory if isinstance(factory, str) else _name_of(factory)
    if not all(name.rpartition(":")[::2]):
        raise ArgumentError("this names no function", expected="module:function or file.py:function", found=name)
    allowed = [check_choice("allow", choice, ALLOWED) for choice in ([allow] if isinstance(allow, str) else allow)]
    methods = [check_choice("start_methods", method, START_METHODS) for method in start_methods]
    if not methods:
        raise invalid("start_methods", "at least one", start_methods)
    given: object = key
    if not (given is None or isinstance(given, (str, int))):
        raise invalid("key", "a path in the batch, or module:function", key)
    check_optional(check_int, "universe", universe, at_least=1)
    check_optional(check_int, "resume_ranks", resume_ranks, at_least=1)
    check_int("other_ranks", other_ranks, at_least=1)
    job = Job(
        name="",
        factory=name,
        ranks=check_int("ranks", ranks, at_least=1),
        workers=check_int("workers", workers, at_least=0),
        start_method=methods[0],
        epochs=check_int("epochs", epochs, at_least=1),
        timeout=check_seconds("timeout", timeout, above=0),
        max_steps=check_int("max_steps", max_steps, at_least=1),
        max_seconds=check_seconds("max_seconds", max_seconds, above=0),
        key=key,
        set_epoch=set_epoch,
        step_seconds=check_seconds("step_seconds", step_seconds),
    )

    def run(label: str = "", **changes: Any) -> RunLog:
        this = replace(job, **changes)
        this = replace(this, name=label or _called(this))
        progress(this.name)
        return run_job(this, preload)

    with tempfile.TemporaryDirectory(prefix="rankfeed-doctor-") as states:
        first = run(states=states)
        failures = [rank.failure for rank in first.ranks if rank.failure is not None]
        at_import = [failure for failure in failures if (failure.kind, failure.phase) == ("raised", Phase.IMPORT)]
        if len(at_import) == len(first.ranks):
            found = "\n".join([at_import[0].detail, *at_import[0].output[-6:]])
            raise ArgumentError("the factory cannot be imported", found=found, where=name)
        runs, controls, resumed = [first], [], []
        if any(rank.epochs for rank in first.ranks):
            if workers and not first.cut:
                runs += [run(start_method=method, epochs=1) for method in methods[1:]]
            if other_ranks > 1:
                runs.append(run(ranks=other_ranks, nodes=other_ranks, workers=0, epochs=min(2, epochs)))
            steps = max_steps * (ranks if first.cut else max(ranks, other_ranks))
            alone = {"ranks": 1, "workers": 0, "step_seconds": 0.0, "max_steps": steps}
            controls = [
                run(f"{_CONTROL} {number}, 1 rank, no workers", reads_again=number == 2, **alone)
                for number in (1, 2)
            ]
        if first.ok and all(rank.state_after is not None for rank in first.ranks):
            resumed.append(run(resume=states, epochs=min(2, epochs)))
            elastic = all(built.elastic for built in first.built)
            other = resume_ranks or (max(1, ranks - 1) if elastic else ranks)
            if other != ranks:
                resumed.append(run(resume=states, ranks=other, epochs=min(2, epochs)))
    findings = diagnose(runs, controls, cpus(), resumed, allowed, universe)
    return Examination(name, findings, (*runs, *controls, *resumed))


def _called(job: Job) -> str:
    ranks = f"{job.ranks} rank{'s' if job.ranks > 1 else ''}"
    workers = f"{job.workers} workers ({job.start_method})" if job.workers else "no workers"
    nodes = f" on {job.nodes} nodes" if job.nodes > 1 else ""
    return f"{'resumed, ' if job.resume else ''}{ranks}{nodes}, {workers}"


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

"""Findings and the verdict that follows from them: the same for audit, doctor, pytest fixture and verify."""

from collections.abc import Collection, Iterable
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Any, Literal, get_args

#: An error means diseased, "unproven" means not proven; warnings and notes never change a verdict.
Severity = Literal["error", "unproven", "warning", "note"]


class Verdict(StrEnum):
    """Sound (shown for everything that was examined), diseased, or not proven.

    Examples:
        >>> Verdict.NOT_PROVEN.sound, Verdict.NOT_PROVEN.exit_code
        (None, 3)
    """

    SOUND = "sound"
    DISEASED = "diseased"
    NOT_PROVEN = "not proven"

    @property
    def sound(self) -> bool | None:
        """For JSON: None if it could not be proven."""
        return {"sound": True, "diseased": False}.get(self.value)

    @property
    def exit_code(self) -> int:
        """Of a command that comes to this verdict."""
        return {"sound": 0, "diseased": 1}.get(self.value, 3)


@dataclass(frozen=True)
class Finding:
    """Something that is wrong, could not be shown, or is worth knowing.

    Attributes:
        code: a short name, the same for all occurrences ("uneven-steps").
        severity: "error" (diseased), "unproven" (not proven), "warning" or "note".
        what: a sentence.
        evidence: where and how it was observed, a line for each occurrence.
        remedy: what to do, or empty.
    """

    code: str
    severity: Severity
    what: str
    evidence: tuple[str, ...] = ()
    remedy: str = ""

    def as_dict(self) -> dict[str, Any]:
        """JSON-able."""
        return {**vars(self), "evidence": list(self.evidence)}

    def __str__(self) -> str:
        lines = [f"{self.severity}: {self.code}: {self.what}", *(f"  {line}" for line in self.evidence)]
        return "\n".join([*lines, *([f"  remedy: {self.remedy}"] if self.remedy else [])])


def finding(code: str, severity: Severity, what: str, *evidence: str) -> Finding:
    """A finding with the remedy of its code."""
    return Finding(code, severity, what, evidence, REMEDIES[code])


class Judged:
    """Something with findings, and the verdict that follows from them."""

    @property
    def findings(self) -> tuple[Finding, ...]:
        """What is wrong, could not be shown, or is worth knowing."""
        raise NotImplementedError

    @property
    def verdict(self) -> Verdict:
        """Sound, diseased or not proven."""
        return verdict_of(self.findings)

    @property
    def sound(self) -> bool | None:
        """True, False, or None if it is not proven."""
        return self.verdict.sound

    def failures(self, allow: Collection[str] = ()) -> list[Finding]:
        """Findings that speak against a sound verdict, without those allowed by their code, or as "not proven"."""
        failing = {"error"} if "not proven" in allow else {"error", "unproven"}
        return [finding for finding in self.findings if finding.severity in failing and finding.code not in allow]

    def verdict_as_dict(self) -> dict[str, Any]:
        """JSON-able."""
        findings = [finding.as_dict() for finding in self.findings]
        return {"sound": self.sound, "verdict": str(self.verdict), "findings": findings}


def rows_not_proven(function: str, evidence: str) -> Finding:
    """The finding that batches of a user's function may lack samples."""
    what = f"batches of {function} may lack samples: their arrays do not have one row for each sample"
    return finding("rows-not-proven", "unproven", what, evidence)


def verdict_of(findings: Iterable[Finding]) -> Verdict:
    """The verdict that follows from all findings."""
    severities = {finding.severity for finding in findings}
    if "error" in severities:
        return Verdict.DISEASED
    return Verdict.NOT_PROVEN if "unproven" in severities else Verdict.SOUND


def has_warnings(findings: Iterable[Finding], verdict: Verdict | None) -> bool:
    """Whether there are warnings about something that is sound or has no verdict: it is not shown as all right."""
    return verdict in (Verdict.SOUND, None) and any(finding.severity == "warning" for finding in findings)


def merged(found: Iterable[Finding], most: int = 12) -> tuple[Finding, ...]:
    """One finding for each code, the most severe, with the evidence of that severity; errors first."""
    by_code: dict[str, list[Finding]] = {}
    for finding in sorted(found, key=lambda finding: get_args(Severity).index(finding.severity)):
        same = by_code.setdefault(finding.code, [finding])
        if finding.severity == same[0].severity:
            same.append(finding)
    return tuple(
        replace(first, evidence=tuple(dict.fromkeys(line for finding in same for line in finding.evidence))[:most])
        for first, *same in by_code.values()
    )


_STATE = (
    "the state must count what was delivered, not what was prefetched, and be loaded by the same number of "
    "ranks and workers unless the loader documents otherwise"
)
_IDS = "put an id of each sample into the batch and name it: key= of rf.audit, --key of the doctor"

#: Each code and its remedy, in the order in which findings are listed: causes before consequences.
REMEDIES = {
    "factory-raises": (
        "see the traceback; if only spawn fails, make what the loader holds picklable: functions and classes "
        "at the top of a module, no lambdas, no open files; if WebDataset wants a nodesplitter, read its pipeline "
        "through rankfeed.integrations.webdataset.ShardedSamples"
    ),
    "process-died": (
        "a killed process often ran out of memory (see dmesg) or crashed in a library: try num_workers=0, "
        "then each start method"
    ),
    "hangs": (
        "the stack shows what it waits for; locks and threads do not survive a fork: use spawn, and create "
        "clients and pools in the worker, not in the factory"
    ),
    "yields-nothing": (
        "an iterator can be read only once: return an object whose __iter__ starts from the beginning, and "
        "check that every rank and worker has a share"
    ),
    "never-ends": (
        "limit an epoch to the same number of steps on all ranks (with_epoch, islice, a sampler with a "
        "length); for large data give a part of it, or a larger --max-steps"
    ),
    "differs-between-ranks": (
        "all ranks must shard the same dataset: sort lists of files, seed random_split with a generator, "
        "number classes and words in sorted order and not in that of a set (PYTHONHASHSEED differs between "
        "processes), and prepare data once before any rank opens them"
    ),
    "reads-differ": (
        "return a copy of what is cached or kept (a view or an in-place operation changes it for later reads), "
        "and create or clear buffers for each batch"
    ),
    "rows-come-apart": (
        "shard all fields of a sample by one list of indices, or zip them before they are sharded and shuffled; "
        "in collate, sort and filter samples and not single fields, and offset edges by the number of nodes"
    ),
    "duplicated-by-workers": (
        "an iterable dataset is copied into each worker, which must read its own share: use "
        "torch.utils.data.get_worker_info() in __iter__, rf.split, or a splitter of the library"
    ),
    "not-sharded-by-rank": (
        "give each rank its share: a DistributedSampler, split_dataset_by_node, a nodesplitter, rf.split or "
        "rf.Loader, with the same seed on all ranks; read the rank before workers are started, since "
        "torch.distributed is not initialised in spawned workers; ranks that share samples on purpose: "
        "--allow shared (doctor)"
    ),
    "sharded-twice": (
        "shard in one place only: do not let Accelerate or Lightning shard a loader that does so itself "
        "(leave it out of prepare, use_distributed_sampler=False), and split by worker once"
    ),
    "uneven-steps": (
        "give all ranks the same number of steps (rf.Loader does, and ShardedSamples for WebDataset), cut to the "
        "shortest, or wrap training in torch's Join"
    ),
    "wrong-length": "let __len__ return the number of batches of an epoch on this rank",
    "missing-samples": (
        "look at which samples are missing: shards that do not divide, a dropped last batch, a collate "
        "function that filters (filter in the dataset, before the sampler); in a job that resumes: resume "
        "from loader.state_dict() of the step that was saved; if a host crashed, its ledger may be cut"
    ),
    "partial-epochs": (
        "nothing if that is intended (doctor: --allow partial); else look for an offset to resume from that is "
        "never cleared"
    ),
    "drawn-with-replacement": "nothing if that is intended (doctor: --allow replacement)",
    "padded-with-repeats": (
        "padding is usual in training; in evaluation each repeat counts twice: use drop_last or a sampler "
        "that does not pad (rf.DistributedSampler)"
    ),
    "same-randomness-in-workers": (
        "seed each worker and rank differently: use torch.initial_seed() in worker_init_fn, and create "
        "generators there, not in the constructor"
    ),
    "resume-repeats": _STATE,
    "resume-skips": _STATE,
    "handles-before-fork": (
        "processes that share an open file move each other's position: open files on first use in the worker, "
        "not in the constructor"
    ),
    "same-order-every-epoch": (
        "call set_epoch(epoch) on the sampler before each epoch, or derive the seed from the epoch; also in "
        "workers that persist"
    ),
    "memory-grows": "look for lists that grow with each batch, unbounded caches, tensors kept with their graph",
    "memory-copied": (
        "keep data in memory-mapped files or in one numpy array or tensor, not in lists of Python objects, "
        "and let each worker open them"
    ),
    "slow-first-batch": (
        "do less before the first batch: index once and keep the index, open files on first use, use smaller "
        "shuffle buffers or persistent workers"
    ),
    "starved": "use more workers or threads, more prefetching, less work for each sample, or a faster format",
    "too-many-workers": "use no more workers than CPUs of a rank, or request more (--cpus-per-task)",
    "not-counted": _IDS,
    "rows-not-proven": (
        "return a batch whose arrays have one row for each sample; or set id_column= of the Loader and return "
        "that column with the ids of all samples"
    ),
    "packed-sequences": f"nothing; to count samples exactly, {_IDS}",
    "no-ids": _IDS,
    "repeated-samples": "look at the places: the sampler, or the list of files, contains them more than once",
    "unknown-samples": "check universe= and key=, or look for data of another split",
    "expected-unknown": (
        "give universe=: the number of samples (ids from 0), or their ids; of a map-style dataset "
        "`rankfeed doctor` sees samples that collate leaves out, without ids"
    ),
    "epoch-not-finished": "leave max_steps out, or enlarge it, so that the epoch ends",
}

"""What the doctor can find: a code for machines, how bad it is, and what to do about it."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

Severity = Literal["error", "warning", "note"]

#: Each code, and the remedy. In the order in which findings are told: causes before what follows from them.
REMEDIES = {
    "factory-raises": (
        "see the traceback; where spawn alone fails, what the loader holds must be picklable: functions and "
        "classes at the top of a module, no lambdas, no open files"
    ),
    "process-died": (
        "a process that is killed has often run out of memory (dmesg says so) or crashed in a library: try "
        "num_workers=0, then each start method"
    ),
    "hangs": (
        "the stack shows what is waited for; locks and threads do not survive a fork: try the spawn method, "
        "and make clients and pools in the worker, not in the factory"
    ),
    "yields-nothing": (
        "an iterator can be read once: return an object whose __iter__ begins anew, and see that every rank "
        "and worker has a share"
    ),
    "never-ends": (
        "limit an epoch (with_epoch, islice, a sampler with a length), the same on all ranks; where the data "
        "are just large, give a part of them or more --max-steps"
    ),
    "differs-between-ranks": (
        "all ranks must cut the same data set: list files in one order (sorted), read one version, and "
        "prepare data once before any rank opens them"
    ),
    "duplicated-by-workers": (
        "an iterable data set is copied into each worker, which must read its own share: use "
        "torch.utils.data.get_worker_info() when iteration starts, rf.split, or a splitter of the library"
    ),
    "not-sharded-by-rank": (
        "give each rank its share: a DistributedSampler, split_dataset_by_node, a nodesplitter, rf.split or "
        "rf.Loader; all ranks must use the same seed; take the rank before workers are started, since "
        "torch.distributed is not there in spawned ones"
    ),
    "sharded-twice": (
        "one place alone may cut the data: do not let Accelerate or Lightning shard a loader that does so "
        "itself (leave it out of prepare, use_distributed_sampler=False), and split by worker once"
    ),
    "uneven-steps": (
        "give all ranks as many steps (as rf.Loader does by itself), cut to the shortest, or wrap training in "
        "torch's Join"
    ),
    "missing-samples": (
        "see which samples do not come: shards that do not divide, a last batch that is dropped, sampling "
        "with replacement"
    ),
    "padded-with-repeats": (
        "in training that may do; in evaluation each repeat counts twice: use drop_last or a sampler that "
        "does not pad (rf.DistributedSampler)"
    ),
    "same-order-every-epoch": (
        "call set_epoch(epoch) on the sampler before each epoch, or let the seed depend on the epoch; a "
        "worker that persists must be told as well"
    ),
    "same-randomness-in-workers": (
        "seed each worker and rank differently: use torch.initial_seed() in the worker (worker_init_fn), and "
        "make generators there, not in the constructor"
    ),
    "order-depends-on-workers": (
        "nothing, if runs need not be repeated exactly; else keep num_workers fixed, or use a map-style data "
        "set or rf.Loader, whose order does not depend on it"
    ),
    "resume-repeats": (
        "the state must count what was delivered, not what was read ahead, and be loaded by as many ranks and "
        "workers as saved it, unless the loader says otherwise"
    ),
    "resume-skips": (
        "the state must count what was delivered, not what was read ahead, and be loaded by as many ranks and "
        "workers as saved it, unless the loader says otherwise"
    ),
    "handles-before-fork": (
        "processes that share an open file move each other's position in it: open files on first use in the "
        "worker, not in the constructor"
    ),
    "memory-grows": (
        "look for lists that grow with each batch, caches without a limit, and tensors kept with their graph"
    ),
    "memory-copied": (
        "keep data in memory-mapped files or in one numpy array or tensor, not in lists of Python objects, "
        "and let each worker open them itself"
    ),
    "slow-first-batch": (
        "do less before the first batch: index once and keep the index, open files on first use, smaller "
        "shuffle buffers, persistent workers"
    ),
    "starved": (
        "more workers or threads, a larger prefetch, less work for each sample, or data in a faster format"
    ),
    "too-many-workers": (
        "take no more workers than CPUs a rank has, or ask the scheduler for more (--cpus-per-task)"
    ),
    "not-counted": "put an id of each sample into the batch and name it with --key",
    "no-ids": "put an id of each sample into the batch and name it with --key",
}
_GRAVITY = {"error": 0, "warning": 1, "note": 2}


@dataclass(frozen=True)
class Finding:
    """Something that is wrong with a loader, or worth knowing.

    Attributes:
        code: for machines, one of `REMEDIES`.
        severity: an error fails the check; a sound loader has neither errors nor warnings.
        what: a sentence.
        evidence: what was seen.
        remedy: what to do.
    """

    code: str
    severity: Severity
    what: str
    evidence: tuple[str, ...] = ()

    @property
    def remedy(self) -> str:
        return REMEDIES[self.code]

    def as_dict(self) -> dict[str, Any]:
        """All of it, JSON-able."""
        return {
            "code": self.code,
            "severity": self.severity,
            "what": self.what,
            "evidence": list(self.evidence),
            "remedy": self.remedy,
        }

    def __str__(self) -> str:
        lines = [f"{self.severity}: {self.code}: {self.what}", *(f"  {line}" for line in self.evidence)]
        return "\n".join([*lines, f"  remedy: {self.remedy}"])


def merged(found: Iterable[Finding], most: int = 12) -> tuple[Finding, ...]:
    """One finding of each code, the gravest, with the evidence of all; the gravest codes first.

    Args:
        found: in the order in which they were found.
        most: lines of evidence that are kept.

    Examples:
        >>> twice = [Finding("hangs", "error", "it hangs", (f"rank {rank}",)) for rank in range(2)]
        >>> merged(twice)
        (Finding(code='hangs', severity='error', what='it hangs', evidence=('rank 0', 'rank 1')),)
    """
    by_code: dict[str, list[Finding]] = {}
    for each in found:
        by_code.setdefault(each.code, []).append(each)
    return tuple(sorted((_one(each, most) for each in by_code.values()), key=_place))


def _one(alike: Sequence[Finding], most: int) -> Finding:
    first = min(alike, key=lambda each: _GRAVITY[each.severity])
    lines = [line for each in (first, *(each for each in alike if each is not first)) for line in each.evidence]
    return Finding(first.code, first.severity, first.what, tuple(dict.fromkeys(lines))[:most])


def _place(finding: Finding) -> tuple[int, int]:
    return _GRAVITY[finding.severity], list(REMEDIES).index(finding.code)

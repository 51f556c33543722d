"""The verdict on a run: what was delivered, by loader and epoch, and what is wrong with it."""

from dataclasses import dataclass, field
from typing import Any

from rankfeed.diagnostics.findings import Finding, Judged, merged
from rankfeed.diagnostics.verify.positions import MissingRange


@dataclass(frozen=True)
class EpochRun:
    """An epoch on the timeline that counts: a later pass takes back what had been delivered after its start.

    Attributes:
        epoch: which.
        samples: in an epoch.
        delivered: each exactly once.
        missing: not delivered according to the ledgers, although the job continued after them.
        again: deliveries that were taken back: the job continued from a position before them.
        ahead: deliveries of some ranks after the last step that all ranks delivered.
        dropped: left out by ``tail="drop"``.
        left_early: not delivered because the launch continued with another epoch (a break).
        under_way: not delivered because the job ended before.
        gaps: the first missing ranges.
        passes: that it consists of, with launch, positions, ranks, batch size and steps.
    """

    epoch: int
    samples: int
    delivered: int
    missing: int
    again: int
    ahead: int
    dropped: int
    left_early: int
    under_way: int
    gaps: list[MissingRange]
    passes: list[dict[str, Any]]

    @property
    def complete(self) -> bool:
        """Whether each sample of the epoch was delivered exactly once, or dropped as declared."""
        return self.delivered + self.dropped == self.samples

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return {**vars(self), "complete": self.complete, "gaps": [str(gap) for gap in self.gaps]}

    def __str__(self) -> str:
        counts = {
            "missing": self.missing,
            "left out by tail=drop": self.dropped,
            "not reached before the next epoch": self.left_early,
            "not reached": self.under_way,
            "delivered again after a resume": self.again,
            "delivered by some ranks alone at the end": self.ahead,
        }
        others = [f"{count:,} {what}" for what, count in counts.items() if count]
        first = "each" if self.delivered == self.samples else f"{self.delivered:,}"
        return ", ".join([f"epoch {self.epoch}: {first} of {self.samples:,} samples exactly once", *others])


@dataclass
class LoaderRun:
    """What loaders of one order over one data set delivered.

    Attributes:
        data: the data set.
        plan: what the order depends on.
        source: fingerprint of the data.
        launches: in the order in which they began: ranks, ledgers, hosts, times.
        epochs: in their order.
    """

    data: str
    plan: dict[str, int | str]
    source: str
    launches: list[dict[str, Any]] = field(default_factory=list)
    epochs: list[EpochRun] = field(default_factory=list)

    @property
    def missing(self) -> int:
        """Samples, over all epochs."""
        return sum(epoch.missing for epoch in self.epochs)

    @property
    def again(self) -> int:
        """Deliveries that were taken back, over all epochs."""
        return sum(epoch.again for epoch in self.epochs)

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        epochs = [epoch.as_dict() for epoch in self.epochs]
        return {**vars(self), "missing": self.missing, "again": self.again, "epochs": epochs}


@dataclass
class RunVerdict(Judged):
    """What a job delivered, up to where it is or ended.

    Attributes:
        folder: of the ledgers.
        ledgers: their number.
        loaders: one for each order over each data set.
        findings: what is wrong, could not be shown, or is worth knowing; the most severe first.
    """

    folder: str
    ledgers: int
    loaders: list[LoaderRun] = field(default_factory=list)
    findings: tuple[Finding, ...] = ()

    def add(self, *found: Finding) -> None:
        """Add findings."""
        self.findings = merged([*self.findings, *found])

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return {
            **self.verdict_as_dict(),
            "folder": self.folder,
            "ledgers": self.ledgers,
            "loaders": [loader.as_dict() for loader in self.loaders],
        }

    def __str__(self) -> str:
        lines = [f"{self.folder}: {self.ledgers} ledger{'s' * (self.ledgers != 1)}"]
        for loader in self.loaders:
            lines.append(f"{loader.data}: {len(loader.launches)} launch{'es' * (len(loader.launches) != 1)}")
            lines += [f"  {epoch}" for epoch in loader.epochs]
        return "\n".join([*lines, *map(str, self.findings), f"verdict: {self.verdict}"])

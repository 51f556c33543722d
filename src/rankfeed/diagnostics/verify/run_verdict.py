"""The verdict on a run: what was delivered, by loader and epoch, and what is wrong with it."""

from dataclasses import dataclass, field
from typing import Any

from rankfeed.diagnostics.verify.deliveries import Missing, Shape


@dataclass(frozen=True)
class EpochRun:
    """An epoch on the timeline that counts: a later pass takes back what had been delivered behind its start.

    Attributes:
        epoch: which.
        samples: in an epoch.
        delivered: each exactly once.
        missing: that ought to have been delivered, since the job went on behind them.
        again: deliveries that were taken back: the job went on from a place before them.
        ahead: deliveries of some ranks behind the last step that all ranks delivered.
        dropped: that ``tail="drop"`` leaves out.
        left_early: not delivered because the launch went on to another epoch (a break).
        under_way: not delivered because the job ended before.
        gaps: what is missing, stretch by stretch.
        stretches: the passes that it consists of, with launch, positions, ranks, batch size and steps.
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
    gaps: list[Missing]
    stretches: list[dict[str, Any]]

    @property
    def whole(self) -> bool:
        """Whether each sample of the epoch was delivered exactly once."""
        return self.delivered + self.dropped == self.samples

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        told = {name: value for name, value in vars(self).items() if name != "gaps"}
        return {**told, "whole": self.whole, "gaps": [as_words(each) for each in self.gaps]}

    def __str__(self) -> str:
        counted = {
            "missing": self.missing,
            "left out by tail=drop": self.dropped,
            "not reached before the next epoch": self.left_early,
            "not reached": self.under_way,
            "delivered again after a resume": self.again,
            "delivered by some ranks alone at the end": self.ahead,
        }
        told = [f"{count:,} {what}" for what, count in counted.items() if count]
        first = "each" if self.delivered == self.samples else f"{self.delivered:,}"
        return ", ".join([f"epoch {self.epoch}: {first} of {self.samples:,} samples exactly once", *told])


@dataclass
class LoaderRun:
    """What loaders of one order over one data set delivered.

    Attributes:
        data: how the source calls itself.
        plan: what the order depends on.
        source: fingerprint of the data.
        shape: number of samples and lanes of the plan.
        launches: in the order they began: ranks, ledgers, hosts, times.
        epochs: in their order.
        errors: what is wrong, beside what is missing.
        notes: what is to be known.
    """

    data: str
    plan: dict[str, int | str]
    source: str
    shape: Shape
    launches: list[dict[str, Any]] = field(default_factory=list)
    epochs: list[EpochRun] = field(default_factory=list)
    errors: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

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
        return {
            **{name: value for name, value in vars(self).items() if name not in ("shape", "epochs")},
            "missing": self.missing,
            "again": self.again,
            "epochs": [epoch.as_dict() for epoch in self.epochs],
        }


@dataclass
class RunVerdict:
    """What a job delivered.

    Attributes:
        folder: of the ledgers.
        ledgers: how many there are.
        loaders: a verdict for each order over each data set.
        errors: ledgers that are damaged.
        notes: what is to be known of the files.
    """

    folder: str
    ledgers: int
    loaders: list[LoaderRun] = field(default_factory=list)
    errors: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    @property
    def ok(self) -> bool:
        """Whether nothing is missing up to where the job stands, and nothing is wrong."""
        return not self.problems

    @property
    def problems(self) -> list[str]:
        """All that is wrong, in sentences."""
        told = list(self.errors)
        for loader in self.loaders:
            told += loader.errors
            told += [as_words(gap) for epoch in loader.epochs for gap in epoch.gaps]
            listed = sum(gap.samples for epoch in loader.epochs for gap in epoch.gaps)
            if listed < loader.missing:
                told.append(
                    f"{loader.missing - listed:,} more samples are missing in stretches that are not listed"
                )
        return told

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return {
            "ok": self.ok,
            "folder": self.folder,
            "ledgers": self.ledgers,
            "problems": self.problems,
            "notes": [*self.notes, *(note for loader in self.loaders for note in loader.notes)],
            "loaders": [loader.as_dict() for loader in self.loaders],
        }

    def __str__(self) -> str:
        lines = [f"{self.folder}: {self.ledgers} ledgers, {'holds' if self.ok else 'does not hold'}"]
        for loader in self.loaders:
            launches = "launch" if len(loader.launches) == 1 else "launches"
            lines.append(f"{loader.data}: {len(loader.launches)} {launches}")
            lines += [f"  {epoch}" for epoch in loader.epochs]
        lines += [f"- {problem}" for problem in self.problems]
        return "\n".join(lines)


def as_words(gap: Missing) -> str:
    """What is missing, in a sentence.

    Examples:
        >>> as_words(Missing(epoch=1, low=40, high=60, samples=20))
        'epoch 1, positions 40 to 60: 20 samples missing: no ledger says that they were delivered'
    """
    where = f"epoch {gap.epoch}, positions {gap.low} to {gap.high}: {gap.samples:,} samples missing"
    if gap.stretch is None:
        return f"{where}: no ledger says that they were delivered"
    launch = f"launch {gap.stretch.launch + 1}"
    if gap.rank is None:
        return f"{where}: {launch} stopped there, and the next began behind them"
    if gap.rank not in gap.stretch.steps:
        return f"{where}: the share of rank {gap.rank} in {launch}, which left no ledger"
    return f"{where}: the share of rank {gap.rank} in {launch}, which stopped after {gap.first_step} steps"

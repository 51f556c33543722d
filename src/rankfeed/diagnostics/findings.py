"""What a diagnosis finds, and the verdict that follows from it: the same for doctor, audit and verify."""

from collections.abc import Iterable
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

    def verdict_as_dict(self) -> dict[str, Any]:
        """JSON-able."""
        findings = [each.as_dict() for each in self.findings]
        return {"sound": self.sound, "verdict": str(self.verdict), "findings": findings}


def verdict_of(findings: Iterable[Finding]) -> Verdict:
    """The verdict that follows from all findings."""
    severities = {finding.severity for finding in findings}
    if "error" in severities:
        return Verdict.DISEASED
    return Verdict.NOT_PROVEN if "unproven" in severities else Verdict.SOUND


def merged(found: Iterable[Finding], most: int = 12) -> tuple[Finding, ...]:
    """One finding for each code, the most severe, with the evidence of that severity; errors first."""
    by_code: dict[str, list[Finding]] = {}
    for each in sorted(found, key=lambda each: get_args(Severity).index(each.severity)):
        same = by_code.setdefault(each.code, [each])
        if each.severity == same[0].severity:
            same.append(each)
    return tuple(
        replace(first, evidence=tuple(dict.fromkeys(line for each in same for line in each.evidence))[:most])
        for first, *same in by_code.values()
    )

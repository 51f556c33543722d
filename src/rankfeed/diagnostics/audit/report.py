"""``AuditReport``: counts of each epoch, findings and the verdict of an audit; saved to a file and loaded."""

from __future__ import annotations

import os
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

import msgspec

from rankfeed.diagnostics.deliveries import EpochReport
from rankfeed.diagnostics.findings import Finding, Judged, merged
from rankfeed.diagnostics.judge import JudgedFacts, judge
from rankfeed.diagnostics.written import written
from rankfeed.errors import AuditError, CorruptError, SourceError
from rankfeed.storage.file_errors import os_errors


@dataclass(frozen=True)
class AuditReport(Judged):
    """What a loader delivered, over all ranks; the same on each of them. Prints as text.

    Attributes:
        facts: what samples are identified by, how many are expected, and what the loader declares.
        epochs: one for each epoch.
    """

    facts: JudgedFacts
    epochs: Annotated[tuple[EpochReport, ...], msgspec.Meta(min_length=1)]

    @property
    def world_size(self) -> int:
        """Ranks that were audited."""
        return len(self.epochs[0].ranks)

    @property
    def findings(self) -> tuple[Finding, ...]:
        """What is wrong, could not be shown, or is worth knowing; the most severe first."""
        return merged(judge(self.epochs, self.facts))

    def check(self, *, allow_unproven: bool = False) -> None:
        """Raise an error unless the verdict is sound.

        Args:
            allow_unproven: accept a verdict of "not proven", too.

        Raises:
            AuditError: the verdict is another one.
        """
        if failures := self.failures(["not proven"] * allow_unproven):
            raise AuditError(
                f"the loader is {self.verdict}: {failures[0].what}",
                expected="each sample once an epoch, in equal steps",
                found=str(self),
                remedy=failures[0].remedy,
            )

    def as_dict(self) -> dict[str, Any]:
        """All of it, JSON-able."""
        return {**self.verdict_as_dict(), **asdict(self)}

    def save(self, path: str | os.PathLike[str]) -> Path:
        """Write all of it as JSON, for `load` and for ``rankfeed report --audit``; returns where.

        Raises:
            ArgumentError: it cannot be written there.
        """
        return written(path, msgspec.json.encode(self.as_dict()) + b"\n")

    @staticmethod
    def load(path: str | os.PathLike[str]) -> AuditReport:
        """Read what `save` wrote.

        Raises:
            SourceError: there is no such file.
            CorruptError: it is not a report.

        Examples:
            >>> import tempfile
            >>> import rankfeed as rf
            >>> report = rf.audit([{"sample_id": [0, 1, 1]}], universe=3)
            >>> rf.AuditReport.load(report.save(Path(tempfile.mkdtemp(), "audit.json"))) == report
            True
        """
        with os_errors(SourceError, "the report cannot be read", path):
            content = Path(path).read_bytes()
        try:
            return _DECODER.decode(content)
        except (msgspec.DecodeError, RecursionError) as error:
            raise CorruptError(
                "this is not the report of an audit",
                expected="what AuditReport.save wrote",
                found=error,
                where=path,
                remedy="save it again: rf.audit(loader).save(path)",
            ) from error

    def html(self, path: str | os.PathLike[str], *, title: str = "An audit") -> Path:
        """Write it as one HTML page with charts, or these as a PNG where the name ends so; returns where.

        Raises:
            ArgumentError: it cannot be written there.
            MissingExtraError: the extra ``report`` is not installed.
        """
        from rankfeed.diagnostics.report.audit import audit_page
        from rankfeed.diagnostics.report.render import write

        return write(audit_page(self, title=title), path)

    def __str__(self) -> str:
        ranks = f"{self.world_size} rank{'s' * (self.world_size > 1)}"
        ranks += f", samples identified by {self.facts.identified_by}"
        return "\n".join([ranks, *map(str, self.epochs), *map(str, self.findings), f"verdict: {self.verdict}"])


#: Learns the types here, where no other thread decodes.
_DECODER = msgspec.json.Decoder(AuditReport)

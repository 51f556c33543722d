"""``rankfeed.audit``: iterates any loader on all ranks and counts how often each sample is delivered."""

from rankfeed.diagnostics.audit.audit import audit
from rankfeed.diagnostics.audit.report import AuditReport
from rankfeed.diagnostics.deliveries import EpochReport, Place, RankEpoch, Repeat

__all__ = ["AuditReport", "EpochReport", "Place", "RankEpoch", "Repeat", "audit"]

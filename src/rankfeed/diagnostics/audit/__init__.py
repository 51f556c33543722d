"""What any loader delivers, on all ranks: every sample is counted."""

from rankfeed.diagnostics.audit.audit import audit
from rankfeed.diagnostics.audit.epochs import EpochReport, Place, RankEpoch, Repeat
from rankfeed.diagnostics.audit.report import AuditReport

__all__ = ["AuditReport", "EpochReport", "Place", "RankEpoch", "Repeat", "audit"]

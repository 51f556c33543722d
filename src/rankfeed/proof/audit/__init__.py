"""What any loader delivers, on all ranks: every sample counted, exactly."""

from rankfeed.proof.audit.audited import AuditReport
from rankfeed.proof.audit.auditing import audit

__all__ = ["AuditReport", "audit"]

"""What any loader delivers, on all ranks: every sample counted, exactly."""

from rankfeed.diagnostics.audit.audited import AuditReport
from rankfeed.diagnostics.audit.auditing import audit

__all__ = ["AuditReport", "audit"]

"""Shows what a loader delivers, what a job delivered, and whether data and plans are intact."""

from rankfeed.diagnostics.audit import AuditReport, audit
from rankfeed.diagnostics.lockstep import Lockstep
from rankfeed.diagnostics.verify import DataVerdict, PlanVerdict, RunVerdict, verify_data, verify_plan, verify_run
from rankfeed.diagnostics.watch import Watch, watch

__all__ = [
    "AuditReport",
    "DataVerdict",
    "Lockstep",
    "PlanVerdict",
    "RunVerdict",
    "Watch",
    "audit",
    "verify_data",
    "verify_plan",
    "verify_run",
    "watch",
]

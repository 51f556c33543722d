"""That all this held: what was promised, counted; and what any loader delivers."""

from rankfeed.proof.audit import AuditReport, audit
from rankfeed.proof.lockstep import Lockstep
from rankfeed.proof.verify import DataVerdict, PlanVerdict, RunVerdict, verify_data, verify_plan, verify_run
from rankfeed.proof.watch import Watch, watch

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

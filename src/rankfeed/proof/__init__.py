"""That all this held: what was promised, counted; and what any loader delivers."""

from rankfeed.proof.audit import audit
from rankfeed.proof.audited import AuditReport
from rankfeed.proof.data import DataVerdict, verify_data
from rankfeed.proof.lockstep import Lockstep
from rankfeed.proof.plans import PlanVerdict, verify_plan
from rankfeed.proof.run_verdict import RunVerdict
from rankfeed.proof.runs import verify_run
from rankfeed.proof.watching import Watch, watch

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

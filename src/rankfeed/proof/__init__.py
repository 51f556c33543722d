"""That all this held: what was promised, counted; and what any loader delivers."""

from rankfeed.proof.audit import audit
from rankfeed.proof.audited import AuditReport
from rankfeed.proof.data import DataVerdict, verify_data
from rankfeed.proof.plans import PlanVerdict, verify_plan
from rankfeed.proof.run_verdict import RunVerdict
from rankfeed.proof.runs import verify_run

__all__ = [
    "AuditReport",
    "DataVerdict",
    "PlanVerdict",
    "RunVerdict",
    "audit",
    "verify_data",
    "verify_plan",
    "verify_run",
]

"""That all this held: what was promised, counted; and what any loader delivers."""

from rankfeed.proof.audit import audit
from rankfeed.proof.audited import AuditReport
from rankfeed.proof.plans import PlanVerdict, verify_plan
from rankfeed.proof.watching import Watch, watch

__all__ = ["AuditReport", "PlanVerdict", "Watch", "audit", "verify_plan", "watch"]

"""That all this held: what was promised, counted; and what any loader delivers."""

from rankfeed.proof.audit import audit
from rankfeed.proof.audited import AuditReport
from rankfeed.proof.lockstep import Lockstep
from rankfeed.proof.plans import PlanVerdict, verify_plan

__all__ = ["AuditReport", "Lockstep", "PlanVerdict", "audit", "verify_plan"]

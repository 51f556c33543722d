"""That all this held: what was promised, counted."""

from rankfeed.proof.plans import PlanVerdict, verify_plan

__all__ = ["PlanVerdict", "verify_plan"]

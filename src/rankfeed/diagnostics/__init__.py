"""Checks what loaders and jobs deliver, and whether data and plans are intact; reports, watch and Lockstep."""

from rankfeed.diagnostics.audit import AuditReport, audit
from rankfeed.diagnostics.lockstep import Lockstep
from rankfeed.diagnostics.verify.data import DataVerdict, verify_data
from rankfeed.diagnostics.verify.plans import verify_plan
from rankfeed.diagnostics.verify.runs import RunVerdict, verify_run
from rankfeed.diagnostics.watch.watching import Watch, watch

__all__ = [
    "AuditReport",
    "DataVerdict",
    "Lockstep",
    "RunVerdict",
    "Watch",
    "audit",
    "verify_data",
    "verify_plan",
    "verify_run",
    "watch",
]

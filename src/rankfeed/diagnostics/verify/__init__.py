"""Verifies a plan's promises, a data set's bytes, and what a job delivered."""

from rankfeed.diagnostics.verify.data import DataVerdict, verify_data
from rankfeed.diagnostics.verify.plans import PlanVerdict, verify_plan
from rankfeed.diagnostics.verify.run_verdict import EpochRun, LoaderRun, RunVerdict
from rankfeed.diagnostics.verify.runs import verify_run

__all__ = [
    "DataVerdict",
    "EpochRun",
    "LoaderRun",
    "PlanVerdict",
    "RunVerdict",
    "verify_data",
    "verify_plan",
    "verify_run",
]

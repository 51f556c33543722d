"""Verifies a plan's promises, a data set's bytes, and what a job delivered."""

from rankfeed.diagnostics.verify.data import DataVerdict, verify_data
from rankfeed.diagnostics.verify.plans import PlanVerdict, verify_plan
from rankfeed.diagnostics.verify.runs import EpochRun, LoaderRun, RunVerdict, verify_run

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

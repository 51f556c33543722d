"""A plan, an audit or a run on one page that people look at."""

from rankfeed.diagnostics.report.of_audit import of_audit
from rankfeed.diagnostics.report.of_plan import Asked, of_plan
from rankfeed.diagnostics.report.of_run import of_run
from rankfeed.diagnostics.report.of_stats import Snapshot, of_stats, read_stats
from rankfeed.diagnostics.report.padding import padding_of
from rankfeed.diagnostics.report.page import Page, joined
from rankfeed.diagnostics.report.writing import write

__all__ = [
    "Asked",
    "Page",
    "Snapshot",
    "joined",
    "of_audit",
    "of_plan",
    "of_run",
    "of_stats",
    "padding_of",
    "read_stats",
    "write",
]

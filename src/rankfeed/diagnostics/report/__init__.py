"""Reports as HTML or PNG: a plan, an audit, a run, or snapshots of loader statistics."""

from rankfeed.diagnostics.report.audit import audit_page
from rankfeed.diagnostics.report.page import Figure, Page, Section, joined
from rankfeed.diagnostics.report.plan import plan_page
from rankfeed.diagnostics.report.render import write
from rankfeed.diagnostics.report.run import run_page
from rankfeed.diagnostics.report.stats import StatsSnapshot, read_stats, stats_page

__all__ = [
    "Figure",
    "Page",
    "Section",
    "StatsSnapshot",
    "audit_page",
    "joined",
    "plan_page",
    "read_stats",
    "run_page",
    "stats_page",
    "write",
]

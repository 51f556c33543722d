"""Reports: a plan, an audit or a run on one page for people."""

from rankfeed.diagnostics.report.page import Figure, Page, Section, joined
from rankfeed.diagnostics.report.pages import page_of
from rankfeed.diagnostics.report.plan import PlannedJob
from rankfeed.diagnostics.report.render import write
from rankfeed.diagnostics.report.stats import StatsSnapshot, read_stats

__all__ = [
    "Figure",
    "Page",
    "PlannedJob",
    "Section",
    "StatsSnapshot",
    "joined",
    "page_of",
    "read_stats",
    "write",
]

"""The report of any subject."""

from collections.abc import Callable, Mapping, Sequence

from rankfeed._util.validate import invalid
from rankfeed.diagnostics.audit import AuditReport
from rankfeed.diagnostics.report.audit import audit_page
from rankfeed.diagnostics.report.page import Page
from rankfeed.diagnostics.report.plan import PlannedJob, plan_page
from rankfeed.diagnostics.report.run import run_page
from rankfeed.diagnostics.report.stats import StatsSnapshot, stats_page
from rankfeed.diagnostics.verify import RunVerdict


def page_of(
    subject: PlannedJob | AuditReport | RunVerdict | Mapping[str, Sequence[StatsSnapshot]],
    *,
    title: str = "",
    progress: Callable[[float], None] = lambda share: None,
) -> Page:
    """The report of a plan, an audit, a run or its rates; `joined` puts several on one page, `write` writes it.

    Args:
        subject: a `PlannedJob`, the result of `rankfeed.audit` or `verify_run`, or snapshots by rank
            (see `read_stats`).
        title: of the report; if left out, it names the subject.
        progress: called with the share of a plan's deliveries that are counted.

    Raises:
        ArgumentError: there is no report of such an object.
        PlanError: the plan cannot be read in this way.
        SourceError: the data of the plan cannot be read.

    Examples:
        >>> import rankfeed as rf
        >>> page_of(rf.audit([{"sample_id": [0, 1, 2]}], universe=3)).summary
        'Every sample came once an epoch, in equal steps on all ranks.'
    """
    if isinstance(subject, PlannedJob):
        return plan_page(subject, title, progress)
    if isinstance(subject, AuditReport):
        return audit_page(subject, title)
    if isinstance(subject, RunVerdict):
        return run_page(subject, title)
    if isinstance(subject, Mapping):
        return stats_page(subject, title)
    raise invalid("subject", "a PlannedJob, an AuditReport, a RunVerdict or snapshots by rank", subject)

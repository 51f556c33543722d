"""An audit's report in a file, and back."""

import os
from pathlib import Path

import msgspec

from rankfeed.diagnostics.audit.audited import AuditReport
from rankfeed.diagnostics.audit.trace import NOBODY
from rankfeed.diagnostics.written import written
from rankfeed.errors import CorruptError, SourceError

#: Learns the types here, where no other thread decodes.
_DECODER = msgspec.json.Decoder(AuditReport)


def save(report: AuditReport, path: str | os.PathLike[str]) -> Path:
    """Write a report as JSON; returns where.

    Raises:
        ArgumentError: it cannot be written there.
    """
    return written(path, msgspec.json.encode(report.as_dict()) + b"\n")


def load(path: str | os.PathLike[str]) -> AuditReport:
    """Read a report.

    Raises:
        SourceError: there is no such file.
        CorruptError: it is not a report.

    Examples:
        >>> import tempfile
        >>> import rankfeed as rf
        >>> report = rf.audit([{"sample_id": [0, 1, 1]}], universe=3)
        >>> load(report.save(Path(tempfile.mkdtemp(), "audit.json"))) == report
        True
    """
    try:
        content = Path(path).read_bytes()
    except OSError as error:
        raise SourceError("the report cannot be read", found=error.strerror or error, where=path) from error
    try:
        report = _DECODER.decode(content)
    except (msgspec.DecodeError, RecursionError) as error:
        raise _refused(path, str(error)) from error
    ranks = [[each.rank for each in epoch.ranks] for epoch in report.epochs]
    if not ranks or not ranks[0] or any(each != ranks[0] for each in ranks):
        raise _refused(path, "no epochs, no ranks, or others in each epoch")
    for epoch in report.epochs:
        counts = [epoch.samples, epoch.unique, epoch.missing or 0, epoch.unknown or 0]
        counts += [count for each in epoch.ranks for count in (each.rank, each.steps, each.samples)]
        counts += [count for each in epoch.ranks for pair in each.batch_sizes.items() for count in pair]
        counts += [
            count for each in epoch.repeats for one in each.places for count in (one.rank, one.step, one.row)
        ]
        if min(counts) < 0 or max(counts) > 1 << 62 or epoch.repeated < 0:
            raise _refused(path, f"epoch {epoch.epoch}: a count that cannot be")
        if any(NOBODY not in each.orders for each in epoch.ranks) or (epoch.repeated and not epoch.repeats):
            raise _refused(path, f"epoch {epoch.epoch}: something is left out")
    return report


def _refused(path: str | os.PathLike[str], found: str) -> CorruptError:
    return CorruptError(
        "this is not the report of an audit",
        expected="what AuditReport.save wrote",
        found=found,
        where=path,
        remedy="save it anew: rf.audit(loader).save(path)",
    )

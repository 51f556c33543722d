"""Check whether the topologies that the processes of a launch report are consistent."""

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TypeVar

from rankfeed.topology.topology import Topology

#: Ranks and processes listed in a message.
_LISTED = 8
_Key = TypeVar("_Key")
_T = TypeVar("_T")


@dataclass(frozen=True)
class ProcessReport:
    """What one process of a launch knows about itself."""

    host: str  # name of the machine or container
    pid: int
    topology: Topology | None = None  # None if it could not be detected
    problem: str = ""  # the error of the detection
    local_known: bool = False  # whether the launcher sets local rank and size; otherwise they were inferred
    node_known: bool = False
    data: str = ""  # fingerprint of the dataset that it opened
    steps: int = 0  # of its first epoch
    first: tuple[int, ...] = ()  # the first sample ids that it reads

    @property
    def name(self) -> str:
        """Name of the process in messages."""
        who = "a process" if self.topology is None else f"rank {self.topology.rank}"
        return f"{who} ({self.host}, pid {self.pid})"


def find_contradictions(reports: Sequence[ProcessReport]) -> list[str]:
    """Contradictions between the reports of all processes, one line each; empty if they agree.

    An inferred local rank or node contradicts nothing: no share of the data depends on it.
    """
    known = [(report, report.topology) for report in reports if report.topology is not None]
    found = [f"{report.name} failed: {report.problem}" for report in reports if report.problem]
    found += _differences("launchers", ((here.launcher, report) for report, here in known))
    found += _differences("world sizes", ((str(here.world_size), report) for report, here in known))
    found += _rank_contradictions(known)
    found += _local_contradictions(known)
    on_nodes = [(report, here) for report, here in known if report.node_known]
    found += _differences("numbers of nodes", ((str(here.num_nodes), report) for report, here in on_nodes))
    for node, members in _grouped((here.node, report) for report, here in on_nodes):
        hosts = sorted({report.host for report in members})
        if len(hosts) > 1:
            found.append(f"node {node} is on {len(hosts)} hosts: {', '.join(hosts)}")
    found += _differences("datasets", ((report.data, report) for report in reports if report.data))
    return found


def missing_ranks(reports: Iterable[ProcessReport], world_size: int) -> list[int]:
    """Ranks below a world size that no process reported."""
    reported = {report.topology.rank for report in reports if report.topology is not None}
    return [rank for rank in range(world_size) if rank not in reported]


def format_ranks(ranks: Sequence[int]) -> str:
    """Ranks for a message, such as "ranks 0, 1, 2, 3, 4, 5, 6, 7 and 92 more"."""
    more = f" and {len(ranks) - _LISTED} more" if len(ranks) > _LISTED else ""
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks[:_LISTED]))}{more}"


def _rank_contradictions(known: Sequence[tuple[ProcessReport, Topology]]) -> list[str]:
    found = []
    for rank, members in _grouped((here.rank, report) for report, here in known):
        if len(members) > 1:
            places = "; ".join(f"{report.host}, pid {report.pid}" for report in members[:_LISTED])
            found.append(f"rank {rank} was reported by {len(members)} processes: {places}")
    missing = missing_ranks(
        (report for report, _ in known), max((here.world_size for _, here in known), default=0)
    )
    return [*found, f"{format_ranks(missing)} did not report"] if missing else found


def _local_contradictions(known: Sequence[tuple[ProcessReport, Topology]]) -> list[str]:
    """On each node, every local rank exists once, and their number is the local world size."""
    found = []
    on_nodes = (((here.node, report.host), here) for report, here in known if report.local_known)
    for (node, host), members in _grouped(on_nodes):
        where = f"on node {node} ({host})"
        sizes = sorted({here.local_world_size for here in members})
        if sizes != [len(members)]:
            reported = " or ".join(map(str, sizes))
            found.append(f"{where} there are {len(members)} processes, but their local world size is {reported}")
        counts = Counter(here.local_rank for here in members)
        # `torchrun --virtual-local-rank` sets 0 in all of them.
        twice = [rank for rank, count in sorted(counts.items()) if count > 1]
        if twice and set(counts) != {0}:
            found.append(f"{where} a local rank exists more than once: {', '.join(map(str, twice[:_LISTED]))}")
    return found


def _differences(what: str, values: Iterable[tuple[str, ProcessReport]]) -> list[str]:
    groups = _grouped(values)
    if len(groups) < 2:
        return []
    return [f"{what} differ: " + ", ".join(f"{value} on {members[0].name}" for value, members in groups)]


def _grouped(pairs: Iterable[tuple[_Key, _T]]) -> list[tuple[_Key, list[_T]]]:
    groups: dict[_Key, list[_T]] = {}
    for key, value in pairs:
        groups.setdefault(key, []).append(value)
    return list(groups.items())

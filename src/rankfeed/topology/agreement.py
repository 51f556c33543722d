"""Checks whether the topologies that the processes of a launch report are consistent."""

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
        process = "a process" if self.topology is None else f"rank {self.topology.rank}"
        return f"{process} ({self.host}, pid {self.pid})"


def find_contradictions(reports: Sequence[ProcessReport]) -> list[str]:
    """Contradictions between the reports of all processes, one line each; empty if they agree.

    An inferred local rank or node contradicts nothing: no share of the data depends on it.
    """
    located = [(report, report.topology) for report in reports if report.topology is not None]
    problems = [f"{report.name} failed: {report.problem}" for report in reports if report.problem]
    problems += _differences("launchers", ((topology.launcher, report) for report, topology in located))
    problems += _differences("world sizes", ((str(topology.world_size), report) for report, topology in located))
    problems += _rank_contradictions(located)
    problems += _local_contradictions(located)
    nodes = [(report, topology) for report, topology in located if report.node_known]
    problems += _differences("numbers of nodes", ((str(topology.num_nodes), report) for report, topology in nodes))
    for node, members in _grouped((topology.node, report) for report, topology in nodes):
        hosts = sorted({report.host for report in members})
        if len(hosts) > 1:
            problems.append(f"node {node} is on {len(hosts)} hosts: {', '.join(hosts)}")
    problems += _differences("datasets", ((report.data, report) for report in reports if report.data))
    return problems


def missing_ranks(reports: Iterable[ProcessReport], world_size: int) -> list[int]:
    """Ranks below a world size that no process reported."""
    reported = {report.topology.rank for report in reports if report.topology is not None}
    return [rank for rank in range(world_size) if rank not in reported]


def format_ranks(ranks: Sequence[int]) -> str:
    """Ranks for a message, such as "ranks 0, 1, 2, 3, 4, 5, 6, 7 and 92 more"."""
    suffix = f" and {len(ranks) - _LISTED} more" if len(ranks) > _LISTED else ""
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks[:_LISTED]))}{suffix}"


def _rank_contradictions(located: Sequence[tuple[ProcessReport, Topology]]) -> list[str]:
    problems = []
    for rank, members in _grouped((topology.rank, report) for report, topology in located):
        if len(members) > 1:
            places = "; ".join(f"{report.host}, pid {report.pid}" for report in members[:_LISTED])
            problems.append(f"rank {rank} was reported by {len(members)} processes: {places}")
    world_size = max((topology.world_size for _, topology in located), default=0)
    missing = missing_ranks((report for report, _ in located), world_size)
    return [*problems, f"{format_ranks(missing)} did not report"] if missing else problems


def _local_contradictions(located: Sequence[tuple[ProcessReport, Topology]]) -> list[str]:
    """On each node, every local rank exists once, and their number is the local world size."""
    problems = []
    on_nodes = (((topology.node, report.host), topology) for report, topology in located if report.local_known)
    for (node, host), members in _grouped(on_nodes):
        where = f"on node {node} ({host})"
        sizes = sorted({topology.local_world_size for topology in members})
        if sizes != [len(members)]:
            size = " or ".join(map(str, sizes))
            problems.append(f"{where} there are {len(members)} processes, but their local world size is {size}")
        counts = Counter(topology.local_rank for topology in members)
        # `torchrun --virtual-local-rank` sets 0 in all of them.
        twice = [rank for rank, count in sorted(counts.items()) if count > 1]
        if twice and set(counts) != {0}:
            problems.append(f"{where} a local rank exists more than once: {', '.join(map(str, twice[:_LISTED]))}")
    return problems


def _differences(noun: str, values: Iterable[tuple[str, ProcessReport]]) -> list[str]:
    groups = _grouped(values)
    if len(groups) < 2:
        return []
    return [f"{noun} differ: " + ", ".join(f"{value} on {members[0].name}" for value, members in groups)]


def _grouped(pairs: Iterable[tuple[_Key, _T]]) -> list[tuple[_Key, list[_T]]]:
    groups: dict[_Key, list[_T]] = {}
    for key, member in pairs:
        groups.setdefault(key, []).append(member)
    return list(groups.items())

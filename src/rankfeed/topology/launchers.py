"""Launchers and their environment variables: a table, and how to read a row of it."""

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace

from rankfeed.errors import TopologyError

REMEDY = (
    "unset what an earlier job or another launcher left behind, or initialise torch.distributed first, "
    "or pass topology=rankfeed.Topology(rank=..., world_size=...)"
)


@dataclass(frozen=True)
class Launcher:
    """One row of the table: the variables that a launcher sets; of several alternatives the first one counts."""

    name: str  # value of Topology.launcher
    rank: tuple[str, ...] = ()
    size: tuple[str, ...] = ()
    local_rank: tuple[str, ...] = ()
    local_size: tuple[str, ...] = ()
    node: tuple[str, ...] = ()
    num_nodes: tuple[str, ...] = ()
    tasks_per_node: tuple[str, ...] = ()  # Slurm's list, which contains the local size
    step: tuple[str, ...] = ()
    launch: tuple[str, ...] = ()  # together they identify a launch, on all its hosts
    applies: Callable[[Mapping[str, str]], bool] = lambda environ: True


def _is_slurm_task(environ: Mapping[str, str]) -> bool:
    """Whether this process is a task of a step: a batch script has a rank and a size, and yet is one process."""
    # Slurm numbers steps that are not tasks (batch script, shell, prolog) from the top of 32 bits down.
    step = environ.get("SLURM_STEP_ID")
    is_number = step is not None and re.fullmatch(r"[0-9]{1,18}", step.strip())
    return step is not None and not (is_number and int(step) >= 0xFFFFFFF0)


def _is_intel_mpi(environ: Mapping[str, str]) -> bool:
    return any(name.startswith("I_MPI_") for name in environ)


TORCHRUN = Launcher(
    "torchrun",
    rank=("RANK",),
    size=("WORLD_SIZE",),
    local_rank=("LOCAL_RANK",),
    local_size=("LOCAL_WORLD_SIZE",),
    node=("GROUP_RANK", "NODE_RANK"),
    num_nodes=("GROUP_WORLD_SIZE",),
)
# Lightning's own children have no RANK until Lightning initialises torch.distributed in them.
LIGHTNING = replace(TORCHRUN, name="lightning", rank=(), node=("NODE_RANK",), num_nodes=())
SLURM = Launcher(
    "slurm",
    rank=("SLURM_PROCID",),
    size=("SLURM_STEP_NUM_TASKS", "SLURM_NTASKS"),
    local_rank=("SLURM_LOCALID",),
    node=("SLURM_NODEID",),
    num_nodes=("SLURM_STEP_NUM_NODES", "SLURM_NNODES"),
    tasks_per_node=("SLURM_STEP_TASKS_PER_NODE", "SLURM_TASKS_PER_NODE"),
    step=("SLURM_STEP_ID",),
    launch=("SLURM_JOB_ID", "SLURM_STEP_ID", "SLURM_RESTART_COUNT"),
    applies=_is_slurm_task,
)
OPENMPI = Launcher(
    "openmpi",
    rank=("OMPI_COMM_WORLD_RANK",),
    size=("OMPI_COMM_WORLD_SIZE",),
    local_rank=("OMPI_COMM_WORLD_LOCAL_RANK",),
    local_size=("OMPI_COMM_WORLD_LOCAL_SIZE",),
    # OMPI_COMM_WORLD_NODE_RANK is not here: it counts processes on this node, over jobs.
    launch=("OMPI_MCA_ess_base_jobid",),
)
MPICH = Launcher(
    "mpich",
    rank=("PMI_RANK",),
    size=("PMI_SIZE",),
    local_rank=("MPI_LOCALRANKID", "PMI_LOCAL_RANK"),
    local_size=("MPI_LOCALNRANKS", "PMI_LOCAL_SIZE"),
    applies=lambda environ: not _is_intel_mpi(environ),
)
INTEL_MPI = replace(MPICH, name="intelmpi", applies=_is_intel_mpi)
MVAPICH2 = Launcher(
    "mvapich2",
    rank=("MV2_COMM_WORLD_RANK",),
    size=("MV2_COMM_WORLD_SIZE",),
    local_rank=("MV2_COMM_WORLD_LOCAL_RANK",),
    local_size=("MV2_COMM_WORLD_LOCAL_SIZE",),
)
# PMIx sets no size: another launcher must. Open MPI also sets PMIX_RANK in a process without a launcher when MPI
# is initialised (Lightning does so if mpi4py is installed), and its children inherit that.
PMIX = Launcher(
    "pmix",
    rank=("PMIX_RANK",),
    launch=("PMIX_NAMESPACE",),
    applies=lambda environ: environ.get("OMPI_MCA_ess") != "singleton",
)
LSF = Launcher(
    "lsf",
    rank=("JSM_NAMESPACE_RANK",),
    size=("JSM_NAMESPACE_SIZE",),
    local_rank=("JSM_NAMESPACE_LOCAL_RANK",),
    local_size=("JSM_NAMESPACE_LOCAL_SIZE",),
    launch=("LSB_JOBID", "LSB_JOBINDEX"),
)
# Launchers that start processes themselves, in the order in which they are read, after torchrun.
OUTER = (SLURM, OPENMPI, MPICH, INTEL_MPI, MVAPICH2, PMIX, LSF)


@dataclass(frozen=True)
class LauncherEnv:
    """The values that one launcher set in the environment, None if it did not; ``variables`` is for messages."""

    launcher: str
    rank: int | None = None
    size: int | None = None
    local_rank: int | None = None
    local_size: int | None = None
    node: int | None = None
    num_nodes: int | None = None
    variables: str = ""


def read_launcher(row: Launcher, environ: Mapping[str, str]) -> LauncherEnv | None:
    """The values of one row of the table, or None if the row does not apply; raises for an invalid value."""
    if not row.applies(environ):
        return None
    fields = (row.rank, row.size, row.local_rank, row.local_size, row.node, row.num_nodes)
    rank, size, local_rank, local_size, node, num_nodes = (_number(names, environ) for names in fields)
    if row.tasks_per_node:
        local_size = _local_tasks(row.tasks_per_node, environ, node or 0)
    names = [name for group in (*fields, row.tasks_per_node, row.step) for name in group if name in environ]
    variables = ", ".join(f"{name}={environ[name]}" for name in names)
    return LauncherEnv(row.name, rank, size, local_rank, local_size, node, num_nodes, variables) if names else None


def node_layout(env: LauncherEnv) -> tuple[int, int, int, int]:
    """Local rank, local size, node and number of nodes, inferred from rank and size if not set."""
    # One node is assumed if the processes per node are unknown, or differ while the nodes are not numbered.
    rank, size = env.rank or 0, env.size or 1
    local_size, num_nodes = env.local_size, env.num_nodes
    if local_size is None and num_nodes and size % num_nodes == 0:
        local_size = size // num_nodes
    if local_size is None:
        return rank if env.local_rank is None else env.local_rank, size, 0, 1
    if local_size < 1:
        return 0, local_size, 0, 1
    local_rank = rank % local_size if env.local_rank is None else env.local_rank
    if num_nodes is None:
        num_nodes = size // local_size if size % local_size == 0 else None
    if num_nodes is None:
        return local_rank, local_size, 0, 1
    node = env.node
    if node is None:  # ranks were assigned node after node, or round robin
        is_round_robin = num_nodes and rank % local_size != local_rank and rank // num_nodes == local_rank
        node = rank % num_nodes if is_round_robin else min(rank // local_size, num_nodes - 1)
    return local_rank, local_size, node, num_nodes


def _number(names: Iterable[str], environ: Mapping[str, str]) -> int | None:
    name = next((name for name in names if name in environ), None)
    if name is None:
        return None
    text = str(environ[name]).strip()
    if not re.fullmatch(r"[0-9]{1,18}", text):
        raise TopologyError(
            f"the environment variable {name} is invalid",
            expected="an integer of at least 0",
            found=f"{name}={environ[name]!r}",
            remedy=REMEDY,
        )
    return int(text)


def _local_tasks(names: Iterable[str], environ: Mapping[str, str], node: int) -> int | None:
    """The number of tasks on a node from Slurm's list, such as ``2(x3),1`` for 2, 2, 2 and 1."""
    name = next((name for name in names if name in environ), None)
    if name is None:
        return None
    first = 0
    for part in environ[name].split(","):
        match = re.fullmatch(r"\s*([0-9]{1,9})(?:\(x([0-9]{1,9})\))?\s*", part)
        if match is None:
            break
        first += int(match[2] or 1)
        if node < first:
            return int(match[1])
    raise TopologyError(
        f"the environment variable {name} does not list the tasks of node {node}",
        expected="a list such as 2(x3),1 that covers all nodes",
        found=f"{name}={environ[name]!r}",
        remedy=REMEDY,
    )

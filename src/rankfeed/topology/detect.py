"""Decides which launcher's environment variables to believe.

Launchers are nested: ``srun`` starts one ``torchrun`` per node, ``mpirun`` inside a Slurm allocation starts its
daemons with ``srun``, and a shell passes on what an earlier job exported. All rows of the launcher table are read:

1. ``torchrun`` marks its children (TORCHELASTIC_RUN_ID) and is always the innermost.
2. A Slurm step and an MPI launcher that agree are one launch. If they disagree, the larger MPI world is believed
   if the step has one task per node, which is how MPI launchers start their daemons.
3. RANK and WORLD_SIZE without that mark may be left over from another job. They are believed if they agree with
   the outer launcher, or describe a larger world in which this task can have started this rank.

Everything else is an error: otherwise every process would read all data without a message.
"""

from collections.abc import Mapping
from dataclasses import replace
from itertools import combinations

from rankfeed.errors import TopologyError
from rankfeed.topology.launchers import (
    LIGHTNING,
    OUTER,
    PMIX,
    REMEDY,
    SLURM,
    TORCHRUN,
    Launcher,
    LauncherEnv,
    read_launcher,
)

_ELASTIC = "TORCHELASTIC_RUN_ID"


def detect_launcher(environ: Mapping[str, str]) -> LauncherEnv | None:
    """The launcher to believe, with rank and size; None if no variable indicates several processes."""
    if _ELASTIC in environ:
        env = read_launcher(TORCHRUN, environ)
        return _complete(env or LauncherEnv(TORCHRUN.name, variables=f"{_ELASTIC}={environ[_ELASTIC]}"))
    inner, outer = _inner(environ), _outer(environ)
    if inner is None or outer is None:
        env = inner or outer
        if env is None:
            _refuse_partial(environ)
            return None
        # WORLD_SIZE=1 needs no rank.
        return _complete(replace(env, rank=0) if inner and env.rank is None and env.size == 1 else env)
    if inner.size is not None and outer.size is not None and inner.size > outer.size:
        is_consistent, believed = _started_by(inner, outer), inner
    else:
        is_consistent, believed = _agree(inner, outer), inner if outer.size is None else outer
    if not is_consistent:
        raise _contradiction(inner, outer)
    return _complete(believed)


def _inner(environ: Mapping[str, str]) -> LauncherEnv | None:
    """RANK and WORLD_SIZE, or what Lightning sets instead; None without either."""
    if "RANK" not in environ and {"LOCAL_RANK", "NODE_RANK", "WORLD_SIZE"} <= environ.keys():
        env = read_launcher(LIGHTNING, environ)
        return None if env is None else replace(env, rank=_lightning_rank(env))
    env = read_launcher(TORCHRUN, environ)
    return env if env is not None and _is_evidence(TORCHRUN, env) else None


def _lightning_rank(env: LauncherEnv) -> int | None:
    """Lightning numbers its children node after node; on other nodes than 0 the size of a node is needed."""
    if env.node == 0:
        return env.local_rank
    if env.node is None or env.local_rank is None or env.local_size is None:
        return None
    return env.node * env.local_size + env.local_rank


def _outer(environ: Mapping[str, str]) -> LauncherEnv | None:
    """Slurm and the MPI launchers together; the size may still be unknown."""
    envs = [env for row in OUTER if (env := read_launcher(row, environ)) is not None and _is_evidence(row, env)]
    for env in envs:
        if env.launcher != PMIX.name:
            _complete(env)
    step = next((env for env in envs if env.launcher == SLURM.name), None)
    others = [env for env in envs if env is not step]
    for left, right in combinations(others, 2):
        if not _agree(left, right):
            raise _contradiction(left, right)
    mpi = next((env for env in others if env.size is not None), others[0] if others else None)
    if step is None or mpi is None:
        return step or mpi
    if _agree(step, mpi):
        return step
    if mpi.size is not None and step.size is not None and mpi.size > step.size == (step.num_nodes or 1):
        return mpi
    raise _contradiction(step, mpi)


def _is_evidence(row: Launcher, env: LauncherEnv) -> bool:
    """Local ranks alone are not evidence of a launch; a Slurm step always is."""
    return row is SLURM or env.rank is not None or env.size is not None


def _refuse_partial(environ: Mapping[str, str]) -> None:
    """Refuse a local rank or node other than 0 without a rank: one of several processes, but not which."""
    for row in (TORCHRUN, *(row for row in OUTER if row is not SLURM)):
        env = read_launcher(row, environ)
        if env is not None and (
            env.local_rank or env.node or (env.local_size or 1) > 1 or (env.num_nodes or 1) > 1
        ):
            raise _incomplete(env)


def _agree(env: LauncherEnv, other: LauncherEnv) -> bool:
    pairs = ((env.rank, other.rank), (env.size, other.size))
    return all(number is None or other_number is None or number == other_number for number, other_number in pairs)


def _started_by(inner: LauncherEnv, outer: LauncherEnv) -> bool:
    """Whether the outer task can have started the inner rank: ranks are numbered task after task."""
    # Variables left over from another job are the same in all tasks, so all tasks but one detect them.
    if inner.rank is None or outer.rank is None or inner.size is None or outer.size is None:
        return True
    if inner.size % outer.size == 0:
        return inner.rank // (inner.size // outer.size) == outer.rank
    return inner.rank >= outer.rank and inner.size - inner.rank >= outer.size - outer.rank


def _complete(env: LauncherEnv) -> LauncherEnv:
    if env.rank is None or env.size is None:
        raise _incomplete(env)
    return env


def _incomplete(env: LauncherEnv) -> TopologyError:
    row = next(row for row in (TORCHRUN, LIGHTNING, *OUTER) if row.name == env.launcher)
    if row is LIGHTNING:
        missing, remedy = "RANK, nor LOCAL_WORLD_SIZE on a node other than 0", f"set LOCAL_WORLD_SIZE, or {REMEDY}"
    elif row is PMIX:
        missing, remedy = "world size, which PMIx does not set", REMEDY
    else:
        names = [
            " or ".join(group) for group, number in ((row.rank, env.rank), (row.size, env.size)) if number is None
        ]
        missing, remedy = " and ".join(names), REMEDY
    return TopologyError(
        f"incomplete {env.launcher} environment: no {missing}",
        expected="rank and world size of this process",
        found=env.variables,
        remedy=remedy,
    )


def _contradiction(env: LauncherEnv, other: LauncherEnv) -> TopologyError:
    return TopologyError(
        f"the variables of {env.launcher} and {other.launcher} contradict each other",
        expected="one rank of one world, or processes started by the tasks of a smaller one",
        found=f"{env.variables}; and {other.variables}",
        remedy=REMEDY,
    )

"""Which of the launchers that speak in the environment to believe.

Launchers are nested in practice: ``srun`` starts one ``torchrun`` a node, ``mpirun`` inside a Slurm allocation
starts its daemons with ``srun``, and a shell passes on what an earlier job exported. So one launcher's variables
cannot simply be believed because they are there. All rows of the table are read, and then:

1. ``torchrun`` marks its children (TORCHELASTIC_RUN_ID) and is always the innermost.
2. A Slurm step and an MPI launcher that agree are one launch. Where they disagree, the larger MPI world is
   believed if the step has one task a node, which is how MPI launchers start their daemons.
3. RANK and WORLD_SIZE without that mark may be left over. They are believed where they agree with the outer
   launcher, or speak of a larger world than it, of which this task can have started this rank.

All else is an error: reading everything on every process without a word is worse than not starting.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from itertools import combinations

from rankfeed.errors import TopologyError
from rankfeed.topology.launchers import LIGHTNING, OUTER, PMIX, REMEDY, SLURM, TORCHRUN, Claim, Launcher, read

ELASTIC = "TORCHELASTIC_RUN_ID"


def find(environ: Mapping[str, str]) -> Claim | None:
    """The launcher to believe, with rank and size known, or None where nothing speaks of several processes.

    Args:
        environ: environment variables.

    Raises:
        TopologyError: half-set, unreadable or contradictory variables.

    Examples:
        >>> find({"RANK": "1", "WORLD_SIZE": "4"}).size
        4
    """
    if ELASTIC in environ:
        return _complete(
            read(TORCHRUN, environ) or Claim(TORCHRUN.name, variables=f"{ELASTIC}={environ[ELASTIC]}")
        )
    inner = _inner(environ)
    outer = _outer(environ)
    if inner is None:
        if outer is None:
            _refuse_hints(environ)
            return None
        return _complete(outer)
    if outer is None:
        # WORLD_SIZE=1 alone says all there is to say.
        return _complete(replace(inner, rank=0) if inner.rank is None and inner.size == 1 else inner)
    if inner.size is not None and outer.size is not None and inner.size > outer.size:
        if not _fits_inside(inner, outer):
            raise _contradiction(inner, outer)
        return _complete(inner)
    if not _agree(inner, outer):
        raise _contradiction(inner, outer)
    return _complete(outer if outer.size is not None else inner)


def _inner(environ: Mapping[str, str]) -> Claim | None:
    """RANK and WORLD_SIZE, whoever set them, or what Lightning sets instead; None where neither is."""
    if "RANK" not in environ and {"LOCAL_RANK", "NODE_RANK", "WORLD_SIZE"} <= environ.keys():
        claim = read(LIGHTNING, environ)
        return None if claim is None else replace(claim, rank=_rank_of_child(claim))
    claim = read(TORCHRUN, environ)
    return claim if claim is not None and _speaks(TORCHRUN, claim) else None


def _rank_of_child(claim: Claim) -> int | None:
    """Lightning numbers its children node after node; on other nodes than 0 that takes the size of a node."""
    if claim.node == 0:
        return claim.local_rank
    if claim.node is None or claim.local_rank is None or claim.local_size is None:
        return None
    return claim.node * claim.local_size + claim.local_rank


def _outer(environ: Mapping[str, str]) -> Claim | None:
    """What Slurm and the MPI launchers say together; the size may still be unknown."""
    claims = [claim for row in OUTER if (claim := read(row, environ)) is not None and _speaks(row, claim)]
    for claim in claims:
        if claim.launcher != PMIX.name:
            _complete(claim)
    step = next((claim for claim in claims if claim.launcher == SLURM.name), None)
    others = [claim for claim in claims if claim is not step]
    for one, other in combinations(others, 2):
        if not _agree(one, other):
            raise _contradiction(one, other)
    mpi = next((claim for claim in others if claim.size is not None), others[0] if others else None)
    if step is None or mpi is None:
        return step or mpi
    if _agree(step, mpi):
        return step
    if mpi.size is not None and step.size is not None and mpi.size > step.size == (step.num_nodes or 1):
        return mpi
    raise _contradiction(step, mpi)


def _speaks(row: Launcher, claim: Claim) -> bool:
    """Local ranks alone say nothing; inside a Slurm step even silence does."""
    return row is SLURM or claim.rank is not None or claim.size is not None


def _refuse_hints(environ: Mapping[str, str]) -> None:
    """One of several processes, but not which: a local rank or a node other than 0, and no world to go with it."""
    for row in (TORCHRUN, *(row for row in OUTER if row is not SLURM)):
        claim = read(row, environ)
        if claim is not None and (
            claim.local_rank or claim.node or (claim.local_size or 1) > 1 or (claim.num_nodes or 1) > 1
        ):
            raise _half_set(claim)


def _agree(one: Claim, other: Claim) -> bool:
    """Whether nothing that both say differs."""
    pairs = ((one.rank, other.rank), (one.size, other.size))
    return all(mine is None or theirs is None or mine == theirs for mine, theirs in pairs)


def _fits_inside(inner: Claim, outer: Claim) -> bool:
    """Whether this can be a process that this task started: they count task after task, as launchers do.

    What is left over from another job says the same to all tasks, so all but one of them find out.
    """
    if inner.rank is None or outer.rank is None or inner.size is None or outer.size is None:
        return True
    if inner.size % outer.size == 0:
        return inner.rank // (inner.size // outer.size) == outer.rank
    return inner.rank >= outer.rank and inner.size - inner.rank >= outer.size - outer.rank


def _complete(claim: Claim) -> Claim:
    if claim.rank is None or claim.size is None:
        raise _half_set(claim)
    return claim


def _half_set(claim: Claim) -> TopologyError:
    rows = {row.name: row for row in (TORCHRUN, LIGHTNING, *OUTER)}
    row = rows[claim.launcher]
    if row is LIGHTNING:
        expected, remedy = "RANK, or LOCAL_WORLD_SIZE on nodes other than 0", f"set LOCAL_WORLD_SIZE, or {REMEDY}"
    elif row is PMIX:
        expected, remedy = "a size, which PMIx does not set and no other launcher did", REMEDY
    else:
        expected, remedy = f"both {' or '.join(row.rank)} and {' or '.join(row.size)}", REMEDY
    return TopologyError(
        f"there may be several processes, but {claim.launcher}'s variables do not say which this is of how many",
        expected=expected,
        found=claim.variables,
        remedy=remedy,
    )


def _contradiction(one: Claim, other: Claim) -> TopologyError:
    return TopologyError(
        f"{one.launcher}'s and {other.launcher}'s variables contradict each other",
        expected="one rank of one world, or processes started by the tasks of a smaller one",
        found=f"{one.variables}; and {other.variables}",
        remedy=REMEDY,
    )

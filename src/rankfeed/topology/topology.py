"""The topology of a job as one process sees it: a few integers, detected or given."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING, Self

import numpy as np

from rankfeed._util.validate import check_environ, check_int, check_name, check_names, invalid
from rankfeed.errors import TopologyError
from rankfeed.topology.detect import detect_launcher
from rankfeed.topology.launchers import REMEDY, TORCHRUN, LauncherEnv, node_layout, read_launcher

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

#: What identifies a DeviceMesh.
_MESH_ATTRIBUTES = ("mesh_dim_names", "mesh", "get_coordinate")


@dataclass(frozen=True)
class Topology:
    """Rank and world size of this process, and its node.

    Args:
        rank: of this process, from 0: any integer type, no float or bool.
        world_size: number of processes that share the data.
        local_rank: rank on this node, as the launcher sets it (0 in all processes of
            ``torchrun --virtual-local-rank``).
        local_world_size: number of processes on this node.
        node: of this process, from 0.
        num_nodes: number of nodes.
        launcher: name of the launcher; information only.

    Raises:
        ArgumentError: a value has an invalid type.
        TopologyError: values contradict each other, such as a rank that is not below the world size.

    Examples:
        >>> Topology(rank=1, world_size=2, local_rank=1, local_world_size=2).world_size
        2
        >>> Topology(rank=2, world_size=2)
        Traceback (most recent call last):
            ...
        rankfeed.errors.TopologyError: rank is not below world_size
          expected: 0 <= rank < 2
          found: rank=2
    """

    rank: int = 0
    world_size: int = 1
    local_rank: int = 0
    local_world_size: int = 1
    node: int = 0
    num_nodes: int = 1
    launcher: str = "single"

    def __post_init__(self) -> None:
        for field in fields(self):
            if field.name != "launcher":
                object.__setattr__(self, field.name, check_int(field.name, getattr(self, field.name)))
        object.__setattr__(self, "launcher", check_name("launcher", self.launcher))
        self._check("rank", "world_size")
        self._check("local_rank", "local_world_size")
        self._check("node", "num_nodes")
        for part in ("local_world_size", "num_nodes"):
            if getattr(self, part) > self.world_size:
                raise TopologyError(
                    f"{part} is above world_size",
                    expected=f"{part} <= {self.world_size}",
                    found=f"{part}={getattr(self, part)}",
                )

    def _check(self, index: str, count: str) -> None:
        value, bound = getattr(self, index), getattr(self, count)
        if bound < 1:
            raise TopologyError(f"{count} is not positive", expected=f"{count} >= 1", found=f"{count}={bound}")
        if not 0 <= value < bound:
            problem = "is negative" if value < 0 else f"is not below {count}"
            raise TopologyError(f"{index} {problem}", expected=f"0 <= {index} < {bound}", found=f"{index}={value}")

    @classmethod
    def detect(cls, environ: Mapping[str, str] | None = None) -> Self:
        """Detect the topology from ``torch.distributed`` or the launcher's environment variables.

        An initialised ``torch.distributed`` takes precedence, then torchrun, Slurm (inside a step), Open MPI,
        MPICH, Intel MPI, MVAPICH2, PMIx and LSF. Nothing is imported for it.

        Args:
            environ: variables to read instead of those of this process; ``torch.distributed`` is then ignored.

        Raises:
            ArgumentError: ``environ`` is not a mapping of strings.
            TopologyError: the variables are incomplete or contradict each other, or there are several processes
                that cannot be told apart.

        Examples:
            >>> Topology.detect({"RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"})
            Topology(rank=3, world_size=4, local_rank=1, local_world_size=2, node=1, num_nodes=2,
                     launcher='torchrun')
            >>> Topology.detect({})
            Topology(rank=0, world_size=1, local_rank=0, local_world_size=1, node=0, num_nodes=1,
                     launcher='single')
            >>> Topology.detect({"WORLD_SIZE": "4"})
            Traceback (most recent call last):
                ...
            rankfeed.errors.TopologyError: incomplete torchrun environment: no RANK
              ...
        """
        if environ is not None:
            return cls._from_env(detect_launcher(check_environ(environ)))
        group = process_group()
        return cls._from_env(detect_launcher(os.environ)) if group is None else cls._from_group(*group)

    @classmethod
    def from_mesh(cls, mesh: DeviceMesh, dims: str | Sequence[str]) -> Self:
        """The coordinates of this process along some dimensions of a torch ``DeviceMesh``.

        Name the dimensions that see different data (data-parallel, sharded or replicated). Peers along all other
        dimensions (tensor-, context-, pipeline-parallel) get the same rank, so that they read the same samples.

        Args:
            mesh: a mesh with named dimensions.
            dims: one name, or several in the order in which they are flattened (the last varies fastest).

        Raises:
            ArgumentError: ``mesh`` is not a mesh, or ``dims`` are not names.
            TopologyError: a dimension is unknown or repeated, or this process is not part of the mesh.

        Examples:
            >>> from types import SimpleNamespace
            >>> mesh = SimpleNamespace(mesh_dim_names=("dp", "tp"), mesh=np.arange(4).reshape(2, 2),
            ...                        get_coordinate=lambda: [1, 0])
            >>> Topology.from_mesh(mesh, "dp").rank
            1
        """
        if isinstance(mesh, type) or not all(hasattr(mesh, name) for name in _MESH_ATTRIBUTES):
            raise invalid("mesh", "a torch.distributed.device_mesh.DeviceMesh", mesh)
        axes = _axes(mesh, (dims,) if isinstance(dims, str) else tuple(check_names("dims", dims)))
        coordinate = mesh.get_coordinate()
        if coordinate is None:
            raise TopologyError("this process is not part of the mesh", remedy="call this on members only")
        members = np.asarray(mesh.mesh.tolist(), dtype=np.int64)
        shape = [members.shape[axis] for axis in axes]
        # For each member its rank along `axes`: row-major, in the given order.
        ranks = np.ravel_multi_index([np.indices(members.shape)[axis] for axis in axes], shape)
        rank, size = int(ranks[tuple(coordinate)]), int(np.prod(shape))
        detected = cls.detect()
        on_this_node = np.unique(ranks[members // detected.local_world_size == detected.node])
        # The node number identifies the members on this node only if ranks were assigned node after node.
        in_order = detected.rank // detected.local_world_size == detected.node
        if in_order and detected.num_nodes <= size and rank in on_this_node:
            node, num_nodes, local = detected.node, detected.num_nodes, on_this_node
        else:
            node, num_nodes, local = 0, 1, np.arange(size)
        return cls(rank, size, int(np.searchsorted(local, rank)), len(local), node, num_nodes, "mesh")

    @staticmethod
    def worker() -> tuple[int, int]:
        """The current torch ``DataLoader`` worker as (id, number of workers); (0, 1) outside of one.

        Examples:
            >>> Topology.worker()
            (0, 1)
        """
        data = sys.modules.get("torch.utils.data")
        ask = getattr(data, "get_worker_info", None)
        info = None if ask is None else ask()
        return (0, 1) if info is None else (int(info.id), int(info.num_workers))

    @property
    def global_rank(self) -> int:
        """``rank * num_workers + worker id``, evaluated at each access.

        Examples:
            >>> Topology(rank=1, world_size=2).global_rank
            1
        """
        worker, num_workers = self.worker()
        return self.rank * num_workers + worker

    @property
    def global_world_size(self) -> int:
        """``world_size * num_workers``, evaluated at each access.

        Examples:
            >>> Topology(rank=1, world_size=2).global_world_size
            2
        """
        return self.world_size * self.worker()[1]

    @classmethod
    def _from_env(cls, env: LauncherEnv | None) -> Self:
        if env is None:
            return cls()
        try:
            return cls(env.rank or 0, env.size or 0, *node_layout(env), env.launcher)
        except TopologyError as error:
            raise TopologyError(
                f"the variables of {env.launcher} contradict each other: {error.summary}",
                expected=error.expected,
                found=env.variables,
                remedy=REMEDY,
            ) from None

    @classmethod
    def _from_group(cls, rank: int, size: int) -> Self:
        """Rank and size of the process group; the rest from a launcher that agrees with it, else one node."""
        with suppress(TopologyError):
            env = detect_launcher(os.environ)
            if env is not None and (env.rank, env.size) == (rank, size):
                return cls._from_env(env)
        world = LauncherEnv("torch.distributed", rank, size)
        with suppress(TopologyError):
            local = read_launcher(TORCHRUN, os.environ) or world
            return cls._from_env(replace(local, launcher=world.launcher, rank=rank, size=size))
        return cls._from_env(world)


def process_group() -> tuple[int, int] | None:
    """Rank and size of torch's default process group, if torch is imported and the group initialised."""
    dist = sys.modules.get("torch.distributed")
    if dist is None:
        return None
    # The module lacks names while it is being imported, or if torch was built without it.
    if not all(getattr(dist, asked, bool)() for asked in ("is_available", "is_initialized")):
        return None
    return int(dist.get_rank()), int(dist.get_world_size())


def _axes(mesh: DeviceMesh, dims: tuple[str, ...]) -> list[int]:
    names = tuple(mesh.mesh_dim_names or ())
    unknown = [dim for dim in dims if dim not in names]
    if unknown or not dims or len(set(dims)) < len(dims):
        raise TopologyError(
            f"the mesh has no dimension {unknown[0]!r}" if unknown else "dims must name each dimension once",
            expected=f"one or more of {', '.join(map(repr, names)) or '(the mesh has no names)'}",
            found=dims,
            remedy="create the mesh with mesh_dim_names, and pass those that see different data",
        )
    return [names.index(dim) for dim in dims]

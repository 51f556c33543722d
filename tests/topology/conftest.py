"""The environment of no launcher."""

import os

import pytest

PREFIXES = (
    "RANK",
    "WORLD_SIZE",
    "LOCAL_",
    "GROUP_",
    "NODE_RANK",
    "TORCHELASTIC",
    "SLURM_",
    "OMPI_",
    "PMI_",
    "PMIX_",
    "MPI_",
    "I_MPI_",
    "MV2_",
    "JSM_",
)


@pytest.fixture
def clean(monkeypatch):
    """Take every launcher's variables out of this process's environment."""
    for name in [name for name in os.environ if name.startswith(PREFIXES)]:
        monkeypatch.delenv(name)

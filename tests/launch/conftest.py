"""A Slurm of two nodes for all tests of launches."""

from collections.abc import Iterator

import pytest
from tests.launch.slurm import slurm
from tests.support.launchers import need


@pytest.fixture(scope="session")
def cluster() -> Iterator[dict[str, str]]:
    """The environment in which srun, sbatch and salloc reach it."""
    need("srun")
    with slurm(nodes=2, cpus=4) as environ:
        yield environ

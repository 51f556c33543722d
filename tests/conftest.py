"""What all tests share: hypothesis profiles, one thread a process, groups of tests that must not overlap."""

import gc
import os
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import HealthCheck, settings
from tests.support.environ import of_no_launcher

# Four workers, each with processes of its own, on two cores: more threads only fight. Set before torch is
# imported, and inherited by whatever the tests start.
os.environ.setdefault("OMP_NUM_THREADS", "1")

# Ray's workers would run at niceness 15, and get next to nothing beside other tests.
os.environ.setdefault("RAY_worker_niceness", "0")

#: What a launcher has said to pytest itself.
LAUNCHED = os.environ.keys() - of_no_launcher().keys()

#: Scripts that tests start with arguments of their own: nothing to collect there.
collect_ignore_glob = ["*/jobs/*"]

#: Tests that start ranks, in groups of about one length: of each group one runs at a time. The longest group is a
#: lower limit of the time of all tests; two examinations of the doctor would see each other's shared memory.
START_PROCESSES = {
    "tests/writer/test_rank_runner": "builders",
    "tests/writer/test_ray_": "builders",
    "tests/cli/test_doctor": "doctors",
    "tests/faults/": "builders",
    "tests/integrations/": "libraries",
    "tests/launch/": "launchers",
    "tests/diagnostics/test_doctor": "doctors",
    "tests/test_documented_code": "pages",  # which share a process
    "tests/zoo/": "doctors",
}

# No deadlines: how long an example took on a shared machine says nothing about the code.
settings.register_profile("quick", deadline=None, max_examples=25)
settings.register_profile("default", deadline=None)
settings.register_profile("ci", deadline=None, derandomize=True, print_blob=True, max_examples=50)
settings.register_profile("soak", deadline=None, max_examples=5_000, suppress_health_check=[HealthCheck.too_slow])


def pytest_configure(config: pytest.Config) -> None:
    """Choose the hypothesis profile: the same examples every time in CI, more in a soak, fewer in `make test`."""
    marks = config.getoption("markexpr", "")
    if marks == "soak":
        settings.load_profile("soak")
    elif os.environ.get("CI"):
        settings.load_profile("ci")
    elif "not slow" in marks:
        settings.load_profile("quick")
    else:
        settings.load_profile("default")


def pytest_collection_finish(session: pytest.Session) -> None:
    """What was imported so far stays: the garbage collector need not look at it in every test that calls it."""
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="session")
def thorough(pytestconfig: pytest.Config) -> bool:
    """Whether slow tests run too. Otherwise a test that can be long is short."""
    return "not slow" not in pytestconfig.getoption("markexpr", "")


@pytest.fixture(autouse=True)
def environment_put_back() -> Iterator[None]:
    """What a test leaves in the environment (frameworks say there who a rank is) reaches no other test."""
    before = dict(os.environ)
    yield
    for name in os.environ.keys() - before.keys():
        del os.environ[name]
    for name in before:
        if os.environ.get(name) != before[name]:
            os.environ[name] = before[name]


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """No rank is told by what a fixture of a whole module left: those are set up before the one above looks."""
    for name in os.environ.keys() - of_no_launcher().keys() - LAUNCHED:
        del os.environ[name]


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Send each group of tests that start ranks to one xdist worker, and each file of tests of sources, whose
    library and data the other workers do not need then; others one by one.

    xdist's own marker for this, ``xdist_group``, is silently without effect from pytest 9.2 on with xdist 3.8
    (pytest-xdist#1386). Where a test lies says it as well.
    """
    from xdist.scheduler import LoadScopeScheduling

    class ProcessesTogether(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            scope = nodeid.partition("::")[0] if nodeid.startswith("tests/sources/") else nodeid
            return next((group for start, group in START_PROCESSES.items() if nodeid.startswith(start)), scope)

    return ProcessesTogether(config, log)

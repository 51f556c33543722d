"""Under ``python -W error`` nothing of the package is left open, however a program and its iterations end."""

import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

PREAMBLE = """
import gc, os, signal, sys, tempfile
import rankfeed as rf
from rankfeed._util.workers import pool
from rankfeed.loading.engines import process

process.INLINE_AFTER = 60.0
folder = tempfile.mkdtemp()
records = rf.from_dataset([{"x": i} for i in range(400)])
stream = rf.from_iterable(lambda: ({"x": i} for i in range(40)))

def loader(source, **options):
    return rf.Loader(source, 4, num_workers=2, topology=rf.Topology(), **options)

def processes(source=records):
    return loader(source, worker_kind="process")

"""
PROGRAMS = {
    "a loader is dropped": "ours = processes(); list(ours); del ours",
    "an iteration is dropped": "it = iter(processes()); next(it); del it",
    "the program ends between two epochs": "ours = processes(); list(ours)",
    "the program ends during an iteration": "it = iter(processes()); next(it)",
    "a fork inherits an iteration": """
        it = iter(processes())
        next(it)
        child = os.fork()
        if child == 0:
            del it
            sys.exit()
        assert os.waitpid(child, 0)[1] == 0
        assert sum(len(batch["x"]) for batch in it) == 396
    """,
    "workers are killed": """
        it = iter(processes())
        next(it)
        for each in list(pool._pools):
            for worker in each.workers:
                worker.kill()
        assert sum(1 for _ in it) == 99
    """,
    "the server is killed": """
        ours = processes()
        list(ours)
        for each in pool._servers.values():
            each._process.kill()
        assert sum(1 for _ in ours) == 100
    """,
    "a stream in processes": "list(processes(stream)); it = iter(processes(stream)); next(it)",
    "a stream in threads": "list(loader(stream)); it = iter(loader(stream)); next(it)",
    "threads": "list(loader(records)); it = iter(loader(records)); next(it)",
    "a dataset is written": """
        source = rf.write(records, folder + "/a", workers=2, shard_bytes=1000, progress=False)
        rf.write(({"x": i} for i in range(40)), folder + "/b", progress=False)
        it = iter(loader(source)); next(it)
    """,
    "a directory is prepared": """
        def build(path):
            (path / "file").write_text("")

        rf.prepare_once(folder + "/prepared", build)
    """,
}


@pytest.mark.parametrize("name", PROGRAMS)
def test_nothing_is_left_open(name: str, tmp_path: Path) -> None:
    program = PREAMBLE + textwrap.dedent(PROGRAMS[name]) + "\ngc.collect()\n"
    command = [sys.executable, "-W", "error", "-c", program]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, timeout=600, check=False)
    assert (done.returncode, done.stderr) == (0, "")

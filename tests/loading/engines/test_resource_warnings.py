"""Under ``python -W error`` nothing of the package is left open, however a program and its iterations end."""

import subprocess
import sys
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
#: One after the other in one program; what is left open is said when it ends, or when garbage is collected.
TOGETHER = """
# a loader is dropped
ours = processes(); list(ours); del ours
gc.collect()
# an iteration is dropped
it = iter(processes()); next(it); del it
gc.collect()
# workers are killed
it = iter(processes())
next(it)
for each in list(pool._pools):
    for worker in each.workers:
        worker.kill()
assert sum(1 for _ in it) == 99
# the server is killed
ours = processes()
list(ours)
for each in pool._servers.values():
    each._process.kill()
assert sum(1 for _ in ours) == 100
del ours, it
gc.collect()
# streams in processes and in threads, and threads
for make, source in ((processes, stream), (loader, stream), (loader, records)):
    list(make(source)); it = iter(make(source)); next(it); del it
    gc.collect()
# a dataset is written
source = rf.write(records, folder + "/a", workers=2, shard_bytes=1000, progress=False)
rf.write(({"x": i} for i in range(40)), folder + "/b", progress=False)
it = iter(loader(source)); next(it); del it
# a directory is prepared
rf.prepare_once(folder + "/prepared", lambda path: (path / "file").write_text(""))
"""
#: How a program ends.
ENDINGS = {
    "after all of them": TOGETHER,
    "between two epochs": "ours = processes(); list(ours)",
    "during an iteration of processes": "it = iter(processes()); next(it)",
    "during iterations of streams and threads": """
its = [iter(make(source)) for make, source in ((processes, stream), (loader, stream), (loader, records))]
for it in its:
    next(it)
""",
    "after a fork that inherited an iteration": """
it = iter(processes())
next(it)
child = os.fork()
if child == 0:
    del it
    sys.exit()
assert os.waitpid(child, 0)[1] == 0
assert sum(len(batch["x"]) for batch in it) == 396
""",
}
SLOW = ("between two epochs", "during iterations of streams and threads")


@pytest.mark.parametrize(
    "ending", [pytest.param(name, marks=pytest.mark.slow if name in SLOW else ()) for name in ENDINGS]
)
def test_no_resource_warning_is_raised_at_exit_for_each_way_an_iteration_ends(ending: str, tmp_path: Path) -> None:
    command = [sys.executable, "-W", "error", "-c", f"{PREAMBLE}{ENDINGS[ending]}\ngc.collect()\n"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, timeout=600, check=False)
    assert (done.returncode, done.stderr) == (0, ""), done.stderr

"""Import, loaders without worker processes, samplers, sources and prepare_once use no call that only Linux has."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tests.sources import writers
from tests.sources.compare import digests
from tests.support.jobs import run_python
from tests.support.portable import HIDE_LINUX_CALLS

LOADERS = """
import rankfeed as rf

source = rf.from_dataset([{"x": number, "tokens": [1] * (number % 3)} for number in range(40)])

def double(sample, rng):
    return {**sample, "y": 2 * sample["x"], "draw": rng.random()}

for workers in (0, 2):
    loader = rf.Loader(source, 4, shuffle=True, transform=double, num_workers=workers)
    batches = list(loader)
    assert sorted(x for batch in batches for x in batch["x"].tolist()) == list(range(40))
    assert loader.state_dict()["epoch"] == 1
    assert loader.stats()["private_bytes"] == 0
    stream = rf.Loader(rf.from_iterable(lambda: ({"x": number} for number in range(9))), 2, num_workers=workers)
    assert [x for batch in stream for x in batch["x"].tolist()] == list(range(9))
assert sorted(rf.DistributedSampler(9, 2, shuffle=True)) == list(range(9))
assert len(rf.DistributedBatchSampler(9, 2)) == 5
assert list(rf.split(range(3))) == [0, 1, 2]
try:
    next(iter(rf.Loader(source, 4, num_workers=2, worker_kind="process")))
except rf.errors.ArgumentError as error:
    print(error)
"""

SOURCES = """
import json, pathlib, sys
import rankfeed as rf
from tests.sources import writers
from tests.sources.compare import digests

for name, (folder, expected) in json.load(sys.stdin).items():
    source = writers.open_as(name, pathlib.Path(folder))
    assert digests([source[i] for i in range(len(source))]) == expected, name
    print(name, source.fingerprint)
    if not name.startswith("pyg"):
        loader = rf.Loader(source, 8, id_column="id", num_workers=2)
        assert sorted(row for batch in loader for row in batch["id"].tolist()) == list(range(len(source))), name
"""

PREPARE = """
import os, threading, sys
import rankfeed as rf

path, built = sys.argv[1], []

def build(key):
    def write(staging):
        built.append(key)
        (staging / "file").write_text(key)
    return write

def prepare():
    assert (rf.prepare_once(path, build("1"), key="1") / "file").read_text() == "1"

threads = [threading.Thread(target=prepare) for _ in range(4)]
for thread in threads: thread.start()
for thread in threads: thread.join(60)
assert built == ["1"], built
with open(path + "/file") as before:
    rf.prepare_once(path, build("2"), key="2")
    assert before.read() == "1"
assert (rf.prepare_once(path, build("2"), key="2") / "file").read_text() == "2"
assert built == ["1", "2"] and os.listdir(os.path.dirname(path)) == ["data"], os.listdir(os.path.dirname(path))

rf.write(({"x": i} for i in range(50)), path + "-written", progress=False)
assert [rf.open(path + "-written")[i]["x"] for i in range(50)] == list(range(50))
"""


@pytest.mark.timeout(300)
def test_loaders_and_samplers_work_without_linux_calls_but_worker_processes_are_an_error() -> None:
    printed = run_python(HIDE_LINUX_CALLS + LOADERS)
    assert "worker processes need Linux 5.3" in printed
    assert "worker_kind='thread'" in printed


@pytest.mark.timeout(300)
def test_every_format_is_read_without_linux_calls_and_with_the_same_fingerprint(tmp_path: Path) -> None:
    written = [writers.make(name, tmp_path / name) for name in writers.FORMATS]
    given = {item.name: (str(item.folder), digests(item.expected)) for item in written}
    printed = run_python(HIDE_LINUX_CALLS + SOURCES, given=json.dumps(given), PYTHONHASHSEED="1")
    fingerprints = {item.name: item.open().fingerprint for item in written}
    assert dict(line.split() for line in printed.splitlines()) == fingerprints


@pytest.mark.timeout(300)
def test_prepare_once_and_write_work_without_linux_calls(tmp_path: Path) -> None:
    run_python(HIDE_LINUX_CALLS + PREPARE, str(tmp_path / "once" / "data"))

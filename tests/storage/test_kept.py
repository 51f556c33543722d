"""Files stay open as long as there is room for them, in one data set and in the whole process."""

import errno
import multiprocessing
import os
import re
import resource
import subprocess
import sys
import textwrap
import threading
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from rankfeed.errors import SourceError
from rankfeed.storage import kept as module
from rankfeed.storage.kept import Kept


def test_the_last_ones_used_stay() -> None:
    kept, opened = Kept[str](), Counter[int]()

    def get(number: int) -> None:
        def made() -> str:
            opened[number] += 1
            return str(number)

        assert kept.get(number, made, most=2) == str(number)

    for number in (1, 2, 1, 3, 1, 2):
        get(number)
    assert opened == Counter({1: 1, 2: 2, 3: 1})


def test_all_data_sets_together_keep_a_share_of_what_the_process_may_open(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda _: (40, 40))
    monkeypatch.setattr(module, "_all", type(module._all)())
    several: list[Kept[int]] = [Kept() for _ in range(5)]
    for number in range(30):
        for each in several:
            assert each.get(number, lambda number=number: number, most=8) == number  # type: ignore[misc]
            assert sum(map(len, several)) <= 10
    assert [len(each) for each in several] == [2] * 5
    monkeypatch.setattr(resource, "getrlimit", lambda _: (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    for number in range(30):
        several[0].get(number, lambda number=number: number, most=20)  # type: ignore[misc]
    assert len(several[0]) == 20


def test_threads_get_what_they_asked_for_while_others_close_it() -> None:
    kept, wrong = Kept[int](), []

    def read(seed: int) -> None:
        for number in range(5000):
            asked = (number * seed) % 7
            if kept.get(asked, lambda: asked, most=3) != asked:  # noqa: B023
                wrong.append(asked)

    threads = [threading.Thread(target=read, args=(seed,)) for seed in range(1, 5)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
    assert len(kept) <= 3


def test_files_that_are_not_in_use_are_closed_where_no_more_may_be_opened(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(module, "_all", type(module._all)())
    others, kept = Kept[int](), Kept[int]()
    for number in range(5):
        others.get(number, lambda number=number: number, most=8)  # type: ignore[misc]
    error: OSError = OSError(errno.EMFILE, "Too many open files")

    def opened() -> int:
        if len(others):
            raise SourceError("the file cannot be read", where="here") from error
        return 7

    assert kept.get(0, opened, most=8) == 7
    others.get(0, lambda: 0, most=8)
    error = OSError(errno.EACCES, "Permission denied")
    with pytest.raises(SourceError, match="cannot be read"):
        kept.get(1, opened, most=8)
    assert (len(others), len(kept)) == (1, 1)


def _get(kept: Any, results: Any) -> None:
    results.put(kept.get(1, lambda: "opened", most=2))


def test_a_forked_child_has_what_was_open() -> None:
    kept, context = Kept[str](), multiprocessing.get_context("fork")
    kept.get(1, lambda: "inherited", most=2)
    results = context.Queue()
    child = context.Process(target=_get, args=(kept, results), daemon=True)
    child.start()
    assert results.get(timeout=200) == "inherited"
    child.join(200)


SCRIPT = """
    import os, resource, sys
    import pyarrow as pa
    import rankfeed as rf

    resource.setrlimit(resource.RLIMIT_NOFILE, (256, 256))
    sources = [rf.open(sys.argv[1], format="arrow") for _ in range(5)]
    for source in sources:
        assert source.fetch(range(len(source)))["x"].gather().tolist() == list(range(len(source)))
    print("open", len(os.listdir("/proc/self/fd")))
"""


ONE_BATCH = """
    import resource, sys
    import rankfeed as rf

    resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64))
    source = rf.open(sys.argv[1], format="arrow")
    try:
        source.fetch(range(len(source)))
    except rf.errors.SourceError as error:
        print(error)
    print(source.fetch(range(10))["x"].gather().tolist())
"""


def _run(script: str, folder: Path) -> str:
    """What a script prints that reads a folder of 80 files, each with a row that is its number."""
    import pyarrow as pa

    for number in range(80):
        batch = pa.record_batch({"x": [number]})
        with pa.ipc.new_file(str(folder / f"{number:03}.arrow"), batch.schema) as writer:
            writer.write(batch)
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(script), str(folder)],
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.skipif(not os.path.isdir("/proc/self/fd"), reason="Linux")
def test_a_batch_that_lies_in_more_files_than_may_be_open_is_told_as_such(tmp_path: Path) -> None:
    printed = _run(ONE_BATCH, tmp_path)
    assert re.search(r"too many files[\s\S]*\d+\.arrow[\s\S]*ulimit -n", printed)
    assert printed.splitlines()[-1] == str(list(range(10)))


@pytest.mark.skipif(not os.path.isdir("/proc/self/fd"), reason="Linux")
def test_many_data_sets_of_many_files_are_read_in_one_process(tmp_path: Path) -> None:
    assert int(_run(SCRIPT, tmp_path).split()[-1]) < 128

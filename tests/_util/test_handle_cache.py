"""Files stay open within the limits of their cache and of the process."""

import errno
import os
import re
import resource
import textwrap
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pyarrow as pa
import pytest
from tests.support.jobs import run_python
from tests.support.tables import write_table

from rankfeed._util import handle_cache as module
from rankfeed._util.handle_cache import HandleCache
from rankfeed.errors import SourceError


def test_a_handle_cache_keeps_the_most_recently_used_handles_open() -> None:
    cache, opened = HandleCache[str](2), Counter[int]()

    def get(key: int) -> None:
        def made() -> str:
            opened[key] += 1
            return str(key)

        assert cache.get(key, made) == str(key)

    for requested in (1, 2, 1, 3, 1, 2):
        get(requested)
    assert opened == Counter({1: 1, 2: 2, 3: 1})


def test_all_handle_caches_together_stay_within_a_share_of_the_open_file_limit(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda _: (40, 40))
    monkeypatch.setattr(module, "_caches", type(module._caches)())
    caches: list[HandleCache[int]] = [HandleCache(20) for _ in range(5)]
    for key in range(30):
        for cache in caches:
            assert cache.get(key, lambda key=key: key) == key  # type: ignore[misc]
            assert sum(map(len, caches)) <= 10
    assert [len(cache) for cache in caches] == [2] * 5
    monkeypatch.setattr(resource, "getrlimit", lambda _: (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    for key in range(30):
        caches[0].get(key, lambda key=key: key)  # type: ignore[misc]
    assert len(caches[0]) == 20


def test_threads_get_the_handle_of_their_key_while_other_threads_evict_handles() -> None:
    cache, wrong = HandleCache[int](3), []

    def read(seed: int) -> None:
        for turn in range(5000):
            asked = (turn * seed) % 7
            if cache.get(asked, lambda: asked) != asked:  # noqa: B023
                wrong.append(asked)

    with ThreadPoolExecutor(4) as threads:
        list(threads.map(read, range(1, 5)))
    assert not wrong
    assert len(cache) <= 3


def test_at_the_open_file_limit_handles_of_other_caches_are_closed_to_open_a_file(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(module, "_caches", type(module._caches)())
    others, cache = HandleCache[int](8), HandleCache[int](8)
    for key in range(5):
        others.get(key, lambda key=key: key)  # type: ignore[misc]
    error: OSError = OSError(errno.EMFILE, "Too many open files")

    def opened() -> int:
        if len(others):
            raise SourceError("the file cannot be read", where="here") from error
        return 7

    assert cache.get(0, opened) == 7
    others.get(0, lambda: 0)
    error = OSError(errno.EACCES, "Permission denied")
    with pytest.raises(SourceError, match="cannot be read"):
        cache.get(1, opened)
    assert (len(others), len(cache)) == (1, 1)


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
    for index in range(80):
        write_table(pa.table({"x": [index]}), folder / f"{index:03}.arrow")
    return run_python(textwrap.dedent(script), folder)


@pytest.mark.skipif(not os.path.isdir("/proc/self/fd"), reason="Linux")
def test_a_batch_spread_over_more_files_than_may_be_open_raises_source_error(tmp_path: Path) -> None:
    printed = _run(ONE_BATCH, tmp_path)
    assert re.search(r"too many files[\s\S]*\d+\.arrow[\s\S]*ulimit -n", printed)
    assert printed.splitlines()[-1] == str(list(range(10)))


@pytest.mark.skipif(not os.path.isdir("/proc/self/fd"), reason="Linux")
def test_five_sources_of_eighty_files_each_are_read_with_few_files_open(tmp_path: Path) -> None:
    assert int(_run(SCRIPT, tmp_path).split()[-1]) < 128

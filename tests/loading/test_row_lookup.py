"""Rows of many steps are looked up at once, within the files that a process may open."""

import sys
import textwrap
from pathlib import Path

import pytest
from tests.support import jobs
from tests.support.marks import slow, soak
from tests.support.tar import write_tar

import rankfeed as rf

#: Three epochs over more files than the process may open, in batches of a few samples; prints the most open files.
SCRIPT = """
    import os, resource, sys
    from collections import Counter

    import rankfeed as rf

    resource.setrlimit(resource.RLIMIT_NOFILE, (256, 256))
    source = rf.open(sys.argv[1])
    most = 0
    for workers in (0, 2, 0):
        loader = rf.Loader(source, 8, shuffle="global", num_workers=workers, id_column="id")
        counted = Counter()
        for batch in loader:
            counted.update(batch["id"].tolist())
            most = max(most, len(os.listdir("/proc/self/fd")))
        assert counted == Counter(range(len(source))), counted
    print(most)
"""


@pytest.mark.parametrize("form", ["packed", slow("tar"), soak("huggingface")])
@pytest.mark.timeout(300)
def test_an_epoch_over_more_files_than_the_open_file_limit_keeps_few_files_open(form: str, tmp_path: Path) -> None:
    folder = tmp_path / "data"
    if form == "tar":
        folder.mkdir()
        for number in range(600):
            write_tar(folder / f"{number:03}.tar", [(f"{number}-{row}.bin", bytes(100)) for row in range(3)])
    elif form == "packed":
        rf.write(({"x": bytes(3000)} for _ in range(1500)), folder, shard_bytes=10_000, progress=False)
        assert len(list(folder.glob("*.arrow"))) > 300
    else:
        datasets = pytest.importorskip("datasets")
        datasets.Dataset.from_dict({"x": [bytes(10)] * 900}).save_to_disk(folder, num_shards=300)
    jobs.run([sys.executable, "-c", textwrap.dedent(SCRIPT), str(folder)], tmp_path / "log", 250)
    assert int((tmp_path / "log").read_text().splitlines()[-1]) < 200  # of 256: others need files too

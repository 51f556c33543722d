"""Damaged data of every format: an error that names them, or right data. Never a hang, an abort, a traceback."""

import json
import pickle
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from tests.faults import fuzz
from tests.sources import writers
from tests.sources.compare import digests
from tests.support import jobs
from tests.support.seeds import fresh_seed

SCRIPT = Path(fuzz.__file__)
#: Those that are no path, or are read by the same code as another one.
LEFT_OUT = ("concat", "select", "pyg_dataset")
#: Which formats have no checksum that their readers compare, so that a damaged value may be delivered as it lies.
UNCHECKED = {
    *("csv", "jsonl", "lance", "npy", "npy_fortran"),
    *("arrow_file", "arrow_file_lz4", "arrow_stream", "arrow_stream_lz4", "arrow_stream_zstd", "arrow_types"),
    *("arrow_dictionaries_lz4", "huggingface", "huggingface_files"),
    *("mds", "mds_images"),  # hashes are optional, and left out by default
    *("parquet", "parquet_lz4", "parquet_types"),  # page checksums are optional, and left out by default
    *("tar_gz", "tar_images", "tar_sounds", "webdataset"),  # tar has a checksum of each header alone
    *("npz", "npz_rows"),  # the directory of a zip archive, its names and types, has no checksum
    "pyg",  # torch reads the records of a zip archive without comparing their checksums
    "packed",  # checksums are compared by `rankfeed verify`, not while reading
}
FORMATS = [name for name in [*writers.FORMATS, *writers.VARIANTS] if name not in LEFT_OUT]
#: Of Parquet files with page checksums only the footer and the headers of pages can be damaged unnoticed, also by
#: their own library, which compares the checksums too.
CHECKED_PAGES = ("parquet_checksums", "parquet_lz4_checksums")
#: A reading with more than this, the libraries that it imports included, fails.
MOST_BYTES = 1 << 30


def campaign(folder: Path, names: list[str], count: int, seed: int, timeout: float) -> None:
    """Read ``count`` damaged copies of a dataset of each format, and report."""
    work = folder / "work"
    work.mkdir()
    todo = []
    for name in names:
        written = writers.make(name, folder / "data" / name)
        if writers.format_of(name).leaves:  # an index is damaged too
            writers.open_as(name, written.folder).fetch([0])
        expected = folder / f"{name}.expected"
        expected.write_bytes(pickle.dumps(digests(written.expected)))
        todo.append([name, str(written.folder), str(expected), 0, count])
    plan = {"seed": seed, "jobs": todo, "work": str(work), "keep": ["wrong", "unnamed", "changed"]}
    (folder / "plan.json").write_text(json.dumps(plan))
    command = [sys.executable, str(SCRIPT), str(folder / "plan.json"), str(folder / "out.jsonl")]
    jobs.run(command, folder / "log", timeout)
    results = [json.loads(line) for line in (folder / "out.jsonl").read_text().splitlines()]
    assert Counter(result["name"] for result in results) == Counter(dict.fromkeys(names, count))
    for result in results:
        name = result["name"]
        own = result.get("own", "")
        agreed = own == "agrees" if name in CHECKED_PAGES else name in UNCHECKED and not own.startswith("differs")
        fine = result["verdict"] in ("error", "same") or (result["verdict"] == "changed" and agreed)
        result["fine"] = fine and result.get("peak", 0) < MOST_BYTES
    said = report(results, seed)
    print(f"\n{said}")
    assert all(result["fine"] for result in results), said


def report(results: list[dict[str, Any]], seed: int) -> str:
    """A tally for each format, and what went wrong with how to do it again."""
    tally: dict[str, Counter[str]] = {}
    for result in results:
        own = f" ({result['own'].partition(':')[0]})" if result["verdict"] == "changed" else ""
        tally.setdefault(result["name"], Counter())[result["verdict"] + own] += 1
    lines = []
    for name, verdicts in tally.items():
        of_name = [result for result in results if result["name"] == name]
        peak, cpu = (max(result.get(subject, 0) for result in of_name) for subject in ("peak", "cpu"))
        counts = ", ".join(f"{count} {subject}" for subject, count in sorted(verdicts.items()))
        lines.append(f"{name:22} {counts}; at most {peak >> 20} MiB, {cpu} s of CPU")
    for result in results:
        if not result["fine"]:
            lines.append(
                f"\n{result['name']}, seed {seed}, mutation {result['index']}, {result['verdict']}:\n"
                f"  {result['how']}\n  {result['said']}\n  own library: {result.get('own')}\n"
                f"  {result.get('peak', 0) >> 20} MiB, kept: {result.get('kept')}"
            )
    return "\n".join(lines)


@pytest.mark.timeout(400)
def test_damaged_files_of_each_format_raise_with_a_path_or_read_correctly(thorough: bool, tmp_path: Path) -> None:
    campaign(tmp_path, FORMATS, 12 if thorough else 2, fresh_seed(), 360)


@pytest.mark.soak
@pytest.mark.parametrize("name", FORMATS)
def test_two_thousand_damaged_datasets_of_a_format_raise_or_read_correctly(name: str, tmp_path: Path) -> None:
    campaign(tmp_path, [name], 2000, 1, 3000)

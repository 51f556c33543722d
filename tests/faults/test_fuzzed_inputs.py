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
    "lance": "Lance has no checksums",
    "webdataset": "tar has a checksum of each header alone",
    "parquet": "page checksums are optional, and left out by default",
    "arrow_file": "Arrow IPC has no checksums",
    "arrow_file_lz4": "Arrow IPC has no checksums",
    "arrow_stream": "Arrow IPC has no checksums",
    "arrow_stream_zstd": "Arrow IPC has no checksums",
    "huggingface": "Arrow IPC has no checksums",
    "mds": "hashes are optional, and left out by default",
    "csv": "text has no checksums",
    "jsonl": "text has no checksums",
    "packed": "checksums are compared by `rankfeed verify`, not while reading",
    "npz": "the directory of a zip archive, its names and types, has no checksum",
    "pyg": "torch reads the records of a zip archive without comparing their checksums",
    "npy": "numpy's format has no checksums",
    "npy_fortran": "numpy's format has no checksums",
    "npz_rows": "the directory of a zip archive, its names and types, has no checksum",
    "parquet_lz4": "page checksums are optional, and left out by default",
    "arrow_stream_lz4": "Arrow IPC has no checksums",
    "arrow_dictionaries_lz4": "Arrow IPC has no checksums",
    "arrow_types": "Arrow IPC has no checksums",
    "parquet_types": "page checksums are optional, and left out by default",
    "tar_images": "tar has a checksum of each header alone",
    "tar_sounds": "tar has a checksum of each header alone",
    "tar_gz": "tar has a checksum of each header alone",
    "huggingface_files": "Arrow IPC has no checksums",
    "mds_images": "hashes are optional, and left out by default",
}
FORMATS = [name for name in [*writers.FORMATS, *writers.VARIANTS] if name not in LEFT_OUT]
#: Of Parquet files with page checksums only the footer and the headers of pages can be damaged unnoticed, also by
#: their own library, which compares the checksums too.
CHECKED_PAGES = ("parquet_checksums", "parquet_lz4_checksums")
#: A reading with more than this, the libraries that it imports included, fails.
MOST_BYTES = 1 << 30


def campaign(folder: Path, names: list[str], count: int, seed: int, timeout: float) -> list[dict[str, Any]]:
    """Read ``count`` damaged copies of a data set of each format."""
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
    allowed = ("error", "same")
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
        fine = result["verdict"] in allowed or (result["verdict"] == "changed" and agreed)
        result["fine"] = fine and result.get("peak", 0) < MOST_BYTES
    return results


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
                f"\n{result['name']}, seed {seed}, mutation {result['number']}, {result['verdict']}:\n"
                f"  {result['how']}\n  {result['said']}\n  own library: {result.get('own')}\n"
                f"  {result.get('peak', 0) >> 20} MiB, kept: {result.get('kept')}"
            )
    return "\n".join(lines)


@pytest.mark.timeout(400)
def test_damaged_data_end_in_an_error_that_names_them_or_in_right_data(thorough: bool, tmp_path: Path) -> None:
    seed = fresh_seed()
    results = campaign(tmp_path, FORMATS, 12 if thorough else 2, seed, 360)
    said = report(results, seed)
    print(f"\n{said}")
    assert all(result["fine"] for result in results), said


@pytest.mark.soak
@pytest.mark.parametrize("name", FORMATS)
def test_two_thousand_damaged_data_sets_of_each_format(name: str, tmp_path: Path) -> None:
    results = campaign(tmp_path, [name], 2000, 1, 3000)
    said = report(results, 1)
    print(f"\n{said}")
    assert all(result["fine"] for result in results), said

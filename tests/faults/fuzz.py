"""Reads damaged datasets, each in a process of its own, and reports how each reading ended.

fuzz.py PLAN OUT: PLAN is JSON, {"seed", "work", "keep", "jobs": [[name, folder, expected, first, count]]}; a line
of JSON for each mutation goes to OUT. This process imports the formats' libraries and uses none of them, so that
each child that it forks starts from a clean state, in milliseconds.

A reading that returns other samples than the undamaged data is compared with what the format's own library reads
from the same bytes: "own" is then "agrees", "refuses: ..." or "differs: ...".
"""

from __future__ import annotations

import faulthandler
import gc
import json
import os
import pickle
import random
import re
import resource
import select
import shutil
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from importlib import import_module
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))

import numpy as np
from tests.sources import writers
from tests.sources.compare import difference, digests

import rankfeed as rf

#: From then on a reading counts as hung.
HANG_SECONDS = 20
#: Address space that a reading may add: what a damaged count asks for must not take the machine down.
ADDED_BYTES = 6 << 30
AT_ONCE = os.cpu_count() or 1
#: What a word or number in a header, index or text may be replaced by.
TOKENS = (
    *(b"", b"-1", b"0", b"1", b"2", b"00", b"1.5", b"1e400", b"nan", b"True", b"true", b"null", b"[]", b"{}"),
    *(b"18446744073709551616", b"9223372036854775807", b"4611686018427387904", b"4294967296", b"1" * 5000),
    *(b"..", b"../../etc/hostname", b"/etc/hostname", b"file:///etc/hostname"),
    *(b"x\0y", b"\xff\xfe", b"\xed\xa0\x80"),
    *(b"\\ud800", b"O", b"<f2", b">c32", b"V9999999999", b"int64", b"ndarray:O", b"pkl", b"(1,)*99", b"1," * 70),
)
#: Imported before anything is forked, by how the format's name begins: what takes long, and is no use of it yet.
LIBRARIES = {
    "csv": ("pyarrow.csv",),
    "huggingface": ("datasets",),
    "jsonl": ("pyarrow.json",),
    "lance": ("lance",),
    "mds": ("PIL.Image", "tests.sources.mds.streaming_mds"),
    "parquet": ("pyarrow.dataset", "pyarrow.parquet"),
    "pyg": ("torch_geometric.data",),
    "tar": ("PIL.Image", "soundfile", "webdataset"),
    "webdataset": ("webdataset",),
}


# How data are damaged


def mutate(folder: Path, chance: random.Random) -> str:
    """Damage one file of a folder (at times a second one), and say how."""
    files = sorted(path for path in folder.rglob("*") if path.is_file() and path.stat().st_size)
    large = max(files, key=lambda path: path.stat().st_size)
    said = []
    for _ in range(chance.choice((1, 1, 1, 2))):
        # Indexes are many, and the data are what counts.
        path = chance.choice((*chance.choices(files, k=2), large))
        before = os.stat(path)
        content, how = damaged(path.read_bytes(), chance)
        path.write_bytes(content)
        if chance.random() < 0.5:  # a disk that lies leaves the times as they were
            os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
            how += ", times kept"
        said.append(f"{path.relative_to(folder)} ({before.st_size} bytes): {how}")
    return "; ".join(said)


def damaged(content: bytes, chance: random.Random) -> tuple[bytes, str]:
    """Damaged bytes, and how."""
    data = bytearray(content)
    size = len(data)
    if not size:
        return content, "nothing"
    kinds = ("flip", "flip", "flip", "set", "number", "token", "token", "cut", "repeat", "insert", "swap", "zero")
    kind = chance.choice((*kinds, "remove"))
    first = place(size, chance)
    length = min(chance.choice((1, 4, 8, 16, 64, 512, 4096)), size - first)
    last = first + length
    if kind == "flip":
        bits = [(place(size, chance), chance.randrange(8)) for _ in range(chance.choice((1, 1, 2, 8)))]
        for at, bit in bits:
            data[at] ^= 1 << bit
        return bytes(data), f"flipped (byte, bit) {bits}"
    if kind == "set":
        value = chance.choice((0, 0x7F, 0x80, 0xFF, chance.randrange(256)))
        data[first] = value
        return bytes(data), f"byte {first} set to {value}"
    if kind == "number":  # what a length, count or offset could have been
        value = chance.choice((0, 1, 2**15, 2**31 - 1, 2**31, 2**32 - 1, 2**40, 2**62, 2**63 - 1, 2**64 - 1))
        width = chance.choice((4, 8))
        data[first : first + width] = (value & (2 ** (8 * width) - 1)).to_bytes(width, "little")
        return bytes(data), f"{width} bytes at {first} set to {value}"
    if kind == "token":
        tokens = list(re.finditer(rb"[\w.+-]+", content[max(0, first - 64) : first + 512]))
        if tokens:
            token, new = chance.choice(tokens), chance.choice(TOKENS)
            start = max(0, first - 64) + token.start()
            rest = bytes(data[start + len(token[0]) :])
            return bytes(data[:start]) + new + rest, f"{token[0][:40]!r} at {start} replaced by {new[:40]!r}"
    if kind == "cut":
        end = chance.choice((first, first // 512 * 512, size - 1 - chance.randrange(min(size, 64))))
        return bytes(data[:end]), f"cut to {end} bytes"
    if kind == "repeat":
        times = chance.choice((1, 1, 3))
        repeated = data[:last] + data[first:last] * times + data[last:]
        return bytes(repeated), f"[{first}:{last}] repeated {times} times"
    if kind == "insert":
        added = bytes(data[:first]) + chance.randbytes(length) + bytes(data[first:])
        return added, f"{length} bytes added at {first}"
    if kind == "swap":
        other = min(place(size, chance), size - length)
        data[first:last], data[other : other + length] = data[other : other + length], data[first:last]
        return bytes(data), f"[{first}:{last}] exchanged with {length} bytes at {other}"
    if kind == "zero":
        data[first:last] = bytes(length)
        return bytes(data), f"[{first}:{last}] zeroed"
    return bytes(data[:first] + data[last:]), f"[{first}:{last}] removed"


def place(size: int, chance: random.Random) -> int:
    """Anywhere, but half of the time near the start or the end, where headers and footers are."""
    near = chance.randrange(min(size, 600))
    return chance.choice((chance.randrange(size), chance.randrange(size), near, size - 1 - near))


def mutation(name: str, folder: Path, seed: int, index: int, work: Path) -> str:
    """Copy a data set to ``work`` and damage it: the same for the same name, seed and index."""
    shutil.copytree(folder, work)
    return mutate(work, random.Random(f"{name} {seed} {index}"))


# What one reading says


def read(name: str, folder: Path, expected: list[str], seed: int, samples: dict[int, Any]) -> dict[str, Any]:
    """Open a dataset, read all of it into ``samples``, and compare."""
    try:
        source = writers.open_as(name, folder)
        size = len(source)
        ids = random.Random(seed).sample(range(size), size) if size < 10_000 else list(range(1000))
        result: dict[int, str] = {}
        for first in range(0, len(ids), 8):
            batch = source.fetch(ids[first : first + 8])
            for column, field in source.fields.items():
                if (batch[column].field.kind, len(batch[column])) != (field.kind, len(ids[first : first + 8])):
                    return {"verdict": "wrong", "said": f"{column!r} is {batch[column].field}, not {field}"}
            rows = [row.get("", row) for row in batch.samples()]  # a graph is no dict of columns
            samples.update(zip(ids[first : first + 8], rows, strict=True))
            result.update(zip(ids[first : first + 8], digests(rows), strict=True))
    except rf.errors.RankfeedError as error:
        named = str(folder) in str(error)
        return {"verdict": "error" if named else "unnamed", "said": f"{type(error).__name__}: {error}"}
    except BaseException as error:
        said = f"{type(error).__name__}: {error}"[:600]
        trace = error.__traceback__
        while trace is not None and trace.tb_next is not None:
            trace = trace.tb_next
        at = f"{trace.tb_frame.f_code.co_filename}:{trace.tb_lineno}" if trace else ""
        return {"verdict": "wrong", "said": f"{said} at {at}"}
    if [result[item] for item in range(len(result))] == expected:
        return {"verdict": "same", "said": ""}
    right = sum(map(expected.__contains__, result.values()))
    return {"verdict": "changed", "said": f"{size} samples, {right} right", "size": size}


def compare(name: str, folder: Path, samples: dict[int, Any], size: int) -> str:
    """Compare samples with what the format's own library reads from the same files."""
    try:
        own = writers.format_of(name).read(folder)
    except BaseException as error:
        return f"refuses: {type(error).__name__}: {error}"[:300]
    if len(own) != size:
        return f"differs: {size} samples instead of {len(own)}"
    for index, sample in sorted(samples.items()):
        if (subject := difference(quiet(sample), quiet(own[index]))) is not None:
            return f"differs: sample {index}: {subject}"
    return "agrees"


def quiet(value: Any) -> Any:
    """With one kind of NaN: signalling ones do not survive a library's way through Python's floats.

    A column whose name was damaged to "" is "unnamed", as in `tests/sources/text`.
    """
    if isinstance(value, dict):
        return {name or "unnamed": quiet(item) for name, item in value.items()}
    if isinstance(value, list):
        return [quiet(item) for item in value]
    if isinstance(value, (np.ndarray, np.generic)) and value.dtype.kind == "f":
        return np.where(np.isnan(value), value.dtype.type(np.nan), value)
    return value


# One process a reading


class Reading:
    """A child that reads one damaged data set."""

    def __init__(self, job: dict[str, Any], plan: dict[str, Any]) -> None:
        self.job = job
        self.work = Path(plan["work"]) / f"{job['name']}-{job['index']}"
        self.began = time.monotonic()
        self.out, write = os.pipe()
        self.pid = os.fork()
        if self.pid == 0:
            os.close(self.out)
            self._child(write, plan["seed"])
        os.close(write)

    def _child(self, out: int, seed: int) -> None:
        try:
            os.setsid()
            self.work.mkdir()
            log = os.open(self.work / "stderr", os.O_CREAT | os.O_WRONLY)
            os.dup2(log, 1)
            os.dup2(log, 2)
            faulthandler.enable(2)
            held = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
            resource.setrlimit(resource.RLIMIT_AS, (held + ADDED_BYTES, held + ADDED_BYTES))
            resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
            name, index, folder = self.job["name"], self.job["index"], self.work / "data"
            how = mutation(name, Path(self.job["folder"]), seed, index, folder)
            os.write(out, (json.dumps(how) + "\n").encode())
            if name == "lance" and index % 8:
                # Lance runs in this process then, so that a table is opened in it, and not checked in another one.
                import lance

                lance.dataset(str(Path(self.job["folder"], "data.lance"))).count_rows()
            samples: dict[int, Any] = {}
            said = read(name, folder, self.job["expected"], index, samples)
            peak = (
                resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
            )  # that of the parent at the fork included
            said |= {"said": said["said"][:1500], "peak": peak, "cpu": round(time.process_time(), 2)}
            os.write(out, (json.dumps(said) + "\n").encode())
            if said["verdict"] == "changed":
                os.write(out, (json.dumps({"own": compare(name, folder, samples, said["size"])}) + "\n").encode())
        finally:
            os._exit(0)

    def ended(self) -> dict[str, Any]:
        """How it ended, waiting for it as long as a reading may take."""
        content, more, deadline = b"", b" ", self.began + HANG_SECONDS
        while more and select.select([self.out], [], [], max(0.0, deadline - time.monotonic()))[0]:
            more = os.read(self.out, 1 << 16)
            content += more
        with suppress(ProcessLookupError):  # all that it started, too
            os.killpg(self.pid, signal.SIGKILL)
        os.close(self.out)
        _, status = os.waitpid(self.pid, 0)
        how, said, own, *_ = [*content.split(b"\n"), b"", b""]
        stderr = (self.work / "stderr").read_text(errors="replace") if (self.work / "stderr").exists() else ""
        result = {"name": self.job["name"], "index": self.job["index"], "how": json.loads(how or '""')}
        if said:
            result |= json.loads(said)
            if result["verdict"] == "changed":
                ended = "hangs" if more else f"ends with status {status}"
                result |= json.loads(own) if own else {"own": f"refuses: {ended}"}
            return result
        if more:
            return {**result, "verdict": "wrong", "said": f"hung for {HANG_SECONDS} s: {stderr[-800:]}"}
        ending = f"signal {os.WTERMSIG(status)}" if os.WIFSIGNALED(status) else f"status {status}"
        return {**result, "verdict": "wrong", "said": f"ended by {ending}: {stderr[-4000:]}"}


def main(plan_file: str, out_file: str) -> None:
    plan = json.loads(Path(plan_file).read_text())
    names = {name for name, *_ in plan["jobs"]}
    for start, libraries in LIBRARIES.items():
        if any(name.startswith(start) for name in names):
            for library in libraries:
                import_module(library)
    import_module("rankfeed.sources.open")
    gc.freeze()  # so that children leave the parent's pages as they are
    with open(out_file, "w") as out:
        running: list[Reading] = []
        for job in [*jobs(plan), *[None] * AT_ONCE]:
            if len(running) == AT_ONCE or (job is None and running):
                reading = running.pop(0)
                result = reading.ended()
                if result["verdict"] in plan["keep"]:
                    result["kept"] = str(reading.work / "data")
                else:
                    shutil.rmtree(reading.work)
                out.write(json.dumps(result) + "\n")
                out.flush()
            if job is not None:
                running.append(Reading(job, plan))


def jobs(plan: dict[str, Any]) -> Iterator[dict[str, Any]]:
    for name, folder, expected, first, count in plan["jobs"]:
        own = pickle.loads(Path(expected).read_bytes())
        for index in range(first, first + count):
            yield {"name": name, "folder": folder, "expected": own, "index": index}


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2])

"""rankfeed and its peers beside each other; writes docs/performance.md and its chart: ``make bench``.

Each loader has an environment of its own (.venv/bench/NAME, made at the first run) and a process of its own. They
run in turn, so that the machine's moods affect all alike, and each is compared with the reference of the same
turn: one thread that gathers the same samples with NumPy into one buffer, which it reuses.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shlex
import signal
import statistics
import subprocess
import sys
import tempfile
import venv
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, suppress
from datetime import date
from pathlib import Path
from typing import IO, Any

from bench.peers import PEERS
from bench.workloads import WORKLOADS, read_all

ROOT = Path(__file__).parents[1]
PAGE, CHART = ROOT / "docs/performance.md", ROOT / "docs/images/performance.svg"
#: Loaders that are also run on several ranks at once, and on how many.
RANKS, RANK_COUNTS = ("rankfeed", "mapped"), (1, 2, 4)

INTRODUCTION = """\
# Performance

<!-- Written by `make bench`; changes are lost. -->

rankfeed beside hand-written loaders and other libraries. Each library wrote the same samples in its own format, and runs in
its own environment and process, in the configuration that is its own best on this machine. The loaders run in turn. The
consumer reads one value of every cache line of a batch. Rates are ratios to the reference of the same turn: **one thread that
gathers the same samples with NumPy into one buffer, which it reuses**. Data are in the page cache. A cell has the median and
the range of all turns.

*First batch*: seconds from the import of the library (torch is imported) to the first batch, in a fresh process. *Resume*:
the same after 99 % of an epoch, for loaders whose state can be saved. *Memory*: anonymous and shared memory of the process
and its workers. [Benchmarks](benchmarks.md) has more workloads of rankfeed alone.

![Rates as ratios to the reference](images/performance.svg)"""  # noqa: E501

Figures = dict[str, list[float]]


class Failed(Exception):
    """A loader's process ended with an error."""


def environment(name: str) -> str:
    """The Python of a loader's environment, which is made if it is not there."""
    packages = PEERS[name].packages
    if not packages:
        return sys.executable
    folder = ROOT / ".venv/bench" / name
    made = folder / "made"
    if not made.exists():
        print(f"installing {' '.join(packages)}", file=sys.stderr)
        venv.create(folder, with_pip=True, clear=True)
        constraint = os.fspath(ROOT / "constraints.txt")
        pinned = next(line for line in Path(constraint).read_text().splitlines() if line.startswith("torch=="))
        command = [folder / "bin/python", "-m", "pip", "install", "--quiet", pinned, "numpy", *packages]
        subprocess.run(command, check=True)
        made.touch()
    return os.fspath(folder / "bin/python")


def versions(name: str) -> dict[str, str]:
    """Versions of the packages of a loader's environment."""
    packages = PEERS[name].packages or ("rankfeed", "torch", "numpy")
    code = f"import importlib.metadata as m, json; print(json.dumps({{p: m.version(p) for p in {packages!r}}}))"
    return dict(json.loads(subprocess.check_output([environment(name), "-c", code])))


def data_folder(name: str, folder: Path) -> Path:
    """Where the files of a loader are, which may be those of another one."""
    return folder / (PEERS[name].written_by or name)


class Contestant:
    """The process of a loader."""

    def __init__(
        self, name: str, workload: str, samples: int, folder: Path, *command: str, rank: int = 0, ranks: int = 1
    ) -> None:
        self.name = name
        data = data_folder(name, folder)
        data.mkdir(exist_ok=True)
        arguments = [name, workload, str(samples), os.fspath(data), *command]
        self._errors: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115 - closed by `end`
        self._process = subprocess.Popen(
            [environment(name), "-m", "bench.contestant", *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            text=True,
            cwd=ROOT,
            env=os.environ
            | {"HF_HUB_OFFLINE": "1", "PYTHONWARNINGS": "ignore", "PYTHONDONTWRITEBYTECODE": ""}
            | {"BENCH_RANK": str(rank), "BENCH_RANKS": str(ranks)},
            start_new_session=True,
        )

    def ask(self, seconds: float) -> None:
        """Start a turn of so many seconds."""
        assert self._process.stdin is not None
        with suppress(BrokenPipeError):
            self._process.stdin.write(f"{seconds}\n")
            self._process.stdin.flush()

    def answer(self) -> dict[str, float]:
        """What the turn, or the command, resulted in."""
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            self._process.wait()
            self._errors.seek(0)
            raise Failed(self._errors.read().decode(errors="replace").strip().rpartition("\n")[2])
        return dict(json.loads(line))

    def end(self) -> None:
        """End the process and its workers."""
        with suppress(OSError, subprocess.TimeoutExpired):  # some libraries do not let their process end
            self._process.communicate(timeout=5)
        with suppress(subprocess.TimeoutExpired, ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait(5)
        self._errors.close()


def alone(name: str, workload: str, samples: int, folder: Path, command: str) -> float:
    """Seconds of one command in a fresh process."""
    read_all(data_folder(name, folder))
    with ExitStack() as stack:
        contestant = Contestant(name, workload, samples, folder, command)
        stack.callback(contestant.end)
        return contestant.answer()["seconds"]


def several(name: str, workload: str, samples: int, folder: Path, turns: int, seconds: float) -> Figures:
    """Samples per second of one rank, and of several at once together."""
    rates: Figures = {str(count): [] for count in RANK_COUNTS}
    jobs: dict[int, list[Contestant]] = {}
    with ExitStack() as stack:
        for count in RANK_COUNTS:
            jobs[count] = [
                Contestant(name, workload, samples, folder, rank=rank, ranks=count) for rank in range(count)
            ]
            for each in jobs[count]:
                stack.callback(each.end)
        for turn in range(turns + 1):
            for count, processes in jobs.items():
                read_all(data_folder(name, folder))
                for each in processes:
                    each.ask(seconds)
                answers = [each.answer() for each in processes]
                if turn:
                    rates[str(count)].append(sum(answer["samples"] / answer["seconds"] for answer in answers))
    return rates


def measure(workload: str, names: Sequence[str], options: argparse.Namespace) -> dict[str, Any]:
    """All figures of one workload."""
    samples = max(20 * WORKLOADS[workload].batch_size, int(WORKLOADS[workload].samples * options.scale))
    found: dict[str, Figures] = {name: {"rate": [], "first": [], "resume": [], "bytes": []} for name in names}
    failed: dict[str, str] = {}
    ranks: dict[str, Figures] = {}
    with tempfile.TemporaryDirectory(dir=options.folder) as made, ExitStack() as stack:
        folder = Path(made)

        def attempt(name: str, command: str) -> float | None:
            try:
                return alone(name, workload, samples, folder, command)
            except Failed as error:
                failed[name] = f"{command}: {error}"
                return None

        for name in names:
            print(f"{workload}: {name} writes", file=sys.stderr)
            attempt(name, "write")
        for _ in range(options.starts):
            for name in [each for each in names if each not in failed]:
                commands = ["first"]
                if (data_folder(name, folder) / f"{name}.state").exists():
                    commands.append("resume")
                for command in commands:
                    seconds = attempt(name, command)
                    if seconds is not None:
                        found[name][command].append(seconds)
        running = {}
        for name in names:
            if name not in failed:
                running[name] = Contestant(name, workload, samples, folder)
                stack.callback(running[name].end)
        for turn in range(options.turns + 1):
            print(f"{workload}: turn {turn} of {options.turns}", file=sys.stderr)
            for name, contestant in list(running.items()):
                read_all(data_folder(name, folder))
                contestant.ask(options.seconds)
                try:
                    answer = contestant.answer()
                except Failed as error:
                    failed[name] = str(error)
                    del running[name]
                    continue
                if turn:  # the first one warms up
                    found[name]["rate"].append(answer["samples"] / answer["seconds"])
                    found[name]["bytes"].append(answer["bytes"])
        for name in RANKS:
            if name in running:
                ranks[name] = several(name, workload, samples, folder, options.turns, options.seconds)
    return {
        "workload": workload,
        "samples": samples,
        "loaders": {name: found[name] for name in names if name not in failed},
        "failed": failed,
        "ranks": ranks,
    }


def relative(figures: Figures, reference: Figures) -> list[float]:
    """Rates as ratios to the reference's of the same turn."""
    return [a / b for a, b in zip(figures["rate"], reference["rate"], strict=True)]


def cell(values: Sequence[float], digits: int, unit: str = "") -> str:
    """Median and range, or a dash."""
    if not values:
        return "-"
    low, middle, high = (f"{each:,.{digits}f}" for each in (min(values), statistics.median(values), max(values)))
    return f"{middle}{unit}" if low == high else f"{middle}{unit} ({low} to {high})"


def page(results: Sequence[dict[str, Any]], used: Mapping[str, Mapping[str, str]], command: str) -> str:
    """The page as Markdown."""
    lines = [INTRODUCTION]
    for result in results:
        loaders = result["loaders"]
        reference = loaders["reference"]
        rate = statistics.median(reference["rate"])
        workload = WORKLOADS[result["workload"]]
        lines += [
            "",
            f"## {result['workload'].capitalize()}: {result['samples']:,} {workload.text}",
            "",
            f"The reference gathers {rate:,.0f} samples/s.",
            "",
            "| loader | order | rate | first batch (s) | resume (s) | memory (MiB) |",
            "|---|---|---|---|---|---|",
        ]
        order = sorted(loaders, key=lambda name: -statistics.median(relative(loaders[name], reference)))
        for name in order:
            figures, rates = loaders[name], relative(loaders[name], reference)
            cells = [
                name,
                PEERS[name].order,
                cell(rates, 2 if statistics.median(rates) >= 0.1 else 4),
                cell(figures["first"], 2),
                cell(figures["resume"], 2),
                cell([max(figures["bytes"]) / 2**20], 0),
            ]
            lines.append(f"| {' | '.join(cells)} |")
        for name, text in result["failed"].items():
            lines += ["", f"{name} failed: `{text}`"]
        for name, rates in result["ranks"].items():
            for count, many in list(rates.items())[1:]:
                ratio = cell([a / b for a, b in zip(many, rates["1"], strict=True)], 2)
                lines += ["", f"{count} ranks of {name} at once deliver {ratio} times the samples of one."]
    lines += [
        "",
        "## Versions",
        "",
        f"{date.today()}, {os.cpu_count()} processors, {platform.platform()}, Python {platform.python_version()}.",
        "",
        "| loader | versions |",
        "|---|---|",
    ]
    lines += [f"| {name} | {', '.join(f'{p} {v}' for p, v in found.items())} |" for name, found in used.items()]
    lines += ["", f"Command: `{command}`; `bench/peers.py` has each loader's configuration.", ""]
    return "\n".join(lines)


def chart(results: Sequence[dict[str, Any]]) -> str:
    """Medians as bars, one panel for each workload, as SVG."""
    import vl_convert

    values = [
        {"workload": result["workload"], "loader": name, "ratio": statistics.median(relative(figures, reference))}
        for result in results
        for reference in [result["loaders"]["reference"]]
        for name, figures in result["loaders"].items()
    ]
    order = sorted(PEERS, key=lambda name: -max((v["ratio"] for v in values if v["loader"] == name), default=0))
    bar: dict[str, Any] = {
        "y": {"field": "loader", "type": "nominal", "sort": order, "title": None},
        "x": {"field": "ratio", "type": "quantitative", "title": "rate / reference"},
    }
    ours = {"test": "indexof(datum.loader, 'rankfeed') == 0", "value": "#00695c"}
    colour = {"condition": ours, "value": "#9e9e9e"}
    text = {"field": "ratio", "type": "quantitative", "format": ".2f"}
    spec = {
        "data": {"values": values},
        "facet": {"column": {"field": "workload", "type": "nominal", "title": None, "sort": list(WORKLOADS)}},
        "spec": {
            "width": 190,
            "layer": [
                {"mark": "bar", "encoding": bar | {"color": colour}},
                {"mark": {"type": "text", "align": "left", "dx": 3}, "encoding": bar | {"text": text}},
            ],
        },
        "config": {"background": "white", "view": {"stroke": None}, "axis": {"grid": False}},
    }
    return str(vl_convert.vegalite_to_svg(spec))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--scale", type=float, default=1.0, help="share of the full number of samples")
    parser.add_argument("--turns", type=int, default=5, help="turns that count, after one to warm up")
    parser.add_argument("--starts", type=int, default=5, help="fresh processes for the first batch and for resume")
    parser.add_argument("--seconds", type=float, default=3.0, help="in which a turn begins epochs")
    parser.add_argument("--workload", choices=list(WORKLOADS), action="append", help="one workload (repeatable)")
    parser.add_argument("--loader", choices=list(PEERS), action="append", help="one loader beside the reference")
    parser.add_argument("--folder", help="where to put the data, 15 GB (default: a temporary folder)")
    parser.add_argument("--json", type=Path, help="also write all figures to this file")
    options = parser.parse_args()
    chosen = {"reference", *(options.loader or PEERS)}
    chosen |= {PEERS[name].written_by for name in chosen}  # whose files they read
    names = [name for name in PEERS if name in chosen]
    used = {name: versions(name) for name in names}
    results = []
    for workload in options.workload or WORKLOADS:
        results.append(measure(workload, [name for name in names if workload in PEERS[name].workloads], options))
        if options.json:
            options.json.write_text(json.dumps({"results": results, "versions": used}))
    text = page(results, used, f"python -m bench.performance {shlex.join(sys.argv[1:])}".strip())
    if options.workload or options.loader:  # part of the page
        print(text)
        return
    PAGE.write_text(text)
    CHART.write_text(chart(results))


if __name__ == "__main__":
    main()

"""The main job on real data: pack, train, kill, resume on another number of ranks, and count.

Everything that a user would write is in ``examples/train.py``; this only starts it, kills it and reads what it
says it delivered.
"""

import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import Any

from rankfeed.errors import RankfeedError

_SECONDS = 180  # for a machine that is busy with other things


@dataclass(frozen=True)
class Delivered:
    """A line of a rank's ledger: one step and the samples it brought."""

    rank: int
    epoch: int
    step: int
    loss: float
    sample_ids: tuple[int, ...]


def example() -> Path:
    """The training script: in a checkout the one in ``examples``, else the copy inside the package."""
    checkout = Path(__file__).parents[3] / "examples" / "train.py"
    return checkout if checkout.exists() else Path(str(files("rankfeed"))) / "examples" / "train.py"


def recordings() -> Path:
    """JapaneseVowels (Kudo, Toyama and Shimbo, 1999), 640 utterances: comes with the example."""
    return example().parent / "data" / "japanese_vowels.parquet"


def start(ranks: int, workers: int, data: Path, run: Path) -> subprocess.Popen[str]:
    """Train on that many ranks with that many workers each."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(ranks)]
    command += ["--master-addr", "127.0.0.1", "--master-port", str(port)]
    command += [str(example()), str(data), str(run), "--workers", str(workers)]
    log = (run / f"log-{ranks}-ranks.txt").open("w")
    environ = {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT, text=True, env=environ)


def kill(process: subprocess.Popen[str]) -> list[int]:
    """SIGKILL a job, ranks and all. Returns the process ids."""
    doomed = [process.pid]
    for pid in doomed:
        children = Path(f"/proc/{pid}/task/{pid}/children")
        if children.exists():
            doomed += map(int, children.read_text().split())
    for pid in doomed:
        os.kill(pid, signal.SIGKILL)
    process.wait(_SECONDS)
    return doomed


def ledger(run: Path, ranks: int) -> list[Delivered]:
    """What the ranks of a job wrote down, whole lines only."""
    lines = []
    for rank in range(ranks):
        text = (run / f"delivered-{ranks}-ranks-{rank}.txt").read_text()
        for line in text[: text.rfind("\n") + 1].splitlines():
            epoch, step, loss, *ids = line.split()
            lines.append(Delivered(rank, int(epoch), int(step), float(loss), tuple(map(int, ids))))
    return lines


def proof(
    before: Iterable[Delivered], after: Iterable[Delivered], state: dict[str, Any], samples: int
) -> dict[str, Any]:
    """Count the second epoch: up to the checkpoint from the killed job, from there on from the resumed one."""
    kept = [line for line in before if line.epoch == state["epoch"] and line.step <= state["steps"]]
    resumed = [line for line in after if line.epoch == state["epoch"]]
    counts = Counter(sample for line in [*kept, *resumed] for sample in line.sample_ids)

    def steps(lines: list[Delivered]) -> list[int]:
        return [count for _, count in sorted(Counter(line.rank for line in lines).items())]

    return {
        "samples": samples,
        "steps_before": steps(kept),
        "steps_after": steps(resumed),
        "missing": sum(sample not in counts for sample in range(samples)),
        "repeated": sum(count - 1 for count in counts.values()),
    }


def main_job(folder: Path, say: Any = print) -> dict[str, Any]:
    """Run the whole of it in a folder. Returns the figures; raises if a job fails or hangs.

    Raises:
        RankfeedError: something of it went wrong; says what, and where the log is.
    """
    import torch

    import rankfeed as rf

    data, run = folder / "data", folder / "run"
    run.mkdir()
    say("packing JapaneseVowels (UCI, CC BY 4.0): 12 coefficients over 7 to 29 frames, 9 speakers")
    subprocess.run([sys.executable, str(example()), "--pack", str(recordings()), str(data)], check=True)
    source = rf.open(data)
    fields = ", ".join(f"{name}: {field}" for name, field in source.fields.items())
    say(f"packed {len(source)} samples ({fields})")

    say("training on 2 ranks with 2 workers each, to be killed in the middle of the second epoch")
    first = start(2, 2, data, run)
    _until(lambda: _reached(run, epoch=1, step=20), first, run / "log-2-ranks.txt")
    say(f"killed {len(kill(first))} processes with SIGKILL")
    before = ledger(run, 2)
    state = torch.load(run / "checkpoint.pt")["loader"]
    say(f"checkpoint: epoch {state['epoch']}, step {state['steps']}, {state['position']} samples delivered")

    say("resuming on 3 ranks with 1 worker each")
    second = start(3, 1, data, run)
    _until(lambda: second.poll() is not None, second, run / "log-3-ranks.txt")
    after = ledger(run, 3)
    figures = proof(before, after, state, len(source))
    figures["loss_before"] = _mean_loss(line for line in before if line.epoch == 0 and line.step <= 8)
    figures["loss_after"] = _mean_loss(after[-8:])
    said = (run / "log-3-ranks.txt").read_text().splitlines()
    figures["audit"] = [line.removeprefix("audit: ") for line in said if line.startswith("audit: ")]
    return figures


def run(say: Any = print) -> dict[str, Any]:
    """Run the demo in a temporary folder. Returns its figures."""
    with tempfile.TemporaryDirectory(prefix="rankfeed-demo-") as folder:
        return main_job(Path(folder), say)


def _reached(run: Path, epoch: int, step: int) -> bool:
    if not all((run / f"delivered-2-ranks-{rank}.txt").exists() for rank in range(2)):
        return False
    return any(line.epoch == epoch and line.step >= step for line in ledger(run, 2))


def _until(done: Any, process: subprocess.Popen[str], log: Path) -> None:
    deadline = time.monotonic() + _SECONDS
    while not done():
        if process.poll() not in (None, 0):
            tail = "\n".join(log.read_text().splitlines()[-12:])
            raise RankfeedError("the training job failed", found=f"exit status {process.returncode}\n{tail}")
        if time.monotonic() > deadline:
            kill(process)
            raise RankfeedError("the training job took too long", expected=f"under {_SECONDS} seconds")
        time.sleep(0.02)
    if process.poll() not in (None, 0):
        raise RankfeedError("the training job failed", found=f"exit status {process.returncode}", where=log)


def _mean_loss(lines: Iterable[Delivered]) -> float:
    losses = [line.loss for line in lines]
    return sum(losses) / len(losses)

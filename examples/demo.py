"""Train on 2 ranks, kill the job, resume it on 3 ranks, and count the samples that the training steps received.

python examples/demo.py

This script starts, kills and counts; everything that a training script needs is in train.py beside it. The data
are 640 utterances of JapaneseVowels (data/README.md). No network is used.
"""

import argparse
import json
import os
import socket
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

import psutil
import torch

EXAMPLES = Path(__file__).resolve().parent
TIMEOUT = 180  # seconds, for a busy machine


def demo(folder: Path, say) -> dict:
    run = folder / "run"
    run.mkdir()
    os.chdir(folder)
    say("writing 640 utterances: 12 coefficients over 7 to 29 frames, 9 speakers")
    written = rankfeed(say, "write", EXAMPLES / "data" / "japanese_vowels.parquet", "data", "--json")

    say("training on 2 ranks with 2 workers each")
    job = torchrun(say, 2, "data", "run", "--workers", 2)
    wait(job, run / "log-2-ranks.txt", until=lambda: steps_done(run, ranks=2, epoch=1) >= 20)
    say(f"killed {kill(job)} processes with SIGKILL in the middle of the second epoch")
    state = torch.load(run / "checkpoint.pt")["loader"]
    say(f"checkpoint: epoch {state['epoch']}, step {state['steps']}, {state['position']} samples delivered")

    say("resuming on 3 ranks with 1 worker each")
    job = torchrun(say, 3, "data", "run", "--workers", 1)
    wait(job, run / "log-3-ranks.txt", until=lambda: job.poll() is not None)

    say(rankfeed(say, "verify", "run/ledger", "--data", "data"))
    return count(deliveries(run, 2), deliveries(run, 3), state, json.loads(written)["samples"])


def count(before: list[dict], after: list[dict], state: dict, samples: int) -> dict:
    """Counts the second epoch: of the killed job up to the checkpoint, of the resumed job from there."""
    kept = [line for line in before if line["epoch"] == state["epoch"] and line["step"] <= state["steps"]]
    resumed = [line for line in after if line["epoch"] == state["epoch"]]
    counts = Counter(sample_id for line in [*kept, *resumed] for sample_id in line["ids"])
    return {
        "samples": samples,
        "steps_before": list(Counter(line["rank"] for line in kept).values()),
        "steps_after": list(Counter(line["rank"] for line in resumed).values()),
        "missing": sum(sample_id not in counts for sample_id in range(samples)),
        "repeated": sum(number - 1 for number in counts.values()),
        "loss_before": mean_loss([line for line in before if line["epoch"] == 0 and line["step"] <= 8]),
        "loss_after": mean_loss(after[-8:]),
    }


def deliveries(run: Path, ranks: int) -> list[dict]:
    """One dict per step and rank; the last line of a killed rank may be incomplete."""
    lines = []
    for rank in range(ranks):
        file = run / f"delivered-{ranks}-ranks-{rank}.jsonl"
        complete = file.read_text().rpartition("\n")[0] if file.exists() else ""
        lines += [{"rank": rank, **json.loads(line)} for line in complete.splitlines()]
    return lines


def steps_done(run: Path, ranks: int, epoch: int) -> int:
    return max((line["step"] for line in deliveries(run, ranks) if line["epoch"] == epoch), default=0)


def mean_loss(lines: list[dict]) -> float:
    return sum(line["loss"] for line in lines) / len(lines)


def rankfeed(say, *arguments) -> str:
    say("$ rankfeed " + " ".join(map(str, arguments)))
    command = [sys.executable, "-m", "rankfeed", *map(str, arguments)]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, timeout=TIMEOUT)
    if done.returncode:
        sys.exit(f"{done.stdout}\nrankfeed {arguments[0]} failed with exit status {done.returncode}")
    return done.stdout.rstrip()


def torchrun(say, ranks: int, *arguments) -> subprocess.Popen:
    say(f"$ torchrun --nproc-per-node {ranks} " + " ".join(map(str, (EXAMPLES / "train.py", *arguments))))
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", ranks]
    command += ["--master-addr", "127.0.0.1", "--master-port", port, EXAMPLES / "train.py", *arguments]
    environ = {**os.environ, "OMP_NUM_THREADS": "1"}
    with Path("run", f"log-{ranks}-ranks.txt").open("w") as log:
        return subprocess.Popen(list(map(str, command)), stdout=log, stderr=subprocess.STDOUT, env=environ)


def wait(job: subprocess.Popen, log: Path, until) -> None:
    deadline = time.monotonic() + TIMEOUT
    while not until():
        if job.poll() or time.monotonic() > deadline:
            break
        time.sleep(0.02)
    else:
        if not job.poll():
            return
    problem = f"failed with exit status {job.returncode}" if job.poll() else f"did not end within {TIMEOUT} s"
    kill(job)
    sys.exit(f"{log.read_text()[-3000:]}\nthe training job {problem}")


def kill(job: subprocess.Popen) -> int:
    if job.poll() is not None:
        return 0
    processes = [psutil.Process(job.pid), *psutil.Process(job.pid).children(recursive=True)]
    for process in processes:
        process.kill()
    job.wait(TIMEOUT)
    return len(processes)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--json", action="store_true", help="print the figures as JSON")
    as_json = parser.parse_args().json

    def say(text: str) -> None:
        print(text.replace(f"{EXAMPLES}/", "examples/"), file=sys.stderr if as_json else sys.stdout, flush=True)

    with tempfile.TemporaryDirectory(prefix="rankfeed-demo-") as folder:
        figures = demo(Path(folder), say)
    ok = figures["missing"] == figures["repeated"] == 0
    if as_json:
        print(json.dumps({"ok": ok, **figures}))
    else:
        print("\nsample ids that the training steps of the second epoch received:")
        for name, value in figures.items():
            print(f"  {name.replace('_', ' '):13} {value if not isinstance(value, float) else round(value, 3)}")
    sys.exit(not ok)

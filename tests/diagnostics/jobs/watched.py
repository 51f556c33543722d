"""A job with two watched loaders: prints, forks a worker that prints, and writes a file when it is complete."""

import multiprocessing
import sys
import time
from pathlib import Path

from tests.diagnostics.fake_loader import FakeLoader

import rankfeed as rf


def work() -> None:
    print(f"the worker prints to {type(sys.stdout).__name__}")


if __name__ == "__main__":
    end, go_on = Path(sys.argv[1]), Path(sys.argv[2])
    train, test = FakeLoader(), FakeLoader(epoch_step=7)
    with rf.watch(train, every=0.05, name="train"), rf.watch(test, every=0.05, name="test"):
        time.sleep(0.3)
        print("printed meanwhile")
        worker = multiprocessing.get_context("fork").Process(target=work)
        worker.start()
        worker.join()
        train.figures["epoch_step"] = 4
        while not go_on.exists():
            time.sleep(0.05)
    end.write_text(f"{worker.exitcode} {type(sys.stdout).__name__}")

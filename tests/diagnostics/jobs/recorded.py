"""A rank of a job that keeps a ledger, and prints itself what it was handed. Killed from outside.

recorded.py SAMPLES RUN LAUNCH RANKS RANK BATCH EPOCHS KIND [STATE]
"""

import json
import os
import sys
import time
from pathlib import Path

import rankfeed as rf


def main() -> None:
    samples, folder, launch, ranks, rank, batch_size, epochs, kind, *state = sys.argv[1:]
    run = Path(folder)
    loader = rf.Loader(
        rf.from_dataset([{"x": number} for number in range(int(samples))]),
        int(batch_size),
        shuffle=True,
        seed=3,
        topology=rf.Topology(int(rank), int(ranks), int(rank), int(ranks)),
        num_workers=0 if kind == "inline" else 1,
        worker_kind="process" if kind == "process" else "thread",
        audit=run / "ledger",
    )
    if state:
        loader.load_state_dict(json.loads(state[0]))
    said = os.open(run / f"said-{launch}-{rank}", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    states = os.open(run / f"states-{launch}-{rank}", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    while loader.epoch < int(epochs):
        epoch = loader.epoch
        for batch in loader:
            ids = batch["x"][batch["valid"]] if "valid" in batch else batch["x"]
            os.write(said, (json.dumps([epoch, ids.tolist()]) + "\n").encode())
            os.write(states, (json.dumps(loader.state_dict()) + "\n").encode())
            time.sleep(0.003)
    os.write(said, b'"done"\n')


if __name__ == "__main__":
    main()

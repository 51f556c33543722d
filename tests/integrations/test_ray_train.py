"""Ray Train starts the ranks: each sample once an epoch, in equal steps and a new order."""

import json
import sys
from collections import Counter
from pathlib import Path

import pytest
from tests.support import jobs
from tests.support.packages import need_package

need_package("ray")
SCRIPT = Path(__file__).parent / "jobs" / "ray_train.py"


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_ray_train_workers_read_each_sample_once_per_epoch_and_resume(tmp_path: Path) -> None:
    out = tmp_path / "out"
    out.mkdir()
    jobs.run([sys.executable, str(SCRIPT), str(out)], tmp_path / "log", 300)
    told = [json.loads((out / f"{rank}-of-2.json").read_text()) for rank in range(2)]
    for steps in zip(*(ids for ids, _ in told), strict=True):
        assert len({len(step) for step in steps}) == 1
        assert Counter(sample_id for of_rank in steps for ids in of_rank for sample_id in ids) == Counter(
            range(47)
        )
    first, second, sampled, batched = told[0][0]
    assert first != second
    assert sampled == batched == first, "a share that was prepared is the share that it was"
    assert all("Ray Train's prepare_data_loader" in said for _, said in told)
    first = [json.loads((out / f"first-{rank}.json").read_text()) for rank in range(2)]
    second = [json.loads((out / f"second-{rank}.json").read_text()) for rank in range(2)]
    assert Counter(sample_id for ids in (*first, *(ids for ids, _ in second)) for sample_id in ids) == Counter(
        range(47)
    )
    assert all("continues from a checkpoint" in said and "load_state_dict" in said for _, said in second)

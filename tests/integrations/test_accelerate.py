"""Accelerate on real ranks: each sample once, exact metrics, checkpoints for other numbers of ranks."""

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from tests.support import jobs
from tests.support.marks import slow, soak
from tests.support.packages import need_package

need_package("accelerate")

import torch  # noqa: E402
from accelerate import Accelerator, skip_first_batches  # noqa: E402
from accelerate.state import AcceleratorState  # noqa: E402
from torch.utils.data import DataLoader  # noqa: E402

import rankfeed as rf  # noqa: E402
from rankfeed.errors import ArgumentError, StateError  # noqa: E402
from rankfeed.integrations.accelerate import accelerated  # noqa: E402

pytestmark = pytest.mark.timeout(600)

SCRIPT = Path(__file__).parent / "jobs" / "accelerate_cells.py"
EXAMPLE = Path(__file__).parents[2] / "examples" / "accelerate_webdataset.py"
#: Seconds in which a job has to end: far more than it takes.
HANG = 280
SAMPLES = 53
ONCE = Counter(range(SAMPLES))


def run(ranks: int, out: Path, job: str, *arguments: str) -> list[Any]:
    """What each rank wrote."""
    jobs.run(jobs.torchrun(ranks, SCRIPT, out, job, *arguments), out / f"{job}-{ranks}.log", HANG)
    return [json.loads((out / f"{job}-{ranks}-{rank}.json").read_text()) for rank in range(ranks)]


def seen(passes: list[dict[str, Any]]) -> Counter[int]:
    """How often each sample was delivered, over the ranks of one pass."""
    return Counter(i for pass_ in passes for step in pass_["ids"] for i in step)


@pytest.mark.soak
def test_accelerated_loader_delivers_each_sample_once_in_equal_steps_for_all_accelerate_options(
    tmp_path: Path,
) -> None:
    ranks = run(2, tmp_path, "epochs")
    for cell in zip(*ranks, strict=True):
        passes = [[rank["passes"][epoch] for rank in cell] for epoch in range(2)]
        for each in passes:
            assert seen(each) == ONCE, cell
            steps = len(each[0]["ids"])
            assert [len(rank["ids"]) for rank in each] == [steps] * 2
            # 7 steps, synced every 3 and at the end.
            assert [rank["ends"] for rank in each] == [[False] * (steps - 1) + [True]] * 2
            synced = [step % 3 == 2 or step == steps - 1 for step in range(steps)]
            assert [rank["synced"] for rank in each] == [synced] * 2
            assert not any(rank["left_behind"] for rank in each)
        assert passes[0][0]["ids"] != passes[1][0]["ids"], "a new order each epoch"
    assert len(ranks[0]) == 12


@pytest.mark.soak
@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
def test_gather_for_metrics_returns_each_sample_exactly_once_for_every_dataset_size(
    ranks: int, tmp_path: Path
) -> None:
    results = run(ranks, tmp_path, "metrics")
    assert all(result == results[0] for result in results), "every rank gets the same"
    sizes = Counter((cell["tail"], cell["samples"]) for cell in results[0])
    first_size = {"pad": 1, "even": ranks, "drop": ranks}
    assert sizes == {(tail, size): 2 for tail, first in first_size.items() for size in range(first, 41)}
    for cell in results[0]:
        count = cell["samples"]
        got = Counter(cell["ids"])
        if cell["tail"] == "drop":
            assert len(cell["ids"]) == count - count % (ranks * cell["batch_size"]), cell
            assert max(got.values(), default=1) == 1
        else:
            assert got == Counter(range(count)), cell
        assert cell["names"] == [f"sample {i}" for i in cell["ids"]]
        assert cell["sum"] == cell["wanted"]
        assert cell["losses_each_step"], "what is one of each rank is gathered whole"


@pytest.mark.soak
def test_gather_for_metrics_gathers_values_of_other_lengths_whole_or_raises_on_every_rank(tmp_path: Path) -> None:
    first, second = run(2, tmp_path, "lengths")
    assert [[cell["rows"] for cell in cells] for cells in (first, second)] == [[2, 3, 4], [3, 4, 4]]
    for one, other in zip(first, second, strict=True):
        assert {**one, "rows": 0} == {**other, "rows": 0}, "every rank gets the same"
        assert one["whole"] == [2] * 4, "one of each rank, whichever has as many rows"
        assert one["repeated"] == 10
        assert one["tables"] == ["class 0", "class 1"] * 2
        assert "shapes (5,) on rank 0, (6,) on rank 1" in one["error"]
    assert [len(cell["ids"]) for cell in first] == [5, 7, 5]


@pytest.mark.slow
def test_accelerate_checkpoint_in_mid_epoch_resumes_on_fewer_and_on_more_ranks(tmp_path: Path) -> None:
    saved = run(2, tmp_path, "save")
    assert seen([rank["first"] for rank in saved]) == ONCE
    for ranks, way in ((1, "load"), (3, "skip")):
        loaded = run(ranks, tmp_path, "load", way)
        assert [rank["state"] for rank in loaded] == [saved[0]["state"]] * ranks
        assert [rank["step"] for rank in loaded] == [saved[0]["step"]] * ranks, "else ranks sync at other steps"
        assert seen([rank["second"] for rank in saved] + [rank["rest"] for rank in loaded]) == ONCE
        assert len({len(rank["rest"]["ids"]) for rank in loaded}) == 1
        assert all(rank["rest"]["synced"] == loaded[0]["rest"]["synced"] for rank in loaded)
        assert seen([rank["after"] for rank in loaded]) == ONCE
        assert [rank["evaluation"] for rank in loaded] == [1] * ranks, "every loader has its own place"


class CountedReads:
    """A map-style dataset that counts how often it is read."""

    def __init__(self) -> None:
        self.reads = 0

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> dict[str, int]:
        self.reads += 1
        return {"id": index}


def test_skip_first_batches_reads_no_skipped_sample_and_advances_to_the_next_epoch() -> None:
    accelerator, data = Accelerator(cpu=True), CountedReads()
    loader = accelerated(rf.Loader(rf.from_dataset(data), 4, shuffle=True), accelerator)
    whole = [batch["id"].tolist() for batch in loader]
    loader.set_epoch(0)
    data.reads = 0
    rest = [batch["id"].tolist() for batch in accelerator.skip_first_batches(loader, 5)]
    assert rest == whole[5:]
    assert data.reads == sum(map(len, rest))
    assert loader.epoch == 1
    other = accelerator.prepare(DataLoader(list(range(32)), batch_size=2))
    assert sum(len(batch) for batch in accelerator.skip_first_batches(other, 2)) == 28, "as before"
    with pytest.raises(ArgumentError, match=r"accelerator\.skip_first_batches\(loader, n\)"):
        skip_first_batches(loader, 5)


@pytest.mark.slow
def test_rankfeed_data_that_accelerate_would_shard_again_raises_an_error_on_every_rank(tmp_path: Path) -> None:
    for results in run(2, tmp_path, "wrapped"):
        assert len(results) == 12
        for cell in results:
            assert cell["alone"] in (26, 27), "left out of prepare it is this rank's half"
            assert "shard data again" in cell["error"], cell
            assert "rankfeed.integrations.accelerate.accelerated" in cell["error"]


@pytest.mark.parametrize(
    "way", ["ids", slow("nodesplitter"), *map(soak, ("stream in workers", "sharded samples"))]
)
def test_accelerate_dispatch_batches_over_rankfeed_data_fails_the_job_with_an_error(
    way: str, tmp_path: Path
) -> None:
    log = tmp_path / "log"
    with jobs.started(jobs.torchrun(2, SCRIPT, tmp_path, "dispatched", way), log) as job:
        assert job.wait(HANG) == 1
    assert "shard data again" in log.read_text()


def test_accelerated_raises_argument_error_for_another_topology_or_another_library() -> None:
    accelerator = Accelerator(cpu=True)
    source = rf.from_dataset([{"id": i} for i in range(8)])
    with pytest.raises(ArgumentError, match="not those of the accelerator"):
        accelerated(rf.Loader(source, 2, topology=rf.Topology(rank=0, world_size=2)), accelerator)
    with pytest.raises(ArgumentError, match="can be used with an Accelerator this way"):
        accelerated(DataLoader([1, 2]), accelerator)  # type: ignore[arg-type]


def test_iterating_a_prepared_loader_without_accelerated_raises_on_several_ranks(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    accelerator = Accelerator(cpu=True)
    source = rf.from_dataset([{"id": i} for i in range(8)])
    loader = accelerator.prepare(rf.Loader(source, 2, topology=rf.Topology(rank=0, world_size=2)))
    with monkeypatch.context() as patch:
        patch.setitem(AcceleratorState._shared_state, "num_processes", 2)
        with pytest.raises(
            ArgumentError, match=r"(?s)rankfeed\.integrations\.accelerate\.accelerated.*rank 0 of 2"
        ):
            iter(loader)
    assert len(list(loader)) == 2, "an Accelerator of one process shards nothing"
    assert len(list(rf.Loader(source, 2, topology=rf.Topology()))) == 4, "one process lacks nothing but places"
    assert len(list(accelerated(rf.Loader(source, 2), accelerator))) == 4


def test_accelerate_gradient_state_is_correct_after_nested_loops_and_a_break() -> None:
    accelerator = Accelerator(cpu=True)
    source = rf.from_dataset([{"id": i} for i in range(5)])
    outer, inner = (accelerated(rf.Loader(source, 2), accelerator) for _ in range(2))
    ends = []
    for _ in outer:
        for _ in inner:
            break
        ends.append(accelerator.gradient_state.end_of_dataloader)
    assert ends == [False, False, True]
    assert not accelerator.gradient_state.in_dataloader


def test_loading_an_accelerate_checkpoint_without_loader_state_raises_state_error(tmp_path: Path) -> None:
    first, second = Accelerator(cpu=True), Accelerator(cpu=True)
    accelerated(rf.Loader(rf.from_dataset([{"id": i} for i in range(5)]), 2), first)
    second.register_for_checkpointing(torch.optim.SGD(torch.nn.Linear(1, 1).parameters()))
    second.save_state(str(tmp_path))
    with pytest.raises(StateError, match="no state of this loader at its index"):
        first.load_state(str(tmp_path))


def test_loaders_with_checkpoint_false_are_not_saved_in_accelerate_checkpoints(tmp_path: Path) -> None:
    source = rf.from_dataset([{"id": i} for i in range(8)])
    first, second = Accelerator(cpu=True), Accelerator(cpu=True)
    train = accelerated(rf.Loader(source, 2), first)
    for _ in zip(range(2), train, strict=False):
        evaluated = accelerated(rf.Loader(source, 4), first, checkpoint=False)
        assert sum(len(first.gather_for_metrics(batch["id"])) for batch in evaluated) == 8
    first.save_state(str(tmp_path))
    resumed = accelerated(rf.Loader(source, 2), second)
    second.load_state(str(tmp_path))
    assert resumed.state_dict() == train.state_dict()
    assert resumed.state_dict()["steps"] == 2


@pytest.mark.parametrize("batch_size", [4, 3], ids=["same", "smaller"])
@pytest.mark.parametrize("way", ["load", "load its state alone", "skip none", "skip all"])
def test_accelerate_checkpoint_at_the_last_batch_resumes_with_the_next_epoch(
    way: str, batch_size: int, tmp_path: Path
) -> None:
    source = rf.from_dataset([{"id": i} for i in range(12)])
    first = Accelerator(cpu=True)
    loader = accelerated(rf.Loader(source, 4, shuffle=True), first)
    for step, _ in enumerate(loader):
        if step == 2:
            first.save_state(str(tmp_path))
            state = loader.state_dict()
    second = Accelerator(cpu=True)
    resumed = accelerated(rf.Loader(source, batch_size, shuffle=True), second)
    if way == "load its state alone":
        resumed.load_state_dict(state)
    else:
        second.load_state(str(tmp_path))
    assert (resumed.epoch, len(resumed)) == (1, 12 // batch_size)
    batches = resumed if "load" in way else second.skip_first_batches(resumed, 3 if way == "skip all" else 0)
    if way == "skip all":
        assert list(batches) == [], "the script stands at the end of the epoch that it counts"
    wanted = [i for batch in loader for i in batch["id"].tolist()]
    ids, ends = [], []
    for batch in batches:
        ids += batch["id"].tolist()
        ends.append(second.gradient_state.end_of_dataloader)
    assert ids == wanted
    assert ends == [False] * (12 // batch_size - 1) + [True]
    assert resumed.epoch == 2


def test_skip_first_batches_sets_the_position_and_raises_beyond_the_end_of_the_epoch() -> None:
    accelerator = Accelerator(cpu=True)
    source = rf.from_dataset([{"id": i} for i in range(10)])
    loader = accelerated(rf.Loader(source, 2), accelerator)
    for steps, position in ((0, 0), (3, 6), (2, 4), (2, 4), (5, 10)):
        state = accelerator.skip_first_batches(loader, steps).state_dict()
        assert (state["steps"], state["position"], state["epoch"]) == (steps, position, 0)
    assert list(loader) == []
    assert loader.epoch == 1
    with pytest.raises(ArgumentError, match="fewer batches"):
        accelerator.skip_first_batches(loader, 6)


@pytest.mark.slow
def test_the_accelerate_example_stopped_and_resumed_trains_on_each_sample_once_per_epoch(tmp_path: Path) -> None:
    first = jobs.torchrun(2, EXAMPLE, tmp_path / "run", "--stop-after", 5)
    jobs.run(first, tmp_path / "first.log", HANG)
    jobs.run(jobs.torchrun(2, EXAMPLE, tmp_path / "run"), tmp_path / "second.log", HANG)
    log = (tmp_path / "second.log").read_text()
    assert "resumed at epoch 0, step 5" in log
    assert "of 90 samples" in log
    trained = Counter(
        line for path in (tmp_path / "run").glob("delivered-*.txt") for line in path.read_text().splitlines()
    )
    assert trained == Counter(f"{epoch} {key:06d}" for epoch in range(2) for key in range(300))

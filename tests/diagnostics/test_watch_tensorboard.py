"""Curves are in TensorBoard's own files; a disk that is full ends them, and nothing else."""

import resource
import sys
import threading
import warnings
from pathlib import Path
from typing import Any

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tests.diagnostics.watching import Doing, doing
from torch.utils.tensorboard import SummaryWriter

import rankfeed as rf
from rankfeed.errors import MissingExtraError

SELDOM = 3600.0


def curves(folder: Path) -> dict[str, list[tuple[int, float]]]:
    events = EventAccumulator(str(folder)).Reload()
    return {tag: [(each.step, each.value) for each in events.Scalars(tag)] for tag in events.Tags()["scalars"]}


def test_figures_are_read_back_under_the_step_of_training(tmp_path: Path) -> None:
    loader = rf.Loader(rf.from_dataset([{"x": float(i)} for i in range(8)]), batch_size=2)
    for _ in range(2):
        with rf.watch(loader, "tensorboard", log_dir=tmp_path, every=SELDOM, name="train"):
            list(loader)
    found = curves(tmp_path)
    assert found.keys() == {f"rankfeed/train/{name}" for name in loader.stats()}
    assert found["rankfeed/train/samples"] == [(4, 8.0), (8, 16.0)]


def test_a_writer_of_the_users_own_stays_open(tmp_path: Path) -> None:
    writer = SummaryWriter(tmp_path)
    with rf.watch(doing(), writer, every=SELDOM):
        pass
    writer.add_scalar("loss", 0.5, 22)
    writer.close()
    assert curves(tmp_path)["rankfeed/epoch"] == [(21, 2.0)]
    assert curves(tmp_path)["loss"] == [(22, 0.5)]


def test_each_rank_has_a_folder_of_its_own(tmp_path: Path) -> None:
    for rank in (0, 1):
        with rf.watch(doing(rank), "tensorboard", log_dir=tmp_path, every=SELDOM, all_ranks=True):
            pass
    assert sorted(each.name for each in tmp_path.iterdir()) == ["rank-0", "rank-1"]
    assert len(curves(tmp_path / "rank-1")) == len(Doing().stats())


def test_a_full_disk_ends_the_curves_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(threading, "excepthook", lambda _: None)  # TensorBoard's own thread says it, too
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        resource.setrlimit(resource.RLIMIT_FSIZE, (2048, hard))  # EFBIG, where a full disk says ENOSPC
        try:
            with rf.watch(doing(), "tensorboard", log_dir=tmp_path, every=0.01):
                (ticker,) = (each for each in threading.enumerate() if each.name == "rankfeed-watch")
                ticker.join(30)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert not ticker.is_alive()
    assert ["no longer watched: OSError" in str(each.message) for each in said] == [True]


def test_a_folder_that_cannot_be_made_is_said_once(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.warns(RuntimeWarning, match="no longer watched") as said:
        rf.watch(doing(), "tensorboard", log_dir=tmp_path / "file" / "runs", every=SELDOM).close()
    assert len(said) == 1


def test_without_tensorboard_the_error_names_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    missing: Any = None
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", missing)
    with pytest.raises(MissingExtraError, match=r"pip install 'rankfeed\[tensorboard\]'"):
        rf.watch(doing(), "tensorboard")

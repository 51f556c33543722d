"""`pyg.prepare`: data sets of PyG are downloaded and processed once, and built again if they are not whole."""

import copy
import os
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.integrations.pyg_datasets import KINDS, RAW, InMemory, right
from torch_geometric.data import Data
from torch_geometric.transforms import BaseTransform, Compose

from rankfeed.errors import ArgumentError, PrepareError
from rankfeed.integrations.pyg import prepare

COUNT = 40


def raw_files(root: Path) -> None:
    (root / "raw").mkdir(parents=True)
    for number in range(RAW):
        (root / "raw" / f"{number}.txt").write_text("".join(f"{index}\n" for index in range(COUNT)))


def folder_of(root: Path) -> Path:
    (found,) = [path for path in root.iterdir() if "-" in path.name and not path.name.startswith(".")]
    return found


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("harm", ["cut", "gone", "half of upstream"])
def test_pyg_prepare_rebuilds_a_truncated_or_incomplete_dataset(kind: str, harm: str, tmp_path: Path) -> None:
    if harm == "half of upstream":
        raw_files(tmp_path)
        (tmp_path / "processed").mkdir()
        for name in ("data.pt", "sqlite.db"):
            (tmp_path / "processed" / name).write_bytes(b"half")
    else:
        assert right(prepare(KINDS[kind], tmp_path, COUNT), COUNT)
        made = folder_of(tmp_path) / "processed"
        file = next(path for path in made.iterdir() if path.suffix in (".pt", ".db"))
        if harm == "cut":
            os.truncate(file, file.stat().st_size // 2)
        else:
            file.unlink()
    dataset = prepare(KINDS[kind], tmp_path, COUNT)
    assert right(dataset, COUNT)


def test_pyg_prepare_key_uses_the_current_size_of_a_raw_file_and_not_a_cached_stat(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A host may cache the size and time of a file for a while."""
    file = tmp_path / "raw.txt"
    keys: list[str] = []
    monkeypatch.setattr(
        "rankfeed.integrations.pyg.prepare_once", lambda path, build, *, key, **_: keys.append(key)
    )
    file.write_text("1")
    before, real = os.stat(file), os.stat
    file.write_text("22")
    prepare(Path, tmp_path)
    monkeypatch.setattr(os, "stat", lambda path, **options: before if path == file else real(path, **options))
    prepare(Path, tmp_path)
    assert keys[0] == keys[1]


def test_pyg_prepare_uses_the_users_raw_files_unmodified_and_detects_later_changes(tmp_path: Path) -> None:
    raw_files(tmp_path)
    before = {path.name: path.read_bytes() for path in (tmp_path / "raw").iterdir()}
    assert right(prepare(InMemory, tmp_path, COUNT), COUNT)
    assert not (folder_of(tmp_path) / "downloaded-by").exists()
    assert {path.name: path.read_bytes() for path in (tmp_path / "raw").iterdir()} == before
    (tmp_path / "raw" / "0.txt").write_text("changed")
    with pytest.raises(PrepareError, match="half a download"):
        prepare(InMemory, tmp_path, COUNT)


def test_pyg_prepare_downloads_missing_raw_files_without_changing_the_users_files(tmp_path: Path) -> None:
    (tmp_path / "raw").mkdir()
    (tmp_path / "raw" / "0.txt").write_text("mine")
    assert right(prepare(InMemory, tmp_path, 3), 3)
    assert (tmp_path / "raw" / "0.txt").read_text() == "mine"
    assert os.listdir(tmp_path / "raw") == ["0.txt"]


def test_pyg_prepare_builds_one_dataset_per_arguments_and_ignores_transform(tmp_path: Path) -> None:
    for count in (3, 5, 3):
        assert right(prepare(InMemory, tmp_path, count), count)
        assert len(prepare(InMemory, tmp_path, count, transform=lambda data: data)) == count
    assert len([path for path in tmp_path.iterdir() if not path.name.startswith(".")]) == 2


def test_pyg_prepare_of_an_invalid_dataset_raises_argument_error(tmp_path: Path) -> None:
    with pytest.raises(ArgumentError, match="invalid dataset"):
        prepare("Cora", tmp_path)  # type: ignore[arg-type]


def scaled(by: float) -> Callable[[Data], Data]:
    def scale(data: Data) -> Data:
        data.x = data.x * by
        return data

    return scale


class Scale(BaseTransform):
    def __init__(self, by: float) -> None:
        self.by = by

    def forward(self, data: Data) -> Data:
        return scaled(self.by)(data)


def double(data: Data) -> Data:
    return scaled(2)(data)


class Scaled(InMemory):
    def __init__(self, root: str, pre_transform: Any = None) -> None:
        self.scale = pre_transform
        super().__init__(root, 3)

    def graphs(self) -> list[Data]:
        return [self.scale(each) for each in super().graphs()]


def sums(dataset: Any) -> list[float]:
    return [float(data.x.sum()) for data in dataset]


def test_pyg_prepare_treats_a_partial_of_a_class_like_the_class_with_arguments(tmp_path: Path) -> None:
    for count in (3, 5):
        assert right(prepare(partial(InMemory, count=count), tmp_path), count)
        assert right(prepare(InMemory, tmp_path, count=count), count)
    assert len(list(tmp_path.glob("InMemory-*"))) == 2


@pytest.mark.parametrize("made_by", [lambda root: InMemory(root, 3), folder_of], ids=["lambda", "function"])
def test_pyg_prepare_of_a_function_that_returns_a_dataset_raises_argument_error(
    made_by: Any, tmp_path: Path
) -> None:
    with pytest.raises(ArgumentError, match=r"(?s)invalid dataset.*pass the class itself"):
        prepare(made_by, tmp_path)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    "nameless",
    [
        lambda data: data,
        scaled(2),
        Compose([lambda data: data]),
        partial(lambda by, data: data, 1),
        map(double, []),
    ],
    ids=["lambda", "closure", "composed", "partial", "object"],
)
def test_pyg_prepare_with_an_unidentifiable_pre_transform_raises_unless_a_key_is_given(
    nameless: Any, tmp_path: Path
) -> None:
    with pytest.raises(ArgumentError, match=r"(?s)no description that identifies it.*key="):
        prepare(Scaled, tmp_path, pre_transform=nameless)
    assert not list(tmp_path.iterdir())
    if callable(nameless):
        prepare(Scaled, tmp_path, pre_transform=nameless, key="the one")


def test_pyg_prepare_builds_separate_datasets_for_pre_transforms_with_different_arguments(tmp_path: Path) -> None:
    one = sums(prepare(Scaled, tmp_path, pre_transform=Scale(1)))
    for transform in (Scale(2), double, Scale(2).forward, Compose([Scale(2)])):
        for _ in range(2):
            assert sums(prepare(Scaled, tmp_path, pre_transform=transform)) == [2 * each for each in one]
    assert len(list(tmp_path.glob("Scaled-*"))) == 5


class Counted(InMemory):
    def __init__(self, root: str, how: Any) -> None:
        count = how if isinstance(how, int) else int(getattr(how, "by", how))
        super().__init__(root, count)


class Config:
    """A plain object, as many a configuration is: its repr is only its address."""

    def __init__(self, by: int) -> None:
        self.by = by


@dataclass
class Nested:
    config: Config

    @property
    def by(self) -> int:
        return self.config.by


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (Config(2), Config(3)),
        (Nested(Config(2)), Nested(Config(3))),
        (np.array(2, np.uint8), np.array(2, np.int64)),
        (np.array(2), torch.tensor(2)),
    ],
    ids=["object", "repr of an object", "dtype", "kind"],
)
def test_pyg_prepare_distinguishes_object_and_array_arguments_by_their_contents(
    one: Any, other: Any, tmp_path: Path
) -> None:
    for how in (one, other, copy.deepcopy(one)):
        assert right(prepare(Counted, tmp_path, how), int(getattr(how, "by", how)))
    assert len(list(tmp_path.glob("Counted-*"))) == 2


def test_pyg_prepare_ignores_unrelated_files_under_the_root(tmp_path: Path) -> None:
    raw_files(tmp_path)
    prepare(InMemory, tmp_path, COUNT)
    made = folder_of(tmp_path).stat().st_ino
    (tmp_path / "train.log").write_text("step 1")
    (tmp_path / "runs").mkdir()
    (tmp_path / "runs" / "raw.txt").write_text("step 1")
    assert right(prepare(InMemory, tmp_path, COUNT), COUNT)
    assert folder_of(tmp_path).stat().st_ino == made
    assert not list(folder_of(tmp_path).rglob("train.log"))


def test_pyg_prepare_uses_raw_files_behind_a_symlink(tmp_path: Path) -> None:
    (tmp_path / "root").mkdir()
    raw_files(tmp_path / "elsewhere")
    (tmp_path / "root" / "raw").symlink_to(tmp_path / "elsewhere" / "raw")
    (tmp_path / "elsewhere" / "raw" / "back").symlink_to(tmp_path / "root")
    assert right(prepare(InMemory, tmp_path / "root", COUNT), COUNT)
    (folder,) = (tmp_path / "root").glob("InMemory-*")
    assert not (folder / "downloaded-by").exists()
    assert not (folder / "raw").is_symlink()


def test_pyg_prepare_ignores_a_raw_file_removed_during_the_scan(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    raw_files(tmp_path)
    gone = tmp_path / "raw" / "half.part"
    gone.write_text("")
    stat = Path.stat

    def seen(path: Path, **options: Any) -> os.stat_result:
        if path == gone:
            gone.unlink(missing_ok=True)
        return stat(path, **options)

    monkeypatch.setattr(Path, "stat", seen)
    assert right(prepare(InMemory, tmp_path, COUNT), COUNT)

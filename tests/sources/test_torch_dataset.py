"""Any map-style Dataset is a source, and keeps what it returns."""

import json
import random
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import ConcatDataset, Dataset, IterableDataset, Subset, TensorDataset

import rankfeed as rf
from rankfeed.columns.columns import Objects
from rankfeed.columns.field import Field
from rankfeed.errors import ArgumentError, SourceError, StateError


class Dicts(Dataset[dict[str, Any]]):
    def __len__(self) -> int:
        return 20

    def __getitem__(self, index: int) -> dict[str, Any]:
        if index == 13:
            raise ValueError("unlucky")
        return {"x": torch.full((index % 3 + 1, 2), index), "y": index / 2, "name": str(index)}


class Many(Dicts):
    def __getitems__(self, indices: list[int]) -> list[dict[str, Any]]:
        return [{"y": index} for index in indices]

    def __getitem__(self, index: int) -> dict[str, Any]:
        raise AssertionError("__getitems__ is there")


class Stream(IterableDataset[int]):
    def __iter__(self) -> Any:
        return iter(range(3))


def test_samples_that_are_dicts_become_columns() -> None:
    source = rf.from_dataset(Dicts())
    assert source.as_dicts
    assert source.fields == {
        "x": Field("ragged", "int64", (2,)),
        "y": Field("dense", "float64"),
        "name": Field("str"),
    }
    batch = source.fetch([7, 2, 7])
    assert batch["y"].gather().tolist() == [3.5, 1.0, 3.5]  # type: ignore[attr-defined]
    assert batch["name"].rows() == ["7", "2", "7"]
    assert list(source.fetch([1], ["name"])) == ["name"]


def test_getitems_is_called_instead_of_getitem_if_a_dataset_has_it() -> None:
    assert rf.from_dataset(Many()).fetch([4, 2])["y"].gather().tolist() == [4, 2]  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    "result", [{"x": [1, 2]}, {4: {"x": 1}, 2: {"x": 2}}, {"4", "2"}, "42"], ids=["dict", "by id", "set", "text"]
)
def test_getitems_that_returns_no_list_raises_source_error(result: Any) -> None:
    class Unordered(Dicts):
        def __getitems__(self, indices: list[int]) -> Any:
            return result

    with pytest.raises(SourceError, match="__getitems__ returned no list of the samples"):
        rf.from_dataset(Unordered()).samples([4, 2])


def test_samples_that_are_no_flat_dicts_are_returned_unchanged() -> None:
    source = rf.from_dataset(TensorDataset(torch.arange(5), torch.ones(5)))
    assert not source.as_dicts
    column = source.fetch([3, 1])[""]
    assert isinstance(column, Objects)
    assert [sample[0].item() for sample in column.rows()] == [3, 1]
    for odd in ({"nested": {"a": 1}}, {"none": None}, "text", object()):
        assert rf.from_dataset([odd] * 3).fetch([1])[""].rows() == [odd]


def test_the_error_for_an_exception_in_a_dataset_names_the_sample() -> None:
    with pytest.raises(SourceError, match=r"ValueError: unlucky[\s\S]*sample 13") as caught:
        rf.from_dataset(Dicts()).fetch([12, 13])
    assert isinstance(caught.value.__cause__, ValueError)


def test_the_error_for_a_sample_with_other_fields_names_it() -> None:
    rows: list[Any] = [{"x": 1}] * 10
    rows[8] = {"x": 1, "y": 2}
    with pytest.raises(SourceError, match=r"unlike[\s\S]*sample 8"):
        rf.from_dataset(rows).fetch([6, 8])
    rows[8] = {"x": "text"}
    with pytest.raises(SourceError, match=r"field 'x' of sample 8"):
        rf.from_dataset(rows).fetch([6, 8])


@pytest.mark.parametrize("bad", [Stream(), [], object(), iter([1]), {"a": 1}, "text", 3])
def test_from_dataset_of_anything_but_a_map_style_dataset_raises_source_error(bad: Any) -> None:
    with pytest.raises(SourceError):
        rf.from_dataset(bad)


def test_the_fingerprint_changes_with_the_length_and_with_the_fingerprint_attribute() -> None:
    class Named(list[Any]):
        fingerprint = "abc"

    one, other = rf.from_dataset([{"x": 1}]), rf.from_dataset([{"x": 1}, {"x": 2}])
    assert one.fingerprint != other.fingerprint
    assert not one.identified
    named = Named([{"x": 1}])
    before = rf.from_dataset(named).fingerprint
    assert rf.from_dataset(named).identified
    named.fingerprint = "abd"
    assert rf.from_dataset(named).fingerprint != before


class Files(Dataset[Any]):
    """As torchvision's ImageFolder: paths and labels are listed when it is created."""

    def __init__(self, root: Path, attribute: str = "samples") -> None:
        paths = sorted(root.glob("*/*"))
        labelled = attribute in ("samples", "imgs")
        setattr(self, attribute, [(str(path), int(path.parent.name)) if labelled else path for path in paths])
        self.reads, self.length = 0, len(paths)

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> Any:
        self.reads += 1
        return np.random.rand(3), random.random()


def write_files(root: Path) -> Path:
    for index in range(200):
        path = root / str(index % 3) / f"{index:03d}.bin"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(bytes([index]) * 100)
    return root


@pytest.mark.parametrize("attribute", ["samples", "imgs", "paths", "files"])
def test_the_fingerprint_changes_with_the_listed_names_contents_and_labels(attribute: str, tmp_path: Path) -> None:
    root, other = write_files(tmp_path / "a" / "data"), write_files(tmp_path / "b" / "elsewhere")
    dataset = Files(root, attribute)
    before = rf.from_dataset(dataset).fingerprint
    assert dataset.reads == 0

    def fingerprint(where: Path) -> str:
        return rf.from_dataset(Files(where, attribute)).fingerprint

    assert fingerprint(root) == fingerprint(other) == before  # anywhere
    (root / "1" / "100.bin").rename(root / "1" / "000.bin")  # the files before it move by one
    (other / "2" / "122.bin").write_bytes(b"other")
    (other / "0" / "000.bin").write_bytes(b"other")  # one of those whose content is compared
    assert len({before, fingerprint(root), fingerprint(other)}) == 3
    if attribute == "samples":
        relabelled = Files(write_files(tmp_path / "c"))
        relabelled.samples = [(path, 2 - label) for path, label in relabelled.samples]  # type: ignore[attr-defined]
        assert rf.from_dataset(relabelled).fingerprint != before


def test_the_fingerprint_changes_with_the_indices_and_files_of_wrapped_datasets(tmp_path: Path) -> None:
    folder = Files(write_files(tmp_path))
    even, odd = Subset(folder, range(0, 200, 2)), Subset(folder, list(range(1, 200, 2)))
    prints = [rf.from_dataset(item).fingerprint for item in (even, odd, ConcatDataset([even, odd]))]
    again = [rf.from_dataset(Subset(Files(tmp_path), list(range(first, 200, 2)))).fingerprint for first in (0, 1)]
    assert prints[:2] == again
    assert len(set(prints)) == 3
    (tmp_path / "0" / "000.bin").rename(tmp_path / "0" / "001.bin")
    assert rf.from_dataset(Subset(Files(tmp_path), range(0, 200, 2))).fingerprint != prints[0]


@pytest.mark.parametrize("kind", [list, np.asarray, torch.tensor], ids=["list", "array", "tensor"])
def test_the_fingerprint_changes_with_indices_and_labels_of_any_kind(tmp_path: Path, kind: Any) -> None:
    folder, indices = Files(write_files(tmp_path)), [*range(0, 200, 2)]
    prints = [rf.from_dataset(Subset(folder, kind(item))).fingerprint for item in (indices, indices[::-1])]
    assert prints[0] != prints[1]
    assert prints[0] == rf.from_dataset(Subset(folder, indices)).fingerprint
    paths = [path for path, *_ in folder.samples]
    for name in ("samples", "targets"):
        prints = []
        for change in (0, 1):
            labels = kind([index % 3 + change for index in range(len(paths))])
            dataset = Files(tmp_path)
            setattr(dataset, name, list(zip(paths, [*labels], strict=True)) if name == "samples" else labels)
            prints.append(rf.from_dataset(dataset).fingerprint)
        assert prints[0] != prints[1], name


def test_the_fingerprint_covers_3_million_names_and_ignores_attributes_of_other_types() -> None:
    def fingerprint(samples: Any) -> str:
        dataset = Plain()
        vars(dataset)["samples"] = samples
        return rf.from_dataset(dataset).fingerprint

    names = [f"/data/{index // 1000}/{index}.jpg" for index in range(3_000_000)]
    prints = {fingerprint(names)}
    for moved in (3_000_000 - 1, 1_000):
        prints.add(fingerprint([names[moved], *names[:moved], *names[moved + 1 :]]))
    assert len(prints) == 3
    others: list[Any] = [[1, 2], [{"path": "a"}], ["a", 1], [("a", 1), ("b",)], [], "ab", np.arange(3), [object()]]
    for value in others:
        assert fingerprint(value) == rf.from_dataset(Plain()).fingerprint


class Plain(Dataset[dict[str, Any]]):
    """A Dataset that tells nothing of its data but its samples."""

    def __init__(self, first: int = 0, draw: Any = None) -> None:
        self._first, self._draw = first, draw

    def __len__(self) -> int:
        return 40

    def __getitem__(self, index: int) -> dict[str, Any]:
        if self._draw is not None:
            self._draw()
        value = self._first + index
        return {"x": value, "t": torch.full((2,), value), "name": f"/mnt/{self._first}/{index}", "b": [1.5, b"b"]}


def state_after_two_steps(dataset: Any, **options: Any) -> dict[str, Any]:
    loader = rf.Loader(dataset, 4, topology=rf.Topology(), **options)
    batches = iter(loader)
    for _ in range(2):
        next(batches)
    return dict(json.loads(json.dumps(loader.state_dict())))


def resume(dataset: Any, state: dict[str, Any], **options: Any) -> int:
    loader = rf.Loader(dataset, 4, topology=rf.Topology(), **options)
    loader.load_state_dict(state)
    return sum(1 for _ in loader)


def values_of(samples: list[Any]) -> Any:
    return torch.tensor([sample["x"] for sample in samples])


def views(dataset: Any) -> list[rf.Source]:
    source = rf.from_dataset(dataset)
    return [source, source.select(range(39, -1, -1)), rf.concat([source])]


def test_a_state_of_a_dataset_with_other_samples_raises_state_error() -> None:
    for same, view, other in zip(views(Plain()), views(Plain()), views(Plain(first=1)), strict=True):
        state = state_after_two_steps(same)
        assert len(json.dumps(state)) < 1024
        assert resume(view, state) == 8
        with pytest.raises(StateError, match="fingerprint"):
            resume(other, state)


class Ordered(Dataset[Any]):
    """Selects from another Dataset by an attribute that is not known."""

    def __init__(self, inner: Any, attribute: str, order: Any) -> None:
        self.dataset, self._attribute = inner, attribute
        setattr(self, attribute, order)

    def __len__(self) -> int:
        return 200

    def __getitem__(self, index: int) -> Any:
        return self.dataset[int(getattr(self, self._attribute)[index])]


class Contents(Files):
    """As Files, but what it reads is the file."""

    def __getitem__(self, index: int) -> Any:
        return {"x": int(Path(self.samples[index][0]).name[:3])}  # type: ignore[attr-defined]


class Beside(Files):
    """Reads a list or a Dataset beside the files that it lists."""

    def __init__(self, root: Path, other: Any) -> None:
        super().__init__(root)
        self.other = other

    def __getitem__(self, index: int) -> Any:
        return {"text": str(self.other[index])}


class Longer(Plain):
    def __len__(self) -> int:
        return 200

    def __getitem__(self, index: int) -> Any:
        return {"x": self._first + index}


ORDER = list(range(200))
UNNAMED: dict[str, Any] = {
    "order": lambda root, shift: Ordered(Contents(root), "order", ORDER[shift:] + ORDER[:shift]),
    "idx": lambda root, shift: Ordered(Contents(root), "idx", np.roll(ORDER, shift)),
    "tensor": lambda root, shift: Ordered(Contents(root), "chosen", torch.tensor(ORDER).roll(shift)),
    "dict": lambda root, shift: Ordered(Contents(root), "map", dict(enumerate(np.roll(ORDER, shift).tolist()))),
    "inside": lambda root, shift: Subset(Ordered(Contents(root), "order", np.roll(ORDER, shift)), ORDER),
    "captions": lambda root, shift: Beside(root, [f"text {index + shift}" for index in ORDER]),
    "base": lambda root, shift: Beside(root, Longer(shift)),
    "concat": lambda root, shift: ConcatDataset([Contents(root), Longer(shift)]),
    "sources": lambda root, shift: rf.concat(
        [rf.from_dataset(Beside(root, ORDER)), rf.from_dataset([{"text": str(shift)}] * 40)]
    ),
}


@pytest.mark.parametrize("name", UNNAMED)
def test_a_state_is_compared_by_content_if_names_do_not_determine_samples(name: str, tmp_path: Path) -> None:
    make, root = UNNAMED[name], write_files(tmp_path)
    state = state_after_two_steps(make(root, 0))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert resume(make(root, 0), state) > 40
    with pytest.raises(StateError, match="samples have another content"):
        resume(make(root, 7), state)


def test_a_state_with_the_fingerprint_of_names_only_resumes_with_a_warning(tmp_path: Path) -> None:
    dataset = Ordered(Contents(write_files(tmp_path)), "order", ORDER)
    state = state_after_two_steps(dataset)
    names, _, content = state["source"].partition("-")
    assert content
    with pytest.warns(UserWarning, match="cannot be compared"):
        assert resume(dataset, state | {"source": names}) == 48


def test_a_state_has_no_fingerprint_of_content_if_names_determine_the_samples(tmp_path: Path) -> None:
    """Attributes that do not choose samples change nothing: sizes, classes, statistics."""
    folder = Files(write_files(tmp_path))
    folder.classes, folder.class_to_idx = ["0", "1", "2"], {"0": 0, "1": 1, "2": 2}  # type: ignore[attr-defined]
    folder.mean, folder.size = [0.485, 0.456, 0.406], (224, 224)  # type: ignore[attr-defined]
    folder.targets = [label for _, label in folder.samples]  # type: ignore[attr-defined]
    for dataset in (folder, Subset(folder, ORDER), ConcatDataset([folder, Subset(folder, ORDER[::2])])):
        state = state_after_two_steps(dataset)
        assert "-" not in state["source"]
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            resume(dataset, state)


@pytest.mark.parametrize(
    ("dataset", "options"),
    [
        pytest.param(lambda: Plain(draw=random.random), {}, id="random"),
        pytest.param(lambda: Plain(draw=lambda: torch.rand(1)), {}, id="torch"),
        pytest.param(lambda: Plain(draw=lambda: np.random.rand()), {}, id="numpy"),
        pytest.param(Plain, {"collate_fn": values_of}, id="not-probed"),
        pytest.param(lambda: [object()] * 40, {"transform": lambda sample: {"x": 1}}, id="objects"),
    ],
)
def test_a_state_that_cannot_be_compared_warns_and_keeps_rng_states(dataset: Any, options: dict[str, Any]) -> None:
    states = random.getstate(), torch.get_rng_state(), np.random.get_state()[1].tolist()  # type: ignore[index]
    state = state_after_two_steps(dataset(), **options)
    loader = rf.Loader(dataset(), 4, topology=rf.Topology(), **options)
    with pytest.warns(UserWarning, match=r"cannot be compared[\s\S]*`fingerprint`"):
        loader.load_state_dict(state)
    assert random.getstate() == states[0]
    assert torch.equal(torch.get_rng_state(), states[1])
    assert np.random.get_state()[1].tolist() == states[2]  # type: ignore[index]


def test_states_of_earlier_versions_without_content_resume_with_a_warning(tmp_path: Path) -> None:
    """States of earlier versions, whose fingerprints were of type and length, and those of other options."""
    folder = write_files(tmp_path)
    for dataset in (Plain(), Subset(Plain(), range(40)), Files(folder)):
        for source in (rf.from_dataset(dataset), rf.from_dataset(dataset).select(range(39, -1, -1))):
            state = state_after_two_steps(source)
            old = state | {"source": source.earlier_fingerprint}
            assert old != state
            with pytest.warns(UserWarning, match="cannot be compared"):
                assert resume(source, old) == len(source) // 4 - 2
    with pytest.warns(UserWarning, match="cannot be compared"):
        assert resume(Plain(), state_after_two_steps(Plain()), collate_fn=values_of) == 8


@pytest.mark.parametrize("fields", [None, {"a": "int64", "b": "float64", "c": "int32[*]"}])
def test_a_loader_returns_the_requested_columns_in_that_order(fields: Any) -> None:
    source = rf.from_dataset([{"a": i, "b": i / 2, "c": [i] * i} for i in range(6)], fields=fields)
    for columns in (["a"], ["c", "a"], ["b", "c", "a"]):
        assert list(source.fetch([4], columns)) == list(source.samples([4], columns)[0]) == columns
        expected = [key for name in columns for key in ([name, "c_lengths"] if name == "c" else [name])]
        batches = list(rf.Loader(source, 4, columns=columns, topology=rf.Topology()))
        assert [list(batch) for batch in batches] == [expected, expected]
        if "a" in columns:
            assert torch.cat([batch["a"] for batch in batches]).tolist() == list(range(6))


def test_columns_select_the_fields_that_a_transform_gets() -> None:
    source = rf.from_dataset([{"a": i, "b": i / 2} for i in range(4)], fields={"double": "int64"})
    options: dict[str, Any] = {"columns": ["a"], "topology": rf.Topology()}
    loader = rf.Loader(source, 4, transform=lambda sample: {"double": 2 * sample["a"]}, **options)
    assert [batch["double"].tolist() for batch in loader] == [[0, 2, 4, 6]]
    with pytest.raises(ArgumentError, match="no such column"):
        rf.Loader(source, 4, **options)


@pytest.mark.parametrize(
    ("library", "rows_of"),
    [
        ("pandas", lambda table: table.to_dict("records")),
        ("pyarrow", lambda table: table.to_pylist()),
        ("polars", lambda table: table.to_dicts()),
    ],
)
def test_pandas_arrow_and_polars_tables_are_refused_and_their_rows_read(library: str, rows_of: Any) -> None:
    package = pytest.importorskip(library)
    columns = {"x": [1, 2], "y": [3, 4]}
    table = package.table(columns) if library == "pyarrow" else package.DataFrame(columns)
    for make in (rf.from_dataset, rf.Loader):
        with pytest.raises(SourceError, match="its items are columns") as caught:
            make(table)
        assert f"found: {library}" in str(caught.value)
    assert rf.from_dataset(rows_of(table)).fetch([0, 1])["y"].gather().tolist() == [3, 4]  # type: ignore[attr-defined]

"""Graphs: batches equal to those of PyTorch Geometric's own loader, each graph once, from wherever they lie."""

import pickle
from collections import Counter
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import Subset
from torch_geometric.data import Batch, Data, Dataset, HeteroData, InMemoryDataset, OnDiskDataset
from torch_geometric.data.data import BaseData
from torch_geometric.loader import DataLoader

import rankfeed as rf
from rankfeed.errors import ArgumentError, CorruptError, SourceError, UnsafeError
from rankfeed.sources.pyg.batch import join_graphs
from rankfeed.sources.pyg.pyg_source import PyGSource, is_graphs
from rankfeed.sources.pyg.readers import Graphs

ONE = rf.Topology()


def graph(index: int, *, wide: int = 4) -> Data:
    """A graph that says which one it is; sizes differ, and some have no edges."""
    draw = torch.Generator().manual_seed(index)
    nodes = 1 + index * 7 % 11
    edges = index * 5 % 13
    return Data(
        x=torch.randn(nodes, wide, generator=draw),
        edge_index=torch.randint(0, nodes, (2, edges), generator=draw),
        edge_attr=torch.rand(edges, 2, generator=draw).double(),
        y=torch.tensor([index]),
        pos=torch.rand(nodes, 3, generator=draw),
        name=f"graph {index}",
        weight=index / 2,
        scalar=torch.tensor(index, dtype=torch.int16),
        face=torch.randint(0, nodes, (3, index % 4), generator=draw, dtype=torch.int32),
    )


def graphs_of(count: int) -> list[Any]:
    return [graph(index) for index in range(count)]


def hetero(index: int) -> HeteroData:
    draw = torch.Generator().manual_seed(index)
    users, items, edges = 1 + index % 5, 1 + index % 3, index * 5 % 7
    data = HeteroData()
    data["user"].x = torch.randn(users, 3, generator=draw)
    data["item"].num_nodes = items
    data["item"].price = torch.rand(items, 1, 2, generator=draw)
    data["user", "buys", "item"].edge_index = torch.stack(
        [torch.randint(0, users, (edges,), generator=draw), torch.randint(0, items, (edges,), generator=draw)]
    )
    data["user", "buys", "item"].edge_attr = torch.rand(edges, 1, generator=draw)
    data["item", "of", "user"].edge_label_index = torch.zeros(2, index % 3, dtype=torch.long)
    data.y = torch.tensor([index])
    return data


def in_memory(graphs: list[Any], transform: Any = None) -> InMemoryDataset:
    dataset = InMemoryDataset(transform=transform)
    dataset.data, dataset.slices = InMemoryDataset.collate(graphs)
    return dataset


class OnDisk(OnDiskDataset):
    def __init__(self, root: str, transform: Any = None) -> None:
        schema = {
            "x": {"dtype": torch.float, "size": (-1, 4)},
            "edge_index": {"dtype": torch.long, "size": (2, -1)},
            "y": int,
        }
        super().__init__(root, transform=transform, schema=schema)

    def serialize(self, data: Any) -> dict[str, Any]:
        return {"x": data.x, "edge_index": data.edge_index, "y": int(data.y)}

    def deserialize(self, data: dict[str, Any]) -> Data:
        return Data(x=data["x"].clone(), edge_index=data["edge_index"].clone(), y=torch.tensor([data["y"]]))


class Pickled(OnDiskDataset):
    """Rows that are pickles, as PyG stores them where it is given no schema."""


def on_disk(kind: type[OnDiskDataset], folder: Path, graphs: list[Any]) -> OnDiskDataset:
    dataset = kind(str(folder))
    dataset.extend(graphs)
    return dataset


class OneByOne(Dataset):
    """A PyG Dataset of the user's own, that reads each graph by itself."""

    def len(self) -> int:
        return 9

    def get(self, idx: int) -> Data:
        return graph(idx)


class Shifted(Data):
    """Graphs with a rule of their own for joining."""

    def __inc__(self, key: str, value: Any, *args: Any, **kwargs: Any) -> Any:
        return 100 if key == "y" else super().__inc__(key, value, *args, **kwargs)


def doubled(data: Data) -> Data:
    data.x = data.x * 2
    return data


def assert_same(ours: Any, theirs: Any, where: str = "batch") -> None:
    """Equal to the byte: types, dtypes, shapes, order of attributes."""
    assert type(ours) is type(theirs), where
    if isinstance(theirs, BaseData):
        for mine, other in zip(ours.stores, theirs.stores, strict=True):
            assert list(mine.keys()) == list(other.keys()), where
            assert_same(dict(mine.items()), dict(other.items()), f"{where}.{other._key}")
            assert_same(mine.__dict__.get("_num_nodes"), other.__dict__.get("_num_nodes"), where)
    elif isinstance(theirs, torch.Tensor):
        assert (ours.dtype, ours.shape) == (theirs.dtype, theirs.shape), where
        assert torch.equal(ours, theirs), where
    elif isinstance(theirs, dict):
        assert list(ours) == list(theirs), where
        for name in theirs:
            assert_same(ours[name], theirs[name], f"{where}.{name}")
    elif isinstance(theirs, (list, tuple)):
        assert len(ours) == len(theirs), where
        for index, (mine, other) in enumerate(zip(ours, theirs, strict=True)):
            assert_same(mine, other, f"{where}[{index}]")
    else:
        assert ours == theirs, where


def assert_same_batch(ours: Any, theirs: Any) -> None:
    assert_same(ours, theirs)
    assert_same(ours._slice_dict, theirs._slice_dict, "slices")
    assert_same(ours._inc_dict, theirs._inc_dict, "increments")
    assert ours.num_graphs == theirs.num_graphs
    for mine, other in zip(ours.to_data_list(), theirs.to_data_list(), strict=True):
        assert_same(mine, other, "graph of the batch")


def batches(source: Any, size: int = 4, **options: Any) -> list[Any]:
    return list(rf.Loader(source, size, topology=ONE, tail="drop", **options))


def assert_batches_of_pyg(source: Any, dataset: Any, size: int = 4, **options: Any) -> None:
    ours, theirs = batches(source, size), list(DataLoader(dataset, size, drop_last=True, **options))
    assert len(ours) == len(theirs) > 0
    for mine, other in zip(ours, theirs, strict=True):
        assert_same_batch(mine, other)


def assert_as_pyg(dataset: Any, size: int = 4, **options: Any) -> None:
    assert_batches_of_pyg(rf.from_dataset(dataset, **options), dataset, size, **options)


# Batches.


@pytest.mark.parametrize("make", [graph, hetero, partial(graph, wide=3000)], ids=["one type", "several", "large"])
def test_batches_are_those_of_pyg_with_and_without_follow_batch_and_exclude_keys(make: Any) -> None:
    graphs = [make(index) for index in range(9)]
    assert isinstance(rf.from_dataset(in_memory(graphs)).fetch([0])[""].rows(), Graphs), "the fast way is taken"
    assert make is hetero or join_graphs(graphs) is not None, "the fast way is taken"
    options = {"follow_batch": ["y", "x", "edge_index"], "exclude_keys": ["pos", "edge_attr", "num_nodes"]}
    for dataset in (graphs, in_memory(graphs)):
        assert_as_pyg(dataset)
        assert_as_pyg(dataset, **options)


@pytest.mark.parametrize(
    "graphs",
    [
        [Shifted(x=torch.ones(n, 1), y=torch.tensor([n])) for n in range(1, 9)],
        [Data(x=torch.ones(n, 1), parts={"a": torch.ones(n)}) for n in range(1, 9)],
        [Data(x=torch.ones(n, 1), parts=[torch.ones(n), torch.ones(1)]) for n in range(1, 9)],
        [Data(x=torch.ones(n, 1), adj=torch.eye(n).to_sparse()) for n in range(1, 9)],
        [Data(x=torch.ones(n, 1), x_batch=torch.tensor([0, n])) for n in range(1, 9)],
        [Data(x=torch.ones(n, 1), z_index=torch.tensor([True, False])) for n in range(1, 9)],
        [Data(x=torch.ones(n, 1), notes=[n, "a"]) for n in range(1, 9)],
    ],
    ids=["own rule", "dict", "list", "sparse", "batch", "bool index", "objects"],
)
@pytest.mark.filterwarnings("ignore:.*[Ss]parse.*")
def test_attributes_other_than_plain_tensors_are_joined_as_by_pyg(graphs: list[Any]) -> None:
    dataset = in_memory(graphs)
    for ours, theirs in zip(batches(rf.from_dataset(dataset)), DataLoader(dataset, 4), strict=True):
        assert repr(ours) == repr(theirs)
        assert_same(dict(ours._inc_dict), dict(theirs._inc_dict))


@settings(max_examples=60, deadline=None)
@given(
    sizes=st.lists(st.tuples(st.integers(0, 6), st.integers(0, 9)), min_size=2, max_size=12),
    has_x=st.booleans(),
    wanted=st.data(),
)
def test_any_choice_of_graphs_is_joined_as_by_pyg(
    sizes: list[tuple[int, int]], has_x: bool, wanted: st.DataObject
) -> None:
    graphs = []
    for nodes, edges in sizes:
        one = Data(x=torch.rand(nodes, 2)) if has_x else Data(num_nodes=nodes, mark=torch.rand(2, 1, 3))
        one.edge_index = torch.randint(0, max(1, nodes), (2, edges))
        one.node_index = torch.randint(0, max(1, nodes), (edges,), dtype=torch.int32)
        graphs.append(one)
    dataset = in_memory(graphs)
    ids = wanted.draw(st.lists(st.integers(0, len(sizes) - 1), min_size=1, max_size=20))
    source = PyGSource(dataset)
    fetched = source.fetch(ids)[""].rows()
    assert isinstance(fetched, Graphs)
    assert_same_batch(source.collate(fetched), Batch.from_data_list([dataset[index] for index in ids]))
    assert_same_batch(
        join_graphs([graphs[index] for index in ids]), Batch.from_data_list([graphs[index] for index in ids])
    )
    for mine, index in zip(fetched, ids, strict=True):
        assert_same(mine, dataset[index])


# What a data set may be.


def test_a_transform_of_the_loader_does_not_change_the_graphs_of_the_user() -> None:
    graphs = [Data(x=torch.full((1, 1), float(index))) for index in range(12)]
    loader = rf.Loader(rf.from_dataset(graphs), 12, transform=doubled, topology=ONE)
    for _ in range(2):
        assert next(iter(loader)).x.flatten().tolist() == [2.0 * index for index in range(12)]
    assert graphs[3].x.item() == 3


def test_a_transform_of_the_dataset_is_applied_at_each_access() -> None:
    dataset = in_memory(graphs_of(9), doubled)
    assert_as_pyg(dataset)
    assert_as_pyg(dataset)


PARTS = [slice(5, 15), [3, 1, 4, 1, -5], slice(10, None, 2), torch.arange(20) % 3 == 0]


@pytest.mark.parametrize("part", PARTS, ids=["slice", "list", "steps", "mask"])
def test_a_part_of_a_dataset_and_a_subset_of_it_give_the_batches_of_pyg(part: Any) -> None:
    dataset = in_memory(graphs_of(20))[part]
    assert_as_pyg(dataset, 2)
    assert_as_pyg(Subset(Subset(dataset, [3, 0, 2]), [2, 1]), 1)


def test_a_part_of_an_on_disk_dataset_has_its_own_graphs(tmp_path: Path) -> None:
    dataset = on_disk(OnDisk, tmp_path, graphs_of(20))
    part = dataset[[7, 3, 11, 5]]
    # PyG's own loader hands the places in the part to the whole: it reads graphs 0 and 1 here.
    (first, second) = batches(rf.from_dataset(part), 2)
    assert_same_batch(first, Batch.from_data_list([part[0], part[1]]))
    assert first.y.tolist() + second.y.tolist() == [7, 3, 11, 5]


def test_graphs_replaced_in_the_cache_of_a_dataset_are_read() -> None:
    dataset = in_memory(graphs_of(9))
    _ = list(dataset)  # PyG keeps what it cut out...
    assert isinstance(rf.from_dataset(dataset).fetch([0])[""].rows(), Graphs)
    dataset._data_list[3] = dataset[5]  # ... and some write there
    assert_as_pyg(dataset, 3)


def test_an_on_disk_dataset_gives_the_batches_of_pyg(tmp_path: Path) -> None:
    assert_as_pyg(on_disk(OnDisk, tmp_path, graphs_of(20)))
    assert_as_pyg(OnDisk(str(tmp_path), doubled))


def test_a_row_missing_from_an_on_disk_dataset_is_an_error(tmp_path: Path) -> None:
    dataset = on_disk(Pickled, tmp_path, graphs_of(8))
    dataset.db.cursor.execute("UPDATE Pickled SET id = 99 WHERE id = 5")
    dataset.db.connection.commit()
    source = rf.from_dataset(dataset)
    with pytest.raises(SourceError, match=r"(?s)another number of graphs.*sqlite.db.*process the dataset again"):
        batches(source, 4)
    assert batches(rf.from_dataset(dataset[:4]), 4)[0].y.tolist() == [0, 1, 2, 3]
    with pytest.raises(SourceError, match="graph 5"):
        source.fetch([5])


def test_datasets_without_joined_tensors_give_the_batches_of_pyg() -> None:
    single = InMemoryDataset()
    single.data, single.slices = graph(3), None
    for dataset, size in ((OneByOne(), 4), (OneByOne()[[3, 1, 2]], 3), (single, 1)):
        assert_as_pyg(dataset, size)


def test_datasets_without_graphs_are_not_opened_as_graphs() -> None:
    assert not is_graphs([{"x": 1}])
    assert not is_graphs([])
    assert not isinstance(rf.from_dataset([(1, 2), (3, 4)]), PyGSource)
    with pytest.raises(ArgumentError, match="plain Dataset has no options"):
        rf.from_dataset([1, 2], follow_batch=["x"])


# Loading.


@pytest.mark.parametrize(
    ("kind", "workers"),
    [
        ("memory", ("thread", 0)),
        *((kind, ("thread", 3)) for kind in ("memory", "transform", "disk", "pickled", "list")),
        # Each worker imports PyG, which takes long.
        pytest.param("memory", ("process", 2), marks=pytest.mark.soak),
        pytest.param("disk", ("process", 2), marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_three_ranks_deliver_every_graph_once(kind: str, workers: tuple[Any, int], tmp_path: Path) -> None:
    graphs = graphs_of(53)
    if kind in ("disk", "pickled"):
        dataset: Any = on_disk(OnDisk if kind == "disk" else Pickled, tmp_path, graphs)
    else:
        dataset = graphs if kind == "list" else in_memory(graphs, doubled if kind == "transform" else None)
    options: dict[str, Any] = {"worker_kind": workers[0], "num_workers": workers[1], "id_column": "ids"}
    source = rf.from_dataset(dataset)
    steps = [[*rf.Loader(source, 4, shuffle=True, topology=rf.Topology(rank, 3), **options)] for rank in range(3)]
    assert len({len(step) for step in steps}) == 1
    delivered = [batch for rank in steps for batch in rank]
    assert Counter(y for batch in delivered for y in batch.y.tolist()) == Counter(range(53))
    for batch in delivered:
        assert batch.ids.tolist() == batch.y.tolist()
        expected = Batch.from_data_list([dataset[index] for index in batch.ids.tolist()])
        assert torch.equal(batch.x, expected.x)
        assert torch.equal(batch.edge_index, expected.edge_index)


@pytest.mark.parametrize("method", ["fork", pytest.param("spawn", marks=pytest.mark.slow)])
def test_graph_sources_are_read_by_forked_and_spawned_workers_of_pygs_loader(method: str, tmp_path: Path) -> None:
    graphs = graphs_of(8)
    disk = on_disk(OnDisk, tmp_path, graphs)
    assert len(disk) == 8  # its database is open here, and must not be used there
    sources = [rf.from_dataset(disk), rf.from_dataset(in_memory(graphs)), rf.open(saved(tmp_path, graphs))]
    together: Any = torch.utils.data.ConcatDataset(sources)
    loader = DataLoader(together, 3, num_workers=1, multiprocessing_context=method)
    whole = DataLoader(graphs * 3, 3)
    for ours, theirs in zip(loader, whole, strict=True):
        assert ours.y.tolist() == theirs.y.tolist()
        assert torch.equal(ours.x, theirs.x)


def test_padding_graphs_of_the_last_batch_are_marked_invalid() -> None:
    *_, last = rf.Loader(rf.from_dataset(graphs_of(5)), 4, tail="pad", topology=ONE)
    assert last.valid.tolist() == [True, False, False, False]
    assert len(last.to_data_list()) == 4


# Identity.


def test_a_fingerprint_changes_with_the_graphs_and_not_with_the_transform(tmp_path: Path) -> None:
    graphs = graphs_of(20)
    others = [in_memory(graphs[:-1]), in_memory(graphs)[::-1], in_memory([*graphs[:-1], graph(40)])]
    prints = [rf.from_dataset(item).fingerprint for item in (in_memory(graphs), *others)]
    assert len(set(prints)) == 4
    assert rf.from_dataset(in_memory(graphs, doubled)).fingerprint == prints[0]
    assert rf.from_dataset(in_memory(graphs)).identified
    lists = [rf.from_dataset(item).fingerprint for item in (graphs, graphs[1:], list(graphs))]
    assert lists[0] == lists[2] != lists[1]
    disk = on_disk(Pickled, tmp_path, graphs)
    before = rf.from_dataset(disk)
    disk.extend(graphs)
    assert before.fingerprint != rf.from_dataset(disk).fingerprint
    assert not rf.from_dataset(OneByOne()).identified


def test_graphs_whose_tensors_are_views_have_the_fingerprint_of_copies() -> None:
    views = list(in_memory(graphs_of(20)))
    assert not all(part.edge_index.is_contiguous() for part in views)
    copies = [part.clone() for part in views]
    assert rf.from_dataset(views).fingerprint == rf.from_dataset(copies).fingerprint


def test_a_pickled_source_does_not_include_the_graphs_that_pyg_caches() -> None:
    dataset = in_memory(graphs_of(20))
    lean = len(pickle.dumps(rf.from_dataset(dataset)))
    _ = list(dataset)
    source = rf.from_dataset(dataset)
    assert len(pickle.dumps(source)) == lean
    assert pickle.loads(pickle.dumps(source)).fingerprint == source.fingerprint


# Bad input.


@pytest.mark.parametrize(
    ("dataset", "said"),
    [
        ([], "no samples"),
        (iter([1]), "no length"),
        (Subset([Data(), Data()], [5]), "has indices that the dataset does not have"),  # type: ignore[arg-type]
    ],
)
def test_an_empty_unsized_or_wrongly_indexed_dataset_is_refused(dataset: Any, said: str) -> None:
    with pytest.raises(SourceError, match=said):
        PyGSource(dataset)


def test_an_exception_of_a_transform_is_an_error_that_names_the_graph() -> None:
    def fails(data: Data) -> Data:
        if int(data.y) == 6:
            raise KeyError("no such colour")
        return data

    source = rf.from_dataset(in_memory(graphs_of(9), fails))
    with pytest.raises(SourceError, match=r"(?s)raised.*no such colour.*graph 6"):
        batches(source)
    with pytest.raises(ArgumentError, match=r"(?s)have no columns.*exclude_keys"):
        source.fetch([0], ["x"])
    with pytest.raises(ArgumentError, match="invalid follow_batch"):
        PyGSource([graph(1)], follow_batch="x")


# Files.


def saved(folder: Path, graphs: list[Any], name: str = "data.pt") -> Path:
    (folder / "processed").mkdir(exist_ok=True)
    path = folder / "processed" / name
    InMemoryDataset.save(graphs, str(path))
    torch.save("none", folder / "processed" / "pre_transform.pt")
    return path


@pytest.mark.parametrize("make", [graph, hetero], ids=["homogeneous", "heterogeneous"])
def test_a_saved_dataset_is_opened_by_its_folder_or_file(make: Any, tmp_path: Path) -> None:
    graphs = [make(index) for index in range(20)]
    path = saved(tmp_path, graphs)
    for where in (tmp_path, tmp_path / "processed", path):
        assert_batches_of_pyg(rf.open(where), in_memory(graphs))
    assert_batches_of_pyg(rf.open(path, follow_batch=["y"]), in_memory(graphs), follow_batch=["y"])


def test_a_file_that_would_run_code_is_refused_unless_allow_pickle_is_set(tmp_path: Path) -> None:
    trace = tmp_path / "trace"

    class Bomb:
        def __reduce__(self) -> Any:
            return Path.touch, (trace,)

    (tmp_path / "processed").mkdir()
    torch.save(({"x": Bomb()}, {}, Data), tmp_path / "processed" / "data.pt")
    with pytest.raises(UnsafeError, match=r"(?s)could run code.*data.pt.*allow_pickle=True"):
        rf.open(tmp_path)
    assert not trace.exists()
    saved(tmp_path, [Shifted(x=torch.ones(n, 1), y=torch.tensor([n])) for n in range(1, 9)])
    with pytest.raises(UnsafeError, match=r"(?s)Shifted.*from_dataset"):
        rf.open(tmp_path)
    assert batches(rf.open(tmp_path, allow_pickle=True))[0].y.tolist() == [1, 102, 203, 304]


def test_a_damaged_file_is_corrupt_and_one_without_graphs_is_another_error(tmp_path: Path) -> None:
    path = saved(tmp_path, graphs_of(9))
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(CorruptError, match=r"(?s)damaged.*data.pt"):
        rf.open(path)
    torch.save({"weights": torch.ones(3)}, path)
    with pytest.raises(SourceError, match=r"(?s)no graphs that PyTorch Geometric saved.*data.pt"):
        rf.open(path)
    dataset = in_memory(graphs_of(9))
    for cuts in (torch.tensor([0, 5, 3]), torch.tensor([0, 10**9]), torch.tensor([-1, 2]), torch.tensor([0, 1])):
        torch.save((dataset._data.to_dict(), {**dataset.slices, "x": cuts}, Data), path)
        with pytest.raises(CorruptError, match=r"(?s)do not fit together.*data.pt.*write it again"):
            rf.open(path)


def test_a_folder_of_several_saved_datasets_is_refused_with_the_remedy(tmp_path: Path) -> None:
    saved(tmp_path, graphs_of(4), "train.pt")
    saved(tmp_path, graphs_of(3), "test.pt")
    with pytest.raises(SourceError, match=r"(?s)several files.*test.pt, train.pt.*by its own path"):
        rf.open(tmp_path)
    assert len(rf.open(tmp_path / "processed" / "test.pt")) == 3
    OnDisk(str(tmp_path / "disk")).extend([graph(1)])
    with pytest.raises(SourceError, match=r"(?s)their own class.*from_dataset"):
        rf.open(tmp_path / "disk")
    with pytest.raises(ArgumentError, match="have no columns"):
        rf.open(tmp_path / "processed" / "test.pt", columns=["x"])


def typed_graph(nodes: int, extra: int | None) -> Any:
    """A graph of node type "a", and of "b" with ``extra`` nodes; None: without the type."""
    data = HeteroData()
    data["a"].x = torch.full((nodes, 2), float(nodes))
    if extra is not None:
        data["b"].x = torch.full((extra, 3), float(nodes))
        data["a", "to", "b"].edge_index = torch.zeros(2, min(1, extra), dtype=torch.long)
    return data


@pytest.mark.parametrize("extras", [(1, None, 3), (1, 2, None), (4, None, None)])
def test_graphs_that_lack_a_node_type_are_refused_with_the_cause(extras: Any, tmp_path: Path) -> None:
    path = saved(tmp_path, [typed_graph(nodes, extra) for nodes, extra in enumerate(extras, 1)])
    dataset = InMemoryDataset()
    dataset.load(str(path), data_cls=HeteroData)
    for read, where in ((rf.open, str(path)), (lambda _: rf.from_dataset(dataset), "InMemoryDataset")):
        with pytest.raises(SourceError, match="some graphs lack a node or edge type") as caught:
            read(tmp_path)
        assert not isinstance(caught.value, CorruptError)
        assert caught.value.where == where
        assert "'b' in " in str(caught.value.found)
        assert "0 nodes" in str(caught.value.remedy)


def test_a_node_type_with_0_nodes_is_in_every_graph(tmp_path: Path) -> None:
    saved(tmp_path, [typed_graph(nodes, extra) for nodes, extra in ((1, 2), (2, 0), (3, 1))])
    (batch,) = rf.Loader(rf.open(tmp_path), batch_size=3)
    assert batch["b"].batch.tolist() == [0, 0, 2]

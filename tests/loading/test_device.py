"""Batches on a GPU hold what they hold without one, in every engine and however long they are kept."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.loading.feeds import feed, same, take
from torch.utils._pytree import tree_leaves, tree_map_only

import rankfeed as rf

pytestmark = [pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"), pytest.mark.timeout(300)]
ENGINES: list[dict[str, Any]] = [
    {"num_workers": 0},
    {"num_workers": 2},
    {"num_workers": 2, "worker_kind": "process"},
]


def on_cpu(batches: Any) -> Any:
    return tree_map_only(torch.Tensor, torch.Tensor.cpu, batches)


@pytest.mark.parametrize("ragged", ["pad", "list"])
@pytest.mark.parametrize("engine", ENGINES, ids=str)
def test_batches_on_cuda_equal_batches_on_the_cpu(engine: dict[str, Any], ragged: Any) -> None:
    options: dict[str, Any] = {"size": 400, "shuffle": "global", "seed": 3, "ragged": ragged}
    batches = list(feed(device="cuda", **engine, **options))
    assert all(leaf.device.type == "cuda" for leaf in tree_leaves(batches) if isinstance(leaf, torch.Tensor))
    assert same(on_cpu(batches), list(feed(**options)))


@pytest.mark.parametrize("engine", ENGINES, ids=str)
def test_nested_tensor_batches_on_cuda_equal_those_on_the_cpu(engine: dict[str, Any]) -> None:
    found = list(feed(device="cuda", ragged="nested", **engine))
    for one, other in zip(found, feed(ragged="nested"), strict=True):
        assert one["x"].is_nested
        assert one["x"].device.type == "cuda"
        assert torch.equal(one["x"].values().cpu(), other["x"].values())
        assert torch.equal(one["x"].offsets().cpu(), other["x"].offsets())


@pytest.mark.parametrize("engine", ENGINES, ids=str)
def test_batches_copied_to_a_busy_gpu_are_not_overwritten_by_the_next_batch(engine: dict[str, Any]) -> None:
    """A copy queued behind other work must read the memory as it was at the call."""
    rows = torch.arange(2000 * 4096, dtype=torch.float32).reshape(2000, 4096)
    data = rf.from_dataset(torch.utils.data.TensorDataset(rows))
    loader = rf.Loader(data, 64, device="cuda", topology=rf.Topology(), **engine)
    busy = torch.randn(6000, 6000, device="cuda")
    kept = []
    for (batch,) in loader:
        for _ in range(3):
            busy = busy @ busy * 1e-4
        kept.append(batch)
    assert torch.equal(torch.cat(kept).cpu(), rows)


@pytest.mark.parametrize("size", [16, 4096])
@pytest.mark.parametrize("engine", ENGINES, ids=str)
def test_batches_from_packed_files_on_a_busy_gpu_equal_those_on_the_cpu(
    engine: dict[str, Any], size: int, tmp_path: Path
) -> None:
    rows = ({"x": np.full(size, i, np.float32), "r": np.full(i % 9, i)} for i in range(3000))
    source = rf.write(rows, tmp_path / "data", shard_bytes=5_000_000, progress=False)
    options: dict[str, Any] = {"batch_size": 32, "shuffle": "global", "seed": 1, "topology": rf.Topology()}
    loader = rf.Loader(source, device="cuda", **options, **engine)
    busy = torch.randn(4000, 4000, device="cuda")
    kept = []
    for batch in loader:
        busy = busy @ busy * 1e-4
        kept.append(batch)
    assert same(on_cpu(kept), list(rf.Loader(source, **options)))


@pytest.mark.parametrize("engine", ENGINES, ids=str)
def test_a_loader_on_cuda_resumes_in_mid_epoch_with_the_remaining_batches(engine: dict[str, Any]) -> None:
    options: dict[str, Any] = {"size": 200, "shuffle": "global", "device": "cuda", **engine}
    whole, first = feed(**options), feed(**options)
    everything = list(whole)
    begun = take(iter(first), 7)
    second = feed(**options)
    second.load_state_dict(first.state_dict())
    assert same(on_cpu(begun + list(second)), on_cpu(everything))


def test_pinned_memory_does_not_grow_over_epochs() -> None:
    """Pinned memory is reused: it does not grow with the number of batches."""
    data = rf.from_dataset(torch.utils.data.TensorDataset(torch.zeros(4096, 1024)))
    loader = rf.Loader(data, 64, device="cuda", topology=rf.Topology())
    sizes = []
    for _ in range(4):
        for (batch,) in loader:
            batch.sum().item()
        sizes.append(torch.cuda.host_memory_stats()["allocated_bytes.current"])
    assert sizes[-1] <= sizes[0]

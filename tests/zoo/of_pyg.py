"""PyTorch Geometric's loaders."""

from __future__ import annotations

from typing import Any

import torch
from tests.zoo.data import ROWS, place
from tests.zoo.of_torch import loader, shared


def graphs() -> Any:
    from torch_geometric.data import Data

    edges = torch.tensor([[0, 1], [1, 0]])
    return [Data(x=torch.ones(2, 3), edge_index=edges, sample_id=torch.tensor([row])) for row in range(ROWS)]


def graph_loader(num_workers: int, multiprocessing_context: Any) -> Any:
    """PyG's DataLoader with torch's sampler: sound."""
    from torch_geometric.loader import DataLoader

    data = graphs()
    return loader(data, num_workers, multiprocessing_context, DataLoader, sampler=shared(data))


def graphs_not_shared_out(num_workers: int, multiprocessing_context: Any) -> Any:
    """PyG's DataLoader knows no ranks."""
    from torch_geometric.loader import DataLoader

    return loader(graphs(), num_workers, multiprocessing_context, DataLoader, shuffle=True)


def nodes(seeds: Any, num_workers: int, multiprocessing_context: Any) -> Any:
    from torch_geometric.data import Data
    from torch_geometric.loader import NodeLoader
    from torch_geometric.sampler import BaseSampler, NodeSamplerInput, SamplerOutput

    none = torch.empty(0, dtype=torch.long)

    class Seeds(BaseSampler):  # type: ignore[misc]
        """Stands for a neighbour sampler, which needs compiled packages: a batch is its seeds."""

        def sample_from_edges(self, *_: Any, **__: Any) -> Any:
            raise NotImplementedError

        def sample_from_nodes(self, index: NodeSamplerInput, **_: Any) -> SamplerOutput:
            return SamplerOutput(index.node, none, none, none, None, metadata=(index.input_id, None))

    data = Data(x=torch.arange(ROWS).float()[:, None], edge_index=none.repeat(2, 1), num_nodes=ROWS)
    options = {"node_sampler": Seeds(), "input_nodes": seeds, "shuffle": True}
    return loader(data, num_workers, multiprocessing_context, NodeLoader, **options), "n_id"


def node_share(num_workers: int, multiprocessing_context: Any) -> Any:
    """Each rank gives NodeLoader its share of the seed nodes, as PyG's examples do: sound."""
    rank, world = place()
    return nodes(torch.arange(ROWS).chunk(world)[rank], num_workers, multiprocessing_context)


def uneven_node_share(num_workers: int, multiprocessing_context: Any) -> Any:
    """50 training nodes for each rank but the last, which has the rest: unequal steps."""
    rank, world = place()
    seeds = torch.arange(ROWS - 7).tensor_split([50 * other for other in range(1, world)])[rank]
    return nodes(seeds, num_workers, multiprocessing_context)

"""For PyG's NodeLoader: only seeds are looked at."""

from typing import Any

import torch
from torch_geometric.sampler import BaseSampler, NodeSamplerInput, SamplerOutput


class Alone(BaseSampler):
    """Samples no neighbours."""

    @property
    def edge_permutation(self) -> None:
        return None

    def sample_from_nodes(self, index: NodeSamplerInput, **_: Any) -> SamplerOutput:
        none = torch.empty(0, dtype=torch.long)
        return SamplerOutput(node=index.node, row=none, col=none, edge=none, metadata=(index.input_id, index.time))

    def sample_from_edges(self, *_: Any, **__: Any) -> Any:
        raise NotImplementedError

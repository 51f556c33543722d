"""PyTorch Geometric: datasets prepared once; seed nodes for loaders that sample around them."""

from rankfeed.integrations.pyg.datasets import prepare
from rankfeed.integrations.pyg.seeds import NodeSeeds

__all__ = ["NodeSeeds", "prepare"]

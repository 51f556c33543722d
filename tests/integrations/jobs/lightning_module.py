"""A small module that a Trainer of Lightning trains on CPUs, and the options of a Trainer that prints nothing."""

from typing import Any

import lightning as L
import torch

QUIET: dict[str, Any] = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}


class LinearModule(L.LightningModule):
    """One linear layer and its optimizer; subclasses have the steps."""

    def __init__(self, features: int = 1) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(features, 1)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=1e-5)

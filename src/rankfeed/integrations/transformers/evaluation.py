"""Evaluation with the Trainer of Transformers in which every sample counts once."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch

from rankfeed.errors import ArgumentError
from rankfeed.integrations.transformers.feed import TrainerFeed
from rankfeed.integrations.transformers.tokens import IGNORED
from rankfeed.sources.extras import need

_Trainer: Any = object


@dataclass
class _Losses:
    """The weighted sum of this rank's losses, and the sum of the weights."""

    feed: TrainerFeed
    #: Whether the model predicts the next label, so that the first of a row has no loss.
    shifted: bool
    total: float = 0.0
    weight: float = 0.0


class ExactEvaluation(_Trainer):  # type: ignore[misc]
    """Gathers rows without padding, and computes a loss that is the mean over all labels or rows.

    Ranks may have different numbers of rows in the last step, or none. Tensors are padded to the batch size before
    they are gathered, and the padding is removed afterwards, as the plan says.
    """

    _losses: _Losses | None = None
    # Attributes of the Trainer.
    gather_function: Any
    model_accepts_loss_kwargs: Any

    def evaluation_loop(
        self,
        dataloader: Any,
        description: str,
        prediction_loss_only: bool | None = None,
        ignore_keys: list[str] | None = None,
        metric_key_prefix: str = "eval",
    ) -> Any:
        """As the Trainer's, with exact rows and loss for a TrainerFeed."""
        rest = (description, prediction_loss_only, ignore_keys, metric_key_prefix)
        if not isinstance(dataloader, TrainerFeed):
            return super().evaluation_loop(dataloader, *rest)
        args = self.args
        original = self.gather_function, self.model_accepts_loss_kwargs, args.average_tokens_across_devices
        self._losses = losses = _Losses(dataloader, shifted=self._shifts_labels())
        self.gather_function = lambda data, **_: self._gathered(dataloader, data)
        # A rank's loss must be the model's mean over its rows, which is weighted here. The Trainer would divide it
        # by a count over all ranks, which is too high for some models (it includes the first labels of GPT-2).
        self.model_accepts_loss_kwargs = args.average_tokens_across_devices = False
        try:
            output = super().evaluation_loop(dataloader, *rest)
        finally:
            self.gather_function, self.model_accepts_loss_kwargs, args.average_tokens_across_devices = original
            self._losses = None
        if output.metrics is not None and f"{metric_key_prefix}_loss" in output.metrics:
            mine = torch.tensor([losses.total, losses.weight], dtype=torch.float64, device=self.args.device)
            total, weight = self.accelerator.gather(mine).view(-1, 2).sum(0).tolist()
            output.metrics[f"{metric_key_prefix}_loss"] = total / weight if weight else math.nan
        return output

    def prediction_step(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        """As the Trainer's; the loss is weighted by the number of labels or rows that it is the mean of."""
        losses = self._losses
        if losses is None:
            return super().prediction_step(model, inputs, *args, **kwargs)
        weight = _weight(inputs, losses.feed.rows, shifted=losses.shifted)
        done = super().prediction_step(model, inputs, *args, **kwargs)
        if done[0] is not None and weight:
            loss = float(done[0])
            if math.isfinite(loss) or not self.args.logging_nan_inf_filter:
                losses.total += loss * weight
                losses.weight += weight
        return done

    def _shifts_labels(self) -> bool:
        auto = need("transformers.models.auto.modeling_auto", extra="transformers")
        names = set(auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values())
        model = self.accelerator.unwrap_model(self.model)
        name = type(
            getattr(getattr(model, "base_model", None), "model", model)
        ).__name__  # of a PEFT model, or itself
        causal = getattr(self, "_loss_shifts_labels", False) or {type(model).__name__, name} & names
        return bool(causal) and not getattr(getattr(model, "config", None), "is_encoder_decoder", False)

    def _gathered(self, feed: TrainerFeed, data: Any) -> Any:
        """Rows of all ranks, in the source's order, without padding."""
        if isinstance(data, torch.Tensor):
            rows = self.accelerator.gather(_padded(data, feed.batch_size, max(feed.rows, 1)))
            return rows[feed.kept.to(rows.device)]
        if isinstance(data, dict):
            return type(data)((name, self._gathered(feed, each)) for name, each in data.items())
        if isinstance(data, (list, tuple)):
            each_gathered = [self._gathered(feed, each) for each in data]
            return type(data)(*each_gathered) if hasattr(data, "_fields") else type(data)(each_gathered)
        raise ArgumentError(
            "predictions are gathered as tensors", expected="tensors, or lists and dicts of them", found=type(data)
        )


def _weight(inputs: Any, rows: int, *, shifted: bool) -> int:
    """Number of labels or rows that the loss of a batch is the mean of."""
    labels = inputs.get("labels") if hasattr(inputs, "get") else None
    if rows == 0:
        return 0
    if not torch.is_tensor(labels) or labels.is_floating_point():
        return rows
    predicted = labels[..., 1:] if shifted and labels.dim() > 1 else labels
    return int(predicted.ne(IGNORED).sum())


def _padded(data: torch.Tensor, rows: int, valid: int) -> torch.Tensor:
    """A tensor of this rank's rows, padded to the same number on every rank.

    Examples:
        >>> _padded(torch.tensor([4, 5]), rows=3, valid=2)
        tensor([4, 5, 0])
    """
    if data.dim() == 0 or len(data) not in (valid, rows):
        raise ArgumentError(
            "a prediction does not have one row for each sample",
            expected=f"{valid} rows",
            found=f"a tensor of shape {tuple(data.shape)}",
            remedy="leave it out with ignore_keys, or with preprocess_logits_for_metrics",
        )
    if len(data) == rows:
        return data.contiguous()
    return torch.cat([data, data.new_zeros(rows - len(data), *data.shape[1:])])

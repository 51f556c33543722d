"""Evaluation by the Trainer of Transformers that counts every sample once."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch

from rankfeed.errors import ArgumentError
from rankfeed.integrations.transformers_batches import IGNORED
from rankfeed.integrations.transformers_feed import Feed
from rankfeed.sources.extras import need

_Trainer: Any = object


@dataclass
class _Losses:
    """The sum of this rank's losses, each times its weight, and the sum of the weights."""

    feed: Feed
    #: Whether the model predicts the next label, so that the first of a row is none.
    shifted: bool
    total: float = 0.0
    weight: float = 0.0


class ExactEvaluation(_Trainer):  # type: ignore[misc]
    """What the Trainer gathers, of the real rows alone, and a loss that is the mean over all that counts.

    Ranks may have unequal numbers of real rows in the last step, and none at all. Gathered tensors are filled up
    to the batch size, and the rows that only fill are left out again, by arithmetic on the plan.
    """

    _losses: _Losses | None = None
    # The Trainer's own.
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
        """The Trainer's own, with exact rows and loss where it is fed."""
        rest = (description, prediction_loss_only, ignore_keys, metric_key_prefix)
        if not isinstance(dataloader, Feed):
            return super().evaluation_loop(dataloader, *rest)
        args = self.args
        kept = self.gather_function, self.model_accepts_loss_kwargs, args.average_tokens_across_devices
        self._losses = losses = _Losses(dataloader, shifted=self._shifts())
        self.gather_function = lambda data, **_: self._gathered(dataloader, data)
        # A rank's loss is to be the model's own mean over its own rows: it is weighed here. The Trainer would have
        # it divided by a count over all ranks, which is too high for some models (GPT-2's first labels count too).
        self.model_accepts_loss_kwargs = args.average_tokens_across_devices = False
        try:
            output = super().evaluation_loop(dataloader, *rest)
        finally:
            self.gather_function, self.model_accepts_loss_kwargs, args.average_tokens_across_devices = kept
            self._losses = None
        if output.metrics is not None and f"{metric_key_prefix}_loss" in output.metrics:
            mine = torch.tensor([losses.total, losses.weight], dtype=torch.float64, device=self.args.device)
            total, weight = self.accelerator.gather(mine).view(-1, 2).sum(0).tolist()
            output.metrics[f"{metric_key_prefix}_loss"] = total / weight if weight else math.nan
        return output

    def prediction_step(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        """The Trainer's own; the loss is weighed by what it is the mean of."""
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

    def _shifts(self) -> bool:
        auto = need("transformers.models.auto.modeling_auto", extra="transformers")
        names = set(auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values())
        model = self.accelerator.unwrap_model(self.model)
        name = type(getattr(getattr(model, "base_model", None), "model", model)).__name__  # PEFT's, or itself
        causal = getattr(self, "_loss_shifts_labels", False) or {type(model).__name__, name} & names
        return bool(causal) and not getattr(getattr(model, "config", None), "is_encoder_decoder", False)

    def _gathered(self, feed: Feed, data: Any) -> Any:
        """Rows of all ranks, in the source's order, without those that only fill."""
        if isinstance(data, torch.Tensor):
            rows = self.accelerator.gather(_filled(data, feed.batch_size, max(feed.rows, 1)))
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
    """What a batch's loss is the mean of: labels that count, or rows."""
    labels = inputs.get("labels") if hasattr(inputs, "get") else None
    if rows == 0:
        return 0
    if not torch.is_tensor(labels) or labels.is_floating_point():
        return rows
    counted = labels[..., 1:] if shifted and labels.dim() > 1 else labels
    return int(counted.ne(IGNORED).sum())


def _filled(data: torch.Tensor, rows: int, real: int) -> torch.Tensor:
    """A tensor of this rank's rows, with as many as every rank has.

    Examples:
        >>> _filled(torch.tensor([4, 5]), rows=3, real=2)
        tensor([4, 5, 0])
    """
    if data.dim() == 0 or len(data) not in (real, rows):
        raise ArgumentError(
            "a prediction has not one row a sample",
            expected=f"{real} rows",
            found=f"a tensor of shape {tuple(data.shape)}",
            remedy="leave it out with ignore_keys, or with preprocess_logits_for_metrics",
        )
    if len(data) == rows:
        return data.contiguous()
    return torch.cat([data, data.new_zeros(rows - len(data), *data.shape[1:])])

"""Batches for models of Transformers: padded tokens with masks and labels."""

from collections.abc import Mapping
from typing import Any

import torch

from rankfeed._util.validate import check_bool, check_int

#: Label that losses of Transformers ignore.
IGNORED = -100
_LABELS = ("labels", "label", "label_ids")


class PadTokens:
    """Converts a loader's batch for a model: int64 tokens, ``attention_mask``, and labels padded with -100.

    Use it as ``data_collator`` of a Trainer with FeedMixin, or as ``batch_transform`` of a
    :class:`rankfeed.Loader`. Ragged columns arrive padded with zeros and ``<name>_lengths``. ``input_ids`` are
    then padded with ``pad_token_id``, labels with -100, others with 0; the lengths are removed; ``attention_mask``
    is added if ``input_ids`` were ragged and there is none. Columns named ``label`` or ``label_ids`` become
    ``labels``.

    Args:
        pad_token_id: padding of ``input_ids``.
        causal: use the tokens as labels, where there are no labels; the model shifts them.
        pad_to: pad to a multiple of this number of tokens, for static shapes.

    Examples:
        >>> batch = {"input_ids": torch.tensor([[5, 6, 7], [8, 0, 0]]), "input_ids_lengths": torch.tensor([3, 1])}
        >>> for name, column in PadTokens(pad_token_id=9, causal=True)(batch).items():
        ...     print(name, column.tolist())
        input_ids [[5, 6, 7], [8, 9, 9]]
        attention_mask [[1, 1, 1], [1, 0, 0]]
        labels [[5, 6, 7], [8, -100, -100]]
    """

    def __init__(self, *, pad_token_id: int = 0, causal: bool = False, pad_to: int = 1) -> None:
        self.pad_token_id = check_int("pad_token_id", pad_token_id, at_least=0, at_most=2**63 - 1)
        self.causal = check_bool("causal", causal)
        self.pad_to = check_int("pad_to", pad_to, at_least=1, at_most=2**31 - 1)

    def __call__(self, batch: Mapping[str, Any]) -> dict[str, Any]:
        """The converted batch."""
        converted: dict[str, Any] = {}
        for name, column in batch.items():
            if name.endswith("_lengths") and name.removesuffix("_lengths") in batch:
                continue
            target = "labels" if name in _LABELS else name
            lengths = batch.get(f"{name}_lengths")
            if torch.is_tensor(column) and not (column.is_floating_point() or column.dtype == torch.bool):
                column = column.long()
            if torch.is_tensor(column) and lengths is not None:
                fill = {"input_ids": self.pad_token_id, "labels": IGNORED}.get(target, 0)
                column, inside = self._padded(column, lengths, fill)
                if name == "input_ids" and "attention_mask" not in batch:
                    converted |= {name: column, "attention_mask": inside.long()}
            converted[target] = column
        if self.causal and "labels" not in converted and "input_ids" in converted:
            labels = converted["input_ids"].clone()
            if "attention_mask" in converted:
                labels[converted["attention_mask"] == 0] = IGNORED
            converted["labels"] = labels
        return converted

    def _padded(
        self, column: torch.Tensor, lengths: torch.Tensor, value: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        width = -(-column.size(1) // self.pad_to) * self.pad_to
        inside = torch.arange(width) < lengths[:, None]
        out = column.new_full((column.size(0), width, *column.shape[2:]), value)
        out[:, : column.size(1)] = column
        out[~inside] = value
        return out, inside

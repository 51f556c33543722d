"""Run by torchrun: a Trainer that is fed from rankfeed evaluates, and tells OUT/RANK.json what counted.

transformers_feed.py OUT SIZES: SIZES is a list of numbers of samples in JSON.
"""

import gc
import itertools
import json
import os
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from transformers import GPT2Config, TrainingArguments

import rankfeed as rf
from rankfeed.integrations.transformers import FeedMixin, PadTokens

VOCABULARY = 64


class Sequences:
    """Token rows of different lengths: the first two tokens say which sample it is."""

    def __init__(self, samples: int, label: bool = False) -> None:
        self.samples, self.label = samples, label

    def __len__(self) -> int:
        return self.samples

    def __getitem__(self, index: int) -> dict[str, Any]:
        rng = np.random.default_rng(index)
        tail = rng.integers(1, VOCABULARY, 1 + index % 5)
        row = {"input_ids": np.concatenate([[index // VOCABULARY, index % VOCABULARY], tail]).astype(np.int32)}
        return {**row, "note": index, **({"label": index % 3} if self.label else {})}


def ids_of(tokens: torch.Tensor) -> list[int]:
    return (tokens[:, 0] * VOCABULARY + tokens[:, 1]).tolist()


def collate(samples: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
    """Batches for a Trainer without the mixin."""
    rows = [torch.as_tensor(sample["input_ids"]) for sample in samples]
    padded = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True)
    lengths = torch.tensor([len(row) for row in rows])
    return PadTokens(causal=True)({"input_ids": padded, "input_ids_lengths": lengths})


def config(**more: Any) -> GPT2Config:
    torch.manual_seed(0)
    sizes = {"n_layer": 2, "n_embd": 16, "n_head": 2, "n_positions": 16, "vocab_size": VOCABULARY}
    return GPT2Config(**sizes, pad_token_id=0, bos_token_id=None, eos_token_id=None, **more)


class Trainer(FeedMixin, transformers.Trainer):
    pass


def arguments(out: Path, **more: Any) -> TrainingArguments:
    quiet = {"report_to": [], "disable_tqdm": True, "logging_strategy": "no"}
    return TrainingArguments(**{"output_dir": str(out), "use_cpu": True, "save_strategy": "no", **quiet, **more})


class Table(torch.nn.Module):
    """Looks the scores of each token up, or of each row's second one: the same bits in any batch.

    Losses are whole numbers: of one row or two their mean needs no rounding.
    """

    def __init__(self, by_token: bool) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.scores = torch.nn.Embedding(VOCABULARY, 3)
        self.by_token = by_token

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor | None = None) -> dict[str, torch.Tensor]:
        told = input_ids if self.by_token else input_ids[:, 1]
        counted = told if labels is None else told[labels != -100]
        return {"loss": counted.float().mean(), "logits": self.scores(told)}


def pairs(predictions: Any, labels: Any) -> dict[str, Any]:
    """Predictions and labels that count, to the last bit and in their order, and a metric that hangs on it."""
    predictions, labels = (np.asarray(each)[np.asarray(labels) != -100] for each in (predictions, labels))
    return {
        "predictions": predictions.astype(np.float32, casting="no").tobytes().hex(),
        "labels": labels.tolist(),
        "sum": float(np.cumsum(predictions, dtype=np.float32)[-1]),
    }


def evaluate(out: Path, sizes: list[int]) -> None:
    """Evaluations of a model that rounds nothing, in batches of two: labels by row and by token, metrics at once
    and batch by batch.
    """
    results = []
    for by_token, by_batch in itertools.product((False, True), (False, True)):
        seen: list[Any] = []

        def metrics(predictions: Any, compute_result: bool = True, seen: list[Any] = seen) -> dict[str, float]:
            seen.append(pairs(predictions.predictions, predictions.label_ids))
            return {"sum": seen[-1]["sum"]}

        options = {"per_device_eval_batch_size": 2, "eval_accumulation_steps": 2, "batch_eval_metrics": by_batch}
        trainer = Trainer(
            model=Table(by_token),
            args=arguments(out / "run", **options),
            data_collator=PadTokens(causal=by_token),
            compute_metrics=metrics,
        )
        for samples in sizes:
            seen.clear()
            metric = trainer.evaluate(rf.from_dataset(Sequences(samples, label=not by_token)))
            case = {"by_token": by_token, "by_batch": by_batch, "samples": samples, "calls": len(seen)}
            told = {
                "predictions": "".join(part["predictions"] for part in seen),
                "labels": [label for part in seen for label in part["labels"]],
            }
            results.append({**case, **told, "loss": metric["eval_loss"], "sum": metric["eval_sum"]})
        told = trainer.predict(rf.from_dataset(Sequences(7, label=not by_token)))
        assert len(told.predictions) == len(told.label_ids) == 7
    (out / f"{os.environ['RANK']}.json").write_text(json.dumps(results))


if __name__ == "__main__":
    evaluate(Path(sys.argv[1]), json.loads(sys.argv[2]))
    gc.collect()  # the model: as long as it lives, so do gloo's threads
    torch.distributed.destroy_process_group()

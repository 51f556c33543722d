"""Train a small language model on packed tokens with the Trainer of Transformers; run it again to resume.

torchrun --nproc-per-node 2 examples/transformers_tokens.py run/
"""

import argparse
import gc
from pathlib import Path

import numpy as np
import transformers
from accelerate import PartialState
from transformers import GPT2Config, GPT2LMHeadModel, TrainingArguments
from transformers.trainer_utils import get_last_checkpoint

import rankfeed as rf
from rankfeed.integrations.transformers import FeedMixin, PadTokens

LENGTH, VOCABULARY = 32, 64


class Trainer(FeedMixin, transformers.Trainer):
    pass


def rows(documents: int, seed: int):
    """Joins documents and cuts them into rows of one length, without padding."""
    rng, left = np.random.default_rng(seed), np.empty(0, np.int64)
    for _ in range(documents):
        start, length = rng.integers(VOCABULARY), rng.integers(10, 90)
        left = np.append(left, (start + np.arange(length)) % VOCABULARY)  # in place of the output of a tokenizer
        while len(left) >= LENGTH:
            yield {"input_ids": left[:LENGTH]}
            left = left[LENGTH:]


def prepared(folder: Path, documents: int, seed: int) -> rf.Source:
    """Write the rows in one process while the others wait."""
    return rf.open(rf.prepare_once(folder, lambda new: rf.write(rows(documents, seed), new / "rows")) / "rows")


def main(run: Path, epochs: int) -> None:
    train, held = prepared(run / "train", 200, 0), prepared(run / "held", 30, 1)
    args = TrainingArguments(
        output_dir=str(run / "checkpoints"),
        num_train_epochs=epochs,
        per_device_train_batch_size=8,
        learning_rate=1e-2,
        dataloader_num_workers=2,
        save_steps=5,
        logging_steps=10,
        eval_strategy="epoch",
        report_to="none",
        disable_tqdm=True,
        use_cpu=True,  # remove to use GPUs
    )
    config = GPT2Config(vocab_size=VOCABULARY, n_positions=LENGTH, n_layer=2, n_embd=16, n_head=2)
    trainer = Trainer(
        model=GPT2LMHeadModel(config),
        args=args,
        train_dataset=train,
        eval_dataset=held,
        data_collator=PadTokens(causal=True),
    )
    checkpoints = Path(args.output_dir)
    trainer.train(resume_from_checkpoint=get_last_checkpoint(checkpoints) if checkpoints.exists() else None)
    loss = trainer.evaluate()["eval_loss"]
    if trainer.is_world_process_zero():
        print(f"{trainer.state.global_step} updates, {trainer.state.epoch:g} epochs, held-out loss {loss:.4f}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("run", type=Path, help="folder that all processes see, for data and checkpoints")
    parser.add_argument("--epochs", type=int, default=2)
    options = parser.parse_args()
    main(options.run, options.epochs)
    gc.collect()  # frees the model, which keeps gloo's threads alive
    PartialState().destroy_process_group()

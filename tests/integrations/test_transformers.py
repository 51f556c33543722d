"""The Trainer of Transformers: each sample once, equal steps, resumed by seeking, evaluated exactly."""

import json
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
import transformers
from accelerate.state import AcceleratorState
from tests.integrations.jobs import transformers_feed as job
from tests.support import jobs
from tests.support.marks import slow, soak
from torch.utils.data import DataLoader

import rankfeed as rf
from rankfeed.errors import ArgumentError, SourceError, StateError, TransformError
from rankfeed.integrations.accelerate import accelerated
from rankfeed.integrations.transformers import FeedMixin, PadTokens
from rankfeed.integrations.transformers.trainer import TrainerFeed

SCRIPT = Path(__file__).parent / "jobs" / "transformers_feed.py"
SAMPLES, BATCH = 83, 4


@pytest.fixture(scope="module", autouse=True)
def _no_accelerator_for_other_modules() -> Iterator[None]:
    """TrainingArguments leave one in the process, under which a Loader of several ranks is refused."""
    yield
    AcceleratorState._reset_state(reset_partial_state=True)


def arguments(**more: Any) -> dict[str, Any]:
    every = {"save_strategy": "steps", "save_steps": 3, "seed": 7, "num_train_epochs": 3}
    return {**every, "per_device_train_batch_size": BATCH, **more}


def test_ranks_without_a_sample_in_the_last_step_get_a_batch_with_masked_labels() -> None:
    counted = Counter[int]()
    for rank in range(3):
        options: dict[str, Any] = {"shuffle": True, "batch_transform": PadTokens(causal=True)}
        topology = rf.Topology(rank=rank, world_size=3)
        loader = rf.Loader(rf.from_dataset(job.Sequences(SAMPLES)), 1, topology=topology, **options)
        loader.load_state_dict({**loader.state_dict(), "position": SAMPLES - 2, "steps": SAMPLES - 2})
        (batch,) = TrainerFeed(loader)
        assert len(batch["input_ids"]) == 1
        if (batch["labels"] != -100).any():
            counted.update(job.ids_of(batch["input_ids"]))
    left = rf.Plan(SAMPLES, shuffle="global").sample_ids(0, [SAMPLES - 2, SAMPLES - 1])
    assert counted == Counter(left.tolist())


@pytest.mark.parametrize("tail", ["even", "pad"])
@pytest.mark.parametrize(("label", "masks"), [(1, False), (0.5, True)])
def test_trainer_feed_raises_if_the_loss_cannot_mask_a_rank_without_samples(
    tail: Any, label: float, masks: bool
) -> None:
    data = rf.from_dataset([{"x": i, "labels": label} for i in range(8)])
    for rank in range(3):  # 6 samples in a full step, and 2 left
        loader = rf.Loader(data, 2, tail=tail, topology=rf.Topology(rank=rank, world_size=3))
        if tail == "even":
            loader.load_state_dict({**loader.state_dict(), "position": 6, "steps": 1})
        batches = iter(TrainerFeed(loader, masks_loss=masks))
        if tail == "pad":
            assert len(next(batches)["x"]) == 2
        with pytest.raises(ArgumentError, match="cannot exclude a rank"):
            next(batches)


def in_one_process(samples: int, by_token: bool) -> dict[str, Any]:
    """What an evaluation is to give: sample by sample, without any loader."""
    model = job.Table(by_token)
    rows = [torch.from_numpy(job.Sequences(samples)[index]["input_ids"]).long() for index in range(samples)]
    with torch.no_grad():
        scores = torch.cat([model(row[None])["logits"].reshape(-1, 3) for row in rows])
    counted = torch.cat(rows) if by_token else torch.arange(samples)
    told = job.pairs(scores, counted if by_token else counted % 3)
    return {**told, "loss": int(counted.sum()) / len(counted)}


@pytest.mark.slow
@pytest.mark.timeout(1000)
@pytest.mark.parametrize(
    ("ranks", "sizes"), [(3, range(1, 41, 5)), *(soak(n, range(1, 41)) for n in (1, 2, 3, 4))], ids=str
)
def test_transformers_evaluation_counts_each_prediction_and_label_once(
    ranks: int, sizes: range, tmp_path: Path
) -> None:
    jobs.run(jobs.torchrun(ranks, SCRIPT, tmp_path, json.dumps([*sizes])), tmp_path / "log", 900)
    for rank in range(ranks):
        results = json.loads((tmp_path / f"{rank}.json").read_text())
        assert len(results) == 4 * len(sizes)
        for result in results:
            samples, by_batch = result["samples"], result["by_batch"]
            wanted = in_one_process(samples, result["by_token"])
            assert (result["predictions"], result["labels"]) == (wanted["predictions"], wanted["labels"])
            assert by_batch or result["sum"] == wanted["sum"]
            assert result["calls"] == (-(-samples // (2 * ranks)) if by_batch else 1)
            # A batch's loss is a float32 of the model's: exact for two rows, rounded once for more labels.
            assert abs(result["loss"] - wanted["loss"]) <= (2**-24 * wanted["loss"] if result["by_token"] else 0)


class Stop(transformers.TrainerCallback):
    def __init__(self, update: int) -> None:
        self.update = update

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        control.should_training_stop |= state.global_step == self.update


class Once(job.Trainer):
    """Trains in this process, and remembers on what."""

    def __init__(self, out: Path, source: Any, stop: int = -1, **more: Any) -> None:
        super().__init__(
            model=transformers.GPT2LMHeadModel(job.config()),
            args=job.arguments(out, **arguments(**more)),
            train_dataset=source,
            data_collator=PadTokens(causal=True),
            callbacks=[Stop(stop)],
        )
        self.trained: list[tuple[int, int, list[int]]] = []

    def training_step(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        self.trained.append((self._feed.loader.epoch, self.state.global_step, job.ids_of(inputs["input_ids"])))
        return transformers.Trainer.training_step(self, model, inputs, *args, **kwargs)

    def samples(self, epoch: int, before: int = 10**9) -> Counter[int]:
        return Counter(
            sample_id for at, update, ids in self.trained if at == epoch and update < before for sample_id in ids
        )


@pytest.fixture
def source() -> rf.Source:
    return rf.from_dataset(job.Sequences(SAMPLES))


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("batch", "accumulate"),
    [
        pytest.param(4, 2, marks=pytest.mark.slow, id="same"),
        pytest.param(3, 3, id="smaller-batch"),
        pytest.param(5, 4, marks=pytest.mark.slow, id="larger-batch"),
    ],
)
def test_transformers_training_with_gradient_accumulation_resumes_without_losing_samples(
    tmp_path: Path, source: rf.Source, batch: int, accumulate: int
) -> None:
    # 83 samples in batches of 4: 21 steps, 11 updates, the last of one batch alone.
    before = Once(tmp_path, source, stop=14, gradient_accumulation_steps=2)
    before.train()
    after = Once(tmp_path, source, per_device_train_batch_size=batch, gradient_accumulation_steps=accumulate)
    after.train(resume_from_checkpoint=str(tmp_path / "checkpoint-12"))
    assert before.samples(0) == after.samples(2) == Counter(range(SAMPLES))
    assert before.samples(1, before=12) + after.samples(1) == Counter(range(SAMPLES))
    # One update after the first epoch: 75 samples left of the second, then a whole one.
    steps = [-(-75 // batch), -(-83 // batch)]
    assert after.state.global_step == after.state.max_steps == 12 + sum(-(-step // accumulate) for step in steps)
    assert after.state.epoch == 3.0
    if (batch, accumulate) == (4, 2):
        assert after.state.max_steps == 33, "what the uninterrupted run takes"
        whole = Once(tmp_path / "whole", source, gradient_accumulation_steps=2)
        whole.train()
        assert [each for each in whole.trained if each[1] >= 12] == after.trained


@pytest.mark.soak
@pytest.mark.timeout(300)
def test_transformers_run_with_max_steps_resumes_up_to_max_steps_and_not_beyond(
    tmp_path: Path, source: rf.Source
) -> None:
    Once(tmp_path, source, max_steps=25, stop=24).train()
    after = Once(tmp_path, source, max_steps=60, per_device_train_batch_size=8)
    after.train(resume_from_checkpoint=True)
    assert after.state.global_step == 60
    assert [update for _, update, _ in after.trained] == list(range(24, 60))
    assert after.samples(2) == Counter(range(SAMPLES))
    again = Once(tmp_path, source, max_steps=60, per_device_train_batch_size=8)
    again.train(resume_from_checkpoint=True)
    assert again.trained == []


@pytest.mark.timeout(300)
def test_transformers_checkpoint_at_the_end_of_an_epoch_resumes_with_the_next_epoch(
    tmp_path: Path, source: rf.Source
) -> None:
    for drop in (False, True):
        out = tmp_path / str(drop)
        Once(out, source, save_strategy="epoch", num_train_epochs=1, dataloader_drop_last=drop).train()
        after = Once(out, source, num_train_epochs=2, per_device_train_batch_size=6, dataloader_drop_last=drop)
        after.train(resume_from_checkpoint=True)
        assert {epoch for epoch, _, _ in after.trained} == {1}
        assert sum(after.samples(1).values()) == (78 if drop else 83)


@pytest.mark.timeout(300)
@pytest.mark.parametrize("where", ["get_batch_samples", "training_step"])
@pytest.mark.parametrize("update", [0, 2])
def test_transformers_checkpoint_between_batches_and_their_update_loses_no_sample(
    tmp_path: Path, source: rf.Source, monkeypatch: pytest.MonkeyPatch, where: str, update: int
) -> None:
    # Told to end, the Trainer saves as an update begins or before the optimizer steps: its batches are taken then.
    options: dict[str, Any] = {"gradient_accumulation_steps": 2, "num_train_epochs": 1}
    before = Once(tmp_path, source, **options, save_strategy="epoch", enable_jit_checkpoint=True)
    (told,) = [
        callback.jit_manager for callback in before.callback_handler.callbacks if hasattr(callback, "jit_manager")
    ]
    original = getattr(before, where)

    def asked(*given: Any, **more: Any) -> Any:
        told.is_checkpoint_requested |= before.state.global_step == update
        return original(*given, **more)

    monkeypatch.setattr(before, where, asked)
    before.train()
    after = Once(tmp_path, source, **options)
    after.train(resume_from_checkpoint=str(tmp_path / f"checkpoint-{update}"))
    assert before.samples(0, before=update) + after.samples(0) == Counter(range(SAMPLES))
    assert after.state.global_step == after.state.max_steps == 11, "what the uninterrupted run takes"


class Counted(job.Sequences):
    def __init__(self, samples: int) -> None:
        super().__init__(samples)
        self.read: Counter[int] = Counter()

    def __getitem__(self, index: int) -> dict[str, Any]:
        self.read[index] += 1
        return super().__getitem__(index)


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_transformers_resume_does_not_read_samples_already_trained_on(tmp_path: Path) -> None:
    data = Counted(400)
    Once(tmp_path, rf.from_dataset(data), stop=90, num_train_epochs=1).train()
    resumed = rf.from_dataset(data)
    after = Once(tmp_path, resumed, num_train_epochs=1)
    data.read.clear()
    after.train(resume_from_checkpoint=True)
    assert len(after.trained) == 10
    # Eight are read to learn the fields, and twice to compare the data with those of the checkpoint.
    assert sum(data.read.values()) <= 40 + 10 + 3 * 8


@pytest.mark.timeout(300)
def test_transformers_checkpoints_of_other_data_or_without_loader_state_raise_state_error(
    tmp_path: Path, source: rf.Source
) -> None:
    Once(tmp_path, source, stop=7).train()
    checkpoint = tmp_path / "checkpoint-6"
    with pytest.raises(StateError, match="samples was 83, is 60"):
        Once(tmp_path, rf.from_dataset(job.Sequences(60))).train(resume_from_checkpoint=str(checkpoint))
    with pytest.raises(StateError, match="seed was 7, is 8"):
        Once(tmp_path, source, seed=8).train(resume_from_checkpoint=str(checkpoint))
    state = json.loads((checkpoint / "trainer_state.json").read_text())
    del state["stateful_callbacks"]["rankfeed"]
    (checkpoint / "trainer_state.json").write_text(json.dumps(state))
    with pytest.raises(StateError, match="ignore_data_skip=True begins its epoch again"):
        Once(tmp_path, source).train(resume_from_checkpoint=str(checkpoint))
    again = Once(tmp_path, source, ignore_data_skip=True, num_train_epochs=1)
    again.train(resume_from_checkpoint=str(checkpoint))
    assert [update for _, update, _ in again.trained] == list(range(6, 21))
    (checkpoint / "trainer_state.json").write_text("{")
    with pytest.raises(StateError, match="remove it, and use the one before"):
        Once(tmp_path, source).train(resume_from_checkpoint=str(checkpoint))


class Unfed(transformers.Trainer):
    """A Trainer without FeedMixin, whose train_dataset is a Dataset or a function that makes the dataloader."""

    def __init__(self, out: Path, data: Any, stop: int = -1, **more: Any) -> None:
        options = {"remove_unused_columns": False, "num_train_epochs": 1, **more}
        super().__init__(
            model=transformers.GPT2LMHeadModel(job.config()),
            args=job.arguments(out, **arguments(**options)),
            train_dataset=None if callable(data) else data,
            data_collator=job.collate,
            callbacks=[Stop(stop)],
        )
        self.made = data
        self.trained: Counter[int] = Counter()

    def get_train_dataloader(self) -> Any:
        return self.made(self) if callable(self.made) else super().get_train_dataloader()

    def training_step(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        self.trained.update(job.ids_of(inputs["input_ids"]))
        return super().training_step(model, inputs, *args, **kwargs)


@pytest.mark.timeout(300)
@pytest.mark.parametrize("way", ["source", "loader", *map(slow, ("accelerated", "sampler", "stream"))])
def test_a_transformers_trainer_without_feed_mixin_trains_but_raises_on_resume(
    tmp_path: Path, source: rf.Source, way: str
) -> None:
    def loader(data: Any = source) -> Any:
        return rf.Loader(data, BATCH, batch_transform=PadTokens(causal=True))

    data: Any = {
        "source": source,
        "loader": lambda trainer: loader(),
        "accelerated": lambda trainer: accelerated(loader(), trainer.accelerator),
        "sampler": lambda trainer: DataLoader(
            source, batch_sampler=rf.DistributedBatchSampler(source, BATCH), collate_fn=job.collate
        ),
        "stream": lambda trainer: loader(rf.from_iterable(lambda: iter(source))),
    }[way]
    limit = {"max_steps": 21} if way == "stream" else {}
    whole = Unfed(tmp_path / "whole", data, **limit)
    whole.train()
    assert whole.trained == Counter(range(SAMPLES))
    Unfed(tmp_path, data, stop=6, **limit).train()
    with pytest.raises((StateError, ArgumentError), match="FeedMixin"):
        Unfed(tmp_path, data, **limit).train(resume_from_checkpoint=True)
    # Told to, it begins the epoch again, and takes the updates that are left.
    again = Unfed(tmp_path, data, ignore_data_skip=True, **limit)
    again.train(resume_from_checkpoint=True)
    assert sum(again.trained.values()) == (21 - 6) * BATCH


@pytest.mark.timeout(300)
def test_a_transformers_trainer_without_feed_mixin_raises_for_a_loader_or_several_processes(
    tmp_path: Path, source: rf.Source, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(ArgumentError, match=r"FeedMixin cannot train on a rankfeed\.Loader"):
        Unfed(tmp_path, rf.Loader(source, BATCH)).train()
    trainer = Unfed(tmp_path, source)
    monkeypatch.setattr(type(trainer.args), "world_size", 2)
    with pytest.raises(ArgumentError, match="in several processes: it repeats samples"):
        trainer.train()


@pytest.mark.timeout(300)
def test_loaders_and_options_unsuited_to_a_transformers_trainer_raise_argument_error(
    tmp_path: Path, source: rf.Source, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(ArgumentError, match="per_device"):
        Once(tmp_path, rf.Loader(source, 3)).train()
    with pytest.raises(ArgumentError, match="batches of similar length"):
        Once(tmp_path, source, train_sampling_strategy="group_by_length").train()
    with pytest.raises(ArgumentError, match="1 ranks"):
        Once(tmp_path, rf.Loader(source, 4, topology=rf.Topology(rank=1, world_size=2))).train()
    with pytest.raises(ArgumentError, match="uses none of the source's columns as an input"):
        Once(tmp_path, rf.from_dataset([{"x": 1}])).train()
    with pytest.raises(ArgumentError, match="pad"):
        Once(tmp_path, source).evaluate(rf.Loader(source, 8))
    peers = Once(tmp_path, rf.Loader(source, 4))
    monkeypatch.setattr(peers.model, "_tp_size", 2, raising=False)
    monkeypatch.setattr(type(peers.args), "world_size", 2)
    with pytest.raises(ArgumentError, match="tensor- or context-parallel ranks share"):
        peers.get_eval_dataloader(rf.Loader(source, peers.args.eval_batch_size, tail="pad"))
    with pytest.raises(ArgumentError, match="Transformers 5"):
        FeedMixin()


#: Images with labels, of which a model for images takes only the labels.
PICTURES = [{"image": np.full((3, 8, 8), index, np.float32), "label": index % 2} for index in range(12)]


class PictureTrainer(FeedMixin, transformers.Trainer):
    """Counts the images that it trains on, by their first value."""

    def training_step(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        self.trained: Counter[int] = getattr(self, "trained", Counter())
        self.trained.update(inputs["pixel_values"][:, 0, 0, 0].int().tolist())
        return super().training_step(model, inputs, *args, **kwargs)


def picture_trainer(out: Path, data: Any, collator: Any, **options: Any) -> Any:
    sizes = {"image_size": 8, "patch_size": 4, "hidden_size": 8, "intermediate_size": 8}
    config = transformers.ViTConfig(num_hidden_layers=1, num_attention_heads=1, **sizes)
    return PictureTrainer(
        model=transformers.ViTForImageClassification(config),
        args=job.arguments(out, per_device_train_batch_size=BATCH, num_train_epochs=1, **options),
        train_dataset=data,
        eval_dataset=data,
        data_collator=collator,
    )


def collate_pictures(samples: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
    pixels = torch.stack([torch.as_tensor(sample["image"]) for sample in samples])
    return {"pixel_values": pixels, "labels": torch.tensor([sample["label"] for sample in samples])}


@pytest.mark.timeout(300)
@pytest.mark.parametrize("collator", [None, collate_pictures], ids=["default", "own"])
@pytest.mark.parametrize("is_loader", [False, True], ids=["source", "loader"])
def test_an_image_column_removed_by_remove_unused_columns_raises_argument_error(
    collator: Any, is_loader: bool, tmp_path: Path
) -> None:
    source = rf.from_dataset(PICTURES)
    data = rf.Loader(source, BATCH) if is_loader else source
    trainer = picture_trainer(tmp_path, data, collator)
    with pytest.raises(ArgumentError, match=r"(?s)removes image.*remove_unused_columns=False"):
        trainer.train()
    assert trainer.state.global_step == 0
    if not is_loader:
        with pytest.raises(ArgumentError, match=r"(?s)removes image.*remove_unused_columns=False"):
            trainer.evaluate()


@pytest.mark.timeout(300)
def test_a_collator_that_needs_a_removed_column_raises_transform_error_naming_it(tmp_path: Path) -> None:
    source = rf.from_dataset([{"pixel_values": np.zeros((3, 8, 8)), "image": index} for index in range(8)])

    def collate(samples: list[dict[str, Any]]) -> Any:
        return {"pixel_values": [sample["pixel_values"] for sample in samples], "labels": samples[0]["image"]}

    with pytest.raises(TransformError, match=r"(?s)data_collator needs the column 'image'.*removes image"):
        picture_trainer(tmp_path, source, collate).train()

    def fail(samples: list[dict[str, Any]]) -> Any:
        raise KeyError

    with pytest.raises(TransformError, match="KeyError"):
        picture_trainer(tmp_path, source, fail).train()


@pytest.mark.timeout(300)
def test_images_train_with_remove_unused_columns_false_or_a_transform(tmp_path: Path) -> None:
    source = rf.from_dataset(PICTURES)
    whole = picture_trainer(tmp_path, source, collate_pictures, remove_unused_columns=False)
    whole.train()
    assert whole.trained == Counter(range(12))
    assert whole.evaluate()["eval_loss"] > 0

    def transform(sample: dict[str, Any]) -> dict[str, Any]:
        return {"pixel_values": sample["image"], "labels": sample["label"], "note": 1}

    trainer = picture_trainer(tmp_path, rf.Loader(source, BATCH, transform=transform), None)
    trainer.train()
    assert trainer.trained == Counter(range(12))


@pytest.mark.soak
@pytest.mark.timeout(300)
def test_a_transformers_trainer_accepts_rankfeed_loaders_and_a_custom_collator(
    tmp_path: Path, source: rf.Source
) -> None:
    loader = rf.Loader(source, BATCH, shuffle=True, seed=3, num_workers=2, batch_transform=PadTokens(causal=True))
    held = rf.Loader(source, 8, tail="pad", batch_transform=PadTokens(causal=True))
    trainer = Once(tmp_path, loader, num_train_epochs=2)
    trainer.eval_dataset = {"held": held, "some": source}
    for _ in range(2):  # each run begins at the start
        trainer.trained.clear()
        trainer.train()
        assert trainer.samples(0) == trainer.samples(1) == Counter(range(SAMPLES))
    found = [trainer.evaluate() for _ in range(2)]
    assert found[0]["eval_held_loss"] == found[1]["eval_held_loss"] == pytest.approx(found[0]["eval_some_loss"])
    with pytest.raises(ArgumentError, match="two loaders"):
        trainer.evaluate(loader)

    def collate(samples: list[dict[str, Any]]) -> transformers.BatchEncoding:
        tokens = torch.stack([torch.as_tensor(sample["input_ids"][:3]).long() for sample in samples])
        return transformers.BatchEncoding({"input_ids": tokens, "labels": tokens})

    own = Once(tmp_path, source, num_train_epochs=1)
    own.data_collator = collate
    own.train()
    assert own.samples(0) == Counter(range(SAMPLES))
    assert own.evaluate(source)["eval_loss"] > 0


class Linear(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(1, 1)

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"loss": ((self.layer(x[:, None].float())[:, 0] - labels) ** 2).mean()}


@pytest.mark.timeout(300)
def test_null_values_raise_source_error_if_the_model_takes_no_validity_mask(tmp_path: Path) -> None:
    """With remove_unused_columns, which is the default, a collator gets the masks of the columns that are used."""

    table = {"x": [1, None, 3, 4], "labels": [1.0, 2.0, 3.0, 4.0], "note": ["a", "b", None, None]}
    pq.write_table(pa.table(table), tmp_path / "t.parquet")
    masked = rf.open(tmp_path / "t.parquet", nulls="mask")
    collated: Counter[tuple[str, ...]] = Counter()

    def replace_nulls(samples: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
        collated.update(tuple(sample) for sample in samples)
        x = [float(sample["x"]) if sample["x_valid"] else 2.0 for sample in samples]
        return {"x": torch.tensor(x), "labels": torch.tensor([float(sample["labels"]) for sample in samples])}

    for source, collator in ((masked, replace_nulls), (masked.select([0, 2, 3]), None), (masked, None)):
        args = job.arguments(tmp_path / "run", num_train_epochs=1, per_device_train_batch_size=2)
        trainer = job.Trainer(model=Linear(), args=args, train_dataset=source, data_collator=collator)
        if collator is None and source is masked:
            with pytest.raises(SourceError, match=r"(?s)null.*'x_valid' among the arguments.*rank 0, epoch 0"):
                trainer.train()
        else:
            trainer.train()
    assert collated == {("x", "x_valid", "labels", "labels_valid"): 4}


def test_pad_tokens_pads_inputs_and_labels_and_adds_an_attention_mask() -> None:
    rows = [
        {"input_ids": [1, 2, 3], "label_ids": [7, 8, 9], "x": [0.5]},
        {"input_ids": [4], "label_ids": [6], "x": [0.5, 0.25]},
    ]
    (batch,) = rf.Loader(rf.from_dataset(rows), 2, batch_transform=PadTokens(pad_token_id=5, pad_to=4))
    assert batch["input_ids"].tolist() == [[1, 2, 3, 5], [4, 5, 5, 5]]
    assert batch["labels"].tolist() == [[7, 8, 9, -100], [6, -100, -100, -100]]
    assert batch["attention_mask"].tolist() == [[1, 1, 1, 0], [1, 0, 0, 0]]
    assert batch["x"].tolist() == [[0.5, 0, 0, 0], [0.5, 0.25, 0, 0]]
    assert sorted(batch) == ["attention_mask", "input_ids", "labels", "x"]


@pytest.mark.soak
@pytest.mark.timeout(700)
def test_the_transformers_example_trains_on_two_processes_and_resumes_on_one(tmp_path: Path) -> None:
    script = Path(__file__).parents[2] / "examples" / "transformers_tokens.py"
    said = []
    for ranks, epochs in ((2, 1), (1, 2)):
        log = tmp_path / f"{ranks}.log"
        jobs.run(jobs.torchrun(ranks, script, tmp_path / "run", "--epochs", epochs), log, 300)
        said += [line for line in log.read_text().splitlines() if "held-out loss" in line]
    rows = len(rf.open(tmp_path / "run" / "train" / "rows"))
    updates = [-(-rows // 16), -(-rows // 16) + -(-rows // 8)]
    losses = [float(line.split()[-1]) for line in said]
    assert [line.split(" epochs")[0] for line in said] == [f"{n} updates, {e}" for e, n in enumerate(updates, 1)]
    assert losses[1] < losses[0] < 4.2

"""A Trainer resumes where the checkpoint was taken, at any point of an epoch."""

import warnings
from collections import Counter
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.loading.feeds import StatefulStream
from tests.support.marks import slow
from tests.support.packages import need_package

import rankfeed as rf
from rankfeed.errors import ArgumentError, StateError

need_package("lightning")
import lightning.pytorch as L  # noqa: E402
from lightning.pytorch.callbacks import Checkpoint, ModelCheckpoint, OnExceptionCheckpoint  # noqa: E402
from lightning.pytorch.tuner import Tuner  # noqa: E402
from lightning.pytorch.utilities import CombinedLoader  # noqa: E402
from tests.integrations.jobs.lightning_module import QUIET, LinearModule  # noqa: E402

from rankfeed.integrations.lightning import LoaderCheck  # noqa: E402

pytestmark = [pytest.mark.timeout(280), pytest.mark.filterwarnings("ignore")]
SAMPLES, ROWS, STEPS = 22, 4, 6
SOURCE = rf.from_dataset([{"id": index} for index in range(SAMPLES)])

#: Rows of a batch of a resumed job, and what limits it.
OTHER_LIMITS = [slow(2, "max_epochs"), slow(8, "max_epochs"), slow(2, "max_steps"), slow(ROWS, "max_steps")]

#: The epoch, and the ids of a batch that was trained on.
Steps = list[tuple[int, list[Any]]]


class Stopped(Exception):
    """Ends a job."""


class Model(LinearModule):
    """Notes which batches were trained on to their end, and after which steps it validated."""

    def __init__(self) -> None:
        super().__init__()
        self.trained: Steps = []
        self.validated: list[int] = []

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        self.stop("training_step")
        self.batch = batch
        return self.layer(torch.ones(1, 1)).sum()

    def on_before_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        if self.trainer.training:
            self.stop("on_before_batch_transfer")
        return batch

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self.stop("on_train_batch_start")

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self.stop("on_before_optimizer_step")

    def on_train_batch_end(self, *_: Any) -> None:
        self.trained.append((self.current_epoch, self.batch["id"].tolist()))
        self.stop("on_train_batch_end")

    def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        self.validated.append(self.global_step)

    def stop(self, hook: str) -> None:
        """Called in each hook, for a model that ends its job."""


class Stopping(Model):
    """Ends its job by an exception in a hook of a batch, which is counted from 0."""

    def __init__(self, hook: str, batch: int) -> None:
        super().__init__()
        self.hook, self.done = hook, batch + (hook == "on_train_batch_end")

    def stop(self, hook: str) -> None:
        if hook == self.hook and len(self.trained) == self.done:
            raise Stopped


def loader(rows: int = ROWS, **options: Any) -> rf.Loader:
    return rf.Loader(SOURCE, rows, **{"shuffle": True, **options})


def numbers(epoch: int) -> Any:
    return ({"id": 100 * epoch + number} for number in range(9))


def stream_loader(stream: Any = numbers) -> rf.Loader:
    return rf.Loader(rf.from_iterable(stream), 2)


def trainer(*callbacks: Any, check: bool = True, **options: Any) -> Any:
    return L.Trainer(
        accelerator="cpu",
        devices=1,
        enable_checkpointing=any(isinstance(callback, Checkpoint) for callback in callbacks),
        num_sanity_val_steps=0,
        callbacks=[*callbacks, *([LoaderCheck()] if check else [])],
        **QUIET,
        **options,
    )


def trained(feed: Any, *callbacks: Any, model: Any = None, ckpt_path: Path | None = None, **options: Any) -> Steps:
    """The steps that a Trainer takes, with a Model unless another one is given."""
    model = model or Model()
    trainer(*callbacks, **options).fit(model, feed, ckpt_path=ckpt_path)
    return model.trained


def saver(folder: Path, **options: Any) -> Any:
    return ModelCheckpoint(dirpath=folder, filename="{step}", save_top_k=-1, **options)


def resumed(checkpoint: Path, rows: int = ROWS, *callbacks: Any, **options: Any) -> Model:
    model = Model()
    trainer(*callbacks, **options).fit(model, loader(rows), loader(11, shuffle=False), ckpt_path=checkpoint)
    return model


def planned(epochs: range, rows: int = ROWS) -> Steps:
    feed = loader(rows)
    steps: Steps = []
    for epoch in epochs:
        feed.set_epoch(epoch)
        steps += [(epoch, batch["id"].tolist()) for batch in feed]
    return steps


def samples(steps: Steps, epoch: int) -> Counter[int]:
    return Counter(chain.from_iterable(ids for at, ids in steps if at == epoch))


@pytest.fixture(scope="module")
def epoch_ends(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Checkpoints at the end of an epoch: of its last step before it ends, when it ends, and after the fit."""
    folder = tmp_path_factory.mktemp("ends")
    trained(loader(), saver(folder / "last", every_n_train_steps=STEPS), max_epochs=1)
    run = trainer(saver(folder / "end"), max_steps=STEPS)
    run.fit(Model(), loader())
    run.save_checkpoint(folder / "fit.ckpt")
    checkpoint = f"step={STEPS}.ckpt"
    return {
        "last_batch": folder / "last" / checkpoint,
        "epoch_end": folder / "end" / checkpoint,
        "after_fit": folder / "fit.ckpt",
    }


@pytest.mark.parametrize(("rows", "limit"), [(ROWS, "max_epochs"), (8, "max_steps"), *OTHER_LIMITS])
@pytest.mark.parametrize("saved", ["last_batch", "epoch_end", "after_fit"])
def test_lightning_resumed_from_an_epoch_end_checkpoint_trains_on_the_whole_following_epochs(
    saved: str, rows: int, limit: str, epoch_ends: dict[str, Path]
) -> None:
    due = planned(range(1, 3), rows)
    ends = {"max_epochs": 3, "max_steps": STEPS + len(due)}
    model = resumed(epoch_ends[saved], rows, **{limit: ends[limit]})
    assert model.trained == due
    each = len(due) // 2
    assert model.validated == [STEPS + each] * 2 + [STEPS + 2 * each] * 2


@pytest.mark.parametrize("saved", ["last_batch", "epoch_end"])
def test_lightning_run_resumed_from_an_epoch_end_can_be_checkpointed_and_resumed_again(
    saved: str, tmp_path: Path, epoch_ends: dict[str, Path]
) -> None:
    once = resumed(epoch_ends[saved], ROWS, saver(tmp_path, every_n_train_steps=1), max_steps=STEPS + 4)
    again = resumed(tmp_path / f"step={STEPS + 4}.ckpt", max_steps=3 * STEPS)
    assert once.trained + again.trained == planned(range(1, 3))


@pytest.mark.parametrize(("rows", "limit"), [(ROWS, "max_epochs"), (8, "max_steps"), *OTHER_LIMITS])
@pytest.mark.parametrize("saved", ["fit.ckpt", "step=4.ckpt"])
def test_lightning_epoch_ended_early_by_max_steps_resumes_with_its_remaining_batches(
    saved: str, rows: int, limit: str, tmp_path: Path
) -> None:
    run, first = trainer(saver(tmp_path), max_steps=4), Model()
    run.fit(first, loader())
    run.save_checkpoint(tmp_path / "fit.ckpt")
    left = planned(range(1), 2)[8:] if rows == 2 else planned(range(1))[4:]
    left = [(0, list(chain.from_iterable(ids for _, ids in left)))] if rows == 8 else left
    later = planned(range(1, 2), rows)
    ends = {"max_epochs": 2, "max_steps": 4 + len(left) + len(later)}
    model = resumed(tmp_path / saved, rows, **{limit: ends[limit]})
    assert model.trained == left + later
    assert samples(first.trained + model.trained, 0) == Counter(range(SAMPLES))


def stopped(folder: Path, hook: str, batch: int, **options: Any) -> Model:
    """A job that an exception ends in a hook of a batch; its checkpoint is stopped.ckpt."""
    model = Stopping(hook, batch)
    keep = OnExceptionCheckpoint(folder, "stopped")
    with pytest.raises(Stopped):
        trainer(keep, max_epochs=2, **options).fit(model, loader(), loader(11, shuffle=False))
    return model


@pytest.mark.parametrize(
    "hook",
    [
        *("on_before_batch_transfer", "on_train_batch_start", "training_step"),
        *("on_before_optimizer_step", "on_train_batch_end"),
    ],
)
@pytest.mark.parametrize("batch", [3, *map(slow, (STEPS - 1, STEPS))])
def test_lightning_run_stopped_by_an_exception_resumes_without_losing_the_interrupted_batch(
    batch: int, hook: str, tmp_path: Path
) -> None:
    before = stopped(tmp_path, hook, batch, val_check_interval=3)
    for limit in ({"max_epochs": 2}, {"max_steps": 2 * STEPS}):
        after = resumed(tmp_path / "stopped.ckpt", val_check_interval=3, **limit)
        assert before.trained + after.trained == planned(range(2))
        if hook != "on_train_batch_end":  # after it Lightning continues with the next batch, and validates later
            assert before.validated + after.validated == [3, 3, 6, 6, 9, 9, 12, 12]


@pytest.mark.parametrize("rows", [2, 8])
@pytest.mark.parametrize("batch", [3, slow(STEPS - 1)])
def test_lightning_run_stopped_by_an_exception_resumes_with_another_batch_size(
    batch: int, rows: int, tmp_path: Path
) -> None:
    before = stopped(tmp_path, "training_step", batch)
    after = resumed(tmp_path / "stopped.ckpt", rows, max_epochs=2)
    assert samples(before.trained + after.trained, 0) == Counter(range(SAMPLES))
    assert after.trained[-len(planned(range(1), rows)) :] == planned(range(1, 2), rows)


def test_lightning_run_stopped_by_an_exception_can_be_resumed_twice(tmp_path: Path) -> None:
    before = stopped(tmp_path, "training_step", 2)
    once = resumed(tmp_path / "stopped.ckpt", ROWS, saver(tmp_path, every_n_train_steps=1), max_steps=4)
    again = resumed(tmp_path / "step=4.ckpt", max_epochs=2)
    assert before.trained + once.trained + again.trained == planned(range(2))


class Both(Model):
    """Trains on batches of two loaders, of which one may have ended."""

    def on_train_batch_end(self, *_: Any) -> None:
        ids = [[] if batch is None else batch["id"].tolist() for batch in self.batch.values()]
        self.trained.append((self.current_epoch, ids))


def long_and_short(samples: int = 8) -> dict[str, rf.Loader]:
    """A loader, and a shorter one of as many samples as given."""
    short = rf.from_dataset([{"id": index} for index in range(samples)])
    return {"long": loader(), "short": rf.Loader(short, ROWS, shuffle=True)}


def trained_on_both(*callbacks: Any, samples: int = 8, mode: str = "", **options: Any) -> Steps:
    model, feeds = Both(), long_and_short(samples)
    loaders: Any = CombinedLoader(feeds, mode) if mode else feeds
    trainer(*callbacks, max_epochs=2).fit(model, loaders, **options)
    return model.trained


@pytest.mark.skipif("on_exception" not in vars(ModelCheckpoint), reason="this Lightning has no save_on_exception")
def test_several_loaders_stopped_by_an_exception_each_resume_with_the_interrupted_batch(tmp_path: Path) -> None:
    class StoppingBoth(Both, Stopping):
        pass

    before = StoppingBoth("training_step", 3)
    keep = ModelCheckpoint(dirpath=tmp_path, filename="stopped", save_on_exception=True)
    with pytest.raises(Stopped):
        trainer(keep, max_epochs=2).fit(before, long_and_short())
    assert before.trained + trained_on_both(ckpt_path=tmp_path / "stopped.ckpt") == trained_on_both()


@pytest.mark.parametrize(("made", "every"), [(loader, 1), (loader, 2), (stream_loader, 1)])
def test_one_loader_used_twice_in_a_lightning_trainer_raises_argument_error(made: Any, every: int) -> None:
    feed = made()
    for train, val in [(feed, feed), (feed, [loader(), feed]), ({"a": feed, "b": feed}, None)]:
        with pytest.raises(ArgumentError, match="one Loader cannot be read twice"):
            trainer(max_epochs=2, check_val_every_n_epoch=every).fit(Model(), train, val)


@pytest.mark.parametrize(("mode", "every"), [("max_size", 2), ("max_size", 4), ("min_size", 1)])
def test_an_exhausted_shorter_loader_is_not_read_again_after_a_lightning_resume(
    mode: str, every: int, tmp_path: Path
) -> None:
    whole = trained_on_both(saver(tmp_path, every_n_train_steps=every), mode=mode)
    assert trained_on_both(mode=mode, ckpt_path=tmp_path / f"step={every}.ckpt") == whole[every:]
    epochs = Counter(epoch for epoch, (_, ids) in whole for _ in ids)
    assert epochs == {0: 8, 1: 8}


@pytest.mark.parametrize("samples", [8, 14])
def test_a_shorter_loader_restarted_within_an_epoch_resumes_like_an_uninterrupted_lightning_run(
    samples: int, tmp_path: Path
) -> None:
    callbacks = saver(tmp_path / "steps", every_n_train_steps=3), saver(tmp_path / "epochs")
    whole = trained_on_both(*callbacks, samples=samples)
    for saved, steps in [("steps", 3), ("steps", STEPS), ("epochs", STEPS), ("steps", 9)]:
        checkpoint = tmp_path / saved / f"step={steps}.ckpt"
        assert trained_on_both(samples=samples, ckpt_path=checkpoint) == whole[steps:], (saved, steps)


Counting = partial(StatefulStream, 9, "id")


@pytest.mark.parametrize("stream", [numbers, Counting], ids=["counted", "with its own state"])
def test_a_stream_resumes_after_any_batch_although_lightning_prefetches_one_batch(
    stream: Any, tmp_path: Path
) -> None:
    whole = trained(stream_loader(stream), saver(tmp_path, every_n_train_steps=1), max_epochs=2)
    assert [epoch for epoch, _ in whole] == [0] * 5 + [1] * 5
    for step in range(1, 11):
        with warnings.catch_warnings():
            warnings.filterwarnings("error", "this epoch of a stream")
            rest = trained(stream_loader(stream), max_epochs=2, ckpt_path=tmp_path / f"step={step}.ckpt")
        assert whole[:step] + rest == whole, step


def test_a_loader_combined_with_a_stream_resumes_after_any_lightning_batch(tmp_path: Path) -> None:
    def feeds() -> Any:
        return CombinedLoader([loader(shuffle=False), stream_loader(Counting)], "max_size_cycle")

    class Pairs(Model):
        def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
            return super().training_step({"id": torch.cat([batch[0]["id"], batch[1]["id"]])}, batch_idx)

    whole = trained(feeds(), saver(tmp_path, every_n_train_steps=1), model=Pairs(), max_epochs=1)
    assert len(whole) == STEPS
    for step in (1, 4):
        rest = trained(feeds(), model=Pairs(), max_epochs=1, ckpt_path=tmp_path / f"step={step}.ckpt")
        assert whole[:step] + rest[: 5 - step] == whole[:5]


def test_a_stream_in_a_lightning_run_stopped_by_an_error_resumes_with_the_interrupted_batch(
    tmp_path: Path,
) -> None:
    stopped = Stopping("training_step", 3)
    with pytest.raises(Stopped):
        trained(stream_loader(Counting), saver(tmp_path, save_on_exception=True), model=stopped, max_epochs=1)
    (checkpoint,) = tmp_path.iterdir()
    rest = trained(stream_loader(Counting), max_epochs=1, ckpt_path=checkpoint)
    assert samples(stopped.trained + rest, 0) == Counter(range(9))


class Preparing(Model):
    """Uses its training loader in a hook, before the Trainer takes its first batch."""

    def __init__(self, hook: str, use: str) -> None:
        super().__init__()
        self.hook, self.use = hook, use

    def use_loader(self, hook: str) -> None:
        if hook != self.hook:
            return
        if self.use == "length":
            assert self.trainer.estimated_stepping_batches  # -1 for a stream
        else:
            self.trainer.fit_loop.setup_data()
            batches = iter(self.trainer.train_dataloader)
            for _ in range(1 if self.use == "batch" else STEPS):
                next(batches)

    def setup(self, stage: str) -> None:
        self.use_loader("setup")

    def configure_optimizers(self) -> torch.optim.Optimizer:
        self.use_loader("configure_optimizers")
        return super().configure_optimizers()

    def on_fit_start(self) -> None:
        self.use_loader("on_fit_start")

    def on_train_start(self) -> None:
        self.use_loader("on_train_start")


@pytest.fixture(scope="module")
def every_step(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Checkpoints of each step of two epochs."""
    folder = tmp_path_factory.mktemp("every_step")
    trained(loader(), saver(folder, every_n_train_steps=1), max_epochs=2)
    return folder


@pytest.mark.parametrize("check", [True, False], ids=["with the callback", "without"])
@pytest.mark.parametrize(
    ("hook", "use"),
    [
        ("configure_optimizers", "batch"),
        *(slow(hook, "length") for hook in ("setup", "configure_optimizers", "on_fit_start", "on_train_start")),
        *(slow("on_fit_start", use) for use in ("batch", "epoch")),
        slow("on_train_start", "batch"),
    ],
)
def test_reading_the_loader_in_a_hook_before_training_changes_neither_position_nor_checkpoints(
    hook: str, use: str, check: bool, every_step: Path, tmp_path: Path
) -> None:
    due = planned(range(3))
    # At on_train_start after a checkpoint of a last batch, nothing is left of the epoch to read.
    starts = [0, 3, STEPS + 2] if hook == "on_train_start" else [0, 3, STEPS, STEPS + 2]
    for start in starts:
        model, folder = Preparing(hook, use), tmp_path / str(start)
        checkpoint = every_step / f"step={start}.ckpt" if start else None
        options: Any = {"check": check, "max_epochs": 3, "ckpt_path": checkpoint}
        steps = trained(loader(), saver(folder, every_n_train_steps=1), model=model, **options)
        assert steps == due[start:], start
        for step in range(start + 1, start + 3) if check else ():
            again = trained(loader(), max_epochs=3, ckpt_path=folder / f"step={step}.ckpt")
            assert again == due[step:], (start, step)


def test_a_stream_read_in_a_hook_before_the_checkpoint_is_loaded_still_resumes(tmp_path: Path) -> None:
    whole = trained(stream_loader(), saver(tmp_path, every_n_train_steps=1), max_epochs=2)
    for step in (3, 5, 7):
        for model in (Preparing("configure_optimizers", "length"), Preparing("on_fit_start", "batch")):
            rest = trained(stream_loader(), model=model, max_epochs=2, ckpt_path=tmp_path / f"step={step}.ckpt")
            assert rest == whole[step:]


@pytest.mark.parametrize("start", [0, 3])
def test_lightning_lr_find_does_not_change_the_position_of_the_loader(
    start: int, every_step: Path, tmp_path: Path
) -> None:
    run, model, feed = trainer(default_root_dir=tmp_path, max_epochs=2), Model(), loader()
    model.lr = 0.1
    Tuner(run).lr_find(model, feed, num_training=4)
    model.trained.clear()
    run.fit(model, feed, ckpt_path=every_step / f"step={start}.ckpt" if start else None)
    assert model.trained == planned(range(2))[start:]


def test_a_hook_that_iterates_the_training_loader_during_an_epoch_raises_argument_error() -> None:
    class Peeking(Model):
        def on_train_batch_end(self, *_: Any) -> None:
            super().on_train_batch_end()
            if len(self.trained) == 3:
                next(iter(self.trainer.train_dataloader))

    model = Peeking()
    with pytest.raises(ArgumentError, match=r"(?s)was iterated by other code.*create another Loader"):
        trainer(max_epochs=1).fit(model, loader())
    assert len(model.trained) <= 5


@pytest.fixture(scope="module")
def unchecked(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Checkpoints of Trainers without LoaderCheck: in mid-epoch, with a batch in hand, of a stream."""
    checkpoints = {}
    for name, feed, options in (
        ("middle", loader(), {"every_n_train_steps": 3}),
        ("in hand", loader(), {"save_on_exception": True, "save_last": False}),
        ("stream", stream_loader(), {"every_n_train_steps": 2}),
    ):
        folder = tmp_path_factory.mktemp("unchecked")
        with pytest.raises(Stopped):
            trained(feed, saver(folder, **options), model=Stopping("training_step", 3), check=False, max_epochs=1)
        checkpoints[name] = min(folder.iterdir())
    return checkpoints


def test_without_loader_check_a_mid_epoch_lightning_checkpoint_resumes_without_loss(
    unchecked: dict[str, Path],
) -> None:
    rest = trained(loader(), check=False, max_epochs=2, ckpt_path=unchecked["middle"])
    assert rest == planned(range(2))[3:]


@pytest.mark.parametrize("check", [False, True], ids=["without", "with"])
@pytest.mark.parametrize("name", ["in hand", "stream"])
def test_a_lightning_checkpoint_saved_without_loader_check_that_would_lose_samples_raises_state_error(
    name: str, check: bool, unchecked: dict[str, Path]
) -> None:
    feed = loader() if name == "in hand" else stream_loader()
    with pytest.raises(StateError, match=r"(?s)would lose or repeat samples.*LoaderCheck\(\)"):
        trained(feed, check=check, max_epochs=1, ckpt_path=unchecked[name])


@pytest.mark.parametrize("check", [False, True], ids=["without", "with"])
def test_a_lightning_checkpoint_of_a_run_that_repeats_its_epoch_raises_state_error(
    check: bool, epoch_ends: dict[str, Path], tmp_path: Path
) -> None:
    options: Any = {"check": False, "max_epochs": 2, "ckpt_path": epoch_ends["last_batch"]}
    trained(loader(), saver(tmp_path, every_n_train_steps=1), **options)
    for step in (STEPS + 1, 2 * STEPS - 1):
        model = Model()
        with pytest.raises(StateError, match=r"(?s)would lose or repeat samples.*LoaderCheck\(\)"):
            trainer(check=check, max_epochs=2).fit(model, loader(), ckpt_path=tmp_path / f"step={step}.ckpt")
        assert model.trained == []


@pytest.mark.parametrize("saved", ["last_batch", "epoch_end", "after_fit"])
@pytest.mark.parametrize(("rows", "limit"), [(ROWS, "max_steps"), *map(slow, (2, 8), ("max_epochs", "max_steps"))])
def test_without_loader_check_resuming_trains_on_whole_epochs_or_raises_state_error(
    saved: str, rows: int, limit: str, epoch_ends: dict[str, Path]
) -> None:
    due = planned(range(1, 3), rows)
    model, ends = Model(), {"max_epochs": 3, "max_steps": STEPS + len(due)}
    try:
        checkpoint = epoch_ends[saved]
        trainer(check=False, **{limit: ends[limit]}).fit(model, loader(rows), ckpt_path=checkpoint)
    except StateError as error:
        if "LoaderCheck()" not in str(error) or model.trained:
            raise
    else:
        assert model.trained == due

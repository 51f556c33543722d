"""Raises if a Transformers Trainer without rankfeed's mixin would repeat or lose samples of a loader or source.

Transformers 4 and 5: the Trainer has no hook for data that shard or resume themselves. It saves only the number of
updates, and skips that many batches of the present number of processes (huggingface/transformers#34365); its
sharding repeats samples at the end of an epoch. It calls ``len()`` before it trains in each of these cases, so
``__len__`` looks at its callers. For loaders and samplers, and for sources, which is why it is not in
``rankfeed.loading._compat``.
"""

import sys
from types import FrameType

from rankfeed.errors import ArgumentError, StateError

#: Modules between the Trainer and ``len()``; other callers only need the length.
_BETWEEN = ("torch.utils.data", "accelerate.", "transformers.", "rankfeed.integrations.accelerate")
_TRAINER = "transformers.trainer"
#: Methods of the Trainer (version 4 and 5) that ask for the length of what it trains on.
_TRAINS = ("_get_train_sampler", "set_initial_training_values", "_inner_training_loop")
_REMEDY = "class Trainer(rankfeed.integrations.transformers.FeedMixin, transformers.Trainer)"


def refuse_trainer_without_mixin(data: str, *, is_share: bool) -> None:
    """Refuse a caller of ``__len__`` that is a Trainer about to repeat or lose samples of ``data``."""
    if _TRAINER not in sys.modules:
        return
    frame = sys._getframe(1).f_back  # beyond __len__
    while frame is not None and _module(frame).startswith(_BETWEEN) and _module(frame) != _TRAINER:
        frame = frame.f_back
    if frame is None or _module(frame) != _TRAINER or frame.f_code.co_name not in _TRAINS:
        return
    trainer = frame.f_locals["self"]
    processes = trainer.args.world_size
    where = f"rank {trainer.args.process_index} of {processes}"
    bases = f"{type(trainer).__name__}({', '.join(base.__name__ for base in type(trainer).__bases__)})"
    if frame.f_code.co_name == "_get_train_sampler" if is_share else processes > 1:
        why = "it would put a DataLoader around it" if is_share else "it repeats samples at the end of each epoch"
        raise ArgumentError(
            f"a Trainer of Transformers without FeedMixin cannot train on {data}"
            f"{'' if is_share else ' in several processes'}: {why}",
            expected=_REMEDY,
            found=bases,
            where=where,
            remedy="put FeedMixin before the Trainer",
        )
    while frame is not None and frame.f_code.co_name != "_inner_training_loop":
        frame = frame.f_back
    resumes = frame is not None and frame.f_locals.get("resume_from_checkpoint") is not None
    if resumes and not trainer.args.ignore_data_skip:
        raise StateError(
            "resuming a Trainer of Transformers without FeedMixin would lose or repeat samples: its checkpoint "
            "has the number of updates, but not the position in the data",
            expected=_REMEDY,
            found=f"{bases}, training on {data}",
            where=where,
            remedy="put FeedMixin before the Trainer in the script that saves and in the script that resumes, "
            "with train_dataset=source; ignore_data_skip=True begins the epoch again",
        )


def _module(frame: FrameType) -> str:
    return str(frame.f_globals.get("__name__", ""))

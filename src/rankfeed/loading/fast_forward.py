"""What a sampler yields, for a DataLoader that goes on from a state and skips steps to get there.

torchdata's StatefulDataLoader takes a snapshot every ``snapshot_every_n_steps``. With workers it goes back to the
last one, and skips as many of its own steps as the job had taken since: on other ranks those are other samples.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from typing import Any, TypeVar

from rankfeed.errors import StateError

_Yield = TypeVar("_Yield")


class Given(Iterator[_Yield]):
    """What a sampler yields; its state is how many samples a step is.

    Args:
        given: what is yielded.
        samples: of a full step, over all ranks.

    Examples:
        >>> given = Given(iter([4, 7]), samples=2)
        >>> list(given), given.state_dict()
        ([4, 7], {'samples_in_step': 2})
    """

    def __init__(self, given: Iterator[_Yield], samples: int) -> None:
        self._given = given
        self._samples = samples

    def __next__(self) -> _Yield:
        return next(self._given)

    def state_dict(self) -> dict[str, Any]:
        """Of this iterator alone; where the job stands is in the sampler's."""
        return {"samples_in_step": self._samples}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on where a state was taken; called by a DataLoader, after the sampler's own.

        Raises:
            StateError: the DataLoader is about to skip steps of another size.
        """
        before, skipped = state.get("samples_in_step"), _steps_to_skip()
        if skipped and before != self._samples:
            raise StateError(
                "the DataLoader goes on from an older snapshot by skipping steps, and they have another size now",
                expected=f"steps of {before} samples over all ranks",
                found=f"steps of {self._samples}, of which {skipped} would be skipped",
                remedy="resume with the number of ranks and the batch size of the job that saved; to change them,"
                " save with StatefulDataLoader(snapshot_every_n_steps=1), or at a multiple of what it has",
            )


def _steps_to_skip() -> int:
    """How many steps the DataLoader that is restoring a state will skip: it stands among the callers."""
    frame = sys._getframe(1)
    while frame.f_back is not None:
        frame = frame.f_back
        if frame.f_globals.get("__name__") == "torchdata.stateful_dataloader.stateful_dataloader":
            state = frame.f_locals.get("next_iter_state") or {}
            if "_steps_since_snapshot" in state:
                return int(state["_steps_since_snapshot"])
    return 0

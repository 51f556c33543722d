"""A rank's passes over its loader, whoever made it, and what it says of them to the others."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rankfeed.diagnostics.audit.audited import RankEpoch
from rankfeed.diagnostics.audit.trace import Trace
from rankfeed.diagnostics.keys import Key, keys_of
from rankfeed.diagnostics.tagged import Tagged, tagged
from rankfeed.errors import AuditError

if TYPE_CHECKING:
    from rankfeed.loading import Loader


@dataclass(frozen=True)
class Told:
    """What a rank says to all others once it has read."""

    rank: int
    share: int | None = None
    by_content: bool = False
    width: int = 0
    samples: int = 0
    epochs: tuple[RankEpoch, ...] = ()
    cut: bool = False


class Reading:
    """A rank's passes over its loader."""

    def __init__(self, loader: Iterable[Any], key: Key, scratch: Path, rank: int) -> None:
        self.loader, self.key, self.scratch, self.rank = loader, key, scratch, rank
        self.traces: list[Trace] = []
        self.streams: list[dict[tuple[int, str], str]] = []
        self.by_content = self.cut = False

    def read(self, max_steps: int | None) -> None:
        trace = Trace(self.scratch / f"trace-{len(self.traces)}", self.rank)
        streams: dict[tuple[int, str], str] = {}
        self.traces.append(trace)
        self.streams.append(streams)
        own = ours(self.loader)
        # A column of the user's own may be called so, where none is needed.
        masked = own is not None and (own.tail == "pad" or "valid" not in own.source.fields)
        with tagged(self.loader):
            batches = iter(self.loader)
            for batch in islice(batches, max_steps):
                worker = None
                if isinstance(batch, Tagged):
                    worker = batch.worker or 0
                    streams |= {(worker, name): digest for name, digest in batch.streams.items()}
                    batch = batch.batch
                words, by_content = keys_of(batch, self.key)
                self.by_content |= by_content
                if masked and isinstance(batch, Mapping) and "valid" in batch:
                    words = words[batch["valid"].cpu().numpy()]  # other rows only fill
                trace.add(words, worker)
            self.cut |= max_steps is not None and next(batches, None) is not None
        trace.close()

    def told(self) -> Told:
        own = ours(self.loader)
        if len({trace.width for trace in self.traces if trace.width}) > 1:
            raise AuditError("keys are whole numbers in some epochs and not in others", where=f"rank {self.rank}")
        return Told(
            self.rank,
            share=own.topology.rank if own is not None and own.topology.launcher == "mesh" else None,
            by_content=self.by_content,
            width=max(trace.width for trace in self.traces),
            samples=sum(int(trace.sizes.sum()) for trace in self.traces),
            epochs=tuple(self._of_epoch(*each) for each in zip(self.traces, self.streams, strict=True)),
            cut=self.cut,
        )

    def _of_epoch(self, trace: Trace, streams: dict[tuple[int, str], str]) -> RankEpoch:
        sizes = trace.sizes
        drawn = tuple((worker, name, digest) for (worker, name), digest in sorted(streams.items()))
        counts = dict(sorted(Counter(sizes.tolist()).items()))
        own = ours(self.loader)
        plan = getattr(own, "plan", None)  # a stream has none, and an order of its own
        unshuffled = plan is None or plan.describe().get("shuffle") == "none"
        in_order = trace.ascending or (own is not None and unshuffled)
        return RankEpoch(self.rank, len(sizes), int(sizes.sum()), counts, trace.orders, in_order, drawn)


def ours(loader: Any) -> Loader | None:
    """The loader, if it is a `Loader`, of a source or of a stream."""
    from rankfeed.loading import Loader

    return loader if isinstance(loader, Loader) else None

"""Counts steps, samples, waiting time, padding, cache hits and memory of a loader."""

import time
from collections import Counter
from operator import add

from rankfeed._util.native import native_library
from rankfeed._util.process_info import private_bytes
from rankfeed.loading.batch_builder import BatchResult, StageSeconds
from rankfeed.plan import Cursor


class LoaderStats:
    """Counts since the loader was created, on this rank; any thread may read them at any time."""

    # There is no lock: parts are read in the reverse order of their update, so that no ratio exceeds one.

    def __init__(self, workers: int = 1) -> None:
        self._workers = max(1, workers)
        self._epoch = self._epoch_step = self._epoch_steps = self._steps_before = 0
        self._steps = self._samples = 0
        #: Samples of batches that may lack some of them, by the user's function that returned the batch.
        self.unproven: Counter[str] = Counter()
        self._padding = self._padded = self._hits = self._lookups = 0
        self._stages, self._transfer = [0.0] * len(StageSeconds._fields), 0.0
        #: From the first request to the last answer, pauses between epochs included.
        self._seconds = self._first_request = 0.0
        #: Seconds waited so far, and the time of the open request (0.0 if there is none): one tuple, so that a
        #: reader never counts a wait twice.
        self._waits = 0.0, 0.0

    def begin(self, begun: Cursor, steps_left: int | None) -> None:
        """An epoch begins, or continues at a position; the number of steps of a stream is unknown."""
        self._epoch, self._steps_before, self._epoch_step = begun.epoch, begun.steps, begun.steps
        self._epoch_steps = 0 if steps_left is None else begun.steps + steps_left

    def request(self) -> None:
        """The consumer asks for a batch and waits from now on."""
        now = time.perf_counter()
        self._first_request = self._first_request or now
        self._waits = self._waits[0], now

    def answer(self) -> None:
        """The wait is over: a batch, an error or the end of the epoch."""
        now = time.perf_counter()
        self._seconds = now - self._first_request
        waited, requested = self._waits
        self._waits = waited + now - requested, 0.0

    def deliver(self, result: BatchResult, transfer: float) -> None:
        """A batch is delivered, whose transfer to the device took some seconds."""
        self._steps += 1
        self._stages = list(map(add, self._stages, result.seconds))
        self._transfer += transfer
        self._epoch_step = self._steps_before + result.step + 1
        self._samples += len(result.sample_ids)
        if result.unproven:
            self.unproven[result.unproven] += len(result.sample_ids)
        self._padded += result.padding[1]
        self._padding += result.padding[0]
        self._lookups += result.lookups[1]
        self._hits += result.lookups[0]

    def as_dict(self) -> dict[str, int | float]:
        """Counts, rates, waits (an open one included), cache hits, padding and memory, as plain numbers."""
        hits, padding = self._hits, self._padding
        waited, requested = self._waits
        now = time.perf_counter()
        stages = StageSeconds(*self._stages)
        waiting = max(0.0, now - requested) if requested else 0.0
        waited += waiting
        seconds = max(self._seconds, waited, now - self._first_request if requested else 0.0)
        return {
            "epoch": self._epoch,
            "epoch_step": self._epoch_step,  # steps done of the epoch, those before a resume included
            "epoch_steps": self._epoch_steps,  # 0 if unknown
            "steps": self._steps,
            "samples": self._samples,  # that went into the batches, without padding rows
            "unproven_samples": self.unproven.copy().total(),  # of them, in batches that may lack some
            "seconds": seconds,
            "samples_per_second": self._samples / seconds if seconds else 0.0,
            "waiting_seconds": waiting,
            "waited_seconds": waited,
            "waited_share": waited / seconds if seconds else 0.0,
            # Of work, on average over the workers.
            "source_seconds": stages.stream + stages.source / self._workers,
            "transform_seconds": stages.transform / self._workers,
            "collate_seconds": stages.collate / self._workers,
            "transfer_seconds": self._transfer,
            "cache_lookups": self._lookups,  # rows read from chunks
            "cache_hits": hits,  # those whose chunk was already decoded
            "cache_hit_share": hits / self._lookups if hits else 0.0,
            "padded_bytes": self._padded,  # of ragged columns with their padding
            "padding_bytes": padding,
            "padding_share": padding / self._padded if padding else 0.0,
            "native_copy": int(native_library() is not None),
            "private_bytes": private_bytes(),
        }

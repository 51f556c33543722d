"""Copies the rows of later batches in threads of the native library, which never wait for the GIL."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator

from rankfeed._util.signals import reraise_interrupt
from rankfeed.columns.pointers import PendingCopies
from rankfeed.loading.batch_builder import BatchBuilder, BatchResult
from rankfeed.plan import Schedule

#: Bytes and number of small batches that are copied ahead: threads that are woken for one after the other take
#: longer for that than for the copies.
_SMALL_BYTES, _MAX_SMALL = 8 << 20, 64


def copy_ahead(
    builder: BatchBuilder, schedule: Schedule, num_workers: int, prefetch_factor: int
) -> Iterator[BatchResult]:
    """The batches of rows that are only copied, built in the thread that iterates, except for the copies.

    Each worker is a thread that copies ``prefetch_factor`` batches ahead, more of small ones. Without workers one
    thread copies one batch ahead. While a batch is waited for, the thread that iterates copies as well.
    """
    depth = num_workers * prefetch_factor or 1
    #: Batches whose copies were begun; at last, none, and those that an error left behind.
    pending: deque[tuple[list[BatchResult], PendingCopies]] = deque()
    results, all_copied = list[BatchResult](), True
    begun, error = 0, None
    try:
        while pending or begun < len(schedule):
            if pending:
                results, copies = pending[0]
                all_copied = copies.wait()
                pending.popleft()
                if error is not None and not results:
                    raise error
                first = results[0]
                source = first.seconds.source + copies.seconds
                results[0] = first._replace(seconds=first.seconds._replace(source=source))
                del first
                results.reverse()
            ahead = sum(len(batches) for batches, _ in pending)
            size = builder.step_bytes
            small = min(_MAX_SMALL, _SMALL_BYTES // size) if size else 0
            most = max(depth, small) if ahead <= small // 2 else depth
            while begun < len(schedule) and ahead < most:
                begin = list[BatchResult]()
                copies = PendingCopies(max(1, num_workers))
                pending.append((begin, copies))
                try:
                    begin += builder.first_steps(schedule, range(begun, len(schedule)), copies)
                except Exception as raised:  # the batches before it are delivered first
                    reraise_interrupt(raised)
                    error, begun = raised, len(schedule)
                    break
                begun, ahead = begun + len(begin), ahead + len(begin)
                del begin
            while results:  # none is held that the consumer is done with
                # A step whose copy failed fails again, after those before it.
                yield results.pop() if all_copied else builder.build_step(schedule, results.pop().step)
    finally:  # also if the iteration is left: the memory of batches that are dropped is used again
        for _, copies in pending:
            copies.wait()

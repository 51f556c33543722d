"""Where iterations begin."""

from rankfeed.integrations.shared_epoch import SharedEpoch
from rankfeed.plan import Cursor


def test_each_iteration_of_a_rank_begins_the_next_epoch_unless_one_is_set() -> None:
    epochs = SharedEpoch()
    assert [epochs.begin(rank=rank).epoch for rank in (0, 0, 1)] == [0, 1, 0]
    epochs.set(Cursor(epoch=5))
    assert (epochs.begin(rank=0).epoch, epochs.next(rank=0).epoch) == (5, 6)
    epochs.set(Cursor(epoch=7), every=True)
    assert [epochs.begin(rank=0).epoch for _ in range(2)] == [7, 7]

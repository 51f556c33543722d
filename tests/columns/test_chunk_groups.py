"""Which rows of which chunks a batch consists of."""

from __future__ import annotations

import bisect
import random
from collections import Counter
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import rankfeed.columns.chunk_groups
from rankfeed._util.native import native_library
from rankfeed.columns.chunk_groups import by_chunk


@pytest.mark.parametrize("library", ["native", "numpy"])
@given(sizes=st.lists(st.integers(0, 5), min_size=1, max_size=70).filter(any), draws=st.randoms())
def test_by_chunk_groups_each_row_id_under_its_chunk(library: str, sizes: list[int], draws: random.Random) -> None:
    starts = np.cumsum([0, *sizes])
    ids = np.array([draws.randrange(int(starts[-1])) for _ in range(draws.choice([0, 1, 3, 200]))], np.int64)
    with pytest.MonkeyPatch.context() as patch:
        if library == "numpy":
            patch.setattr(rankfeed.columns.chunk_groups, "native_library", lambda: None)
        elif native_library() is None:
            pytest.skip("needs the native library")
        # Sources may pass any view.
        groups: Any = by_chunk(np.repeat(ids, 2)[::2], starts)
    result = {}
    for chunk, rows, slots in groups:
        for slot, row in zip(range(len(ids)) if slots is None else slots.tolist(), rows.tolist(), strict=True):
            assert slot not in result
            result[slot] = chunk, row
    chunks = [bisect.bisect_right(starts.tolist(), row) - 1 for row in ids.tolist()]
    expected = [(chunk, row - int(starts[chunk])) for chunk, row in zip(chunks, ids.tolist(), strict=True)]
    assert [result[slot] for slot in range(len(ids))] == expected
    assert groups.numbers == (sorted(Counter(chunks)) if chunks else [int(np.argmax(np.array(sizes) > 0))])
    if groups.part is not None:
        assert [groups.numbers[item] for item in groups.part] == chunks

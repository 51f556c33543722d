"""How numbers, sizes, bars, lengths and values of samples are shown."""

from typing import Any

import numpy as np
import pytest

from rankfeed.cli.lengths import edges_of, runs, summarize
from rankfeed.cli.options import parse_options
from rankfeed.cli.output import clean
from rankfeed.cli.render import count_of, format_bar, format_bytes, format_value, value_as_json


def test_counts_have_their_noun_and_sizes_their_unit() -> None:
    counts = [count_of(1, "ledger"), count_of(1200, "sample"), count_of(2, "launch")]
    assert counts == ["1 ledger", "1,200 samples", "2 launches"]
    assert [format_bytes(size) for size in (1, 512, 3 << 20)] == ["1 byte", "512 bytes", "3 MiB"]
    assert [format_bar(share, 5) for share in (0.5, 0.0001, 0)] == ["██▌", "▏", ""]


@pytest.mark.parametrize(
    ("value", "shown"),
    [
        (b"RIFF" + bytes(1000), "1,004 bytes  52 49 46 46 00 00 00 00 00 00 00 00 00 00 00 00 ..."),
        (np.arange(12, dtype=np.int32).reshape(6, 2), "int32[6, 2]  0 1 2 3 4 5 6 7 ..."),
        ("two\nlines", "'two\\nlines'"),
        (np.float32(0.25), "0.25"),
    ],
)
def test_a_value_is_one_line(value: Any, shown: str) -> None:
    assert format_value(value) == shown


def test_values_are_json() -> None:
    found = value_as_json(np.array([1.5, np.inf], np.float32))
    assert found == {"dtype": "float32", "shape": [2], "first": [1.5, "inf"]}
    assert value_as_json(b"abc") == {"bytes": 3, "head": "616263"}
    assert value_as_json(np.int64(3)) == 3


def test_text_from_data_moves_no_cursor() -> None:
    assert clean("[red]\x1b[31m").plain == "[red]\\x1b[31m"


def test_options_of_a_format_are_json_or_text() -> None:
    assert parse_options(["version=3", "filter=label > 1"]) == {"version": 3, "filter": "label > 1"}


def test_lengths_are_summarized_from_runs_of_any_dataset() -> None:
    assert [len(ids) for ids in runs(100)] == [64, 36]
    ids = np.concatenate(list(runs(10**12)))
    assert (len(ids), len(np.unique(ids))) == (4096, 4096)
    found = summarize(np.array([1, 1, 2, 4]))
    assert (found["mean"], found["quantiles"]["50%"]) == (2.0, 1)
    assert found["histogram"][:2] == [{"from": 1, "to": 1, "count": 2}, {"from": 2, "to": 2, "count": 1}]
    assert edges_of(3, 96, 50) == [*range(0, 101, 10)]
    assert edges_of(0, 3000, 9) == [0, *(1 << power for power in range(13))]

"""Packed sequences of tokens are compared by their shingles."""

import random
from collections import Counter
from dataclasses import replace
from typing import Any

import numpy as np

from rankfeed.diagnostics.deliveries import LoaderTraits
from rankfeed.diagnostics.doctor.diagnosis import Tokens, judge_tokens
from rankfeed.diagnostics.doctor.rows import shingles_of

FACTS: dict[str, Any] = {"traits": LoaderTraits(2), "ranks": 2, "batch": 4, "where": "epoch 0"}


def packed(documents: int, parts: int, *, forgets: bool = False, half: bool = False, seed: int = 1) -> Tokens:
    """Documents dealt to `parts` packers, each cutting its stream of tokens into sequences of 64."""
    tokens = [np.random.default_rng(index).integers(0, 30000, 100 + index % 300) for index in range(documents)]
    order = list(range(documents))
    random.Random(seed).shuffle(order)
    shingles, count = [Counter[Any]() for _ in range(-(-parts // 2))], 0
    for part in range(parts):
        mine = order if forgets else order[part::parts]
        if half:
            mine = mine[::2]
        stream = np.concatenate([tokens[index] for index in mine])
        rows = [stream[start : start + 64] for start in range(0, len(stream) - 63, 64)]
        shingles[part // 2].update(key for row in rows for key in shingles_of(row))
        count += 64 * len(rows)
    return Tokens(shingles, count, 64)


def test_missing_or_repeated_documents_in_packed_sequences_are_found_by_token_shingles() -> None:
    control = packed(400, 1)
    judged = {
        "sound": judge_tokens(control, packed(400, 4), **FACTS),
        "in another order": judge_tokens(control, packed(400, 4, seed=2), **FACTS),
        "forgotten": judge_tokens(control, packed(400, 4, forgets=True), **FACTS),
        "half": judge_tokens(control, packed(400, 4, half=True), **FACTS),
        "few": judge_tokens(packed(4, 1), packed(4, 4), **FACTS),
    }
    assert {name: finding.severity for name, finding in judged.items()} == {
        "sound": "note",
        "in another order": "note",
        "forgotten": "error",
        "half": "error",
        "few": "unproven",
    }
    assert judged["half"].code == "missing-samples"
    assert judged["forgotten"].code == "duplicated-by-workers"
    forgets_rank = replace(control, by_rank=control.by_rank * 2, count=2 * control.count)
    assert judge_tokens(control, forgets_rank, **FACTS).code == "not-sharded-by-rank"

"""Packed sequences of tokens, which contain other samples in each configuration: compared by their shingles."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from rankfeed.diagnostics.deliveries import LoaderTraits
from rankfeed.diagnostics.doctor.records import RowKey
from rankfeed.diagnostics.doctor.sample_values import is_repetitive
from rankfeed.diagnostics.findings import Finding, finding

#: Shares of shingles: packing explains less than the first, and more than the second above that is a disease.
_EXPLAINED, _DISEASED = 0.2, 0.2


@dataclass(frozen=True)
class Tokens:
    """An epoch of token sequences: sampled shingles of each rank, number of tokens, longest sequence (L)."""

    by_rank: Sequence[Counter[RowKey]]
    count: int
    length: int

    @cached_property
    def shingles(self) -> Counter[RowKey]:
        return sum(self.by_rank, Counter())


def judge_tokens(
    control: Tokens, run: Tokens, traits: LoaderTraits, *, ranks: int, batch: int, where: str
) -> Finding:
    """Packed sequences, whose content changes with the configuration: compared by their shingles.

    ``batch`` is the largest number of sequences in a batch.
    """
    excess = (run.shingles - control.shingles).total() / max(1, run.shingles.total())
    lack = (control.shingles - run.shingles).total() / max(1, control.shingles.total())
    explained = max(_EXPLAINED, 0.1 + 12 / max(run.length, 12))  # a cut sequence loses 11 of its shingles
    open_ends = ranks * max(traits.workers, 1) * run.length
    rest = open_ends * (batch if traits.drops else 1)
    text = (
        f"{where}: {run.count} tokens, the control {control.count}; "
        f"{excess:.0%} of the 12-token sequences repeat, {lack:.0%} are missing"
    )
    if control.count < 20 * open_ends:
        what = "too few tokens to compare packed sequences"
        return finding("not-counted", "unproven", what, f"{text}; {20 * open_ends} are needed")
    if not is_repetitive(control.shingles) and max(excess, lack) > explained + _DISEASED:
        if lack >= excess:
            return finding("missing-samples", "error", "a large part of the tokens is not delivered", text)
        within = sum((each - control.shingles).total() for each in run.by_rank) / run.shingles.total()
        code = "duplicated-by-workers" if within > explained and traits.workers > 1 else "not-sharded-by-rank"
        return finding(code, "error", "packed sequences contain the same tokens several times", text)
    if max(excess, lack) < explained and abs(run.count - control.count) <= rest:
        what = "tokens are complete up to the last incomplete sequence of each worker"
        return finding("packed-sequences", "note", what, text)
    return finding("not-counted", "unproven", "packed sequences could not be compared with the control", text)

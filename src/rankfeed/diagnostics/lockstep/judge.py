"""Who holds the others up: from the last words of all ranks to a verdict. Arithmetic, without a store or a clock.

No time of one machine is compared with that of another: each rank says for how many seconds of its own it has
stood still, and the judge counts for how many seconds of its own it has heard nothing new of it.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

from rankfeed.diagnostics.lockstep.words import Verdict, Word

#: Seconds that a better reason is waited for where a collective failed: it does so for all, and one is the cause.
SETTLE = 3.0
#: The same where a rank is known to have left: a process that is gone is noticed sooner.
_SETTLE_LEFT = 1.5
#: Seconds without a word, of which there is one a second, that make it likely that none will come.
_UNHEARD = 5.0


@dataclass(frozen=True)
class Ranks:
    """What is known of all ranks.

    Attributes:
        words: the last of each that was heard.
        silent: seconds since then.
        limit: seconds that ranks may wait for another.
        uneven: whether ranks may take different numbers of steps.
    """

    words: Mapping[int, Word]
    silent: Mapping[int, float]
    limit: float
    uneven: bool = False

    def __iter__(self) -> Iterator[Word]:
        return iter(self.words.values())

    def unheard(self, word: Word) -> bool:
        """Whether it is likely that it says nothing more."""
        return self.silent[word.rank] >= min(_UNHEARD, 0.75 * self.limit)

    def idle(self, word: Word) -> float:
        """For how many seconds it has got no further, as far as is known."""
        return word.still + self.silent[word.rank]


def judge(ranks: Ranks) -> Verdict | None:
    """Find the rank that the others wait for in vain, or will.

    Args:
        ranks: the last words of all ranks, those that never spoke included.

    Returns:
        The most certain reason that there is; None where all is well, or may be.

    Examples:
        >>> first = Word(0, "a", 7, lap=1, step=5, state="step")
        >>> other = Word(1, "b", 8, lap=1, step=4, done=(1, 4))
        >>> judge(Ranks({0: first, 1: other}, {0: 0.0, 1: 0.0}, limit=300.0)).summary
        'rank 1 (host b, process 8) ran out of data after 4 steps of pass 1, and rank 0 has begun step 5'
    """
    kinds: tuple[Callable[[Ranks], Verdict | None], ...] = (_failed, _uneven, _gone, _broken, _stuck)
    return next((found for kind in kinds if (found := kind(ranks))), None)


def _failed(ranks: Ranks) -> Verdict | None:
    failed = [word for word in ranks if word.state == "failed" and not word.collective]
    if not failed:
        return None
    first = max(failed, key=ranks.idle)
    return Verdict(first.rank, f"{first.who} failed {first.at}: {first.error}", first.lines, failed=True)


def _gone(ranks: Ranks) -> Verdict | None:
    last = max(ranks, key=lambda word: (word.lap, word.step, -word.rank))
    for accuser in ranks:
        for rank, how in accuser.missing.items():
            word = ranks.words[rank]
            # One that has come to an end may go, as long as nobody begins another pass.
            if how != "gone" or word.closed or word.state == "failed":
                continue
            if word.inside or (word.beat and last.lap > word.lap):
                return Verdict(
                    rank,
                    f"{word.who} is gone: its process ended without a word; it was last heard of {word.at}, and "
                    f"rank {last.rank} has come to step {last.step} of pass {last.lap}",
                    remedy="see the end of its log, and the kernel's (dmesg) for the killer of processes that "
                    "take too much memory",
                )
    return None


def _uneven(ranks: Ranks) -> Verdict | None:
    if ranks.uneven:
        return None
    most: dict[int, tuple[int, int]] = {}  # by pass: steps that were begun in it, and the rank that did
    for word in ranks:
        for lap, steps in ((word.lap, word.step), word.done):
            most[lap] = max(most.get(lap, (0, 0)), (steps, -word.rank))
    last = max(most)
    for word in sorted(ranks, key=lambda word: (word.done, word.rank)):
        lap, steps = word.done
        if lap and most[lap][0] > steps:
            more, other = most[lap]
            return Verdict(
                word.rank,
                f"{word.who} {_ended(word)} after {steps} steps of pass {lap}, and rank {-other} has begun step "
                f"{more}",
                remedy="let all ranks take as many steps (rankfeed.Loader and rankfeed.DistributedSampler do); "
                "uneven=True where no step waits for another rank",
            )
        if word.closed and word.lap == lap < last and most[last][0]:
            return Verdict(
                word.rank,
                f"{word.who} is through after pass {lap}, and rank {-most[last][1]} has begun pass {last}",
            )
    return None


def _broken(ranks: Ranks) -> Verdict | None:
    failed = [word for word in ranks if word.state == "failed" and word.still >= _SETTLE_LEFT]
    if not failed:
        return None
    first = max(failed, key=ranks.idle)
    told = f"and a collective of rank {first.rank} failed {first.at}: {first.error}"
    # An error, too, is seen to leave the loop before it is told: that follows at once.
    away = [
        word
        for word in ranks
        if word.state != "failed"
        and (word.closed or (word.state == "left" and first.was != "ended"))
        and word.place[:2] <= first.place[:2]
        and ranks.idle(word) >= _SETTLE_LEFT
    ]
    if away:
        word = min(away, key=lambda word: (not word.closed, word.place, word.rank))
        return Verdict(word.rank, f"{word.who} {_ended(word)} after {word.step} steps of pass {word.lap}, {told}")
    if first.still < SETTLE:
        return None
    silent = [word for word in ranks if ranks.unheard(word)]
    if silent:
        word = max(silent, key=lambda word: ranks.silent[word.rank])
        return _unheard(ranks, word, told)
    return Verdict(
        first.rank,
        f"a collective of {first.who} failed {first.at}: {first.error}; no rank is known to be the cause",
        first.lines,
        failed=True,
    )


def _stuck(ranks: Ranks) -> Verdict | None:
    # With uneven steps, whoever is out of its loop is not waited for.
    within = [
        word for word in ranks if word.inside or (word.state != "failed" and not (ranks.uneven and word.beat))
    ]
    if not any(word.inside for word in within):
        return None
    least, limit = min(word.place for word in within), ranks.limit
    # Somebody is lost in its pass: then a step that goes on for so long is one that waits. Who has left its loop
    # proves nothing: others may be busy for long in the same last step, with a checkpoint for one.
    away = any(word.inside and ranks.silent[word.rank] >= limit for word in within)
    waiting, behind = [], []
    for word in within:
        stands = word.waits >= limit or (word.state == "step" and (word.place > least or away))
        if ranks.unheard(word):
            blame = ranks.idle(word) >= limit
        elif stands and word.still >= limit and not word.closed:
            waiting.append(word)
            continue
        else:  # who has stood in a call that waits for half as long is about to be one of the waiting
            blame = word.still >= limit and word.waits < limit / 2
        if blame and word.place == least:
            behind.append(word)
    if not waiting:
        return None
    first = max(waiting, key=lambda word: (word.place, -word.rank))
    if not behind:
        return _at_odds(waiting, within)
    # Of those that are equally far back, one that is not heard of any more, or has left; or that stands longest.
    word = max(behind, key=lambda word: (ranks.unheard(word), word.state == "left", ranks.idle(word)))
    if not (word.inside or first.inside):
        return None
    told = f"and rank {first.rank} has waited for {first.still:.0f} s, {first.at}"
    if ranks.unheard(word) and not word.closed:
        return _unheard(ranks, word, told)
    return Verdict(
        word.rank,
        f"{word.who} has been {word.at} for {ranks.idle(word):.0f} s, {told}",
        word.lines,
        f"if it may take so long: limit= of more than {ranks.limit:.0f} s",
    )


def _unheard(ranks: Ranks, word: Word, told: str) -> Verdict:
    seconds = ranks.silent[word.rank]
    if not word.beat:
        return Verdict(word.rank, f"rank {word.rank} has not come to its first step after {seconds:.0f} s, {told}")
    stopped = any(each.missing.get(word.rank) == "stopped" for each in ranks)
    why = (
        "its process is stopped (SIGSTOP, or a debugger)"
        if stopped
        else "its process or its host hangs or is gone"
    )
    return Verdict(
        word.rank,
        f"{word.who} has not been heard of for {seconds:.0f} s: {why}; it was last heard of {word.at}, {told}",
        word.lines,
    )


def _at_odds(waiting: list[Word], within: list[Word]) -> Verdict | None:
    """All wait for one another, at different places."""
    if len(waiting) < len(within):
        return None
    places = [tuple(word.lines) for word in waiting]
    word = min(waiting, key=lambda word: (places.count(tuple(word.lines)), word.rank))
    other = next((each for each in waiting if each.lines != word.lines), None)
    if other is None:  # the same place: one long computation of all
        return None
    return Verdict(
        word.rank,
        f"{word.who} and rank {other.rank} wait for each other in different collectives, {word.at}, for "
        f"{word.still:.0f} s",
        [*word.lines, f"and of rank {other.rank}:", *other.lines],
    )


def _ended(word: Word) -> str:
    return "left its loop" if word.state == "left" else "ran out of data"

"""How a run went, from snapshots of ``loader.stats()`` that a job wrote down, as a page."""

import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Annotated

import msgspec
import numpy as np

from rankfeed.diagnostics.report.binning import picks
from rankfeed.diagnostics.report.page import Figure, Lines, Page, Part, Series, Word
from rankfeed.errors import CorruptError, SourceError
from rankfeed.storage.commit import decodable

#: Snapshots of a chart, ranks with a line of their own, and the share of waiting that is worth a look.
_POINTS, _RANKS, _WAITED = 120, 4, 0.1

Count = Annotated[int, msgspec.Meta(ge=0, le=1 << 62)]
Seconds = Annotated[float, msgspec.Meta(ge=0, le=1e12)]
#: What only grows while a loader lives.
_COUNTED = (
    *("steps", "samples", "seconds", "waited_seconds"),
    *("padding_bytes", "padded_bytes", "cache_hits", "cache_lookups"),
)
#: Less than any clock tells apart: no rate is worked out over it.
_INSTANT = 1e-9


@decodable
class Snapshot(msgspec.Struct, frozen=True):
    """What of ``loader.stats()`` is drawn: counts since the loader was made. Other fields are passed over."""

    steps: Count
    samples: Count
    seconds: Seconds
    waited_seconds: Seconds
    padding_share: Annotated[float, msgspec.Meta(ge=0, le=1)] = 0.0
    padding_bytes: Count = 0
    padded_bytes: Count = 0
    private_bytes: Count | None = None
    cache_hits: Count = 0
    cache_lookups: Count = 0


def read_stats(path: str | os.PathLike[str]) -> list[Snapshot]:
    """Snapshots from a file of JSON lines, one line each.

    Raises:
        SourceError: there is no such file, or nothing in it.
        CorruptError: a line is no snapshot; one that was cut off at the end is passed over.
    """
    try:
        lines = Path(path).read_bytes().splitlines(keepends=True)
    except OSError as error:
        raise SourceError("the snapshots cannot be read", found=error.strerror or error, where=path) from error
    found = []
    for number, line in enumerate(lines):
        if not line.strip():
            continue
        try:
            found.append(msgspec.json.decode(line, type=Snapshot))
        except (msgspec.DecodeError, RecursionError) as error:
            if number == len(lines) - 1 and not line.endswith(b"\n"):
                break  # the job was killed while it wrote
            raise CorruptError(
                "this is no snapshot of a loader",
                expected="a line of json.dumps(loader.stats())",
                found=str(error),
                where=f"{path}, line {number + 1}",
            ) from error
    if not found:
        raise SourceError("there are no snapshots", expected="lines of json.dumps(loader.stats())", where=path)
    return found


def of_stats(snapshots: Mapping[str, Sequence[Snapshot]], *, title: str = "A run") -> Page:
    """The page of a run's rates, waiting, memory, padding and cache.

    Args:
        snapshots: of each rank by name, at least one each, in the order in which they were made.
        title: of which run.

    Examples:
        >>> two = [Snapshot(10, 320, 1.0, 0.1), Snapshot(20, 640, 2.0, 0.3)]
        >>> page = of_stats({"rank 0": two})
        >>> page.word, page.verdict
        ('look', 'The consumer waited for data for 15% of the time: loading is what limits this job.')
    """
    snapshots = {name: _through(each) for name, each in snapshots.items()}
    last = {name: each[-1] for name, each in snapshots.items()}
    seconds = sum(each.seconds for each in last.values())
    waited = sum(each.waited_seconds for each in last.values()) / seconds if seconds > _INSTANT else 0.0
    slow = waited > _WAITED
    limits = ": loading is what limits this job." if slow else ", so loading does not hold this job up."
    word: Word = "look" if slow else "good"
    hits, lookups = (
        sum(getattr(each, name) for each in last.values()) for name in ("cache_hits", "cache_lookups")
    )
    rate = sum(each.samples / each.seconds for each in last.values() if each.seconds > _INSTANT)
    facts = {
        "ranks with figures": f"{len(last):,}",
        "samples": f"{sum(each.samples for each in last.values()):,}",
        "steps of a rank": f"{max(each.steps for each in last.values()):,}",
        "samples a second, all ranks": f"{rate:,.0f}",
        "time waited": f"{waited:.1%}",
        "padding": f"{max(each.padding_share for each in last.values()):.1%}",
    }
    figures: list[Figure] = [
        _lines(snapshots, "Samples a second", "Of each rank, between two snapshots.", "samples a second", _rate),
        _lines(
            snapshots,
            "Time waited for data",
            "Share of the time between two snapshots in which the training loop waited for a batch.",
            "% of the time",
            lambda before, now: _share(now.waited_seconds - before.waited_seconds, now.seconds - before.seconds),
        ),
        _lines(
            snapshots,
            "Padding",
            "Share of ragged columns that was padding.",
            "% of bytes",
            _padding,
        ),
    ]
    if any(each.private_bytes for each in last.values()):
        text = "Memory that a rank's process has to itself. A slope that goes on is a leak."
        figures.append(_lines(snapshots, "Private memory", text, "MiB", _memory))
    if lookups:
        facts["cache hits"] = f"{hits / lookups:.1%}"
        figures.append(_lines(snapshots, "Cache hits", "Of the reads between two snapshots.", "% of reads", _hits))
    return Page(
        title=title,
        word=word,
        verdict=f"The consumer waited for data for {waited:.0%} of the time{limits}",
        facts=facts,
        findings=[],
        parts=[Part("Rates and waiting", figures)],
    )


def _through(snapshots: Sequence[Snapshot]) -> list[Snapshot]:
    """Counts over all loaders of a rank: one that was made anew, to resume, counts from 0.

    Examples:
        >>> [each.samples for each in _through([Snapshot(5, 50, 1.0, 0.0), Snapshot(2, 20, 0.5, 0.0)])]
        [50, 70]
    """
    found: list[Snapshot] = []
    done = dict.fromkeys(_COUNTED, 0)
    for before, each in zip([snapshots[0], *snapshots], snapshots, strict=False):
        if each.steps < before.steps or each.seconds < before.seconds:
            done = {name: getattr(found[-1], name) for name in _COUNTED}
        counts = {name: done[name] + getattr(each, name) for name in _COUNTED}
        found.append(msgspec.structs.replace(each, **counts))
    return found


def _rate(before: Snapshot, now: Snapshot) -> float | None:
    passed, came = now.seconds - before.seconds, now.samples - before.samples
    return came / passed if passed > _INSTANT and came >= 0 else None  # a loader made anew counts from 0


def _share(part: float, whole: float) -> float | None:
    return 100 * min(1.0, max(0.0, part / whole)) if whole > _INSTANT else None


def _memory(before: Snapshot, now: Snapshot) -> float | None:
    return now.private_bytes / 2**20 if now.private_bytes else None


def _hits(before: Snapshot, now: Snapshot) -> float | None:
    return _share(now.cache_hits - before.cache_hits, now.cache_lookups - before.cache_lookups)


def _padding(before: Snapshot, now: Snapshot) -> float | None:
    """Between the two where bytes are told, else so far."""
    if not now.padded_bytes:
        return 100 * now.padding_share
    return _share(now.padding_bytes - before.padding_bytes, now.padded_bytes - before.padded_bytes)


def _lines(
    snapshots: Mapping[str, Sequence[Snapshot]],
    title: str,
    caption: str,
    unit: str,
    value: Callable[[Snapshot, Snapshot], float | None],
) -> Lines:
    """A line for each rank; of many ranks the least, the median and the most. At the same seconds for all."""
    zero = Snapshot(0, 0, 0.0, 0.0)
    most = max(len(each) for each in snapshots.values())
    chosen = picks(most, _POINTS).tolist()
    longest = max(snapshots.values(), key=len)
    table = np.full((len(snapshots), len(chosen)), np.nan)
    for row, each in enumerate(snapshots.values()):
        for column, place in enumerate(chosen):
            if place < len(each):
                before = each[chosen[column - 1]] if column else zero
                found = value(before, each[place])
                table[row, column] = np.nan if found is None else found
    if len(snapshots) <= _RANKS:
        series = [Series(name, _rounded(table[row])) for row, name in enumerate(snapshots)]
    else:
        caption += f" Of {len(snapshots)} ranks: least, median and most."
        ordered = np.sort(table, axis=0)  # what is not a number comes last
        known = np.maximum(1, (~np.isnan(table)).sum(axis=0))
        at = {"least": known * 0, "median": (known - 1) // 2, "most": known - 1}
        series = [Series(name, _rounded(ordered[place, np.arange(len(chosen))])) for name, place in at.items()]
    if len(chosen) < most:
        caption += f" {len(chosen)} of {most:,} snapshots are shown."
    x = [round(longest[place].seconds, 3) for place in chosen]
    return Lines(title=title, caption=caption, axis="seconds", x=x, series=series, unit=unit)


def _rounded(values: np.ndarray[tuple[int], np.dtype[np.float64]]) -> list[float | None]:
    return [None if np.isnan(value) else round(float(value), 4) for value in values]

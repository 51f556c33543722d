"""Lanes, the independent streams of blocks in an epoch: how positions visit them, and the rows of a step by rank.

Position p belongs to round ``p // lanes``; each round visits every lane once. Version 1 visits them round robin.
Version 2 scrambles the digits of the lanes, keyed by the round: any aligned run of 2**k positions of a round
visits each of the 2**k equal intervals of lanes once. So the rows of a step are spread evenly over the lanes,
whatever its size, and ranks that divide the rows by lanes read few of them. (With a free permutation of the lanes,
which has no such property, ranks read 3 to 6 times as many blocks.)

Source: A. Owen, "Randomly permuted (t,m,s)-nets and (t,s)-sequences" (1995): nested scrambling, here of the van
der Corput sequence.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from rankfeed.plan.permutation import Key, mix, permutation

Int64 = npt.NDArray[np.int64]

#: More lanes would take memory that grows with their number.
_MAX_LANES = 2**20
#: Parts of the data in which samples are assumed to be alike.
_STRATA = 8
#: Elements of the arrays of one pass over several steps.
_PASS_ELEMENTS = 2**18


def lanes_in_use(lanes: int, num_samples: int) -> int:
    """Lanes that version 2 uses of those that are asked for."""
    return min(lanes, num_samples, _MAX_LANES)


@dataclass(frozen=True)
class RoundRobinLanes:
    """The lanes of version 1, and of the orders that know no windows."""

    count: int

    def visit(self, epoch: int, positions: Int64) -> tuple[Int64, Int64]:
        """The lane of each position, and its place in the lane."""
        if self.count == 1:
            return np.zeros_like(positions), positions
        # numpy vectorises floor division, but not the remainder
        places = positions // self.count
        return positions - places * self.count, places

    def arrange(self, epoch: int, starts: Int64, size: int, first: int, last: int) -> tuple[Int64, Int64]:
        """Lanes and places of the rows ``first`` to ``last`` of steps of ``size`` positions: int64 [steps, rows].

        The rows of a step are sorted by lane and place.
        """
        if self.count == 1:
            return self.visit(epoch, starts[:, None] + np.arange(first, last))
        rows = [_sorted_by_lane(start, start + size, self.count, first, last) for start in starts.tolist()]
        return self.visit(epoch, np.stack(rows))

    def positions(self, epoch: int, lanes: Int64, places: Int64) -> Int64:
        """The positions that are at places of lanes: the inverse of `visit`."""
        return places * self.count + lanes


@dataclass(frozen=True)
class ScrambledLanes:
    """The lanes of version 2, in groups of neighbours whose rows are mixed before ranks divide them."""

    num_samples: int
    count: int
    groups: int
    seed: int

    def visit(self, epoch: int, positions: Int64) -> tuple[Int64, Int64]:
        """The lane of each position, and its place in the lane."""
        rounds = positions // self.count
        index = positions - rounds * self.count
        if self.count & (self.count - 1):
            lanes = permutation(index, self.count, self._key(epoch), tweaks=mix(rounds.view(np.uint64)))
        else:
            lanes = _scrambled(rounds, index, self.count, self._key(epoch))
        if self.num_samples % self.count:  # the last round visits the lanes that have one sample more
            lanes = np.where(rounds == self.num_samples // self.count, index, lanes)
        return lanes, rounds

    def arrange(self, epoch: int, starts: Int64, size: int, first: int, last: int) -> tuple[Int64, Int64]:
        """Lanes and places of the rows ``first`` to ``last`` of steps of ``size`` positions: int64 [steps, rows].

        The rows of a step are sorted by groups of lanes, and mixed inside a group by a keyed bijection. All rows
        together, which nothing divides, are in the order of their positions.
        """
        if last - first == size:
            return self.visit(epoch, starts[:, None] + np.arange(size))
        several = max(1, _PASS_ELEMENTS // (2 * self.count + last - first))
        parts = [
            self._arrange(epoch, starts[begin : begin + several], size, first, last)
            for begin in range(0, len(starts), several)
        ]
        lanes, places = zip(*parts, strict=True)
        return np.concatenate(lanes), np.concatenate(places)

    def unit_order(self, units: int, epoch: int) -> Int64:
        """The units in the order in which the lanes read them, one lane after the other: a permutation, int64.

        What is close in storage is often alike. So the units are divided into eight strata of neighbours, and
        units that are read together are of different ones; inside a stratum the order is free. Batches of data
        sorted by label get a third more classes than with a free order of all.
        """
        stratum = np.empty(units, np.uint8)
        for places in _passes(units):
            stratum[places] = self._stratum(places, units, epoch, "units")
        order = np.empty(units, np.int64)
        first = 0
        for index in range(_STRATA):
            places = np.flatnonzero(stratum == index)
            key = Key.of("stratum", self.seed, epoch, index)
            order[places] = first + permutation(np.arange(len(places)), len(places), key)
            first += len(places)
        return order

    def first_rows(self, sizes: Int64, epoch: int) -> Int64:
        """The row at which the reading of each unit begins, of units in the order in which lanes read them: int64.

        A unit is read from this row to its end, and then from its start. Otherwise lanes that read units of one
        size would be at the same depth of all, and batches of data that are sorted inside each block would be of
        one kind. Lanes of a group are an eighth of a unit apart, also if their units begin at different times.
        """
        rows, ends = np.empty_like(sizes), sizes.cumsum()
        short, longer = divmod(self.num_samples, self.count)
        key = Key.of("rows", self.seed, epoch)
        for places in _passes(len(sizes)):
            lanes, groups = self._lanes_of_units(places, len(sizes))
            eighth, rest = np.divmod(sizes[places], _STRATA)
            words = mix(groups.view(np.uint64) + np.array(key.rounds[0], np.uint64))
            shift = words % np.maximum(1, eighth).view(np.uint64)
            stratum = self._stratum(places, len(sizes), epoch, "rows")
            begin_in_lane = ends[places] - sizes[places] - lanes * short - np.minimum(lanes, longer)
            first = begin_in_lane + stratum * eighth + stratum * rest // _STRATA + shift.view(np.int64)
            rows[places] = first % np.maximum(1, sizes[places])
        return rows

    def _lanes_of_units(self, places: Int64, units: int) -> tuple[Int64, Int64]:
        """The lane that reads the unit at each place, and the group of the lane; as if units had one size."""
        lanes = places * self.count // units
        return lanes, lanes * self.groups // self.count

    def _stratum(self, places: Int64, units: int, epoch: int, purpose: str) -> Int64:
        """One of eight numbers for units: different in the lanes of a group, or in the turns of a lane."""
        lanes_apart = min(_STRATA, 1 << (self.count // self.groups).bit_length() - 1)
        units_apart = _STRATA // lanes_apart
        lane, group = self._lanes_of_units(places, units)
        of_lane = (lane + group * self.count // -self.groups) % lanes_apart
        turn, of_unit = np.divmod(places - -(-lane * units // self.count), units_apart)
        major = _scrambled(group, of_lane, lanes_apart, Key.of("strata", self.seed, epoch, purpose))
        minor = _scrambled(lane * units + turn, of_unit, units_apart, Key.of("turns", self.seed, epoch, purpose))
        return major * units_apart + minor

    def positions(self, epoch: int, lanes: Int64, places: Int64) -> Int64:
        """The positions that are at places of lanes: the inverse of `visit`, which computes complete rounds."""
        rounds, index = np.unique(places, return_inverse=True)
        of_round = rounds[:, None] * self.count + np.arange(self.count)
        visited, _ = self.visit(epoch, np.minimum(of_round, self.num_samples - 1))
        visited = np.where(of_round < self.num_samples, visited, self.count)
        index = index.reshape(lanes.shape)
        return rounds[index] * self.count + visited.argsort(axis=1)[index, lanes]

    def _key(self, epoch: int) -> Key:
        return Key.of("lanes", self.seed, epoch)

    def _arrange(self, epoch: int, starts: Int64, size: int, first: int, last: int) -> tuple[Int64, Int64]:
        count, groups, step = self.count, self.groups, np.arange(len(starts))[:, None]
        # A step consists of the end of a round, complete rounds, and the beginning of a round.
        begin = -(-starts // count)
        complete = np.maximum(0, (starts + size) // count - begin)
        head = np.minimum(begin * count - starts, size)[:, None]
        others = size - complete * count
        # Positions of the incomplete rounds: [steps, the most of a step]; beyond those of a step, unused.
        offset = np.arange(others.max())
        positions = starts[:, None] + offset + np.where(offset < head, 0, (complete * count)[:, None])
        lanes, places = self.visit(epoch, np.minimum(positions, self.num_samples - 1))
        # Sorted by group, and the number of them in each group.
        group = np.where(offset < others[:, None], lanes * groups // count, groups)
        by_group = group.argsort(axis=1, kind="stable")
        lanes, places = (np.take_along_axis(values, by_group, axis=1).ravel() for values in (lanes, places))
        few = np.bincount((group + step * (groups + 1)).ravel(), minlength=len(starts) * (groups + 1))
        few = few.reshape(len(starts), groups + 1)[:, :groups]
        # The group of each row, and its index in the group.
        lane_of_group = -(-np.arange(groups + 1) * count // groups)
        rows = few + complete[:, None] * np.diff(lane_of_group)
        ends = rows.cumsum(axis=1)
        index = np.arange(first, last) + step * size
        flat = (ends + step * size).ravel().searchsorted(index, side="right")
        group = flat - step * groups
        index -= step * size + (ends - rows).ravel()[flat]
        sizes = rows.ravel()[flat]
        tweaks = mix((starts[:, None] * groups + group).view(np.uint64))
        # The most rows of a group: a property of all steps of a size.
        most = min(size, (size // count + 2) * -(-count // groups))
        index = permutation(index, most, self._key(epoch), tweaks=tweaks, sizes=sizes.view(np.uint64))
        # The first rows of a group are those of the incomplete rounds, the others go through its lanes.
        beyond = index - few.ravel()[flat]
        width = np.diff(lane_of_group)[group]
        lane, place = lane_of_group[group] + beyond % width, begin[:, None] + beyond // width
        if len(offset):
            at = step * len(offset) + (few.cumsum(axis=1) - few).ravel()[flat] + index
            is_early = beyond < 0
            lane[is_early], place[is_early] = lanes[at[is_early]], places[at[is_early]]
        return lane, place


def _passes(units: int) -> Iterator[Int64]:
    """The places of units, of some at a time: without large temporary arrays."""
    return (np.arange(first, min(units, first + _PASS_ELEMENTS)) for first in range(0, units, _PASS_ELEMENTS))


def _scrambled(rounds: Int64, index: Int64, lanes: int, key: Key) -> Int64:
    """The nested-scrambled order of a power of two of lanes: a bijection of ``index`` for each round.

    Binary digit j of the index becomes digit ``bits - 1 - j`` of the lane. It is flipped by a random bit that
    depends on the digits below it: the node of a binary tree, numbered as in a heap. A word has 64 of these bits.
    """
    lane = np.zeros_like(index)
    bits = lanes.bit_length() - 1
    counter = (rounds * max(1, lanes >> 6)).view(np.uint64) + np.array(key.rounds[0], np.uint64)
    word = mix(counter)
    for digit in range(bits):
        node = (index & ((1 << digit) - 1)) | (1 << digit)
        if digit >= 6:
            word = mix(counter + (node >> 6).view(np.uint64))
        flip = (word >> (node & 63).view(np.uint64)).view(np.int64) ^ (index >> digit)
        lane |= (flip & 1) << (bits - 1 - digit)
    return lane


def _sorted_by_lane(low: int, high: int, lanes: int, first: int, last: int) -> Int64:
    """Positions ``first`` to ``last`` of the interval [low, high), sorted by lane and place."""
    size, rows = high - low, np.arange(first, last)
    if lanes >= size:  # one position in a lane at most; those after the last lane are in the first ones
        return low + (rows - max(0, low % lanes + size - lanes)) % size
    offsets = (np.arange(lanes) - low) % lanes  # of the first position of each lane
    counts = (size - offsets + lanes - 1) // lanes
    ends = counts.cumsum()
    lane = ends.searchsorted(rows, side="right")
    positions: Int64 = low + offsets[lane] + (rows - (ends - counts)[lane]) * lanes
    return positions

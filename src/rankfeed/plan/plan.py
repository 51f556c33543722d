"""The order of an epoch: position -> sample id, for any size, in constant memory in the number of samples.

The epoch's sequence of samples is cut into ``lanes`` equal runs, and positions visit the lanes in rounds: see
`rankfeed.plan.lanes`. The sequence depends on the kind of shuffle: stored order ("none"), a keyed bijection of all
samples ("global"), or units in a keyed order, with the samples mixed inside windows of each lane ("window"). Units
are blocks, or pieces of blocks that are longer than a lane.
"""

import copy
import hashlib
import json
from collections.abc import Sequence
from typing import Literal, get_args

import numpy as np
import numpy.typing as npt

from rankfeed._util.validate import check_choice, check_int, check_int_array, invalid
from rankfeed.errors import PlanError
from rankfeed.plan.lanes import RoundRobinLanes, ScrambledLanes, lanes_in_use
from rankfeed.plan.permutation import CHUNK, MAX_SIZE, Key, UInt64, mix, permutation

Int64 = npt.NDArray[np.int64]
Shuffle = Literal["none", "global", "window"]

#: Default number of lanes: a property of the order, never derived from the number of ranks.
DEFAULT_LANES: dict[str, int] = {"none": 1, "global": 1, "window": 64}

#: Default window of "window", in samples.
DEFAULT_WINDOW = 65536

#: Version of the windowed order that new plans have. A checkpoint continues in the version it was saved in.
ORDER = 2

#: Units that the rows of a rank come from at least, if the order has as many lanes.
_UNITS_PER_BATCH = 8

#: "window" divides an ``int`` given as ``blocks`` into at most this many blocks.
_MAX_IMPLIED_BLOCKS = 2**20


class Plan:
    """Which sample is read at which position of which epoch.

    Args:
        blocks: number of samples, or the samples in each block (a block is what is read in one piece).
        shuffle: "none", "global" (one keyed bijection of all samples) or "window" (blocks in a keyed order,
            samples mixed inside windows, so that few blocks are open at a time; "global" if one window covers
            all samples).
        seed: any integer; the orders of different (seed, epoch) are unrelated.
        window: approximate number of samples that "window" mixes with each other.
        lanes: independent streams through the epoch; part of the order, so do not derive it from the topology.
            Of a window at most 2**20, and no more than samples, are used.

    Raises:
        ArgumentError: an argument has an invalid type or value.
        PlanError: no samples, more than 2**62 samples, or a block of an invalid size.

    Examples:
        >>> plan = Plan([3, 2, 4], shuffle="window", seed=1, window=4)
        >>> sorted(plan.sample_ids(epoch=0, positions=range(9)).tolist())
        [0, 1, 2, 3, 4, 5, 6, 7, 8]
        >>> plan.sample_ids(0, [7]) == plan.sample_ids(0, range(9))[7]
        array([ True])
    """

    def __init__(
        self,
        blocks: int | Sequence[int] | npt.NDArray[np.integer],
        *,
        shuffle: Shuffle = "global",
        seed: int = 0,
        window: int = DEFAULT_WINDOW,
        lanes: int = 1,
    ) -> None:
        self.shuffle: Shuffle = check_choice("shuffle", shuffle, get_args(Shuffle))
        self.seed = check_int("seed", seed)
        self.window = check_int("window", window, at_least=1)
        self.lanes = check_int("lanes", lanes, at_least=1, at_most=MAX_SIZE)
        self._starts = _block_starts(blocks, self.window if shuffle == "window" else None)
        self.num_samples = int(self._starts[-1])
        if self.num_samples == 0:
            raise PlanError(
                "cannot plan without samples", found="0 samples", remedy="check that the dataset is not empty"
            )
        self._set_order(ORDER)

    def with_order(self, version: int) -> "Plan":
        """This plan in a version of the windowed order: that of a checkpoint. Other orders have one version.

        Raises:
            PlanError: there is no such version.
        """
        if self.shuffle != "window":
            return self
        plan = copy.copy(self)
        plan._set_order(version)
        return plan

    def _set_order(self, version: int) -> None:
        if version not in (1, ORDER):
            raise PlanError(
                "unknown version of the windowed order",
                expected=f"1 to {ORDER}",
                found=version,
                remedy="read it with the version of rankfeed that wrote it",
            )
        self.order = version
        self._sequence: tuple[int, Int64, Int64] | None = None
        self._unit_starts = self._starts
        self._is_global = self.shuffle == "global"
        self._lanes: RoundRobinLanes | ScrambledLanes = RoundRobinLanes(self.lanes)
        if self.shuffle != "window" or version == 1:
            return
        if self.window >= self.num_samples:
            self._is_global, self._lanes = True, RoundRobinLanes(1)
            return
        lanes = lanes_in_use(self.lanes, self.num_samples)
        self._unit_starts = _unit_starts(self._starts, lanes)
        groups = max(1, lanes // self._lanes_of_a_group(lanes))
        self._lanes = ScrambledLanes(self.num_samples, lanes, groups, self.seed)

    def _lanes_of_a_group(self, lanes: int) -> int:
        """The least power of two of lanes whose windows have eight units."""
        sizes = np.diff(self._unit_starts)
        # The mean unit of a sample, in integers: sizes are rounded so that the sum of their squares fits.
        shift = max(0, int(sizes.max()).bit_length() - (62 - len(sizes).bit_length()) // 2)
        sizes >>= shift
        unit = max(1, (int(np.dot(sizes, sizes)) << shift) // int(sizes.sum()))
        window = min(self.window, self.num_samples // lanes)
        group = 1
        while group * max(unit, window) < _UNITS_PER_BATCH * unit:
            group *= 2
        return group

    @property
    def num_blocks(self) -> int:
        """Number of blocks, including empty ones."""
        return len(self._starts) - 1

    @property
    def num_nonempty_blocks(self) -> int:
        """Number of blocks that have samples."""
        return int(np.count_nonzero(np.diff(self._starts)))

    @property
    def block_starts(self) -> Int64:
        """The first sample id of each block, and the number of samples: int64 [blocks + 1]."""
        return self._starts

    def block_of(self, sample_ids: Int64) -> Int64:
        """The block of each sample."""
        return self._starts.searchsorted(sample_ids, side="right") - 1

    def describe(self) -> dict[str, int | str]:
        """Everything that the order depends on, as a few hundred bytes of JSON."""
        facts: dict[str, int | str] = {
            "samples": self.num_samples,
            "shuffle": self.shuffle,
            "seed": self.seed,
            "lanes": self.lanes,
        }
        if self.shuffle == "window":
            digest = hashlib.blake2b(self._starts.astype("<i8").tobytes(), digest_size=8)
            facts |= {"window": self.window, "blocks": self.num_blocks, "block_sizes": digest.hexdigest()}
            if self.order > 1:
                facts |= {"order": self.order, "groups": getattr(self._lanes, "groups", 0)}
        return facts

    @property
    def fingerprint(self) -> str:
        """32 hexadecimal digits; equal fingerprints mean equal orders."""
        text = "rankfeed-plan-1" + json.dumps(self.describe(), sort_keys=True)
        return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()

    def sample_ids(self, epoch: int, positions: npt.ArrayLike) -> Int64:
        """The sample ids at positions of an epoch.

        Args:
            epoch: any integer of at least 0.
            positions: int array-like of any shape, each in [0, num_samples).

        Returns:
            int64 array of the same shape, sample ids in [0, num_samples).

        Raises:
            ArgumentError: the epoch is negative, or an argument has an invalid type.
            PlanError: a position lies outside the epoch.
        """
        epoch = check_int("epoch", epoch, at_least=0)
        places = check_int_array("positions", positions)
        # As unsigned numbers, negative positions are huge: one comparison detects both.
        if places.size and int(np.ascontiguousarray(places).view(np.uint64).max()) >= self.num_samples:
            raise PlanError(
                "position outside the epoch",
                expected=f"0 to {self.num_samples - 1}",
                found=f"{places.min()} to {places.max()}",
                where=f"epoch {epoch}",
            )
        return self._ids_at(epoch, *self._lanes.visit(epoch, places))

    def step_ids(self, epoch: int, starts: Int64, size: int, first: int, last: int) -> Int64:
        """Sample ids of the rows ``first`` to ``last`` of steps, in the order in which ranks divide them.

        Ranks take consecutive rows. The rows of a lane, or of a group of lanes, are consecutive too, so that a
        rank reads few blocks.

        Args:
            epoch: number of the epoch.
            starts: int64 [steps], the first position of each step.
            size: positions of a step.
            first: the first row.
            last: the row after the last one.

        Returns:
            int64 [steps, last - first].
        """
        rows = self._lanes.arrange(epoch, starts, size, first, last)
        if isinstance(self._lanes, ScrambledLanes) and type(self).sample_ids is Plan.sample_ids:
            return self._ids_at(epoch, *rows)  # the positions would take longer than the ids
        return self.sample_ids(epoch, self._lanes.positions(epoch, *rows))

    def _ids_at(self, epoch: int, lanes: Int64, places: Int64) -> Int64:
        """The sample ids at places of lanes."""
        ids = np.empty(places.shape, np.int64)  # in C order whatever that of the places: `out` has to be a view
        flat_lanes, flat_places, out = lanes.reshape(-1), places.reshape(-1), ids.reshape(-1)
        for start in range(0, out.size, CHUNK):
            part = slice(start, start + CHUNK)
            out[part] = self._chunk_of_ids(epoch, flat_lanes[part], flat_places[part])
        return ids

    def _chunk_of_ids(self, epoch: int, lanes: Int64, places: Int64) -> Int64:
        short, longer = divmod(self.num_samples, self._lanes.count)
        offsets = lanes * short
        if longer:
            offsets += np.minimum(lanes, longer)
        if self.shuffle == "none":
            return offsets + places
        if self._is_global:
            return permutation(offsets + places, self.num_samples, Key.of("global", self.seed, epoch))
        offsets += self._mixed(epoch, lanes, places)
        ends, shifts = self._unit_sequence(epoch)
        offsets += shifts[ends.searchsorted(offsets, side="right")]
        return offsets

    def _mixed(self, epoch: int, lanes: Int64, places: Int64) -> Int64:
        """Places after the permutation inside each window of a lane.

        A lane of n samples has about n / window windows whose sizes differ by at most one. They are laid out for
        the shorter lanes; the last window of a longer lane has one sample more.
        """
        length, longer = divmod(self.num_samples, self._lanes.count)
        windows = max(1, (2 * length + self.window) // (2 * self.window))
        size, larger = divmod(length, windows)
        if larger:
            beyond = places - larger * (size + 1)
            index = np.where(beyond < 0, places // (size + 1), larger + beyond // size)
        else:
            index = places // max(size, 1)
        if longer:  # the last window of these lanes has one sample more
            np.minimum(index, windows - 1, out=index)
        starts = index * size
        sizes: UInt64 | None = None
        if larger:
            starts += np.minimum(index, larger)
        if larger or longer:
            own = size + (index < larger) + ((index == windows - 1) & (lanes < longer))
            sizes = own.astype(np.uint64)
        index += lanes * windows
        starts += permutation(
            places - starts,
            size + (sizes is not None),
            Key.of("window", self.seed, epoch),
            tweaks=mix(index.view(np.uint64)),
            sizes=sizes,
        )
        return starts

    def _unit_sequence(self, epoch: int) -> tuple[Int64, Int64]:
        """The pieces that are read in one go, in order: the end of each, and sample id minus offset in it."""
        cached = self._sequence
        if cached is not None and cached[0] == epoch:
            return cached[1], cached[2]
        self._sequence = cached = None  # freed first: two of them would double the peak
        starts, sizes = self._unit_starts[:-1], np.diff(self._unit_starts)
        if isinstance(self._lanes, ScrambledLanes):
            order = self._lanes.unit_order(len(sizes), epoch)
            starts, sizes = starts[order], sizes[order]
            first = self._lanes.first_rows(sizes, epoch)
            # Each unit is two pieces: from its first row to the end, and what is before.
            starts = np.stack([starts + first, starts], axis=1).ravel()
            sizes = np.stack([sizes - first, first], axis=1).ravel()
        else:
            order = permutation(np.arange(len(sizes)), len(sizes), Key.of("blocks", self.seed, epoch))
            starts, sizes = starts[order], sizes[order]
        ends, shifts = np.cumsum(sizes, out=sizes), starts
        shifts[1:] -= ends[:-1]
        self._sequence = (epoch, ends, shifts)
        return ends, shifts

    def __repr__(self) -> str:
        facts = ", ".join(f"{name}={value!r}" for name, value in self.describe().items())
        return f"Plan({facts})"

    def __getstate__(self) -> dict[str, object]:
        return {**self.__dict__, "_sequence": None}


def _block_starts(blocks: int | Sequence[int] | npt.NDArray[np.integer], implied: int | None) -> Int64:
    """The first sample id of each block, and the number of samples."""
    if isinstance(blocks, (int, np.integer)):
        total = _checked_total(check_int("blocks", blocks, at_least=0))
        if implied is None or total == 0:
            return np.array([0, total], np.int64)
        size = max(implied, -(-total // _MAX_IMPLIED_BLOCKS))
        return np.append(np.arange(0, total, size, dtype=np.int64), total)
    sizes = check_int_array("blocks", blocks)
    if sizes.ndim != 1:
        raise invalid("blocks", "a number of samples, or a sequence of block sizes", blocks)
    is_bad = (sizes < 0) | (sizes > MAX_SIZE)
    if is_bad.any():
        bad = int(is_bad.argmax())
        raise PlanError("invalid block size", expected="0 to 2**62", found=int(sizes[bad]), where=f"block {bad}")
    starts = np.zeros(len(sizes) + 1, np.int64)
    np.cumsum(sizes, out=starts[1:], dtype=np.int64)
    _checked_total(int(starts.view(np.uint64).max()))  # the first sum above 2**62 has not wrapped around
    return starts


def _unit_starts(starts: Int64, lanes: int) -> Int64:
    """Starts of the units: blocks, or pieces of blocks that are longer than a lane; at least one per lane."""
    sizes = np.diff(starts)
    lane = int(starts[-1]) // lanes
    least = -(-lanes // np.count_nonzero(sizes))
    pieces = np.minimum(sizes, np.maximum(least, sizes // lane))
    if pieces.max() <= 1:
        return starts
    # Piece i of n of a block of s samples begins after i * (s // n) + min(i, s % n) of them.
    firsts = np.repeat(pieces.cumsum() - pieces, pieces)
    index = np.arange(len(firsts)) - firsts
    size, larger = (np.repeat(counts, pieces) for counts in np.divmod(sizes, np.maximum(1, pieces)))
    return np.append(np.repeat(starts[:-1], pieces) + index * size + np.minimum(index, larger), starts[-1])


def _checked_total(total: int) -> int:
    if total > MAX_SIZE:
        raise PlanError("too many samples for one plan", expected="at most 2**62", found=total)
    return total

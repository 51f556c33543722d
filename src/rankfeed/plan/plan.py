"""The order of an epoch: position -> sample id, for any size, in constant memory in the number of samples.

Positions are distributed over ``lanes`` round robin: position p is place ``p // lanes`` of lane ``p % lanes``.
Each lane owns an equal part of the epoch's sequence of samples and reads it in order. The sequence depends on the
kind of shuffle: stored order ("none"), a keyed bijection of all samples ("global"), or blocks in a keyed order,
with the samples mixed inside windows of each lane's part ("window").
"""

import hashlib
import json
from collections.abc import Sequence
from typing import Literal, get_args

import numpy as np
import numpy.typing as npt

from rankfeed._util.validate import check_choice, check_int, check_int_array, invalid
from rankfeed.errors import PlanError
from rankfeed.plan.permutation import CHUNK, MAX_SIZE, Key, UInt64, mix, permutation

Int64 = npt.NDArray[np.int64]
Shuffle = Literal["none", "global", "window"]

#: Default number of lanes: a property of the order, never derived from the number of ranks.
DEFAULT_LANES: dict[str, int] = {"none": 1, "global": 1, "window": 64}

#: Default window of "window", in samples.
DEFAULT_WINDOW = 65536

#: "window" divides an ``int`` given as ``blocks`` into at most this many blocks.
_MAX_IMPLIED_BLOCKS = 2**20


class Plan:
    """Which sample is read at which position of which epoch.

    Args:
        blocks: number of samples, or the samples in each block (a block is what is read in one piece).
        shuffle: "none", "global" (one keyed bijection of all samples) or "window" (blocks in a keyed order,
            samples mixed inside windows, so that few blocks are open at a time).
        seed: any integer; the orders of different (seed, epoch) are unrelated.
        window: approximate number of samples that "window" mixes with each other.
        lanes: independent streams through the epoch; part of the order, so do not derive it from the topology.

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
        self._sequence: tuple[int, Int64, Int64] | None = None

    @property
    def num_blocks(self) -> int:
        """Number of blocks, including empty ones."""
        return len(self._starts) - 1

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
            )
        ids = np.empty_like(places)
        flat, out = places.reshape(-1), ids.reshape(-1)
        for start in range(0, flat.size, CHUNK):
            part = slice(start, start + CHUNK)
            out[part] = self._chunk_of_ids(epoch, flat[part])
        return ids

    def _chunk_of_ids(self, epoch: int, places: Int64) -> Int64:
        short, longer = divmod(self.num_samples, self.lanes)
        if self.lanes == 1:
            lanes: Int64 | int = 0
            offsets: Int64 | int = 0
        else:
            # numpy vectorises floor division, but not the remainder
            in_lane = places // self.lanes
            lanes, places = places - in_lane * self.lanes, in_lane
            offsets = lanes * short
            offsets += np.minimum(lanes, longer)
        if self.shuffle == "none":
            return offsets + places
        if self.shuffle == "global":
            return permutation(offsets + places, self.num_samples, Key.of("global", self.seed, epoch))
        offsets = offsets + self._mixed(epoch, lanes, places)
        ends, shifts = self._block_sequence(epoch)
        offsets += shifts[ends.searchsorted(offsets, side="right")]
        return offsets

    def _mixed(self, epoch: int, lanes: Int64 | int, places: Int64) -> Int64:
        """Places after the permutation inside each window of a lane.

        A lane of n samples has about n / window windows whose sizes differ by at most one. They are laid out for
        the shorter lanes; the last window of a longer lane has one sample more.
        """
        length, longer = divmod(self.num_samples, self.lanes)
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

    def _block_sequence(self, epoch: int) -> tuple[Int64, Int64]:
        """The permuted sequence of blocks: the end of each, and the difference of sample id and offset in it."""
        cached = self._sequence
        if cached is not None and cached[0] == epoch:
            return cached[1], cached[2]
        self._sequence = cached = None  # freed first: two of them would double the peak
        count = self.num_blocks
        order = permutation(np.arange(count), count, Key.of("blocks", self.seed, epoch))
        ends = np.diff(self._starts)[order]
        np.cumsum(ends, out=ends)
        shifts = self._starts[order]
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
    if sizes.size == 0:
        return np.zeros(1, np.int64)
    if sizes.min() < 0 or sizes.max() > MAX_SIZE:
        bad = int(np.argmax((sizes < 0) | (sizes > MAX_SIZE)))
        raise PlanError("invalid block size", expected="0 to 2**62", found=int(sizes[bad]), where=f"block {bad}")
    starts = np.zeros(len(sizes) + 1, np.int64)
    np.cumsum(sizes, out=starts[1:], dtype=np.int64)
    _checked_total(int(starts.view(np.uint64).max()))  # the first sum above 2**62 has not wrapped around
    return starts


def _checked_total(total: int) -> int:
    if total > MAX_SIZE:
        raise PlanError("too many samples for one plan", expected="at most 2**62", found=total)
    return total

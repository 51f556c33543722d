"""The bytes of a ledger: what a rank was handed, a few bytes a step, readable whatever moment its process died at.

A ledger is a row of slots of 32 bytes. Each pass over an epoch begins with a header: a slot with a magic number,
the pass's number in this file, the length and the checksum of the JSON behind it. Each step is one slot: number of
the pass, checksum, step, position after it, time. The order is a pure function of what the header names, so no
sample is listed. Checksums of steps are seeded with that of their header, so that none is taken for one of
another pass.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from struct import Struct
from typing import Annotated, BinaryIO

import msgspec
import xxhash

from rankfeed.storage.decodable import decodable

#: What the names of ledgers end in.
SUFFIX = ".rankfeed-ledger"
VERSION = 1
SLOT = 32

#: No pass has the number that the first four bytes make.
_MAGIC = b"\xff\xff\xff\xffRFLG"
_HEAD = Struct("<8sIIQQ")  # magic, number, bytes of JSON, checksum of all else, version
_STEP = Struct("<IIQQQ")  # number, checksum, step, position after it, nanoseconds since 1970
_SUMMED = Struct("<IQQQ")
#: Longest JSON that is believed; passes in a file.
_LONGEST, _PASSES = 1 << 16, 0xFFFFFFFE

Count = Annotated[int, msgspec.Meta(ge=0, le=1 << 62)]
Size = Annotated[int, msgspec.Meta(ge=1, le=1 << 31)]
Text = Annotated[str, msgspec.Meta(max_length=4096)]


@decodable
class Pass(msgspec.Struct, frozen=True, kw_only=True):
    """One pass of a loader over an epoch, or over what is left of it, on one rank.

    Args:
        launch: the same on all ranks of a launch, another one when the job is started anew; empty if nobody says.
        process: of this process alone.
        host, pid: where it runs.
        rank, world_size, launcher: what it takes itself for, and who says so.
        loader: number of the loader in its process.
        plan: what the order depends on (``Plan.describe``).
        plan_fingerprint: of it.
        source: fingerprint of the data; empty where they have none.
        data: what they are called.
        epoch, start: which epoch, and how much of it had been delivered before.
        batch_size, tail: of the schedule.
        time_ns: when the first batch was asked for, nanoseconds since 1970.
    """

    launch: Text
    process: Text
    host: Text
    pid: Count
    rank: Count
    world_size: Size
    launcher: Text
    loader: Count
    plan: dict[str, int | str]
    plan_fingerprint: Text
    source: Text
    data: Text
    epoch: Count
    start: Count
    batch_size: Size
    tail: Text
    time_ns: Count


@dataclass(frozen=True)
class Begun:
    """A header: the pass, its number in the file, and where it stands."""

    number: int
    offset: int
    content: Pass


@dataclass(frozen=True)
class Step:
    """A step that was delivered."""

    number: int
    offset: int
    step: int
    position: int
    time_ns: int


@dataclass(frozen=True)
class Damage:
    """Bytes that are neither a header nor a step.

    Attributes:
        torn: whether they are the last, too few for what they begin: the process died while it wrote.
        why: what they are instead; "" where that is not known.
    """

    offset: int
    nbytes: int
    torn: bool = False
    why: str = ""


def header(number: int, content: Pass) -> tuple[bytes, int]:
    """The bytes of a header, and the seed of the checksums of its steps.

    Examples:
        >>> from io import BytesIO
        >>> content = Pass(launch="", process="p", host="h", pid=1, rank=0, world_size=1, launcher="", loader=0,
        ...     plan={"samples": 4}, plan_fingerprint="", source="", data="", epoch=0, start=0, batch_size=2,
        ...     tail="even", time_ns=5)
        >>> head, seed = header(0, content)
        >>> file = BytesIO(head + step(0, seed, 0, 2, 6) + b"torn")
        >>> [type(each).__name__ for each in read(file)]
        ['Begun', 'Step', 'Damage']
    """
    payload = msgspec.json.encode(content)
    payload += b" " * (-len(payload) % SLOT)
    check = _check(number, payload, VERSION)
    return _HEAD.pack(_MAGIC, number, len(payload), check, VERSION) + payload, check & 0xFFFFFFFF


def step(number: int, seed: int, step: int, position: int, time_ns: int) -> bytes:
    """The bytes of a step."""
    summed = _SUMMED.pack(number, step, position, time_ns)
    return _STEP.pack(number, xxhash.xxh32_intdigest(summed, seed), step, position, time_ns)


def read(file: BinaryIO) -> Iterator[Begun | Step | Damage]:
    """All that a ledger says, in its order. What is damaged is told as such, and what comes behind it still read.

    Raises:
        OSError: the file cannot be read.
    """
    seeds: dict[int, int] = {}
    offset, bad = 0, 0
    # Bad slots that stand together are told as one.
    while slot := file.read(SLOT):
        found: Begun | Step | Damage | None = None
        if slot[:8] == _MAGIC and len(slot) == SLOT:
            found, size = _header(slot, file, offset, seeds)
        elif len(slot) == SLOT:
            size = SLOT
            number, check, place, position, time_ns = _STEP.unpack(slot)
            seed = seeds.get(number)
            if seed is not None and check == xxhash.xxh32_intdigest(slot[:4] + slot[8:], seed):
                found = Step(number, offset, place, position, time_ns)
        else:
            size, found = len(slot), Damage(offset, len(slot), torn=True)
        if found is None:
            bad += size
        else:
            if bad:
                yield Damage(offset - bad, bad)
            bad = 0
            yield found
        offset += size
    if bad:
        yield Damage(offset - bad, bad)


def _header(slot: bytes, file: BinaryIO, offset: int, seeds: dict[int, int]) -> tuple[Begun | Damage | None, int]:
    """A header and its bytes; where it is none, only its first slot is passed over."""
    _, number, length, check, version = _HEAD.unpack(slot)
    if length > _LONGEST or length % SLOT or number > _PASSES or number in seeds:
        return None, SLOT
    payload = file.read(length)
    if len(payload) == length and check == _check(number, payload, version):
        if version != VERSION:
            return Damage(
                offset, SLOT + length, why=f"version {version}, and {VERSION} is known here"
            ), SLOT + length
        try:
            content = msgspec.json.decode(payload, type=Pass)
        except (msgspec.DecodeError, RecursionError) as error:
            return Damage(offset, SLOT + length, why=str(error)), SLOT + length
        seeds[number] = check & 0xFFFFFFFF
        return Begun(number, offset, content), SLOT + length
    # JSON has no byte below a blank, and each step has some: behind a length that was damaged stand steps.
    if len(payload) < length and min(payload, default=0x20) >= 0x20:
        return Damage(offset, SLOT + len(payload), torn=True), SLOT + len(payload)
    file.seek(offset + SLOT)
    return None, SLOT


def _check(number: int, payload: bytes, version: int) -> int:
    head = _HEAD.pack(_MAGIC, number, len(payload), 0, version)
    return xxhash.xxh3_64_intdigest(head + payload)

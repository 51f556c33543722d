"""Format of the ledger: a log of the steps delivered to a rank, readable even if its process was killed.

A ledger consists of slots of 32 bytes. Each pass over an epoch begins with a header: a slot with a magic number,
the number of the pass in this file, the length and checksum of the JSON that follows. Each step is one slot:
number of the pass, checksum, step, position after it, time. The order is a pure function of the header, so that no
sample is listed. The highest byte of the step is 0, or says which function returned a batch that may lack samples.
Checksums of steps are seeded with that of their header, so that a step is never assigned to another pass.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from struct import Struct
from typing import Annotated, BinaryIO

import msgspec
import xxhash

from rankfeed.storage.commit import decodable

#: File name suffix of ledgers.
SUFFIX = ".rankfeed-ledger"
VERSION = 1
SLOT = 32

#: The first four bytes are not a valid number of a pass.
_MAGIC = b"\xff\xff\xff\xffRFLG"
_HEAD = Struct("<8sIIQQ")  # magic, number, bytes of JSON, checksum of all else, version
_STEP = Struct("<IIQQQ")  # number, checksum, step, position after it, nanoseconds since 1970
_SUMMED = Struct("<IQQQ")
#: The highest byte of a step, and the functions that its values mean.
_FUNCTION_SHIFT, _FUNCTIONS = 56, ("", "collate_fn", "batch_transform")
#: Limits of the JSON's length, and of the passes in a file.
_MAX_JSON, _MAX_PASSES = 1 << 16, 0xFFFFFFFE

Count = Annotated[int, msgspec.Meta(ge=0, le=1 << 62)]
Size = Annotated[int, msgspec.Meta(ge=1, le=1 << 31)]
Text = Annotated[str, msgspec.Meta(max_length=4096)]


@decodable
class PassInfo(msgspec.Struct, frozen=True, kw_only=True):
    """A pass of a loader over an epoch, or over the rest of it, on one rank."""

    launch: Text  # the same on all its ranks; empty if unknown
    process: Text
    host: Text
    pid: Count
    rank: Count
    world_size: Size
    launcher: Text
    loader: Count  # number of the loader in its process
    plan: dict[str, int | str]  # everything that the order depends on (`Plan.describe`)
    plan_fingerprint: Text
    source: Text  # fingerprint of the data; empty if they have none
    data: Text  # description of the data
    epoch: Count
    start: Count  # position in the epoch
    batch_size: Size
    tail: Text
    time_ns: Count  # of the request of the first batch, since 1970


@dataclass(frozen=True)
class PassHeader:
    """The header of a pass, its number in the file, and its offset."""

    number: int
    offset: int
    content: PassInfo


@dataclass(frozen=True)
class StepRecord:
    """A delivered step."""

    number: int
    offset: int
    step: int
    position: int
    time_ns: int
    unproven: str = ""  # the user's function whose batch may lack some of its samples


@dataclass(frozen=True)
class DamagedBytes:
    """Bytes that are neither a header nor a step."""

    offset: int
    nbytes: int
    torn: bool = False  # an incomplete record at the end: the process died while it wrote
    why: str = ""
    version: int | None = None  # of the format, if another release wrote the rest of the ledger


def encode_header(number: int, content: PassInfo) -> tuple[bytes, int]:
    """The bytes of a header, and the seed for the checksums of its steps."""
    payload = msgspec.json.encode(content)
    payload += b" " * (-len(payload) % SLOT)
    check = _check(number, payload, VERSION)
    return _HEAD.pack(_MAGIC, number, len(payload), check, VERSION) + payload, check & 0xFFFFFFFF


def encode_step(number: int, seed: int, step: int, position: int, time_ns: int, unproven: str = "") -> bytes:
    """The bytes of a step."""
    step |= _FUNCTIONS.index(unproven) << _FUNCTION_SHIFT
    summed = _SUMMED.pack(number, step, position, time_ns)
    return _STEP.pack(number, xxhash.xxh32_intdigest(summed, seed), step, position, time_ns)


def decode_ledger(file: BinaryIO) -> Iterator[PassHeader | StepRecord | DamagedBytes]:
    """The records of a ledger in order, damaged bytes as such; raises OSError."""
    seeds: dict[int, int] = {}
    offset, bad = 0, 0
    # Consecutive damaged slots are reported as one.
    while slot := file.read(SLOT):
        record: PassHeader | StepRecord | DamagedBytes | None = None
        end = offset + len(slot)
        if len(slot) < SLOT:
            record = DamagedBytes(offset, len(slot), torn=True)
        elif slot[:8] == _MAGIC:
            record, end = _read_header(slot, file, seeds), file.tell()
        else:
            number, check, place, position, time_ns = _STEP.unpack(slot)
            seed = seeds.get(number)
            function, place = place >> _FUNCTION_SHIFT, place & ((1 << _FUNCTION_SHIFT) - 1)
            is_valid = seed is not None and check == xxhash.xxh32_intdigest(slot[:4] + slot[8:], seed)
            if is_valid and function < len(_FUNCTIONS):
                record = StepRecord(number, offset, place, position, time_ns, _FUNCTIONS[function])
        if record is None:
            bad += SLOT
        else:
            if bad:
                yield DamagedBytes(offset - bad, bad)
            bad = 0
            yield record
            if isinstance(record, DamagedBytes) and record.version is not None:
                return
        offset = end
    if bad:
        yield DamagedBytes(offset - bad, bad)


def _read_header(slot: bytes, file: BinaryIO, seeds: dict[int, int]) -> PassHeader | DamagedBytes | None:
    """A header, read to its end; None if it is invalid: then only its first slot is read."""
    offset = file.tell() - SLOT
    _, number, length, check, version = _HEAD.unpack(slot)
    if length > _MAX_JSON or length % SLOT or number > _MAX_PASSES or number in seeds:
        return None
    payload = file.read(length)
    if len(payload) == length and check == _check(number, payload, version):
        if version != VERSION:
            return DamagedBytes(offset, SLOT + length, version=version)
        try:
            content = msgspec.json.decode(payload, type=PassInfo)
        except (msgspec.DecodeError, RecursionError) as error:
            return DamagedBytes(offset, SLOT + length, why=str(error))
        seeds[number] = check & 0xFFFFFFFF
        return PassHeader(number, offset, content)
    # A damaged length would include steps, which have bytes below 0x20; JSON has none.
    if len(payload) < length and min(payload, default=0x20) >= 0x20:
        return DamagedBytes(offset, SLOT + len(payload), torn=True)
    file.seek(offset + SLOT)
    return None


def _check(number: int, payload: bytes, version: int) -> int:
    return xxhash.xxh3_64_intdigest(_HEAD.pack(_MAGIC, number, len(payload), 0, version) + payload)

"""Reading the headers of a tar file: its members, and the offsets of their bytes.

USTAR, GNU long names, PAX and V7 archives, as described by POSIX.1-2008 (pax) and the GNU tar manual. Headers are
untrusted. Their checksums are always verified, and the block of zeros at the end is required, so that a truncated
archive is detected wherever it was cut. (`tarfile` stops at a damaged header, and accepts damaged PAX records and
files with two names.)
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import AbstractContextManager
from typing import NamedTuple

from rankfeed.errors import CorruptError, SourceError, printable
from rankfeed.storage.file_errors import file_errors

BLOCK = 512
_ZEROS = bytes(BLOCK)
#: Bytes per read. A mapping would keep other threads from running while the disk is busy.
_BUFFER_BYTES = 1 << 14
#: Longest name or extended header that is accepted.
_MAX_EXTENDED_BYTES = 1 << 24

#: Magic bytes of compressed files.
_COMPRESSED = {b"\x1f\x8b": "gzip", b"\x28\xb5\x2f\xfd": "zstd", b"BZh": "bzip2", b"\xfd7zXZ\x00": "xz"}

_REGULAR = (b"0", b"\0", b"7")
_LINKS = {b"1": "hard link", b"2": "symbolic link"}
#: Devices, directories and FIFOs have a header only.
_WITHOUT_DATA = (b"3", b"4", b"5", b"6")
#: Headers that describe the next file: PAX (for one file, for all), GNU (its name, the target of a link).
_EXTENDED = (b"x", b"X", b"g", b"L", b"K")
#: Numbers that are only validated: mode, uid, gid and time.
_NUMBERS = (slice(100, 108), slice(108, 116), slice(116, 124), slice(136, 148))

_REWRITE = "write it again with `tar --format=ustar` or webdataset.TarWriter"


class TarMember(NamedTuple):
    """A regular file in an archive."""

    name: bytes  #: full name; tar defines no encoding
    start: int  #: offset of its first header, which may be an extended one
    data: int  #: offset of its bytes
    size: int  #: number of bytes


class TarReader(AbstractContextManager["TarReader"]):
    """Iterates over the regular files of an archive; directories and devices are skipped, links refused."""

    def __init__(self, path: str) -> None:
        self.path = path
        self.offset = 0  #: of the next header; at the end, of the block of zeros
        with file_errors(path):
            self._file = open(path, "rb", buffering=_BUFFER_BYTES)  # noqa: SIM115
            status = os.fstat(self._file.fileno())
        self.size, self.mtime_ns = status.st_size, status.st_mtime_ns

    def __exit__(self, *_: object) -> None:
        self._file.close()

    def read(self, offset: int, length: int) -> bytes:
        """Bytes at an offset; fewer at the end of the file."""
        try:
            self._file.seek(offset)
            return self._file.read(length)
        except OSError as error:
            raise SourceError("the file cannot be read", found=error, where=self._at(offset)) from error

    def __iter__(self) -> Iterator[TarMember]:
        start, extended = 0, dict[bytes, bytes]()
        while (block := self.read(self.offset, BLOCK)) != _ZEROS:
            offset = self.offset
            self._check(block, offset)
            kind, size = block[156:157], self._number(block[124:136], offset)
            data = self.offset = offset + BLOCK
            if kind in _EXTENDED:
                records = self._extended(kind, data, size)
                if extended.keys() & records.keys():  # readers disagree on which counts
                    raise self._damaged("one extended header a file", "a second one", offset)
                extended |= records
                self._skip(size)
                if kind == b"g" and not extended:
                    start = self.offset
                continue
            name = extended.get(b"path", _name(block))
            if kind in _LINKS:
                raise self._refused(
                    f"the {_LINKS[kind]} {printable(name)!r}, which has no data of its own",
                    start,
                    "write the archive again with the content in place of the link: "
                    "`tar --dereference --hard-dereference --sort=name -cf FILE DIRECTORY`",
                )
            # In V7, a slash is the only sign of a directory.
            if kind not in _WITHOUT_DATA and not (kind == b"\0" and name.endswith(b"/")):
                if kind == b"S" or any(key.startswith(b"GNU.sparse.") for key in extended):
                    raise self._refused("a sparse file, whose bytes are not contiguous", offset)
                if b"size" in extended:
                    digits = extended[b"size"]
                    if not digits.isdigit() or len(digits) > 18:
                        raise self._damaged("a size in decimal digits", repr(digits[:40]), offset)
                    size = int(digits)
                self._skip(size)
                if kind in _REGULAR and (b"\0" in name or not name):
                    raise self._damaged("a name", repr(name[:80]), offset)
                if kind in _REGULAR:
                    yield TarMember(name, start, data, size)
            start, extended = self.offset, {}
        if start != self.offset:
            raise self._damaged("a file behind its extended header", "the end of the archive", self.offset)
        self._check_end()

    def _check_end(self) -> None:
        """Check that only zeros follow: otherwise an archive was appended, or the file is damaged."""
        offset = self.offset
        while rest := self.read(offset, _BUFFER_BYTES):
            if rest.strip(b"\0"):
                raise CorruptError(
                    "there are data after the end of an archive",
                    expected=f"zeros from offset {self.offset} on",
                    found="other bytes",
                    where=self._at(offset + len(rest) - len(rest.lstrip(b"\0"))),
                    remedy="keep archives apart, or join them by `tar --concatenate` instead of `cat`",
                )
            offset += len(rest)

    def _skip(self, size: int) -> None:
        """Advance to the header after ``size`` bytes of data."""
        if self.offset + size > self.size:
            expected = f"{size} bytes of data at offset {self.offset}"
            raise self._damaged(expected, f"{self.size} bytes in the file", self.offset, "truncated")
        self.offset += -(-size // BLOCK) * BLOCK

    def _check(self, block: bytes, offset: int) -> None:
        """Check that a block is an undamaged header."""
        if offset == 0 and not is_header(block) and (compression := compression_of(block)) is not None:
            raise SourceError(
                f"a tar file is compressed with {compression}: no sample can be reached without decompressing all "
                "before it",
                where=self.path,
                remedy="pass decompress=True to keep decompressed copies in the cache folder, or decompress it "
                "once; compress the members (.json.gz, .jpg) instead of the archive",
            )
        if len(block) < BLOCK:
            raise self._damaged(
                "a header of 512 bytes, or a block of zeros at the end",
                f"the end of the file after {len(block)} bytes",
                offset,
                "truncated" if offset else "damaged",
                "fetch the file again, or write it again; where its writer left the end out, add it: "
                "`head -c 1024 /dev/zero >> FILE`",
            )
        if not is_header(block):
            raise self._damaged("a header with a valid checksum", repr(block[148:156]), offset)
        # One in a thousand damaged headers has the right checksum, so all numbers are validated.
        if block[100:148].translate(None, b"01234567 \0"):
            for field in _NUMBERS:
                if block[field.start] not in (0o200, 0o377):
                    self._number(block[field], offset)

    def _number(self, field: bytes, offset: int) -> int:
        """A number: octal digits, or big-endian bytes after a sign byte (GNU)."""
        if field[0] == 0o200 and (value := int.from_bytes(field[1:], "big")) < 1 << 62:
            return value
        digits = field.split(b"\0", 1)[0].strip(b" ")
        if digits.strip(b"01234567"):
            raise self._damaged("a header with mode, owner, size and time in octal digits", repr(field), offset)
        return int(digits or b"0", 8)

    def _extended(self, kind: bytes, data: int, size: int) -> dict[bytes, bytes]:
        """The PAX records of an extended header about the next file, such as ``path`` and ``size``."""
        if kind == b"K":
            return {}
        text = self.read(data, size) if size <= _MAX_EXTENDED_BYTES else b""
        if len(text) < size:
            raise self._damaged(f"an extended header of {size} bytes", f"{len(text)} bytes", data)
        if kind == b"L":
            name, zero, _ = text.partition(b"\0")
            if not zero and size % BLOCK and self.read(data + size, 1) != b"\0":  # readers disagree on its end
                raise self._damaged("a long name that ends with a zero", repr(name[-40:]), data)
            return {b"path": name}
        records: dict[bytes, bytes] = {}
        place = 0
        while place < len(text):  # PAX: ``length keyword=value`` and a newline each
            digits, blank, _ = text[place : place + 20].partition(b" ")
            length = int(digits) if blank and digits.isdigit() else 0
            record = text[place : place + length]
            keyword, equals, value = record[len(digits) + 1 : -1].partition(b"=")
            if len(record) < length or not equals or not keyword or not record.endswith(b"\n"):
                raise self._damaged("records of an extended header", repr(text[place : place + 40]), data + place)
            records[keyword] = value
            place += length
        if kind == b"g":
            if records.keys() & {b"path", b"size"}:
                raise self._refused("a global header that renames or resizes all files", data - BLOCK)
            return {}
        if b"path" in records:
            records[b"path"] = records[b"path"].rstrip(b"/")
        return records

    def _at(self, offset: int) -> str:
        return f"{self.path}, offset {offset}"

    def _damaged(
        self, expected: str, actual: str, offset: int, how: str = "damaged", remedy: str | None = None
    ) -> CorruptError:
        return CorruptError(
            f"a tar file is {how}", expected=expected, found=actual, where=self._at(offset), remedy=remedy
        )

    def _refused(self, content: str, offset: int, remedy: str = _REWRITE) -> SourceError:
        return SourceError(f"a tar file holds {content}", where=self._at(offset), remedy=remedy)


def _name(block: bytes) -> bytes:
    name = block[:100].split(b"\0", 1)[0]
    # Only POSIX archives have a prefix; GNU stores times there.
    prefix = block[345:500].split(b"\0", 1)[0] if block[257:263] == b"ustar\0" else b""
    return prefix + b"/" + name if prefix else name


def is_header(block: bytes) -> bool:
    """Whether 512 bytes are a tar header, by its checksum."""
    digits = block[148:156].split(b"\0", 1)[0].strip(b" ")
    if len(block) != BLOCK or not digits or digits.strip(b"01234567"):
        return False
    rest = block[:148] + block[156:]
    stored, computed = int(digits, 8), sum(rest) + 256  # the checksum field counts as eight blanks
    # Some old writers summed signed characters.
    return stored == computed or stored == computed - 256 * sum(byte > 127 for byte in rest)


def compression_of(block: bytes) -> str | None:
    """The compression of a file, by its first bytes; None for none."""
    return next((name for magic, name in _COMPRESSED.items() if block.startswith(magic)), None)

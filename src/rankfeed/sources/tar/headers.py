"""Reading the headers of a tar file: its members, and the offsets of their bytes.

USTAR, GNU long names, PAX and V7 archives, as described by POSIX.1-2008 (pax) and the GNU tar manual. Headers are
untrusted. Their checksums are always verified, and the block of zeros at the end is required, so that a truncated
archive is detected wherever it was cut.
"""

from __future__ import annotations

import os
from typing import NamedTuple

from rankfeed.errors import CorruptError, SourceError, printable

BLOCK = 512
_ZEROS = bytes(BLOCK)
#: Longest name or extended header that is accepted.
_MOST_EXTENDED = 1 << 24
#: Bytes per read: at least a header, its PAX records and the next header.
_SMALLEST_READ, _LARGEST_READ = 2048, 1 << 18
#: Reading over a gap of this size costs a disk less than another seek.
_NEAR = 1 << 14

#: Magic bytes of compressed files.
_COMPRESSED = {b"\x1f\x8b": "gzip", b"\x28\xb5\x2f\xfd": "zstd", b"BZh": "bzip2", b"\xfd7zXZ\x00": "xz"}

_REGULAR = (b"0", b"\0", b"7")
_LINKS = {b"1": "hard link", b"2": "symbolic link"}
#: Devices, directories and FIFOs have a header only.
_WITHOUT_DATA = (b"3", b"4", b"5", b"6")

_REMEDY = "fetch the file again, or write it again"


class TarMember(NamedTuple):
    """A regular file in an archive.

    Args:
        name: full name; tar defines no encoding.
        start: offset of its first header, which may be one with a long name.
        data: offset of its bytes.
        size: number of bytes.
    """

    name: bytes
    start: int
    data: int
    size: int


#: Fields of a header that are only validated.
_NUMBERS = {"mode": slice(100, 108), "uid": slice(108, 116), "gid": slice(116, 124), "mtime": slice(136, 148)}


class Window:
    """Reads a file at growing offsets, with larger reads while headers are close together.

    Uses pread, not a mapping: a call lets other threads run while the disk is busy.
    """

    def __init__(self, path: str) -> None:
        self.path = path
        self._base, self._bytes, self._ahead = 0, b"", _SMALLEST_READ
        try:
            self._handle = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
            found = os.fstat(self._handle)
        except OSError as error:
            raise SourceError("the file cannot be read", found=error, where=path) from error
        self.size, self.mtime_ns = found.st_size, found.st_mtime_ns

    def __enter__(self) -> Window:
        return self

    def __exit__(self, *_: object) -> None:
        os.close(self._handle)

    def read(self, offset: int, length: int) -> bytes:
        """Bytes at an offset; fewer at the end of the file."""
        within = offset - self._base
        if within >= 0 and within + length <= len(self._bytes):
            return self._bytes[within : within + length]
        is_near = within - len(self._bytes) < _NEAR
        self._ahead = min(_LARGEST_READ, self._ahead * 4) if is_near else _SMALLEST_READ
        try:
            self._base, self._bytes = offset, os.pread(self._handle, max(length, self._ahead), offset)
        except OSError as error:
            raise SourceError(
                "the file cannot be read", found=error, where=f"{self.path}, offset {offset}"
            ) from error
        return self._bytes[:length]


class TarReader:
    """Iterates over the headers of an archive.

    Attributes:
        offset: of the next header; at the end, of the block of zeros.
    """

    def __init__(self, window: Window, offset: int = 0) -> None:
        self._window = window
        self.offset = offset

    def next(self) -> TarMember | None:
        """The next regular file, None at the end of the archive; directories and devices are skipped.

        Raises:
            CorruptError: the archive is damaged or truncated; names file and offset.
            SourceError: the archive is compressed, or has a link or a sparse file.
        """
        start, name = self.offset, None
        override: dict[bytes, bytes] = {}
        while True:
            here = self.offset
            block = self._window.read(here, BLOCK)
            if block == _ZEROS:
                if start != here:
                    raise self._damaged("a file behind its extended header", "the end of the archive", here)
                return None
            self._check(block, here)
            kind, size = block[156:157], self._number(block[124:136], "size", here)
            data = here + BLOCK
            self.offset = data
            if kind in _LINKS:
                raise self._is_link(kind, override.get(b"path") or name or _name(block), start)
            if kind in _WITHOUT_DATA:
                start, name, override = self.offset, None, {}
                continue
            if kind in (b"x", b"X", b"g"):
                records = self._records(data, size)
                if kind == b"g" and records.keys() & {b"path", b"size"}:
                    raise self._refused("a global header that renames or resizes all files", here)
                self._skip(size)
                if kind != b"g":
                    if override.keys() & records.keys() or (name is not None and b"path" in records):
                        raise self._damaged("one extended header a file", "a second one", here)
                    override.update(records)
                elif not override and name is None:
                    start = self.offset
            elif kind in (b"L", b"K"):
                text = self._long_name(data, size)
                if kind == b"L":
                    if name is not None or b"path" in override:  # readers disagree on which counts
                        raise self._damaged("one name a file", "a second long one", here)
                    name = text
                self._skip(size)
            elif kind == b"S" or any(key.startswith(b"GNU.sparse.") for key in override):
                raise self._refused("a sparse file, whose bytes do not lie in one run", here)
            else:
                if b"size" in override:
                    size = self._decimal(override[b"size"], here)
                name = override[b"path"].rstrip(b"/") if b"path" in override else name or _name(block)
                folder = kind == b"\0" and name.endswith(b"/")  # the only sign of a directory in V7
                if not folder:
                    self._skip(size)
                if kind in _REGULAR and not folder:
                    if b"\0" in name or not name:
                        raise self._damaged("a name", repr(name[:80]), here)
                    return TarMember(name, start, data, size)
                start, name, override = self.offset, None, {}

    def check_end(self) -> None:
        """Check that only zeros follow the end: otherwise an archive was appended, or the file is damaged."""
        offset = self.offset
        while rest := self._window.read(offset, _LARGEST_READ):
            if rest.strip(b"\0"):
                at = offset + len(rest) - len(rest.lstrip(b"\0"))
                raise CorruptError(
                    "there are data behind the end of an archive",
                    expected=f"zeros from offset {self.offset} on",
                    found="other bytes",
                    where=f"{self._window.path}, offset {at}",
                    remedy="keep archives apart, or join them by `tar --concatenate` instead of `cat`",
                )
            offset += len(rest)

    def _skip(self, size: int) -> None:
        """Advance to the header after ``size`` bytes of data."""
        if self.offset + size > self._window.size:
            raise CorruptError(
                "a tar file is truncated",
                expected=f"{size} bytes of data at offset {self.offset}",
                found=f"{self._window.size} bytes in the file",
                where=f"{self._window.path}, offset {self.offset}",
                remedy=_REMEDY,
            )
        self.offset += -(-size // BLOCK) * BLOCK

    def _check(self, block: bytes, here: int) -> None:
        compression = compression_of(block) if here == 0 else None
        if compression is not None and not is_header(block):
            raise self._is_compressed(compression)
        if len(block) < BLOCK:
            if here == 0:
                raise self._damaged("a header of 512 bytes", f"a file of {len(block)} bytes", here)
            raise CorruptError(
                "a tar file is truncated",
                expected="a header, or a block of zeros at the end",
                found=f"the end of the file after {len(block)} bytes",
                where=f"{self._window.path}, offset {here}",
                remedy=f"{_REMEDY}; where its writer left the end out, add it: `head -c 1024 /dev/zero >> FILE`",
            )
        stored = self._number(block[148:156], "checksum", here)
        rest = block[:148] + block[156:]
        found = sum(rest) + 256  # the checksum field counts as eight blanks
        # Some old writers summed signed characters.
        if stored != found and stored != found - 256 * sum(byte > 127 for byte in rest):
            raise self._damaged(f"a header with checksum {stored}", f"checksum {found}", here)
        # One in a thousand damaged headers has the right checksum, so all numbers are validated.
        if block[100:148].translate(None, b"01234567 \0"):
            for what, field in _NUMBERS.items():
                if block[field.start] not in (0o200, 0o377):
                    self._number(block[field], what, here)

    def _is_compressed(self, what: str) -> SourceError:
        return SourceError(
            f"a tar file is compressed with {what}: no sample can be reached without decompressing all before it",
            where=self._window.path,
            remedy="pass decompress=True to keep decompressed copies in the cache folder, or decompress it once; "
            "compress the members (.json.gz, .jpg) instead of the archive",
        )

    def _number(self, field: bytes, what: str, here: int) -> int:
        """A number: octal digits, or big-endian bytes after a sign byte (GNU)."""
        if field[0] in (0o200, 0o377):
            value = int.from_bytes(field[1:], "big")
            if field[0] == 0o200 and value < 1 << 62:
                return value
        else:
            digits = field.split(b"\0", 1)[0].strip(b" ")
            if not digits:
                return 0
            if not digits.strip(b"01234567"):
                return int(digits, 8)
        raise self._damaged(f"a header with a {what} in octal digits", repr(field), here)

    def _decimal(self, digits: bytes, here: int) -> int:
        if not digits.isdigit() or len(digits) > 18:
            raise self._damaged("a size in decimal digits", repr(digits[:40]), here)
        return int(digits)

    def _extension(self, data: int, size: int) -> bytes:
        found = self._window.read(data, size) if size <= _MOST_EXTENDED else b""
        if len(found) < size:
            raise self._damaged(f"an extended header of {size} bytes", f"{len(found)} bytes", data)
        return found

    def _long_name(self, data: int, size: int) -> bytes:
        """A GNU long name, which must end with a zero: readers disagree on one without."""
        name, zero, _ = self._extension(data, size).partition(b"\0")
        if not zero and size % BLOCK and self._window.read(data + size, 1) != b"\0":
            raise self._damaged("a long name that ends with a zero", repr(name[-40:]), data)
        return name

    def _records(self, data: int, size: int) -> dict[bytes, bytes]:
        """The records of a PAX header: ``length keyword=value`` and a newline each."""
        text, place = self._extension(data, size), 0
        records = {}
        while place < len(text):
            digits, blank, _ = text[place : place + 20].partition(b" ")
            length = int(digits) if blank and digits.isdigit() else 0
            record = text[place : place + length]
            keyword, equals, value = record[len(digits) + 1 : -1].partition(b"=")
            if len(record) < length or not equals or not keyword or not record.endswith(b"\n"):
                raise self._damaged("records of an extended header", repr(text[place : place + 40]), data + place)
            records[keyword] = value
            place += length
        return records

    def _damaged(self, expected: str, found: str, offset: int) -> CorruptError:
        return CorruptError(
            "a tar file is damaged",
            expected=expected,
            found=found,
            where=f"{self._window.path}, offset {offset}",
            remedy=_REMEDY,
        )

    def _is_link(self, kind: bytes, name: bytes, offset: int) -> SourceError:
        return SourceError(
            f"a tar file holds a {_LINKS[kind]}, which has no data of its own",
            expected="regular files only",
            found=f"{_LINKS[kind]} {printable(name)!r}",
            where=f"{self._window.path}, offset {offset}",
            remedy="write the archive again with the content in place of the link: "
            "`tar --dereference --hard-dereference --sort=name -cf FILE DIRECTORY`",
        )

    def _refused(self, what: str, offset: int) -> SourceError:
        return SourceError(
            f"a tar file holds {what}",
            where=f"{self._window.path}, offset {offset}",
            remedy="write it again with `tar --format=ustar` or webdataset.TarWriter",
        )


def _name(block: bytes) -> bytes:
    name = block[:100].split(b"\0", 1)[0]
    # Only POSIX archives have a prefix; GNU stores times there.
    prefix = block[345:500].split(b"\0", 1)[0] if block[257:263] == b"ustar\0" else b""
    return prefix + b"/" + name if prefix else name


def is_header(block: bytes) -> bool:
    """Whether 512 bytes are a tar header, by its checksum.

    Examples:
        >>> is_header(bytes(512))
        False
    """
    digits = block[148:156].strip(b" \0")
    if len(block) < BLOCK or not digits or digits.strip(b"01234567"):
        return False
    return int(digits, 8) == sum(block[:148]) + sum(block[156:BLOCK]) + 256


def compression_of(block: bytes) -> str | None:
    """The compression of a file, by its first bytes; None for none."""
    return next((name for magic, name in _COMPRESSED.items() if block.startswith(magic)), None)

"""The headers of a tar file: which files it holds, and where their bytes lie.

USTAR, GNU long names, PAX and old V7 archives, as POSIX.1-2008 (pax) and the GNU tar manual describe them. Headers
are untrusted input. Each has a checksum, which is always verified; an archive ends with a block of zeros, so
that one that was cut is found out wherever it was cut.
"""

from __future__ import annotations

import os
from typing import NamedTuple

from rankfeed.errors import CorruptError, SourceError, printable

BLOCK = 512
_ZEROS = bytes(BLOCK)
#: Longest name or extended header that is believed.
_LONGEST = 1 << 24
#: Bytes read at once: at least a header with the PAX records and the header behind it.
_SMALLEST_READ, _LARGEST_READ = 2048, 1 << 18
#: To read on over so many bytes costs a disk less than to go and read behind them.
_NEAR = 1 << 14

#: What compressed files begin with.
_COMPRESSED = {b"\x1f\x8b": "gzip", b"\x28\xb5\x2f\xfd": "zstd", b"BZh": "bzip2", b"\xfd7zXZ\x00": "xz"}

_REGULAR = (b"0", b"\0", b"7")
#: Members whose content is that of another file.
_LINKS = {b"1": "hard link", b"2": "symbolic link"}
#: Devices, directories, FIFOs: no data follow their header.
_WITHOUT_DATA = (b"3", b"4", b"5", b"6")

_REMEDY = "fetch the file anew, or write it again"


class Member(NamedTuple):
    """A regular file in an archive.

    Args:
        name: its full name, as bytes: tar has no charset.
        start: offset of its first header, those that only bring a long name included.
        data: offset of its bytes.
        size: how many they are.
    """

    name: bytes
    start: int
    data: int
    size: int


#: Where a header's numbers lie that no reader of samples needs.
_NUMBERS = {"mode": slice(100, 108), "uid": slice(108, 116), "gid": slice(116, 124), "mtime": slice(136, 148)}


class Window:
    """Reads of a file at growing offsets, of more at once where the next one lies near.

    Args:
        path: of the file.

    Raises:
        SourceError: it cannot be opened.
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
        """Bytes at an offset; fewer at the file's end.

        Raises:
            SourceError: the file cannot be read.
        """
        within = offset - self._base
        if within >= 0 and within + length <= len(self._bytes):
            return self._bytes[within : within + length]
        # Calls and not a mapping: a call lets other threads run while the disk is busy. Where headers lie close
        # together many are had by one call; where they lie far apart, nothing is read that is not needed.
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
    """Walks over the headers of an archive.

    Args:
        window: the file.
        offset: of the header to begin with.

    Attributes:
        offset: of the next header; at the end, of the block of zeros that says so.
    """

    def __init__(self, window: Window, offset: int = 0) -> None:
        self._window = window
        self.offset = offset

    def next(self) -> Member | None:
        """The next regular file; None at the end of the archive. Directories and devices are skipped.

        Raises:
            CorruptError: the archive is damaged or truncated; names file and offset.
            SourceError: it is compressed, or holds a link or a sparse file.
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
                    if name is not None or b"path" in override:  # some readers take the first, some the last
                        raise self._damaged("one name a file", "a second long one", here)
                    name = text
                self._skip(size)
            elif kind == b"S" or any(key.startswith(b"GNU.sparse.") for key in override):
                raise self._refused("a sparse file, whose bytes do not lie in one run", here)
            else:
                if b"size" in override:
                    size = self._decimal(override[b"size"], here)
                name = override[b"path"].rstrip(b"/") if b"path" in override else name or _name(block)
                folder = kind == b"\0" and name.endswith(b"/")  # V7 has no other sign of one
                if not folder:
                    self._skip(size)
                if kind in _REGULAR and not folder:
                    if b"\0" in name or not name:
                        raise self._damaged("a name", repr(name[:80]), here)
                    return Member(name, start, data, size)
                start, name, override = self.offset, None, {}

    def check_end(self) -> None:
        """Check that nothing but zeros follows where the archive ends.

        Raises:
            CorruptError: something does: a second archive appended, or damage.
        """
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
        """Go to the header behind ``size`` bytes of data."""
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
        found = sum(rest) + 256  # the field itself counts as eight blanks
        # Some old writers added signed characters up.
        if stored != found and stored != found - 256 * sum(byte > 127 for byte in rest):
            raise self._damaged(f"a header with checksum {stored}", f"checksum {found}", here)
        # Of damage one in a thousand has the right sum, so the numbers that are of no use here are looked at too.
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
        """A number: octal digits, or a big-endian one behind a sign byte (GNU)."""
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
        found = self._window.read(data, size) if size <= _LONGEST else b""
        if len(found) < size:
            raise self._damaged(f"an extended header of {size} bytes", f"{len(found)} bytes", data)
        return found

    def _long_name(self, data: int, size: int) -> bytes:
        """A GNU long name: up to a zero, which its size counts. Without it, readers disagree on the end."""
        name, zero, _ = self._extension(data, size).partition(b"\0")
        if not zero and size % BLOCK and self._window.read(data + size, 1) != b"\0":
            raise self._damaged("a long name that ends with a zero", repr(name[-40:]), data)
        return name

    def _records(self, data: int, size: int) -> dict[bytes, bytes]:
        """The records of a PAX header, each ``length keyword=value`` and a newline."""
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
            remedy="write it again by `tar --format=ustar` or webdataset.TarWriter",
        )


def _name(block: bytes) -> bytes:
    name = block[:100].split(b"\0", 1)[0]
    # Only POSIX archives have a prefix there; GNU keeps times in it.
    prefix = block[345:500].split(b"\0", 1)[0] if block[257:263] == b"ustar\0" else b""
    return prefix + b"/" + name if prefix else name


def is_header(block: bytes) -> bool:
    """Whether these 512 bytes are a tar header, by its checksum.

    Examples:
        >>> is_header(bytes(512))
        False
    """
    digits = block[148:156].strip(b" \0")
    if len(block) < BLOCK or not digits or digits.strip(b"01234567"):
        return False
    return int(digits, 8) == sum(block[:148]) + sum(block[156:BLOCK]) + 256


def compression_of(block: bytes) -> str | None:
    """How a file is compressed, by what it begins with."""
    return next((name for magic, name in _COMPRESSED.items() if block.startswith(magic)), None)

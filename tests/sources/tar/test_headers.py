"""All files of an archive of any writer are found; damage and truncation are found at any place."""

import io
import os
import tarfile
from pathlib import Path

import numpy as np
import psutil
import pytest
from tests.support.tar import write_tar

from rankfeed.errors import CorruptError, RankfeedError, SourceError
from rankfeed.sources.tar.headers import TarMember, TarReader, compression_of, is_header

FORMATS = {"ustar": tarfile.USTAR_FORMAT, "gnu": tarfile.GNU_FORMAT, "pax": tarfile.PAX_FORMAT}


def members(path: Path) -> list[TarMember]:
    with TarReader(str(path)) as reader:
        return list(reader)


def by_tarfile(path: Path) -> list[TarMember]:
    with tarfile.open(path, "r:") as tar:
        return [
            TarMember(info.name.encode("utf-8", "surrogateescape"), info.offset, info.offset_data, info.size)
            for info in tar
            if info.isreg()
        ]


@pytest.mark.parametrize("format", FORMATS)
def test_members_and_offsets_are_those_of_tarfile(format: str, tmp_path: Path) -> None:
    rng = np.random.default_rng(1)
    files = {f"d/{'n' * int(n)}{i}.bin": rng.bytes(int(n) * 7) for i, n in enumerate(rng.integers(0, 85, 200))}
    if format != "ustar":
        files |= {"long/" + "x" * 300 + ".txt": b"1", "ünï/çødé.txt": b"2", "y" * 101 + ".a": b""}
    else:
        files |= {"p" * 120 + "/" + "q" * 90 + ".txt": b"3"}  # a name cut into prefix and name
    path = write_tar(tmp_path / "a.tar", files, FORMATS[format])
    assert members(path) == by_tarfile(path)
    content = path.read_bytes()
    assert [content[m.data : m.data + m.size] for m in members(path)] == list(files.values())


def test_directories_and_devices_in_an_archive_are_skipped(tmp_path: Path) -> None:
    path = tmp_path / "a.tar"
    with tarfile.open(path, "w") as tar:
        for index, kind in enumerate([tarfile.DIRTYPE, tarfile.FIFOTYPE, tarfile.CHRTYPE, tarfile.BLKTYPE]):
            info = tarfile.TarInfo(f"{'n' * 150}{index}")
            info.type, info.linkname = kind, "l" * 200
            tar.addfile(info)
            real = tarfile.TarInfo(f"{index}.txt")
            real.size = 3
            tar.addfile(real, io.BytesIO(b"abc"))
    assert [member.name for member in members(path)] == [f"{n}.txt".encode() for n in range(4)]
    assert members(path) == by_tarfile(path)


@pytest.mark.parametrize("kind", [tarfile.LNKTYPE, tarfile.SYMTYPE], ids=["hard", "symbolic"])
@pytest.mark.parametrize("format", FORMATS)
def test_a_link_in_an_archive_is_refused(kind: bytes, format: str, tmp_path: Path) -> None:
    path = write_tar(tmp_path / "a.tar", {"0.txt": b"abc"}, FORMATS[format])
    name = "1.txt" if format == "ustar" else "n" * 150 + ".txt"
    with tarfile.open(path, "a", format=FORMATS[format]) as tar:
        info = tarfile.TarInfo(name)
        info.type, info.linkname = kind, "0.txt"
        tar.addfile(info)
    with pytest.raises(SourceError, match=rf"{name}[\s\S]*a\.tar, offset 1024[\s\S]*--hard-dereference"):
        members(path)


@pytest.mark.parametrize("format", ["gnu", "pax"])
def test_a_member_larger_than_octal_digits_can_say_is_read(format: str, tmp_path: Path) -> None:
    info, path = tarfile.TarInfo("a.bin"), tmp_path / "a.tar"
    info.size = 9 << 30
    head = info.tobuf(FORMATS[format])
    path.write_bytes(head)
    os.truncate(path, len(head) + info.size + 1024)  # a hole: it takes no disk
    assert members(path) == [TarMember(b"a.bin", 0, len(head), info.size)]


def test_global_pax_headers_are_read_and_those_that_rename_files_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "a.tar"
    with tarfile.open(path, "w", format=tarfile.PAX_FORMAT, pax_headers={"comment": "of all"}) as tar:
        info = tarfile.TarInfo("a.txt")
        info.size = 1
        tar.addfile(info, io.BytesIO(b"x"))
    assert [(m.name, m.size) for m in members(path)] == [(b"a.txt", 1)]
    with tarfile.open(path, "w", format=tarfile.PAX_FORMAT, pax_headers={"path": "other.txt"}) as tar:
        tar.addfile(tarfile.TarInfo("a.txt"))
    with pytest.raises(SourceError, match=r"global header[\s\S]*offset 0"):
        members(path)


def test_a_sparse_file_in_an_archive_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "a.tar"
    with tarfile.open(path, "w", format=tarfile.PAX_FORMAT) as tar:
        member = tarfile.TarInfo("GNUSparseFile.1/a.txt")
        member.pax_headers = {"GNU.sparse.major": "1", "GNU.sparse.minor": "0", "GNU.sparse.name": "a.txt"}
        tar.addfile(member)
    with pytest.raises(SourceError, match=r"sparse[\s\S]*offset \d+"):
        members(path)


@pytest.mark.parametrize("format", FORMATS)
def test_an_archive_truncated_anywhere_before_its_end_mark_is_an_error(format: str, tmp_path: Path) -> None:
    name = "n" * 60 if format == "ustar" else "n" * 160
    files = {f"{name}{i}.txt": bytes([65 + i]) * (i * 300) for i in range(4)}
    path = write_tar(tmp_path / "a.tar", files, FORMATS[format])
    whole, expected = path.read_bytes(), members(path)
    end = expected[-1].data + -(-expected[-1].size // 512) * 512
    cut = tmp_path / "cut.tar"
    with cut.open("wb") as file:
        file.write(whole)
        near = [size for block in range(0, len(whole), 512) for size in (block + 1, block, block - 1) if size >= 0]
        for size in range(len(whole) - 1, -1, -1) if format == "pax" else sorted(near, reverse=True):
            file.truncate(size)
            if size >= end + 512:
                assert members(cut) == expected
            else:
                with pytest.raises(CorruptError, match=r"cut\.tar, offset \d+"):
                    members(cut)


def test_a_flipped_bit_in_a_tar_header_is_an_error_that_names_the_offset(tmp_path: Path) -> None:
    path = write_tar(tmp_path / "a.tar", {"a.txt": b"1" * 600, "b.txt": b"2"}, tarfile.USTAR_FORMAT)
    whole, expected = path.read_bytes(), members(path)
    for member in expected:
        for place in range(512):
            damaged = bytearray(whole)
            damaged[member.start + place] ^= 1 << place % 7
            path.write_bytes(damaged)
            try:
                assert members(path) == expected  # a blank or zero beside the checksum's digits
            except RankfeedError as error:
                assert f"offset {member.start}" in str(error)  # noqa: PT017


def test_data_after_the_end_mark_of_an_archive_is_an_error(tmp_path: Path) -> None:
    path = write_tar(tmp_path / "a.tar", {"a.txt": b"1"})
    path.write_bytes(path.read_bytes() * 2)
    with pytest.raises(CorruptError, match=r"after the end[\s\S]*offset 10240"):
        members(path)


@pytest.mark.parametrize("records", [b"3 a", b"999 path=b\n", b"12 path=b.tx\n", b"x path=b\n", b"10 =b.txt\n"])
def test_a_damaged_pax_header_is_an_error(records: bytes, tmp_path: Path) -> None:
    head = tarfile.TarInfo("pax")
    head.type, head.size = tarfile.XHDTYPE, len(records)
    path = tmp_path / "a.tar"
    file = tarfile.TarInfo("a.txt").tobuf(tarfile.USTAR_FORMAT)
    path.write_bytes(head.tobuf(tarfile.USTAR_FORMAT) + records.ljust(512, b"\0") + file + bytes(1024))
    with pytest.raises(CorruptError, match=r"extended header[\s\S]*a\.tar, offset 512"):
        members(path)


def set_checksum(header: bytearray) -> None:
    header[148:156] = b"%06o\0 " % (sum(header[:148]) + sum(header[156:512]) + 256)


@pytest.mark.parametrize(
    "size", [b"-0000000010\0", b"9999999999z\0", b"\xff" + b"\xff" * 11, b"\x80" + b"\xff" * 11]
)
def test_a_header_with_an_invalid_size_is_an_error(size: bytes, tmp_path: Path) -> None:
    block = bytearray(tarfile.TarInfo("a.txt").tobuf(tarfile.USTAR_FORMAT))
    block[124:136] = size
    set_checksum(block)
    path = tmp_path / "a.tar"
    path.write_bytes(block + bytes(1024))
    with pytest.raises(CorruptError, match=r"size[\s\S]*offset 0"):
        members(path)


@pytest.mark.parametrize("content", [b"", b"hello", b"hello" * 300, bytes(100)], ids=len)
def test_a_file_that_is_no_archive_is_an_error(content: bytes, tmp_path: Path) -> None:
    (tmp_path / "a.tar").write_bytes(content)
    with pytest.raises(CorruptError, match=r"a\.tar, offset 0"):
        members(tmp_path / "a.tar")


@pytest.mark.parametrize("mode", ["w:gz", "w:bz2", "w:xz"])
def test_a_compressed_archive_is_refused_with_the_remedy(mode: str, tmp_path: Path) -> None:
    path = tmp_path / "a.tar"
    with tarfile.open(path, mode) as tar:
        tar.addfile(tarfile.TarInfo("a.txt"))
    with pytest.raises(SourceError, match=r"compressed with[\s\S]*decompress=True"):
        members(path)
    assert compression_of(path.read_bytes()[:8]) is not None
    assert not is_header(path.read_bytes()[:512])


def test_headers_of_small_members_take_few_system_calls_and_large_members_are_not_read(tmp_path: Path) -> None:
    path = write_tar(tmp_path / "a.tar", {f"{i}.txt": b"x" for i in range(2000)}, tarfile.USTAR_FORMAT)
    large = write_tar(tmp_path / "b.tar", {f"{i}.bin": bytes(1 << 16) for i in range(20)}, tarfile.USTAR_FORMAT)

    def cost(path: Path) -> tuple[int, int]:
        """System calls that read, and bytes read."""
        before = psutil.Process().io_counters()
        members(path)
        after = psutil.Process().io_counters()
        return after.read_count - before.read_count, after.read_chars - before.read_chars

    assert cost(path)[0] < 250
    assert cost(large)[1] < 500_000  # of 1.3 MB


def test_a_long_name_that_runs_on_beyond_its_size_is_an_error(tmp_path: Path) -> None:
    """Some readers go by the size alone and some on to the next zero: the name would be another for each."""
    name = "d" * 120 + ".txt"
    path = write_tar(tmp_path / "a.tar", {name: b"1"}, tarfile.GNU_FORMAT)
    content = bytearray(path.read_bytes())
    end = 512 + len(name)  # where the zero behind the name lies, with which its size ends
    content[end : end + 1] = b"!"
    path.write_bytes(content)
    assert [member.name for member in members(path)] == [f"{name}!".encode()]
    assert members(path) == by_tarfile(path)
    content[end + 1 : end + 2] = b"x"
    path.write_bytes(content)
    with pytest.raises(CorruptError, match=r"long name[\s\S]*offset 512"):
        members(path)


@pytest.mark.parametrize(("start", "end"), [(100, 108), (108, 116), (116, 124), (136, 148)])
def test_a_header_field_without_octal_digits_is_an_error_unless_zero(start: int, end: int, tmp_path: Path) -> None:
    """The checksum of the header is right."""
    path = write_tar(tmp_path / "a.tar", {"a.txt": b"1"})
    content = bytearray(path.read_bytes())
    content[start + 1] += 9
    content[0] -= 9
    path.write_bytes(content)
    with pytest.raises(CorruptError, match=r"octal digits[\s\S]*offset 0"):
        members(path)
    content[start:end] = bytes(end - start)  # as some writers leave them
    set_checksum(content)
    path.write_bytes(content)
    assert len(members(path)) == 1


@pytest.mark.parametrize("kinds", [("gnu", "gnu"), ("pax", "pax"), ("gnu", "pax"), ("pax", "gnu")])
def test_two_long_names_for_one_member_are_an_error(kinds: tuple[str, str], tmp_path: Path) -> None:
    names = ["a" * 120 + ".txt", "b" * 120 + ".txt"]
    tars = [
        write_tar(tmp_path / f"{i}.tar", {name: b"1"}, FORMATS[kind]).read_bytes()
        for i, (kind, name) in enumerate(zip(kinds, names, strict=True))
    ]
    path = tmp_path / "both.tar"
    path.write_bytes(tars[0][:1024] + tars[1])  # the extended header of one before that of the other
    with pytest.raises(CorruptError, match=r"a second[\s\S]*offset 1024"):
        members(path)

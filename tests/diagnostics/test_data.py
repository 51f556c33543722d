"""Whatever is damaged is found and named, and what an interrupted check has read is not read again."""

import hashlib
import json
import os
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from tests.sources.mds.streaming_mds import MDSWriter
from tests.support.tar import write_tar

import rankfeed as rf
from rankfeed.diagnostics import DataVerdict, verify_data


@pytest.fixture(autouse=True)
def _cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def packed(folder: Path) -> Path:
    rows = ({"x": np.full(i % 5, i), "y": i} for i in range(100))
    rf.write(rows, folder, shard_bytes=500, progress=False)
    return folder


def tars(folder: Path, shards: int = 3) -> Path:
    for shard in range(shards):
        parts = {"txt": b"text %d", "cls": b"%d"}
        members = {f"{shard}-{row}.{suffix}": part % row for row in range(6) for suffix, part in parts.items()}
        write_tar(folder / f"{shard}.tar", members)
    return folder


def wids(folder: Path) -> Path:
    """A descriptor with checksums, as wids-index makes it."""
    tars(folder)
    shards = [
        {
            "url": path.name,
            "md5sum": hashlib.md5(path.read_bytes()).hexdigest(),
            "nsamples": 6,
            "filesize": path.stat().st_size,
        }
        for path in sorted(folder.glob("*.tar"))
    ]
    described = folder / "index.json"
    described.write_text(json.dumps({"__kind__": "wids-shard-index-v1", "wids_version": 1, "shardlist": shards}))
    return described


def mds(folder: Path) -> Path:
    with MDSWriter(out=str(folder), columns={"x": "int", "s": "str"}, hashes=["sha1"], size_limit=600) as out:
        for i in range(60):
            out.write({"x": i, "s": f"sample {i}"})
    return folder


KINDS: dict[str, Callable[[Path], Path]] = {"packed": packed, "wids": wids, "mds": mds}


def files(where: Path) -> list[Path]:
    folder = where if where.is_dir() else where.parent
    return sorted(path for path in folder.iterdir() if path.suffix in (".arrow", ".tar", ".mds"))


def flip(path: Path, place: int, bit: int = 1) -> None:
    """Change a bit, and no time: what a disk does."""
    before = path.stat()
    content = bytearray(path.read_bytes())
    content[place] ^= bit
    path.write_bytes(content)
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))


def names(verdict: DataVerdict) -> str:
    return "\n".join(map(str, verdict.damage))


@pytest.mark.parametrize("kind", KINDS)
def test_verify_data_finds_a_flipped_bit_in_each_file_of_a_format_with_checksums(
    kind: str, tmp_path: Path
) -> None:
    where = KINDS[kind](tmp_path / kind)
    assert verify_data(where).sound
    chance = random.Random(kind)
    for path in files(where):
        place, bit = chance.randrange(path.stat().st_size), 1 << chance.randrange(8)
        flip(path, place, bit)
        verdict = verify_data(where)
        assert verdict.count, f"{path}, byte {place}, bit {bit}"
        assert path.name in names(verdict)
        flip(path, place, bit)
    assert verify_data(where).sound


@pytest.mark.parametrize("kind", KINDS)
def test_verify_data_lists_a_missing_a_truncated_and_an_extra_shard_in_one_run(kind: str, tmp_path: Path) -> None:
    where = KINDS[kind](tmp_path / kind)
    first, second, third, *_ = files(where)
    first.unlink()
    second.write_bytes(second.read_bytes()[:-100])
    extra = third.with_name(third.name.replace(third.name.split(".")[-2][-1], "9"))
    shutil.copy(third, extra)
    verdict = verify_data(where)
    told = names(verdict)
    assert all(path.name in told for path in (first, second, extra)), told
    assert third.name not in told.replace(extra.name, "")
    assert len(verify_data(where, limit=1).damage) == 1
    assert verify_data(where, limit=1).count == verdict.count >= 3


@pytest.mark.parametrize("kind", KINDS)
def test_verify_data_names_both_of_two_swapped_shards(kind: str, tmp_path: Path) -> None:
    where = KINDS[kind](tmp_path / kind)
    first, second, *_ = files(where)
    one, two = first.read_bytes(), second.read_bytes()
    first.write_bytes(two)
    second.write_bytes(one)
    verdict = verify_data(where)
    assert first.name in names(verdict)
    assert second.name in names(verdict)


def test_verify_data_finds_a_wrong_sample_count_in_a_wids_index(tmp_path: Path) -> None:
    where = wids(tmp_path / "wids")
    said = json.loads(where.read_text())
    said["shardlist"][1]["nsamples"] = 7
    where.write_text(json.dumps(said))
    (damage,) = verify_data(where).damage
    assert (damage.expected, damage.found) == ("7 samples", "6 samples")


def test_verify_data_finds_a_rankfeed_tar_index_that_contradicts_the_tar_headers(tmp_path: Path) -> None:
    folder = tars(tmp_path / "tars")
    rf.open(folder)  # makes the indexes
    assert verify_data(folder).sound is not False
    path = folder / "0.tar"
    before = path.stat()
    # Another archive of the same size and time: the index cannot know.
    content = path.read_bytes()
    second = content[1024:2048] + content[:1024]
    path.write_bytes(second + content[2048:])
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert "0.tar.rankfeed" in names(verify_data(folder))


def test_verify_data_finds_a_wrong_offset_in_an_idx_file_of_another_library(tmp_path: Path) -> None:
    folder = tars(tmp_path / "tars")
    offsets = np.arange(7) * 2048
    offsets.astype("<u8").tofile(folder / "1.tar.idx")
    assert verify_data(folder).sound is not False
    offsets[3] += 512
    offsets.astype("<u8").tofile(folder / "1.tar.idx")
    assert "1.tar.idx, entry 3: offsets" in names(verify_data(folder))


def test_tars_without_checksums_are_decoded_only_and_a_truncated_tar_is_reported(tmp_path: Path) -> None:
    folder = tars(tmp_path / "tars")
    verdict = verify_data(folder)
    assert "decoded only" in verdict.how
    assert verdict.sound is None
    assert [finding.code for finding in verdict.findings] == ["no-checksums"]
    path = folder / "2.tar"
    path.write_bytes(path.read_bytes()[:5000])
    assert "2.tar" in names(verify_data(folder))


def test_verify_data_finds_a_flipped_bit_in_a_member_of_an_npz_file(tmp_path: Path) -> None:
    folder = tmp_path / "arrays"
    folder.mkdir()
    for index in range(4):
        np.savez(folder / f"{index}.npz", x=np.arange(1000))
    assert verify_data(folder).sound is not False
    flip(folder / "2.npz", 4000)
    assert "2.npz" in names(verify_data(folder))


def parquet(path: Path, **options: Any) -> Path:
    """Five row groups of numbers."""
    table = pa.table({"x": np.arange(5000)})
    pq.write_table(table, path, row_group_size=1000, use_dictionary=False, compression="none", **options)
    return path


def page_of(path: Path) -> int:
    """Where the page of row group 2 begins."""
    with pq.ParquetFile(path) as file:
        return int(file.metadata.row_group(2).column(0).data_page_offset)


@pytest.mark.parametrize("checksums", [True, False])
def test_verify_data_reports_a_damaged_parquet_page_once_with_its_row_group(
    checksums: bool, tmp_path: Path
) -> None:
    """Damage in the values of a page with a checksum, or in the header of a page without one."""
    path = parquet(tmp_path / "table.parquet", write_page_checksum=checksums)
    assert verify_data(path).sound is (True if checksums else None)
    flip(path, page_of(path) + 1000 * checksums, 0xFF)
    verdict = verify_data(path)
    assert verdict.count == 1, names(verdict)
    assert "row group 2" in names(verdict)


@pytest.mark.parametrize("checksums", [False, True])
@pytest.mark.parametrize("dictionary", [False, True])
@pytest.mark.parametrize("version", ["1.0", "2.0"])
def test_intact_parquet_is_sound_with_page_checksums_and_unproven_without_them(
    checksums: bool, dictionary: bool, version: str, tmp_path: Path
) -> None:
    table = pa.table({"x": np.arange(5000) % 7, "s": [str(i % 9) for i in range(5000)]})
    options: Any = {"use_dictionary": dictionary, "data_page_version": version, "write_page_checksum": checksums}
    pq.write_table(table, tmp_path / "table.parquet", row_group_size=1000, **options)
    assert verify_data(tmp_path / "table.parquet").sound is (True if checksums else None)


def test_verify_data_reports_a_parquet_file_that_cannot_be_opened_and_damage_in_another(tmp_path: Path) -> None:
    first, _, last = (parquet(tmp_path / f"{index}.parquet") for index in range(3))
    flip(first, first.stat().st_size - 1)
    flip(last, page_of(last), 0xFF)
    verdict = verify_data(tmp_path)
    assert verdict.count == 2, names(verdict)
    assert [f"{index}.parquet" in names(verdict) for index in range(3)] == [True, False, True]


def test_verify_data_counts_each_sample_that_cannot_be_decoded_as_one_damage(tmp_path: Path) -> None:
    folder = tars(tmp_path / "tars")
    path = folder / "1.tar"
    content = path.read_bytes()
    # The class of a sample is no number any more.
    for row in (2, 4):
        place = content.index(b"%d" % row + bytes(511), content.index(f"1-{row}.cls".encode()))
        flip(path, place, 0x40)
    verdict = verify_data(folder)
    assert verdict.count == 2, names(verdict)


def interrupted(where: Path, at: float) -> None:
    """A check that ends when it has read this share."""

    def interrupt(share: float) -> None:
        if share > at:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        verify_data(where, progress=interrupt)


def test_an_interrupted_verify_data_resumes_where_it_stopped_unless_resume_is_false(tmp_path: Path) -> None:
    where = packed(tmp_path / "packed")
    interrupted(where, 0.5)
    later = verify_data(where)
    assert 0 < later.resumed < later.pieces == len(files(where))
    assert verify_data(where).resumed == 0, "a check that came to its end is forgotten"
    interrupted(where, 0.5)
    assert verify_data(where, resume=False).resumed == 0


@pytest.mark.parametrize("is_copy", [False, True], ids=["changed", "a damaged copy"])
def test_a_resumed_verify_data_rereads_shards_that_changed_since_the_interruption(
    is_copy: bool, tmp_path: Path
) -> None:
    """Shards modified in place, or replaced by damaged copies, as on another host that shares the cache."""
    where = packed(tmp_path / "packed")
    interrupted(where, 0.7)
    for path in files(where):
        copy = shutil.copy2(path, tmp_path / "copy") if is_copy else path
        before = copy.stat()
        flip(copy, before.st_size // 2)
        if is_copy:
            os.replace(copy, path)
        else:
            os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns + 1))
    assert verify_data(where).count == len(files(where))


def test_verify_data_reports_progress_that_rises_to_one(tmp_path: Path) -> None:
    shares: list[float] = []
    verify_data(packed(tmp_path / "packed"), progress=shares.append)
    assert shares == sorted(shares)
    assert shares[-1] == 1.0


def test_verify_data_reports_an_unreadable_shard_and_still_checks_the_others(tmp_path: Path) -> None:
    where = wids(tmp_path / "wids")
    first, second, third = files(where)
    first.unlink()
    first.mkdir()
    Path(f"{second}.idx").mkdir()
    flip(third, 600)
    told = names(verify_data(where))
    assert all(path.name in told for path in (first, second, third)), told


def test_mds_shards_with_an_unknown_hash_algorithm_are_decoded_only(tmp_path: Path) -> None:
    where = mds(tmp_path / "mds")
    index = where / "index.json"
    index.write_text(index.read_text().replace('"sha1"', '"blake9"'))
    assert "decoded only" in verify_data(where).how


def test_verify_data_ignores_a_broken_symlink_that_is_not_a_data_file(tmp_path: Path) -> None:
    for index in range(2):
        np.save(tmp_path / f"{index}.npy", np.arange(6))
    (tmp_path / "latest").symlink_to("nowhere")
    assert verify_data(tmp_path).count == 0


def test_verify_data_raises_argument_error_for_an_option_that_the_format_does_not_have(tmp_path: Path) -> None:
    np.save(tmp_path / "rows.npy", np.arange(6))
    with pytest.raises(rf.errors.ArgumentError, match="no such option"):
        verify_data(tmp_path / "rows.npy", split="train")


def test_verify_data_raises_source_error_for_a_path_that_does_not_exist(tmp_path: Path) -> None:
    with pytest.raises(rf.errors.SourceError):
        verify_data(tmp_path / "nowhere")


def test_a_verdict_of_verify_data_can_be_serialized_as_json_and_printed(tmp_path: Path) -> None:
    told: dict[str, Any] = verify_data(packed(tmp_path / "packed")).as_dict()
    assert json.loads(json.dumps(told))["sound"] is True
    assert "verdict: sound" in str(verify_data(tmp_path / "packed"))

"""A manifest is untrusted input: whatever is wrong with it is named."""

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import rankfeed as rf
from rankfeed.errors import CorruptError, SourceError


@pytest.fixture
def packed(tmp_path: Path) -> Path:
    rf.write([{"x": i, "t": "a" * i} for i in range(40)], tmp_path / "p", shard_bytes=200, progress=False)
    return tmp_path / "p"


def edited(packed: Path, edit: Callable[[dict[str, Any]], None]) -> None:
    path = packed / "rankfeed.json"
    manifest = json.loads(path.read_text())
    edit(manifest)
    path.write_text(json.dumps(manifest))


def put(*keys: Any, to: Any) -> Callable[[dict[str, Any]], None]:
    def edit(manifest: Any) -> None:
        for key in keys[:-1]:
            manifest = manifest[key]
        manifest[keys[-1]] = to

    return edit


@pytest.mark.parametrize(
    ("edit", "said"),
    [
        (put("num_rows", to="forty"), r"\$\.num_rows"),
        (put("num_rows", to=-1), r"\$\.num_rows"),
        (put("num_rows", to=41), "num_rows is 41"),
        (put("num_rows", to=10**30), "num_rows|range"),
        (put("shards", to={}), r"\$\.shards"),
        (put("shards", to=[]), "no shards"),
        (put("shards", 0, "rows", to=1.5), r"\$\.shards\[0\]\.rows"),
        (put("shards", 1, "xxh3", to="zz"), r"\$\.shards\[1\]\.xxh3"),
        (put("shards", 1, "path", to="shard-00000.arrow"), "listed twice"),
        (put("shards", 0, "block_rows", to=0), "block_rows"),
        (put("fields", to={}), "no fields"),
        (put("fields", "x", "kind", to="object"), "cannot be stored"),
        (put("fields", "x", "kind", to="pickle"), "kind"),
        (put("fields", "x", "dtype", to="O"), "dtype"),
        (put("fields", "x", "dtype", to="float32, object"), "dtype"),
        (put("fields", "x", "shape", to=[-1]), "shape"),
        (put("fields", "x", "shape", to=[2**62, 2**62]), "shape"),
        (put("surprise", to=1), "surprise"),
        (put("format", to="other"), "format"),
    ],
)
def test_an_invalid_manifest_raises_and_names_the_field(edit: Any, said: str, packed: Path) -> None:
    edited(packed, edit)
    with pytest.raises(CorruptError, match=said) as caught:
        rf.open(packed)
    assert "rankfeed.json" in str(caught.value)


def test_a_manifest_with_more_rows_than_the_file_can_hold_raises(packed: Path) -> None:
    def edit(manifest: dict[str, Any]) -> None:
        more = 10**15
        manifest["shards"][0] |= {"rows": manifest["shards"][0]["rows"] + more, "block_rows": 1}
        manifest["num_rows"] += more

    edited(packed, edit)
    with pytest.raises(CorruptError, match="rows in"):
        rf.open(packed)


@pytest.mark.parametrize("content", [b"", b"{", b"[1]", b"\xff\xfe", b"[" * 100_000, b"null"])
def test_a_manifest_that_is_not_a_json_object_raises(content: bytes, packed: Path) -> None:
    (packed / "rankfeed.json").write_bytes(content)
    with pytest.raises(CorruptError, match="damaged"):
        rf.open(packed)


def test_a_manifest_of_a_newer_version_is_a_source_error_and_not_corrupt(packed: Path) -> None:
    edited(packed, put("version", to=99))
    with pytest.raises(SourceError, match="newer rankfeed") as caught:
        rf.open(packed)
    assert not isinstance(caught.value, CorruptError)


def test_a_dataset_is_read_through_symbolic_links(packed: Path, tmp_path: Path) -> None:
    before = rf.open(packed).fingerprint
    (tmp_path / "link").symlink_to(packed)
    assert rf.open(tmp_path / "link").fingerprint == before
    samples = [dict(sample) for sample in rf.open(packed)]
    (tmp_path / "elsewhere").mkdir()
    name = "shard-00000.arrow"
    os.rename(packed / name, tmp_path / "elsewhere" / name)
    (packed / "sub").symlink_to(tmp_path / "elsewhere")
    edited(packed, put("shards", 0, "path", to=f"sub/{name}"))
    np.testing.assert_equal([dict(sample) for sample in rf.open(packed)], samples)


def test_a_shard_with_other_columns_than_the_manifest_raises(packed: Path, tmp_path: Path) -> None:
    rf.write([{"z": 1.0}], tmp_path / "q", progress=False)
    other = (tmp_path / "q" / "shard-00000.arrow").read_bytes()
    (packed / "shard-00000.arrow").write_bytes(other)
    edited(packed, put("shards", 0, "bytes", to=len(other)))
    with pytest.raises(CorruptError, match="other columns"):
        rf.open(packed)[0]


def test_blocks_of_a_written_dataset_have_at_most_four_mebibytes(tmp_path: Path) -> None:
    rows = ({"x": np.zeros(1 << 20, np.uint8)} for _ in range(10))
    source = rf.write(rows, tmp_path / "p", progress=False)
    assert source.blocks.tolist() == [4, 4, 2]
    assert source.blocks.dtype == np.int64

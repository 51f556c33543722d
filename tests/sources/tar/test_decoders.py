"""Members are decoded as WebDataset decodes them, and nothing in them runs or explodes."""

import gzip
import io
import json
import pickle
from pathlib import Path
from typing import Any

import msgpack
import numpy as np
import pytest
import soundfile
import torch
import webdataset
from PIL import Image
from tests.support.tar import write_tar
from tests.support.values import plain

import rankfeed as rf
from rankfeed.errors import ArgumentError, CorruptError, SourceError, UnsafeError
from rankfeed.sources.tar import decoders
from rankfeed.sources.tar.decoders import decoder_of


def saved(array: Any, savez: Any = np.savez) -> bytes:
    """The content of a .npy file, or of a .npz file for arrays by name."""
    file = io.BytesIO()
    savez(file, **array) if isinstance(array, dict) else np.save(file, array)
    return file.getvalue()


def picture(mode: str, size: tuple[int, int], format: str = "PNG") -> bytes:
    rng = np.random.default_rng(0)
    bands = {"L": (), "RGB": (3,), "RGBA": (4,)}[mode]
    file = io.BytesIO()
    Image.fromarray(rng.integers(0, 256, (size[1], size[0], *bands), np.uint8)).save(file, format)
    return file.getvalue()


def sound(frames: int, channels: int, rate: int, format: str = "WAV") -> bytes:
    file = io.BytesIO()
    soundfile.write(file, np.random.default_rng(0).uniform(-1, 1, (frames, channels)), rate, format=format)
    return file.getvalue()


def tar_of(path: Path, rows: list[dict[str, bytes]]) -> Path:
    """An archive of samples by the contents of their members."""
    members = [(f"{key:03d}.{name}", content) for key, row in enumerate(rows) for name, content in row.items()]
    return write_tar(path, members)


def test_members_are_decoded_as_webdataset_decodes_them(tmp_path: Path) -> None:
    row = {
        "txt": "é\n".encode(),
        "cap.text": b"a",
        "transcript": b"",
        "cls": b" 7\n",
        "index": b"-3",
        "id": b"12",
        "json": json.dumps({"a": [1, 2.5, None, float("nan")], "big": 2**70}).encode(),
        "mp": msgpack.packb({"a": [1, b"x", "y"]}),
        "npz": saved({"a": np.arange(3), "b": np.eye(2)}),
        "npy": saved(np.arange(6).reshape(2, 3)),
        "x.txt.gz": gzip.compress(b"packed"),
        "y.npy.gz": gzip.compress(saved(np.eye(3, dtype=np.float32))),
        "z.bin.gz": gzip.compress(b"\x00\xff"),
        "weird": b"\x00\x01",
    }
    path = tar_of(tmp_path / "a.tar", [row, row])
    theirs = next(iter(webdataset.WebDataset(str(path), shardshuffle=False).decode()))
    source = rf.open(path)
    ours = source[1]
    kinds = {name: str(source.fields[name]) for name in ("__key__", "txt", "cls", "json", "mp", "npy", "weird")}
    assert list(kinds.values()) == ["str", "str", "int64", "object", "object", "int64[2, 3]", "bytes"]
    assert ours.keys() - {"__key__"} == row.keys()
    for name in row:
        mine = int(ours[name]) if isinstance(theirs[name], int) else ours[name]
        assert repr(mine) == repr(theirs[name]), name


def test_images_are_uint8_arrays_equal_to_rgb8_of_webdataset(tmp_path: Path) -> None:
    ppm = picture("RGB", (3, 2), "PPM")
    rows = [
        {"png": picture("RGB", (5, 4)), "jpg": picture("RGB", (8, 8), "JPEG"), "ppm": ppm},
        {"png": picture("RGBA", (3, 2)), "jpg": picture("L", (9, 7), "JPEG"), "ppm": ppm},
    ]
    path = tar_of(tmp_path / "a.tar", rows)
    source = rf.open(path, decode={"ppm": "dense"})
    decoded = webdataset.WebDataset(str(path), shardshuffle=False).decode("rgb8")
    for ours, theirs in zip(source, decoded, strict=True):
        for name in rows[0]:
            np.testing.assert_array_equal(ours[name], theirs[name])
    assert str(source.fields["png"]) == "object"
    assert str(source.fields["ppm"]) == "uint8[2, 3, 3]"
    with pytest.raises(SourceError, match=r"\.png do not form a dense column[\s\S]*\"object\""):
        rf.open(path, decode={"png": "dense"})


def test_sounds_are_float32_arrays_with_a_column_of_sampling_rates(tmp_path: Path) -> None:
    rows = [{"wav": sound(n, 2, 8000 + n), "flac": sound(n, 1, 16000, "FLAC")} for n in (1, 5, 800)]
    source = rf.open(tar_of(tmp_path / "a.tar", rows))
    sounds = {"wav": "float32[*, 2]", "wav.rate": "int64", "flac": "float32[*, 1]", "flac.rate": "int64"}
    assert {name: str(field) for name, field in source.fields.items()} == {"__key__": "str", **sounds}
    for sample, row in zip(source, rows, strict=True):
        for name in row:
            samples, rate = soundfile.read(io.BytesIO(row[name]), dtype="float32", always_2d=True)
            np.testing.assert_array_equal(sample[name], samples)
            assert sample[f"{name}.rate"] == rate
    assert list(rf.open(tmp_path / "a.tar", columns=["wav.rate"])[1]) == ["wav.rate"]
    tar_of(tmp_path / "b.tar", [{"wav": sound(9, 1 + (n == 20), 8000)} for n in range(40)])
    with pytest.raises(SourceError, match=r"unlike[\s\S]*float32\[\*, 1\][\s\S]*'020'"):
        rf.open(tmp_path / "b.tar").fetch(range(40))


def test_pickled_members_are_refused_unless_allow_pickle_is_set(tmp_path: Path) -> None:
    marker = tmp_path / "ran"

    class Bomb:
        def __reduce__(self) -> tuple[Any, ...]:
            return Path.touch, (marker,)

    bomb = pickle.dumps(Bomb())
    for extension in ("pyd", "pkl", "pickle", "pth", "pt", "ten", "tb", "x.pkl.gz"):
        path = tar_of(tmp_path / "a.tar", [{extension: bomb, "cls": b"1"}])
        with pytest.raises(UnsafeError, match=r"runs code[\s\S]*a\.tar[\s\S]*allow_pickle=True"):
            rf.open(path)
        assert rf.open(path, columns=["cls"])[0]["cls"] == 1
        assert rf.open(path, decode={extension: False})[0][extension] == bomb
    for name, content in (("npy", saved(np.array([Bomb()]))), ("npz", saved({"a": np.array([Bomb()])}))):
        with pytest.raises(UnsafeError, match=r"a\.tar, sample '000'[\s\S]*allow_pickle=True"):
            rf.open(tar_of(tmp_path / "a.tar", [{name: content}]))[0]
    assert not marker.exists()
    tensor = io.BytesIO()
    torch.save(torch.arange(3), tensor)
    path = tar_of(tmp_path / "a.tar", [{"pyd": pickle.dumps({"a": 1}), "pth": tensor.getvalue()}])
    sample = rf.open(path, allow_pickle=True)[0]
    assert (sample["pyd"], sample["pth"].tolist()) == ({"a": 1}, [0, 1, 2])


BOMB = gzip.compress(bytes(1 << 24))


@pytest.mark.parametrize(
    ("extension", "data", "message"),
    [
        ("bin.gz", BOMB, "expands too much"),
        ("bin.gz", gzip.compress(b"") * 3 + BOMB, "expands too much"),
        ("npz", saved({"a": np.zeros(1 << 20)}, np.savez_compressed), "expands too much"),
        ("png", picture("L", (1 << 10, 1 << 10)), "too large"),
        ("flac", sound(1 << 19, 1, 8000, "FLAC"), "too long"),
    ],
    ids=["gzip", "concatenated gzip", "npz", "image", "sound"],
)
def test_a_member_that_expands_beyond_the_limit_is_refused(
    extension: str, data: bytes, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(decoders, "LIMIT", 1 << 20)
    with pytest.raises(UnsafeError, match=message):
        decoder_of(extension).decode(data)  # type: ignore[misc]


def test_many_concatenated_gzip_streams_are_decoded() -> None:
    data = gzip.compress(b"") * 100_000 + gzip.compress(b"end") + bytes(1 << 16)
    assert decoder_of("bin.gz").decode(data) == b"end"  # type: ignore[misc]


BROKEN = {
    "txt": b"\xff\xfe",
    "cls": b"seven",
    "id": b"9" * 30,
    "json": b'{"a": ',
    "jsn": b"[" * 100_000,
    "mp": b"\xdd\xff\xff\xff\xff",
    "npy": b"\x93NUMPY\x01\x00v\x00{'descr': '<f8', 'fortran_order': False, 'shape': (99,), }".ljust(128) + b"\n",
    "npz": b"PK\x03\x04",
    "png": b"\x89PNG\r\n",
    "jpg": b"no image",
    "wav": b"RIFF",
    "gz.txt.gz": gzip.compress(b"x" * 100)[:-12],
    "cls.gz": b"no gzip",
}


@pytest.mark.parametrize("extension", BROKEN)
def test_a_member_that_cannot_be_decoded_is_an_error_that_names_it(extension: str, tmp_path: Path) -> None:
    path = tar_of(tmp_path / "a.tar", [{extension: BROKEN[extension]}])
    with pytest.raises(CorruptError, match=r"a\.tar, sample '000', \.\S+ at offset 512"):
        rf.open(path).fetch([0]).samples()
    assert rf.open(path, decode=False)[0][extension] == BROKEN[extension]


def test_a_damaged_npz_member_is_an_error_that_names_its_sample(tmp_path: Path) -> None:
    whole = saved({"a": np.arange(8011), "words": np.array(["x", "yz"])})
    five = np.int64(5000).tobytes()
    assert whole.count(five) == 1
    damaged = [whole.replace(five, five[::-1]), whole.replace(b"(8011,)", b"(1,)   ")]
    path = tar_of(tmp_path / "a.tar", [{"npz": item} for item in (whole, *damaged)])
    source = rf.open(path)
    arrays = source[0]["npz"]
    assert plain(arrays) == {"a": [*range(8011)], "words": ["x", "yz"]}
    assert arrays["a"].flags.writeable
    with pytest.raises(CorruptError, match=r"CRC[\s\S]*a\.tar, sample '001'"):
        source[1]
    with pytest.raises(CorruptError, match=r"contradicts its header[\s\S]*a\.tar, sample '002'"):
        source[2]


def test_decoders_given_as_functions_are_applied_by_extension_or_to_all_members(tmp_path: Path) -> None:
    path = tar_of(tmp_path / "a.tar", [{"a.x": bytes([n] * n), "b.x": b"q"} for n in range(1, 4)])

    def lengths(data: bytes) -> Any:
        return np.frombuffer(data, np.uint8).astype(np.int64)

    source = rf.open(path, decode={"a.x": lengths, "b.x": lambda data: {"of": data}})
    assert [sample["a.x"].tolist() for sample in source] == [[1], [2, 2], [3, 3, 3]]
    assert (str(source.fields["a.x"]), source[0]["b.x"]) == ("int64[*]", {"of": b"q"})
    assert rf.open(path, decode={"x": len})[2] == {"__key__": "002", "a.x": 3, "b.x": 1}
    assert rf.open(path, decode=lambda extension, data: f"{extension} {len(data)}")[1]["a.x"] == "a.x 2"
    with pytest.raises(CorruptError, match=r"ZeroDivisionError[\s\S]*a\.tar, sample '000'"):
        rf.open(path, decode={"x": lambda _: 1 // 0})
    for wrong in ({"y": len}, {"x": "thick"}, {"x": 3}):
        with pytest.raises(ArgumentError, match="decode"):
            rf.open(path, decode=wrong)

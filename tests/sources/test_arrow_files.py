"""Arrow IPC files and streams of others are read in place; damage is named, and no view leads out of a file."""

import gc
import pickle
import subprocess
import sys
from collections import Counter
from decimal import Decimal
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pyarrow as pa
import pyarrow.feather
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.support.seeds import fresh_seed
from torch.utils.data import DataLoader

import rankfeed as rf
from rankfeed.columns import Field
from rankfeed.errors import ArgumentError, CorruptError, SourceError
from rankfeed.sources import arrow_files as module
from rankfeed.sources.arrow_files import ArrowSource
from rankfeed.storage import mapped

KINDS = {
    "x": pa.float32(),
    "n": pa.int64(),
    "small": pa.uint8(),
    "half": pa.float16(),
    "flag": pa.bool_(),
    "text": pa.string(),
    "large": pa.large_string(),
    "raw": pa.binary(),
    "ragged": pa.list_(pa.int32()),
    "wide": pa.large_list(pa.float64()),
    "vector": pa.list_(pa.float32(), 3),
    "matrix": pa.list_(pa.list_(pa.int16(), 2), 3),
    "rows": pa.list_(pa.list_(pa.float32(), 2)),
    "deep": pa.list_(pa.list_(pa.int64())),
    "words": pa.list_(pa.string()),
    "kind": pa.dictionary(pa.int8(), pa.string()),
    "when": pa.timestamp("us"),
    "day": pa.date32(),
    "price": pa.decimal128(8, 2),
    "pair": pa.struct([("a", pa.int8()), ("b", pa.struct([("c", pa.string())]))]),
    "nothing": pa.list_(pa.null()),
    "more": pa.binary(3),
}
SCHEMA = pa.schema([pa.field(name, kind) for name, kind in KINDS.items()])


def row(i: int) -> dict[str, Any]:
    return {
        "x": i / 2, "n": -i, "small": i % 256, "half": i, "flag": i % 3 == 0, "text": "é" * (i % 4),
        "large": f"row {i}", "raw": bytes([i % 256]) * (i % 3), "ragged": list(range(i % 5)),
        "wide": [i / 3] * (i % 4), "vector": [i, i + 1, i + 2], "matrix": [[i, 1], [2, 3], [4, i]],
        "rows": [[i, 1.0]] * (i % 3), "deep": [[i] * (i % 2), [1, 2]], "words": ["a", "b" * (i % 3)],
        "kind": f"kind {i % 7}", "when": i * 10**6, "day": i, "price": Decimal(i) / 4,
        "pair": {"a": i % 100, "b": {"c": str(i)}}, "nothing": [], "more": b"%03d" % (i % 1000),
    }  # fmt: skip


def table(rows: int, first: int = 0) -> pa.Table:
    return pa.Table.from_pylist([row(i) for i in range(first, first + rows)], SCHEMA)


def write(path: Path, batches: list[Any], *, stream: bool = False, compression: str | None = None) -> Path:
    make = pa.ipc.new_stream if stream else pa.ipc.new_file
    options = pa.ipc.IpcWriteOptions(compression=compression, emit_dictionary_deltas=True)
    with make(str(path), batches[0].schema, options=options) as writer:
        for batch in batches:
            writer.write(batch)
    return path


def cut(whole: pa.Table, *sizes: int) -> list[Any]:
    """Record batches of these sizes."""
    ends = np.cumsum(sizes).tolist()
    return [
        whole.slice(end - size, size).combine_chunks().to_batches()[0]
        for end, size in zip(ends, sizes, strict=True)
    ]


def as_samples(whole: pa.Table) -> list[dict[str, Any]]:
    """What pyarrow gives, with structs taken apart and times as the numbers that they are stored as."""
    whole = whole.flatten().flatten()
    for name, kind in (("when", pa.int64()), ("day", pa.int32())):
        if name in whole.column_names:
            index = whole.column_names.index(name)
            whole = whole.set_column(index, name, whole[name].cast(kind).cast(pa.int64()))
    rows: list[dict[str, Any]] = whole.to_pylist()
    return [{name: float(v) if isinstance(v, Decimal) else v for name, v in each.items()} for each in rows]


def same(found: dict[str, Any], expected: dict[str, Any]) -> bool:
    def listed(value: Any) -> Any:
        if isinstance(value, list):
            return [listed(each) for each in value]
        return value.tolist() if isinstance(value, (np.ndarray, np.generic)) else value

    return {name: listed(value) for name, value in found.items()} == expected


WAYS = [(stream, codec) for stream in (False, True) for codec in (None, "lz4", "zstd")]


@pytest.mark.parametrize(("stream", "compression"), WAYS)
def test_every_sample_is_what_arrow_gives_whatever_the_record_batches(
    stream: bool, compression: str | None, tmp_path: Path
) -> None:
    whole = table(100)
    write(tmp_path / "t.arrow", cut(whole, 1, 40, 7, 30, 22), stream=stream, compression=compression)
    source = rf.open(tmp_path / "t.arrow")
    assert isinstance(source, ArrowSource)
    expected = as_samples(whole)
    order = np.random.default_rng(0).integers(0, 100, 250)
    for i, found in zip(order.tolist(), source.fetch(order).samples(), strict=True):
        assert same(found, expected[i]), (found, expected[i])
    assert source.fetch([]).num_rows == 0
    assert int(source.blocks.sum()) == len(source) == 100


def test_columns_are_what_their_arrow_type_says(tmp_path: Path) -> None:
    write(tmp_path / "t.arrow", cut(table(9), 9))
    fields = rf.open(tmp_path / "t.arrow").fields
    assert {name: str(field) for name, field in fields.items()} == {
        "x": "float32", "n": "int64", "small": "uint8", "half": "float16", "flag": "bool", "text": "str",
        "large": "str", "raw": "bytes", "ragged": "int32[*]", "wide": "float64[*]", "vector": "float32[3]",
        "matrix": "int16[3, 2]", "rows": "float32[*, 2]", "deep": "object", "words": "object", "kind": "str",
        "when": "int64", "day": "int64", "price": "float64", "pair.a": "int8", "pair.b.c": "str",
        "nothing": "object", "more": "bytes",
    }  # fmt: skip


def test_what_is_not_compressed_is_read_in_the_file_itself(tmp_path: Path) -> None:
    write(tmp_path / "t.arrow", cut(table(50), 20, 30))
    source = rf.open(tmp_path / "t.arrow", columns=["text", "ragged", "x"])
    assert source.default_shuffle == "global"
    size = (tmp_path / "t.arrow").stat().st_size
    for name in ("text", "ragged"):
        column: Any = source.fetch([3, 25, 49])[name]
        assert len(column.parts) == 1  # whatever the number of record batches
        assert column.parts[0].values.nbytes in range(size - 8, size + 1)
        assert not column.parts[0].values.flags.writeable
    write(tmp_path / "c.arrow", cut(table(50), 20, 30), compression="lz4")
    assert rf.open(tmp_path / "c.arrow", columns=["text"]).default_shuffle == "window"
    assert rf.open(tmp_path / "t.arrow", columns=["words"]).default_shuffle == "window"


@pytest.mark.parametrize("kept", [0, 50_000, 1 << 40])
def test_large_rows_are_the_same_by_calls_and_from_what_stays_mapped(
    kept: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gc.collect()
    monkeypatch.setattr(mapped, "_residency", mapped._Residency())
    monkeypatch.setattr(mapped, "RESIDENT_BYTES", 0)
    monkeypatch.setattr(mapped, "KEPT_BYTES", kept)
    rng = np.random.default_rng(0)
    lengths = rng.integers(3000, 9000, 60).tolist()
    rows = [rng.integers(97, 123, length, dtype=np.uint8).tobytes() for length in lengths]
    whole = pa.table(
        {
            "raw": rows,
            "text": [row.decode() for row in rows],
            "ragged": pa.array([np.frombuffer(row[: len(row) // 8 * 8], np.float64) for row in rows]),
            "n": list(range(60)),
        }
    )
    paths = [tmp_path / "a.arrow", tmp_path / "b.arrow"]
    write(paths[0], cut(whole.slice(0, 40), 15, 25))
    write(paths[1], cut(whole.slice(40), 20))
    source = rf.open(paths)
    order = rng.permutation(60)
    found = source.fetch(order)
    for name in ("raw", "text", "ragged"):
        assert all(part.region is not None for part in found[name].parts)  # type: ignore[attr-defined]
    for i, sample in zip(order.tolist(), found.samples(), strict=True):
        assert (sample["raw"], sample["text"], sample["n"]) == (rows[i], rows[i].decode(), i)
        assert sample["ragged"].tobytes() == rows[i][: len(rows[i]) // 8 * 8]
    padded = found["ragged"].pad()  # type: ignore[attr-defined]
    for i, row in zip(order.tolist(), padded, strict=True):
        assert row.tobytes().rstrip(b"\0") == rows[i][: len(rows[i]) // 8 * 8]


@pytest.mark.parametrize("compression", ["uncompressed", "lz4", "zstd"])
def test_feather_and_polars_files_are_read(compression: Any, tmp_path: Path) -> None:
    whole = table(100).drop_columns(["half", "nothing", "price"])
    pyarrow.feather.write_feather(whole, tmp_path / "f.feather", compression=compression, chunksize=30)
    assert all(same(a, b) for a, b in zip(rf.open(tmp_path / "f.feather"), as_samples(whole), strict=True))
    frame = pl.DataFrame(
        {"x": range(100), "y": [[i] * (i % 3) for i in range(100)], "z": [f"é{i}" for i in range(100)]}
    )
    frame.write_ipc(tmp_path / "p.arrow", compression=compression)  # text as views, which have a buffer more
    assert all(same(a, b) for a, b in zip(rf.open(tmp_path / "p.arrow"), frame.to_dicts(), strict=True))


@given(
    st.lists(st.lists(st.lists(st.integers(-100, 100), max_size=3), max_size=5), min_size=1, max_size=5),
    st.booleans(),
)
def test_lists_of_any_lengths_in_batches_of_any_sizes(
    tmp_path_factory: pytest.TempPathFactory, batches: list[list[list[int]]], stream: bool
) -> None:
    path = tmp_path_factory.mktemp("given") / "t.arrow"
    kinds = {"x": pa.list_(pa.int64()), "y": pa.large_binary()}
    made = [
        pa.record_batch({"x": rows, "y": [bytes(len(each)) for each in rows]}, schema=pa.schema(kinds))
        for rows in batches
    ]
    write(path, made, stream=stream)
    rows = [each for batch in batches for each in batch]
    if not rows:
        with pytest.raises(SourceError, match="no rows"):
            rf.open(path)
        return
    found = rf.open(path).fetch(np.arange(len(rows))[::-1]).samples()[::-1]
    assert [(each["x"].tolist(), each["y"]) for each in found] == [(each, bytes(len(each))) for each in rows]


def dictionary(indices: list[int], words: list[str]) -> Any:
    array = pa.DictionaryArray.from_arrays(pa.array(indices, pa.int8()), words)
    return pa.record_batch({"kind": array, "n": pa.array(range(len(indices)))})


def test_dictionaries_that_grow_or_are_replaced_are_those_of_their_batch(tmp_path: Path) -> None:
    # Grown: the second batch's dictionary begins with the first's, which is written as a delta.
    batches = [dictionary([0, 1], ["a", "b"]), dictionary([2, 0], ["a", "b", "c"]), dictionary([1, 0], ["x", "y"])]
    write(tmp_path / "t.arrow", batches, stream=True)
    source = rf.open(tmp_path / "t.arrow")
    assert source.fetch([5, 2, 0, 4, 3, 1])["kind"].rows() == ["x", "c", "a", "y", "a", "b"]
    write(tmp_path / "u.arrow", batches[:2])
    assert rf.open(tmp_path / "u.arrow").fetch([3, 2, 1, 0])["kind"].rows() == ["a", "c", "b", "a"]


def test_a_null_names_file_row_and_column_or_is_masked(tmp_path: Path) -> None:
    whole = pa.table({"x": pa.array([1, 2, None, 4]), "y": pa.array([[1], None, [2, 3], []], pa.list_(pa.int8()))})
    write(tmp_path / "t.arrow", [*whole.slice(0, 1).to_batches(), *whole.slice(1).to_batches()])
    source = rf.open(tmp_path / "t.arrow")
    with pytest.raises(
        SourceError, match=r"null[\s\S]*t\.arrow, record batch 1, row 2, column 'x'[\s\S]*columns="
    ):
        source.fetch([2], ["x"])
    masked = rf.open(tmp_path / "t.arrow", nulls="mask")
    assert [int(each["x"]) for each in masked] == [1, 2, 0, 4]
    assert [bool(each["y_valid"]) for each in masked] == [True, False, True, True]
    assert [each["y"].tolist() for each in masked] == [[1], [], [2, 3], []]


def test_files_lists_patterns_and_folders_are_one_data_set(tmp_path: Path) -> None:
    for number in (10, 9, 1):
        write(tmp_path / f"part-{number}.arrow", cut(table(number, 100 * number), number))
    expected = [-(100 * number + i) for number in (1, 9, 10) for i in range(number)]
    for where in (
        tmp_path,
        f"{tmp_path}/part-*.arrow",
        [tmp_path / f"part-{number}.arrow" for number in (1, 9, 10)],
    ):
        source = rf.open(where, columns=["n", "text"])
        assert [int(each["n"]) for each in source] == expected
    write(tmp_path / "part-11.arrow", cut(table(3).drop_columns(["n"]), 3))
    with pytest.raises(SourceError, match=r"differ[\s\S]*part-11\.arrow, column 'n'"):
        rf.open(tmp_path)


def test_blocks_are_about_4_mib(tmp_path: Path) -> None:
    big = pa.record_batch({"x": pa.FixedSizeListArray.from_arrays(np.zeros(1024 * 10_000, np.float32), 1024)})
    write(tmp_path / "big.arrow", [big])
    assert len(rf.open(tmp_path / "big.arrow").blocks) == 10
    tiny = [pa.record_batch({"x": pa.array([i])}) for i in range(500)]
    write(tmp_path / "tiny.arrow", tiny)
    assert rf.open(tmp_path / "tiny.arrow").blocks.tolist() == [500]
    write(tmp_path / "packed.arrow", tiny, compression="zstd")
    assert len(rf.open(tmp_path / "packed.arrow").blocks) == 500


def test_the_fingerprint_is_of_the_data_and_not_of_their_place(tmp_path: Path) -> None:
    for folder, rows in (("a", 10), ("b", 10), ("c", 11)):
        (tmp_path / folder).mkdir()
        write(tmp_path / folder / "t.arrow", cut(table(rows), 4, rows - 4))
    prints = [rf.open(tmp_path / folder).fingerprint for folder in "abc"]
    assert prints[0] == prints[1] != prints[2]


def test_few_files_stay_open_and_one_replaced_is_found_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "OPEN_FILES", 2)
    for number in range(4):
        write(tmp_path / f"{number}.arrow", cut(table(5, number * 5), 5))
    source = ArrowSource(tmp_path)
    assert [int(each["n"]) for each in source] == [-i for i in range(20)]
    assert len(source._open) == 2
    travelled = pickle.loads(pickle.dumps(source))
    write(tmp_path / "0.arrow", cut(table(4), 4))
    for each in (source, travelled):
        with pytest.raises(CorruptError, match=r"replaced[\s\S]*0\.arrow"):
            each.fetch([0])


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("kind", ["thread", "process"])
@pytest.mark.parametrize("compression", [None, "lz4"])
def test_every_sample_once_over_ranks_and_workers(
    compression: str | None, kind: Any, workers: int, tmp_path: Path
) -> None:
    write(tmp_path / "t.arrow", cut(table(90), 11, 30, 49), compression=compression)
    kind = kind if workers else "thread"
    seen: Counter[int] = Counter()
    for rank in range(3):
        topology = rf.Topology(rank=rank, world_size=3, local_rank=rank, local_world_size=3)
        source = rf.open(tmp_path / "t.arrow", columns=["n", "ragged", "flag"])
        loader = rf.Loader(
            source, 4, shuffle=True, topology=topology, num_workers=workers, worker_kind=kind, window=16
        )
        for batch in loader:
            seen.update(batch["n"].tolist())
    assert seen == Counter(range(-89, 1))


def test_a_stock_data_loader_reads_it_in_spawned_workers(tmp_path: Path) -> None:
    write(tmp_path / "t.arrow", cut(table(40), 11, 29), compression="zstd")
    source = rf.open(tmp_path / "t.arrow")
    source.fetch([0])
    loader = DataLoader(source, 8, num_workers=2, multiprocessing_context="spawn", collate_fn=list)  # type: ignore[arg-type]
    assert [int(each["n"]) for batch in loader for each in batch] == [-i for i in range(40)]


@pytest.mark.parametrize("stream", [False, True])
def test_a_file_cut_anywhere_is_an_error_that_names_it(stream: bool, tmp_path: Path) -> None:
    whole = write(
        tmp_path / "whole.arrow", cut(table(12).select(["n", "text", "kind"]), 5, 7), stream=stream
    ).read_bytes()
    path = tmp_path / "t.arrow"
    for size in [*range(0, len(whole), 61), *range(len(whole) - 24, len(whole))]:
        path.write_bytes(whole[:size])
        with pytest.raises(SourceError, match=r"t\.arrow"):
            rf.open(path, format="arrow" if size >= 16 else None).fetch(np.arange(12))


def test_a_stream_without_an_end_is_refused_or_read_when_asked(tmp_path: Path) -> None:
    path = write(tmp_path / "t.arrow", cut(table(12), 5, 7), stream=True)
    path.write_bytes(path.read_bytes()[:-8])
    with pytest.raises(CorruptError, match=r"no end[\s\S]*t\.arrow, after 2 record batches[\s\S]*unended=True"):
        rf.open(path)
    assert len(rf.open(path, unended=True)) == 12


@pytest.mark.parametrize("value", [-1, 1000, 2**31 - 1, -(2**31)])
@pytest.mark.parametrize("name", ["ragged", "text"])
def test_an_offset_that_leads_astray_names_record_batch_and_row(value: int, name: str, tmp_path: Path) -> None:
    lengths = [1, 2, 3, 4]
    column = [list(range(n)) for n in lengths] if name == "ragged" else ["x" * n for n in lengths]
    kind = KINDS[name]
    batches = [
        pa.record_batch({"v": pa.array(column[:1], kind)}),
        pa.record_batch({"v": pa.array(column[1:], kind)}),
    ]
    path = write(tmp_path / "t.arrow", batches)
    content = path.read_bytes()
    offsets = np.array([0, 2, 5, 9], np.int32).tobytes()
    assert content.count(offsets) == 1
    path.write_bytes(
        content.replace(offsets, offsets[:4] + value.to_bytes(4, "little", signed=True) + offsets[8:])
    )
    source = rf.open(path)
    assert len(source[0]["v"]) == 1
    with pytest.raises(CorruptError, match=r"t\.arrow, record batch 1, row 1"):
        source.fetch([1])


def test_no_such_column_and_no_such_file(tmp_path: Path) -> None:
    path = write(tmp_path / "t.arrow", cut(table(3), 3))
    with pytest.raises(ArgumentError, match="no such column"):
        rf.open(path, columns=["nope"])
    (tmp_path / "none").mkdir()
    with pytest.raises(SourceError, match="none"):
        rf.open(tmp_path / "none", format="arrow")


def test_an_array_of_another_shape_than_was_declared_is_named(tmp_path: Path) -> None:
    rows = [[[1, 2], [3, 4]], [[5, 6], [7, 8]], [[1], [2]]]
    for compression in (None, "zstd"):
        batch = pa.record_batch({"v": pa.array(rows, pa.list_(pa.list_(pa.int32())))})
        path = write(tmp_path / "t.arrow", [batch], compression=compression)
        source = rf.open(path, shapes={"v": (2, 2)})
        assert source.fields == {"v": Field("dense", "int32", (2, 2))}
        with pytest.raises(CorruptError, match=r"shape[\s\S]*t\.arrow, record batch 0[\s\S]*row 2"):
            source.fetch([2])
        assert rf.open(path, shapes={"v": (None, None)}).fields == {"v": Field("object")}


FUZZ = """
import random, sys, numpy as np, rankfeed as rf
from pathlib import Path
from rankfeed.sources.arrow_files import ArrowSource
path, seed = Path(sys.argv[1]), int(sys.argv[2])
chance = random.Random(seed)
good = path.read_bytes()
for turn in range(85):
    bad = bytearray(good)
    kind = chance.randrange(4)
    where = chance.choice([chance.randrange(len(bad)), chance.randrange(2000), -1 - chance.randrange(1500)])
    where %= len(bad)
    if kind == 0:
        del bad[where:]
    elif kind == 1:
        length = chance.randrange(1, 40)
        bad[where : where + length] = bad[where : where + length] * 2
    else:
        for _ in range(kind - 1):
            bad[where] ^= 1 << chance.randrange(8)
            where = chance.randrange(len(bad))
    path.write_bytes(bad)
    try:
        source = ArrowSource(path)
        for name in source.fields:
            try:
                source.fetch(np.arange(min(len(source), 30)), [name])[name].rows()
            except rf.errors.RankfeedError:
                pass
    except rf.errors.RankfeedError:
        pass
print("done")
"""


@pytest.mark.parametrize(("stream", "compression"), WAYS)
def test_mutations_end_in_an_error_or_a_value_and_never_in_a_crash(
    stream: bool, compression: str | None, tmp_path: Path
) -> None:
    path = write(tmp_path / "t.arrow", cut(table(30), 9, 21), stream=stream, compression=compression)
    seed = str(fresh_seed())
    done = subprocess.run(
        [sys.executable, "-c", FUZZ, str(path), seed], capture_output=True, text=True, check=False, timeout=100
    )
    assert (done.returncode, done.stdout) == (0, "done\n"), f"seed {seed}: {done.stderr[-2000:]}"

"""Arrow IPC files and streams of others are read in place; damage is named, and no view leads out of a file."""

import re
import struct
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pyarrow as pa
import pyarrow.feather
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.sources.all_types import TYPES, as_samples, table_of_all_types
from tests.support.memory import peak
from tests.support.values import samples_of

import rankfeed as rf
from rankfeed.columns.field import Field
from rankfeed.errors import CorruptError, SourceError
from rankfeed.sources.arrow.arrow_source import ArrowSource
from rankfeed.sources.arrow.file import ArrowFile


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


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("compression", [None, "lz4", "zstd"])
def test_samples_of_record_batches_equal_pyarrows(stream: bool, compression: str | None, tmp_path: Path) -> None:
    whole = table_of_all_types(100)
    write(tmp_path / "t.arrow", cut(whole, 1, 40, 7, 30, 22), stream=stream, compression=compression)
    source = rf.open(tmp_path / "t.arrow")
    assert isinstance(source, ArrowSource)
    expected = as_samples(whole)
    order = np.random.default_rng(0).integers(0, 100, 250)
    assert samples_of(source, order) == [expected[row] for row in order.tolist()]


def test_decoded_bytes_is_0_only_if_all_columns_of_the_file_are_plain_and_uncompressed(tmp_path: Path) -> None:
    names, batches = ["text", "ragged", "x"], cut(table_of_all_types(50), 20, 30)
    write(tmp_path / "plain.arrow", [batch.select(names) for batch in batches])
    write(tmp_path / "others.arrow", batches)  # of all columns: some of the others have to be decoded
    write(tmp_path / "compressed.arrow", batches, compression="lz4")
    decoded = {path.stem: rf.open(path, columns=names).decoded_bytes > 0 for path in tmp_path.iterdir()}
    assert decoded == {"plain": False, "others": True, "compressed": True}


@pytest.mark.parametrize("compression", ["uncompressed", "lz4", "zstd"])
def test_feather_and_polars_files_are_read(compression: Any, tmp_path: Path) -> None:
    whole = table_of_all_types(100).drop_columns(["half", "nothing", "price"])
    pyarrow.feather.write_feather(whole, tmp_path / "f.feather", compression=compression, chunksize=30)
    assert samples_of(rf.open(tmp_path / "f.feather")) == as_samples(whole)
    frame = pl.DataFrame([{"x": i, "y": [i] * (i % 3), "z": f"é{i}"} for i in range(100)])
    frame.write_ipc(tmp_path / "p.arrow", compression=compression)  # text as views, which have a buffer more
    assert samples_of(rf.open(tmp_path / "p.arrow")) == frame.to_dicts()


@given(
    st.lists(st.lists(st.lists(st.integers(-100, 100), max_size=3), max_size=5), min_size=1, max_size=5),
    st.booleans(),
)
def test_lists_of_any_lengths_in_record_batches_of_any_sizes_are_read(
    tmp_path_factory: pytest.TempPathFactory, batches: list[list[list[int]]], stream: bool
) -> None:
    path = tmp_path_factory.mktemp("given") / "t.arrow"
    schema = pa.schema({"x": pa.list_(pa.int64()), "y": pa.large_binary()})
    columns = [{"x": rows, "y": [bytes(len(row)) for row in rows]} for rows in batches]
    write(path, [pa.record_batch(column, schema=schema) for column in columns], stream=stream)
    rows = [row for batch in batches for row in batch]
    if not rows:
        with pytest.raises(SourceError, match="no samples"):
            rf.open(path)
        return
    expected = [{"x": row, "y": bytes(len(row))} for row in rows]
    assert samples_of(rf.open(path), np.arange(len(rows))[::-1]) == expected[::-1]


def dictionary(indices: list[int], words: list[str]) -> Any:
    array = pa.DictionaryArray.from_arrays(pa.array(indices, pa.int8()), words)
    return pa.record_batch({"kind": array, "n": pa.array(range(len(indices)))})


def test_dictionaries_that_grow_or_are_replaced_between_record_batches_are_read(tmp_path: Path) -> None:
    # Grown: the second batch's dictionary begins with the first's, which is written as a delta.
    batches = [dictionary([0, 1], ["a", "b"]), dictionary([2, 0], ["a", "b", "c"]), dictionary([1, 0], ["x", "y"])]
    write(tmp_path / "t.arrow", batches, stream=True)
    source = rf.open(tmp_path / "t.arrow")
    assert source.fetch([5, 2, 0, 4, 3, 1])["kind"].rows() == ["x", "c", "a", "y", "a", "b"]
    write(tmp_path / "u.arrow", batches[:2])
    assert rf.open(tmp_path / "u.arrow").fetch([3, 2, 1, 0])["kind"].rows() == ["a", "c", "b", "a"]


def test_columns_without_nulls_are_read_in_place_with_nulls_mask(tmp_path: Path) -> None:
    rows = [[[1, 2], [3, 4]], [[5, 6], [7, 8]]]
    batch = pa.record_batch({"x": pa.array([1, 2]), "v": pa.array(rows, pa.list_(pa.list_(pa.int32())))})
    path = write(tmp_path / "t.arrow", [batch])
    source = rf.open(path, nulls="mask", shapes={"v": (2, 2)})
    assert (source.default_shuffle, source.prefetch_distance) == ("global", 0)
    assert source.expect([0, 1]) is None
    result = samples_of(source, [1, 0], ["v_valid", "v", "x_valid"])
    assert result == [{"v_valid": True, "v": rows[row], "x_valid": True} for row in (1, 0)]
    assert samples_of(rf.open(path, nulls="mask", columns=["x_valid"])) == [{"x_valid": True}] * 2
    write(tmp_path / "u.arrow", [batch, pa.record_batch({"x": pa.array([None], pa.int64()), "v": batch["v"][:1]})])
    two = rf.open([path, tmp_path / "u.arrow"], nulls="mask", shapes={"v": (2, 2)})
    assert [bool(row) for row in two.fetch(range(5))["x_valid"].rows()] == [True, True, True, True, False]
    assert two.decoded_bytes > 0


def test_a_dictionary_column_of_long_texts_is_decoded_in_pieces(tmp_path: Path) -> None:
    kinds = pa.DictionaryArray.from_arrays(
        pa.array(np.arange(200_000) % 10, pa.int8()), [f"{i}" * 500 for i in range(10)]
    )
    write(tmp_path / "t.arrow", [pa.record_batch({"kind": kinds})])
    source = ArrowSource(tmp_path / "t.arrow")
    assert source.blocks.tolist() == [200_000]
    assert source.fetch([199_999, 0])["kind"].rows() == ["9" * 500, "0" * 500]
    assert source._cache._largest < 40 << 20  # of 100 MB


def test_files_without_rows_do_not_change_how_other_files_are_read(tmp_path: Path) -> None:
    batch = pa.record_batch({"x": [1, 2, 3]})
    write(tmp_path / "1.arrow", [batch])
    alone = rf.open(tmp_path)
    for name in ("0.arrow", "2.arrow"):
        pa.ipc.new_file(str(tmp_path / name), batch.schema).close()
    source = rf.open(tmp_path)
    assert (source.default_shuffle, source._plain) == (alone.default_shuffle, alone._plain) == ("global", {"x"})
    assert source.fetch([2, 0])["x"].gather().tolist() == [3, 1]
    with pytest.raises(SourceError, match="no samples"):
        rf.open(tmp_path / "0.arrow")


def test_pieces_of_a_record_batch_are_cached_without_copy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = 1 << 20
    kind = pa.DictionaryArray.from_arrays(pa.array(np.zeros(rows, np.int8)), ["a"])
    x = pa.array(np.arange(rows), mask=np.arange(rows) == 0)
    write(tmp_path / "t.arrows", [pa.record_batch({"kind": kind, "x": x})], stream=True)
    source = rf.open(tmp_path / "t.arrows", nulls="mask")
    read: list[Any] = []

    def recorded(self: ArrowFile, *arguments: Any) -> Any:
        read.append(read_batch(self, *arguments))
        return read[-1]

    read_batch = ArrowFile.read
    monkeypatch.setattr(ArrowFile, "read", recorded)
    got = source.fetch(range(0, rows, rows // 16), ["x", "x_valid"])
    assert got["x"].gather().tolist() == [*range(0, rows, rows // 16)]
    held = [np.frombuffer(item.column("x").buffers()[1], np.uint8) for item in read]
    assert len(held) > 1
    assert all(np.shares_memory(item, source._file(0).data) for item in held)
    pieces = [entry.chunk["x"].values for entry in source._cache._entries.values()]
    assert max(len(piece) for piece in pieces) < rows // 2
    assert not any(np.shares_memory(piece, source._file(0).data) for piece in pieces)


def test_invalid_utf8_is_an_error_only_for_rows_that_are_fetched(tmp_path: Path) -> None:
    rows = 1 << 19
    x = pa.array(["b" * 8] * (rows - 1) + ["c" * 8], mask=np.arange(rows) == 0)
    path = write(tmp_path / "t.arrow", [pa.record_batch({"x": x})])
    content = path.read_bytes()
    path.write_bytes(content.replace(b"c" * 8, b"\xff" * 8))
    source = rf.open(path, nulls="mask")
    assert len(source._chunks) > 1
    assert source.fetch([1])["x"].rows() == ["b" * 8]
    with pytest.raises(CorruptError, match=r"t\.arrow, record batch 0"):
        source.fetch([rows - 1])


def test_blocks_are_about_4_mib_or_a_compressed_record_batch(tmp_path: Path) -> None:
    big = pa.record_batch({"x": pa.FixedSizeListArray.from_arrays(np.zeros(1024 * 10_000, np.float32), 1024)})
    write(tmp_path / "big.arrow", [big])
    assert len(rf.open(tmp_path / "big.arrow").blocks) == 10
    tiny = [pa.record_batch({"x": pa.array([i])}) for i in range(500)]
    write(tmp_path / "tiny.arrow", tiny)
    assert rf.open(tmp_path / "tiny.arrow").blocks.tolist() == [500]
    write(tmp_path / "packed.arrow", tiny, compression="zstd")
    assert len(rf.open(tmp_path / "packed.arrow").blocks) == 500


@pytest.mark.parametrize(
    "column",
    [
        pa.array([[1, 2], [3]], pa.list_view(pa.int64())),
        pa.array([[[1, 2], [3]], [[4]]]),
        pa.array([[[[1]], [[2], [3]]], [[]]]),
        pa.array([1, 2]),  # read in place in all files but one, and so in none
    ],
    ids=lambda column: str(column.type),
)
def test_cached_columns_do_not_keep_their_files_mapped(
    column: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rankfeed.storage.data_files.OPEN_FILES", 2)
    batch = pa.record_batch({"x": column})
    for index in range(8):
        write(tmp_path / f"{index}.arrow", [batch], compression=None if index else "zstd")
    source = ArrowSource(tmp_path)
    assert not source._plain
    for first in range(0, len(source), 2):
        source.fetch([first, first + 1])
    assert len(source._cache._entries) == 8
    assert Path("/proc/self/maps").read_text().count(f"{tmp_path}/") == 2


def test_a_stream_without_an_end_marker_is_refused_unless_unended_is_set(tmp_path: Path) -> None:
    path = write(tmp_path / "t.arrow", cut(table_of_all_types(12), 5, 7), stream=True)
    path.write_bytes(path.read_bytes()[:-8])
    with pytest.raises(CorruptError, match=r"no end[\s\S]*t\.arrow, after 2 record batches[\s\S]*unended=True"):
        rf.open(path)
    assert len(rf.open(path, unended=True)) == 12


#: Wrong values for the second and third of four offsets: out of bounds, or with a difference beyond 64 bits.
WRONG_OFFSETS = [
    *((name, value, 5, [1]) for value in (-1, 1000, 2**31 - 1, -(2**31)) for name in ("ragged", "text")),
    *((name, 2**62 + 5, -(2**62), [1, 2, 3]) for name in ("wide", "large")),
]


@pytest.mark.parametrize(("name", "second", "third", "wrong"), WRONG_OFFSETS)
def test_offsets_out_of_bounds_are_an_error_that_names_record_batch_and_row(
    name: str, second: int, third: int, wrong: list[int], tmp_path: Path
) -> None:
    column = [list(range(n)) if pa.types.is_nested(TYPES[name]) else "x" * n for n in (1, 2, 3, 4)]
    batches = [pa.record_batch({"v": pa.array(rows, TYPES[name])}) for rows in (column[:1], column[1:])]
    path = write(tmp_path / "t.arrow", batches)
    content = path.read_bytes()
    width = "<i8" if name in ("wide", "large") else "<i4"
    offsets, changed = (np.array(values, width).tobytes() for values in ([0, 2, 5, 9], [0, second, third, 9]))
    assert content.count(offsets) == 1
    path.write_bytes(content.replace(offsets, changed))
    source = rf.open(path)
    assert len(source[0]["v"]) == 1
    for row in wrong:
        with pytest.raises(CorruptError, match=rf"offsets[\s\S]*t\.arrow, record batch 1, row {row}"):
            source.fetch([row])


@pytest.mark.parametrize("compression", [None, "zstd"])
def test_an_array_unlike_its_declared_shape_is_an_error(compression: str | None, tmp_path: Path) -> None:
    rows = [[[1, 2], [3, 4]], [[5, 6], [7, 8]], [[1], [2]]]
    batch = pa.record_batch({"v": pa.array(rows, pa.list_(pa.list_(pa.int32())))})
    path = write(tmp_path / "t.arrow", [batch], compression=compression)
    source = rf.open(path, shapes={"v": (2, 2)})
    assert source.fields == {"v": Field("dense", "int32", (2, 2))}
    with pytest.raises(CorruptError, match=r"shape[\s\S]*t\.arrow, record batch 0[\s\S]*row 2"):
        source.fetch([2])
    assert samples_of(source, [1, 0]) == [{"v": rows[1]}, {"v": rows[0]}]
    assert rf.open(path, shapes={"v": (None, None)}).fields == {"v": Field("object")}


@pytest.mark.parametrize("shape", [(2, 2, 1), (None, 2, 1)])
def test_rows_with_nulls_or_another_shape_are_errors_and_others_are_read(shape: Any, tmp_path: Path) -> None:
    good = [[[[1], [2]], [[3], [4]]], [[[5], [6]], [[7], [8]]]]
    odd: dict[int, Any] = {
        1: None,
        2: [[[0], [0]], None],
        3: [[[0], [0]], [[0], None]],
        4: [[[0], [0]], [[0], [None]]],
        6: [[[0], [0]], [[0]]],
        7: [[[0], [0]], [[0], [0, 0]]],
    }
    rows = [odd.get(row, good[row // 5]) for row in range(9)]
    batch = pa.record_batch({"v": pa.array(rows, pa.list_(pa.list_(pa.list_(pa.int32()))))})
    source = rf.open(write(tmp_path / "t.arrow", [batch]), shapes={"v": shape})
    assert samples_of(source, [8, 0, 5]) == [{"v": good[1]}, {"v": good[0]}, {"v": good[1]}]
    for row in odd:
        error, words = (CorruptError, "shape") if row > 5 else (SourceError, "null")
        with pytest.raises(error, match=rf"{words}[\s\S]*t\.arrow, record batch 0[\s\S]*row {row}\b"):
            source.fetch([0, row, 8])
    masked = rf.open(tmp_path / "t.arrow", shapes={"v": shape}, nulls="mask")
    for columns in (["v_valid"], ["v", "v_valid"]):
        valid = masked.fetch(range(6), columns)["v_valid"].rows()
        assert [bool(item) for item in valid] == [row == 0 or row == 5 for row in range(6)]
    empty: Any = [] if shape[0] is None else [[[0], [0]], [[0], [0]]]
    expected = [good[0], empty, empty, empty, [[[0], [0]], [[0], [0]]], good[1]]
    assert [item.tolist() for item in masked.fetch(range(6))["v"].rows()] == expected
    for row in (6, 7):
        with pytest.raises(CorruptError, match=rf"shape[\s\S]*row {row}\b"):
            masked.fetch([row], ["v"])


WORDS = pa.DictionaryArray.from_arrays(pa.array([0, 1, 2, 0], pa.int8()), pa.array([10, None, 30]))
PAIRS = pa.array([[1, 2], [3, None], [5, 6], [7, 8]], pa.list_(pa.int32(), 2))


@pytest.mark.parametrize("elements", [WORDS, PAIRS], ids=["dictionary", "fixed-size lists"])
@pytest.mark.parametrize("shape", [(1, 2), (None, 2), (None, 0), (0, 2)])
@pytest.mark.parametrize("view", [False, True])
def test_shaped_lists_of_dictionaries_or_fixed_size_lists_are_read_and_nulls_in_them_masked(
    view: bool, shape: Any, elements: Any, tmp_path: Path
) -> None:
    def lists(of: Any, size: int) -> Any:
        starts = pa.array(np.arange(0, 2 * size + 1, size) if size else [0] * 3, pa.int32())
        if view:
            return pa.ListViewArray.from_arrays(starts[:2], pa.array([size] * 2, pa.int32()), of)
        return pa.ListArray.from_arrays(starts, of)

    array = lists(lists(elements, shape[1]), 1 if shape[0] is None else shape[0])
    path = write(tmp_path / "t.arrow", [pa.record_batch({"v": array})])
    source = rf.open(path, shapes={"v": shape})
    inner = source.fields["v"].shape[-1:] if elements is PAIRS else ()
    assert source[1]["v"].shape == (1 if shape[0] is None else shape[0], shape[1], *inner)
    assert source[1]["v"].tolist() == array[1].as_py()
    if 0 in shape:
        assert source[0]["v"].size == 0
        return
    with pytest.raises(SourceError, match=r"null[\s\S]*row 0, column 'v'"):
        source.fetch([0])
    masked = rf.open(path, shapes={"v": shape}, nulls="mask")
    assert [bool(sample["v_valid"]) for sample in masked] == [False, True]
    assert masked[0]["v"].tolist() == ([[10, 0]] if elements is WORDS else [[[1, 2], [3, 0]]])


@pytest.mark.parametrize("compression", [None, "zstd"])
@pytest.mark.parametrize("kind", [pa.list_, pa.large_list])
def test_empty_lists_with_a_first_offset_of_1_are_read(kind: Any, compression: str | None, tmp_path: Path) -> None:
    whole = pa.array([[[9]], [], []], kind(kind(pa.int32())))
    lists = whole.values.slice(1)  # none, and the one offset there is is not 0
    array = type(whole).from_arrays(pa.array([0, 0, 0], whole.offsets.type), lists)
    assert lists.offsets.to_pylist() == [1]
    other = pa.array([None, [[5, 6]]], array.type)  # a null: the column is decoded
    batches = [pa.record_batch({"v": item}) for item in (array, other)]
    path = write(tmp_path / "t.arrow", batches, compression=compression)
    objects, shaped = rf.open(path), rf.open(path, shapes={"v": (None, 2)})
    assert [len(objects[row]["v"]) for row in (0, 1, 3)] == [0, 0, 1]
    assert [shaped[row]["v"].tolist() for row in (0, 1, 3)] == [[], [], [[5, 6]]]


def of_other_order(content: bytes, *numbers: Any) -> bytes:
    """The same file or stream in big-endian byte order, made of one that holds these numbers and no others."""
    for item in numbers:
        assert content.count(item.tobytes()) == 1
        content = content.replace(item.tobytes(), item.byteswap().tobytes())
    if content.startswith(b"ARROW1"):
        size = int.from_bytes(content[-10:-6], "little")
        base, field = len(content) - 10 - size, 1  # the schema in the footer
    else:
        base, field = 8, 2  # the schema in the first message
    out = bytearray(content)

    def unpack(kind: str, place: int) -> int:
        return int(struct.unpack_from("<" + kind, out, place)[0])

    def fields(table: int) -> int:
        return table - unpack("i", table) + 4

    root = base + unpack("I", base)
    place = root + unpack("H", fields(root) + 2 * field)
    schema = place + unpack("I", place)
    assert unpack("H", fields(schema)) == 0  # little-endian is what is left out
    one = next(at for at in range(4, 400, 2) if out[schema + at : schema + at + 2] == b"\1\0")
    struct.pack_into("<H", out, fields(schema), one)
    return bytes(out)


@pytest.mark.parametrize("stream", [False, True])
def test_big_endian_files_and_streams_are_read_as_pyarrow_reads_them(stream: bool, tmp_path: Path) -> None:
    numbers, fractions = np.arange(7, 10, dtype="<i8"), np.array([0.1, 2, 3])
    offsets = np.array([0, 3, 4, 9], "<i4")
    columns = {"text": ["abc", "d", "efghi"], "n": numbers, "x": fractions}
    path = write(tmp_path / "t.arrow", [pa.record_batch(columns)], stream=stream)
    path.write_bytes(of_other_order(path.read_bytes(), numbers, offsets, fractions))
    opened: Any = (pa.ipc.open_stream if stream else pa.ipc.open_file)(path.read_bytes())
    expected = opened.read_all().to_pylist()
    assert expected[2] == {"text": "efghi", "n": 9, "x": 3.0}
    source = rf.open(path, format="arrow")
    for names in (None, ["n"], ["x", "text"]):
        result = source.fetch([2, 0, 1], names).samples()
        assert result == [{name: expected[i][name] for name in names or columns} for i in (2, 0, 1)]


@pytest.mark.parametrize("which", range(4))
def test_a_record_batch_with_a_column_of_another_length_is_refused(which: int, tmp_path: Path) -> None:
    rows = 54_321  # which no buffer's size is
    inner = pa.StructArray.from_arrays([pa.array(np.arange(rows))], ["x"])
    path = write(tmp_path / "t.arrow", [pa.record_batch({"pair": inner, "text": pa.array(["ab"] * rows)})])
    content = path.read_bytes()
    said = rows.to_bytes(8, "little")
    places = [match.start() for match in re.finditer(re.escape(said), content)]
    assert len(places) == 4  # the record batch, the struct, what is in it, the text
    flipped = bytearray(content)
    flipped[places[which] + 1] ^= 0x40
    path.write_bytes(flipped)
    with pytest.raises(CorruptError, match=r"(37937|did not match)[\s\S]*t\.arrow, (column|record batch 0)"):
        rf.open(path)


def test_columns_after_a_struct_without_fields_are_read(tmp_path: Path) -> None:
    whole = pa.table({"none": pa.array([{}] * 5, pa.struct([])), "n": pa.array([7, 8, 9, 10, 11], pa.int8())})
    whole = whole.append_column("text", [["a", "bc", "", "d", "e"]])
    path = write(tmp_path / "t.arrow", whole.to_batches())
    assert samples_of(rf.open(path)) == whole.to_pylist()


def test_lists_of_zero_width_elements_keep_their_lengths(tmp_path: Path) -> None:
    rows = [[[], []], [[]], []]
    kind = pa.list_(pa.list_(pa.int32(), 0))
    path = write(tmp_path / "t.arrow", [pa.record_batch({"v": pa.array(rows, kind)})])
    source = rf.open(path)
    assert source.fields == {"v": Field("ragged", "int32", (0,))}
    assert [sample["v"].shape for sample in source] == [(2, 0), (1, 0), (0, 0)]


def test_a_run_end_encoded_column_takes_no_memory_for_each_row(tmp_path: Path) -> None:
    rows = 1 << 28
    runs = pa.RunEndEncodedArray.from_arrays(pa.array([5, rows], pa.int32()), pa.array([1.5, 2.5]))
    path = write(tmp_path / "runs.arrow", pa.table({"x": runs}).to_batches())

    def ends() -> list[Any]:
        return [rf.open(path)[row]["x"] for row in (0, rows - 1)]

    most, result = peak(ends)
    assert result == [1.5, 2.5]
    assert most < 16 << 20


@pytest.mark.parametrize("stream", [False, True])
def test_opening_a_compressed_file_decodes_nothing(tmp_path: Path, stream: bool) -> None:
    rows = 10_000
    whole = pa.table({"image": [bytes(1000)] * rows, "label": np.arange(rows)})
    path = write(tmp_path / "t.arrow", whole.to_batches(), stream=stream, compression="zstd")
    pool, usual = pa.proxy_memory_pool(pa.default_memory_pool()), pa.default_memory_pool()
    pa.set_memory_pool(pool)
    try:
        source = ArrowSource(str(path))
    finally:
        pa.set_memory_pool(usual)
    assert pool.max_memory() < 1 << 16
    assert source.decoded_bytes == pytest.approx(rows * 1012, rel=0.01)  # decodes one record batch
    assert source[rows - 1]["label"] == rows - 1

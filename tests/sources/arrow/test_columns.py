"""Arrow's columns become numpy's without a changed row, for each of Arrow's layouts."""

import datetime
import decimal
import errno
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.support.tables import write_table
from tests.support.values import plain

import rankfeed as rf
from rankfeed.columns.columns import ColumnBuffer, column_from_parts
from rankfeed.columns.field import Field
from rankfeed.errors import ArgumentError, CorruptError, SourceError
from rankfeed.sources.arrow.arrow_columns import read_columns
from rankfeed.sources.arrow.types import fields_of, roots_of
from rankfeed.storage.file_errors import arrow_errors


def rows_of(field: Field, stored: ColumnBuffer, rows: Sequence[int] | None = None) -> list[Any]:
    column = column_from_parts(field, [stored.part(np.arange(stored.rows) if rows is None else np.array(rows))])
    return [plain(row) for row in column.rows()]


def read_table(table: pa.Table, **options: Any) -> dict[str, Any]:
    return read_columns(table, fields_of(table.schema, **options), where="here", **options)


def read(array: Any) -> tuple[Field, list[Any]]:
    """The field and the rows of one column."""
    table = pa.table({"x": array})
    field = fields_of(table.schema)["x"]
    return field, rows_of(field, read_table(table)["x"])


def read_masked(array: Any) -> tuple[list[Any], list[bool]]:
    """The rows of one column, and which of them are valid."""
    table = pa.table({"x": array})
    stored = read_table(table, nulls="mask")
    return rows_of(fields_of(table.schema)["x"], stored["x"]), stored["x_valid"].values.tolist()


VIEWED = ["a", "", "longer than twelve"]
LISTS = [[1, 2], [], [3]]
PAIRS = [[1, 2], [3, 4], [5, 6]]
MATRICES = [[[1, 2]], [[3, 4]], [[5, 6]]]
LISTS_OF_PAIRS = [[[1, 2], [3, 4]], [], [[5, 6]]]
KINDS: list[tuple[str, Any, list[Any], str]] = [
    ("int", pa.array([1, -2, 3], pa.int16()), [1, -2, 3], "int16"),
    ("half", pa.array(np.array([1, 2, 0.5], np.float16)), [1, 2, 0.5], "float16"),
    ("uint64", pa.array([0, 2**64 - 1, 5], pa.uint64()), [0, 2**64 - 1, 5], "uint64"),
    ("bool", pa.array([True, False, True]), [True, False, True], "bool"),
    ("text", pa.array(["a", "", "é"]), ["a", "", "é"], "str"),
    ("large text", pa.array(["a", "", "é"], pa.large_string()), ["a", "", "é"], "str"),
    ("text view", pa.array(VIEWED, pa.string_view()), VIEWED, "str"),
    ("bytes", pa.array([b"a", b"", b"\0"]), [b"a", b"", b"\0"], "bytes"),
    ("large bytes", pa.array([b"a", b"", b"\0"], pa.large_binary()), [b"a", b"", b"\0"], "bytes"),
    ("bytes view", pa.array([b"a", b"", b"\0" * 20], pa.binary_view()), [b"a", b"", b"\0" * 20], "bytes"),
    ("fixed bytes", pa.array([b"ab", b"cd", b"ef"], pa.binary(2)), [b"ab", b"cd", b"ef"], "bytes"),
    ("dictionary", pa.array(["a", "b", "a"]).dictionary_encode(), ["a", "b", "a"], "str"),
    ("numbers in a dictionary", pa.array([7, 8, 7]).dictionary_encode(), [7, 8, 7], "int64"),
    ("list", pa.array(LISTS), LISTS, "int64[*]"),
    ("large list", pa.array(LISTS, pa.large_list(pa.int8())), LISTS, "int8[*]"),
    ("list view", pa.array(LISTS, pa.list_view(pa.int64())), LISTS, "int64[*]"),
    ("list of bools", pa.array([[True], [], [False, True]]), [[True], [], [False, True]], "bool[*]"),
    ("fixed list", pa.array(PAIRS, pa.list_(pa.int64(), 2)), PAIRS, "int64[2]"),
    ("fixed in fixed", pa.array(MATRICES, pa.list_(pa.list_(pa.float32(), 2), 1)), MATRICES, "float32[1, 2]"),
    ("list of fixed", pa.array(LISTS_OF_PAIRS, pa.list_(pa.list_(pa.int64(), 2))), LISTS_OF_PAIRS, "int64[*, 2]"),
    ("no lists of fixed", pa.array([[], [], []], pa.list_(pa.list_(pa.int64(), 2))), [[], [], []], "int64[*, 2]"),
    ("list of lists", pa.array([[[1], []], [], [[2, 3]]]), [[[1], []], [], [[2, 3]]], "object"),
    ("list of texts", pa.array([["a"], [], ["b", "c"]]), [["a"], [], ["b", "c"]], "object"),
    ("decimal", pa.array([decimal.Decimal("1.25")] * 3), [1.25] * 3, "float64"),
    ("time", pa.array([1, 2, 3], pa.time32("ms")), [1, 2, 3], "int64"),
    ("duration", pa.array([1, 2, 3], pa.duration("ns")), [1, 2, 3], "int64"),
    ("timestamp", pa.array([1, 2, 3], pa.timestamp("us", "UTC")), [1, 2, 3], "int64"),
    ("date", pa.array([datetime.date(1970, 1, 2)] * 3), [1] * 3, "int64"),
    ("date in ms", pa.array([datetime.date(1970, 1, 2)] * 3, pa.date64()), [86_400_000] * 3, "int64"),
]


@pytest.mark.parametrize(("array", "rows", "field"), [item[1:] for item in KINDS], ids=[case[0] for case in KINDS])
@pytest.mark.parametrize("layout", ["whole", "sliced", "chunked", "empty"])
def test_every_arrow_type_is_read_as_its_field(layout: str, array: Any, rows: list[Any], field: str) -> None:
    given_array, expected = {
        "whole": (array, rows),
        "sliced": (array.slice(1, 2), rows[1:]),
        "chunked": (pa.chunked_array([array.slice(2), array.slice(0, 0), array.slice(0, 2)]), rows[2:] + rows[:2]),
        "empty": (array.slice(3), []),
    }[layout]
    result, got = read(given_array)
    assert str(result) == field
    if expected or result.kind != "object":
        assert got == expected


@pytest.mark.parametrize(("array", "rows", "field"), [item[1:] for item in KINDS], ids=[case[0] for case in KINDS])
def test_a_null_is_an_error_or_a_masked_zero_or_empty_value(array: Any, rows: list[Any], field: str) -> None:
    stored_type = array.type.value_type if pa.types.is_dictionary(array.type) else array.type
    array = pa.array([*array.to_pylist()[:2], None, *array.to_pylist()[2:]], stored_type)
    table = pa.table({"before": range(4), "x": array})
    stored = read_columns(table, fields_of(table.schema), where="here", first_row=10)
    for asked in ([2], [0, 2, 1], range(4)):
        with pytest.raises(SourceError, match=r"null[\s\S]*here, row 12, column 'x'[\s\S]*columns="):
            stored["x"].part(np.array(asked))
    assert rows_of(fields_of(table.schema)["x"], stored["x"], [3, 0]) == [rows[2], rows[0]]
    scattered = read_columns(table, fields_of(table.schema), where="here", first_row=np.array([7, 9, 40, 41]))
    with pytest.raises(SourceError, match="row 40, column 'x'"):
        scattered["x"].part(np.array([2]))
    assert list(read_columns(table, {"before": Field("dense", "int64")}, where="here")) == ["before"]
    result, valid = read_masked(array)
    assert valid == [True, True, False, True]
    assert result[:2] + result[3:] == rows
    kind = fields_of(table.schema)["x"].kind
    if kind == "dense":
        assert not np.any(result[2])
    elif kind != "object":
        assert len(result[2]) == 0


@pytest.mark.parametrize("kind", [pa.list_(pa.int64()), pa.list_(pa.int64(), 2)], ids=str)
def test_a_null_inside_a_row_makes_the_row_invalid(kind: Any) -> None:
    array = pa.array([[1, 2], [3, None], [5, 6]], kind)
    stored = read_table(pa.table({"x": array}))["x"]
    stored.part(np.array([0, 2]))
    with pytest.raises(SourceError, match="row 1, column 'x'"):
        stored.part(np.array([0, 1, 2]))
    assert read_masked(array)[1] == [True, False, True]


def test_nulls_in_the_dictionaries_of_chunks_are_masked() -> None:
    chunks = [pa.DictionaryArray.from_arrays(pa.array([0, 1], pa.int8()), item) for item in ([1, None], [3, 4])]
    assert read_masked(pa.chunked_array(chunks)) == ([1, 0, 3, 4], [True, False, True, True])


@pytest.mark.parametrize("entries", [["a", "b"], [5, 7], [[5], [7, 8]], ["a", "b", "c", "d", "e"]], ids=str)
def test_nulls_of_a_dictionary_column_are_read_as_zero_or_empty(entries: list[Any]) -> None:
    array = pa.DictionaryArray.from_arrays(pa.array([0, None, 1, None], pa.int8()), pa.array(entries))
    empty = type(entries[0])()
    assert read_masked(array) == ([entries[0], empty, entries[1], empty], [True, False, True, False])


CODES = pa.array([0, 1, 1, 0], pa.int8())
SPARSE = pa.UnionArray.from_sparse(CODES, [pa.array([1, 0, 0, 4]), pa.array(["", "b", None, ""])])
DENSE = pa.UnionArray.from_dense(
    CODES, pa.array([0, 0, 1, 1], pa.int32()), [pa.array([1, 4]), pa.array(["b", None])]
)
ENCODED = pa.RunEndEncodedArray.from_arrays(pa.array([1, 2, 3, 4], pa.int32()), pa.array([1, 2, None, 4]))


@pytest.mark.parametrize("array", [SPARSE, DENSE, ENCODED], ids=["sparse union", "dense union", "run-end encoded"])
def test_nulls_in_unions_and_runs_are_errors_or_masked(array: Any) -> None:
    stored = read_table(pa.table({"x": array}))["x"]
    assert [int(item) for item in rows_of(Field("object"), stored, [3, 0])] == [4, 1]
    with pytest.raises(SourceError, match=r"null[\s\S]*here, row 2, column 'x'"):
        stored.part(np.array([2]))
    assert read_masked(array)[1] == [True, True, False, True]


@pytest.mark.parametrize("array", [SPARSE, DENSE, ENCODED], ids=["sparse union", "dense union", "run-end encoded"])
def test_a_null_struct_around_a_union_or_runs_is_refused(array: Any) -> None:
    nulls = pa.array([False, False, False, True])
    table = pa.table({"s": pa.StructArray.from_arrays([array], ["x"], mask=nulls)})
    with pytest.raises(SourceError, match=r"'x'[\s\S]*here[\s\S]*columns="):
        read_table(table)
    stored = read_table(table.slice(1, 2))["s.x"]
    assert [str(item) for item in rows_of(Field("object"), stored, [0])] == [str(array[1])]


@pytest.mark.parametrize(
    ("value", "kind"),
    [
        ("9007199254740993", pa.decimal128(20, 0)),
        ("-9007199254740993", pa.decimal128(20, 0)),
        ("12345678901234567890.12", pa.decimal128(30, 2)),
        ("0.12345678901234567891", pa.decimal256(60, 20)),
    ],
)
@pytest.mark.parametrize("form", ["parquet", "arrow", "hf"])
@pytest.mark.parametrize("nested", [False, True])
def test_a_decimal_that_float64_cannot_hold_is_refused(
    form: str, nested: bool, value: str, kind: Any, tmp_path: Path
) -> None:
    values: list[Any] = [decimal.Decimal(text) for text in ("1", "9.5E+9", "2", value)]
    if nested:
        values, kind = [[[item]] for item in values], pa.list_(pa.list_(kind))
    path = write_table(pa.table({"id": range(4), "price": pa.array(values, kind)}), tmp_path / f"t.{form}")
    message = rf"digits[\s\S]*found: {re.escape(value)}, which[\s\S]*t\.{form}[\s\S]*column 'price'[\s\S]*columns="
    with pytest.raises(SourceError, match=message):
        rf.open(path).fetch([0, 3]).samples()
    assert [row["id"] for row in rf.open(path, columns=["id"]).fetch([0, 3]).samples()] == [0, 3]


def test_decimals_of_many_digits_that_float64_holds_are_read_as_floats() -> None:
    for kind, texts in {
        pa.decimal128(38, 18): ["0.1", "-12.345678901234", "0", "0.000000000000000001"],
        pa.decimal128(20, 0): ["9007199254740992", "9007199254740991", "9007199254740994", "10000000000000000000"],
        pa.decimal128(18, 2): ["1234567890123456.75", "9999999999999.99", "-0.01"],
        pa.decimal256(60, 20): ["0.1", "1E+30"],
    }.items():
        values = [decimal.Decimal(text) for text in texts]
        assert read(pa.array(values, kind))[1] == [float(value) for value in values]


@pytest.mark.parametrize("kind", [pa.int32(), pa.timestamp("us"), pa.decimal128(5, 1), pa.list_(pa.int8(), 1)])
@pytest.mark.parametrize("make", [pa.list_, pa.list_view])
def test_a_row_of_an_object_column_is_the_same_alone_and_among_other_rows(kind: Any, make: Any) -> None:
    value = {"decimal128(5, 1)": decimal.Decimal("1.5")}.get(str(kind), [7] if kind.num_fields else 7)
    rows = [[[value], []], None, [[value, None]], [None, [value]], [[value, value]], []]
    table = pa.table({"x": pa.array(rows, make(make(kind)))})
    together = read_table(table, nulls="mask")["x"].part(np.arange(len(rows)))
    for row in range(len(rows)):
        (alone,) = read_table(table.slice(row, 1), nulls="mask")["x"].part(np.array([0]))
        assert repr(together[row]) == repr(alone)
    assert together[1] is None
    assert [type(item) for item in together[0]] == [type(entry) for entry in together[4] * 2] == [np.ndarray] * 2
    assert (together[2][0][1], together[3][0]) == (None, None)
    assert type(together[2][0]) is list


def test_values_under_a_null_list_are_not_read() -> None:
    mask = pa.array([False, True, False])
    hidden = pa.ListArray.from_arrays(pa.array([0, 1, 3, 4]), pa.array([1, 98, 99, 4]), mask=mask)
    assert read_masked(hidden) == ([[1], [], [4]], [True, False, True])


WORDS = pa.DictionaryArray.from_arrays(pa.array(np.arange(3000) % 5, pa.int8()), ["w" * 500] * 5)
ENDS = pa.array(np.arange(0, 3001, 3), pa.int32())


@pytest.mark.parametrize(
    "array",
    [
        pa.ListArray.from_arrays(ENDS, WORDS),
        pa.FixedSizeListArray.from_arrays(WORDS, 3),
        pa.ListArray.from_arrays(ENDS, pa.StructArray.from_arrays([WORDS, np.arange(3000)], ["word", "number"])),
        pa.MapArray.from_arrays(ENDS, np.arange(3000), WORDS),
        pa.array([["a", "bc"]] * 1000),
        pa.array([[[1, 2], [3]] * (i % 3) for i in range(1000)]),
        pa.array([[{"left": 1}] * (i % 4) for i in range(1000)]),
    ],
    ids=lambda array: str(array.type)[:60],
)
def test_an_object_column_takes_the_bytes_of_its_arrow_array_before_rows_are_read(array: Any) -> None:
    (stored,) = read_table(pa.table({"x": array})).values()
    assert stored.nbytes == array.nbytes
    assert stored.rows == len(array)
    for rows in ([5, 3, 3, 900], range(40, 60)):
        taken = stored.part(np.array(rows))
        assert plain(list(taken)) == plain([array[row].as_py() for row in rows])


def test_struct_fields_are_columns_that_have_the_nulls_of_the_struct() -> None:
    table = pa.table({"s": pa.array([{"a": 1, "b": {"c": "x"}}, None, {"a": 3, "b": {"c": "z"}}])})
    assert fields_of(table.schema) == {"s.a": Field("dense", "int64"), "s.b.c": Field("str")}
    assert roots_of(table.schema, ["s.b.c"]) == ["s"]
    for name in ("s.a", "s.b.c"):
        with pytest.raises(SourceError, match=rf"row 1, column '{name}'"):
            read_table(table)[name].part(np.array([0, 1]))
    stored = read_table(table.slice(1), nulls="mask")
    assert stored["s.a"].values.tolist() == [0, 3]
    assert stored["s.b.c_valid"].values.tolist() == [False, True]


@pytest.mark.soak  # takes 5 GiB of memory
@pytest.mark.parametrize("kind", [pa.string(), pa.struct({"a": pa.string()}), pa.list_(pa.string())])
def test_chunks_with_more_text_than_32_bit_offsets_count_are_read(kind: Any) -> None:
    rows: list[Any] = [chr(97 + i % 26) * (1 << 20) for i in range(100)]
    if kind != pa.string():
        rows = [{"a": row} for row in rows] if pa.types.is_struct(kind) else [[row] for row in rows]
    table = pa.table({"x": pa.chunked_array([pa.array(rows, kind)] * 21)})
    ((name, stored),) = read_table(table).items()
    (result,) = rows_of(fields_of(table.schema)[name], stored, [2077])
    assert result == (rows[77]["a"] if pa.types.is_struct(kind) else rows[77])


def test_a_validity_column_is_read_without_the_column_itself() -> None:
    table = pa.table({"x": pa.array([1, None])})
    stored = read_columns(table, {"x_valid": Field("dense", "bool")}, where="here", nulls="mask")
    assert list(stored) == ["x_valid"]
    assert roots_of(table.schema, ["x_valid"]) == ["x"]


def test_columns_of_one_name_and_an_unknown_nulls_option_are_refused() -> None:
    with pytest.raises(SourceError, match=r"one name[\s\S]*'x_valid'"):
        fields_of(pa.schema({"x": pa.int8(), "x_valid": pa.bool_()}), nulls="mask")
    with pytest.raises(SourceError, match=r"one name[\s\S]*'s\.a'"):
        fields_of(pa.schema({"s": pa.struct({"a": pa.int8()}), "s.a": pa.bool_()}))
    with pytest.raises(SourceError, match=r"one name[\s\S]*'x'"):
        fields_of(pa.schema([("x", pa.int8()), ("x", pa.int8())]))
    with pytest.raises(ArgumentError, match="nulls"):
        fields_of(pa.schema({"x": pa.int8()}), nulls="some")  # type: ignore[arg-type]


def test_a_table_without_the_expected_column_and_type_is_an_error_that_names_its_place() -> None:
    for table in (pa.table({"y": [1]}), pa.table({"x": ["a"]}), pa.table({"x": pa.array([1], pa.int32())})):
        with pytest.raises(CorruptError, match=r"another type[\s\S]*'x': int64[\s\S]*here"):
            read_columns(table, {"x": Field("dense", "int64")}, where="here")


@pytest.mark.parametrize("bad", [-1, 100, 2**31 - 1])
@pytest.mark.parametrize("kind", [pa.string(), pa.list_(pa.int64())])
def test_offsets_out_of_bounds_are_an_error(bad: int, kind: Any) -> None:
    offsets = pa.py_buffer(np.array([0, 1, bad, 3], np.int32))
    if pa.types.is_string(kind):
        array = pa.Array.from_buffers(kind, 3, [None, offsets, pa.py_buffer(b"abc")])
    else:
        array = pa.Array.from_buffers(kind, 3, [None, offsets], children=[pa.array([1, 2, 3])])
    with pytest.raises(CorruptError, match=r"[Oo]ffset[\s\S]*where: here, column 'x'"):
        read(array)


def test_arrow_errors_are_converted_to_errors_that_name_the_file() -> None:
    with pytest.raises(CorruptError, match=r"no good[\s\S]*here[\s\S]*remedy"), arrow_errors("here"):
        raise pa.ArrowInvalid("no good\nand more")
    with pytest.raises(SourceError, match="cannot be read"), arrow_errors("here"):
        raise FileNotFoundError(errno.ENOENT, "gone")
    with pytest.raises(ArgumentError, match="ours"), arrow_errors("here"):
        raise ArgumentError("ours")


@given(st.lists(st.none() | st.lists(st.none() | st.integers(-100, 100), max_size=4), max_size=8), st.data())
def test_any_slice_of_lists_with_nulls_is_read_with_its_mask(rows: list[Any], data: st.DataObject) -> None:
    start = data.draw(st.integers(0, len(rows)))
    length = data.draw(st.integers(0, len(rows) - start))
    kind = data.draw(st.sampled_from([pa.list_, pa.large_list, pa.list_view]))
    expected = [[item or 0 for item in row or []] for row in rows[start : start + length]]
    valid = [row is not None and None not in row for row in rows[start : start + length]]
    assert read_masked(pa.array(rows, kind(pa.int64())).slice(start, length)) == (expected, valid)


@pytest.mark.parametrize("kind", [pa.string(), pa.large_string()], ids=str)
def test_a_column_with_invalid_utf8_is_an_error_that_names_the_file(kind: Any) -> None:
    table = pa.table({"x": pa.array([b"ok", b"\xc3"], pa.binary()).cast(kind, safe=False)})
    with pytest.raises(CorruptError, match=r"UTF8[\s\S]*where: here"):
        read_table(table)

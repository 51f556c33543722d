"""CSV and lines of JSON are read as pyarrow reads them, while they are small; a bad line is named."""

import gzip
import json
import pickle
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import polars as pl
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.support.values import column_of, plain, samples_of

import rankfeed as rf
from rankfeed.errors import ArgumentError, CorruptError, SourceError
from rankfeed.sources.formats import text_kind
from rankfeed.sources.text import text_source
from rankfeed.sources.text.parsers import JsonParser, Text
from rankfeed.sources.text.text_source import JsonlSource, is_large, rows

ROWS = [{"id": i, "score": i / 4, "name": f"n{i}, é", "tokens": list(range(i % 4))} for i in range(300)]


CSV = pl.DataFrame(ROWS).drop("tokens").write_csv()
JSONL = pl.DataFrame(ROWS).write_ndjson()


def text_file(path: Path, content: str | bytes) -> Path:
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    return path


def test_columns_of_csv_files_are_matched_by_name_and_get_types_that_hold_all_values(tmp_path: Path) -> None:
    (tmp_path / "0.csv").write_text("x,y\n0,0\n0,1\n")
    (tmp_path / "1.csv").write_text("y,x\n0.5,1\n")
    assert samples_of(rf.open(tmp_path)) == [{"x": 0, "y": 0.0}, {"x": 0, "y": 1.0}, {"x": 1, "y": 0.5}]


QUOTED = 'a,b\n"x\ny, ""z""",1\nw,2\n'


@pytest.mark.parametrize(
    ("name", "content", "options", "expected"),
    [
        pytest.param("t.jsonl.gz", gzip.compress(JSONL.encode()), {}, ROWS, id="gzip"),
        pytest.param("t.tsv", "a\tb\n1\tx,y\n", {}, [{"a": 1, "b": "x,y"}], id="tabs"),
        pytest.param("t.csv", "a;b\n1;2\n", {"delimiter": ";"}, [{"a": 1, "b": 2}], id="semicolons"),
        pytest.param("t.csv", QUOTED, {}, [{"a": 'x\ny, "z"', "b": 1}, {"a": "w", "b": 2}], id="quoted newline"),
        pytest.param("t.csv", ",x\n0,5\n", {}, [{"unnamed": 0, "x": 5}], id="index of pandas"),
        pytest.param("t.jsonl", '\ufeff{"x": 1}\n{"x": 2}\n', {}, [{"x": 1}, {"x": 2}], id="byte order mark"),
    ],
)
def test_csv_tsv_gzip_and_json_lines_are_parsed_when_opened_and_when_streamed(
    name: str, content: str | bytes, options: dict[str, Any], expected: list[Any], tmp_path: Path
) -> None:
    path = text_file(tmp_path / name, content)
    assert samples_of(rf.open(path, **options)) == expected
    assert [plain(row) for row in rows(str(path), **options)] == expected


def test_given_types_replace_those_inferred_from_csv_and_json(tmp_path: Path) -> None:
    path = text_file(tmp_path / "t.csv", "code,x\n007,1\n")
    assert samples_of(rf.open(path)) == [{"code": 7, "x": 1}]
    source = rf.open(path, types={"code": "string", "x": "float32"})
    assert samples_of(source) == [{"code": "007", "x": 1.0}]
    assert str(source.fields["x"]) == "float32"
    path = text_file(tmp_path / "t.jsonl", '{"day": "2024-01-01"}\n{"day": "2024-01-02"}\n')
    assert samples_of(rf.open(path, types={"day": "string"}))[1] == {"day": "2024-01-02"}


def test_types_for_a_column_that_does_not_exist_are_refused(tmp_path: Path) -> None:
    text_file(tmp_path / "t.csv", "code,x\n007,1\n")
    text_file(tmp_path / "t.jsonl", '{"code": "2024-01-01", "x": null}\n')
    words = r"does not exist[\s\S]*expected: 'code', 'x'[\s\S]*found: 'Code'[\s\S]*t\.{}"
    for name in ("csv", "jsonl"):
        for options in ({}, {"nulls": "mask"}, {"columns": ["code"]}):
            with pytest.raises(ArgumentError, match=words.format(name)):
                rf.open(tmp_path / f"t.{name}", types={"Code": "string"}, **options)
    with pytest.raises(ArgumentError, match=words.format("csv")):
        list(rows(tmp_path / "t.csv", types={"Code": "string"}))
    # One of the files has it, or has it with nulls only.
    paths = [text_file(tmp_path / "u.jsonl", '{"code": "2024-01-02"}\n'), tmp_path / "t.jsonl"]
    source = rf.open(paths, types={"code": "string", "x": "float32"}, nulls="mask")
    assert [row["code"] for row in source] == ["2024-01-02", "2024-01-01"]
    assert str(source.fields["x"]) == "float32"
    with pytest.raises(ArgumentError, match=r"expected: 'code', 'x'"):
        rf.open(paths, types={"code": "string", "x": "float32", "Code": "string"}, nulls="mask")


@pytest.mark.parametrize("text", ["id,score\n7,0.5\n8,1.5\n9,2.5\n", "id\n1\n", "id,score\n1,0.5\n3,1.5\n"])
def test_a_pickled_source_is_refused_while_its_csv_file_has_other_text(text: str, tmp_path: Path) -> None:
    path = text_file(tmp_path / "t.csv", "id,score\n1,0.5\n2,1.5\n")
    source = rf.open(path)
    pickled = pickle.dumps(source)
    path.write_text(text)
    for _ in range(3):
        with pytest.raises(SourceError, match="changed or replaced while they were in use"):
            pickle.loads(pickled)
    path.write_text("id,score\n1,0.5\n2,1.5\n")
    assert samples_of(pickle.loads(pickled)) == samples_of(source)


# What is not what it should be.


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a,b\n1,2\n1,2,3\n", r"Row #3: Expected 2 columns, got 3[\s\S]*bad\.csv[\s\S]*correct or remove that"),
        ('a,b\n1,x\n2,"y\n3,z\n', r"a quoted value has no end[\s\S]*bad\.csv, line 3"),
        ('a,b\n5 pipe,"x ""y""\n\nz"\n"1', r"a quoted value has no end[\s\S]*bad\.csv, line 5"),
        ("a,b\n", r"no samples[\s\S]*bad\.csv"),
        ("a,a\n1,2\n", r"one name[\s\S]*'a'"),
    ],
)
def test_a_malformed_csv_file_is_an_error_with_its_cause(text: str, message: str, tmp_path: Path) -> None:
    with pytest.raises(SourceError, match=message):
        rf.open(text_file(tmp_path / "bad.csv", text))


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('{"a": 1', ""),
        ('{"a": "x}', ""),
        ('{"a": 1}}', ""),
        ('{"a": 1]', ""),
        ('{"a": tru}', ""),
        ('{"a": "text"}', "changed from number to string"),
        ("[1, 2]", ""),
        ('{"a": 1, "a": 2}', "twice"),
        ("hello", ""),
        ('{"a": 1} {"a": 2}', "not one JSON object"),
        ('{"a": 1,\n"a": 2}', "not one JSON object"),
        ('{"a": [{}\n, {}]}', "not one JSON object"),
        ('{"a": 1}, {"a": 2}', "not one JSON object"),
    ],
)
@pytest.mark.parametrize("after", ['{"a": 3}\n', ""])
def test_a_bad_json_line_is_an_error_with_its_number(line: str, message: str, after: str, tmp_path: Path) -> None:
    path = text_file(tmp_path / "bad.jsonl", f'\n  \n{{"a": 1}}\r\n{line}\n{after}')
    with pytest.raises(CorruptError, match=rf"{message}[\s\S]*line 4"):
        rf.open(path)


@pytest.mark.parametrize(
    ("name", "content"), [("t.jsonl", b'{"a": "x"}\n{"a": "\xff"}\n'), ("t.csv", b"a\xff,b\n1,2\n")]
)
def test_invalid_utf8_is_an_error_with_the_line_number(name: str, content: bytes, tmp_path: Path) -> None:
    path, line = text_file(tmp_path / name, content), content[: content.index(b"\xff")].count(b"\n") + 1
    for read in (lambda: rf.open(path), lambda: list(rows(path))):
        with pytest.raises(CorruptError, match=rf"(?s)(?=.*UTF-8).*t\.{path.suffix[1:]}, line {line}\b"):
            read()


@pytest.mark.parametrize("unit", ["[", '{"a":', '[{"a":'])
@pytest.mark.parametrize("depth", [100, 200_000])
def test_json_that_is_nested_too_deeply_is_refused(unit: str, depth: int, tmp_path: Path) -> None:
    close = unit.replace('"a":', "")[::-1].translate(str.maketrans("[{", "]}"))
    path = text_file(tmp_path / "deep.jsonl", '{"a": 1}\n{"a": ' + unit * depth + "1" + close * depth + "}\n")
    with pytest.raises(SourceError, match=r"nested too deeply[\s\S]*deep\.jsonl, line 2"):
        rf.open(path)
    # Over several lines, each of which looks harmless, it is no line of JSON.
    path.write_text('{"a": 1}\n' + '{"a]": {"b}":\n' * depth)
    with pytest.raises(CorruptError, match=r"deep\.jsonl, line 2"):
        JsonlSource(path)


def _deeper(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    return st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3)


VALUES = st.recursive(st.none() | st.text(max_size=6), _deeper, max_leaves=6)


@settings(max_examples=100)
@given(st.lists(st.fixed_dictionaries({"x": VALUES}), min_size=1, max_size=6), st.booleans())
def test_each_line_that_json_dumps_writes_is_accepted_as_one_object(samples: list[Any], ascii: bool) -> None:
    lines = [json.dumps(sample, ensure_ascii=ascii) for sample in samples]
    try:
        outcome = str(JsonParser(None).parse(Text("\n".join(lines).encode(), "here")).num_rows)
    except CorruptError as error:  # of Arrow, for a column of several types
        outcome = error.summary
    assert outcome in (str(len(lines)), "the text cannot be parsed")


def test_json_lists_that_begin_with_null_are_an_error_or_masked(tmp_path: Path) -> None:
    path = text_file(tmp_path / "t.jsonl", '{"x": [null, [1]], "y": [null, 2]}\n')
    with pytest.raises(SourceError, match=r"a value is null[\s\S]*column 'y'"):
        rf.open(path)
    sample = rf.open(path, nulls="mask")[0]
    assert sample["x"][0] is None
    assert (sample["x"][1].tolist(), bool(sample["y_valid"])) == ([1], False)


def test_nan_and_infinity_in_json_are_read_as_numbers(tmp_path: Path) -> None:
    path = text_file(tmp_path / "t.jsonl", '{"a": NaN}\n{"a": -Infinity}\n{"a": Inf}\n{"a": 1}\n')
    np.testing.assert_array_equal([row["a"] for row in rf.open(path)], [np.nan, -np.inf, np.inf, 1])


def test_text_above_the_limit_is_refused_with_a_remedy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = text_file(tmp_path / "t.csv", CSV)
    assert not is_large(path)
    monkeypatch.setattr(text_source, "LIMIT", 1000)
    assert is_large(path)
    with pytest.raises(SourceError, match=r"too large[\s\S]*rankfeed write .*t\.csv"):
        rf.open(path)


def test_a_gzip_bomb_is_refused_as_too_large(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(text_source, "LIMIT", 1 << 20)
    bomb = text_file(tmp_path / "bomb.csv.gz", gzip.compress(b"a\n" + b"0" * (64 << 20)))
    with pytest.raises(SourceError, match=r"too large[\s\S]*bomb\.csv\.gz"):
        rf.open(bomb)


@pytest.mark.parametrize("keep", [-1, -12, 40])
def test_a_truncated_gzip_file_is_an_error_that_names_it(keep: int, tmp_path: Path) -> None:
    path = text_file(tmp_path / "cut.jsonl.gz", gzip.compress(JSONL.encode())[:keep])
    with pytest.raises(CorruptError, match=r"cut\.jsonl\.gz"):
        JsonlSource(path)


@pytest.mark.parametrize(
    ("name", "content", "kind"),
    [
        ("a.csv", b"a,b\n1,2\n", "csv"),
        ("a.csv", b"PK\x03\x04\x00\x00", None),
        ("a.csv", b"", None),
        ("a.jsonl", b"\xef\xbb\xbf\n", None),
        ("a.txt", b"a,b\n1,2\n", None),
        ("a.jsonl", b'{"a": 1}\n', "jsonl"),
        ("a.jsonl", b"[1]\n", None),
        ("a.json", b'{"a": 1}\n{"a": 2}\n', "jsonl"),
        ("a.json", b'{\n "a": 1\n}\n', None),
        ("a.json", b'{"__kind__": "wids-shard-index-v1", "shardlist": []}', None),
        ("a.jsonl", b'{"__kind__": "wids-shard-index-v1", "shardlist": []}', None),
        ("index.json", b'{"version": 2, "shards": []}', None),
    ],
)
def test_a_file_has_a_text_kind_only_if_its_name_and_its_content_fit(
    name: str, content: bytes, kind: str | None, tmp_path: Path
) -> None:
    assert text_kind(text_file(tmp_path / name, content)) == kind
    (tmp_path / "other.bin").write_bytes(b"\0")
    assert text_kind(tmp_path) is None  # a folder that holds other files too
    assert text_kind(tmp_path / "nothing.csv") is None


# Streams.


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("t.jsonl", '{"a": 1}\n' * 50 + '{"a": "x"}\n', r"t\.jsonl[\s\S]*types="),
        ("t.jsonl", '{"a": 1}\n' * 50 + '{"a": 1\n', r"t\.jsonl, line 51"),
        ("t.csv", "a,b\n" + "1,2\n" * 50 + "x,2\n", r"invalid value 'x'[\s\S]*t\.csv[\s\S]*types="),
    ],
    ids=["text in JSON", "malformed JSON", "text in CSV"],
)
def test_a_stream_raises_an_error_for_a_line_unlike_those_of_its_first_piece(
    name: str, text: str, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(text_source, "PIECE", 64)
    path = text_file(tmp_path / name, text)
    with pytest.raises(CorruptError, match=message):
        list(rows(path))
    if name == "t.csv":
        assert [str(row["a"]) for row in rows(path, types={"a": "string"})] == ["1"] * 50 + ["x"]


@pytest.mark.parametrize("rows_before", [0, 40])
@pytest.mark.parametrize(
    "end", ['x,"y\n3,z\n', 'x,"y\n3,z', 'x,"y ""\n3,z""\n', 'x,5" pipe\nx,"abc\n3,x\n', 'x,5" pipe\nx,"abc']
)
def test_a_csv_quote_that_is_not_closed_is_an_error_with_its_line(
    rows_before: int, end: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(text_source, "PIECE", 64)
    path = text_file(tmp_path / "t.csv", "a,b\n" + "text,t\n" * rows_before + end)
    message = rf"a quoted value has no end[\s\S]*t\.csv, line {rows_before + 2 + ('pipe' in end)}"
    for read in (lambda: rf.open(path), lambda: list(rows(path))):
        with pytest.raises(CorruptError, match=message):
            read()


QUOTES = ['x,5" pipe\nx,"abc\n"', 'x,"y\n3,z"', 'x,"y\n3,z\n"\n', 'x,a 5" pipe', 'x,""""', "x,y"]


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("t.tsv", "a\n1\n1.5"),  # the last line without an end belongs to the first piece
        ("t.tsv", "a\tb\n1\t\n2\tx"),
        ("t.tsv", "a\tb\nxxxxxxx\ty\n\t"),  # two empty texts are a row
        ("t.tsv", "a\tb\nx\ty\n\t\n\t\nz\tz\n" + "x\ty\n" * 20 + "\t"),
        ("t.tsv", "a\tb\n" + "xxxxxx\ty\n\ufeffxxxxx\ty\n" * 30),
        ("t.csv", CSV),
        ("t.jsonl", JSONL),
        *(("t.csv", "a,b\n" + end) for end in QUOTES),
        *(("t.csv", "a,b\n" + "text,t\n" * 40 + end) for end in QUOTES),
    ],
)
@pytest.mark.parametrize("piece", [12, 13, 16, 17, 64, 1 << 20])
def test_streamed_samples_equal_those_of_the_opened_file_for_pieces_of_any_size(
    piece: int, name: str, text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(text_source, "PIECE", piece)
    path = text_file(tmp_path / name, text)
    assert [plain(sample) for sample in rows(path)] == samples_of(rf.open(path))


# Arguments that cannot be meant.


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"delimiter": "ab"}, "one character"),
        ({"delimiter": 5}, "invalid delimiter"),
        ({"delimiter": "\u00e9"}, "invalid delimiter"),
        ({"types": ["a"]}, "invalid types"),
        ({"types": {"a": 5}}, "no such type"),
        ({"types": {"a": "quaternion"}}, r"no such type[\s\S]*'quaternion'"),
    ],
    ids=str,
)
def test_an_invalid_delimiter_or_type_is_refused(options: dict[str, Any], message: str, tmp_path: Path) -> None:
    path = text_file(tmp_path / "t.csv", "a,b\n1,2\n")
    with pytest.raises(ArgumentError, match=message):
        rf.open(path, **options)


# Numbers.

BIG = 2**63 + 1
LOST = 2**53 + 1


def text_of(kind: str, values: Sequence[Any], **others: Any) -> str:
    """A column "x" of these values, and columns of one value."""
    if kind == "csv":
        tail = "".join(f",{value}" for value in others.values())
        return ",".join(["x", *others]) + "\n" + "".join(f"{value}{tail}\n" for value in values)
    tail = "".join(f', "{name}": {value}' for name, value in others.items())
    return "".join(f'{{"x": {value}{tail}}}\n' for value in values)


@pytest.mark.parametrize("kind", ["csv", "jsonl"])
def test_integers_in_a_column_without_a_name_keep_all_digits(kind: str, tmp_path: Path) -> None:
    text = f",x\n{BIG},1\n" if kind == "csv" else f'{{"": {BIG}, "x": 1}}\n'
    path = text_file(tmp_path / f"a.{kind}", text)
    for columns in (None, ["unnamed"]):
        assert rf.open(path, columns=columns)[0]["unnamed"] == BIG
    path.write_text(f",x\n{LOST},1\n0.5,2\n" if kind == "csv" else f'{{"": {LOST}}}\n{{"": 0.5}}\n')
    with pytest.raises(SourceError, match=r"column 'unnamed'[\s\S]*types=\{'': 'float64'\}"):
        rf.open(path)
    assert rf.open(path, types={"": "float64"})[1]["unnamed"] == 0.5


@pytest.mark.parametrize("kind", ["csv", "jsonl"])
def test_integers_above_int64_are_read_as_uint64(kind: str, tmp_path: Path) -> None:
    path = text_file(tmp_path / f"a.{kind}", text_of(kind, [BIG, 1]))
    assert str(rf.open(path).fields["x"]) == "uint64"
    if kind == "csv":
        assert pd.read_csv(path)["x"].tolist() == [BIG, 1]
    other = text_file(tmp_path / f"b.{kind}", text_of(kind, [2, 3]))
    assert column_of(rf.open([path, other]), "x") == [BIG, 1, 2, 3]
    assert column_of(rf.write(rows(path), tmp_path / "packed", progress=False), "x") == [BIG, 1]


@pytest.mark.parametrize("kind", ["csv", "jsonl"])
@pytest.mark.parametrize("values", [[1, LOST, 1.5], [1, BIG, -1], [1, 2**64 + 1]])
def test_integers_that_float64_would_round_are_refused(values: list[Any], kind: str, tmp_path: Path) -> None:
    path = text_file(tmp_path / f"a.{kind}", text_of(kind, values, y=7))
    line = 3 if kind == "csv" else 2
    for read in (lambda: rf.open(path), lambda: list(rows(path))):
        with pytest.raises(
            SourceError, match=rf"would lose digits[\s\S]*{values[1]}\n[\s\S]*a\.{kind}[\s\S]*column 'x'"
        ) as caught:
            read()
        assert not isinstance(caught.value, CorruptError)
    with pytest.raises(SourceError, match=f"line {line},"):
        rf.open(path)
    assert column_of(rf.open(path, types={"x": "float64"}), "x") == [float(value) for value in values]
    for types in (None, {"y": "int32"}):
        assert column_of(rf.open(path, columns=["y"], types=types), "y") == [7] * len(values)
        assert [row["y"] for row in rows(path, columns=["y"], types=types)] == [7] * len(values)


def test_an_integer_of_thousands_of_digits_is_refused_where_it_would_be_rounded(tmp_path: Path) -> None:
    path = text_file(tmp_path / "a.csv", f"x\n1.5\n{'1' * 5000}\n")
    with pytest.raises(SourceError, match=r"a\.csv, line 3, column 'x'"):
        rf.open(path)
    path.write_text(f"x\n1.5\n{'0' * 5000}7\n")
    assert [row["x"] for row in rf.open(path)] == [1.5, 7]


@pytest.mark.parametrize("kind", ["csv", "jsonl"])
def test_integers_that_floats_of_another_file_would_round_are_refused(kind: str, tmp_path: Path) -> None:
    first = text_file(tmp_path / f"a.{kind}", text_of(kind, [7, 2**53]))  # float64 holds them
    second = text_file(tmp_path / f"b.{kind}", text_of(kind, [1.5]))
    assert [row["x"] for row in rf.open([first, second])] == [7.0, 2.0**53, 1.5]
    for large in (LOST, 2**60):
        first.write_text(text_of(kind, [7, large]))
        with pytest.raises(SourceError, match=rf"{large}[\s\S]*a\.{kind}, column 'x'"):
            rf.open([first, second])
    assert [row["x"] for row in rf.open([first, second], types={"x": "float64"})] == [7.0, 2.0**60, 1.5]


def test_integers_in_json_lists_and_objects_keep_their_digits_or_are_refused(tmp_path: Path) -> None:
    path = text_file(tmp_path / "a.jsonl", f'{{"x": [{BIG}, 1], "y": {{"z": {BIG}}}, "w": 1.5}}\n')
    sample = rf.open(path)[0]
    assert (sample["x"].tolist(), int(sample["y.z"])) == ([BIG, 1], BIG)
    path.write_text(f'{{"x": [1], "ok": 1}}\n\n{{"x": [{LOST}, 1.5], "ok": 2}}\n')
    with pytest.raises(SourceError, match=rf"{LOST}[\s\S]*line 3, column 'x'"):
        rf.open(path)
    assert [row["ok"] for row in rf.open(path, columns=["ok"])] == [1, 2]
    path.write_text(f'{{"x": {{"z": {BIG}, "w": 1e300}}, "y": [{{"z": {BIG}, "w": 1.5}}]}}\n')
    for columns in (None, ["x.z", "y"]):
        sample = rf.open(path, columns=columns)[0]
        assert (int(sample["x.z"]), sample["y"]) == (BIG, [{"z": BIG, "w": 1.5}])
    path.write_text(f'{{"y": [{{"z": {LOST}}}, {{"z": 1.5}}], "ok": 1}}\n')
    with pytest.raises(SourceError, match=rf"{LOST}[\s\S]*line 1, column 'y.z'"):
        rf.open(path, columns=["y"])
    path.write_text(f'{{"x": 1.5}}\n{{"x": 1}} {{"x": {LOST}}}\n')  # two in a line
    with pytest.raises(SourceError, match=r"not one JSON object[\s\S]*line 2"):
        rf.open(path)


def test_nan_in_a_csv_column_of_numbers_is_a_number_as_in_pandas(tmp_path: Path) -> None:
    path = text_file(tmp_path / "a.csv", "x,y,z\n1.5,nan,1\nnan,a,NaN\n")
    source = rf.open(path)
    expected = pd.read_csv(path, dtype={"y": "str"}, keep_default_na=False, na_values=["nan", "NaN"])
    for name in ("x", "z"):
        np.testing.assert_array_equal(column_of(source, name), expected[name])
    assert column_of(source, "y") == ["nan", "a"]
    path.write_text("x\n1.5\nNA\n")
    with pytest.raises(SourceError, match="null"):
        rf.open(path)


# Shapes of files.


def test_a_csv_line_longer_than_a_block_of_the_parser_is_read(tmp_path: Path) -> None:
    names = [f'"a column with quite a long name, number {index:0200}"' for index in range(6000)]
    path = text_file(tmp_path / "a.csv", ",".join(names) + "\n" + ",".join(map(str, range(6000))) + "\n")
    assert list(rf.open(path)[0].values()) == list(range(6000))


@pytest.mark.parametrize("kind", ["csv", "jsonl"])
def test_opening_sparse_text_makes_no_call_for_each_value(kind: str, tmp_path: Path) -> None:

    def calls(size: int) -> int:
        if kind == "csv":
            text = ",".join(f"c{i}" for i in range(100)) + "\n" + ("," * 99 + "\n") * size
        else:
            text = "".join(f'{{"k{i % 100}": 1}}\n' for i in range(size))
        path = text_file(tmp_path / f"{size}.{kind}", text)
        count = 0

        def note(*_: Any) -> None:
            nonlocal count
            count += 1

        sys.setprofile(note)
        try:
            rf.open(path, nulls="mask")
        finally:
            sys.setprofile(None)
        return count

    calls(100)
    assert calls(16_000) < calls(8_000) + 10 * 8_000  # a call for each value would be 100 for each row


def test_json_lines_that_have_a_new_key_each_are_read_if_few_and_refused_if_many(tmp_path: Path) -> None:
    lines = [f'{{"k{i}": {i}}}\n' for i in range(100_000)]
    source = rf.open(text_file(tmp_path / "few.jsonl", "".join(lines[:300])), nulls="mask")
    assert [source[i][f"k{i}"] for i in range(300)] == list(range(300))
    path = text_file(tmp_path / "a.jsonl", "".join(lines))  # 10**10 values
    for read in (lambda: rf.open(path, nulls="mask"), lambda: next(iter(rows(str(path))))):
        with pytest.raises(SourceError, match=r"different keys[\s\S]*a\.jsonl"):
            read()


@pytest.mark.parametrize("kind", ["csv", "jsonl"])
def test_a_null_in_a_stream_is_an_error_with_remedies_that_work(kind: str, tmp_path: Path) -> None:
    text = "x,y\n1,a\n,b\n" if kind == "csv" else '{"x": 1, "y": "a"}\n{"x": null, "y": "b"}\n'
    path = text_file(tmp_path / f"t.{kind}", text)
    with pytest.raises(SourceError, match=rf"a value is null[\s\S]*t\.{kind}, row 1, column 'x'") as caught:
        rf.write(rows(path), tmp_path / "failed", progress=False)
    for argument in ('nulls="mask"', "columns=", "rows"):
        assert argument in str(caught.value.remedy)
    masked = rf.write(rows(path, nulls="mask"), tmp_path / "masked", progress=False)
    expected = samples_of(rf.open(path, nulls="mask"))
    assert samples_of(masked) == expected
    assert [bool(sample["x_valid"]) for sample in expected] == [True, False]
    assert [[*sample] for sample in rows(path, columns=["x"], nulls="mask")] == 2 * [["x", "x_valid"]]
    assert [row["y"] for row in rf.write(rows(path, columns=["y"]), tmp_path / "y", progress=False)] == ["a", "b"]
    with pytest.raises(ArgumentError, match="no such column"):
        list(rows(path, columns=["z"]))

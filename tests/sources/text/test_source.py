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


@pytest.fixture(scope="module")
def csv(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("csv") / "t.csv"
    pl.DataFrame(ROWS).drop("tokens").write_csv(path)
    return path


@pytest.fixture(scope="module")
def jsonl(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("jsonl") / "t.jsonl"
    pl.DataFrame(ROWS).write_ndjson(path)
    return path


def test_columns_of_several_files_are_joined_by_name_in_types_that_hold_them_all(tmp_path: Path) -> None:
    (tmp_path / "0.csv").write_text("x,y\n0,0\n0,1\n")
    (tmp_path / "1.csv").write_text("y,x\n0.5,1\n")
    assert samples_of(rf.open(tmp_path)) == [{"x": 0, "y": 0.0}, {"x": 0, "y": 1.0}, {"x": 1, "y": 0.5}]


def test_compressed_text_and_tabs_are_read(tmp_path: Path, jsonl: Path) -> None:
    (tmp_path / "t.jsonl.gz").write_bytes(gzip.compress(jsonl.read_bytes()))
    assert samples_of(rf.open(tmp_path / "t.jsonl.gz")) == ROWS
    (tmp_path / "t.tsv").write_text("a\tb\n1\tx,y\n")
    assert samples_of(rf.open(tmp_path / "t.tsv")) == [{"a": 1, "b": "x,y"}]
    (tmp_path / "u.csv").write_text("a;b\n1;2\n")
    assert samples_of(rf.open(tmp_path / "u.csv", delimiter=";")) == [{"a": 1, "b": 2}]
    with pytest.raises(ArgumentError, match="one character"):
        rf.open(tmp_path / "u.csv", delimiter="ab")


def test_a_quoted_value_may_have_lines(tmp_path: Path) -> None:
    (tmp_path / "q.csv").write_text('a,b\n"x\ny, ""z""",1\nw,2\n')
    assert samples_of(rf.open(tmp_path / "q.csv")) == [{"a": 'x\ny, "z"', "b": 1}, {"a": "w", "b": 2}]


def test_types_can_be_given(tmp_path: Path) -> None:
    (tmp_path / "t.csv").write_text("code,x\n007,1\n")
    assert samples_of(rf.open(tmp_path / "t.csv")) == [{"code": 7, "x": 1}]
    source = rf.open(tmp_path / "t.csv", types={"code": "string", "x": "float32"})
    assert samples_of(source) == [{"code": "007", "x": 1.0}]
    assert str(source.fields["x"]) == "float32"
    (tmp_path / "t.jsonl").write_text('{"day": "2024-01-01"}\n{"day": "2024-01-02"}\n')
    assert samples_of(rf.open(tmp_path / "t.jsonl", types={"day": "string"}))[1] == {"day": "2024-01-02"}
    with pytest.raises(ArgumentError, match=r"no such type[\s\S]*'quaternion'"):
        rf.open(tmp_path / "t.csv", types={"x": "quaternion"})


def test_types_of_a_column_that_does_not_exist_are_refused(tmp_path: Path) -> None:
    (tmp_path / "t.csv").write_text("code,x\n007,1\n")
    (tmp_path / "t.jsonl").write_text('{"code": "2024-01-01", "x": null}\n')
    words = r"does not exist[\s\S]*expected: 'code', 'x'[\s\S]*found: 'Code'[\s\S]*t\.{}"
    for name in ("csv", "jsonl"):
        for options in ({}, {"nulls": "mask"}, {"columns": ["code"]}):
            with pytest.raises(ArgumentError, match=words.format(name)):
                rf.open(tmp_path / f"t.{name}", types={"Code": "string"}, **options)
    with pytest.raises(ArgumentError, match=words.format("csv")):
        list(rows(tmp_path / "t.csv", types={"Code": "string"}))
    # One of the files has it, or has it with nulls only.
    (tmp_path / "u.jsonl").write_text('{"code": "2024-01-02"}\n')
    paths = [tmp_path / "u.jsonl", tmp_path / "t.jsonl"]
    source = rf.open(paths, types={"code": "string", "x": "float32"}, nulls="mask")
    assert [row["code"] for row in source] == ["2024-01-02", "2024-01-01"]
    assert str(source.fields["x"]) == "float32"
    with pytest.raises(ArgumentError, match=r"expected: 'code', 'x'"):
        rf.open(paths, types={"code": "string", "x": "float32", "Code": "string"}, nulls="mask")


@pytest.mark.parametrize("text", ["id,score\n7,0.5\n8,1.5\n9,2.5\n", "id\n1\n", "id,score\n1,0.5\n3,1.5\n"])
def test_another_text_is_refused_each_time(text: str, tmp_path: Path) -> None:
    path = tmp_path / "t.csv"
    path.write_text("id,score\n1,0.5\n2,1.5\n")
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
        (
            "a,b\n1,2\n1,2,3\n",
            r"Row #3: Expected 2 columns, got 3[\s\S]*bad\.csv[\s\S]*correct or remove that line",
        ),
        ('a,b\n1,x\n2,"y\n3,z\n', r"a quoted value has no end[\s\S]*bad\.csv, line 3"),
        ('a,b\n5 pipe,"x ""y""\n\nz"\n"1', r"a quoted value has no end[\s\S]*bad\.csv, line 5"),
        ("a,b\n", r"no samples[\s\S]*bad\.csv"),
        ("a,a\n1,2\n", r"one name[\s\S]*'a'"),
    ],
)
def test_a_bad_csv_is_named_with_its_line(text: str, message: str, tmp_path: Path) -> None:
    path = tmp_path / "bad.csv"
    path.write_text(text)
    with pytest.raises(SourceError, match=message):
        rf.open(path)


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
def test_a_bad_line_of_json_is_named(line: str, message: str, after: str, tmp_path: Path) -> None:
    path = tmp_path / "bad.jsonl"
    path.write_text(f'\n  \n{{"a": 1}}\r\n{line}\n{after}')
    with pytest.raises(CorruptError, match=rf"{message}[\s\S]*line 4"):
        rf.open(path)


@pytest.mark.parametrize(
    ("name", "content"), [("t.jsonl", b'{"a": "x"}\n{"a": "\xff"}\n'), ("t.csv", b"a\xff,b\n1,2\n")]
)
def test_text_that_is_no_utf8_is_named_with_its_line(name: str, content: bytes, tmp_path: Path) -> None:
    path, line = tmp_path / name, content[: content.index(b"\xff")].count(b"\n") + 1
    path.write_bytes(content)
    for read in (lambda: rf.open(path), lambda: list(rows(path))):
        with pytest.raises(CorruptError, match=rf"(?s)(?=.*UTF-8).*t\.{path.suffix[1:]}, line {line}\b"):
            read()


@pytest.mark.parametrize("unit", ["[", '{"a":', '[{"a":'])
@pytest.mark.parametrize("depth", [100, 200_000])
def test_json_nested_without_bound_is_refused_before_it_is_parsed(unit: str, depth: int, tmp_path: Path) -> None:
    path = tmp_path / "deep.jsonl"
    close = unit.replace('"a":', "")[::-1].translate(str.maketrans("[{", "]}"))
    path.write_text('{"a": 1}\n{"a": ' + unit * depth + "1" + close * depth + "}\n")
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
def test_whatever_json_writes_is_whole_lines(samples: list[Any], ascii: bool) -> None:
    lines = [json.dumps(sample, ensure_ascii=ascii) for sample in samples]
    try:
        outcome = str(JsonParser(None).parse(Text("\n".join(lines).encode(), "here")).num_rows)
    except CorruptError as error:  # of Arrow, for a column of several types
        outcome = error.summary
    assert outcome in (str(len(lines)), "the text cannot be parsed")


def test_a_null_before_all_values_of_a_list_is_read(tmp_path: Path) -> None:
    path = tmp_path / "t.jsonl"
    path.write_text('{"x": [null, [1]], "y": [null, 2]}\n')
    with pytest.raises(SourceError, match=r"a value is null[\s\S]*column 'y'"):
        rf.open(path)
    sample = rf.open(path, nulls="mask")[0]
    assert sample["x"][0] is None
    assert (sample["x"][1].tolist(), bool(sample["y_valid"])) == ([1], False)


def test_numbers_that_json_lacks_are_read_as_arrow_reads_them(tmp_path: Path) -> None:
    path = tmp_path / "t.jsonl"
    path.write_text('{"a": NaN}\n{"a": -Infinity}\n{"a": Inf}\n{"a": 1}\n')
    np.testing.assert_array_equal([row["a"] for row in rf.open(path)], [np.nan, -np.inf, np.inf, 1])


def test_large_text_is_refused_with_the_way_to_write_it(csv: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert not is_large(csv)
    monkeypatch.setattr(text_source, "LIMIT", 1000)
    assert is_large(csv)
    with pytest.raises(SourceError, match=r"too large[\s\S]*rankfeed write .*t\.csv"):
        rf.open(csv)


def test_a_gzip_bomb_is_not_unpacked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(text_source, "LIMIT", 1 << 20)
    bomb = tmp_path / "bomb.csv.gz"
    with gzip.open(bomb, "wb") as file:
        file.write(b"a\n")
        for _ in range(64):
            file.write(b"0" * (1 << 20))
    with pytest.raises(SourceError, match=r"too large[\s\S]*bomb\.csv\.gz"):
        rf.open(bomb)


@pytest.mark.parametrize("keep", [-1, -12, 40])
def test_a_cut_gzip_is_named(keep: int, jsonl: Path, tmp_path: Path) -> None:
    path = tmp_path / "cut.jsonl.gz"
    path.write_bytes(gzip.compress(jsonl.read_bytes())[:keep])
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
def test_what_a_file_is_is_found_by_looking(name: str, content: bytes, kind: str | None, tmp_path: Path) -> None:
    path = tmp_path / name
    path.write_bytes(content)
    assert text_kind(path) == kind
    (tmp_path / "other.bin").write_bytes(b"\0")
    assert text_kind(tmp_path) is None  # a folder that holds other files too
    assert text_kind(tmp_path / "nothing.csv") is None


# Streams.


@pytest.mark.parametrize("piece", [100, 1 << 20])
def test_a_stream_gives_the_same_samples(
    piece: int, csv: Path, jsonl: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(text_source, "PIECE", piece)
    for path in (csv, jsonl):
        assert [plain(sample) for sample in rows(path)] == samples_of(rf.open(path))


def test_a_stream_names_the_line_of_what_does_not_fit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(text_source, "PIECE", 64)
    lines = tmp_path / "t.jsonl"
    lines.write_text('{"a": 1}\n' * 50 + '{"a": "x"}\n')
    with pytest.raises(CorruptError, match=r"t\.jsonl[\s\S]*types="):
        list(rows(lines))
    lines.write_text('{"a": 1}\n' * 50 + '{"a": 1\n')
    with pytest.raises(CorruptError, match=r"t\.jsonl, line 51"):
        list(rows(lines))
    table = tmp_path / "t.csv"
    table.write_text("a,b\n" + "1,2\n" * 50 + "x,2\n")
    with pytest.raises(CorruptError, match=r"invalid value 'x'[\s\S]*t\.csv[\s\S]*types="):
        list(rows(table))
    assert [str(row["a"]) for row in rows(table, types={"a": "string"})] == ["1"] * 50 + ["x"]


@pytest.mark.parametrize("rows_before", [0, 40])
@pytest.mark.parametrize(
    ("end", "message"),
    [
        ('x,"y\n3,z\n', "a quoted value has no end"),
        ('x,"y\n3,z', "a quoted value has no end"),
        ('x,"y ""\n3,z""\n', "a quoted value has no end"),
        ('x,5" pipe\nx,"abc\n3,x\n', "a quoted value has no end"),
        ('x,5" pipe\nx,"abc', "a quoted value has no end"),
        ('x,5" pipe\nx,"abc\n"', None),
        ('x,"y\n3,z"', None),
        ('x,"y\n3,z\n"\n', None),
        ('x,a 5" pipe', None),
        ('x,""""', None),
        ("x,y", None),
    ],
)
def test_a_stream_refuses_a_quote_that_is_not_closed(
    rows_before: int, end: str, message: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(text_source, "PIECE", 64)
    path = tmp_path / "t.csv"
    path.write_text("a,b\n" + "text,t\n" * rows_before + end)
    if message is not None:
        where = rf"{message}[\s\S]*t\.csv, line {rows_before + 2 + ('pipe' in end)}"
        for read in (lambda: rf.open(path), lambda: list(rows(path))):
            with pytest.raises(CorruptError, match=where):
                read()
    else:
        assert [plain(sample) for sample in rows(path)] == samples_of(rf.open(path))


@pytest.mark.parametrize(
    "text",
    [
        "a\n1\n1.5",  # the last line without an end belongs to the first piece
        "a\tb\n1\t\n2\tx",
        "a\tb\nxxxxxxx\ty\n\t",  # two empty texts are a row
        "a\tb\nx\ty\n\t\n\t\nz\tz\n" + "x\ty\n" * 20 + "\t",
        "a\tb\n" + "xxxxxx\ty\n\ufeffxxxxx\ty\n" * 30,
    ],
)
@pytest.mark.parametrize("piece", [12, 13, 16, 17, 1000])
def test_the_border_of_a_piece_changes_no_sample(
    piece: int, text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(text_source, "PIECE", piece)
    path = tmp_path / "t.tsv"
    path.write_text(text)
    assert [plain(sample) for sample in rows(path)] == samples_of(rf.open(path))


# Odd names, and arguments that cannot be meant.


def test_a_column_without_a_name_is_called_unnamed(tmp_path: Path) -> None:
    path = tmp_path / "t.csv"
    path.write_text(",x\n0,5\n1,6\n")  # as pandas writes its index
    source = rf.open(path)
    assert samples_of(source) == [{"unnamed": 0, "x": 5}, {"unnamed": 1, "x": 6}]
    (batch,) = rf.Loader(source, 2, topology=rf.Topology())
    assert plain(batch) == {"unnamed": [0, 1], "x": [5, 6]}


@pytest.mark.parametrize(
    "options", [{"delimiter": 5}, {"delimiter": "\u00e9"}, {"types": ["a"]}, {"types": {"a": 5}}]
)
def test_options_that_cannot_be_meant_are_refused(options: dict[str, Any], tmp_path: Path) -> None:
    path = tmp_path / "t.csv"
    path.write_text("a,b\n1,2\n")
    with pytest.raises(ArgumentError):
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
    path = tmp_path / f"a.{kind}"
    path.write_text(f",x\n{BIG},1\n" if kind == "csv" else f'{{"": {BIG}, "x": 1}}\n')
    for columns in (None, ["unnamed"]):
        assert rf.open(path, columns=columns)[0]["unnamed"] == BIG
    path.write_text(f",x\n{LOST},1\n0.5,2\n" if kind == "csv" else f'{{"": {LOST}}}\n{{"": 0.5}}\n')
    with pytest.raises(SourceError, match=r"column 'unnamed'[\s\S]*types=\{'': 'float64'\}"):
        rf.open(path)
    assert rf.open(path, types={"": "float64"})[1]["unnamed"] == 0.5


@pytest.mark.parametrize("kind", ["csv", "jsonl"])
def test_integers_keep_all_digits(kind: str, tmp_path: Path) -> None:
    path, other = (tmp_path / f"{name}.{kind}" for name in "ab")
    path.write_text(text_of(kind, [BIG, 1]))
    assert str(rf.open(path).fields["x"]) == "uint64"
    if kind == "csv":
        assert pd.read_csv(path)["x"].tolist() == [BIG, 1]
    other.write_text(text_of(kind, [2, 3]))
    assert column_of(rf.open([path, other]), "x") == [BIG, 1, 2, 3]
    assert column_of(rf.write(rows(path), tmp_path / "packed", progress=False), "x") == [BIG, 1]


@pytest.mark.parametrize("kind", ["csv", "jsonl"])
@pytest.mark.parametrize("values", [[1, LOST, 1.5], [1, BIG, -1], [1, 2**64 + 1]])
def test_integers_that_float64_would_round_are_refused_if_they_are_read(
    values: list[Any], kind: str, tmp_path: Path
) -> None:
    path = tmp_path / f"a.{kind}"
    path.write_text(text_of(kind, values, y=7))
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
    path = tmp_path / "a.csv"
    path.write_text(f"x\n1.5\n{'1' * 5000}\n")
    with pytest.raises(SourceError, match=r"a\.csv, line 3, column 'x'"):
        rf.open(path)
    path.write_text(f"x\n1.5\n{'0' * 5000}7\n")
    assert [row["x"] for row in rf.open(path)] == [1.5, 7]


@pytest.mark.parametrize("kind", ["csv", "jsonl"])
def test_integers_that_another_file_would_round_are_refused(kind: str, tmp_path: Path) -> None:
    first, second = tmp_path / f"a.{kind}", tmp_path / f"b.{kind}"
    second.write_text(text_of(kind, [1.5]))
    first.write_text(text_of(kind, [7, 2**53]))  # float64 holds them
    assert [row["x"] for row in rf.open([first, second])] == [7.0, 2.0**53, 1.5]
    for large in (LOST, 2**60):
        first.write_text(text_of(kind, [7, large]))
        with pytest.raises(SourceError, match=rf"{large}[\s\S]*a\.{kind}, column 'x'"):
            rf.open([first, second])
    assert [row["x"] for row in rf.open([first, second], types={"x": "float64"})] == [7.0, 2.0**60, 1.5]


def test_integers_in_lists_and_objects_keep_their_digits_or_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text(f'{{"x": [{BIG}, 1], "y": {{"z": {BIG}}}, "w": 1.5}}\n')
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


def test_the_text_nan_is_a_number(tmp_path: Path) -> None:
    path = tmp_path / "a.csv"
    path.write_text("x,y,z\n1.5,nan,1\nnan,a,NaN\n")
    source = rf.open(path)
    expected = pd.read_csv(path, dtype={"y": "str"}, keep_default_na=False, na_values=["nan", "NaN"])
    for name in ("x", "z"):
        np.testing.assert_array_equal(column_of(source, name), expected[name])
    assert column_of(source, "y") == ["nan", "a"]
    path.write_text("x\n1.5\nNA\n")
    with pytest.raises(SourceError, match="null"):
        rf.open(path)


# Shapes of files.


def test_a_byte_order_mark_is_no_part_of_the_text(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes(b'\xef\xbb\xbf{"x": 1}\n{"x": 2}\n')
    assert [row["x"] for row in rf.open(path)] == [1, 2] == [row["x"] for row in rows(str(path))]


def test_a_line_wider_than_a_block_is_read(tmp_path: Path) -> None:
    path = tmp_path / "a.csv"
    names = [f"a column with quite a long name, number {number:0200}" for number in range(6000)]
    path.write_text(",".join(f'"{name}"' for name in names) + "\n" + ",".join(map(str, range(6000))) + "\n")
    assert list(rf.open(path)[0].values()) == list(range(6000))


@pytest.mark.parametrize("kind", ["csv", "jsonl"])
def test_the_work_does_not_grow_with_rows_times_columns(kind: str, tmp_path: Path) -> None:
    """Counted in calls, as time depends on the machine: of empty columns, nothing is made for each value."""

    def calls(size: int) -> int:
        path = tmp_path / f"{size}.{kind}"
        if kind == "csv":
            path.write_text(",".join(f"c{i}" for i in range(100)) + "\n" + ("," * 99 + "\n") * size)
        else:
            path.write_text("".join(f'{{"k{i % 100}": 1}}\n' for i in range(size)))
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


def test_a_new_key_in_each_line_is_read_or_refused_before_it_is_parsed(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"

    def write(lines: int) -> None:
        path.write_text("".join(f'{{"k{i}": {i}}}\n' for i in range(lines)))

    write(300)
    source = rf.open(path, nulls="mask")
    assert [source[i][f"k{i}"] for i in range(300)] == list(range(300))
    write(100_000)  # 10**10 values
    for read in (lambda: rf.open(path, nulls="mask"), lambda: next(iter(rows(str(path))))):
        with pytest.raises(SourceError, match=r"different keys[\s\S]*a\.jsonl"):
            read()


@pytest.mark.parametrize("kind", ["csv", "jsonl"])
def test_the_remedy_for_a_null_in_a_stream_works(kind: str, tmp_path: Path) -> None:
    path = tmp_path / f"t.{kind}"
    path.write_text("x,y\n1,a\n,b\n" if kind == "csv" else '{"x": 1, "y": "a"}\n{"x": null, "y": "b"}\n')
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

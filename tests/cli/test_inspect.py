"""inspect and index say what is there: counts that are right, bars that are seen, and nothing run from data."""

import io
import tarfile
from pathlib import Path

import numpy as np
import pytest
import webdataset as wds
from hypothesis import given
from hypothesis import strategies as st
from tests.cli.test_commands import figures, rankfeed

import rankfeed as rf
from rankfeed.cli.inspect import LOOKS, edges_of, look, runs, summarize
from rankfeed.cli.output import format_bar, format_bytes

LENGTHS = [int(length) for length in np.random.default_rng(0).gamma(2, 30, 500)]


@pytest.fixture(scope="module")
def packed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("inspect") / "data"
    rows = (
        {
            "x": np.full((length, 2), index / 2, np.float32),
            "y": index,
            "raw": b"RIFF" * length,
            "text": "[red]\x1b[31mö" + "long " * length,
            "nan": np.float32("nan"),
        }
        for index, length in enumerate(LENGTHS)
    )
    rf.write(rows, path, shard_bytes=40_000, progress=False)
    return path


@pytest.fixture
def tars(tmp_path: Path) -> Path:
    folder = tmp_path / "tars"
    folder.mkdir()
    for shard in range(3):
        with wds.TarWriter(str(folder / f"a-{shard:03}.tar")) as writer:
            for sample in range(20 + shard):
                writer.write({"__key__": f"{shard}-{sample:03}", "txt": "t" * sample, "cls": sample})
    return folder


def test_inspect_reports_the_counts_sizes_and_fields_of_a_packed_dataset(packed: Path) -> None:
    told, source = figures("inspect", packed), rf.open(packed)
    assert told["format"] == "packed"
    assert (told["samples"], told["blocks"]) == (500, len(source.blocks))
    blocks = sorted(source.blocks.tolist())
    assert told["samples_per_block"]["least"] == blocks[0]
    assert told["samples_per_block"]["median"] in blocks
    assert told["samples_per_block"]["most"] == blocks[-1]
    assert told["columns"] == {name: str(field) for name, field in source.fields.items()}
    files = [path for path in packed.rglob("*") if path.is_file() and not path.name.startswith(".")]
    assert told["on_disk"] == {"files": len(files), "bytes": sum(path.stat().st_size for path in files)}
    assert told["fingerprint"] == source.fingerprint
    assert told["bytes_of_a_sample"]["x"] == pytest.approx(8 * np.mean(LENGTHS))
    assert told["bytes_of_a_sample"]["nan"] == 4


def test_inspect_reports_statistics_and_a_histogram_of_sample_lengths(packed: Path) -> None:
    told = figures("inspect", packed)
    assert told["lengths_of_samples"] == 500
    assert set(told["lengths"]) == {"x", "raw", "text"}
    lengths = told["lengths"]["x"]
    assert (lengths["least"], lengths["most"]) == (min(LENGTHS), max(LENGTHS))
    assert lengths["mean"] == pytest.approx(np.mean(LENGTHS))
    assert lengths["quantiles"]["50%"] == sorted(LENGTHS)[249]
    for bar in lengths["histogram"]:
        assert bar["count"] == sum(bar["from"] <= length <= bar["to"] for length in LENGTHS)
    assert sum(bar["count"] for bar in lengths["histogram"]) == 500


def test_inspect_shows_the_first_values_of_a_few_samples(packed: Path) -> None:
    assert figures("inspect", packed, "--samples", 0)["examples"] == []
    examples = figures("inspect", packed, "--samples", 4)["examples"]
    assert [example["sample_id"] for example in examples] == [0, 125, 250, 375]
    for example in examples:
        length, values = LENGTHS[example["sample_id"]], example["values"]
        assert values["y"] == example["sample_id"]
        assert values["nan"] == "nan"  # which JSON has no number for
        assert values["raw"] == {"bytes": 4 * length, "head": (b"RIFF" * length)[:16].hex()}
        shape = [length, 2]
        assert (values["x"]["dtype"], values["x"]["shape"]) == ("float32", shape)
        assert values["x"]["first"] == [example["sample_id"] / 2] * min(8, 2 * length)


def test_inspect_prints_histogram_bars_and_escapes_control_characters_of_the_data(packed: Path) -> None:
    output = rankfeed("inspect", packed).stdout
    assert "500" in output
    assert "█" in output
    assert "median" in output
    assert "float32[*, 2]" in output
    assert "52 49 46 46" in output
    assert "[red]\\x1b[31m" in output
    assert "\x1b" not in output


def test_inspect_reads_only_the_columns_asked_for(packed: Path) -> None:
    told = figures("inspect", packed, "--column", "y", "-c", "x")
    assert list(told["columns"]) == ["y", "x"]
    assert list(told["lengths"]) == ["x"]


@pytest.mark.parametrize("size", [LOOKS, LOOKS + 1, 10**12])
def test_inspect_looks_at_the_same_fixed_number_of_samples_of_any_large_dataset(size: int) -> None:
    ids = np.concatenate(list(runs(size)))
    assert len(ids) == LOOKS == len(np.unique(ids))
    assert (ids[0], ids[-1]) == (0, size - 1)
    np.testing.assert_array_equal(ids, np.concatenate(list(runs(size))))


def test_rows_of_equal_length_are_counted_in_the_length_statistics() -> None:
    source = rf.concat([rf.from_dataset([{"x": np.zeros(n)} for n in (3, 3, 1)])])
    seen, lengths = look(source, ["x"])
    assert (seen, lengths["x"]["most"], lengths["x"]["quantiles"]["50%"]) == (3, 3, 3)


@given(lengths=st.lists(st.integers(0, 9) | st.integers(0, 2**40), min_size=1, max_size=50))
def test_the_bars_of_a_length_histogram_cover_every_length_once(lengths: list[int]) -> None:
    told = summarize(np.array(lengths))
    bars = told["histogram"]
    assert [(bar["to"] + 1) for bar in bars[:-1]] == [bar["from"] for bar in bars[1:]]
    assert bars[0]["from"] <= told["least"] <= told["most"] <= bars[-1]["to"]
    assert len(bars) <= 16
    for bar in bars:
        assert bar["count"] == sum(bar["from"] <= length <= bar["to"] for length in lengths)


def test_the_bars_of_a_length_histogram_have_round_edges() -> None:
    assert edges_of(3, 96, 50) == [*range(0, 101, 10)]
    assert edges_of(0, 3000, 9) == [0, *(1 << power for power in range(13))]
    bars = summarize(np.array([1, 1, 2, 4]))["histogram"]
    assert bars[:2] == [{"from": 1, "to": 1, "count": 2}, {"from": 2, "to": 2, "count": 1}]


@given(least=st.integers(0, 1000), span=st.integers(0, 10**6), median=st.integers(0, 1000))
def test_a_length_histogram_has_at_most_16_bars(least: int, span: int, median: int) -> None:
    assert 2 <= len(edges_of(least, least + span, max(median, least))) <= 17


@given(share=st.floats(0, 1))
def test_format_bar_draws_a_bar_as_long_as_its_share(share: float) -> None:
    drawn = format_bar(share, 40)
    assert len(drawn) == np.ceil(max(round(share * 320), share > 0) / 8)
    assert not drawn or drawn[:-1] == "█" * (len(drawn) - 1)


@given(size=st.integers(0, 2**60))
def test_format_bytes_gives_a_size_as_a_rounded_number_with_a_binary_unit(size: int) -> None:
    number, unit = format_bytes(size).replace(",", "").split()
    factor = {"byte": 1, "bytes": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "TiB": 2**40}[unit]
    assert float(number) * factor == pytest.approx(size, rel=0.006)


def test_index_creates_missing_or_outdated_tar_indexes_and_reuses_the_others(tars: Path) -> None:
    first = figures("index", tars)
    assert (first["shards"], first["samples"]) == (3, 63)
    assert (first["made"], first["reused"]) == (3, 0)
    assert first["bytes"] == sum(path.stat().st_size for path in tars.glob("*.tar"))
    assert first["members"]["txt"]["count"] == 63
    assert first["members"]["txt"]["bytes"] == 3 * sum(range(20)) + 20 + 20 + 21
    assert first["members"]["txt"]["most"] == 21
    assert first["index_folders"] == {str(tars): 3}
    with wds.TarWriter(str(tars / "a-001.tar")) as writer:
        writer.write({"__key__": "new", "txt": "x"})
    again = figures("index", tars / "a-{000..002}.tar")
    assert (again["samples"], again["made"], again["reused"]) == (43, 1, 2)
    assert figures("inspect", tars, "-c", "txt", "--option", "missing=skip")["samples"] == 43
    output = rankfeed("index", *sorted(tars.glob("*.tar"))).stdout
    assert "0 made now, 3 existed" in output
    assert str(tars) in "".join(output.split("\n"))


def test_index_counts_the_samples_of_a_tar_with_pickles_without_decoding_them(tmp_path: Path) -> None:
    with tarfile.open(tmp_path / "a.tar", "w") as archive:
        for name in ("a.pyd", "b.pyd"):
            info = tarfile.TarInfo(name)
            info.size = 4
            archive.addfile(info, io.BytesIO(b"evil"))
    assert figures("index", tmp_path / "a.tar")["samples"] == 2


def test_index_writes_to_cache_dir_if_the_data_directory_is_read_only(
    tars: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("os.access", lambda *_: False)  # root may write anywhere
    told = figures("index", tars, "--cache-dir", tmp_path / "cache")
    (folder,) = told["index_folders"]
    assert Path(folder).is_relative_to(tmp_path / "cache")
    assert not list(tars.glob("*.rankfeed"))


def test_index_of_a_packed_dataset_reports_that_it_needs_no_index(packed: Path) -> None:
    assert "packed needs no index" in rankfeed("index", packed).stdout
    assert figures("index", packed) == {"format": "packed", "needs_index": False, "samples": 500}


@pytest.fixture
def broken(tars: Path) -> Path:
    path = tars / "a-001.tar"
    path.write_bytes(path.read_bytes()[:7000])
    return path


@pytest.mark.parametrize("command", ["inspect", "index"])
def test_inspect_and_index_exit_with_1_and_name_a_damaged_shard(command: str, tars: Path, broken: Path) -> None:
    done = rankfeed(command, tars)
    assert done.returncode == 1
    assert broken.name in done.stderr

"""The command line: figures for people and machines, and errors without a traceback."""

import io
import json
import re
import shutil
import subprocess
import sys
import tracemalloc
from collections.abc import Callable
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest

import rankfeed as rf
from rankfeed.cli import main

COMMANDS = ("inspect", "index", "plan", "prepare", "write", "doctor", "report", "topology", "verify", "demo")
PLAN_COMMANDS = ("plan", "report", "verify")


def rankfeed(*arguments: object) -> subprocess.CompletedProcess[str]:
    """Run the command in this process: a process of its own takes a second."""
    command = ["rankfeed", *map(str, arguments)]
    out, err = io.StringIO(), io.StringIO()
    with (
        mock.patch.object(sys, "argv", command),
        redirect_stdout(out),
        redirect_stderr(err),
        pytest.raises(SystemExit) as ended,
    ):
        main()
    return subprocess.CompletedProcess(command, int(ended.value.code or 0), out.getvalue(), err.getvalue())


def figures(*arguments: object) -> dict[str, Any]:
    done = rankfeed(*arguments, "--json")
    assert done.returncode == 0, done.stderr
    answer: dict[str, Any] = json.loads(done.stdout)
    return answer


@pytest.fixture(scope="module")
def packed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("cli") / "data"
    rf.write(({"x": np.full(i % 5, i), "y": i} for i in range(100)), path, shard_bytes=500, progress=False)
    return path


def test_the_installed_program_prints_an_error_without_traceback_and_exits_with_1() -> None:
    program = Path(sys.executable).with_name("rankfeed")
    done = subprocess.run([program, "inspect", "/nowhere"], capture_output=True, text=True, timeout=600)
    assert (done.returncode, done.stdout) == (1, "")
    assert "/nowhere" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_has_help_with_readable_types_an_example_and_json(command: str) -> None:
    done = rankfeed(command, "--help")
    assert done.returncode == 0
    examples = [line for line in done.stdout.splitlines() if line.startswith("  Example: ")]
    assert all(f"rankfeed {command}" in line for line in examples)
    assert examples
    assert "--json" in done.stdout
    assert not re.findall("<(?:str|int|float|bool|list|path).*>", done.stdout)


def test_the_help_of_plan_lists_the_choices_of_shuffle_and_tail() -> None:
    told = rankfeed("plan", "--help").stdout
    assert "none|global|window" in told
    assert "even|drop|pad" in told


def test_plan_report_and_verify_have_the_same_options_for_a_plan_in_their_help() -> None:
    helps = [rankfeed(command, "--help").stdout for command in PLAN_COMMANDS]
    first, *others = [
        re.findall(r"^  --samples .*?^  --cache-dir .*?$", text, re.DOTALL | re.MULTILINE) for text in helps
    ]
    assert len(first) == 1
    assert others == [first, first]


def test_the_program_prints_its_version_and_a_help_that_lists_all_commands() -> None:
    assert rankfeed("--version").stdout == f"rankfeed {rf.__version__}\n"
    told = rankfeed().stdout
    assert told == rankfeed("--help").stdout
    assert all(f"\n  {command} " in told for command in COMMANDS)
    assert "3 not proven" in told


def test_printed_lines_are_not_wrapped_if_the_output_is_no_terminal(tmp_path: Path) -> None:
    path = tmp_path / ("long" * 30) / ("path" * 30)
    path.parent.mkdir()
    rf.write(({"x" * 120: i} for i in range(3)), path, progress=False)
    lines = rankfeed("inspect", path).stdout.splitlines()
    assert lines[0] == str(path)
    assert f"{'x' * 120}  int64" in " ".join(lines)
    assert all(line == line.rstrip() for line in lines)


@pytest.mark.parametrize("count", [1, 2])
def test_printed_counts_have_a_singular_or_plural_noun(tmp_path: Path, count: int) -> None:
    rf.write(({"b": b"x"} for _ in range(count)), tmp_path / "data", progress=False)
    told = rankfeed("inspect", tmp_path / "data").stdout
    assert f"blocks       1 of {count} sample{'s' * (count > 1)}\n" in told
    for index in range(count):
        next(iter(rf.Loader(rf.open(tmp_path / "data"), audit=tmp_path / str(index) / "ledger")))
        told = rankfeed("verify", tmp_path / str(index) / "ledger").stdout
        assert "/ledger: 1 ledger\n" in told
        assert "1 of 1 rank on" in told


@pytest.mark.parametrize("arguments", [("plan", "--tail", "odd"), ("plan", "--bogus"), ("bogus",), ("write",)])
def test_a_usage_error_with_json_exits_with_2_and_prints_one_message_and_one_document(
    arguments: tuple[str, ...],
) -> None:
    done = rankfeed(*arguments, "--json")
    assert done.returncode == 2
    told = json.loads(done.stdout)
    assert (told["ok"], told["remedy"].startswith("see ")) == (False, True)
    assert done.stderr.splitlines() == [f"rankfeed: {told['error']}", f"  remedy: {told['remedy']}"]


def test_inspect_reports_samples_columns_and_fingerprint(packed: Path) -> None:
    told = figures("inspect", packed)
    assert told["samples"] == 100
    assert set(told["columns"]) == {"x", "y"}
    assert told["fingerprint"] == rf.open(packed).fingerprint
    assert "100" in rankfeed("inspect", packed).stdout


def test_plan_reports_the_steps_and_samples_of_each_rank_that_the_schedules_deliver(packed: Path) -> None:
    told = figures("plan", packed, "--ranks", 3, "--workers", 2, "--batch-size", 8)
    plan = rf.Plan(100, seed=0)
    lengths = []
    shares = []
    for rank in range(3):
        topology = rf.Topology(rank=rank, world_size=3, local_rank=rank, local_world_size=3)
        schedule = rf.Schedule(plan, batch_size=8, topology=topology)
        lengths.append(len(schedule))
        shares.append(sum(len(schedule.batch(step)) for step in range(len(schedule))))
    assert lengths == [told["steps_of_each_rank"]] * 3
    least, most = told["samples_of_each_rank"]["least"], told["samples_of_each_rank"]["most"]
    assert least <= min(shares) <= max(shares) <= most
    assert told["left_out"] == 0


def test_plan_of_a_trillion_samples_needs_less_than_100_mib() -> None:
    told = figures(
        *("plan", "--samples", "1e12", "--blocks", "1e6", "--ranks", 16384, "--batch-size", 32),
        *("--shuffle", "window"),
    )
    assert told["samples"] == 10**12
    assert told["peak_planning_bytes"] < 100 * 2**20


@pytest.mark.parametrize("tail", ["even", "drop", "pad"])
@pytest.mark.parametrize("shuffle", ["none", "global", "window"])
def test_verify_counts_every_delivery_of_a_small_plan(packed: Path, tail: str, shuffle: str) -> None:
    told = figures("verify", packed, "--ranks", 3, "--batch-size", 7, "--tail", tail, "--shuffle", shuffle)
    assert (told["sound"], told["verdict"]) == (True, "sound")
    assert told["counted"]
    assert told["files"]["damaged"] == 0
    assert told["deliveries"] + told["left_out"] == 100
    assert (told["missing"], told["repeated"]) == (0, 0)


def test_verify_of_a_plan_too_large_to_count_checks_some_deliveries_and_is_not_proven() -> None:
    done = rankfeed("verify", "--samples", "1e12", "--blocks", 1000, "--ranks", 64, "--batch-size", 32, "--json")
    told = json.loads(done.stdout)
    assert (done.returncode, told["sound"], told["verdict"]) == (3, None, "not proven")
    assert not told["counted"]
    assert told["deliveries"] > 1_000_000


def flip_a_bit(folder: Path) -> list[str]:
    shard = sorted(folder.glob("*.arrow"))[1]
    content = bytearray(shard.read_bytes())
    content[len(content) // 2] ^= 4
    shard.write_bytes(content)
    return [shard.name]


def contradict_the_manifest(folder: Path) -> list[str]:
    manifest = json.loads((folder / "rankfeed.json").read_text())
    manifest["fields"]["y"]["dtype"] = "int32"
    (folder / "rankfeed.json").write_text(json.dumps(manifest))
    return ["rankfeed.json"]


def cut_one_and_remove_another(folder: Path) -> list[str]:
    first, second, *_ = sorted(folder.glob("*.arrow"))
    first.write_bytes(first.read_bytes()[:-1])
    second.unlink()
    return [first.name, second.name]


@pytest.mark.parametrize("damage", [flip_a_bit, contradict_the_manifest, cut_one_and_remove_another])
def test_verify_names_damaged_files(damage: Callable[[Path], list[str]], packed: Path, tmp_path: Path) -> None:
    damaged = tmp_path / "damaged"
    shutil.copytree(packed, damaged)
    names = damage(damaged)
    done = rankfeed("verify", damaged)
    assert done.returncode == 1
    assert "the data are damaged" in done.stdout
    assert "Traceback" not in done.stderr
    done = rankfeed("verify", damaged, "--json")
    assert done.returncode == 1
    told = json.loads(done.stdout)
    assert told["sound"] is False
    assert told["files"]["bytes"] > 0
    files = {Path(place["where"]).name for place in told["files"]["damage"]}
    assert files == {*names} or damage is contradict_the_manifest
    assert told["files"]["damaged"] >= 1


def test_write_packs_npy_files_and_inspect_reports_the_same_fingerprint(tmp_path: Path) -> None:
    folder = tmp_path / "arrays"
    folder.mkdir()
    for index in range(12):
        np.save(folder / f"{index}.npy", np.full((index % 3, 2), index, np.float32))
    told = figures("write", folder, tmp_path / "packed")
    assert told["samples"] == 12
    assert figures("inspect", tmp_path / "packed")["fingerprint"] == told["fingerprint"]


def test_write_shuffles_appends_and_writes_on_ranks(packed: Path, tmp_path: Path) -> None:
    figures("write", packed, tmp_path / "p", "--order", "shuffled", "--seed", 3, "--runner", "ranks")
    order = rf.Plan(100, seed=3).sample_ids(0, range(100)).tolist()
    assert [int(sample["y"]) for sample in rf.open(tmp_path / "p")] == order
    # These rows are there, though in another order.
    assert figures("write", packed, tmp_path / "p", "--append")["samples"] == 100
    rf.write(rf.open(packed).select(range(40)), tmp_path / "more", progress=False)
    for _ in range(2):
        assert figures("write", tmp_path / "more", tmp_path / "p", "--append")["samples"] == 140


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ("inspect /nowhere/at/all", "/nowhere/at/all"),
        ("inspect /nowhere --format rot13", "invalid format"),
        ("inspect DATA --option shiny=1", "no such option"),
        ("inspect DATA --option shiny", "name=value"),
        ("inspect DATA --column z", "no such column"),
        ("index /nowhere/at/all", "/nowhere/at/all"),
        ("index /nowhere --format rot13", "invalid format"),
        ("index DATA --option shiny=1", "no such option"),
        ("plan", "--samples"),
        ("plan --samples 0", "cannot plan without samples"),
        ("plan --samples nan", "whole number"),
        ("plan --samples 1.5", "whole number"),
        ("plan --samples 1e30", "whole number"),
        ("plan --samples 5 --ranks 9", "fewer samples than"),
        ("plan --samples 5 --tail odd", "tail"),
        ("plan --samples 5 --shuffle some", "shuffle"),
        ("verify /nowhere", "/nowhere"),
        *((f"{name} /nowhere --samples 5", "either a dataset or --samples") for name in PLAN_COMMANDS),
        ("write /nowhere /also/nowhere", "/nowhere"),
    ],
)
def test_bad_arguments_print_an_error_without_traceback_and_exit_with_1_or_2(
    arguments: str, words: str, packed: Path
) -> None:
    given = arguments.replace("DATA", str(packed)).split()
    done = rankfeed(*given)
    assert done.returncode in (1, 2)
    assert words in " ".join(done.stderr.split())
    assert "Traceback" not in done.stderr
    told = json.loads(rankfeed(*given, "--json").stdout)
    assert told["ok"] is False
    assert not tracemalloc.is_tracing()


def test_prepare_builds_a_directory_once_and_check_exits_with_1_if_a_file_was_changed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "words.py").write_text("def build(folder):\n    (folder / 'a').write_text('one')\n")
    monkeypatch.chdir(tmp_path)
    first, second = (figures("prepare", "words:build", "data", "--key", "1", "--check") for _ in range(2))
    assert (first["built_here"], second["built_here"]) == (True, False)
    assert (second["files"], second["bytes"], second["path"]) == (1, 3, str(tmp_path / "data"))
    (tmp_path / "data" / "a").write_text("two")
    done = rankfeed("prepare", "words:build", "data", "--key", "1", "--check")
    assert done.returncode == 1
    assert "found: a" in done.stderr
    for name, words in {"words": "module:function", "words:none": "imported", "os:sep": "not a function"}.items():
        done = rankfeed("prepare", name, "data")
        assert done.returncode == 2
        assert words in done.stderr


def test_verify_of_ledgers_reports_delivered_and_missing_samples_of_a_run(packed: Path, tmp_path: Path) -> None:
    ledgers = tmp_path / "ledger"
    loader = rf.Loader(rf.open(packed), 8, shuffle="window", audit=ledgers)
    for _, _ in zip(range(3), loader, strict=False):
        pass
    told = figures("verify", ledgers, "--data", packed)
    assert (told["sound"], told["loaders"][0]["epochs"][0]["delivered"]) == (True, 24)
    state = loader.state_dict() | {"position": 40, "steps": 5}
    again = rf.Loader(rf.open(packed), 4, shuffle="window", audit=ledgers)
    again.load_state_dict(state)
    for _ in again:
        pass
    done = rankfeed("verify", ledgers, "--data", packed, "--ids", "--json")
    assert done.returncode == 1, done.stderr
    (epoch,) = json.loads(done.stdout)["loaders"][0]["epochs"]
    missing = loader.plan.sample_ids(0, range(24, 40)).tolist()
    assert (epoch["missing"], epoch["missing_ids"]) == (16, missing)
    done = rankfeed("verify", ledgers, "--data", packed, "--format", "parquet")
    assert "expected: Parquet files" in done.stderr
    done = rankfeed("verify", ledgers)
    assert done.returncode == 1
    assert "positions 24 to 40: 16 samples" in " ".join(done.stdout.split())
    assert "--data" in rankfeed("verify", ledgers, "--ids").stderr


def test_verify_exits_with_1_if_the_given_data_are_not_those_that_the_run_read(
    packed: Path, tmp_path: Path
) -> None:
    next(iter(rf.Loader(rf.from_dataset([{"x": 1}, {"x": 2}]), audit=tmp_path)))
    done = rankfeed("verify", tmp_path, "--data", packed)
    assert done.returncode == 1
    assert "the run read other data" in done.stderr


def test_verify_of_a_plan_prints_the_steps_of_each_rank_and_the_number_of_uneven_steps() -> None:
    told = rankfeed("verify", "--samples", 1000, "--ranks", 3, "--batch-size", 7).stdout
    assert "steps       48 on each rank\n" in told
    assert "uneven      1 (at some steps a rank has one sample more than another)\n" in told
    told = rankfeed("verify", "--samples", 640, "--ranks", 2).stdout
    assert "steps       320 on each rank\n" in told
    assert "uneven      0 (at each step all ranks have equally many samples)\n" in told


@pytest.mark.parametrize("as_json", [True, False])
def test_verify_exits_with_1_for_a_plan_with_missing_samples(
    monkeypatch: pytest.MonkeyPatch, as_json: bool
) -> None:
    from rankfeed.diagnostics.findings import finding
    from rankfeed.diagnostics.verify.plans import PlanVerdict

    lack = finding("missing-samples", "error", "samples of the plan are not delivered")
    broken = PlanVerdict(True, 3, steps=(4, 5), missing=1, repeated=0, left_out=0, uneven=2, findings=(lack,))
    monkeypatch.setattr("rankfeed.diagnostics.verify_plan", lambda *arguments, **options: broken)
    done = rankfeed("verify", "--samples", "4", *(["--json"] if as_json else []))
    assert done.returncode == 1
    if as_json:
        assert json.loads(done.stdout)["missing"] == 1
    else:
        assert "4 to 5: the ranks differ" in done.stdout


def test_the_demo_command_exits_with_the_status_of_its_subprocess(monkeypatch: pytest.MonkeyPatch) -> None:
    ended = subprocess.CompletedProcess([], 1)
    monkeypatch.setattr("rankfeed.cli.demo.subprocess.run", lambda command, check: ended)
    assert rankfeed("demo").returncode == 1

"""rankfeed report: a page on disk, its figures for machines, and sentences for bad input."""

import json
import subprocess
from pathlib import Path

import numpy as np
import pytest
import torch
from tests.cli.test_commands import figures, rankfeed

import rankfeed as rf
from rankfeed.cli.report import report
from rankfeed.errors import ArgumentError


@pytest.fixture(scope="module")
def clips(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("report") / "clips"
    rf.write(({"x": np.zeros(1 + i % 4), "y": i} for i in range(100)), path, shard_bytes=500, progress=False)
    return path


def words(done: subprocess.CompletedProcess[str]) -> str:
    return " ".join(done.stderr.split())


def test_report_of_a_dataset_writes_html_and_png_with_its_plan_and_padding(clips: Path, tmp_path: Path) -> None:
    page, picture = tmp_path / "plan.html", tmp_path / "plan.png"
    told = figures("report", clips, "--ranks", 3, "--batch-size", 8, "--out", page, "--png", picture)
    assert told["files"] == [str(page), str(picture)]
    assert (told["verdict"], told["sound"]) == ("sound", True)
    assert told["facts"]["samples"] == 100
    assert "100 deliveries counted: 0 missing, 0 repeated" in page.read_text()
    assert picture.read_bytes()[:4] == b"\x89PNG"
    charts = {figure["title"]: figure for figure in told["figures"]}
    plan = rf.Plan(100)
    here = rf.Topology(rank=0, world_size=3, local_rank=0, local_world_size=3)
    first = rf.Schedule(plan, batch_size=8, topology=here).batch(0)
    lengths = 1 + first % 4
    wasted = 100 * (1 - lengths.sum() / (len(lengths) * lengths.max()))
    assert charts["Padding by batch"]["rows"][0] == [0, "x", pytest.approx(wasted, abs=0.01)]


def test_report_draws_an_audit_a_run_and_its_stats_on_one_page(tmp_path: Path) -> None:
    source = rf.from_dataset([{"x": i} for i in range(40)])
    loader = rf.Loader(source, 8, shuffle=True, id_column="id", audit=tmp_path / "ledgers")
    lines = []
    for _ in loader:
        lines.append(json.dumps(loader.stats()) + "\n")
    (tmp_path / "rank0.jsonl").write_text("".join(lines))
    rf.audit(rf.Loader(source, 8, id_column="id")).save(tmp_path / "audit.json")
    told = figures(
        *("report", "--audit", tmp_path / "audit.json", "--run", tmp_path / "ledgers"),
        *("--stats", tmp_path / "rank0.jsonl", "--out", tmp_path / "report.html"),
    )
    titles = [figure["title"] for figure in told["figures"]]
    assert {"Which launch delivered what", "Samples by epoch", "Samples a second"} <= {*titles}


def test_report_exits_with_1_if_diseased_and_with_3_if_not_proven(tmp_path: Path) -> None:
    rf.audit([{"sample_id": [0, 1, 1]}], universe=3).save(tmp_path / "audit.json")
    done = rankfeed("report", "--audit", tmp_path / "audit.json", "--out", tmp_path / "a.html")
    assert done.returncode == 1
    assert "  epoch 0: 1 of 3 deliveries; sample 1 at" in done.stdout
    assert "diseased: epoch 0: 3 samples, 2 different, 1 missing, 1 repeated" in done.stdout
    assert (tmp_path / "a.html").exists()
    done = rankfeed("report", "--audit", tmp_path / "audit.json", "--out", tmp_path / "a.html", "--json")
    assert (done.returncode, json.loads(done.stdout)["sound"]) == (1, False)
    rf.audit([{"sample_id": [0, 1]}]).save(tmp_path / "audit.json")
    done = rankfeed("report", "--audit", tmp_path / "audit.json", "--out", tmp_path / "a.html", "--json")
    assert (done.returncode, json.loads(done.stdout)["verdict"]) == (3, "not proven")


def test_report_prints_an_error_without_traceback_for_bad_input(tmp_path: Path) -> None:
    (tmp_path / "no.json").write_text("{}")
    (tmp_path / "empty").mkdir()
    for arguments, told in {
        (): "nothing to report on",
        ("/nowhere",): "/nowhere",
        ("--samples", "5", "--ranks", "9"): "fewer samples than",
        ("--samples", "9", "--out", "/nowhere/at/all.html"): "cannot be written",
        ("--samples", "9", "--png", "a.jpg"): "ends in .png",
        ("--audit", tmp_path / "no.json"): "not the report of an audit",
        ("--stats", tmp_path / "no.json"): "no snapshot",
        ("--run", tmp_path / "empty"): "no ledgers",
    }.items():
        done = rankfeed("report", *arguments, *(() if "--out" in arguments else ("--out", tmp_path / "a.html")))
        assert done.returncode in (1, 2)
        assert told in words(done)
        assert "Traceback" not in done.stderr
    assert not (tmp_path / "a.html").exists()


def test_report_raises_instead_of_overwriting_an_input_or_writing_two_outputs_to_one_file(tmp_path: Path) -> None:
    saved = rf.audit([{"sample_id": [0, 1]}], universe=2).save(tmp_path / "audit.json")
    whole = saved.read_bytes()
    with pytest.raises(ArgumentError, match="no file is written over an input"):
        report(audit=[saved], out=tmp_path / "." / "audit.json")
    with pytest.raises(ArgumentError, match="no file is written over an input"):
        report(samples=9, out=tmp_path / "a.png", png=tmp_path / "a.png")
    assert saved.read_bytes() == whole
    assert [*tmp_path.iterdir()] == [saved]


def test_report_distinguishes_inputs_with_the_same_file_name_in_different_folders(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    audits, rates = [], []
    for samples in (1, 2, 3):
        folder = tmp_path / str(samples)
        folder.mkdir()
        audits.append(rf.audit([{"sample_id": [*range(samples)]}], universe=samples).save(folder / "audit.json"))
        rates.append(folder / "rank-0.jsonl")
        line = {"steps": 1, "samples": samples, "seconds": 1.0, "waited_seconds": 0.0}
        rates[-1].write_text(json.dumps(line) + "\n")
    report(audit=audits, stats=rates, out=tmp_path / "a.html", json=True)
    facts = json.loads(capsys.readouterr().out)["facts"]
    assert [facts[f"Audit: {audit}: deliveries"] for audit in audits] == [1, 2, 3]
    assert (facts["Rates of a run: ranks with snapshots"], facts["Rates of a run: samples"]) == (3, 6)


def test_verify_and_report_are_not_proven_for_a_run_whose_collate_fn_hides_its_rows(tmp_path: Path) -> None:
    def pairs(samples: list[dict[str, int]]) -> dict[str, torch.Tensor]:
        return {"x": torch.tensor([[sample["x"]] * 2 for sample in samples]).ravel(), "scale": torch.zeros(1)}

    loader = rf.Loader(rf.from_dataset([{"x": i} for i in range(40)]), 8, collate_fn=pairs, audit=tmp_path / "run")
    (tmp_path / "rank0").write_text("".join(json.dumps(loader.stats()) + "\n" for _ in loader))
    done = rankfeed("verify", tmp_path / "run", "--json")
    told = json.loads(done.stdout)
    assert done.returncode == 3
    assert told["verdict"] == "not proven"
    assert [(finding["code"], "collate_fn" in finding["what"]) for finding in told["findings"]] == [
        ("rows-not-proven", True)
    ]
    for option, name in (("--run", "run"), ("--stats", "rank0")):
        done = rankfeed("report", option, tmp_path / name, "--json", "--out", tmp_path / "a.html")
        told = json.loads(done.stdout)
        assert done.returncode == 3
        assert told["verdict"] == "not proven"
        codes = [finding["code"] for finding in told["findings"]]
        assert [code for code in codes if code != "waits-for-data"] == ["rows-not-proven"]
        assert 5 in told["facts"].values() or 40 in told["facts"].values()

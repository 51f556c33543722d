"""The doctor names the disease of each pipeline of the zoo, and none of the sound ones."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.support.environ import of_no_launcher
from tests.zoo import page
from tests.zoo.environments import interpreter
from tests.zoo.table import CASES, ENVIRONMENTS, MODULES, QUICK, Case

from rankfeed.diagnostics.doctor import examine

ROOT = Path(__file__).parents[2]
COMMAND = "from rankfeed.cli import main; main()"


@pytest.fixture(scope="module", autouse=True)
def data(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Where the pipelines' data lie."""
    with pytest.MonkeyPatch.context() as patch:
        folder = tmp_path_factory.mktemp("zoo")
        patch.setenv("RANKFEED_ZOO", str(folder))
        patch.syspath_prepend(str(ROOT))
        yield folder


def examined(case: Case, patch: pytest.MonkeyPatch) -> dict[str, Any]:
    """What the doctor finds; in the environment of the case."""
    for name, value in case.environ.items():
        patch.setenv(name, value)
    if not case.environment:
        return examine(
            case.target,
            ranks=case.ranks,
            workers=case.workers,
            start_methods=(case.method,),
            preload=MODULES.get(case.library, ()),
            **case.asked,
        ).as_dict()
    own = interpreter(ENVIRONMENTS[case.environment])
    options = [f"--{name.replace('_', '-')}={value}" for name, value in case.asked.items()]
    place = ["--ranks", str(case.ranks), "--workers", str(case.workers), "--start-method", case.method]
    done = subprocess.run(
        [str(own), "-c", COMMAND, "doctor", case.target, *place, *options, "--json"],
        env=of_no_launcher() | {"PYTHONPATH": os.pathsep.join([str(ROOT / "src"), str(ROOT)])},
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=1500,
        check=False,
    )
    assert done.returncode in (0, 1, 3), done.stderr[-4000:]
    return dict(json.loads(done.stdout))


def check(case: Case, examination: dict[str, Any]) -> None:
    findings = examination["findings"]
    text = "\n".join(f"{find['severity']} {find['code']}: {find['what']} {find['evidence']}" for find in findings)
    assert case.fits([finding["code"] for finding in findings if finding["severity"] != "note"]), text
    assert {*case.notes} <= {finding["code"] for finding in findings if finding["severity"] == "note"}, text
    assert examination["verdict"] == case.verdict or case.may, text


@pytest.mark.parametrize("case", QUICK, ids=lambda case: case.name)
def test_the_doctor_gives_an_example_pipeline_of_each_kind_its_expected_findings_and_verdict(
    case: Case, monkeypatch: pytest.MonkeyPatch
) -> None:
    check(case, examined(case, monkeypatch))


@pytest.mark.soak
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_the_doctor_gives_every_example_pipeline_its_expected_findings_and_verdict(
    case: Case, monkeypatch: pytest.MonkeyPatch
) -> None:
    examination = examined(case, monkeypatch)
    page.keep(case, examination["findings"])
    print(case.name, examination["verdict"], sorted(finding["code"] for finding in examination["findings"]))
    check(case, examination)


def test_the_documentation_page_of_the_zoo_has_the_recorded_findings_and_they_are_expected() -> None:
    kept = page.said()
    assert page.PAGE.read_text() == page.page(kept)
    assert {*kept} <= {case.name for case in CASES}
    assert [case.name for case in CASES if case.name in kept and not case.fits(kept[case.name]["codes"])] == []


def test_the_zoo_has_40_uniquely_named_cases_with_a_story_and_12_sound_factories() -> None:
    assert len({case.name for case in CASES}) == len(CASES) >= 40
    assert len({case.factory for case in CASES if not case.expects}) >= 12
    assert all(case.story for case in CASES)

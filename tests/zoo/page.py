"""The page of the zoo: what the doctor said of each pipeline, kept in a file and shown as tables."""

from __future__ import annotations

import json
import re
from itertools import groupby
from pathlib import Path
from typing import Any

from tests.zoo.table import CASES, Case

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "doctor.md"
#: What was said when each pipeline was last examined, by the name of the case.
SAID = Path(__file__).parent / "said.json"

#: Libraries as people write them.
TITLES = {
    "torch": "torch's DataLoader",
    "torchdata": "torchdata",
    "lance": "Lance",
    "webdataset": "WebDataset and wids",
    "huggingface": "Hugging Face datasets",
    "accelerate": "Accelerate",
    "lightning": "Lightning",
    "pyg": "PyTorch Geometric",
    "mosaicml": "MosaicML Streaming",
    "litdata": "LitData",
    "grain": "Grain",
    "energon": "Megatron Energon",
    "rankfeed": "rankfeed",
    "bad": "Factories that fail",
}
_TOP = """# What the doctor finds

[`rankfeed doctor`](tasks/doctor.md) runs a loader on several ranks and judges what it delivers. A test writes this
page: the doctor examines each of these pipelines with the library that it is named after, and must name its
disease and no other. {sound} of the {all} are sound. Notes, which only inform, are omitted.
`python -m pytest -m soak tests/zoo` examines all of them and writes this page; the pipelines are in `tests/zoo`.

The second column has ranks × workers and the start method. The doctor also runs every pipeline on 3 ranks without
workers, and twice on one rank.
"""
_HEAD = "| pipeline | run on | the doctor says | evidence | right |\n|---|---|---|---|---|\n"


def said() -> dict[str, Any]:
    """Of each case by name: the codes of errors and warnings, and some evidence."""
    return dict(json.loads(SAID.read_text())) if SAID.exists() else {}


def keep(case: Case, findings: list[dict[str, Any]]) -> None:
    """Record the findings of a case, and write the page again."""
    grave = [finding for finding in findings if finding["severity"] != "note"]
    record = {"codes": sorted(finding["code"] for finding in grave), "evidence": _evidence(grave)}
    names = [listed.name for listed in CASES]
    records = {**said(), case.name: record}
    kept = {name: records[name] for name in sorted(records.keys() & {*names}, key=names.index)}
    SAID.write_text(json.dumps(kept, indent=1) + "\n")
    PAGE.write_text(page(kept))


def page(records: dict[str, Any]) -> str:
    """The page, of what was said."""
    sound = sum(not case.expects for case in CASES)
    parts = [_TOP.format(sound=sound, all=len(CASES))]
    for library, cases in groupby(CASES, key=lambda case: case.library):
        rows = "".join(_row(case, records.get(case.name)) for case in cases)
        parts.append(f"## {TITLES[library]}\n\n{_HEAD}{rows}")
    return "\n".join(parts)


def _row(case: Case, record: Any) -> str:
    ranks = f"{case.ranks} × {case.workers}" + (f", {case.method}" if case.workers else "")
    pipeline = f"`{case.factory.partition(':')[2]}`: {case.story}"
    if record is None:
        return f"| {pipeline} | {ranks} | not examined yet | | |\n"
    codes = ", ".join(f"`{code}`" for code in record["codes"]) or "sound"
    wanted = ", ".join(f"`{code}`" for code in case.expects) or "sound"
    right = "yes" if case.fits(record["codes"]) else f"no: {wanted}"
    return f"| {pipeline} | {ranks} | {codes} | {record['evidence']} | {right} |\n"


def _evidence(findings: list[dict[str, Any]]) -> str:
    """The first line of evidence of each finding, as a cell of a table."""
    lines = [finding["evidence"][0] for finding in findings if finding["evidence"]]
    short = [re.sub(r"(/[^\s/,;:]+)+/", "", line) for line in lines]  # folders of this machine say nothing
    cell = "; ".join(line if len(line) < 150 else line[:147] + "..." for line in short)
    return re.sub(r"\s+", " ", cell).replace("|", "/").replace("<", "&lt;").replace("*", r"\*")

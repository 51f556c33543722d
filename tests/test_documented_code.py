"""What the documentation shows runs.

A ``python`` block of a page is run, all blocks of a page in order as one program in an empty folder. A titled
block (``python title="train.py"``) is a file that the reader would write: it is put there and compiled.
"""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from tests.support.documented import BLOCK, ROOT, program_of
from tests.support.marks import slow

PROGRAMS = Path(__file__).parent / "support" / "programs.py"
PAGES = [
    page for page in [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))] if BLOCK.search(page.read_text())
]


@pytest.fixture(scope="module")
def runs(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> dict[Path, tuple[int, str]]:
    """The exit status of each page that is tested, and what it printed."""
    tests = [item for item in request.session.items if item.path == request.path]
    wanted = [item.callspec.params["page"] for item in tests]  # type: ignore[attr-defined]
    programs = []
    for page in wanted:
        folder = tmp_path_factory.mktemp("page")
        program, files = program_of(page)
        for name, code in files.items():
            compile(code, f"{page.name}:{name}", "exec")
            (folder / name).write_text(code)
        script = folder / f"page-{page.stem}.py"  # a page may have the name of a library
        script.write_text(program)
        programs.append({"script": str(script), "log": str(folder / "log")})
    done = subprocess.run(
        [sys.executable, str(PROGRAMS)], input=json.dumps(programs), capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    logs = [Path(program["log"]).read_text() for program in programs]
    return dict(zip(wanted, zip(json.loads(done.stdout), logs, strict=True), strict=True))


@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    "page",
    [page if page.parent in (ROOT, ROOT / "docs") else slow(page) for page in PAGES],
    ids=[str(page.relative_to(ROOT)) for page in PAGES],
)
def test_the_python_code_of_each_documentation_page_runs_without_error(
    page: Path, runs: dict[Path, tuple[int, str]]
) -> None:
    status, log = runs[page]
    assert status == 0, f"{page.relative_to(ROOT)}\n{log}"

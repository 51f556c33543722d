"""What the documentation shows runs.

A ``python`` block of a page is run, all blocks of a page in order as one program in an empty folder. A titled
block (``python title="train.py"``) is a file that the reader would write: it is put there and compiled.
"""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
BLOCK = re.compile(r'^```python(?: title="(?P<title>[^"]+)")?\n(?P<code>.*?)^```$', re.DOTALL | re.MULTILINE)
PAGES = [
    page for page in [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))] if BLOCK.search(page.read_text())
]


def program_of(page: Path) -> tuple[str, dict[str, str]]:
    """The page's program, its lines where they stand in the page, and the files it shows."""
    text = page.read_text()
    program = ""
    files = {}
    for block in BLOCK.finditer(text):
        if block["title"]:
            files[block["title"]] = block["code"]
            continue
        # Empty lines in between, so that a traceback's line is the page's.
        program += "\n" * (text.count("\n", 0, block.start("code")) - program.count("\n")) + block["code"]
    return program, files


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_what_a_page_shows_runs(page: Path, tmp_path: Path) -> None:
    program, files = program_of(page)
    for name, code in files.items():
        compile(code, f"{page.name}:{name}", "exec")
        (tmp_path / name).write_text(code)
    script = tmp_path / f"page-{page.stem}.py"  # a page may have the name of a library
    script.write_text(program)
    environ = {**os.environ, "PYTHONPATH": str(tmp_path)}
    done = subprocess.run(
        [sys.executable, str(script)], cwd=tmp_path, env=environ, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, f"{page.relative_to(ROOT)}\n{done.stderr}"

"""The programs that the documentation shows."""

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
BLOCK = re.compile(r'^```python(?: title="(?P<title>[^"]+)")?\n(?P<code>.*?)^```$', re.DOTALL | re.MULTILINE)


def program_of(page: Path) -> tuple[str, dict[str, str]]:
    """The page's program, with the line numbers of the page, and the files it shows."""
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

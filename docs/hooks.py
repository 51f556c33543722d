"""Hooks of mkdocs: links in docstrings, the list of decisions."""

import re
from pathlib import Path
from typing import Any

#: A reference in a docstring, as mkdocstrings renders it.
ROLE = re.compile(r":(?:func|class|meth|mod|attr|data):<code>([\w.]+)</code>")
TITLE = re.compile(r"^# (.+)$", re.MULTILINE)


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Append a list of all decisions to their index, so that the navigation need not name each."""
    if page.file.src_uri != "decisions/index.md":
        return markdown
    paths = sorted(Path(page.file.abs_src_path).parent.glob("*.md"))
    titles = {path.name: TITLE.search(path.read_text()) for path in paths if path.name != "index.md"}
    return markdown + "\n\n" + "\n".join(f"- [{title[1]}]({name})" for name, title in titles.items() if title)


def on_page_content(html: str, **_: Any) -> str:
    """Link the names that docstrings refer to; those without a page of their own stay code."""
    return ROLE.sub(r'<autoref identifier="\1" optional><code>\1</code></autoref>', html)

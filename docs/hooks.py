"""Hooks of mkdocs: links in docstrings and to the glossary, values of defaults, the list of decisions."""

import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

#: A reference in a docstring, as mkdocstrings renders it.
ROLE = re.compile(r":(?:func|class|meth|mod|attr|data):<code>([\w.]+)</code>")
TITLE = re.compile(r"^# (.+)$", re.MULTILINE)
#: Constants that are defaults in signatures, and their values.
DEFAULTS = {"CACHE_BYTES": "1 &lt;&lt; 30", "DEFAULT_WINDOW": "65536"}
#: Anchors in the glossary, and the words that mean them in prose.
TERMS = {
    "batch-global-batch": "global batch(?:es)?",
    "block": "blocks?",
    "fingerprint": "fingerprints?",
    "lane": "lanes?",
    "ledger": "ledgers?",
    "manifest": "manifests?",
    "position": "positions?",
    "ragged": "ragged",
    "staging-directory": "staging directory",
    "window": "windows?",
    "rank": "world size",
}
#: Pages on which a word has another meaning.
OTHER_MEANING = {
    "doctor.md": ("position",),
    "guides/tokens.md": ("window",),
    "tasks/anything-else.md": ("position",),
    "tasks/doctor.md": ("position",),
    "tasks/tar-shards.md": ("block",),
    "tasks/train-from-lance.md": ("manifest",),
}
#: A part of a page in which nothing is linked, a tag, or text.
PART = re.compile(r"<(a|code|pre|h[1-6]|th|svg)\b.*?</\1>|<[^>]+>|[^<]+", re.DOTALL)


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Append a list of all decisions to their index, so that the navigation need not name each."""
    if page.file.src_uri != "decisions/index.md":
        return markdown
    paths = sorted(Path(page.file.abs_src_path).parent.glob("*.md"))
    titles = {path.name: TITLE.search(path.read_text()) for path in paths if path.name != "index.md"}
    return markdown + "\n\n" + "\n".join(f"- [{title[1]}]({name})" for name, title in titles.items() if title)


def on_page_content(html: str, page: Any, **_: Any) -> str:
    """Link the names in docstrings that have an entry, and on other pages the terms of the glossary."""
    folder = page.file.src_uri.partition("/")[0]
    if folder == "reference":
        for name, value in DEFAULTS.items():
            html = re.sub(rf"\b{name}\b", value, html)
        return ROLE.sub(r'<autoref identifier="\1" optional><code>\1</code></autoref>', html)
    if folder in ("decisions", "glossary.md"):
        return html
    terms = TERMS.keys() - OTHER_MEANING.get(page.file.src_uri, ())
    return link_terms(html, "../" * page.url.count("/") + "glossary/", sorted(terms))


def link_terms(html: str, glossary: str, terms: Iterable[str]) -> str:
    """Link the first use of each term in running text, unless the page links it."""
    left = {term: re.compile(rf"\b{TERMS[term]}\b") for term in terms if f'glossary/#{term}"' not in html}

    def link(part: re.Match[str]) -> str:
        text = part[0]
        if text.startswith("<"):
            return text
        for anchor, words in [*left.items()]:
            if found := words.search(text):
                del left[anchor]
                before, after = text[: found.start()], text[found.end() :]
                linked = f'<a href="{glossary}#{anchor}" class="glossary">{found[0]}</a>'
                return PART.sub(link, before) + linked + PART.sub(link, after)
        return text

    return PART.sub(link, html)

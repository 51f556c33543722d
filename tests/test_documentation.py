"""The documentation's pictures, links and API pages agree with the code."""

import importlib.util
import re
from pathlib import Path
from types import ModuleType

import pytest

import rankfeed

DOCS = Path(__file__).parent.parent / "docs"


def module(path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    loaded = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(loaded)
    return loaded


@pytest.fixture(scope="module")
def hooks() -> ModuleType:
    return module(DOCS / "hooks.py")


@pytest.mark.parametrize("name", [name for name in rankfeed.__all__ if name != "__version__"])
def test_every_public_name_has_an_api_page_under_that_name(name: str) -> None:
    pages = [page.name for page in (DOCS / "reference").glob("*.md") if f"title: rf.{name}\n" in page.read_text()]
    assert len(pages) == 1
    text = (DOCS / "reference" / pages[0]).read_text()
    assert f"::: rankfeed.{name}\n" in text
    assert f"heading: rf.{name}\n" in text
    assert f"- rf.{name}: reference/{pages[0]}\n" in (DOCS.parent / "mkdocs.yml").read_text()


def test_the_picture_of_an_epoch_in_the_documentation_is_what_its_script_generates() -> None:
    assert (DOCS / "images" / "epoch.svg").read_text() == module(DOCS / "images" / "epoch.py").svg()


def test_the_first_use_of_a_glossary_term_is_linked_outside_of_code_links_and_headings(hooks: ModuleType) -> None:
    untouched = '<h2>Ledgers</h2><p>A <a href="x">ledger</a>, <code>ledger</code>'
    html = f"{untouched}: ledgers and the <em>lane</em>. A ledger.</p>"
    assert hooks.link_terms(html, "../glossary/", ["lane", "ledger"]) == html.replace(
        ": ledgers", ': <a href="../glossary/#ledger" class="glossary">ledgers</a>'
    ).replace("<em>lane", '<em><a href="../glossary/#lane" class="glossary">lane</a>')


def test_a_glossary_term_that_the_page_already_links_is_not_linked_again(hooks: ModuleType) -> None:
    html = '<p>A lane, a <a href="../glossary/#lane">lane</a></p>'
    assert hooks.link_terms(html, "../glossary/", ["lane"]) == html


def test_every_term_that_is_linked_to_the_glossary_is_a_heading_there(hooks: ModuleType) -> None:
    headings = re.findall(r"^### (.+)$", (DOCS / "glossary.md").read_text(), re.MULTILINE)
    anchors = {re.sub(r"[^a-z ]", "", heading.lower()).replace(" ", "-") for heading in headings}
    assert set(hooks.TERMS) <= anchors
    assert {term for terms in hooks.OTHER_MEANING.values() for term in terms} <= set(hooks.TERMS)
    assert [page for page in hooks.OTHER_MEANING if not (DOCS / page).is_file()] == []

"""Words that code and documentation avoid, because they are vague or hide the noun.

The phrases are searched in any case and across line breaks, comment marks and joined string literals.
"""

import io
import re
import tokenize
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PHRASES = [
    *("anew", "nobody", "somebody", "whoever", "whatever way", "so many", "only fill"),
    *("as it stands", "is no more", "goes on", "at home", "what is its", "this very"),
]
#: Allowed occurrences, as (path, phrase), each with its reason. None is needed so far.
ALLOWED: set[tuple[str, str]] = set()

#: Parts of names that stand for packages, layers or capacity.
NAMES = {"house", "houses", "room", "rooms", "floor", "floors"}
#: `floor` is the name of the function in these modules.
FLOOR_OF = {"math", "np", "numpy", "torch"}

GAP = r"[\s#*>|\"'`]+"
PHRASE = re.compile(r"\b(?:" + "|".join(GAP.join(phrase.split()) for phrase in PHRASES) + r")\b", re.IGNORECASE)


def searched_files() -> list[Path]:
    suffixes = {".py", ".md", ".css", ".html", ".c", ".sbatch"}
    files = [
        path for top in ("src", "docs", "examples") for path in (ROOT / top).rglob("*") if path.suffix in suffixes
    ]
    return [*sorted(files), *(ROOT / name for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md"))]


def banned_phrases(text: str) -> list[tuple[int, str]]:
    """The line and the words of each banned phrase."""
    return [
        (text.count("\n", 0, match.start()) + 1, " ".join(re.split(GAP, match[0].lower())))
        for match in PHRASE.finditer(text)
    ]


def banned_names(code: str) -> list[tuple[int, str]]:
    """The line of each name that has a banned part, except functions called `floor` of a numeric library."""
    names = []
    tokens = list(tokenize.generate_tokens(io.StringIO(code).readline))
    for i, token in enumerate(tokens):
        words = re.findall(r"[A-Z]?[a-z]+", token.string)
        if token.type != tokenize.NAME or NAMES.isdisjoint(word.lower() for word in words):
            continue
        if i < 2 or tokens[i - 1].string != "." or tokens[i - 2].string not in FLOOR_OF:
            names.append((token.start[0], token.string))
    return names


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("a file that\n# goes\n# on", [(2, "goes on")]),
        ('"As it "\n"stands"', [(1, "as it stands")]),
        ("> this\n> very", [(1, "this very")]),
        ("Nobody, somebody or whoever.", [(1, "nobody"), (1, "somebody"), (1, "whoever")]),
        ("renewed, so few, many", []),
    ],
)
def test_banned_phrases_are_found_in_any_case_and_across_lines(text: str, expected: list[tuple[int, str]]) -> None:
    assert banned_phrases(text) == expected


@pytest.mark.parametrize(
    ("code", "expected"),
    [
        ("room = 1\nclass HouseKeeper: ...\nnext_floor = room", ["room", "HouseKeeper", "next_floor", "room"]),
        ("math.floor(x), np.floor_divide(a, b)", []),
        ("roommate = 'room'  # room for one more", []),
    ],
)
def test_banned_names_are_found_in_code_but_not_in_strings_and_comments(code: str, expected: list[str]) -> None:
    assert [name for _, name in banned_names(code)] == expected


def test_no_banned_phrase_in_code_and_documentation() -> None:
    hits = [
        f"{path.relative_to(ROOT)}:{line}: {words}"
        for path in searched_files()
        for line, words in banned_phrases(path.read_text())
        if (str(path.relative_to(ROOT)), words) not in ALLOWED
    ]
    assert not hits, "\n".join(hits)


def test_no_banned_name_in_code() -> None:
    hits = [
        f"{path.relative_to(ROOT)}:{line}: {name}"
        for path in searched_files()
        if path.suffix == ".py"
        for line, name in banned_names(path.read_text())
    ]
    assert not hits, "\n".join(hits)

"""What users read is plain English, and the pages stay short enough to be read."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *(page for page in (ROOT / "docs").glob("*.md") if page.name != "spec.md")]
SOURCES = [
    path
    for folder in ("backends", "conformance", "reference")
    for path in (*(ROOT / folder).rglob("*.py"), *(ROOT / folder).rglob("*.j2"))
    if "tests" not in path.parts
]
MOST_WORDS = 20_000
PHRASES = (
    "a part: lacks",
    "away, and pip",
    "away, the journal",
    "by rights",
    "cases lack",
    "comes out wrong",
    "comes too late",
    "innocent",
    "is another one now",
    "is no success",
    "leave it away",
    "leaves it away",
    "may have the same origin",
    "need not install the harness",
    "nobody asked; certify",
    "nothing that is here",
    "of what is not",
    "of which it says nothing",
    "says nothing of this one",
    "stands in spec",
    "stronger the colour",
    "that is none",
    "the house",
    "the simplest of",
    "told",
    "trusted with what",
    "turns it round",
    "wants more memory",
    "what is not listed",
    "what it is, it raised",
    "what the libraries did",
    "which is none",
    "who is to mend",
    "whom a verdict",
    "without a way back",
)
"""Each has a plainer form: say who does what, by the field's term, without a double negation."""


def reading(path: Path) -> Iterator[str]:
    """A page without what commands wrote into it; of a module the literals that are not docstrings; a template."""
    text = path.read_text("utf-8")
    if path.suffix != ".py":
        yield re.sub(r"<!-- ([\w:-]+):begin -->.*?<!-- \1:end -->", "", text, flags=re.DOTALL)
        return
    nodes = list(ast.walk(ast.parse(text)))
    docstrings = {id(node.value) for node in nodes if isinstance(node, ast.Expr)}
    yield from (
        n.value for n in nodes if isinstance(n, ast.Constant) and isinstance(n.value, str) and id(n) not in docstrings
    )


def test_no_page_and_no_message_holds_one_of_these_phrases() -> None:
    texts = {path: " ".join(" ".join(reading(path)).lower().split()) for path in (*PAGES, *SOURCES)}
    assert [(path.name, phrase) for path, text in texts.items() for phrase in PHRASES if phrase in text] == []


def test_the_pages_have_few_words() -> None:
    assert sum(len(page.read_text("utf-8").split()) for page in PAGES) <= MOST_WORDS

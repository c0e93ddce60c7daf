"""Every clause that the project cites is a clause of SPEC.md."""

import re
from importlib.resources import files
from pathlib import Path

from mla_conformance.judging.verdict import Check
from mla_conformance.vocabulary.capabilities import CAPABILITIES

SPEC = (files("mla_conformance") / "SPEC.md").read_text(encoding="utf-8")
HEADINGS = re.findall(r"^### (\d+\.\d+) \S", SPEC, flags=re.MULTILINE)
ROOT = Path(__file__).parents[2]
SOURCES = [path for folder in ("reference", "backends", "conformance") for path in (ROOT / folder).rglob("*.py")]


def test_clauses_are_numbered_without_gaps() -> None:
    sections: dict[str, list[int]] = {}
    for heading in HEADINGS:
        section, number = heading.split(".")
        sections.setdefault(section, []).append(int(number))
    assert list(sections)[:4] == ["1", "2", "3", "4"]
    assert all(numbers == list(range(1, len(numbers) + 1)) for numbers in sections.values())


def test_every_clause_named_in_the_code_exists() -> None:
    assert {*(entry.clause for entry in CAPABILITIES.values()), *(check.clause for check in Check)} <= set(HEADINGS)
    cited = {clause for path in SOURCES for clause in re.findall(r"SPEC (\d+\.\d+)", path.read_text(encoding="utf-8"))}
    assert cited <= set(HEADINGS)

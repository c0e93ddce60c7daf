"""What a newcomer reads first: short, with links that lead somewhere and commands that are what it says they are."""

import os
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
README, DOCS = ROOT / "README.md", ROOT / "docs"
CI = (ROOT / ".ci" / "run").read_text("utf-8")
PAGES = [*sorted(ROOT.glob("*.md")), *sorted(DOCS.rglob("*.md"))]


def blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", README.read_text("utf-8"), flags=re.MULTILINE | re.DOTALL)


def anchors(page: Path) -> set[str]:
    """The places of a page that a link may name, as GitHub and MkDocs make them of its headings."""
    headings = re.findall(r"^#+ (.*)$", page.read_text("utf-8"), flags=re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading).strip().lower().replace(" ", "-") for heading in headings}


def test_it_fits_a_screen_or_two() -> None:
    text = README.read_text("utf-8")
    assert len(text.splitlines()) <= 150 and len(text.split()) <= 1000


def test_continuous_integration_runs_the_two_commands_and_the_gate_as_written() -> None:
    two, own, gate = [block for block in blocks("bash") if block.startswith("pip install -c")], *blocks("bash")[2:]
    ran = re.findall(r'^run "((?:pip install|mla-conformance certify).* && .*)"$', CI, flags=re.MULTILINE)
    assert len(two) == 2 and own.endswith(" --backend my_backend.py:MyBackend\n")  # which the tutorial's test runs
    assert ran == [two[0].strip(), gate.strip().replace("\n", " && "), two[1].strip()]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_link_leads_to_a_file_and_a_place_in_it(page: Path) -> None:
    prose = re.sub(r"^```.*?^```$|`[^`\n]*`", "", page.read_text("utf-8"), flags=re.MULTILINE | re.DOTALL)
    for target in re.findall(r"(?:\]\(|src(?:set)?=\"|href=\")([^)\s\"]+)", prose):
        if "://" in target:
            continue
        path, _, place = target.partition("#")
        there = (page.parent / path).resolve() if path else page
        assert there.exists(), f"{page.name}: {target}"
        # The site is made of docs/ alone.
        inside = Path(os.path.normpath(page.parent / path)).is_relative_to(DOCS)
        assert inside or not page.is_relative_to(DOCS), f"{page.name}: {target} leads out of docs/"
        assert not place or place in anchors(there), f"{page.name}: {target}"

"""What the page on the libraries says was seen: its commands and the figures of its prose stand in the transcripts."""

import re
import shlex
from pathlib import Path

import pytest

from mla_conformance.cases.case import Case
from mla_conformance.cli import _parser

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "findings.md").read_text("utf-8")
TABLES = r"<!-- h200:begin -->.*<!-- failures:end -->"
PROSE = re.sub(rf"{TABLES}|`[^`]*`|SPEC [\d.]+( and [\d.]+)?", "", PAGE, flags=re.DOTALL)
COMMANDS = [" ".join(span.split()) for span in re.findall(r"`([^`]*)`", PAGE) if "mla-conformance " in span]
TRANSCRIPTS = "\n".join(path.read_text("utf-8") for path in sorted((ROOT / "ci" / "bench").glob("*-findings.txt")))
RAN = {line.removeprefix("$ ") for line in TRANSCRIPTS.splitlines() if line.startswith("$ ")}
PRINTED = " ".join(TRANSCRIPTS.split())
UNIT = r"×|%|times|of \d+|of its|(?:[mnµ]?s|seconds|minutes|[KMG]i?B|cases|rows)\b"
EXPONENT = r"e[+-]?\d+"
MEASURED = re.compile(
    rf"(?<![\w.^-])(?:\d[\d,.]*(?:{EXPONENT})? ?(?:{UNIT})|\d+\.\d+(?:{EXPONENT})?(?!\.?\d)|\d+{EXPONENT})"
)
"""What was found by running something. Versions of three parts, powers of two, lengths and head dims are none."""


def unprinted(prose: str) -> list[str]:
    """The measured figures that no transcript shows."""
    figures = (match[0] for match in MEASURED.finditer(" ".join(prose.split())))
    return [each for each in figures if not re.search(rf"(?<![\w.]){re.escape(each)}(?!\d)", PRINTED)]


def test_every_measured_figure_was_printed() -> None:
    assert unprinted(PROSE) == []


@pytest.mark.parametrize("figure", ["up to 7.77e5 times", "off by 12.3456", "in 98 of 99 cases", "123456 s", "0.4 %"])
def test_a_figure_that_was_not_printed_is_found(figure: str) -> None:
    assert unprinted(f"Wrong {figure} there")


def test_page_and_transcripts_have_commands() -> None:
    assert len(COMMANDS) > 25 and len(RAN) > 25


@pytest.mark.parametrize("command", COMMANDS)
def test_a_command_is_one_and_was_run(command: str) -> None:
    name, *arguments = shlex.split(command)
    options = _parser().parse_args(arguments)
    assert name == "mla-conformance" and callable(options.run)
    assert options.command != "replay" or Case.parse(options.case)
    assert command in RAN

"""The commands on the page of findings are commands, and their cases can be replayed."""

import re
import shlex
from pathlib import Path

from mla_conformance.cases.case import Case
from mla_conformance.cli import _parser

PAGE = (Path(__file__).parents[2] / "docs" / "findings.md").read_text("utf-8")


def test_the_commands_of_the_page_can_be_given() -> None:
    commands = [" ".join(span.split()) for span in re.findall(r"`([^`]*)`", PAGE) if "mla-conformance " in span]
    assert len(commands) > 25
    for name, *arguments in map(shlex.split, commands):
        options = _parser().parse_args(arguments)
        assert name == "mla-conformance" and callable(options.run)
        assert options.command != "replay" or Case.parse(options.case)

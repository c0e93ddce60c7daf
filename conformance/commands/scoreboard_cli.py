"""The parser of ``scoreboard``: records of many kernels as a static site."""

import argparse
from pathlib import Path
from typing import Any


def add_commands(commands: Any) -> None:
    """Add the parser of this command."""
    scoreboard = commands.add_parser("scoreboard", help="records of many kernels as a static site")
    scoreboard.add_argument("records", type=Path, nargs="+", metavar="FILE|DIR", help="records, or submissions")
    scoreboard.add_argument("--out", type=Path, required=True, metavar="DIR", help="receives the site")
    scoreboard.set_defaults(run=_scoreboard)


def _scoreboard(options: argparse.Namespace) -> int:
    from mla_conformance.commands.scoreboard import scoreboard

    return scoreboard(options)

"""The parser of ``bump``: what a new version of a library changes."""

import argparse
from pathlib import Path
from typing import Any

from mla_conformance.commands.certify_cli import add_selection


def add_commands(commands: Any) -> None:
    """Add the parser of this command."""
    bump = commands.add_parser("bump", help="judge two versions of a library, and tell what the new one changes")
    bump.add_argument("before", metavar="NAME==OLD", help="as flashinfer-python==0.6.13")
    bump.add_argument("after", metavar="NAME==NEW")
    add_selection(bump)
    bump.add_argument("--find-links", type=Path, metavar="DIR", help="install from these wheels, and no index")
    bump.add_argument("--markdown", type=Path, metavar="FILE", help="write the outcome for a pull request, too")
    bump.add_argument("--out", type=Path, metavar="DIR", help="new or empty; by default one of build/mla-conformance")
    bump.set_defaults(run=_bump)


def _bump(options: argparse.Namespace) -> int:
    from mla_conformance.commands.bump import bump

    return bump(options)

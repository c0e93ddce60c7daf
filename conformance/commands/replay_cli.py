"""The parsers of ``replay`` and ``minimize``: one failing case again, and the simplest case that fails like it."""

import argparse
from pathlib import Path
from typing import Any

from mla_conformance.commands.options import DEVICE, REFERENCE, count, seconds


def add_commands(commands: Any) -> None:
    """Add the parsers of these commands."""
    replay = commands.add_parser("replay", help="run one case again")
    replay.add_argument("case", nargs="?", metavar="CASE_ID|FILE.json")
    replay.add_argument("--report", type=Path, metavar="FILE", help="run a failure of this report again")
    replay.add_argument("--failure", type=count, default=1, metavar="K", help="which one, counted from 1")
    replay.add_argument(
        "--after", action="append", default=[], metavar="CASE_ID", help="run this case before it, in the same process"
    )
    replay.add_argument("--salt", metavar="TEXT", help="draw the inputs that this text stands for")
    replay.add_argument("--backend", metavar=REFERENCE)
    replay.add_argument("--device", metavar=DEVICE)
    replay.add_argument("--timeout", type=seconds, metavar="TIME")
    replay.add_argument("--dump", type=Path, metavar="DIR", help="also write operands, result, golden result and error")
    replay.set_defaults(run=_replay)
    minimize = commands.add_parser("minimize", help="find the simplest case that fails in the same way")
    minimize.add_argument("case", metavar="CASE_ID|FILE.json")
    minimize.add_argument("--salt", default="", metavar="TEXT", help="draw the inputs that this text stands for")
    minimize.add_argument("--backend", required=True, metavar=REFERENCE)
    minimize.add_argument("--device", metavar=DEVICE)
    minimize.add_argument("--timeout", type=seconds, default=60.0, metavar="TIME", help="a longer case hangs")
    minimize.add_argument("--tries", type=count, default=500, metavar="N", help="candidates at most")
    minimize.add_argument("--out", type=Path, metavar="FILE", help="receives the case")
    minimize.set_defaults(run=_minimize)


def _replay(options: argparse.Namespace) -> int:
    from mla_conformance.commands.replay import replay

    return replay(options)


def _minimize(options: argparse.Namespace) -> int:
    from mla_conformance.commands.replay import minimize_case

    return minimize_case(options)

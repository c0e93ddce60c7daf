"""The parser of ``watch``: a backend's file, judged whenever it changes."""

import argparse
from typing import Any

from mla_conformance.commands.options import DEVICE, seconds


def add_commands(commands: Any) -> None:
    """Add the parser of this command."""
    watch = commands.add_parser("watch", help="judge a backend whenever its file changes, what failed last first")
    watch.add_argument("backend", metavar="file.py:Class")
    watch.add_argument("--capability", action="append", default=[], metavar="NAME", help="by default all")
    watch.add_argument("--device", metavar=DEVICE)
    watch.add_argument("--timeout", type=seconds, metavar="TIME", help="end a process whose case takes longer")
    watch.set_defaults(run=_watch)


def _watch(options: argparse.Namespace) -> int:
    from mla_conformance.commands.watch import watch

    return watch(options)

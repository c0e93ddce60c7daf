"""The command line. Exit status: 0 all judged capabilities hold, 1 one failed, 2 usage, 3 nothing could be judged.

The parser imports nothing heavy; what a command does is imported when it is carried out.
"""

import argparse
import os
import sys
from collections.abc import Sequence
from io import TextIOWrapper
from typing import NoReturn

from mla_conformance.commands.parser import Parser, add_commands
from mla_conformance.engine.limits import leave
from mla_conformance.files.inputs import InputError
from mla_conformance.report.terminal import cut, put, say
from mla_conformance.version import SUITE_VERSION, __version__

_FIRST = """to begin with:
  mla-conformance certify --backend TORCH_SDPA                 judge a kernel
  mla-conformance certify --backend my_backend.py:MyBackend    judge your own
  mla-conformance backends                                     which can run here
  mla-conformance --help                                       all commands"""
_USAGE = 2
_INTERRUPTED = 130
_CUT_OFF = 141


def command() -> NoReturn:
    """Run a command, and end the process with its exit status."""
    try:
        status = main()
    except BrokenPipeError:  # who read what is printed has read enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        status = _CUT_OFF
    leave(status)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command and return its exit status."""
    _print_anywhere()
    try:
        options = _parser().parse_args(arguments)
        status: int = options.run(options)
    except InputError as error:
        say(f"mla-conformance: {cut(str(error))}", error=True)
        return _USAGE
    except KeyboardInterrupt:
        say("mla-conformance: interrupted", error=True)
        return _INTERRUPTED
    return status


def _print_anywhere() -> None:
    """Where a locale or a pipe takes ASCII only, other characters are printed as escapes."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")


def _say_how_to_begin(options: argparse.Namespace) -> int:
    """Shown when no command is given."""
    put(f"{options.parser.format_usage()}\n{options.parser.description}\n\n{_FIRST}", error=True)
    return _USAGE


def _parser() -> argparse.ArgumentParser:
    parser = Parser("mla-conformance", description="Decides whether an MLA kernel is right.")
    parser.add_argument("--version", action="version", version=f"%(prog)s {__version__}, suite {SUITE_VERSION}")
    parser.set_defaults(run=_say_how_to_begin, parser=parser)
    add_commands(parser)
    return parser

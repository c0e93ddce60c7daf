"""The command line. Exit status: 0 all judged capabilities hold, 1 one failed, 2 usage, 3 nothing could be judged.

The parser imports nothing heavy; what a command does is imported when it is carried out.
"""

import argparse
import sys
from collections.abc import Sequence
from io import TextIOWrapper
from pathlib import Path
from typing import NoReturn

from mla_conformance.backends.foreign import ForeignError
from mla_conformance.backends.references import BackendReferenceError
from mla_conformance.commands.parser import Parser, add_commands
from mla_conformance.engine.limits import leave
from mla_conformance.engine.supervisor import RunError
from mla_conformance.files.inputs import InputError
from mla_conformance.report.terminal import put, refuse
from mla_conformance.version import SUITE_VERSION, __version__

_FIRST = """to begin with:
  mla-conformance certify --backend TORCH_SDPA                 judge a kernel
  mla-conformance certify --backend my_backend.py:MyBackend    judge your own
  mla-conformance backends                                     which can run here
  mla-conformance --help                                       all commands"""
_NAME = "mla-conformance"
_USAGE = 2
_BROKEN = 3
_INTERRUPTED = 130


def command() -> NoReturn:
    try:
        status = main()
    except SystemExit as ended:  # of the parser, for help and for a usage error
        status = int(ended.code or 0)
    leave(status)


def main(arguments: Sequence[str] | None = None) -> int:
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, TextIOWrapper):
            # Where a locale or a pipe takes ASCII only, others are printed as escapes.
            stream.reconfigure(errors="backslashreplace")
    try:
        options = _parser().parse_args(arguments)
        if sys.flags.optimize > 1:  # docstrings say what known defects are, which no process of a run can import else
            raise InputError("expected Python with docstrings; leave out its option -OO, or PYTHONOPTIMIZE=2")
        try:
            Path.cwd()  # no relative path leads anywhere from one that is gone
        except OSError as gone:
            raise InputError(f"the current folder: {gone.strerror}; change into one that is there") from gone
        status: int = options.run(options)
    except (InputError, BackendReferenceError, ForeignError) as error:
        refuse(_NAME, str(error))
        return _USAGE
    except OSError as error:
        refuse(_NAME, f"{error.filename}: {error.strerror}" if error.filename else str(error))
        return _USAGE
    except RunError as error:
        refuse(_NAME, str(error))
        return _BROKEN
    except KeyboardInterrupt:
        refuse(_NAME, "interrupted")
        return _INTERRUPTED
    return status


def _say_how_to_begin(options: argparse.Namespace) -> int:
    put(f"{options.parser.format_usage()}\n{options.parser.description}\n\n{_FIRST}", error=True)
    return _USAGE


def _parser() -> argparse.ArgumentParser:
    parser = Parser(_NAME, description="Decides whether an MLA kernel is right.")
    parser.add_argument("--version", action="version", version=f"%(prog)s {__version__}, suite {SUITE_VERSION}")
    parser.set_defaults(run=_say_how_to_begin, parser=parser)
    add_commands(parser)
    return parser

"""The command line. Exit status: 0 all judged capabilities hold, 1 one failed, 2 usage, 3 nothing could be judged.

The parser imports nothing heavy; what a command does is imported when it is carried out.
"""

import sys
from collections.abc import Sequence
from io import TextIOWrapper
from pathlib import Path
from typing import NoReturn

from mla_conformance.backends import foreign, references
from mla_conformance.cases.case import CaseError
from mla_conformance.commands import parser, table
from mla_conformance.engine.machine import leave
from mla_conformance.engine.supervisor import RunError, Stopped
from mla_conformance.files.whole import InputError
from mla_conformance.report.terminal import refuse


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
        options = parser.command_line(table.COMMANDS, table.GROUPS).parse_args(arguments)
        if sys.flags.optimize > 1:  # docstrings say what causes of failures are
            raise InputError("expected Python with docstrings; leave out its option -OO, or PYTHONOPTIMIZE=2")
        try:
            Path.cwd()  # no relative path leads anywhere from one that is gone
        except OSError as gone:
            raise InputError(f"the current folder: {gone.strerror}; change into one that is there") from gone
        return int(options.run(options))
    except (InputError, references.BackendReferenceError, CaseError, foreign.ForeignError) as error:
        why, status = str(error), parser.USAGE
    except OSError as error:
        why, status = f"{error.filename}: {error.strerror}" if error.filename else str(error), parser.USAGE
    except RunError as error:
        why, status = str(error), 3
    except Stopped as stop:
        why, status = f"ended by {stop}", stop.exit_status
    except KeyboardInterrupt:
        why, status = "interrupted", 130
    refuse(parser.NAME, why)
    return status

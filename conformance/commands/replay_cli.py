"""The commands ``replay`` and ``minimize``: one failing case again, and the simplest case that fails like it."""

import argparse
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mla_conformance.commands.request import DEFAULT_OUT, REFERENCE, carry_out, require_timeout, select
from mla_conformance.files.inputs import InputError
from mla_conformance.report.terminal import say

if TYPE_CHECKING:
    from mla_conformance.judging.record import Record
    from mla_conformance.running.minimize import Minimum


def add_commands(commands: Any) -> None:
    """Add the parsers of these commands."""
    replay = commands.add_parser("replay", help="run one case again")
    replay.add_argument("case", nargs="?", metavar="CASE_ID|FILE.json")
    replay.add_argument("--report", type=Path, metavar="FILE", help="run a failure of this report again")
    replay.add_argument("--failure", type=int, default=1, metavar="K", help="which one, counted from 1")
    replay.add_argument("--backend", metavar=REFERENCE)
    replay.add_argument("--device", metavar="cpu|cuda")
    replay.add_argument("--timeout", type=float, metavar="SECONDS")
    replay.set_defaults(run=_replay)
    minimize = commands.add_parser("minimize", help="find the simplest case that fails in the same way")
    minimize.add_argument("case", metavar="CASE_ID|FILE.json")
    minimize.add_argument("--backend", required=True, metavar=REFERENCE)
    minimize.add_argument("--device", metavar="cpu|cuda")
    minimize.add_argument("--timeout", type=float, default=60.0, metavar="SECONDS", help="a longer case hangs")
    minimize.add_argument("--tries", type=int, default=500, metavar="N", help="candidates at most")
    minimize.add_argument("--out", type=Path, metavar="FILE", help="receives the case")
    minimize.set_defaults(run=_minimize)


def _replay(options: argparse.Namespace) -> int:
    from mla_conformance.running.certify import Run

    require_timeout(options.timeout)
    case, backend = _replayed(options)
    selection = select([backend], options.device, cases=[case])
    with tempfile.TemporaryDirectory(prefix="mla-conformance-replay-") as folder:
        return carry_out(Run(selection, Path(folder), workers=1, timeout=options.timeout), keep_report=False)


def _replayed(options: argparse.Namespace) -> tuple[str, str]:
    """Case id and backend reference of what is to be run again."""
    if (options.case is None) == (options.report is None):
        raise InputError("replay: expected either a case, as CASE_ID or FILE.json, or --report FILE")
    if options.report is None:
        if not options.backend:
            raise InputError(f"replay: expected --backend {REFERENCE} beside a case")
        return _case_id(options.case), options.backend
    failure = _failure(options.report, options.failure)
    return failure.case, options.backend or failure.reference


def _failure(path: Path, number: int) -> "Record":
    """A failure of a report, counted from 1."""
    from mla_conformance.report.loading import load_report

    failures = [record for record in load_report(path).records if record.failed]
    if not 1 <= number <= len(failures):
        raise InputError(f"{path}: expected the number of one of its {len(failures)} failures, got {number}")
    return failures[number - 1]


def _case_id(text: str) -> str:
    """The id of a case that is given as its id or as a file."""
    from mla_conformance.cases.case_files import read_case

    return read_case(Path(text)).id if text.endswith(".json") else text


def _minimize(options: argparse.Namespace) -> int:
    from mla_conformance.running.minimize import NothingToMinimize, minimize
    from mla_conformance.running.probe import Probe

    require_timeout(options.timeout)
    selection = select([options.backend], options.device, cases=[_case_id(options.case)])
    (subject,), (case,) = selection.subjects, selection.cases
    if subject.unavailable:
        raise InputError(f"{subject.name} unavailable: {'; '.join(subject.unavailable)}")
    try:
        with Probe(subject.backend.reference, selection.device, options.timeout) as probe:
            minimum = minimize(case, probe, options.tries)
    except NothingToMinimize as error:
        raise InputError(f"minimize: {error}") from error
    _tell(minimum, subject.backend.reference, options.out)
    return 0


def _tell(minimum: "Minimum", reference: str, out: Path | None) -> None:
    """Write the case file, and say what was found and how to see it."""
    from mla_conformance.cases.case_files import write_case
    from mla_conformance.judging.record import replay_line

    path = out or DEFAULT_OUT / f"minimized-{minimum.case.digest}.json"
    try:
        write_case(path, minimum.case)
    except OSError as error:
        raise InputError(f"minimize: {error}") from error
    found = "the simplest" if minimum.complete else "the simplest so far (--tries)"
    say(f"{found} of {minimum.tries} cases, {minimum.verdict.status}: {minimum.verdict.message}")
    say(f"case file: {path}")
    say(f"replay: {replay_line(minimum.case.id, reference)}")

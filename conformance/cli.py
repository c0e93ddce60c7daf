"""The command line. Exit status: 0 all judged capabilities hold, 1 one failed, 2 usage, 3 nothing could be judged."""

import argparse
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from mla_conformance.capabilities import CAPABILITIES
from mla_conformance.report.terminal import say

if TYPE_CHECKING:
    from mla_conformance.certify import Run
    from mla_conformance.selection import Selection

_USAGE = 2
_INTERRUPTED = 130
_DEFAULT_OUT = Path("build/mla-conformance")
_REFERENCE = "NAME|module:Class|file.py:Class"


class _UsageError(Exception):
    """A request that cannot be carried out as it stands."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command and return its exit status."""
    # A console script does not look into the current folder, where a plug-in's module often is; `python -m` does.
    sys.path.insert(0, str(Path.cwd()))
    parser = _parser()
    options, extra = parser.parse_known_args(arguments)
    if extra and options.command != "certify":
        parser.error(f"unrecognized arguments: {' '.join(extra)}")
    options.extra = [argument for argument in extra if argument != "--"]
    try:
        status: int = options.run(options)
    except _UsageError as error:
        say(f"mla-conformance: {error}", error=True)
        return _USAGE
    except KeyboardInterrupt:
        say("mla-conformance: interrupted; the journal in the output folder holds what was judged", error=True)
        return _INTERRUPTED
    return status


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser("mla-conformance", description="Decides whether an MLA kernel is right.")
    commands = parser.add_subparsers(dest="command", required=True)
    certify = commands.add_parser("certify", help="judge backends; further arguments go to pytest")
    certify.add_argument("--backend", action="append", default=[], metavar=_REFERENCE)
    certify.add_argument("--capability", action="append", default=[], metavar="NAME")
    certify.add_argument("--tier", metavar="smoke|full", help="by default full")
    certify.add_argument("--device", metavar="cpu|cuda")
    certify.add_argument("--out", type=Path, metavar="DIR", help=f"by default {_DEFAULT_OUT}")
    certify.add_argument("--resume", type=Path, metavar="DIR", help="go on with the interrupted run of this folder")
    certify.add_argument("--timeout", type=float, metavar="SECONDS", help="end a process whose case takes longer")
    certify.add_argument("-n", "--workers", type=int, metavar="N", help="processes that run cases")
    certify.add_argument("--json", action="store_true", help="print the report as JSON instead of text")
    certify.set_defaults(run=_certify)
    replay = commands.add_parser("replay", help="run one case again")
    replay.add_argument("case", nargs="?", metavar="CASE_ID|FILE.json")
    replay.add_argument("--report", type=Path, metavar="FILE", help="run a failure of this report again")
    replay.add_argument("--failure", type=int, default=1, metavar="K", help="which one, counted from 1")
    replay.add_argument("--backend", metavar=_REFERENCE)
    replay.add_argument("--device", metavar="cpu|cuda")
    replay.add_argument("--timeout", type=float, metavar="SECONDS")
    replay.set_defaults(run=_replay)
    minimize = commands.add_parser("minimize", help="find the simplest case that fails in the same way")
    minimize.add_argument("case", metavar="CASE_ID|FILE.json")
    minimize.add_argument("--backend", required=True, metavar=_REFERENCE)
    minimize.add_argument("--device", metavar="cpu|cuda")
    minimize.add_argument("--timeout", type=float, default=60.0, metavar="SECONDS", help="a longer case hangs")
    minimize.add_argument("--tries", type=int, default=500, metavar="N", help="candidates at most")
    minimize.add_argument("--out", type=Path, metavar="FILE", help="receives the case")
    minimize.set_defaults(run=_minimize)
    backends = commands.add_parser("backends", help="list the backends, and why one cannot run here")
    backends.add_argument("--device", metavar="cpu|cuda")
    backends.set_defaults(run=_backends)
    capabilities = commands.add_parser("capabilities", help="list the capabilities with their definitions")
    capabilities.set_defaults(run=_capabilities)
    defects = commands.add_parser("defects", help="judge the judge: known wrong kernels and honest ones")
    defects.add_argument("--tier", default="full", metavar="smoke|full")
    defects.add_argument("--out", type=Path, metavar="FILE", help="also write the outcome as JSON")
    defects.set_defaults(run=_defects)
    bench = commands.add_parser("bench", help="time and memory of the golden pass and of the suite, as ratios")
    bench.set_defaults(run=_bench)
    return parser


def _select(
    backends: Sequence[str],
    device: str | None,
    capabilities: Sequence[str] = (),
    tier: str = "full",
    cases: Sequence[str] = (),
) -> "Selection":
    from mla_conformance.selection import Selection, SelectionError

    try:
        return Selection.of(backends, capabilities, tier, device, cases)
    except SelectionError as error:
        raise _UsageError(str(error)) from error


def _certify(options: argparse.Namespace) -> int:
    from mla_conformance.certify import Run, default_workers

    if options.workers is not None and options.workers < 1:
        raise _UsageError(f"--workers: expected at least 1, got {options.workers}")
    _require_timeout(options.timeout)
    if options.resume:
        selection, folder = _resumed(options)
    else:
        selection = _select(options.backend, options.device, options.capability, options.tier or "full")
        folder = _folder(options.out or _DEFAULT_OUT)
    workers = options.workers or default_workers(selection)
    run = Run(selection, folder, workers, options.extra, options.timeout, resume=bool(options.resume))
    return _run(run, as_json=options.json)


def _require_timeout(seconds: float | None) -> None:
    if seconds is not None and not 0 < seconds < float("inf"):
        raise _UsageError(f"--timeout: expected a positive number of seconds, got {seconds:g}")


def _resumed(options: argparse.Namespace) -> "tuple[Selection, Path]":
    """Selection and folder of an interrupted run; what was not given again is what the journal says."""
    from mla_conformance.journal import Journal, JournalError
    from mla_conformance.plan import differences, plan_of, recorded_plan

    if options.out and options.out.resolve() != options.resume.resolve():
        raise _UsageError(f"--resume {options.resume} writes into that folder; leave --out {options.out} away")
    try:
        journal = Journal.inside(options.resume)
        plan = recorded_plan(journal)
        journal.check()
    except JournalError as error:
        raise _UsageError(f"--resume: {error}") from error
    selection = _select(
        options.backend or list(plan["backends"]),
        options.device or plan["device"],
        options.capability or list(plan["capabilities"]),
        options.tier or plan["tier"],
        plan["cases"],
    )
    options.extra = options.extra or plan["arguments"]
    different = differences(plan, plan_of(selection, options.extra))
    if different:
        raise _UsageError(f"--resume {options.resume}: not the run that was interrupted; {'; '.join(different)}")
    return selection, _folder(options.resume)


def _replay(options: argparse.Namespace) -> int:
    from mla_conformance.certify import Run

    _require_timeout(options.timeout)
    case, backend = _replayed(options)
    selection = _select([backend], options.device, cases=[case])
    with tempfile.TemporaryDirectory(prefix="mla-conformance-replay-") as folder:
        return _run(Run(selection, Path(folder), workers=1, timeout=options.timeout), keep_report=False)


def _replayed(options: argparse.Namespace) -> tuple[str, str]:
    """Case id and backend reference of what is to be run again."""
    from mla_conformance.case_file import CaseFileError, read_failure

    if (options.case is None) == (options.report is None):
        raise _UsageError("replay: expected either a case, as CASE_ID or FILE.json, or --report FILE")
    if options.report is None:
        if not options.backend:
            raise _UsageError(f"replay: expected --backend {_REFERENCE} beside a case")
        return _case_id(options.case), options.backend
    try:
        case, backend = read_failure(options.report, options.failure)
    except CaseFileError as error:
        raise _UsageError(str(error)) from error
    return case, options.backend or backend


def _case_id(text: str) -> str:
    """The id of a case that is given as its id or as a file."""
    from mla_conformance.case_file import CaseFileError, read_case

    if not text.endswith(".json"):
        return text
    try:
        return read_case(Path(text)).id
    except CaseFileError as error:
        raise _UsageError(str(error)) from error


def _minimize(options: argparse.Namespace) -> int:
    from mla_conformance.case_file import write_case
    from mla_conformance.minimize import NothingToMinimize, minimize
    from mla_conformance.probe import Probe
    from mla_conformance.record import replay_line

    _require_timeout(options.timeout)
    selection = _select([options.backend], options.device, cases=[_case_id(options.case)])
    (subject,), (case,) = selection.subjects, selection.cases
    if subject.unavailable:
        raise _UsageError(f"{subject.name} unavailable: {'; '.join(subject.unavailable)}")
    reference = subject.backend.reference
    try:
        with Probe(reference, selection.device, options.timeout) as probe:
            minimum = minimize(case, probe, options.tries)
        path = options.out or _DEFAULT_OUT / f"minimized-{minimum.case.digest}.json"
        write_case(path, minimum.case)
    except (NothingToMinimize, OSError) as error:
        raise _UsageError(f"minimize: {error}") from error
    found = "the simplest" if minimum.complete else "the simplest so far (--tries)"
    say(f"{found} of {minimum.tries} cases, {minimum.verdict.status}: {minimum.verdict.message}")
    say(f"case file: {path}")
    say(f"replay: {replay_line(minimum.case.id, reference)}")
    return 0


def _run(run: "Run", **how: bool) -> int:
    from mla_conformance.certify import RunError
    from mla_conformance.console import run_and_report

    try:
        return run_and_report(run, **how)
    except RunError as error:
        raise _UsageError(str(error)) from error


def _folder(path: Path) -> Path:
    """The output folder, proven writable before anything is run."""
    try:
        path.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=path):
            pass
    except OSError as error:
        raise _UsageError(f"--out {path}: expected a writable folder: {error.strerror}") from error
    return path.resolve()


def _backends(options: argparse.Namespace) -> int:
    from mla_conformance.selection import known_names

    names = known_names()
    subjects = _select(names, options.device).subjects
    subjects = tuple(sorted(subjects, key=lambda subject: names.index(subject.name.partition("[")[0])))
    width = max(len(subject.name) for subject in subjects)
    for subject in subjects:
        state = "unavailable: " + "; ".join(subject.unavailable) if subject.unavailable else "available"
        say(f"{subject.name:<{width}} {state}")
    return 0


def _capabilities(options: argparse.Namespace) -> int:
    for capability in CAPABILITIES.values():
        count = f"{len(capability.cases):>3} cases"
        say(f"{capability.name:<18} {count} · SPEC {capability.clause} · {capability.definition}")
    return 0


def _defects(options: argparse.Namespace) -> int:
    from mla_conformance.capabilities import CapabilityError, find_tier
    from mla_conformance.defects.matrix import run_matrix
    from mla_conformance.defects.report import summarise, terminal_lines
    from mla_conformance.report.json_report import write_json

    try:
        tier = find_tier(options.tier)
    except CapabilityError as error:
        raise _UsageError(str(error)) from error
    report = summarise(run_matrix(tier), tier.value)
    if options.out:
        write_json(options.out, report.to_json())
    for line in terminal_lines(report):
        say(line)
    return 1 if report.survivors or report.false_alarms else 0


def _bench(options: argparse.Namespace) -> int:
    from mla_conformance.bench import measure

    for line in measure():
        say(line)
    return 0

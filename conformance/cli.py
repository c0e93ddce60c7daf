"""The command line. Exit status: 0 all judged capabilities hold, 1 one failed, 2 usage, 3 nothing could be judged."""

import argparse
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from mla_conformance.capabilities import CAPABILITIES
from mla_conformance.report.commands import add_commands as add_report_commands
from mla_conformance.report.terminal import say

if TYPE_CHECKING:
    from mla_conformance.certify import Run
    from mla_conformance.selection import Selection
    from mla_conformance.sharding import Shard

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
    certify.add_argument("--tier", default="full", metavar="smoke|full")
    certify.add_argument("--device", metavar="cpu|cuda")
    certify.add_argument("--out", type=Path, default=_DEFAULT_OUT, metavar="DIR")
    certify.add_argument("-n", "--workers", type=int, metavar="N", help="processes that run cases")
    certify.add_argument("--json", action="store_true", help="print the report as JSON instead of text")
    certify.add_argument("--cases", type=Path, metavar="DIR", help="judge the case files of a folder instead")
    certify.add_argument("--shard", metavar="I/N", help="judge one part of the cases; report merge joins the parts")
    certify.add_argument("--durations", type=Path, metavar="REPORT", help="balance the shards by an earlier run")
    certify.set_defaults(run=_certify)
    replay = commands.add_parser("replay", help="run one case again")
    replay.add_argument("case", metavar="CASE_ID")
    replay.add_argument("--backend", required=True, metavar=_REFERENCE)
    replay.add_argument("--device", metavar="cpu|cuda")
    replay.set_defaults(run=_replay)
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
    add_report_commands(commands)
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
    cases = _case_files(options.cases, options.capability) if options.cases else ()
    selection = _select(options.backend, options.device, () if cases else options.capability, options.tier, cases)
    shard = _shard(options, selection)
    workers = options.workers or default_workers(selection)
    return _run(Run(selection, _folder(options.out), workers, options.extra, shard), as_json=options.json)


def _case_files(folder: Path, capabilities: Sequence[str]) -> list[str]:
    """Ids of the cases in a folder, of these capabilities if any are named."""
    from mla_conformance.case_files import CaseFileError, read_cases

    try:
        cases = [case.id for case in read_cases(folder) if not capabilities or case.capability in capabilities]
    except CaseFileError as error:
        raise _UsageError(str(error)) from error
    if not cases:
        raise _UsageError(f"--cases {folder}: no case of {', '.join(capabilities)}")
    return cases


def _shard(options: argparse.Namespace, selection: "Selection") -> "Shard | None":
    from mla_conformance.report.loading import ReportError, load_report
    from mla_conformance.sharding import Shard, ShardError

    if not options.shard:
        if options.durations:
            raise _UsageError("--durations: expected together with --shard")
        return None
    try:
        seconds = load_report(options.durations).seconds if options.durations else {}
        return Shard.of(options.shard, selection.case_ids, seconds)
    except ShardError as error:
        raise _UsageError(f"--shard: {error}") from error
    except ReportError as error:
        raise _UsageError(f"--durations: {error}") from error


def _replay(options: argparse.Namespace) -> int:
    selection = _select([options.backend], options.device, cases=[options.case])
    from mla_conformance.certify import Run

    with tempfile.TemporaryDirectory(prefix="mla-conformance-replay-") as folder:
        return _run(Run(selection, Path(folder), workers=1), keep_report=False)


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

"""The command line. Exit status: 0 all judged capabilities hold, 1 one failed, 2 usage, 3 nothing could be judged."""

import argparse
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from mla_conformance import gating_cli
from mla_conformance.capabilities import CAPABILITIES
from mla_conformance.inputs import InputError
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
    except (_UsageError, InputError) as error:
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
    certify.add_argument(
        "--explore", type=int, default=0, metavar="N", help="judge N drawn cases as well; one that fails is made small"
    )
    certify.add_argument("--out", type=Path, default=_DEFAULT_OUT, metavar="DIR")
    certify.add_argument("-n", "--workers", type=int, metavar="N", help="processes that run cases")
    certify.add_argument("--json", action="store_true", help="print the report as JSON instead of text")
    gating_cli.add_certify_options(certify)
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
    defects.add_argument("--readme", type=Path, metavar="FILE", help="rewrite the table between this file's markers")
    defects.set_defaults(run=_defects)
    bench = commands.add_parser("bench", help="time and memory of the golden pass and of the suite, as ratios")
    bench.set_defaults(run=_bench)
    gating_cli.add_commands(commands)
    return parser


def _select(
    backends: Sequence[str],
    device: str | None,
    capabilities: Sequence[str] = (),
    tier: str = "full",
    cases: Sequence[str] = (),
    explore: int = 0,
) -> "Selection":
    from mla_conformance.selection import Selection, SelectionError

    try:
        return Selection.of(backends, capabilities, tier, device, cases, explore)
    except SelectionError as error:
        raise _UsageError(str(error)) from error


def _certify(options: argparse.Namespace) -> int:
    from mla_conformance.certify import Run, default_workers

    if options.workers is not None and options.workers < 1:
        raise _UsageError(f"--workers: expected at least 1, got {options.workers}")
    selection = _select(options.backend, options.device, options.capability, options.tier, explore=options.explore)
    wanted = bool(options.certificate or options.badge)
    if wanted and not gating_cli.certifiable(options, selection):
        return 3
    workers = options.workers or default_workers(selection)
    expectations = gating_cli.load_expectations(options.expectations)
    run = Run(selection, _folder(options.out), workers, options.extra, expectations)
    status = _run(run, as_json=options.json)
    if wanted and status:
        say("mla-conformance: no certificate: the run is no success", error=True)
    return gating_cli.write_certificate(options, run) if wanted and not status else status


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
    from mla_conformance.defects.report import summarise, terminal_lines, with_section
    from mla_conformance.report.json_report import write_json

    try:
        tier = find_tier(options.tier)
    except CapabilityError as error:
        raise _UsageError(str(error)) from error
    readme = _with_markers(options.readme) if options.readme else ""
    report = summarise(run_matrix(tier), tier.value)
    if options.out:
        write_json(options.out, report.to_json())
    if options.readme:
        options.readme.write_text(with_section(readme, report), encoding="utf-8")
    for line in terminal_lines(report):
        say(line)
    return 1 if report.survivors or report.false_alarms else 0


def _with_markers(path: Path) -> str:
    """The text of a README, known to have a place for the table before anything is run."""
    from mla_conformance.defects.report import SectionError, section

    try:
        text = path.read_text(encoding="utf-8")
        section(text)
    except (OSError, SectionError) as error:
        raise _UsageError(f"--readme {path}: {error}") from error
    return text


def _bench(options: argparse.Namespace) -> int:
    from mla_conformance.bench import measure

    for line in measure():
        say(line)
    return 0

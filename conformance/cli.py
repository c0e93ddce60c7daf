"""The command line. Exit status: 0 all judged capabilities hold, 1 one failed, 2 usage, 3 nothing could be judged."""

import argparse
import os
import sys
from collections.abc import Iterator, Sequence
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

from mla_conformance.cases.capabilities import CAPABILITIES
from mla_conformance.cases.tiers import tier_lines
from mla_conformance.commands import certify_cli, gating_cli, replay_cli
from mla_conformance.commands.request import REFERENCE, select
from mla_conformance.files.inputs import InputError
from mla_conformance.isolation.limits import leave
from mla_conformance.report import commands as report_commands
from mla_conformance.report.terminal import say

if TYPE_CHECKING:
    from mla_conformance.running.selection import Selection

_USAGE = 2
_INTERRUPTED = 130
_CUT_OFF = 141


def command() -> NoReturn:
    """The console script."""
    try:
        status = main()
    except BrokenPipeError:  # who read what is printed has read enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        status = _CUT_OFF
    leave(status)


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
    except InputError as error:
        say(f"mla-conformance: {error}", error=True)
        return _USAGE
    except KeyboardInterrupt:
        say("mla-conformance: interrupted; the journal in the output folder holds what was judged", error=True)
        return _INTERRUPTED
    return status


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser("mla-conformance", description="Decides whether an MLA kernel is right.")
    commands = parser.add_subparsers(dest="command", required=True)
    certify_cli.add_commands(commands)
    replay_cli.add_commands(commands)
    backends = commands.add_parser("backends", help="list the backends, and why one cannot run here")
    backends.add_argument("--device", metavar="cpu|cuda")
    backends.set_defaults(run=_backends)
    capabilities = commands.add_parser("capabilities", help="list the capabilities with their definitions")
    capabilities.set_defaults(run=_capabilities)
    defects = commands.add_parser("defects", help="judge the judge: known wrong kernels and honest ones")
    defects.add_argument("--tier", default="full", metavar="smoke|full|nightly")
    defects.add_argument("--out", type=Path, metavar="FILE", help="also write the outcome as JSON")
    defects.add_argument("--readme", type=Path, metavar="FILE", help="rewrite the section between this file's markers")
    defects.set_defaults(run=_defects)
    bench = commands.add_parser("bench", help="time and memory of the golden pass and of the suite, as ratios")
    bench.add_argument("--device", metavar="cpu|cuda")
    bench.add_argument("--scale", action="store_true", help="the golden pass over contexts and numbers of heads")
    bench.add_argument("--kernels", action="store_true", help="throughput of the backends that can run here")
    bench.add_argument("--suite", metavar="NAME", help="where the time of a run on this backend goes")
    bench.add_argument(
        "--runs",
        nargs="+",
        metavar=REFERENCE,
        help="runs of each backend, of all, and of all on one GPU or worker",
    )
    bench.add_argument("--tier", default="smoke", metavar="smoke|full|nightly", help="of --suite and --runs")
    bench.add_argument("--capability", action="append", default=[], metavar="NAME", help="of --runs; by default all")
    bench.add_argument("--case", action="append", default=[], metavar="ID", help="of --suite: this case, not a tier")
    bench.set_defaults(run=_bench)
    gating_cli.add_commands(commands)
    report_commands.add_commands(commands)
    return parser


def _backends(options: argparse.Namespace) -> int:
    from mla_conformance.running.selection import known_names

    names = known_names()
    subjects = select(names, options.device).subjects
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
    for line in tier_lines():
        say(line)
    return 0


def _defects(options: argparse.Namespace) -> int:
    from mla_conformance.cases.capabilities import CapabilityError, find_tier
    from mla_conformance.defects.digest import deciding_digest
    from mla_conformance.defects.matrix import run_matrix
    from mla_conformance.defects.report import summarise, terminal_lines, with_section
    from mla_conformance.report.json_report import write_json

    try:
        tier = find_tier(options.tier)
    except CapabilityError as error:
        raise InputError(str(error)) from error
    readme = _with_markers(options.readme) if options.readme else ""
    digest = deciding_digest()  # of what the run begins with; files may change while it lasts
    report = summarise(run_matrix(tier), tier.value, digest)
    if options.out:
        write_json(options.out, report.to_json())
    if options.readme:
        options.readme.write_text(with_section(readme, report), encoding="utf-8")
    for line in terminal_lines(report):
        say(line)
    return 1 if report.survivors or report.false_alarms else 0


def _with_markers(path: Path) -> str:
    """The text of a README, known to have a place for the section before anything is run."""
    from mla_conformance.defects.report import SectionError, section

    try:
        text = path.read_text(encoding="utf-8")
        section(text)
    except (OSError, SectionError) as error:
        raise InputError(f"--readme {path}: {error}") from error
    return text


def _bench(options: argparse.Namespace) -> int:
    from mla_conformance.bench import golden, kernels, suite
    from mla_conformance.running.certify import environment

    backends = options.runs or ([options.suite] if options.suite else [])
    selection = select(backends, options.device, options.capability, options.tier, options.case)
    device = selection.device
    if backends:
        _require_available(selection)
    if options.scale:
        lines = golden.scale(device.type)
    elif options.kernels:
        lines = kernels.throughput(device)
    elif options.suite:
        lines = suite.split(selection)
    elif options.runs:
        lines = _runs(selection)
    else:
        lines = chain(golden.compare(device.type), suite.plugin_cost())
    where = environment(selection)
    say(f"device {where['device']} · torch {where['torch']} · {os.cpu_count()} cores · suite {where['suite']}")
    for line in lines:
        say(line)
    return 0


def _require_available(selection: "Selection") -> None:
    for subject in selection.subjects:
        if subject.unavailable:
            raise InputError(f"{subject.name} cannot run here: {'; '.join(subject.unavailable)}")


def _runs(selection: "Selection") -> Iterator[str]:
    from mla_conformance.bench.runs import compare_runs
    from mla_conformance.running.certify import RunError

    try:
        yield from compare_runs(selection)
    except RunError as error:
        raise InputError(str(error)) from error

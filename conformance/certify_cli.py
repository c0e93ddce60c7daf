"""The command ``certify``: a run of the suite, or the rest of an interrupted one."""

import argparse
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mla_conformance import gating_cli
from mla_conformance.inputs import InputError
from mla_conformance.report.terminal import say
from mla_conformance.request import DEFAULT_OUT, REFERENCE, carry_out, output_folder, require_timeout, select

if TYPE_CHECKING:
    from mla_conformance.certify import Run
    from mla_conformance.selection import Selection


def add_commands(commands: Any) -> None:
    """Add the parser of this command."""
    certify = commands.add_parser("certify", help="judge backends; further arguments go to pytest")
    certify.add_argument("--backend", action="append", default=[], metavar=REFERENCE)
    certify.add_argument("--capability", action="append", default=[], metavar="NAME")
    certify.add_argument("--tier", metavar="smoke|full", help="by default full")
    certify.add_argument("--device", metavar="cpu|cuda")
    certify.add_argument(
        "--explore", type=int, metavar="N", help="judge N drawn cases as well; one that fails is made small"
    )
    certify.add_argument("--out", type=Path, metavar="DIR", help=f"by default {DEFAULT_OUT}")
    certify.add_argument("--resume", type=Path, metavar="DIR", help="go on with the interrupted run of this folder")
    certify.add_argument("--timeout", type=float, metavar="SECONDS", help="end a process whose case takes longer")
    certify.add_argument("-n", "--workers", type=int, metavar="N", help="processes that run cases")
    certify.add_argument("--json", action="store_true", help="print the report as JSON instead of text")
    gating_cli.add_certify_options(certify)
    certify.set_defaults(run=_certify)


def _certify(options: argparse.Namespace) -> int:
    run = _requested(options)
    wanted = bool(options.certificate or options.badge)
    if wanted and not gating_cli.certifiable(options, run.selection):
        return 3
    status = carry_out(run, as_json=options.json)
    if wanted and status:
        say("mla-conformance: no certificate: the run is no success", error=True)
    return gating_cli.write_certificate(options, run) if wanted and not status else status


def _requested(options: argparse.Namespace) -> "Run":
    from mla_conformance.certify import Run, default_workers

    if options.workers is not None and options.workers < 1:
        raise InputError(f"--workers: expected at least 1, got {options.workers}")
    require_timeout(options.timeout)
    selection, folder = _resumed(options) if options.resume else _new(options)
    return Run(
        selection,
        folder,
        options.workers or default_workers(selection),
        options.extra,
        gating_cli.load_expectations(options.expectations),
        options.timeout,
        resume=bool(options.resume),
    )


def _new(options: argparse.Namespace) -> "tuple[Selection, Path]":
    selection = select(
        options.backend, options.device, options.capability, options.tier or "full", explore=options.explore or 0
    )
    return selection, output_folder(options.out or DEFAULT_OUT)


def _resumed(options: argparse.Namespace) -> "tuple[Selection, Path]":
    """Selection and folder of an interrupted run; what was not given again is what the journal says."""
    from mla_conformance.journal import Journal, JournalError
    from mla_conformance.plan import differences, plan_of, recorded_plan

    if options.out and options.out.resolve() != options.resume.resolve():
        raise InputError(f"--resume {options.resume} writes into that folder; leave --out {options.out} away")
    try:
        journal = Journal.inside(options.resume)
        plan = recorded_plan(journal)
        journal.check()
    except JournalError as error:
        raise InputError(f"--resume: {error}") from error
    selection = select(
        options.backend or list(plan["backends"]),
        options.device or plan["device"],
        options.capability or list(plan["capabilities"]),
        options.tier or plan["tier"],
        plan["cases"],
        plan["explore"] if options.explore is None else options.explore,
    )
    options.extra = options.extra or plan["arguments"]
    different = differences(plan, plan_of(selection, options.extra))
    if different:
        raise InputError(f"--resume {options.resume}: not the run that was interrupted; {'; '.join(different)}")
    return selection, output_folder(options.resume)

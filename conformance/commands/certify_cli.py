"""The command ``certify``: a run of the suite, or the rest of an interrupted one."""

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mla_conformance.commands import gating_cli
from mla_conformance.commands.request import (
    DEFAULT_OUT,
    REFERENCE,
    carry_out,
    require_timeout,
    require_writable,
    select,
)
from mla_conformance.files.inputs import InputError
from mla_conformance.report.terminal import say

if TYPE_CHECKING:
    from mla_conformance.cases.sharding import Shard
    from mla_conformance.running.certify import Run
    from mla_conformance.running.selection import Selection

    Request = tuple[Selection, Path, Shard | None]


def add_commands(commands: Any) -> None:
    """Add the parser of this command."""
    certify = commands.add_parser("certify", help="judge backends; further arguments go to pytest")
    certify.add_argument("--backend", action="append", default=[], metavar=REFERENCE)
    certify.add_argument("--capability", action="append", default=[], metavar="NAME")
    certify.add_argument("--tier", metavar="smoke|full|nightly", help="by default full")
    certify.add_argument("--device", metavar="cpu|cuda")
    certify.add_argument(
        "--explore", type=int, metavar="N", help="judge N drawn cases as well; one that fails is made small"
    )
    certify.add_argument("--out", type=Path, metavar="DIR", help=f"by default {DEFAULT_OUT}")
    certify.add_argument("--resume", type=Path, metavar="DIR", help="go on with the interrupted run of this folder")
    certify.add_argument("--cases", type=Path, metavar="DIR", help="judge the case files of a folder instead")
    certify.add_argument("--shard", metavar="I/N", help="judge one part of the cases; report merge joins the parts")
    certify.add_argument("--durations", type=Path, metavar="REPORT", help="balance the shards by an earlier run")
    certify.add_argument("--timeout", type=float, metavar="SECONDS", help="end a process whose case takes longer")
    certify.add_argument("--golden-cache", type=Path, metavar="DIR", help="keep golden results there for other runs")
    certify.add_argument("-n", "--workers", type=int, metavar="N", help="processes that run cases")
    certify.add_argument("--json", action="store_true", help="print the report as JSON instead of text")
    gating_cli.add_certify_options(certify)
    certify.set_defaults(run=_certify)


def _certify(options: argparse.Namespace) -> int:
    run = _requested(options)
    wanted = bool(options.certificate)
    if wanted and not gating_cli.certifiable(run):
        return 3
    require_writable(run.directory)
    status = carry_out(run, as_json=options.json)
    if wanted and status:
        say("mla-conformance: no certificate: the run is no success", error=True)
    return gating_cli.write_certificate(options, run) if wanted and not status else status


def _requested(options: argparse.Namespace) -> "Run":
    from mla_conformance.running.certify import Run, default_workers

    if options.workers is not None and options.workers < 1:
        raise InputError(f"--workers: expected at least 1, got {options.workers}")
    require_timeout(options.timeout)
    selection, folder, shard = _resumed(options) if options.resume else _new(options)
    return Run(
        selection,
        folder,
        options.workers or default_workers(selection),
        options.extra,
        gating_cli.load_expectations(options.expectations),
        options.timeout,
        resume=bool(options.resume),
        shard=shard,
        golden_cache=options.golden_cache,
    )


def _new(options: argparse.Namespace) -> "Request":
    cases = _case_files(options.cases, options.capability) if options.cases else ()
    selection = select(
        options.backend,
        options.device,
        () if cases else options.capability,
        options.tier or "full",
        cases,
        options.explore or 0,
    )
    shard = _shard(options, selection)
    return selection, (options.out or DEFAULT_OUT).resolve(), shard


def _case_files(folder: Path, capabilities: Sequence[str]) -> list[str]:
    """Ids of the cases in a folder, of these capabilities if any are named."""
    from mla_conformance.cases.case_files import read_cases

    cases = [case.id for case in read_cases(folder) if not capabilities or case.capability in capabilities]
    if not cases:
        raise InputError(f"--cases {folder}: no case of {', '.join(capabilities)}")
    return cases


def _shard(options: argparse.Namespace, selection: "Selection") -> "Shard | None":
    from mla_conformance.cases.sharding import Shard
    from mla_conformance.report.loading import load_report

    if not options.shard:
        if options.durations:
            raise InputError("--durations: expected together with --shard")
        return None
    if selection.explore:
        raise InputError("--explore: drawn cases cannot be divided; draw them in a run of their own, without --shard")
    seconds = load_report(options.durations).seconds if options.durations else {}
    return Shard.of(options.shard, selection.case_ids, seconds)


def _resumed(options: argparse.Namespace) -> "Request":
    """The interrupted run; what was not given again is what the journal says."""
    from mla_conformance.running.plan import differences, plan_of, planned_shard

    for name in ("cases", "shard", "durations"):
        if getattr(options, name):
            raise InputError(f"--resume: leave --{name} away, the journal says what the run was to judge")
    if options.out and options.out.resolve() != options.resume.resolve():
        raise InputError(f"--resume {options.resume} writes into that folder; leave --out {options.out} away")
    plan = _plan(options.resume)
    selection = select(
        options.backend or list(plan["backends"]),
        options.device or plan["device"],
        options.capability or list(plan["capabilities"]),
        options.tier or plan["tier"],
        plan["cases"],
        plan["explore"] if options.explore is None else options.explore,
    )
    options.extra, shard = options.extra or plan["arguments"], planned_shard(plan)
    if shard and not set(shard.cases) <= set(selection.case_ids):
        raise InputError(f"--resume {options.resume}: the plan's shard holds cases that its list does not")
    different = differences(plan, plan_of(selection, options.extra, shard))
    if different:
        raise InputError(f"--resume {options.resume}: not the run that was interrupted; {'; '.join(different)}")
    return selection, options.resume.resolve(), shard


def _plan(folder: Path) -> dict[str, Any]:
    """The plan of a run whose whole journal can be read."""
    from mla_conformance.isolation.journal import Journal, JournalError
    from mla_conformance.running.plan import recorded_plan

    try:
        journal = Journal.inside(folder)
        plan = recorded_plan(journal)
        journal.check()
    except JournalError as error:
        raise InputError(f"--resume: {error}") from error
    return plan

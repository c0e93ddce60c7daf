"""``certify``: from checked options to a run in a folder of its own, and to a certificate if one is asked for."""

import argparse
import datetime
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType

from mla_conformance.backends.references import known_backends, parse_reference
from mla_conformance.cases.sharding import Extent, Shard
from mla_conformance.certificate import issue
from mla_conformance.certificate.pins import Pins, libraries
from mla_conformance.certificate.records import require_records, write_record
from mla_conformance.commands.console import BROKEN, run_and_report
from mla_conformance.commands.sanitize import sanitize
from mla_conformance.engine.journal import JOURNAL_NAME, Journal, RunFolder
from mla_conformance.engine.request import Plan, RunRequest
from mla_conformance.engine.run import Run
from mla_conformance.engine.supervisor import Limits, RunError
from mla_conformance.expectations.apply import KNOWN_FAILURES, Expectations
from mla_conformance.files.installed import git_asked_before
from mla_conformance.files.whole import InputError, write_output
from mla_conformance.judging.record import BackendFacts
from mla_conformance.models.config import find_model, read_config
from mla_conformance.models.profile import Deployment, cases_of
from mla_conformance.report.json_report import load_report, to_text
from mla_conformance.report.outcome import Detail
from mla_conformance.report.summary import BackendOutcome, RunSummary
from mla_conformance.report.terminal import say
from mla_conformance.vocabulary.capabilities import read_cases


def certify(options: argparse.Namespace) -> int:
    began = time.monotonic()
    kinds = ("certificate", "record", "submission")
    kind, path = next(((kind, getattr(options, kind)) for kind in kinds if getattr(options, kind)), ("", None))
    if options.sign:
        issue.require_key(options.sign)
    if options.role:
        why = "{}: cannot be combined with --role, by whose file nothing is certified or recorded"
        _refuse(options, ("certificate", "submission", "record", "sanitize", "model", "config"), why)
        if not (options.backend or options.resume):
            raise InputError("--role: expected --backend with a kernel of this role")
    if kind == "submission":
        require_records(options.submission)
    plan = None
    if options.resume:
        request, plan = _resumed(options)
    else:
        if options.all and options.backend:
            raise InputError("--all: cannot be combined with --backend, which names what is judged")
        request = _new(options, [backend.name for backend in known_backends()] if options.all else options.backend)
    if options.speed:
        why = "{}: cannot be combined with --speed, which times what a whole run of our roles finds right"
        _refuse(options, ("sanitize", "shard", "role"), why)
    request = replace(request, bitwise=options.bitwise, accuracy=options.accuracy, speed=options.speed)
    if options.sanitize:
        why = "{}: cannot be combined with --sanitize, which judges nothing"
        _refuse(options, ("certificate", "record", "sign"), why)
        return sanitize(request, options)
    for entry, problem in Expectations.load(options.expectations).problems():
        raise InputError(f"{entry.file}: entry {entry.number}: {problem}")
    expectations = Expectations.load([KNOWN_FAILURES, *options.expectations])
    issuing = Issuing(kind, path, options.sign) if path else None
    if issuing:
        with _refusals_of(kind):
            issue.require_whole(len(request.backends), request.judged_ids, any(request.explore))
    folder = RunFolder.claim(options.resume or options.out, resume=bool(plan), anew=options.fresh)
    ends_at = began + options.deadline if options.deadline else float("inf")
    limits = Limits(options.workers, options.timeout, give_up_after=options.give_up_after, ends_at=ends_at)
    run = Run(request, folder, limits, expectations, explains=not options.no_explain)
    detail = Detail.QUIET if options.quiet else Detail.FULL if options.verbose else Detail.USUAL
    if not issuing:
        return run_and_report(run, as_json=options.json, resumed=plan, detail=detail)
    with git_asked_before():
        status = run_and_report(run, as_json=options.json, resumed=plan, check=issuing.check, detail=detail)
        return issuing.write(run.summary(), status, run.found.code.digests)


def _refuse(options: argparse.Namespace, names: Sequence[str], why: str) -> None:
    for name in names:
        if getattr(options, name):
            raise InputError(why.format(f"--{name}"))


def _new(options: argparse.Namespace, named: list[str]) -> RunRequest:
    if options.model or options.config:
        of_all = ("capability", "tier", "explore", "cases", "shard", "durations", "certificate", "submission", "record")
        _refuse(options, of_all, "{}: cannot be combined with --model or --config, which choose the cases")
        profile = read_config(options.config) if options.config else find_model(options.model)
        deployment = Deployment.of(profile, options.tp or 1, options.kv_cache or "auto")
        cases = [case.id for case in cases_of(profile, deployment)]
        request = RunRequest.of(named, device=options.device, cases=cases, salt=options.salt or "")
        return replace(request, deployment=deployment)
    cases, chosen = [], options.capability
    if options.cases:
        cases = [case.id for case in read_cases(options.cases) if not chosen or case.capability in chosen]
        chosen = ()
        if not cases:
            raise InputError(f"--cases {options.cases}: no case of {', '.join(options.capability)}")
    drawn, tier, salt = options.explore or Extent(), options.tier or "full", options.salt or ""
    request = RunRequest.of(named, chosen, tier, options.device, cases, drawn, salt)
    if not options.shard:
        return request
    if any(request.explore):
        raise InputError("--explore: cannot be combined with --shard; draw cases in a separate run")
    seconds = load_report(options.durations).seconds if options.durations else {}
    return replace(request, shard=Shard.of(options.shard, request.case_ids, seconds))


def _resumed(options: argparse.Namespace) -> tuple[RunRequest, Plan]:
    journal = Journal(options.resume / JOURNAL_NAME)
    try:
        plan = Plan.recorded(journal)
    except InputError as error:
        raise InputError(f"--resume: {error}") from error
    except OSError as error:
        raise InputError(f"--resume: {journal.path}: cannot be read: {error.strerror}") from error
    why = "--resume: cannot be combined with {}; the journal says what to judge"
    _refuse(options, ("all", "cases", "shard", "model", "config"), why)
    request = RunRequest.of(
        options.backend or list(plan.backends),
        options.capability or list(plan.capabilities),
        options.tier or plan.tier,
        options.device or plan.device,
        plan.cases,
        Extent.of(plan.explore) if options.explore is None else options.explore,
        plan.salt if options.salt is None else options.salt,
    )
    if plan.shard and not set(plan.shard.cases) <= set(request.case_ids):
        raise InputError(f"--resume {options.resume}: its journal was changed: the shard has cases that are not listed")
    return replace(request, shard=plan.shard, deployment=plan.deployment), plan


@contextmanager
def _refusals_of(kind: str) -> Iterator[None]:
    try:
        yield
    except issue.Refused as reason:
        raise RunError(f"no {kind}: {reason}") from reason


@dataclass
class Issuing:
    kind: str  # certificate, record or submission
    path: Path  # receives it
    key: Path | None  # of SSH, which signs it; None if it is not signed
    pins: Pins | None = None  # what judges and what is judged, once the run is prepared

    def check(self, run: Run) -> None:
        with _refusals_of(self.kind):
            issue.require_real(run.facts[0], self.kind == "certificate")
            self.pins = _pins(run.facts[0])

    def write(self, run: RunSummary, status: int, loaded: Mapping[str, str] = MappingProxyType({})) -> int:
        if self.pins is None:
            return status
        # What could not be judged, which leaves a run incomplete, is named by what is issued.
        if status and not (status == BROKEN and run.backends[0].outcome is BackendOutcome.UNAVAILABLE):
            say(f"mla-conformance: no {self.kind}: the run failed or is incomplete", error=True)
            return status
        facts, today = run.backends[0].facts, datetime.date.today()
        code = libraries(loaded, parse_reference(facts.reference))
        try:
            if _pins(facts) != self.pins:
                raise issue.Refused("the backend, one of its packages or the harness changed during the run")
            certificate = issue.record(run, today, _pins(facts, loaded), code, self.kind == "certificate")
        except (issue.Refused, InputError) as reason:
            say(f"mla-conformance: no {self.kind}: {reason}", error=True)
            return 1
        if self.kind == "submission":
            write_record(self.path, certificate, issue.sign(certificate.seal, self.key) if self.key else "")
        else:
            text = to_text(certificate)
            write_output(self.path, text)
            issue.signature_of(self.path).unlink(missing_ok=True)
            if self.key:
                write_output(issue.signature_of(self.path), issue.sign(text, self.key))
        say(f"wrote {self.path}", error=True)
        return status


def _pins(facts: BackendFacts, loaded: Mapping[str, str] | None = None) -> Pins:
    return issue.committed(Pins.of(parse_reference(facts.reference), facts.versions, loaded))

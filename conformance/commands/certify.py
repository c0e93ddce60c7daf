"""``certify``: from checked options to a run in a folder of its own, and to a certificate if one is asked for.

With ``--sanitize`` small cases under compute-sanitizer, one for each set of kernels that a record tells of.
"""

import argparse
import datetime
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType

from mla_conformance.backends.references import BackendReference, known_backends, parse_reference
from mla_conformance.cases.case import Case
from mla_conformance.cases.sharding import Extent, Shard
from mla_conformance.cases.work import is_light, work_of
from mla_conformance.certificate import certificate, verify
from mla_conformance.certificate.pins import Pins, libraries
from mla_conformance.certificate.records import kept_records, require_records, write_record, write_sanitized
from mla_conformance.commands.console import BROKEN, run_and_report
from mla_conformance.engine.journal import JOURNAL_NAME, Journal, RunFolder
from mla_conformance.engine.machine import this_machine
from mla_conformance.engine.request import Plan, RunRequest
from mla_conformance.engine.run import Run
from mla_conformance.engine.supervisor import GPU_TIMEOUT, Limits, RunError
from mla_conformance.expectations import KNOWN_FAILURES, Expectations
from mla_conformance.files import installed, places
from mla_conformance.files.whole import InputError, write_output
from mla_conformance.judging.record import BackendFacts, Status, Traced, replay_line
from mla_conformance.models.config import find_model, read_config
from mla_conformance.models.profile import Deployment, cases_of
from mla_conformance.report import causes, json_report, outcome, summary
from mla_conformance.report.terminal import counted, say, say_wrapped
from mla_conformance.traits.sanitizer import Tool, ToolUnavailable, Watch, Watched, joined
from mla_conformance.version import SUITE_VERSION, __version__
from mla_conformance.vocabulary.capabilities import find_capability, read_cases

MOST = 8  # cases: a tool makes calls some hundred times slower, and a process for it takes seconds to begin


def certify(options: argparse.Namespace) -> int:
    began = time.monotonic()
    kinds = ("certificate", "record", "submission")
    kind, path = next(((kind, getattr(options, kind)) for kind in kinds if getattr(options, kind)), ("", None))
    if options.sign:
        certificate.require_key(options.sign)
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
            verify.require_whole(len(request.backends), request.judged_ids, any(request.explore))
    folder = RunFolder.claim(options.resume or options.out, resume=bool(plan), anew=options.fresh)
    ends_at = began + options.deadline if options.deadline else float("inf")
    limits = Limits(options.workers, options.timeout, give_up_after=options.give_up_after, ends_at=ends_at)
    run = Run(request, folder, limits, expectations, explains=not options.no_explain)
    detail = outcome.Detail.QUIET if options.quiet else outcome.Detail.FULL if options.verbose else outcome.Detail.USUAL
    if not issuing:
        return run_and_report(run, as_json=options.json, resumed=plan, detail=detail)
    with installed.git_asked_before():
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
    seconds = json_report.load_report(options.durations).seconds if options.durations else {}
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
    except verify.Refused as reason:
        raise RunError(f"no {kind}: {reason}") from reason


@dataclass
class Issuing:
    kind: str  # certificate, record or submission
    path: Path  # receives it
    key: Path | None  # of SSH, which signs it; None if it is not signed
    pins: Pins | None = None  # what judges and what is judged, once the run is prepared

    def check(self, run: Run) -> None:
        with _refusals_of(self.kind):
            verify.require_real(run.facts[0], self.kind == "certificate")
            self.pins = _pins(run.facts[0])

    def write(self, run: summary.RunSummary, status: int, loaded: Mapping[str, str] = MappingProxyType({})) -> int:
        if self.pins is None:
            return status
        # What could not be judged, which leaves a run incomplete, is named by what is issued.
        if status and not (status == BROKEN and run.backends[0].outcome is summary.BackendOutcome.UNAVAILABLE):
            say(f"mla-conformance: no {self.kind}: the run failed or is incomplete", error=True)
            return status
        facts, today = run.backends[0].facts, datetime.date.today()
        code = libraries(loaded, parse_reference(facts.reference))
        try:
            if _pins(facts) != self.pins:
                raise verify.Refused("the backend, one of its packages or the harness changed during the run")
            issued = verify.record(run, today, _pins(facts, loaded), code, self.kind == "certificate")
        except (verify.Refused, InputError) as reason:
            say(f"mla-conformance: no {self.kind}: {reason}", error=True)
            return 1
        if self.kind == "submission":
            write_record(self.path, issued, certificate.sign(issued.seal, self.key) if self.key else "")
        else:
            text = json_report.to_text(issued)
            write_output(self.path, text)
            certificate.signature_of(self.path).unlink(missing_ok=True)
            if self.key:
                write_output(certificate.signature_of(self.path), certificate.sign(text, self.key))
        say(f"wrote {self.path}", error=True)
        return status


def _pins(facts: BackendFacts, loaded: Mapping[str, str] | None = None) -> Pins:
    return verify.committed(Pins.of(parse_reference(facts.reference), facts.versions, loaded))


def sanitize(request: RunRequest, options: argparse.Namespace) -> int:
    """The exit status is that of a run that judged nothing wherever the tool could not watch."""
    try:
        if request.device == "cpu":
            raise ToolUnavailable("compute-sanitizer watches a GPU, not a CPU: omit --device cpu")
        tool = Tool.found()
    except ToolUnavailable as error:
        say_wrapped(f"{options.sanitize} unavailable: {error}; nothing was checked")
        return BROKEN
    check, records, statuses = options.sanitize, options.submission, []
    for backend in request.backends:
        cases, most, what = choose(request, bool(options.capability), records, backend.name)
        if what:
            say_wrapped(f"{check} {backend.name}: {what}")
        watch = Watch(tool, check, backend.reference, "cuda", options.timeout or GPU_TIMEOUT)
        found = watch.calls([case.id for case in cases], most)
        for text in lines(watch, backend, found):
            say(text) if text.lstrip().startswith("replay: ") else say_wrapped(text)
        watched = [each for each in found.cases if not each.unavailable]
        if watched and records:
            write_sanitized(records, _kernel(watch, backend, found))
            say(f"wrote {records}", error=True)
        whole = 0 if watched and len(watched) == len(found.cases) else BROKEN
        statuses.append(1 if any(each.errors for each in watched) else whole)
    return 1 if 1 in statuses else max(statuses)


def lines(watch: Watch, backend: BackendReference, found: Watched) -> Iterator[str]:
    who = f"{watch.check} {backend.name}"
    for error, case in joined((each.case, each.errors) for each in found.cases):
        place = (f", {error.place}" if error.place else "") + (f", launched at {error.launch}" if error.launch else "")
        yield f"{who}: {error.kernel}: {error.cause}, {counted(error.count, 'time')}{place}"
        yield f"  replay: {replay_line(case, backend.reference)}"
    torchs = found.begin.environment.get("cuda", "") if found.begin else ""
    other = watch.tool.cuda and torchs and watch.tool.cuda.partition(".")[0] != torchs.partition(".")[0]
    by = f"{watch.tool}" + (f", torch of CUDA {torchs}" if other else "")
    if why := found.unavailable or ("" if found.cases else "it supports none of the cases here"):
        yield f"{who} unavailable: {by}: {why}"
    unwatched = (each for each in found.cases if each.unavailable)
    for why, cases in causes.grouped(unwatched, lambda each: each.unavailable).items():
        yield f"{who} unavailable for {counted(len(cases), 'case')}, such as {cases[0].case}: {by}: {why}"
    for each in found.cases:
        if each.is_clean:
            yield f"{who}: nothing reported of {each.case}, {each.seconds:.1f} s"
    clean, seconds = sum(each.is_clean for each in found.cases), sum(each.seconds for each in found.cases)
    refused = len(found.begin.unsupported) if found.begin else 0
    yield f"{who}: nothing reported of {counted(clean, 'case')}, {refused} unsupported, {seconds:.1f} s; no verdict"


def _kernel(watch: Watch, backend: BackendReference, found: Watched) -> certificate.SanitizedKernel:
    def placed(place: str) -> str:  # as another machine finds it
        path, colon, line = place.rpartition(":")
        return places.place_of(Path(path), backend.file) + colon + line if path else place

    assert found.begin is not None  # what was watched has begun
    errors = joined((each.case, each.errors) for each in found.cases)
    here = [{**vars(x), "place": placed(x.place), "launch": placed(x.launch), "case": case} for x, case in errors]
    return certificate.SanitizedKernel(
        suite=SUITE_VERSION,
        version=__version__,
        date=datetime.datetime.now(datetime.UTC).date().isoformat(),
        backend=backend.name,
        reference=backend.reference,
        device=found.begin.environment["device"],
        environment={**found.begin.environment, **this_machine()},
        versions=found.begin.versions,
        tool=watch.check,
        tool_version=watch.tool.version,
        tool_cuda=watch.tool.cuda,
        checked={each.case: each.seconds for each in found.cases if not each.unavailable},
        unchecked={each.case: each.unavailable for each in found.cases if each.unavailable},
        errors=tuple(certificate.SanitizerFinding(**each) for each in here),
    )


def choose(request: RunRequest, named: bool, records: Path | None, backend: str) -> tuple[Sequence[Case], int, str]:
    """Cases for a backend: those that are named, one for each set of kernels of its record, or small ones.

    Behind them how many of each capability and role it has to support, 0 for all, and what is left out, in words.
    """
    if request.cases:
        cases = sorted(request.cases, key=work_of)
        return cases[:MOST], 0, f"the {MOST} smallest of {len(cases)} cases" if len(cases) > MOST else ""
    kept = [] if named or records is None or not records.exists() else kept_records(records)
    certificates = (each.certificate for each in kept)
    traced = [each for each in certificates if each.backend == backend and each.traced.kernels]
    record = max(traced, key=lambda each: each.date, default=None)
    if record is not None and (found := _variants(record, request.cases_of)):
        sets, some = counted(len(found), "set"), min(MOST, len(found))
        return found[:MOST], 0, f"a case for {some} of {sets} of kernels that a profiler saw for suite {record.suite}"
    names = request.capabilities if named else ("memory_bounds",)
    return [case for name in names for case in sorted(request.cases_of(name), key=work_of)], 2, ""


def _variants(record: certificate.Certificate, cases_of: Callable[[str], Sequence[Case]]) -> list[Case]:
    """The smallest case of each set of kernels that passed and is fit for a tool; in front those that add kernels."""
    smallest: dict[frozenset[str], Case] = {}
    for name, names in record.traced.kernels.items():
        passed = [case for case in cases_of(name) if record.cases.get(case.id) is Status.PASS]
        passed = [case for case in passed if is_light(case) and case.far == "none"]
        if passed and not find_capability(name).probes_refusals:
            kernels, case = frozenset(Traced({name: names}).distinct), min(passed, key=work_of)
            smallest[kernels] = min(case, smallest.get(kernels, case), key=work_of)
    adding, further, seen = list[Case](), list[Case](), set[str]()
    for kernels, case in sorted(smallest.items(), key=lambda entry: work_of(entry[1])):
        (further if kernels <= seen else adding).append(case)
        seen |= kernels
    return adding + further

"""``certify --sanitize``: small cases under compute-sanitizer, one for each set of kernels that a record tells of."""

import argparse
import datetime
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from mla_conformance.backends.references import BackendReference
from mla_conformance.cases.case import Case
from mla_conformance.cases.work import is_light, work_of
from mla_conformance.certificate.certificate import Certificate, SanitizedKernel, SanitizerFinding
from mla_conformance.certificate.records import kept_records, write_sanitized
from mla_conformance.commands.console import BROKEN
from mla_conformance.engine.machine import this_machine
from mla_conformance.engine.request import RunRequest
from mla_conformance.engine.supervisor import GPU_TIMEOUT
from mla_conformance.files.places import place_of
from mla_conformance.judging.record import Traced, replay_line
from mla_conformance.judging.verdict import Status
from mla_conformance.report.causes import grouped
from mla_conformance.report.terminal import counted, say, say_wrapped
from mla_conformance.traits.sanitizer import Tool, ToolUnavailable, Watch, Watched, joined
from mla_conformance.version import SUITE_VERSION, __version__
from mla_conformance.vocabulary.capabilities import find_capability

MOST = 8  # cases: a tool makes calls some hundred times slower, and a process for it takes seconds to begin


def sanitize(request: RunRequest, options: argparse.Namespace) -> int:
    """The exit status is that of a run that judged nothing wherever the tool could not watch."""
    try:
        if request.device == "cpu":
            raise ToolUnavailable("compute-sanitizer watches a GPU, not a CPU: omit --device cpu")
        tool = Tool.found()
    except ToolUnavailable as error:
        _say(f"{options.sanitize} unavailable: {error}; nothing was checked")
        return BROKEN
    check, records, statuses = options.sanitize, options.submission, []
    for backend in request.backends:
        cases, most, what = choose(request, bool(options.capability), records, backend.name)
        if what:
            _say(f"{check} {backend.name}: {what}")
        watch = Watch(tool, check, backend.reference, "cuda", options.timeout or GPU_TIMEOUT)
        found = watch.calls([case.id for case in cases], most)
        _say(*lines(watch, backend, found))
        watched = [each for each in found.cases if not each.unavailable]
        if watched and records:
            write_sanitized(records, _kernel(watch, backend, found))
            say(f"wrote {records}", error=True)
        whole = 0 if watched and len(watched) == len(found.cases) else BROKEN
        statuses.append(1 if any(each.errors for each in watched) else whole)
    return 1 if 1 in statuses else max(statuses)


def _say(*texts: str) -> None:
    for text in texts:
        say(text) if text.lstrip().startswith("replay: ") else say_wrapped(text)


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
    for why, cases in grouped(unwatched, lambda each: each.unavailable).items():
        yield f"{who} unavailable for {counted(len(cases), 'case')}, such as {cases[0].case}: {by}: {why}"
    for each in found.cases:
        if each.is_clean:
            yield f"{who}: nothing reported of {each.case}, {each.seconds:.1f} s"
    clean, seconds = sum(each.is_clean for each in found.cases), sum(each.seconds for each in found.cases)
    refused = len(found.begin.unsupported) if found.begin else 0
    yield f"{who}: nothing reported of {counted(clean, 'case')}, {refused} unsupported, {seconds:.1f} s; no verdict"


def _kernel(watch: Watch, backend: BackendReference, found: Watched) -> SanitizedKernel:
    def placed(place: str) -> str:  # as another machine finds it
        path, colon, line = place.rpartition(":")
        return place_of(Path(path), backend.file) + colon + line if path else place

    assert found.begin is not None  # what was watched has begun
    errors = joined((each.case, each.errors) for each in found.cases)
    return SanitizedKernel(
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
        errors=tuple(
            SanitizerFinding(**{**vars(x), "place": placed(x.place), "launch": placed(x.launch), "case": case})
            for x, case in errors
        ),
    )


def choose(request: RunRequest, named: bool, records: Path | None, backend: str) -> tuple[Sequence[Case], int, str]:
    """Cases for a backend: those that are named, one for each set of kernels of its record, or small ones.

    Behind them how many of each capability and role it has to support, 0 for all, and what is left out, in words.
    """
    if request.cases:
        cases = sorted(request.cases, key=work_of)
        left = f"the {MOST} smallest of {len(cases)} cases" if len(cases) > MOST else ""
        return cases[:MOST], 0, left
    kept = [] if named or records is None or not records.exists() else kept_records(records)
    traced = [
        each.certificate for each in kept if each.certificate.backend == backend and each.certificate.traced.kernels
    ]
    record = max(traced, key=lambda each: each.date, default=None)
    if record is not None and (found := _variants(record, request.cases_of)):
        sets, some = counted(len(found), "set"), min(MOST, len(found))
        what = f"a case for {some} of {sets} of kernels that a profiler saw for suite {record.suite}"
        return found[:MOST], 0, what
    names = request.capabilities if named else ("memory_bounds",)
    return [case for name in names for case in sorted(request.cases_of(name), key=work_of)], 2, ""


def _variants(record: Certificate, cases_of: Callable[[str], Sequence[Case]]) -> list[Case]:
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

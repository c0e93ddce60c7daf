"""``certify --sanitize``: small cases under compute-sanitizer, which is no verdict of the suite's own."""

import datetime
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from mla_conformance.backends.references import BackendReference
from mla_conformance.certificate.records import write_sanitized
from mla_conformance.certificate.sanitized import SanitizedKernel, SanitizerFinding
from mla_conformance.commands.console import BROKEN
from mla_conformance.commands.sanitized_cases import choose
from mla_conformance.engine.devices import this_machine
from mla_conformance.engine.pool import GPU_TIMEOUT
from mla_conformance.engine.request import RunRequest
from mla_conformance.files.places import place_of
from mla_conformance.judging.record import replay_line
from mla_conformance.report.causes import grouped
from mla_conformance.report.terminal import columns, counted, say, wrapped
from mla_conformance.traits.sanitizer import Tool, ToolUnavailable, Watch, Watched
from mla_conformance.traits.sanitizer_output import joined
from mla_conformance.version import SUITE_VERSION, __version__


@dataclass(frozen=True)
class Sanitizing:
    """What is asked."""

    check: str  # the tool of compute-sanitizer
    named: bool  # whether capabilities were named
    timeout: float | None = None  # seconds for a process; None for what a case may take on a GPU
    records: Path | None = None  # file of records, which tells kernels and receives what is found; None for none


def sanitize(request: RunRequest, asked: Sanitizing) -> int:
    """Carry it out; the exit status is that of a run that judged nothing wherever the tool could not watch."""
    try:
        if request.device == "cpu":
            raise ToolUnavailable("compute-sanitizer watches a GPU, not a CPU: omit --device cpu")
        tool = Tool.found()
    except ToolUnavailable as error:
        _say(f"{asked.check} unavailable: {error}; nothing was checked")
        return BROKEN
    statuses = [_sanitized(tool, request, asked, backend) for backend in request.backends]
    return 1 if 1 in statuses else max(statuses)


def _sanitized(tool: Tool, request: RunRequest, asked: Sanitizing, backend: BackendReference) -> int:
    """One backend; its exit status."""
    chosen = choose(request, asked.named, asked.records, backend.name)
    if chosen.what:
        _say(f"{asked.check} {backend.name}: {chosen.what}")
    watch = Watch(tool, asked.check, backend.reference, "cuda", asked.timeout or GPU_TIMEOUT)
    found = watch.calls([case.id for case in chosen.cases], chosen.most)
    for text in lines(watch, backend, found):
        _say(text)
    watched = [each for each in found.cases if not each.unavailable]
    if watched and asked.records:
        write_sanitized(asked.records, _kernel(watch, backend, found))
        say(f"wrote {asked.records}", error=True)
    if any(each.errors for each in watched):
        return 1
    return 0 if watched and len(watched) == len(found.cases) else BROKEN


def _say(text: str) -> None:
    for line in [text] if text.lstrip().startswith("replay: ") else wrapped(text, columns()):
        say(line)


def lines(watch: Watch, backend: BackendReference, found: Watched) -> Iterator[str]:
    """What the tool said of a backend: each error once, with a case that shows it, and what says nothing."""
    who = f"{watch.check} {backend.name}"
    for error, case in joined((each.case, each.errors) for each in found.cases):
        place = (f", {error.place}" if error.place else "") + (f", launched at {error.launch}" if error.launch else "")
        yield f"{who}: {error.kernel}: {error.cause}, {counted(error.count, 'time')}{place}"
        yield f"  replay: {replay_line(case, backend.reference)}"
    for why, ids in _silent(found):
        yield f"{who} unavailable{ids}: {_by(watch, found)}: {why}"
    for each in found.cases:
        if each.is_clean:
            yield f"{who}: nothing reported of {each.case}, {each.seconds:.1f} s"
    clean, seconds = sum(each.is_clean for each in found.cases), sum(each.seconds for each in found.cases)
    refused = len(found.begin.unsupported) if found.begin else 0
    yield f"{who}: nothing reported of {counted(clean, 'case')}, {refused} unsupported, {seconds:.1f} s; no verdict"


def _silent(found: Watched) -> Iterator[tuple[str, str]]:
    """Why nothing is known, and of which cases."""
    if found.unavailable:
        yield found.unavailable, ""
    elif not found.cases:
        yield "it supports none of the cases here", ""
    silent = grouped((each for each in found.cases if each.unavailable), lambda each: each.unavailable)
    for why, cases in silent.items():
        yield why, f" for {counted(len(cases), 'case')}, such as {cases[0].case}"


def _by(watch: Watch, found: Watched) -> str:
    """The tool, and the CUDA of torch where that is another one."""
    torchs = found.begin.environment.get("cuda", "") if found.begin else ""
    other = watch.tool.cuda and torchs and watch.tool.cuda.partition(".")[0] != torchs.partition(".")[0]
    return f"{watch.tool}" + (f", torch of CUDA {torchs}" if other else "")


def _kernel(watch: Watch, backend: BackendReference, found: Watched) -> SanitizedKernel:
    """As its record's line holds it."""
    assert found.begin is not None  # what was watched has begun
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
        errors=_reported(found, backend),
    )


def _reported(found: Watched, backend: BackendReference) -> tuple[SanitizerFinding, ...]:
    """With places as another machine finds them."""
    return tuple(
        SanitizerFinding(
            kernel=error.kernel,
            cause=error.cause,
            count=error.count,
            place=_placed(error.place, backend),
            launch=_placed(error.launch, backend),
            case=case,
        )
        for error, case in joined((each.case, each.errors) for each in found.cases)
    )


def _placed(place: str, backend: BackendReference) -> str:
    path, colon, line = place.rpartition(":")
    return place_of(Path(path), backend.file) + colon + line if path else place

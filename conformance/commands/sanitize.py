"""``certify --sanitize``: small cases under compute-sanitizer, which is no verdict of the suite's own."""

from collections.abc import Iterator, Sequence

from mla_conformance.backends.references import BackendReference
from mla_conformance.cases.case import Case
from mla_conformance.cases.work import work_of
from mla_conformance.commands.console import BROKEN
from mla_conformance.engine.request import RunRequest
from mla_conformance.engine.run import GPU_TIMEOUT
from mla_conformance.judging.record import replay_line
from mla_conformance.report.terminal import columns, counted, say, wrapped
from mla_conformance.traits.sanitizer import Sanitized, by_error, program, sanitized

_SMALL = "memory_bounds"
"""The capability whose cases are taken where none is named."""
_CASES = 2
"""Of each capability and role: the tool makes a call some hundred times slower."""


def sanitize(request: RunRequest, tool: str, named: bool, timeout: float | None) -> int:
    """Carry it out; the exit status is that of a run that judged nothing wherever the tool could not watch.

    Args:
        request: backends and capabilities.
        tool: of compute-sanitizer.
        named: whether capabilities were named.
        timeout: seconds for a case.
    """
    path = program()
    if not path or request.device == "cpu":
        why = "compute-sanitizer watches a GPU, not a CPU" if path else "compute-sanitizer is not installed here"
        say(f"{tool} unavailable: {why}; nothing was checked")
        return BROKEN
    cases = list(_small(request.capabilities if named else (_SMALL,), request))
    seconds = timeout or GPU_TIMEOUT
    statuses = [_checked(path, tool, backend, cases, seconds) for backend in request.backends]
    return 1 if 1 in statuses else max(statuses)


def _small(capabilities: Sequence[str], request: RunRequest) -> Iterator[Case]:
    for name in capabilities:
        taken: dict[str, int] = {}
        for case in sorted(request.cases_of(name), key=work_of):
            if taken.setdefault(case.role, 0) < _CASES:
                taken[case.role] += 1
                yield case


def _checked(path: str, tool: str, backend: BackendReference, cases: Sequence[Case], seconds: float) -> int:
    """One backend; its exit status."""
    found = [sanitized(path, tool, backend.reference, case.id, "cuda", seconds) for case in cases]
    for text in lines(tool, backend, found):
        for line in [text] if text.lstrip().startswith("replay: ") else wrapped(text, columns()):
            say(line)
    watched = [each for each in found if not each.unavailable and not each.unsupported]
    if any(each.errors for each in watched):
        return 1
    return 0 if watched and not any(each.unavailable for each in found) else BROKEN


def lines(tool: str, backend: BackendReference, found: list[Sanitized]) -> Iterator[str]:
    """What the tool said of a backend: each error once, with a case that shows it, and what says nothing."""
    for error, case in by_error(found):
        place = (f", {error.place}" if error.place else "") + (f", launched at {error.launch}" if error.launch else "")
        yield f"{tool} {backend.name}: {error.kernel}: {error.cause}, {counted(error.count, 'time')}{place}"
        yield f"  replay: {replay_line(case, backend.reference)}"
    silent: dict[str, list[str]] = {}
    for each in found:
        if each.unavailable:
            silent.setdefault(each.unavailable, []).append(each.case)
    for why, ids in silent.items():
        yield f"{tool} {backend.name} unavailable for {counted(len(ids), 'case')}, such as {ids[0]}: {why}"
    clean = sum(not (each.errors or each.unavailable or each.unsupported) for each in found)
    refused = sum(each.unsupported for each in found)
    yield f"{tool} {backend.name}: nothing reported of {counted(clean, 'case')}, {refused} unsupported; no verdict"

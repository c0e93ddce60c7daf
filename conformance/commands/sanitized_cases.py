"""Which cases are called under a sanitizer: small ones, where a record tells it one for each set of kernels."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from mla_conformance.cases.case import Case
from mla_conformance.cases.work import is_light, work_of
from mla_conformance.certificate.certificate import Certificate
from mla_conformance.certificate.records import kept_records
from mla_conformance.engine.request import RunRequest
from mla_conformance.judging.record import Traced
from mla_conformance.judging.verdict import Status
from mla_conformance.report.terminal import counted
from mla_conformance.vocabulary.capabilities import find_capability

MOST = 8
"""Cases of a backend: a tool makes calls some hundred times slower, and a process for it takes seconds to begin."""
_OF_A_ROLE = 2
_SMALL = "memory_bounds"
"""The capability whose cases are taken where nothing else says which."""


@dataclass(frozen=True)
class ChosenCases:
    """What is called."""

    cases: tuple[Case, ...]  # candidates, those to be called first in front
    most: int = 0  # how many of each capability and role the backend has to support; 0 for all
    what: str = ""  # in words, where something is left out


def choose(request: RunRequest, named: bool, records: Path | None, backend: str) -> ChosenCases:
    """The cases for a backend.

    Args:
        request: names capabilities or cases.
        named: whether capabilities were named.
        records: file of records, of which the newest of the backend that names kernels tells them; it may not be there.
        backend: its name.
    """
    if request.cases:
        cases = sorted(request.cases, key=work_of)
        left = f"the {MOST} smallest of {len(cases)} cases" if len(cases) > MOST else ""
        return ChosenCases(tuple(cases[:MOST]), what=left)
    record = None if named or records is None or not records.exists() else _newest_traced(records, backend)
    if record is not None and (found := _variants(record, request.cases_of)):
        said = counted(len(found), "set"), min(MOST, len(found))
        what = f"a case for {said[1]} of {said[0]} of kernels that a profiler saw for suite {record.suite}"
        return ChosenCases(tuple(found[:MOST]), what=what)
    names = request.capabilities if named else (_SMALL,)
    small = (case for name in names for case in sorted(request.cases_of(name), key=work_of))
    return ChosenCases(tuple(small), _OF_A_ROLE)


def _newest_traced(records: Path, backend: str) -> Certificate | None:
    """The newest record of a backend that names kernels."""
    known = (each.certificate for each in kept_records(records) if each.certificate.backend == backend)
    return max((each for each in known if each.traced.kernels), key=lambda each: each.date, default=None)


def _variants(record: Certificate, cases_of: Callable[[str], Sequence[Case]]) -> list[Case]:
    """The smallest case of each set of kernels; those in front add kernels that none before them runs."""
    smallest: dict[frozenset[str], Case] = {}
    for kernels, case in _traced_cases(record, cases_of):
        smallest[kernels] = min(case, smallest.get(kernels, case), key=work_of)
    adding, further, seen = list[Case](), list[Case](), set[str]()
    for kernels, case in sorted(smallest.items(), key=lambda entry: work_of(entry[1])):
        (further if kernels <= seen else adding).append(case)
        seen |= kernels
    return adding + further


def _traced_cases(
    record: Certificate, cases_of: Callable[[str], Sequence[Case]]
) -> Iterator[tuple[frozenset[str], Case]]:
    """The kernels of each capability, and its smallest case that passed; none of those that must be refused."""
    for name, kernels in record.traced.kernels.items():
        passed = [case for case in cases_of(name) if record.cases.get(case.id) is Status.PASS and _is_small(case)]
        if passed and not find_capability(name).probes_refusals:
            yield frozenset(Traced({name: kernels}).distinct), min(passed, key=work_of)


def _is_small(case: Case) -> bool:
    """Whether it is fit for a tool: few operations, and no operand far behind another one in memory."""
    return is_light(case) and case.far == "none"

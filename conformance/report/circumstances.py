"""In which kind of cases a backend fails: facts that its failures share, and that most passes lack. No torch."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import combinations

from mla_conformance.cases.case import Case
from mla_conformance.judging.record import EXPLORED, Record
from mla_conformance.judging.verdict import Status

_FEWEST = 3
"""Failures that can have something in common which is no accident of a few cases."""
_MEASURES = ("capability", "seed", "q", "kv", "kscale", "oscale", "workspace", "spare", "model")
"""Fields whose single values are no kind of case."""
_MOST_PASSING = 4
"""One of so many passing cases may have what all failures have, and it is still told."""


def circumstances(failures: Sequence[Record], records: Iterable[Record]) -> str:
    """What the failures of one cause have in common, and how many such cases pass; empty if it tells them not apart.

    Args:
        failures: of one cause.
        records: what became of all cases of the same backend.
    """
    if len(failures) < _FEWEST:
        return ""
    failing = [Case.parse(record.case) for record in failures]
    least = {name: min(sizes) for name, *sizes in zip(_SIZES, *map(_sizes, failing), strict=True)}
    shared = frozenset.intersection(*(_facts(case, least) for case in failing))
    roles = {case.role for case in failing}
    passed = (record for record in records if record.status is Status.PASS and record.capability != EXPLORED)
    cases = map(Case.parse, (record.case for record in passed))
    passing = [_facts(case, least) for case in cases if case.role in roles]
    lacking = [facts & shared for facts in passing]
    told, remaining = _telling(sorted(shared), lacking)
    if remaining == len(lacking) or remaining > len(failing) or _MOST_PASSING * remaining > len(lacking):
        return ""
    return f"only with {' and '.join(sorted(told))}: {len(failing)} such cases fail so, {remaining} pass"


def _telling(shared: Sequence[str], passing: Sequence[frozenset[str]]) -> tuple[frozenset[str], int]:
    """The fact, or the two, that fewest passing cases have, and how many; two where that is no more than half."""

    def fewest(count: int) -> tuple[frozenset[str], int]:
        counted = (
            (facts, sum(facts <= each for each in passing)) for facts in map(frozenset, combinations(shared, count))
        )
        return min(counted, key=lambda each: each[1], default=(frozenset(), len(passing)))

    one, two = fewest(1), fewest(2)
    return two if 2 * two[1] + 2 <= one[1] else one


_SIZES = ("keys", "heads")


def _sizes(case: Case) -> tuple[int, int]:
    """The longest request, and the heads."""
    return max(map(sum, zip(case.q, case.kv or (0,) * len(case.q), strict=True))), case.heads


def _facts(case: Case, least: Mapping[str, int]) -> frozenset[str]:
    """What kind of case it is: its fields that have few values, what its lengths are like, and what it has at least."""
    values = {name: getattr(case, name) for name in case.defaults() if name not in _MEASURES}
    named = (f"{name}={int(value) if isinstance(value, bool) else value}" for name, value in values.items())
    sizes = zip(_SIZES, _sizes(case), strict=True)
    large = (f"{least[name]} {name} or more" for name, size in sizes if size >= least[name])
    return frozenset((*named, *large, *_shapes(case)))


def _shapes(case: Case) -> Iterator[str]:
    kinds = {
        "several requests": len(case.q) > 1,
        "several query tokens": max(case.q) > 1,
        "different query lengths": len(set(case.q)) > 1,
        "an empty context": 0 in case.kv,
        "odd numbers of heads": case.heads % 2 == 1,
        "heads between powers of two": bool(case.heads & (case.heads - 1)),
    }
    return (kind for kind, holds in kinds.items() if holds)

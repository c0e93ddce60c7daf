"""Pairs that a backend claims: counted of what it declares, held against what has a verdict, told where they differ."""

from mla_conformance.cases.case import Case
from mla_conformance.cases.covering import Pairs
from mla_conformance.judging.record import Record
from mla_conformance.judging.verdict import Status
from mla_conformance.report.outcome import judged_of_claimed
from mla_conformance.report.pairs import judged_pairs
from mla_conformance.vocabulary.arrays import SPACES, array_of

NAME = "indexer_combinations"
SPACE, ARRAY = SPACES[NAME], array_of(NAME)[:60]


def records(cases: tuple[Case, ...], status: Status = Status.PASS) -> list[Record]:
    return [Record("MINE", "MINE", case.capability, case.id, status) for case in cases]


def held(cases: tuple[Case, ...]) -> int:
    return len(Pairs(SPACE, map(SPACE.row_of, cases)))


def test_what_has_a_verdict_is_judged_whatever_it_is() -> None:
    pairs = judged_pairs([*records(ARRAY[:30]), *records(ARRAY[30:], Status.FAIL)], [])
    assert list(pairs) == [SPACE.role]
    assert (pairs[SPACE.role].claimed, pairs[SPACE.role].judged) == (held(ARRAY), held(ARRAY))
    assert pairs[SPACE.role].not_judged == ()


def test_what_is_not_declared_is_not_claimed() -> None:
    found = judged_pairs([*records(ARRAY[:30]), *records(ARRAY[30:], Status.UNSUPPORTED)], [])[SPACE.role]
    assert (found.claimed, found.judged) == (held(ARRAY[:30]), held(ARRAY[:30]))
    assert judged_pairs(records(ARRAY, Status.UNSUPPORTED), []) == {}


def test_what_lacked_memory_or_a_verdict_is_claimed_and_named() -> None:
    lacking = records(ARRAY[30:], Status.UNAVAILABLE)
    found = judged_pairs([*records(ARRAY[:30]), *lacking], [])[SPACE.role]
    assert (found.claimed, found.judged) == (held(ARRAY), held(ARRAY[:30]))
    assert len(found.not_judged) == found.claimed - found.judged > 0
    assert all(pair.count("=") == 2 and " · " in pair for pair in found.not_judged)
    fitted = [case.id for case in ARRAY[30:]]
    assert judged_pairs(records(ARRAY[:30]), fitted)[SPACE.role] == found


def test_pairs_are_counted_where_the_array_was_asked_alone() -> None:
    assert judged_pairs([Record("MINE", "MINE", "lse", "lse:q=[4]", Status.PASS)], []) == {}


def test_a_backend_tells_what_it_claims_and_a_pair_that_was_not_judged() -> None:
    whole = judged_pairs(records(ARRAY), [])
    assert judged_of_claimed(whole) == f"pairs of classes claimed {held(ARRAY):,}, judged {held(ARRAY):,}"
    lacking = judged_pairs([*records(ARRAY[1:]), *records(ARRAY[:1], Status.UNAVAILABLE)], [])
    (due,) = records(ARRAY[:1], Status.UNSUPPORTED)
    due = due.with_fields(message="due on a GPU: 3e+08 operations")
    assert judged_of_claimed(whole, [due, due]).endswith("; 2 cases due on a GPU, not judged here")
    said = judged_of_claimed(lacking)
    assert said.endswith(f"; not judged, for example: {SPACE.role} {lacking[SPACE.role].not_judged[0]}")

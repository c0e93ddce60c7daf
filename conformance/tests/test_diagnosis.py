"""What a failure is said to look like: known defects by name, other ones as unknown, and how far an error reaches."""

import fnmatch
import re
from functools import cache
from itertools import count
from typing import Any
from unittest.mock import Mock

import pytest
import torch

from mla_conformance.backends.eager import EagerPrefillBackend
from mla_conformance.backends.eager_decode import EagerDecodeBackend
from mla_conformance.backends.eager_indexer import EagerIndexerBackend
from mla_conformance.backends.roles import ROLES, Role
from mla_conformance.cases.case import Case
from mla_conformance.defects.known import known_defects
from mla_conformance.diagnosis import explain, suspects
from mla_conformance.diagnosis.explain import ALIKE, Candidate, Failure, ReportedCauses, candidates
from mla_conformance.diagnosis.reach import Behaviour, likeness, of_form, of_queries, of_requests, with_reach
from mla_conformance.judging.diagnosis import extent
from mla_conformance.judging.golden import JudgedRows
from mla_conformance.judging.record import COMPARED, INDISTINCT, UNCOMPARED, UNLIKE, Check, Record
from mla_conformance.report.causes import causes, symptom
from mla_conformance.tests.drawn import CONTEXT, CPU, changed, subject_of
from mla_conformance.trials.trial import Trial, judged_trial

candidates(Role.PREFILL)  # which makes the suspects, each where its reference finds it
Base2Lse: Any = vars(suspects)["Base2Lse"]
RotatedHeads: Any = vars(suspects)["RotatedHeads"]
KeyScaleLeftOut: Any = vars(suspects)["KeyScaleLeftOut"]
LeakedKey: Any = vars(suspects)["LeakedKey"]
EMPTY = "empty_rows:call=context_chunk;dims=small;heads=3;q=[0,3,4];kv=[9,0,33]"
SUSPECT_CASES = ("new_tokens:dims=small;heads=3;q=[70,130];scale=50", EMPTY)


def test_each_entry_of_the_table_is_of_a_suspect_and_covers_known_defects() -> None:
    made = {base.__name__ for role in ROLES.values() for each in candidates(role) for base in each.kernel.__mro__}
    assert suspects.TOLD["covers"].keys() <= suspects.TOLD["sentences"].keys() <= made
    covered = " ".join(suspects.TOLD["covers"].values()).split()
    assert all(fnmatch.filter(known_defects(), pattern) for pattern in covered)


@cache
def tried(kernel: str | type, case: str) -> tuple[Trial, Record]:
    if isinstance(kernel, type):
        return judged_trial(subject_of(kernel), Case.parse(case), CONTEXT)
    return explain.attempted(kernel, Case.parse(case), CONTEXT, CPU)


@cache
def behaved(kernel: str | type, case: str) -> Behaviour:
    return Behaviour.of(*tried(kernel, case))


NAMED = re.compile(
    "0 times NaN|Nothing bounds the keys|the block after|after its own|first token of a request|Heads are rotated|"
    "The LSE is in base 2"
)


@pytest.fixture
def judged_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """A candidate is judged once on a case; failures are compared with those of these tests and every fifth beside."""

    def few(role: Role) -> tuple[Candidate, ...]:
        every = candidates(role)
        return tuple(each for each in every if each in every[::5] or NAMED.search(each.reported))

    monkeypatch.setattr(explain, "candidates", few)
    monkeypatch.setattr(explain, "behaviour", lambda candidate, failure: behaved(candidate.reference, failure.case.id))


def told(trial: Trial, record: Record, patience: float = explain.PATIENCE) -> str:
    return explain.explain(Failure.of(trial, record), patience)


@pytest.mark.parametrize("text", [SUSPECT_CASES[1], "indexer_topk:call=index_topk;heads=4;q=[3,2];kv=[70,90];topk=16"])
def test_what_fails_is_explained_by_itself_or_by_what_covers_it(text: str) -> None:
    everyone = candidates(Case.parse(text).role)
    failing = [each for each in everyone if tried(each.reference, text)[1].check in COMPARED]
    assert failing
    for candidate in failing:
        own = behaved(candidate.reference, text)
        found = [each for each in everyone if likeness(own, behaved(each.reference, text)) >= ALIKE]
        assert likeness(own, own) == 1.0
        covered = any(candidate.id in other.covers for other in found)
        reported = explain.describe(found, certain=True)
        named = candidate.sentence in reported or (reported == INDISTINCT and len(found) > 2)
        assert covered or named, f"{candidate.sentence}: {reported}"


SQUARED_WEIGHTS = changed(EagerPrefillBackend, _exp=lambda exp, x: exp(x).square())  # after the softmax's shift


@pytest.mark.usefixtures("judged_once")
@pytest.mark.parametrize(
    ("id", "named"),
    [
        ("tma-overread-uninitialised-kv-tile", "weights of 0, and 0 times NaN"),
        ("paged-flex-missing-upper-bound-mask", "Nothing bounds the keys"),
    ],
)
def test_large_numbers_in_place_of_nan_tell_what_is_read_from_what_is_used(id: str, named: str) -> None:
    said = told(*tried(known_defects()[id].reference, "decode:dims=small;heads=2;q=[1,1];kv=[130,40];lse=0"))
    is_read = " 0 times NaN" in named
    assert named in said and said.startswith("perhaps ") == is_read and (" 0 times NaN" in said) == is_read


@pytest.mark.usefixtures("judged_once")
@pytest.mark.parametrize(
    ("mistake", "where", "named"),
    [
        ("BlockAfter", "request 1 fills its last page, so that blocks of others", "each page from the block after the"),
        ("LeakedToken", "in each request exactly the last query is right", "a query sees the token after its own"),
        ("FirstTokenDropped", "4 of 4 rows", "The first token of a request's cache is dropped"),
    ],
)
def test_the_block_table_the_last_query_and_the_first_key_are_named(mistake: str, where: str, named: str) -> None:
    kernel = vars(suspects)[mistake]
    case = "decode_multi_token:call=decode;dims=small;heads=2;q=[3,1];kv=[13,31];page=16"
    said = told(*(found := tried(kernel, case)))
    assert where in with_reach(*found).message
    assert named in said and not said.startswith("perhaps ")


@pytest.mark.parametrize(
    ("message", "said"),
    [
        ("decode: expected output of shape [3, 2, 512], got [3, 2, 576]", "V is the first kv_lora_rank = 512 columns"),
        ("decode: expected output of shape [3, 2, 512], got [2, 3, 512]", "tokens and heads are swapped"),
        ("decode: expected 2 tensor(s), got (Tensor)", "the results are (output, LSE)"),
        ("decode: expected output of shape [3, 2, 512], got [3, 2, 7]", ""),
    ],
)
def test_a_wrong_form_says_what_it_is_the_form_of(message: str, said: str) -> None:
    assert said in (found := of_form(message, Case.parse("decode:q=[1,2];kv=[5,6]"))) and bool(said) == bool(found)


def test_an_output_whose_form_does_not_tell_that_it_is_transposed_is_said_to_be() -> None:
    def heads_first(run: Any, *operands: torch.Tensor) -> Any:
        output, lse = run(*operands)
        return output.transpose(0, 1), lse

    kernel = changed(EagerDecodeBackend, run_decode=heads_first)
    trial, record = tried(kernel, "decode:dims=small;heads=2;q=[1,1];kv=[13,31];page=16")
    assert record.check == Check.OUTPUT and "tokens and heads are swapped" in with_reach(trial, record).message


EXACTLY = "exactly the requests with"
BOUND = f"{EXACTLY} 48 keys or more are wrong, those with 32 or fewer are right"


@pytest.mark.parametrize(
    ("found", "keys", "said"),
    [
        (["..x", "....x"], [9, 9], ["in each request exactly the last query is wrong"]),
        (["x..", "x"], [9, 9], ["in each request exactly the first query is wrong"]),
        (["..xx", "..x", "."], [9, 9, 9], ["in each request the queries from 2 on are wrong"]),
        (["x.", "x."], [9, 9], []),  # which of the two it is, is not known
        (["x.x.", "..x"], [9, 9], []),
        ([".", "x", ".", "x"], [16, 17, 32, 40], [f"{EXACTLY} a last page of 16 tokens that is not full are wrong"]),
        (["."] * 3 + ["x"] * 3, [16, 9, 32, 64, 48, 65], [BOUND]),
        ([".", "x", "x"], [9, 9, 9], ["only request 0 is right"]),
        ([".", "x"], [9, 30], []),
        (["xx", "xxx"], [16, 9], []),
    ],
)  # fmt: skip
def test_where_wrong_numbers_are_is_told_if_it_is_regular(found: list[str], keys: list[int], said: list[str]) -> None:
    case = Case.parse("decode:q=[1];kv=[5];page=16")
    rows = [[query == "x" for query in each] for each in found]
    assert [*list(of_queries(rows))[:1], *list(of_requests(rows, keys, case))[:1]] == said


def at_places(finish: Any, state: Any) -> Any:
    output, lse = finish(state)
    output[-1, -1, -1] = torch.nan
    return output, lse


def in_one_request(finish: Any, state: Any) -> Any:
    return finish(state) if state.total.shape[1] == 70 else EagerPrefillBackend._finish(finish.args[0], state)


def and_more(finish: Any, state: Any) -> Any:
    output, lse = finish(state)
    output[::40] *= 1.05
    return output, lse


ONE_NAN = changed(EagerPrefillBackend, _finish=at_places)
ROTATED = type("Rotated", (RotatedHeads, EagerPrefillBackend), {})
TOP_K = "indexer_topk:call=index_topk;heads=4;q=[2,1];kv=[70,9];topk=5"
NEW: dict[str, tuple[type, str, str]] = {
    "squared weights": (SQUARED_WEIGHTS, SUSPECT_CASES[0], UNLIKE),
    "one nan": (ONE_NAN, SUSPECT_CASES[0], UNLIKE),
    "one request": (changed(ROTATED, _finish=in_one_request), SUSPECT_CASES[0], UNLIKE),
    "two at once": (type("Both", (RotatedHeads, Base2Lse, EagerPrefillBackend), {}), SUSPECT_CASES[0], UNLIKE),
    "negated": (changed(EagerIndexerBackend, _scores=lambda scores, *operands: -scores(*operands)), TOP_K, UNLIKE),
    "raises": (changed(EagerPrefillBackend, _batch=Mock(side_effect=RuntimeError("no pages"))), SUSPECT_CASES[0], ""),
}


@pytest.mark.usefixtures("judged_once")
@pytest.mark.parametrize("mistake", NEW)
def test_what_is_new_or_fits_in_part_is_said_to_be_new(mistake: str) -> None:
    """A mistake at one place, or beside another one, is not the mistake that candidates make everywhere."""
    kernel, case, said = NEW[mistake]
    trial, record = tried(kernel, case)
    assert record.failed and told(trial, record) == said


def test_what_is_nearly_like_a_mistake_is_neither_that_nor_unlike_it(monkeypatch: pytest.MonkeyPatch) -> None:
    leaked = tuple(each for each in candidates(Role.PREFILL) if each.kernel is LeakedKey)
    monkeypatch.setattr(explain, "candidates", lambda role: leaked)
    trial, record = tried(changed(LeakedKey, _finish=and_more), SUSPECT_CASES[0])
    share = likeness(Behaviour.of(trial, record), behaved(LeakedKey, SUSPECT_CASES[0]))
    assert explain.UNALIKE < share < ALIKE and told(trial, record) == INDISTINCT
    assert told(*tried(LeakedKey, SUSPECT_CASES[0])) == leaked[0].reported


SYMPTOMS = {
    "DividesByZero": "the output is NaN where a number is expected",
    "PositiveInfinity": "the LSE is +inf where -inf is expected",
    "ZeroLse": "the LSE is a number where -inf is expected",
    "empty_chunk_finite_lse_garbage_out": "the output is not 0 where no key is visible, as in a request without tokens",
}


def test_what_is_wrong_with_rows_without_keys_is_told_as_it_was_seen() -> None:
    for name, said in SYMPTOMS.items():
        candidate = next(each for each in candidates(Role.PREFILL) if each.kernel.__name__.startswith(name))
        _, record = tried(candidate.reference, SUSPECT_CASES[1])
        assert record.check == Check.MASK and symptom(record) == said


CODES = "kv_cache_fp8:call=decode;q=[1,1];kv=[127,40];page=128;data=needle;cache=fp8"


def test_a_wider_mistake_is_told_with_a_perhaps_and_not_beside_one_that_holds_nearby(monkeypatch: Any) -> None:
    """On pages of 128 alone, a scale that is left out there gives the numbers of one that is left out everywhere."""
    by_id = {each.id: each for each in candidates(Role.DECODE)}
    narrow = by_id["decode-codes-of-large-pages-unscaled"]
    (wide,) = (each for each in candidates(Role.DECODE) if each.kernel is KeyScaleLeftOut)
    for kernel, asked, said in (
        (narrow, (wide,), f"perhaps {wide.reported}"),
        (narrow, (wide, narrow), narrow.reported),
        (wide, (wide,), wide.reported),
        (wide, (wide, narrow), wide.reported),
    ):
        monkeypatch.setattr(explain, "candidates", lambda role, asked=asked: asked)
        assert told(*tried(kernel.reference, CODES)) == said


@pytest.mark.usefixtures("judged_once")
def test_what_explains_another_failure_is_claimed_where_it_fits_only_and_no_time_is_told(monkeypatch: Any) -> None:
    base_2 = next(each for each in candidates(Role.PREFILL) if issubclass(each.kernel, Base2Lse))
    reported = ReportedCauses(["Heads are rotated by one", base_2.reported])
    assert reported.explain(Failure.of(*tried(base_2.reference, SUSPECT_CASES[0]))) == base_2.reported
    assert reported.explain(Failure.of(*tried(ONE_NAN, SUSPECT_CASES[0]))) == ""
    trial, record = tried(SQUARED_WEIGHTS, SUSPECT_CASES[0])
    monkeypatch.setattr(explain, "PATIENCE", -1.0)
    assert told(trial, record, patience=-1.0) == UNCOMPARED
    assert ReportedCauses(["It is wrong"]).explain(Failure.of(trial, record)) == ""
    uncompared = record.with_fields(explanation=UNCOMPARED)
    assert not uncompared.is_explained and uncompared.remarks == (UNCOMPARED,)
    (cause,) = causes([uncompared])
    assert cause.sentence == f"the LSE is wrong; {UNCOMPARED}"


@pytest.mark.usefixtures("judged_once")
def test_what_fitted_before_time_ran_out_is_told_with_a_perhaps(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every look at the clock takes a second here, and one stands before each candidate."""
    (rotated,) = (each for each in candidates(Role.PREFILL) if each.reported == "Heads are rotated by one")
    asked = (rotated, *candidates(Role.PREFILL)[:9])
    monkeypatch.setattr(explain, "candidates", lambda role: asked)
    monkeypatch.setattr("time.thread_time", count().__next__)
    trial, record = tried(rotated.reference, SUSPECT_CASES[0])
    assert told(trial, record, patience=3.0) == f"perhaps {rotated.reported} (not every known defect was compared)"
    assert told(*tried(SQUARED_WEIGHTS, SUSPECT_CASES[0]), patience=3.0) == UNCOMPARED


def test_a_failure_says_what_became_of_the_other_half() -> None:
    halves = {"Base2Lse": "the output is right", "NormalisedTwice": "the LSE is right", "ScaleLeftOut": "as well"}
    for name, said in halves.items():
        candidate = next(each for each in candidates(Role.PREFILL) if each.kernel.__name__.startswith(name))
        assert f"{said} (SPEC " in tried(candidate.reference, SUSPECT_CASES[0])[1].message
        _, record = tried(candidate.reference, f"{SUSPECT_CASES[0]};lse=0")
        assert all(half not in record.message for half in ("the LSE is right", "the output is"))


def test_an_extent_counts_requests_rows_heads_and_columns() -> None:
    rows = JudgedRows((0, 4, 4, 9))
    wrong = torch.zeros(9, 3, 16, dtype=torch.bool)
    wrong[5:7, 1, 3:6] = True
    first = "first at request 2, query 1, head 1"
    where = "wrong in 1 of 3 requests, 2 of 9 rows (5 to 6), "
    assert extent(rows, wrong) == f"{where}1 of 3 heads, 3 of 16 columns (3 to 5), {first}"
    every = "wrong in 2 of 3 requests, 9 of 9 rows, 3 of 3 heads, first at request 0, query 0, head 0"
    assert extent(rows, wrong[..., 0] | True) == every
    assert extent(rows, wrong[:, 1, 3]) == f"{where}first at request 2, query 1"
    assert extent(rows, wrong.transpose(1, 2).contiguous().transpose(1, 2)) == extent(rows, wrong)
    behind = torch.zeros(9, 3, dtype=torch.bool)
    behind[4:, 1:] = True
    assert "5 of 9 rows (from 4 on), 2 of 3 heads (from 1 on)" in extent(rows, behind)

"""Cases for what a kernel declares: fitted to hold all its pairs, and explored, behind each failure and in time."""

from collections.abc import Callable, Sequence
from functools import cache, partial
from itertools import compress, islice
from pathlib import Path
from typing import Any

import pytest
import torch

from mla_conformance.backends.eager import EagerPrefillBackend
from mla_conformance.backends.kernel import DeviceCapability
from mla_conformance.backends.loading import load_role
from mla_conformance.backends.references import BackendReference, parse_reference
from mla_conformance.backends.roles import Role
from mla_conformance.cases.case import Case
from mla_conformance.cases.covering import Pairs
from mla_conformance.cases.fitting import Region, fit
from mla_conformance.cases.sharding import Extent
from mla_conformance.cases.space import Row
from mla_conformance.cases.work import LARGE_CPU_WORK, work_of
from mla_conformance.engine.journal import RunFolder
from mla_conformance.engine.messages import Step, Told
from mla_conformance.engine.request import RunRequest
from mla_conformance.engine.run import Run
from mla_conformance.files.whole import InputError
from mla_conformance.judging.explored import Explorations, Explored
from mla_conformance.judging.record import BackendFacts, Check, Record, Status
from mla_conformance.problems.operands import TORCH_DTYPES
from mla_conformance.report.summary import judged_pairs
from mla_conformance.roles.definition import DEFINITIONS
from mla_conformance.tests import drawn
from mla_conformance.trials.explore import explore
from mla_conformance.trials.facts import region_of
from mla_conformance.trials.subject import Subject
from mla_conformance.trials.trial import Context, judge_one
from mla_conformance.vocabulary.arrays import SPACES, could_be_fitted
from mla_conformance.vocabulary.capabilities import CAPABILITIES, listed

Fails = Callable[[Case], str]
NARROW = type("Narrow", (EagerPrefillBackend,), {"supported_dtypes": [torch.bfloat16]})
NOTHING = type("Nothing", (EagerPrefillBackend,), {"supported_dtypes": [torch.float64]})


@cache
def subject_of(kernel: type) -> tuple[Subject, Region]:
    subject = drawn.subject_of(kernel)
    return subject, region_of(subject, SPACES["combinations"])


def drawn_in(
    monkeypatch: pytest.MonkeyPatch, fails: Fails, extent: Extent, *, kernel: type = NARROW, **more: Any
) -> tuple[list[Case], Explored]:
    """The cases that were judged, each of which fails a check that ``fails`` names, and what came of them."""
    judged: list[Case] = []

    def judge(subject: Subject, case: Case, *_: Any) -> Record:
        judged.append(case)
        check = fails(case)
        status = Status.FAIL if check else Status.PASS
        return Record("K", "K", case.capability, case.id, status, check=check, message=f"{check} of {len(judged)}")

    monkeypatch.setattr("mla_conformance.trials.explore.judge_one", judge)
    return judged, explore(*subject_of(kernel), extent, context=Context(), **{"turn": (0, 1), **more})


def explored(monkeypatch: pytest.MonkeyPatch, fails: Fails, draws: int = 30, **more: Any) -> tuple[list[Case], Record]:
    judged, found = drawn_in(monkeypatch, fails, Extent(draws), **more)
    return judged, found.record(BackendReference("K", "K"))


def test_drawn_cases_that_hold_are_counted_and_stay_in_what_is_declared_until_time_ends(monkeypatch: Any) -> None:
    judged, record = explored(monkeypatch, lambda case: "", 16)
    assert record.status is Status.PASS and record.capability == "explored"
    assert 8 < len(judged) == len(set(judged)) == record.cases <= 16
    assert record.message == f"{len(judged)} of {len(judged)} drawn cases hold, none fails"
    assert {case.dtype for case in judged} == {"bf16"} and len({case.call for case in judged}) > 1
    assert judged == explored(monkeypatch, lambda case: "", 16)[0], "the same number draws the same cases"
    monkeypatch.setattr("mla_conformance.trials.explore.ROUND", 5)
    judged, found = drawn_in(monkeypatch, lambda case: "", Extent(seconds=1))
    assert judged and found.passed == found.judged == len(judged)


def test_sessions_are_fitted_to_pairs_that_no_listed_one_holds() -> None:
    space, subject = SPACES["tree_combinations"], drawn.subject_of("EAGER")
    region = region_of(subject, space, triples=1)
    fitted = region.cases
    sessions = [case for case in fitted if case.capability == "call_order"]
    known = Pairs(space, space.rows(case for case in CAPABILITIES["call_order"].cases if case.role is space.role))
    left = Pairs(space, space.rows(sessions)) - known
    assert 0 < len(sessions) <= 3 and left and all(could_be_fitted(case.id) for case in fitted)
    # A certificate did not verify: a session of its planned in more chunks than a single case may.
    planned = "call=layer;heads=1;q=[1x4,2,2];kv=[112,1006,16,15,179,253];page=1;workspace=24;decodes=4"
    assert could_be_fitted(f"call_order:{planned}") and not could_be_fitted(f"layer_combinations:{planned}")
    others = [*listed(space), *(case for case in fitted if case not in sessions)]
    assert not Pairs(space, region.rows) - Pairs(space, space.rows(others)), "a pair is claimed that is not judged"
    first = Record("K", "K", space.capability, fitted[0].id, Status.PASS)
    pairs = judged_pairs([first], [each.id for each in sessions])
    assert pairs["tree"].claimed == pairs["tree"].judged
    assert judge_one(subject, sessions[0], Context()).status is Status.PASS
    # A batch that a session cannot make blames no kernel.
    case = "call_order:call=chunked_context;dims=small;heads=1;q=[9];kv=[5];page=16;workspace=16"
    record = drawn.judged("EAGER", case)
    assert record.status is Status.UNAVAILABLE and "workspace_tokens must be at least" in record.message


def test_two_causes_are_found_in_one_call_and_both_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(case: Case) -> str:
        return Check.LSE if case.pad else Check.OUTPUT if case.poison == "inf" else ""

    judged, record = explored(monkeypatch, fails, 40)
    assert record.status is Status.FAIL and " drawn cases, made small: " in record.message
    told = {Check.LSE, Check.OUTPUT}
    assert record.check in told and all(check in record.message for check in told)
    assert len([case for case in judged if not fails(case)]) > 5, "it goes on behind a failure"
    small = Case.parse(record.case)
    assert (small.data, small.layout, small.seed) == ("needle", "kv_b_proj", 0)


def test_a_failure_that_does_not_repeat_is_still_told_and_a_declaration_of_nothing(monkeypatch: Any) -> None:
    judged, record = explored(monkeypatch, lambda case: "", kernel=NOTHING)
    assert (judged, record.status, record.capability) == ([], Status.UNSUPPORTED, "explored")
    assert record.message == "declares nothing of what could be drawn"
    calls: list[Case] = []

    def once(case: Case) -> str:
        calls.append(case)
        return Check.OUTPUT if len(calls) == 3 else ""

    _, record = explored(monkeypatch, once)
    assert record.status is Status.FAIL and record.message.endswith("when run again the case passed")


def test_what_is_found_is_told_case_by_case_and_outlives_a_run_that_ends(monkeypatch: Any, tmp_path: Path) -> None:
    monkeypatch.setattr("mla_conformance.judging.explored._QUIET", 0.0)
    monkeypatch.setattr("mla_conformance.judging.explored._QUIET_SHARE", 0.0)
    known = list[Explored]()
    judged, whole = explored(monkeypatch, lambda case: "", so_far=known.append)
    assert [each.passed for each in known] == list(range(1, len(judged) + 1)) and known[-1].passed == whole.cases
    request = RunRequest.of(["EAGER"], ["combinations"], cases=["combinations:q=[1]"], explore=Extent(draws=30))
    with Run(request, RunFolder.claim(tmp_path / "run")) as run:
        run.facts, run.environment = [BackendFacts("EAGER", "EAGER")], {"suite": "1"}
        failing = Record("EAGER", "EAGER", "combinations", "combinations:q=[1]", Status.FAIL, message="LSE is 2")
        passing = known[0].record(BackendReference("EAGER", "EAGER")).with_fields(backend="EAGER", reference="EAGER")
        held = "1 of 1 drawn cases hold, none fails"
        wrong = "1 cause in 2 drawn cases, made small: LSE is 2"
        parts = (1, passing, held, Status.UNAVAILABLE, 3), (0, failing, wrong, Status.FAIL, 1)
        for part, record, message, status, outcome in parts:
            run._hear(Told(Step.EXPLORED, record, Explored.of([record], []), part))
            (kept,) = run.summary().records
            assert (kept.status, run.summary().exit_status) == (status, outcome)
            assert kept.message == f"{message}; not all were drawn: the run ended before"


def test_workers_share_what_is_drawn_and_one_record_tells_what_all_found(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in ("trials.explore", "engine.request"):
        monkeypatch.setattr(f"mla_conformance.{module}.ROUND", 5)
    request = RunRequest.of(["EAGER"], ["combinations"], cases=["combinations:q=[1]"], explore=Extent(20))
    parts, found, judged = request.explorations("EAGER", 3), Explorations(), list[Case]()
    assert [part.turn for part in parts] == [(0, 4), (1, 4), (2, 4), (3, 4)] and {part.parts for part in parts} == {4}
    for part in reversed(parts):
        cases, seen = drawn_in(monkeypatch, lambda case: "", part.extent, turn=part.turn)
        judged += cases
        found.keep("EAGER", part.part, seen)
    assert set(judged) == set(drawn_in(monkeypatch, lambda case: "", Extent(20))[0])
    assert found.record("EAGER").message == f"{len(judged)} of {len(judged)} drawn cases hold, none fails"
    died = Record("K", "K", "explored", "combinations:q=[1]", Status.UNAVAILABLE, message="out of memory")
    found.keep("EAGER", 3, None, died_of=died)
    left = found.record("EAGER")
    assert left.status is Status.UNAVAILABLE and left.message.endswith("; not all were drawn: out of memory")
    failed = died.with_fields(status=Status.FAIL, check=Check.LSE, message="LSE is 2")
    crashed = died.with_fields(status=Status.CRASH, check="", message="the process died")
    found.keep("EAGER", 8, Explored.of([failed], [failed]))
    found.keep("EAGER", 9, None, died_of=crashed)
    record = found.record("EAGER")
    assert record.status is Status.FAIL and record.check == Check.LSE
    what = f"2 causes in {len(judged) + 2} drawn cases, made small: LSE is 2; crash at combinations:q=[1]"
    assert record.message == f"{what}: the process died; not all were drawn: out of memory"
    timed = RunRequest.of(["EAGER"], ["combinations"], explore=Extent(seconds=60)).explorations("EAGER", 3)
    assert [part.extent.seconds for part in timed] == [60] * 3
    roles = RunRequest.of(["EAGER"], [*SPACES], explore=Extent(seconds=60))
    lasting = [{part.extent.seconds for part in roles.explorations("EAGER", workers)} for workers in (1, 4, 15)]
    assert lasting == [{60 // len(SPACES)}, {20}, {60}] and len(roles.explorations("EAGER", 15)) == len(SPACES)


def test_an_extent_is_a_number_or_a_time() -> None:
    for text, extent in (("0", Extent()), ("2000", Extent(2000)), ("90s", Extent(0, 90)), ("10m", Extent(0, 600))):
        assert Extent.of(text) == extent and str(extent) in (text, "600s") and any(extent) == (text != "0")
    for other in ("-1", "", "0s", "1d", "1000001", "169h", "ten"):
        with pytest.raises(InputError, match="expected a number of cases up to 1,000,000, or a time such as"):
            Extent.of(other)


def test_without_a_space_or_without_hypothesis_nothing_is_explored(refused: Any, monkeypatch: Any) -> None:
    asked = ["certify", "--device", "cpu", "--backend", "EAGER", "--explore", "5"]
    assert "none of these capabilities is selected" in refused(*asked, "--capability", "lse")
    monkeypatch.setattr("mla_conformance.engine.request.find_spec", lambda name: None)
    assert "pip install 'hypothesis>=6.130'" in refused(*asked)


HOPPER = DeviceCapability(9, 0)
DECODE = SPACES["decode_combinations"]


def declared(name: str) -> Callable[[Sequence[Case]], list[bool]]:
    """What a registered backend declares, asked as if its GPU and its library were here."""
    decode = DEFINITIONS[Role.DECODE]
    kernel = load_role(parse_reference(name), Role.DECODE).resolve(HOPPER)
    yes = classmethod(lambda cls, *_: True)
    kernel = type(kernel.__name__, (kernel,), {"is_available": yes, "supports_compute_capability": yes})

    def supports(cases: Sequence[Case]) -> list[bool]:
        dtypes = [(case, TORCH_DTYPES[case.dtype]) for case in cases]
        return [bool(dtype and not decode.reasons(kernel, case, dtype, HOPPER)) for case, dtype in dtypes]

    return supports


def alike(base: Row, name: str, labels: Sequence[str], row: Row) -> list[str]:
    """The classes of a supported row first."""
    return sorted(labels, key=lambda label: label != base.get(name))


def test_every_pair_of_what_a_kernel_declares_is_held() -> None:
    supports, cases = declared("FLASHMLA"), listed(DECODE)
    all_pairs = Pairs(DECODE, DECODE.rows(case for case in cases if work_of(case) <= LARGE_CPU_WORK))
    region = fit(DECODE, list(compress(cases, supports(cases))), supports, all_pairs, LARGE_CPU_WORK)
    assert all(supports(region.cases)) and not [case.id for case in region.cases if DECODE.outside(case)]
    missing, classes = all_pairs - Pairs(DECODE, region.rows), region.classes
    claimed = [pair for pair in missing if all(label in classes[name] for name, label in pair)]
    for pair in islice(claimed, 0, None, max(1, len(claimed) // 5)):
        for base in region.rows[:: max(1, len(region.rows) // 5)]:
            row = DECODE.completed(pair, partial(alike, base))
            assert row is None or not supports([DECODE.case_of(row)])[0], f"{pair} is declared, and no case holds it"


def test_cases_without_data_regimes_are_fitted_too_and_are_others_by_another_salt() -> None:
    space, found = SPACES["cache_combinations"], list[set[Case]]()
    cases = [case for case in listed(space) if case.page != 32]
    every = Pairs(space, space.rows(case for case in listed(space) if work_of(case) <= LARGE_CPU_WORK))
    for salt in ("", "other"):
        region = fit(space, cases, lambda asked: [case.page != 32 for case in asked], every, LARGE_CPU_WORK, salt=salt)
        missing = every - Pairs(space, region.rows)
        assert missing and all(("page", "32") in pair for pair in missing if space.completed(pair))
        found.append(set(region.cases))
    assert len(found[0] - found[1]) > len(found[0]) / 2

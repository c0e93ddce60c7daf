"""Expectations: which records they change, when they are refused, and how they follow a report."""

import datetime
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from mla_conformance.cases.case import Case, CaseError
from mla_conformance.engine.journal import Judgement, RunFolder
from mla_conformance.engine.request import Plan, RunRequest
from mla_conformance.engine.run import Run
from mla_conformance.expectations import (
    KNOWN_FAILURES,
    CaseQuery,
    Expectation,
    Expectations,
    holds,
    parse_condition,
    read_expectations,
    to_toml,
)
from mla_conformance.judging.record import UNASKED, BackendFacts, Record, Status
from mla_conformance.vocabulary.capabilities import CAPABILITIES

CASES = CAPABILITIES["lse"].cases
FAILURE = Record("MINE", "MINE", "lse", CASES[0].id, Status.FAIL, message="wrong", check="lse")
KNOWN = Expectation(backend="MINE", case="lse", reason="base 2")
FACTS = {"torch": "2.13.0+cpu", "compute_capability": "9.0", "device": "NVIDIA H200", "flash-attn": "2.8.0b1"}


@pytest.mark.parametrize(
    ("query", "matched"),
    [
        (CASES[0].id, [CASES[0]]),
        ("lse", list(CASES)),
        ("*:dtype=fp16", [case for case in CASES if case.dtype == "fp16"]),
        ("lse:call=context_chunk", [case for case in CASES if case.call == "context_chunk"]),
        ("*:kv>900", [case for case in CASES if max(case.kv, default=0) > 900]),
        ("*:heads<5;data~needle", [case for case in CASES if case.heads < 5 and "needle" in case.regimes]),
        ("new_tokens", []),
    ],
)
def test_a_query_names_the_cases_that_its_text_says(query: str, matched: list[object]) -> None:
    assert [case for case in CASES if CaseQuery.parse(query).matches(case)] == matched


def test_conditions_compare_versions_and_others_are_refused_as_other_queries_are() -> None:
    hold = ["", "torch >= 2.9", "torch < 2.9 or compute_capability == 9.0", "flash-attn < 2.8"]
    hold += ["not torch < 2.9 and device == 'NVIDIA H200'"]
    others = ["torch < 2.9 or compute_capability == 9.0 and device == cpu", "absent < 9", "device >= 1.0"]
    assert [text for text in (*hold, *others) if holds(parse_condition(text), FACTS)] == hold
    for text in QUERIES:
        with pytest.raises(CaseError):
            CaseQuery.parse(text)
    for text in ("torch", "torch ~ 2", "torch < new", "__import__('os')", "a == 1 and", "(a == 1)"):
        with pytest.raises(ValueError, match=r"^expected NAME OPERATOR VALUE|^[<>]=? expects a version"):
            parse_condition(text)
    # A fitted case is named by its whole id.
    query = CaseQuery.parse("decode_combinations:call=decode;heads=1;q=[9];kv=[4103];page=64;spare=1024")
    other = Case.parse("decode_combinations:call=decode;heads=1;q=[9];kv=[4103];page=64;spare=1024;cache=fp8")
    assert not query.is_stale and query.matches(Case.parse(query.text)) and not query.matches(other)


QUERIES = ("", ":dtype=fp16", "lse:nope=1", "lse:heads=x", "lse:heads=1;heads=2", "lse:data>5", "lse:heads~5", "*:;")


def applied(record: Record, **changes: Any) -> Record:
    return Expectations((replace(KNOWN, **changes),)).apply(record, FACTS)


def test_a_failure_that_was_foreseen_is_waived_with_its_reason_and_a_pass_in_its_place_is_a_failure() -> None:
    waived = applied(FAILURE)
    assert waived.status is Status.EXPECTED_FAILURE and not waived.failed and "bug: base 2" in waived.expectation
    assert waived.as_judged == FAILURE
    unexpected = applied(FAILURE.with_fields(status=Status.PASS, check=""))
    assert unexpected.status is Status.UNEXPECTED_PASS and unexpected.failed and "base 2" in unexpected.message
    served = FAILURE.with_fields(evidence={"variant": "fa3"})  # a name without a variant, and which one served it
    assert [applied(served, backend=f"MINE[{name}]").failed for name in ("fa3", "fa2")] == [False, True]


@pytest.mark.parametrize(
    "changes",
    [
        *({"backend": "OTHER"}, {"case": "new_tokens"}, {"status": "crash"}, {"check": "output"}),
        *({"when": "torch < 2"}, {"until": "2020-01-01"}, {"until": "2026.1"}),
    ],
)
def test_an_expectation_of_something_else_changes_nothing(changes: dict[str, str]) -> None:
    assert applied(FAILURE, **changes) == FAILURE
    broken = FAILURE.with_fields(status=Status.HARNESS_ERROR)
    assert applied(broken) == broken, "a fault of the harness is never expected"


def test_the_last_day_of_an_expectation_counts_and_what_matches_no_case_is_stale() -> None:
    entry, day = replace(KNOWN, until="2026-03-01"), datetime.date(2026, 3, 1)
    assert list(Expectations((entry,), day).problems()) == []
    ((_, problem),) = Expectations((entry,), day + datetime.timedelta(1)).problems()
    assert problem == "expired: until 2026-03-01"
    entries = (KNOWN, replace(KNOWN, case="lse:heads=77"), replace(KNOWN, case="gone"))
    assert [entry.case for entry, _ in Expectations(entries).problems()] == ["lse:heads=77", "gone"]
    assert list(Expectations.load([KNOWN_FAILURES]).problems()) == [], "the shipped ones are up to date"


ENTRY = '[[expectation]]\nbackend = "MINE"\ncase = "lse"\n'


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("[[expectation]\n", "mine.toml: not TOML"),
        (ENTRY, "mine.toml: entry 1: expected a reason in words, got ''"),
        (ENTRY + 'reason = "r"\nwhy = "w"\n', "mine.toml: entry 1: unknown key why; known keys: backend, case"),
        (ENTRY + 'reason = "r"\nstatus = "pass"\n', "status: expected one of fail, crash"),
        (ENTRY + 'reason = "r"\ncheck = "nope"\n', "check: expected one of call, shape"),
        (ENTRY + 'reason = "r"\nwhen = "os.system()"\n', "when: expected NAME OPERATOR VALUE"),
        (ENTRY + 'reason = "r"\nuntil = "soon"\n', "until: "),
        ('[[expectation]]\ncase = "lse:x=1"\nreason = "r"\n', "entry 1: object missing required field `backend`"),
        (ENTRY + 'reason = "r"\nuntil = 2020-01-01\n', "entry 1: expired: until 2020-01-01"),
        (ENTRY.replace("lse", "gone") + 'reason = "r"\n', "entry 1: stale: no case of the suite matches"),
    ],
)
def test_bad_expectations_are_refused_before_anything_runs(tmp_path: Path, refused: Any, text: str, said: str) -> None:
    (tmp_path / "mine.toml").write_text(text)
    out = tmp_path / "out"
    assert said in refused("certify", "--device", "cpu", "--expectations", tmp_path, "--out", out)
    assert not (out / "report.json").exists()


def updated(ours: Any, folder: Path, report: Path) -> tuple[str, list[Expectation]]:
    status, printed, _ = ours("expectations", "update", report, "--dir", folder)
    assert status == 0
    return printed, list(read_expectations(folder / "MINE.toml", reasons_required=False))


def gated(ours: Any, folder: Path, report: Path) -> tuple[int, str]:
    status, _, said = ours("gate", report, "--expectations", folder, "--require-tier", "none")
    return status, said


def test_an_update_follows_the_report_and_keeps_reasons(tmp_path: Path, write_report: Any, ours: Any) -> None:
    folder, file = tmp_path / "known", tmp_path / "known" / "MINE.toml"
    folder.mkdir()
    holds = replace(KNOWN, case=CASES[0].id, reason='kept "as is"', check="lse", link="https://example.org/1")
    passes_now, elsewhere = replace(KNOWN, case=CASES[1].id), replace(KNOWN, when="torch < 2")
    file.write_text("\n".join(map(to_toml, (holds, passes_now, elsewhere))))
    passed = FAILURE.with_fields(case=CASES[1].id, status=Status.PASS, check="")
    died = FAILURE.with_fields(case=CASES[2].id, status=Status.CRASH, check="")
    report = write_report("report.json", [FAILURE, passed, died])
    printed, written = updated(ours, folder, report)
    assert "1 added, 1 removed, 2 kept" in printed and "without a reason: 1;" in printed
    kept = [(holds.case, holds.reason, holds.link), (elsewhere.case, elsewhere.reason, ""), (died.case, "", "")]
    assert [(e.case, e.reason, e.link) for e in written] == kept
    status, said = gated(ours, folder, report)
    assert status == 2 and "MINE.toml: entry 3: expected a reason" in said
    file.write_text(file.read_text().replace('reason = ""', 'reason = "dies"'))
    assert gated(ours, folder, report)[0] == 0


def test_a_race_may_be_won_and_its_entry_stays(tmp_path: Path, write_report: Any, ours: Any) -> None:
    passed = FAILURE.with_fields(status=Status.PASS, check="")
    assert applied(passed, sometimes=True) == passed
    assert applied(FAILURE, sometimes=True).status is Status.EXPECTED_FAILURE
    file, known = tmp_path / "MINE.toml", replace(KNOWN, case=FAILURE.case, sometimes=True)
    file.write_text(to_toml(known))
    report = write_report("report.json", [passed])
    _, written = updated(ours, tmp_path, report)
    assert [to_toml(entry) for entry in written] == [to_toml(known)] == [file.read_text()]
    assert gated(ours, tmp_path, report)[0] == 0


def test_an_entry_of_several_cases_loses_those_that_pass(tmp_path: Path, write_report: Any, ours: Any) -> None:
    """And whatever else fails in one way is one entry, with one reason to write."""
    first, second, third, fourth = (case.id for case in CASES[:4])
    (tmp_path / "MINE.toml").write_text(to_toml(replace(KNOWN, case=(first, second), check="lse")))
    passed = FAILURE.with_fields(case=second, status=Status.PASS, check="")
    others = [FAILURE.with_fields(case=each, check="output") for each in (third, fourth)]
    printed, written = updated(ours, tmp_path, write_report("report.json", [FAILURE, passed, *others]))
    assert f"- MINE {second} fail lse\n1 added, 1 removed, 1 kept" in printed
    assert [(e.case, e.reason, e.check) for e in written] == [(first, "base 2", "lse"), ((third, fourth), "", "output")]


def test_a_run_applies_expectations(tmp_path: Path) -> None:
    facts = BackendFacts("MINE", "MINE", versions={"flash-attn": "2.8.0b1"})
    known = Expectations((replace(KNOWN, when="flash-attn < 2.8"),))
    request = RunRequest.of(["EAGER"], ["lse"], "smoke", "cpu")
    with Run(request, RunFolder.claim(tmp_path), expectations=known, facts=[facts]) as run:
        run.folder.journal.append(Judgement(FAILURE))
        run.plan = Plan.of(request, "cpu", {"torch": "2", "device": "cpu"}, [facts])
        run.begin(run.plan)
        (record,) = run.summary().records
        assert record.status is Status.EXPECTED_FAILURE and record.as_judged == FAILURE.with_fields(explanation=UNASKED)
        assert Judgement(FAILURE) in list(run.folder.journal.events())

"""Counting and reporting: the denominator, what decides a status, and a report that is whole or not there."""

import json
import math
import shlex
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest

from mla_conformance.engine.messages import WorkerJudged, decode, encode
from mla_conformance.engine.request import RunRequest
from mla_conformance.judging.record import BackendFacts, Record
from mla_conformance.judging.verdict import Check, Status, failed
from mla_conformance.report.json_report import report_json, write_json
from mla_conformance.report.outcome import backend_lines, cause_lines, closing_line, outcome_lines
from mla_conformance.report.summary import BackendOutcome, BackendSummary, Counts, RunSummary, summarise

PASS, FAIL, UNSUPPORTED, CRASH = Status.PASS, Status.FAIL, Status.UNSUPPORTED, Status.CRASH
WAIVED = Status.EXPECTED_FAILURE


def record(status: Status, case: str = "lse:q=[1]", capability: str = "lse") -> Record:
    return Record("B", "path with space.py:B", capability, case, status, used={"lse": 0.25, "row": 0.5})


def backend(*statuses: Status, listed: int | None = None, reasons: tuple[str, ...] = ()) -> BackendSummary:
    records = [record(status) for status in statuses]
    capabilities = summarise(records, {"lse": len(records) if listed is None else listed})
    facts = BackendFacts("B", reasons=reasons, versions={"torch": "2"})
    return BackendSummary(facts, () if reasons else capabilities)


def run(*backends: BackendSummary) -> RunSummary:
    return RunSummary({"suite": "2026.1", "device": "cpu"}, backends)


@pytest.mark.parametrize(
    ("statuses", "listed", "outcome", "exit_status"),
    [
        ((PASS, PASS), 2, BackendOutcome.PASS, 0),
        ((PASS, UNSUPPORTED), 2, BackendOutcome.PASS, 0),
        ((UNSUPPORTED,), 1, BackendOutcome.UNSUPPORTED, 3),
        ((PASS, FAIL), 2, BackendOutcome.FAIL, 1),
        ((PASS, CRASH), 2, BackendOutcome.FAIL, 1),
        ((PASS,), 2, BackendOutcome.NOT_RUN, 3),
        ((), 2, BackendOutcome.NOT_RUN, 3),
    ],
)
def test_what_decides(statuses: tuple[Status, ...], listed: int, outcome: BackendOutcome, exit_status: int) -> None:
    summary = backend(*statuses, listed=listed)
    assert summary.outcome is outcome and summary.capabilities[0].outcome is outcome
    assert run(summary).exit_status == exit_status


def test_an_unavailable_backend_neither_helps_nor_harms() -> None:
    absent = backend(reasons=("pip install b",))
    assert absent.outcome is BackendOutcome.UNAVAILABLE
    assert run(absent).exit_status == 3
    assert run(absent, backend(PASS)).exit_status == 0
    assert list(backend_lines(absent, 80)) == ["B ? unavailable: pip install b"]


def test_the_report_counts_everything() -> None:
    data = report_json(run(backend(PASS, FAIL, UNSUPPORTED, listed=5)))
    capability = data["backends"]["B"]["capabilities"]["lse"]
    assert [capability[key] for key in ("listed", "passed", "failed", "unsupported", "not_run")] == [5, 1, 1, 1, 2]
    assert capability["error_budget_used"] == 0.5
    assert data["suite"] == "2026.1" and data["environment"] == {"device": "cpu"}


def test_a_record_may_stand_for_many_cases() -> None:
    drawn = record(PASS, capability="explored").with_fields(cases=30)
    (capability,) = summarise([drawn], {"explored": 1})
    assert capability.counts == Counts(listed=30, passed=30)
    summary = replace(backend(PASS), capabilities=(*backend(PASS).capabilities, capability))
    assert "  ✔ lse 1, explored 30" in backend_lines(summary, 80) and "cases: 31 passed ·" in closing_line(run(summary))
    (missing,) = summarise([], {"explored": 1})
    assert missing.outcome is BackendOutcome.NOT_RUN


def test_a_failure_carries_a_line_that_a_shell_reads_back() -> None:
    (failure,) = report_json(run(backend(FAIL)))["backends"]["B"]["capabilities"]["lse"]["failures"]
    words = shlex.split(failure["replay"])
    assert words == ["mla-conformance", "replay", "lse:q=[1]", "--backend", "path with space.py:B"]
    *_, text = cause_lines(run(backend(PASS, FAIL)), 80)
    assert text.endswith(f"replay: {failure['replay']}")


def test_the_last_line_counts_every_backend_and_every_case_once() -> None:
    several = run(backend(PASS, UNSUPPORTED), backend(FAIL, WAIVED), backend(reasons=("no GPU",)), backend(PASS))
    assert closing_line(several) == (
        "2 backends right · 1 wrong · 1 cannot run here · cases: 2 passed · 1 failed · 1 unsupported · "
        "1 expected to fail · worst passing error 0.50 of its budget"
    )


def test_what_cannot_run_and_was_not_asked_for_is_told_in_one_line() -> None:
    absent = [
        replace(backend(reasons=("pip install b",)), facts=BackendFacts(f"B{n}", reasons=("no",))) for n in range(9)
    ]
    lines = list(outcome_lines(run(backend(PASS), *absent), 80, brief=True))
    assert lines[-1] == "? 9 cannot run here, 'mla-conformance backends' says why: B0, B1, B2 and 6 more"
    assert len(lines) == len(list(outcome_lines(run(backend(PASS)), 80))) + 1
    assert list(outcome_lines(run(*absent), 80))[-1] == "B8 ? unavailable: no"
    assert RunRequest.of().is_default and not RunRequest.of(["FLASH_ATTN"]).is_default


def test_a_verdict_becomes_a_record_and_reads_back() -> None:
    settled = record(PASS).with_verdict(failed(Check.LSE, "wrong", {"head": 3}), 1.5)
    assert (settled.status, settled.check, settled.clause, settled.where) == (FAIL, "lse", "4.2", {"head": 3})
    assert settled.message == "wrong (SPEC 4.2)"
    assert decode(encode(WorkerJudged(settled)), WorkerJudged).record == settled


def test_a_record_that_is_written_with_nan_reads_back_and_a_malformed_one_does_not() -> None:
    odd = record(FAIL).with_fields(used={"lse": "inf", "row": "nan"}, confirmation="after", after=("lse:q=[2]",))
    plain = json.loads(encode(WorkerJudged(odd)))["record"]
    assert plain["used"] == {"lse": "inf", "row": "nan"}
    assert msgspec.convert(plain, Record) == odd and odd.shares["lse"] == math.inf and math.isnan(odd.shares["row"])
    for name, value in (("status", "splendid"), ("used", {"lse": "much"}), ("after", 7), ("confirmation", "perhaps")):
        with pytest.raises(ValueError, match=name if name != "used" else "lse|enum"):
            msgspec.convert({**plain, name: value}, Record)


def test_a_report_is_written_whole_or_not_at_all(tmp_path: Path) -> None:
    path = tmp_path / "report.json"
    write_json(path, {"sign": "✔"})
    with pytest.raises(TypeError):
        write_json(path, {"sign": object()})
    assert json.loads(path.read_text(encoding="utf-8")) == {"sign": "✔"}

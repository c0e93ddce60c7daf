"""Counting and reporting: what decides a status, the end of a pytest run, and ``report.json``."""

import json
import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest
from jsonschema import Draft202012Validator

from mla_conformance.cases.case import Case
from mla_conformance.cases.covering import Pairs
from mla_conformance.cli import main
from mla_conformance.engine.messages import Step, Told, encode
from mla_conformance.judging.record import BackendFacts, Record, Status
from mla_conformance.report.causes import function_lines
from mla_conformance.report.json_report import SCHEMA, load_report, report_form, schema, to_text
from mla_conformance.report.outcome import backend_lines, closing_line, judged_of_claimed, outcome_lines
from mla_conformance.report.summary import BackendOutcome, BackendSummary, Counts, RunSummary, judged_pairs, summarise
from mla_conformance.tests.reports import write_run
from mla_conformance.vocabulary.arrays import SPACES, array_of

PASS, FAIL, UNSUPPORTED, CRASH = Status.PASS, Status.FAIL, Status.UNSUPPORTED, Status.CRASH
WAIVED = Status.EXPECTED_FAILURE


def record(status: Status, case: str = "lse:q=[1]", capability: str = "lse") -> Record:
    return Record("B", "path with space.py:B", capability, case, status, used={"lse": 0.25, "row": 0.5})


def backend(*statuses: Status, listed: int | None = None, reasons: tuple[str, ...] = ()) -> BackendSummary:
    records = [record(status) for status in statuses]
    capabilities = summarise(records, ["lse"] * (len(records) if listed is None else listed))
    facts = BackendFacts("B", reasons=reasons, versions={"torch": "2"})
    return BackendSummary(facts, () if reasons else capabilities)


def run(*backends: BackendSummary) -> RunSummary:
    return RunSummary({"suite": "2026.1", "device": "cpu"}, backends)


@pytest.mark.parametrize(
    ("statuses", "listed", "outcome", "exit_status"),
    [
        *(((PASS, other), 2, BackendOutcome.PASS, 0) for other in (PASS, UNSUPPORTED)),
        ((UNSUPPORTED,), 1, BackendOutcome.UNSUPPORTED, 3),
        *(((PASS, other), 2, BackendOutcome.FAIL, 1) for other in (FAIL, CRASH)),
        *((statuses, 2, BackendOutcome.NOT_RUN, 3) for statuses in ((PASS,), ())),
    ],
)
def test_what_decides(statuses: tuple[Status, ...], listed: int, outcome: BackendOutcome, exit_status: int) -> None:
    summary = backend(*statuses, listed=listed)
    assert summary.outcome is outcome and summary.capabilities[0].outcome is outcome
    assert run(summary).exit_status == exit_status


def test_an_unavailable_backend_neither_helps_nor_harms_and_a_record_may_stand_for_many_cases() -> None:
    absent = backend(reasons=("pip install b",))
    assert absent.outcome is BackendOutcome.UNAVAILABLE and run(absent).exit_status == 3
    assert run(absent, backend(PASS)).exit_status == 0
    assert list(backend_lines(absent, 80)) == ["B ? unavailable: pip install b"]
    drawn = record(PASS, capability="explored").with_fields(cases=30)
    (capability,) = summarise([drawn], ["explored"])
    assert capability.counts == Counts(listed=30, passed=30)
    summary = replace(backend(PASS), capabilities=(*backend(PASS).capabilities, capability))
    assert "  ✔ lse 1, explored 30" in backend_lines(summary, 80) and "cases: 31 passed ·" in closing_line(run(summary))
    (missing,) = summarise([], ["explored"])
    assert missing.outcome is BackendOutcome.NOT_RUN


def test_the_last_line_counts_all_once_and_what_cannot_run_is_told_in_one() -> None:
    several = run(backend(PASS, UNSUPPORTED), backend(FAIL, WAIVED), backend(reasons=("no GPU",)), backend(PASS))
    assert closing_line(several) == (
        "2 backends right · 1 wrong · 1 cannot run here · cases: 2 passed · 1 failed · 1 unsupported · "
        "1 expected to fail · worst passing error 0.50 of its budget, B"
    )
    absent = [BackendSummary(BackendFacts(f"B{n}", reasons=("no",))) for n in range(9)]
    lines = list(outcome_lines(run(backend(PASS), *absent), 80, brief=True))
    assert lines[-1] == "? 9 cannot run here, 'mla-conformance backends' says why: B0, B1, B2 and 6 more"
    assert len(lines) == len(list(outcome_lines(run(backend(PASS)), 80))) + 1
    assert list(outcome_lines(run(*absent), 80))[-1] == "B8 ? unavailable: no"


UNWRITTEN = "the last heads are not written"
SAID = (
    "decode: output is 0 at request 0, query 0, head 3, column 1, expected 2, wrong in 1 of 4 heads, first at request"
)


def failing(case: str, status: Status = Status.FAIL, **said: str) -> Record:
    case = f"decode:call=decode;{case}"
    reported = {"check": "output", "clause": "4.2", "message": f"{SAID} (SPEC 4.2)", **said} if status == "fail" else {}
    return Record("t.py::mine", f"t.py::mine[{case}]", "decode", case, status, **reported)  # type: ignore[arg-type]


FAILURES = [failing(f"q=[2];kv=[{length}];layers=2", finding=UNWRITTEN) for length in (9, 5, 7)]
PASSING = [failing(f"q=[2];kv=[{length}]", Status.PASS) for length in (5, 7)]


@pytest.fixture(autouse=True)
def narrow(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")


def test_a_function_is_told_by_cause_with_what_failures_have_in_common_and_the_rest_is_counted() -> None:
    assert list(function_lines("t.py::mine", [*PASSING, *FAILURES], False)) == [
        "t.py::mine: 3 of 5 cases fail, 1 likely cause",
        "     only with layers=2: 3 such cases fail so, 0 pass",
        f"  1. 3 cases: {UNWRITTEN}",
        "     simplest: decode: output is 0 at request 0, query 0, head 3, column 1,",
        "     expected 2, wrong in 1 of 4 heads",
        "     replay: pytest 't.py::mine[decode:call=decode;q=[2];kv=[5];layers=2]'",
    ]
    causes = [failing(f"q=[2];kv=[{length}]", explanation=f"mistake {'abcdef'[length]}") for length in range(1, 6)]
    lines = list(function_lines("t.py::mine", causes, False))
    assert lines[0] == "t.py::mine: 5 of 5 cases fail, 5 likely causes" and lines[-1] == "  … and 2 more cases"
    assert sum("replay: " in line for line in lines) == 3 and not any("simplest" in line for line in lines)


NAME = "indexer_combinations"
SPACE, ARRAY = SPACES[NAME], array_of(NAME)[:60]


def of_pairs(cases: tuple[Case, ...], status: Status = Status.PASS) -> list[Record]:
    return [Record("MINE", "MINE", case.capability, case.id, status) for case in cases]


def held(cases: tuple[Case, ...]) -> int:
    return len(Pairs(SPACE, SPACE.rows(cases)))


def test_a_backend_tells_what_it_claims_and_what_was_not_judged() -> None:
    whole = judged_pairs(of_pairs(ARRAY), [])
    assert judged_of_claimed(whole) == f"pairs of classes claimed {held(ARRAY):,}, judged {held(ARRAY):,}"
    lacking = judged_pairs([*of_pairs(ARRAY[1:]), *of_pairs(ARRAY[:1], Status.UNAVAILABLE)], [])
    (due,) = of_pairs(ARRAY[:1], Status.UNSUPPORTED)
    due = due.with_fields(message="due on a GPU: 3e+08 operations")
    assert judged_of_claimed(whole, [due, due]).endswith("; 2 cases due on a GPU, not judged here")
    said = judged_of_claimed(lacking)
    assert said.endswith(f"; not judged, for example: {SPACE.role} {lacking[SPACE.role].not_judged[0]}")
    rest = of_pairs(ARRAY[30:], Status.UNAVAILABLE)
    found = judged_pairs([*of_pairs(ARRAY[:30]), *rest], [])[SPACE.role]
    assert (found.claimed, found.judged) == (held(ARRAY), held(ARRAY[:30]))
    assert len(found.not_judged) == found.claimed - found.judged > 0
    assert all(pair.count("=") == 2 and " · " in pair for pair in found.not_judged)
    fitted = [case.id for case in ARRAY[30:]]
    assert judged_pairs(of_pairs(ARRAY[:30]), fitted)[SPACE.role] == found


VALIDATOR = Draft202012Validator(schema())
Json = dict[str, Any]


@pytest.fixture
def report(real_run: Path) -> Json:
    data: Json = json.loads((real_run / "report.json").read_text(encoding="utf-8"))
    return data


def test_a_real_report_follows_the_published_schema(report: Json, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["report", "schema"]) == 0
    printed = json.loads(capsys.readouterr().out)
    Draft202012Validator.check_schema(printed)
    Draft202012Validator(printed).validate(report)
    json.dumps(report, allow_nan=False)
    assert report["backends"]["Broken"]["evidence"] == [{"kernel": "<b>tile & co</b>"}]
    assert {part["status"] for part in report["backends"].values()} == {"pass", "fail", "unavailable"}
    assert report["schema"] == SCHEMA and not VALIDATOR.is_valid({**report, "schema": "mla-conformance-report/2"})
    assert schema()["$defs"]["Status"]["enum"] == sorted(Status)
    assert schema()["$defs"]["BackendOutcome"]["enum"] == sorted(BackendOutcome)
    assert not VALIDATOR.is_valid({**report, "more": 1})


def test_every_record_is_in_the_report_which_reads_back_as_it_was(report: Json, real_run: Path) -> None:
    run = load_report(real_run / "report.json")
    assert json.loads(to_text(report_form(run))) == report
    assert run.exit_status == 1 and len(run.judged_cases) == len(report["cases"])
    events = [json.loads(line) for line in (real_run / "journal.jsonl").read_text().splitlines()]
    journalled = {(e["record"]["backend"], e["record"]["case"]) for e in events if e["event"] == "verdict"}
    reported = {(name, record["case"]) for name, part in report["backends"].items() for record in part["records"]}
    assert reported == journalled
    for name in ("EAGER", "TORCH_SDPA"):
        passes = [record for record in report["backends"][name]["records"] if record["status"] == "pass"]
        assert passes and all(record["seconds"] > 0 for record in passes)
        used = [share for record in passes for share in record.get("used", {}).values()]
        assert len(used) > len(passes) and 0 < max(used) <= 1
    refusals = [r for r in report["backends"]["TORCH_SDPA"]["records"] if r["status"] == "unsupported"]
    assert refusals and all("e4m3 output not declared" in record["message"] for record in refusals)


def test_every_failure_by_a_wrong_number_that_was_explained_has_a_map(report: Json) -> None:
    broken, eager = (report["backends"][name] for name in ("Broken", "EAGER"))
    failures = [failure for capability in broken["capabilities"].values() for failure in capability["failures"]]
    reported = {failure["case"] for failure in failures if failure["check"] == "lse" and failure["confirmation"]}
    assert reported and reported <= broken["heat"].keys() <= {failure["case"] for failure in failures}
    assert eager["heat"] == {}
    assert {each["part"] for each in broken["heat"].values()} == {"LSE of new tokens"}


def test_nan_and_infinity_are_written_as_text_to_the_supervisor_too(tmp_path: Path) -> None:
    record = Record("B", "B", "lse", "lse:q=[1]", Status.FAIL, used={"element": "nan", "lse": "inf"})
    plain = json.loads(encode(Told(Step.JUDGED, record)))["record"]
    assert plain["used"] == record.used and msgspec.convert(plain, Record) == record
    assert record.shares["lse"] == math.inf and math.isnan(record.shares["element"])
    path = write_run(tmp_path / "r.json", [record])
    data = json.loads(path.read_text())
    VALIDATOR.validate(data)
    capability = data["backends"]["B"]["capabilities"]["lse"]
    assert capability["error_budget_used"] == "nan" and capability["failures"][0]["used"]["lse"] == "inf"
    assert json.loads(to_text(report_form(load_report(path)))) == data


EDITS: list[tuple[Callable[[Json], object], str]] = [
    (lambda r: r.update(schema="mla-conformance-report/99"), "is newer than mla-conformance-report/5"),
    (lambda r: r.update(schema="other/2"), "expected a report with schema mla-conformance-report/5, got \"other/2\""),
    (lambda r: r.pop("backends"), "object missing required field `backends`"),
    (lambda r: r.update(more=1), "object contains unknown field `more`"),
    (lambda r: r["backends"]["Broken"].update(status="pass"), 'Broken.status is "pass", but "fail" follows'),
    (lambda r: r["backends"]["EAGER"]["records"].pop(), 'EAGER.status is "pass", but "not_run" follows'),
    (lambda r: r["backends"]["EAGER"]["records"].extend(r["backends"]["EAGER"]["records"][:1]), "two records of one"),
    (lambda r: next(iter(r["backends"]["Broken"]["heat"].values())).update(lines=["5"] * 65), "of length <= 64"),
    (lambda r: r["backends"]["EAGER"].update(heat=r["backends"]["Broken"]["heat"]), "EAGER has a heat map of \"lse:"),
    (lambda r: r["cases"].pop(), "one of a case that is not listed"),
    (lambda r: r["cases"].append(r["cases"][0]), "holds a case twice"),
]  # fmt: skip


@pytest.mark.parametrize(("edit", "said"), EDITS)
def test_an_edited_report_is_refused(report: Json, tmp_path: Path, refused: Any, edit: Any, said: str) -> None:
    edit(report)
    path, out, text = tmp_path / "bad.json", tmp_path / "out.html", json.dumps(report)
    path.write_text(text, encoding="utf-8")
    out.write_text("kept")
    (message,) = refused("report", "render", path, "--format", "html", "--out", out).splitlines()
    assert [message] == refused("report", "merge", path, "--out", out).splitlines()
    assert message.startswith(f"mla-conformance: {path}: ") and said in message
    assert (out.read_text(), path.read_text(encoding="utf-8")) == ("kept", text)

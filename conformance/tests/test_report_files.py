"""``report.json`` as a file: its published schema, reading it back, and everything that must not be read."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from jsonschema import Draft202012Validator

from mla_conformance.cli import main
from mla_conformance.judging.record import BackendFacts, Record
from mla_conformance.judging.verdict import Status
from mla_conformance.report.json_report import SCHEMA, load_report, report_json, schema
from mla_conformance.report.summary import BackendOutcome, BackendSummary, RunSummary, summarise

VALIDATOR = Draft202012Validator(schema())
Json = dict[str, Any]


@pytest.fixture
def report(real_run: Path) -> Json:
    data: Json = json.loads((real_run / "report.json").read_text(encoding="utf-8"))
    return data


def refused(tmp_path: Path, data: Any, capsys: pytest.CaptureFixture[str]) -> str:
    """What is said of a report that no command may take, and that none overwrites."""
    path, out = tmp_path / "bad.json", tmp_path / "out.html"
    text = data if isinstance(data, str) else json.dumps(data)
    path.write_text(text, encoding="utf-8")
    out.write_text("kept")
    assert main(["report", "render", str(path), "--format", "html", "--out", str(out)]) == 2
    assert main(["report", "merge", str(path), "--out", str(out)]) == 2
    assert (out.read_text(), path.read_text(encoding="utf-8")) == ("kept", text)
    message, again = capsys.readouterr().err.splitlines()
    assert message == again and message.startswith(f"mla-conformance: {path}: ")
    return message


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


def test_every_record_is_in_the_report(report: Json, real_run: Path) -> None:
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


def test_a_report_reads_back_as_it_was(report: Json, real_run: Path) -> None:
    run = load_report(real_run / "report.json")
    assert json.loads(json.dumps(report_json(run))) == report
    assert run.exit_status == 1 and len(run.judged_cases) == len(report["cases"])


def test_nan_and_infinity_are_written_as_text(tmp_path: Path) -> None:
    record = Record("B", "B", "lse", "lse:q=[1]", Status.FAIL, used={"element": "nan", "lse": "inf"})
    backend = BackendSummary(BackendFacts("B", "B"), summarise([record], ["lse"]))
    names = ("suite", "version", "device", "compute_capability", "torch", "python", "platform")
    run = RunSummary({**dict.fromkeys(names, "x"), "tier": "full"}, (backend,), ("lse:q=[1]",))
    data = json.loads(json.dumps(report_json(run)))
    VALIDATOR.validate(data)
    capability = data["backends"]["B"]["capabilities"]["lse"]
    assert capability["error_budget_used"] == "nan" and capability["failures"][0]["used"]["lse"] == "inf"
    (tmp_path / "r.json").write_text(json.dumps(data, allow_nan=False))
    assert json.loads(json.dumps(report_json(load_report(tmp_path / "r.json")))) == data


def _capability(report: Json) -> Json:
    found: Json = report["backends"]["Broken"]["capabilities"]["lse"]
    return found


def _heat(report: Json) -> Json:
    """The map of the first failure that has one."""
    maps: dict[str, Json] = report["backends"]["Broken"]["heat"]
    return next(iter(maps.values()))


EDITS: list[tuple[Callable[[Json], object], str]] = [
    (lambda r: r.update(schema="mla-conformance-report/99"), "is newer than mla-conformance-report/5"),
    (lambda r: r.update(schema="other/2"), "expected a report with schema mla-conformance-report/5, got \"other/2\""),
    (lambda r: r.pop("backends"), "object missing required field `backends`"),
    (lambda r: r.update(more=1), "object contains unknown field `more`"),
    (lambda r: r["backends"]["Broken"].update(status="pass"), 'Broken.status is "pass", but "fail" follows'),
    (lambda r: _capability(r).update(passed=3), "Broken.capabilities.lse.passed is 3, but 0 follows"),
    (lambda r: (r["backends"]["Broken"].update(heat={}), _capability(r)["failures"].pop()), "Broken.capabilities.lse."),
    (lambda r: _capability(r)["failures"][0].update(replay="true"), 'replay is "true"'),
    (lambda r: r["backends"]["EAGER"]["records"].pop(), 'EAGER.status is "pass", but "not_run" follows'),
    (lambda r: r["backends"]["EAGER"]["records"].extend(r["backends"]["EAGER"]["records"][:1]), "two records of one"),
    (lambda r: _heat(r).update(lines=["5"] * 65), "expected `array` of length <= 64"),
    (lambda r: r["backends"]["EAGER"].update(heat=r["backends"]["Broken"]["heat"]), "EAGER has a heat map of \"lse:"),
    (lambda r: r["cases"].pop(), "one of a case that is not listed"),
    (lambda r: r["cases"].append(r["cases"][0]), "holds a case twice"),
]  # fmt: skip


@pytest.mark.parametrize(("edit", "said"), EDITS)
def test_an_edited_report_is_refused(
    report: Json, tmp_path: Path, capsys: pytest.CaptureFixture[str], edit: Callable[[Json], object], said: str
) -> None:
    edit(report)
    assert said in refused(tmp_path, report, capsys)

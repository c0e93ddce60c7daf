"""``export --issue``: a failure of a report or of a record as a text that can be pasted."""

import re
from pathlib import Path
from typing import Any

import msgspec
import pytest

from mla_conformance.certificate.records import KeptRecord, change_records, is_records, kept_records
from mla_conformance.cli import main
from mla_conformance.judging.record import BackendFacts, Record
from mla_conformance.judging.verdict import Status
from mla_conformance.report.json_report import report_json, to_text
from mla_conformance.report.summary import BackendSummary, RunSummary, summarise

HANDED_IN = Path(__file__).parents[2] / "fixtures" / "records" / "2026.5.jsonl"
CASE = "decode_lse:call=decode;q=[1];kv=[{}]"
SEEN = "decode: LSE is 16.4 at request 2, query 0, head 1, expected 11.3: 4.83e+04 × its error budget, wrong in 1 row"


@pytest.fixture
def report(tmp_path: Path) -> Path:
    """A run in which two cases fail of one cause, and another is excused."""
    cases = [CASE.format(keys) for keys in (9, 40, 70)]
    said: dict[str, Any] = {
        "message": SEEN,
        "check": "lse",
        "clause": "4.2",
        "used": {"lse": 9.0},
        "explanation": "The LSE is doubled",
    }
    records = [
        *(Record("MINE", "mine.py:Mine", "decode_lse", case, Status.FAIL, **said) for case in cases[:2]),
        Record(
            "MINE", "mine.py:Mine", "decode_lse", cases[2], Status.EXPECTED_FAILURE,
            **said | {"explanation": "Heads are rotated by one"}, judged=Status.FAIL, expectation="file: bug: known",
        ),
    ]  # fmt: skip
    facts = BackendFacts("MINE", "mine.py:Mine", versions={"mine": "1.2"})
    environment = {"suite": "2026.5", "tier": "full", "device": "NVIDIA H200", "torch": "2.11.0"}
    run = RunSummary(environment, (BackendSummary(facts, summarise(records, {"decode_lse": 3})),), tuple(cases))
    path = tmp_path / "report.json"
    path.write_text(to_text(report_json(run)), encoding="utf-8")
    return path


def sections(text: str) -> dict[str, str]:
    title, *parts = re.split(r"^#{1,2} (.*)$", text, flags=re.MULTILINE)[1:]
    return {"title": title, **dict(zip(parts[1::2], parts[2::2], strict=True))}


def test_a_failure_of_a_report_has_all_that_a_maintainer_needs(
    report: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["export", "--issue", str(report)]) == 0
    issue = sections(capsys.readouterr().out)
    assert issue["title"] == "MINE: The LSE is doubled, 9 × its budget (SPEC 4.2)"
    assert "- mine 1.2\n- device NVIDIA H200\n- torch 2.11.0\n" in issue["Versions"]
    assert f"mla-conformance replay '{CASE.format(9)}' --backend mine.py:Mine\n" in issue["Reproducer"]
    assert "within its error budget" in issue["Expected"] and "Here: 11.3\n" in issue["Expected"]
    assert SEEN in issue["Seen"] and "looks like: The LSE is doubled" in issue["Seen"]
    assert f"1 more case fails in this way:\n\n```sh\nmla-conformance replay '{CASE.format(40)}'" in issue["Seen"]


def test_what_is_excused_follows_and_a_number_too_large_lists_them(
    report: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "issue.md"
    assert main(["export", "--issue", str(report), "--failure", "2", "--out", str(out)]) == 0
    assert sections(out.read_text("utf-8"))["title"].startswith("MINE: Heads are rotated by one")
    assert main(["export", "--issue", str(report), "--failure", "3"]) == 2
    assert "expected --failure 1 to 2, got 3: 1. MINE: The LSE is doubled" in capsys.readouterr().err


@pytest.mark.parametrize("name", ["record.json", "records.jsonl"])
def test_every_finding_of_a_record_has_an_issue(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (record,) = (each.certificate for each in kept_records(HANDED_IN) if each.certificate.backend == "TRITON_MLA")
    if is_records(path := tmp_path / name):
        change_records(path, lambda _: [KeptRecord(record)])
    else:
        path.write_bytes(msgspec.json.encode(record))
    assert main(["export", "--issue", str(path)]) == 0
    issue = sections(capsys.readouterr().out)
    assert issue["title"].startswith("TRITON_MLA: bug: TritonMLAImpl.forward_mqa allocates the LSE in the query's")
    assert "- vllm 0.33.0\n" in issue["Versions"] and "- device NVIDIA H100 80GB HBM3\n" in issue["Versions"]
    assert "mla-conformance replay " in issue["Reproducer"] and "LSE is" in issue["Seen"]


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["lse:q=[4]", "--issue", "r.json"], "cannot be combined with a case or --backend"),
        (["lse:q=[4]", "--backend", "EAGER"], "expected a case, --backend NAME and --out FILE.py, or --issue REPORT"),
    ],
)
def test_what_export_lacks_is_said(options: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["export", *options]) == 2
    assert said in capsys.readouterr().err

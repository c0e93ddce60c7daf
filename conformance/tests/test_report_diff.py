"""What changed between two reports, and which changes are regressions."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from mla_conformance.cli import main
from mla_conformance.judging.record import BackendFacts, Record
from mla_conformance.judging.verdict import Status
from mla_conformance.report.differences import compare
from mla_conformance.report.summary import BackendSummary, RunSummary, count_by_capability, summarise

A, B = "lse:q=[1]", "lse:q=[2]"
PASS, FAIL, UNSUPPORTED, CRASH = Status.PASS, Status.FAIL, Status.UNSUPPORTED, Status.CRASH


def run(statuses: dict[str, Status], used: float = 0.2, cases: tuple[str, ...] = (A, B), name: str = "X") -> RunSummary:
    records = [Record(name, name, "lse", case, status, used={"row": used}) for case, status in statuses.items()]
    capabilities = summarise(records, count_by_capability(cases))
    return RunSummary({"suite": "1"}, (BackendSummary(BackendFacts(name, name), capabilities),), cases)


def kinds(before: RunSummary, after: RunSummary, drift: float = 0.1) -> list[tuple[str, bool]]:
    return [(change.kind, change.regression) for change in compare(before, after, drift)]


GOOD = run({A: PASS, B: PASS})
ABSENT = RunSummary({"suite": "1"}, (BackendSummary(BackendFacts("X", "X", ("gone",))),), (A, B))


@pytest.mark.parametrize(
    ("before", "after", "expected"),
    [
        (GOOD, GOOD, []),
        (GOOD, run({A: PASS, B: FAIL}), [("newly failing", True)]),
        (run({A: FAIL, B: FAIL}), run({A: FAIL, B: CRASH}), []),
        (run({A: FAIL, B: PASS}), GOOD, [("newly passing", False)]),
        (run({A: UNSUPPORTED, B: PASS}), run({A: FAIL, B: PASS}), [("newly failing", True)]),
        (run({A: FAIL, B: PASS}), run({A: UNSUPPORTED, B: PASS}), []),
        (GOOD, run({A: UNSUPPORTED, B: PASS}), [("no longer judged", True)]),
        (GOOD, run({A: PASS}), [("no longer judged", True)]),
        (run({A: PASS}), GOOD, [("newly passing", False)]),
        (GOOD, run({A: PASS}, cases=(A,)), [("case removed", False)]),
        (run({A: PASS}, cases=(A,)), GOOD, [("case added", False)]),
        (run({A: PASS}, cases=(A,)), run({A: PASS, B: FAIL}), [("newly failing", True)]),
        (GOOD, run({A: PASS, B: PASS}, used=0.31), [("error grew", True)] * 2),
        (GOOD, run({A: PASS, B: PASS}, used=0.29), []),
        (run({A: PASS}, 0.9, (A,)), run({A: PASS}, 0.3, (A,)), [("error shrank", False)]),
        (GOOD, ABSENT, [("no longer available", True)]),
        (ABSENT, GOOD, [("newly passing", False)] * 2),
        (GOOD, replace(GOOD, backends=()), [("backend removed", True)]),
        (replace(GOOD, backends=()), GOOD, [("backend added", False)]),
    ],
)
def test_changes(before: RunSummary, after: RunSummary, expected: list[tuple[str, bool]]) -> None:
    assert kinds(before, after) == expected


def test_how_far_an_error_may_drift_is_the_callers() -> None:
    assert kinds(GOOD, run({A: PASS, B: PASS}, used=0.41), drift=0.25) == []


def test_an_expectation_changes_nothing_of_what_a_kernel_did() -> None:
    waived = RunSummary({"suite": "1"}, (_waived(run({A: PASS, B: FAIL}).backends[0]),), (A, B))
    assert kinds(run({A: PASS, B: FAIL}), waived) == kinds(waived, run({A: PASS, B: FAIL})) == []
    assert kinds(GOOD, waived) == [("newly failing", True)]


def _waived(backend: BackendSummary) -> BackendSummary:
    """The backend with its failures expected."""
    status = Status.EXPECTED_FAILURE
    records = [r.with_fields(status=status, judged=r.status) if r.failed else r for r in backend.records]
    return replace(backend, capabilities=summarise(records, count_by_capability((A, B))))


def test_regressions_come_first() -> None:
    assert kinds(run({A: FAIL, B: PASS}), run({A: PASS, B: FAIL})) == [
        ("newly failing", True),
        ("newly passing", False),
    ]


def test_runs_of_two_suites_are_told_first_with_what_can_be_compared(
    write_report: Callable[..., Path], capsys: pytest.CaptureFixture[str]
) -> None:
    records = [Record("X", "X", "lse", case, PASS) for case in (A, B)]
    old, new = write_report("old.json", records[:1], suite="2026.3"), write_report("new.json", records, suite="2026.4")
    assert main(["report", "diff", str(old), str(new)]) == 0
    first, *rest = capsys.readouterr().out.splitlines()
    assert first.startswith("suite 2026.3 before, 2026.4 after") and "1 of 2 cases are in both lists" in first
    assert rest == [f"· case added: X {B} · pass", "0 regressions, 1 other change"]


def test_exit_statuses(real_run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    report, fewer = real_run / "report.json", tmp_path / "fewer.json"
    data = json.loads(report.read_text())
    for name in ("Broken", "FLASH_ATTN"):
        del data["backends"][name]
    fewer.write_text(json.dumps(data))
    assert main(["report", "diff", str(report), str(report)]) == 0
    assert capsys.readouterr().out == "0 regressions, 0 other changes\n"
    assert main(["report", "diff", str(fewer), str(report)]) == 0
    assert main(["report", "diff", str(report), str(fewer)]) == 1
    shown = capsys.readouterr().out
    assert "✘ backend removed: Broken · was fail" in shown and "1 regression, 0 other changes" in shown
    assert main(["report", "diff", str(report), str(tmp_path)]) == 2
    assert f"{tmp_path / 'report.json'}: cannot be read: No such file" in capsys.readouterr().err
    with pytest.raises(SystemExit) as ended:
        main(["report", "diff", str(report), str(report), "--drift", "2"])
    assert ended.value.code == 2 and "expected a share of the error budget" in capsys.readouterr().err

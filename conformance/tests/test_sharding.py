"""Reports compared and put together: what changed, and shards that merged are the report of the whole."""

import json
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from mla_conformance.cases.sharding import Shard, split
from mla_conformance.cli import main
from mla_conformance.diagnosis.heat_map import HeatMap
from mla_conformance.files.whole import InputError
from mla_conformance.judging.record import BackendFacts, Record, Status
from mla_conformance.report.differences import compare
from mla_conformance.report.json_report import load_report, merge_shards
from mla_conformance.report.summary import BackendSummary, RunSummary, summarise

Json = dict[str, Any]
CASES = [f"lse:q=[{i}]" for i in range(1, 8)]


@settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])  # on a busy machine
@given(
    st.lists(st.text("abc", min_size=1), unique=True, min_size=1),
    st.integers(1, 9),
    st.dictionaries(st.text("abc"), st.floats(0, 1e6)),
)
def test_parts_hold_every_case_once_and_are_balanced(cases: list[str], count: int, seconds: dict[str, float]) -> None:
    parts = split(cases, count, seconds)
    assert parts == split(cases, count, dict(reversed(seconds.items())))
    assert len(parts) == count and sorted(case for part in parts for case in part) == sorted(cases)
    assert all(list(part) == [case for case in cases if case in part] for part in parts)
    if not seconds:
        assert max(map(len, parts)) - min(map(len, parts)) <= 1


def test_durations_balance_the_parts_and_other_shards_do_not_exist() -> None:
    seconds = dict(zip(CASES, [60.0, 10.0, 10.0, 10.0, 10.0, 10.0], strict=False))
    assert split(CASES, 2, seconds) == [(CASES[0],), tuple(CASES[1:])]
    for text in ("", "1", "0/2", "3/2", "1/0", "-1/2", "a/b", "1/2/3", "1/8"):
        with pytest.raises(InputError):
            Shard.of(text, CASES)


@pytest.fixture
def shards(tmp_path: Path, write_report: Callable[..., Path]) -> list[Path]:
    cases = CASES[:3]
    records = [Record("MINE", "MINE", "lse", case, Status.PASS, used={"lse": 0.3}) for case in cases]
    write_report("whole.json", records)
    paths = [write_report(f"{index}.json", [record], [record.case]) for index, record in enumerate(records, 1)]
    for index, path in enumerate(paths, 1):
        shard = {"index": index, "count": len(paths), "cases": cases[index - 1 : index]}
        edit(path, partial(dict.update, cases=cases, shard=shard))
    return paths


def test_the_merge_of_all_shards_is_the_whole_report_with_its_maps_of_errors(
    shards: list[Path], tmp_path: Path, settled: Any
) -> None:
    whole, merged = tmp_path / "whole.json", tmp_path / "all.json"
    assert main(["report", "merge", *map(str, reversed(shards)), "--out", str(merged)]) == 0
    assert settled(merged) == settled(whole) and main(["report", "diff", str(whole), str(merged)]) == 0
    runs = [load_report(path) for path in shards]
    maps = [HeatMap("LSE of new tokens", 1, 1, (digit,)) for digit in "123"]
    heats = [{run.judged_cases[0]: found} for run, found in zip(runs, maps, strict=True)]
    parts = [replace(run.backends[0], heat=heat) for run, heat in zip(runs, heats, strict=True)]
    mapped = [replace(run, backends=(part,)) for run, part in zip(runs, parts, strict=True)]
    assert merge_shards(mapped).backends[0].heat == dict(zip(CASES[:3], maps, strict=True))


def edit(path: Path, change: Callable[[Json], object]) -> None:
    data = json.loads(path.read_text())
    change(data)
    path.write_text(json.dumps(data))


@pytest.fixture
def unmerged(refused: Callable[..., str], tmp_path: Path) -> Callable[..., str]:
    def merge(*paths: Path) -> str:
        (tmp_path / "out.json").write_text("kept")
        said = refused("report", "merge", *paths, "--out", tmp_path / "out.json")
        assert (tmp_path / "out.json").read_text() == "kept"
        return said

    return merge


def test_what_cannot_be_merged(shards: list[Path], tmp_path: Path, unmerged: Callable[..., str]) -> None:
    first, second, third = shards
    assert "missing shard 3/3" in unmerged(first, second)
    assert "expected each shard once, got 2/3 here and in " in unmerged(first, second, second, third)
    assert "expected the report of a shard" in unmerged(first, second, tmp_path / "whole.json")
    edits: list[tuple[Callable[[Json], object], str]] = [
        (lambda r: r.update(suite="1999.1"), "expected the suite of "),
        (lambda r: r["environment"].update(device="other"), f"expected the device of {first}, cpu, got other"),
        (lambda r: r["shard"].update(count=4), "there is no shard 3/4"),
        (lambda r: r["shard"].update(index=2, count=2), "expected shards of one division, got 1/3, 2/3, 2/2"),
        (lambda r: r["cases"].insert(0, "lse:q=[77]"), "expected the list of cases of "),
        (lambda r: r["backends"].update(E=r["backends"].pop("MINE")), "expected the choice of backends of "),
        (lambda r: r["backends"]["MINE"]["versions"].update(torch="0"), "expected the versions of MINE of "),
    ]
    kept = third.read_text()
    for change, said in edits:
        third.write_text(kept)
        edit(third, change)
        assert said in unmerged(*shards)


def test_overlapping_and_incomplete_shards(shards: list[Path], unmerged: Callable[..., str]) -> None:
    first, second, third = shards
    kept = third.read_text()
    third.write_text(second.read_text())
    edit(third, lambda r: r["shard"].update(index=3))
    assert f"overlaps with {second}: both hold lse:" in unmerged(*shards)
    third.write_text(kept)
    edit(third, lambda r: r["backends"]["MINE"].update(status="not_run", records=[]))
    left = {"status": "not_run", "passed": 0, "not_run": 1, "error_budget_used": 0.0}
    edit(third, lambda r: r["backends"]["MINE"]["capabilities"]["lse"].update(left))
    out = first.parent / "all.json"
    assert main(["report", "merge", *map(str, shards), "--out", str(out)]) == 3
    (mine,) = load_report(out).backends
    assert (mine.outcome, mine.counts.not_run) == ("not_run", 1)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--shard", "3/2"], "--shard: expected i/n with 1 <= i <= n"),
        (["--shard", "1/9"], "--shard: 9 shards for "),
        (["--shard", "1/2", "--durations", "absent.json"], "absent.json: cannot be read: No such file"),
        (["--shard=1/2", "--capability=combinations", "--explore=3"], "--explore: cannot be combined with --shard"),
    ],
)
def test_bad_arguments(refused: Callable[..., str], tmp_path: Path, arguments: list[str], said: str) -> None:
    run = ["certify", "--device=cpu", "--capability=lse", "--tier=smoke", "--out", tmp_path / "out"]
    assert said in refused(*run, *arguments) and not (tmp_path / "out").exists()


A, B = "lse:q=[1]", "lse:q=[2]"
PASS, FAIL, UNSUPPORTED, CRASH = Status.PASS, Status.FAIL, Status.UNSUPPORTED, Status.CRASH


def run(statuses: dict[str, Status], used: float = 0.2, cases: tuple[str, ...] = (A, B), name: str = "X") -> RunSummary:
    records = [Record(name, name, "lse", case, status, used={"row": used}) for case, status in statuses.items()]
    capabilities = summarise(records, cases)
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
        (run({A: FAIL, B: PASS}), run({A: PASS, B: FAIL}), [("newly failing", True), ("newly passing", False)]),
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


def test_an_expectation_changes_nothing_of_what_a_kernel_did_and_how_far_an_error_may_drift_is_the_callers() -> None:
    assert kinds(GOOD, run({A: PASS, B: PASS}, used=0.41), drift=0.25) == []
    failing = run({A: PASS, B: FAIL})
    (backend,), status = failing.backends, Status.EXPECTED_FAILURE
    records = [r.with_fields(status=status, judged=r.status) if r.failed else r for r in failing.records]
    waived = replace(failing, backends=(replace(backend, capabilities=summarise(records, (A, B))),))
    assert kinds(failing, waived) == kinds(waived, failing) == []
    assert kinds(GOOD, waived) == [("newly failing", True)]


def test_runs_of_two_suites_are_told_first(write_report: Any, capsys: Any) -> None:
    records = [Record("X", "X", "lse", case, PASS) for case in (A, B)]
    old, new = write_report("old.json", records[:1], suite="2026.3"), write_report("new.json", records, suite="2026.4")
    assert main(["report", "diff", str(old), str(new)]) == 0
    first, *rest = capsys.readouterr().out.splitlines()
    assert first.startswith("suite 2026.3 before, 2026.4 after") and "1 of 2 cases are in both lists" in first
    assert rest == [f"· case added: X {B} · pass", "0 regressions, 1 other change"]
    many = [Record("X", "X", "lse", f"lse:q=[{number}]", PASS) for number in range(1, 31)]
    assert main(["report", "diff", str(write_report("many.json", many)), str(write_report("one.json", many[:1]))]) == 0
    *shown, further, closing = capsys.readouterr().out.splitlines()
    assert len(shown) == 20 and (further, closing) == ("  … and 9 more case removed", "0 regressions, 29 other changes")


def test_exit_statuses(real_run: Path, tmp_path: Path, ours: Callable[..., tuple[int, str, str]]) -> None:
    report, fewer = real_run / "report.json", tmp_path / "fewer.json"
    data = json.loads(report.read_text())
    for name in ("Broken", "FLASH_ATTN"):
        del data["backends"][name]
    fewer.write_text(json.dumps(data))
    assert ours("report", "diff", report, report) == (0, "0 regressions, 0 other changes\n", "")
    assert ours("report", "diff", fewer, report)[0] == 0
    status, shown, _ = ours("report", "diff", report, fewer)
    assert status == 1 and "✘ backend removed: Broken · was fail" in shown and "1 regression, 0 other changes" in shown
    for arguments, said in (
        ([tmp_path], f"{tmp_path / 'report.json'}: cannot be read: No such file"),
        ([report, "--drift", 2], "expected a share of the error budget"),
    ):
        status, _, complained = ours("report", "diff", report, *arguments)
        assert status == 2 and said in complained

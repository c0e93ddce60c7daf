"""Shards: parts that are balanced, stable and complete; merged they are the report of the whole."""

import json
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mla_conformance.cases.sharding import Shard, split
from mla_conformance.cli import main
from mla_conformance.diagnosis.heat_map import HeatMap
from mla_conformance.files.inputs import InputError
from mla_conformance.judging.record import Record
from mla_conformance.judging.verdict import Status
from mla_conformance.report.json_report import write_json
from mla_conformance.report.loading import load_report, merge_shards

Json = dict[str, Any]
CASES = [f"lse:q=[{i}]" for i in range(1, 8)]


@given(
    st.lists(st.text("abc", min_size=1), unique=True, min_size=1),
    st.integers(1, 9),
    st.dictionaries(st.text("abc"), st.floats(0, 1e6)),
)
def test_parts_hold_every_case_once_in_order_and_are_balanced(
    cases: list[str], count: int, seconds: dict[str, float]
) -> None:
    parts = split(cases, count, seconds)
    assert parts == split(cases, count, dict(reversed(seconds.items())))
    assert len(parts) == count and sorted(case for part in parts for case in part) == sorted(cases)
    assert all(list(part) == [case for case in cases if case in part] for part in parts)
    if not seconds:
        assert max(map(len, parts)) - min(map(len, parts)) <= 1


def test_durations_balance_the_parts_and_other_shards_do_not_exist() -> None:
    seconds = dict(zip(CASES, [60.0, 10.0, 10.0, 10.0, 10.0, 10.0], strict=False))
    alone, rest = split(CASES, 2, seconds)
    assert alone == (CASES[0],) and rest == tuple(CASES[1:])
    for text in ("", "1", "0/2", "3/2", "1/0", "-1/2", "a/b", "1/2/3", "1/8"):
        with pytest.raises(InputError):
            Shard.of(text, CASES)


def test_the_merge_of_all_shards_is_the_unsharded_report(
    real_run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], settled: Callable[[Path], Json]
) -> None:
    whole = tmp_path / "whole.json"
    whole.write_bytes((real_run / "report.json").read_bytes())
    edit(whole, lambda r: [r["code"].clear(), *(r["backends"].pop(name) for name in ("Broken", "TORCH_SDPA"))])
    chosen = [f"--capability={name}" for name in ("lse", "new_tokens", "quant_output_fp8")]
    chosen += ["--backend=EAGER", "--backend=FLASH_ATTN", "--device=cpu", "--tier=smoke", "-n1"]
    for index in (1, 2):
        assert (
            main(["certify", *chosen, f"--shard={index}/2", f"--durations={whole}", f"--out={tmp_path / str(index)}"])
            == 0
        )
        assert f"shard {index}/2 of {len(load_report(whole).cases)}" in capsys.readouterr().out
    paths = [str(tmp_path / index / "report.json") for index in ("2", "1")]
    assert main(["report", "merge", *paths, "--out", str(tmp_path / "all.json")]) == 0
    assert settled(tmp_path / "all.json") == settled(whole)
    assert main(["report", "diff", str(whole), str(tmp_path / "all.json")]) == 0


def test_the_merge_keeps_where_the_errors_of_each_shard_are(shards: list[Path]) -> None:
    runs = [load_report(path) for path in shards]
    maps = [HeatMap("LSE of new tokens", 1, 1, (digit,)) for digit in "123"]
    mapped = [
        replace(run, backends=(replace(run.backends[0], heat={run.judged_cases[0]: found}),))
        for run, found in zip(runs, maps, strict=True)
    ]
    assert merge_shards(mapped).backends[0].heat == dict(zip(CASES[:3], maps, strict=True))


@pytest.fixture
def shards(tmp_path: Path, write_report: Callable[..., Path]) -> list[Path]:
    """Three shards of a run in which everything passed; the run stands beside them."""
    cases = CASES[:3]
    records = [Record("MINE", "MINE", "lse", case, Status.PASS, used={"lse": 0.3}) for case in cases]
    write_report("whole.json", records)
    paths = [write_report(f"{index}.json", [record], [record.case]) for index, record in enumerate(records, 1)]
    for index, path in enumerate(paths, 1):
        shard = {"index": index, "count": len(paths), "cases": cases[index - 1 : index]}
        edit(path, partial(dict.update, cases=cases, shard=shard))
    return paths


def edit(path: Path, change: Callable[[Json], object]) -> None:
    data = json.loads(path.read_text())
    change(data)
    write_json(path, data)


def merge(capsys: pytest.CaptureFixture[str], paths: list[Path]) -> str:
    """What is said of reports that cannot be merged; an earlier result is kept."""
    out = paths[0].parent / "out.json"
    out.write_text("kept")
    capsys.readouterr()
    assert main(["report", "merge", *map(str, paths), "--out", str(out)]) == 2 and out.read_text() == "kept"
    return capsys.readouterr().err


def test_what_cannot_be_merged(shards: list[Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    first, second, third = shards
    assert "missing shard 3/3" in merge(capsys, [first, second])
    assert "expected each shard once, got 2/3 here and in " in merge(capsys, [first, second, second, third])
    assert "expected the report of a shard" in merge(capsys, [first, second, tmp_path / "whole.json"])
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
        assert said in merge(capsys, shards)


def test_overlapping_and_incomplete_shards(shards: list[Path], capsys: pytest.CaptureFixture[str]) -> None:
    first, second, third = shards
    kept = third.read_text()
    third.write_text(second.read_text())
    edit(third, lambda r: r["shard"].update(index=3))
    assert f"overlaps with {second}: both hold lse:" in merge(capsys, [first, second, third])
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
        (
            ["--shard", "1/2", "--capability", "combinations", "--explore", "3"],
            "--explore: cannot be combined with --shard",
        ),
    ],
)
def test_bad_arguments(capsys: pytest.CaptureFixture[str], tmp_path: Path, arguments: list[str], said: str) -> None:
    run = ["certify", "--device", "cpu", "--capability", "lse", "--tier", "smoke", "--out", str(tmp_path / "out")]
    assert main([*run, *arguments]) == 2
    assert said in capsys.readouterr().err and not (tmp_path / "out").exists()

"""Reports and certificates with any one value replaced: judged or refused, never a traceback."""

import contextlib
import copy
import datetime
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from mla_conformance.cases.capabilities import CAPABILITIES
from mla_conformance.cases.sharding import Shard
from mla_conformance.certificate.certificate import Certificate, Finding, Unjudged, Worst, read_certificate
from mla_conformance.certificate.digests import installed_digests
from mla_conformance.certificate.pins import Pins
from mla_conformance.certificate.verify import problems
from mla_conformance.cli import main
from mla_conformance.expectations.apply import Expectations
from mla_conformance.expectations.entry import Expectation
from mla_conformance.files.inputs import InputError
from mla_conformance.gating.gate import Gate
from mla_conformance.judging.backend_facts import BackendFacts
from mla_conformance.judging.record import EXPLORED, Record
from mla_conformance.judging.traced import NOTHING_TRACED
from mla_conformance.judging.verdict import Status
from mla_conformance.report.commands import FORMATS
from mla_conformance.report.compare import compare
from mla_conformance.report.counts import Counts
from mla_conformance.report.json_report import report_json, to_text
from mla_conformance.report.loading import load_report
from mla_conformance.report.merging import merge_shards
from mla_conformance.report.summary import BackendSummary, RunSummary, summarise
from mla_conformance.version import SUITE_VERSION

ODD: tuple[Any, ...] = (None, 7, -1, 10**30, "x" * 40, [[]], {"odd": {}})
CASES = [case.id for case in CAPABILITIES["lse"].cases[:3]]


def paths(value: Any) -> Iterator[tuple[Any, ...]]:
    """Ways to every value inside a JSON value."""
    inner = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, below in inner:
        yield (key,)
        yield from ((key, *rest) for rest in paths(below))


def edits(value: Any) -> Iterator[tuple[tuple[Any, ...], Any]]:
    """Copies in which one value is replaced, each with where and by what."""
    for path in paths(value):
        for odd in ODD:
            edited = copy.deepcopy(value)
            inner = edited
            for key in path[:-1]:
                inner = inner[key]
            if inner[path[-1]] != odd:
                inner[path[-1]] = odd
                yield (*path, odd), edited


FREE = {"where", "seconds", "used", "sampled", "shard"}
"""Beside texts, the entries that nothing else of a report follows from."""


def everything(*drawn: Record) -> RunSummary:
    """A shard with a pass, a failure, an expected one and an unavailable backend."""
    passed = Record("MINE", "MINE", "lse", CASES[0], Status.PASS, used={"lse": 0.3}, evidence={"kernel": "k"})
    failed = Record(
        "MINE", "MINE", "lse", CASES[1], Status.FAIL, message="wrong", check="lse", clause="4.2",
        where={"head": 1}, used={"lse": 7.0}, sampled={"rows": 1, "of": 2, "drawn": 1},
        confirmation="after", after=(CASES[0],),
    )  # fmt: skip
    waived = failed.with_fields(case=CASES[2], status=Status.EXPECTED_FAILURE, judged=Status.FAIL, expectation="known")
    facts = BackendFacts("MINE", "MINE", (), {"t": "1"}, False, (("l", "a"),), {"p": "m"}, "f")
    mine = BackendSummary(facts, summarise([passed, failed, waived, *drawn], {}), "gave up")
    absent = BackendSummary(BackendFacts("GONE", "GONE", ("why",)))
    told = {name: "x" for name in ("suite", "tier", "device", "torch")}
    return RunSummary(told, (mine, absent), tuple(CASES), Shard(1, 1, tuple(CASES)))


DRAWN = Record("MINE", "MINE", EXPLORED, CASES[0], Status.PASS, cases=3)


@pytest.mark.parametrize("run", [everything(), everything(DRAWN)], ids=["listed", "drawn"])
def test_any_value_of_a_report(run: RunSummary, tmp_path: Path) -> None:
    """Refused with the file's name, or shown, compared, merged and gated like any other."""
    file = tmp_path / "bad.json"
    expectations = Expectations((Expectation(backend="MINE", case="lse", reason="r", when="torch < 1"),))
    taken = 0
    for where, edited in edits(json.loads(to_text(report_json(run)))):
        file.write_text(json.dumps(edited))
        try:
            loaded = load_report(file)
        except InputError as refused:
            assert str(refused).startswith(f"{file}: "), where
            continue
        taken += 1
        assert isinstance(where[-1], str) or {*map(str, where)} & FREE, where
        assert all(show(loaded) for kind, show in FORMATS.items() if kind != "html" or taken % 10 == 0), where
        compare(run, loaded)
        Gate([loaded], expectations, baseline=[loaded]).rows()
        with contextlib.suppress(InputError):
            merge_shards([loaded])
    assert taken


@pytest.mark.parametrize(
    "text", ["", "{", "[]", "NaN", "[" * 10**5, '{"schema": ' + "[" * 10**5, '{"schema": "\\ud800"}']
)
def test_what_is_no_report_at_all(tmp_path: Path, capsys: pytest.CaptureFixture[str], text: str) -> None:
    (tmp_path / "bad.json").write_text(text)
    assert main(["report", "render", str(tmp_path / "bad.json")]) == 2
    assert "bad.json: " in capsys.readouterr().err


def test_any_value_of_a_certificate(tmp_path: Path) -> None:
    """Malformed, or contradicted by the suite that is installed here; nothing in it is free text."""
    records = [Record("MINE", "MINE", "lse", case, Status.PASS) for case in CASES]
    good = Certificate(
        suite=SUITE_VERSION, version="1", tier="full", date="2026-01-01", backend="M", reference="M", device="cpu",
        environment={"device": "cpu", "suite": SUITE_VERSION}, pins=Pins(), rounding={}, evidence=(),
        digests=installed_digests(), counts=Counts.of(records), deviations=(), traced=NOTHING_TRACED, seconds=1.0,
        worst={"lse": Worst(0.5, CASES[0])}, unjudged=(Unjudged(CASES[1], "too large"),), lacking={},
        cases={record.case: record.status for record in records},
        findings=(Finding(CASES[0], Status.FAIL, "lse", "m", "r"),),
    )  # fmt: skip
    file = tmp_path / "bad.json"
    for where, edited in edits(good.to_json()):
        file.write_text(json.dumps(edited))
        try:
            found = problems(read_certificate(file), datetime.date(2026, 6, 1))
        except InputError as refused:
            found = [str(refused)]
            assert "bad.json: " in found[0], where
        assert found, where

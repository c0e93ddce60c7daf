"""Reports and certificates with any one value replaced: judged or refused, never a traceback."""

import copy
import datetime
import json
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from mla_conformance.capabilities import CAPABILITIES
from mla_conformance.certificate.digests import seal
from mla_conformance.certificate.issue import SCHEMA, count, installed_digests
from mla_conformance.certificate.verify import problems
from mla_conformance.cli import main
from mla_conformance.record import Record
from mla_conformance.verdict import Status
from mla_conformance.version import SUITE_VERSION

ODD: tuple[Any, ...] = (None, 7, "odd", [[]])
CASES = [case.id for case in CAPABILITIES["lse"].cases[:2]]


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
            inner[path[-1]] = odd
            yield (*path, odd), edited


def test_any_value_of_a_report(
    write_report: Callable[..., Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    passed = [Record("MINE", "MINE", "lse", case, Status.PASS, used={"lse": 0.3}) for case in CASES]
    (tmp_path / "known.toml").write_text(
        '[[expectation]]\nbackend = "MINE"\ncase = "lse"\nreason = "r"\nwhen = "torch < 1"'
    )
    good = write_report("good.json", passed)
    for where, edited in edits(json.loads(good.read_text())):
        (tmp_path / "bad.json").write_text(json.dumps(edited))
        status = main(["gate", str(tmp_path / "bad.json"), "--expectations", str(tmp_path)])
        captured = capsys.readouterr()
        assert status in (0, 1) or (status == 2 and "bad.json" in captured.err), (where, captured)


def test_any_value_of_a_certificate() -> None:
    good = {
        "schema": SCHEMA, "suite": SUITE_VERSION, "version": "1", "tier": "full", "date": "2026-01-01",
        "backend": "MINE", "device": "cpu", "environment": {"device": "cpu", "suite": SUITE_VERSION}, "versions": {},
        "rounding": {}, "evidence": [], "clean_tree": None, "digests": installed_digests(),
        "counts": count(2, Counter()), "findings": [{"case": CASES[0], "expectation": "r"}],
        "cases": {CASES[0]: "expected_failure", CASES[1]: "pass"}, "seal": "",
    }  # fmt: skip
    for where, edited in edits(good):
        found = problems({**edited, "seal": seal(edited)}, datetime.date(2026, 6, 1))
        assert found and all(isinstance(problem, str) for problem in found), where

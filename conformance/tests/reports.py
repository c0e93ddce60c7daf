"""Reports and journals of runs whose lines are given, runs that explain nothing, and scripts of ci/ as modules."""

import importlib
import json
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pytest

from mla_conformance.cases.sharding import Shard
from mla_conformance.engine.journal import JOURNAL_NAME, Journal
from mla_conformance.judging.record import BackendFacts, Record
from mla_conformance.report.causes import grouped
from mla_conformance.report.json_report import report_form, to_text
from mla_conformance.report.summary import BackendSummary, RunSummary, summarise
from mla_conformance.version import SUITE_VERSION


def run_of(
    records: Sequence[Record],
    cases: Sequence[str] = (),
    facts: Sequence[BackendFacts] = (),
    shard: Shard | None = None,
    code: Mapping[str, str] = MappingProxyType({}),
    environment: Mapping[str, str] = MappingProxyType({}),
) -> RunSummary:
    """A run as ``certify`` would have it; facts are of backends that are not as the records tell, or absent."""
    listed = tuple(cases or dict.fromkeys(record.case for record in records))
    cases = shard.cases if shard else listed
    groups, known = grouped(records, lambda record: record.backend), {each.name: each for each in facts}
    for name, group in groups.items():
        known.setdefault(name, BackendFacts(name, group[0].reference, versions={"torch": "2.13.0"}))
    parts = {name: () if each.reasons else summarise(groups.get(name, []), cases) for name, each in known.items()}
    summaries = (BackendSummary(known[name], part) for name, part in parts.items())
    told = {"suite": SUITE_VERSION, "tier": "full", "device": "cpu", "torch": "2.13.0", **environment}
    return RunSummary(told, tuple(summaries), listed, shard, code=code)


def write_run(path: Path, records: Sequence[Record], cases: Sequence[str] = (), **told: Any) -> Path:
    path.write_text(to_text(report_form(run_of(records, cases, **told))), encoding="utf-8")
    return path


def script(name: str) -> Any:
    """A script of ci/, which is no package, as a module; they import each other by their names.

    None stays under its name, by which a test of another file in this process may import a file of its own.
    """
    folder = Path(__file__).parents[2] / "ci"
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(folder)
        module = importlib.import_module(name)
    for path in folder.glob("*.py"):
        sys.modules.pop(path.stem, None)
    return module


def write_sealed(folder: Path, lines: Iterable[str]) -> None:
    journal = Journal(folder / JOURNAL_NAME)
    journal.path.unlink(missing_ok=True)
    for line in lines:
        event: Any = json.loads(line)
        del event["after"]
        journal.append(event)


@contextmanager
def unexplained() -> Iterator[None]:
    """Meanwhile no run of this process compares a failure with all that is known, which takes seconds."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("mla_conformance.engine.run.MOST_EXPLAINED", 0)
        yield

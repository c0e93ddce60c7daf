"""Kernels that attack the run fail alone, and cheats fare as their classes say, which the threat model shows."""

import contextlib
import hashlib
import io
import shutil
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from mla_conformance.cases.case import Case
from mla_conformance.commands import reports
from mla_conformance.commands.console import run_and_report
from mla_conformance.engine.journal import JOURNAL_NAME, Completed, Journal, Reported, RunFolder
from mla_conformance.engine.machine import LACKED_MEMORY
from mla_conformance.engine.messages import Judge, Setup
from mla_conformance.engine.request import RunRequest
from mla_conformance.engine.run import Run
from mla_conformance.engine.supervisor import Limits, Supervisor
from mla_conformance.engine.tasks import Tasks
from mla_conformance.files.whole import section_of
from mla_conformance.judging.record import Record, Status
from mla_conformance.report.json_report import load_report
from mla_conformance.tests.cheats.cheat import cheats
from mla_conformance.tests.cheats.report import SALT, deciding_digest, markdown, sentence, stored
from mla_conformance.tests.drawn import judged
from mla_conformance.tests.reports import unexplained
from mla_conformance.trials.trial import Context

NEW = ["new_tokens:dims=small;q=[5];lse=0", "new_tokens:dims=small;q=[3]"]
CHUNKS = [Case.parse(f"context_chunk:call=context_chunk;dims=small;q=[{n}];kv=[9]").id for n in (1, 2, 3, 4)]
ENDS = """
import os, pathlib
from mla_conformance.backends.eager import EagerPrefillBackend as Ends
if (mark := pathlib.Path(__file__).with_name("imported")).exists():
    os._exit(3)
mark.touch()
"""
Records = dict[tuple[str, str], Record]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("attacks")
    shutil.copy(Path(__file__).with_name("attacking.py"), folder)
    (folder / "ends.py").write_text(ENDS)
    return folder


@pytest.fixture(scope="module")
def run(folder: Path) -> tuple[Records, str]:
    attacking = ("TwoFaced", "RewritesTheReport", "DiesOfContext", "EndsOthers", "Innocent", "Lacks")
    names = [*(f"{folder}/attacking.py:{name}" for name in attacking), f"{folder}/ends.py:Ends"]
    request = RunRequest.of(names, device="cpu", cases=[*NEW, *CHUNKS])
    run, printed = Run(request, RunFolder.claim(folder / "out"), Limits(1, 20.0, give_up_after=2)), io.StringIO()
    with contextlib.redirect_stdout(printed), unexplained():
        run_and_report(run)
    found = load_report(folder / "out").records
    return {(record.backend, record.case): record for record in found}, printed.getvalue()


def test_the_innocent_pass(run: Any) -> None:
    of = [run[0][name, case].status for name in ("Innocent", "EndsOthers") for case in (*NEW, *CHUNKS)]
    assert set(of) == {Status.PASS}
    said = [record.message for (name, _), record in run[0].items() if name == "Innocent" and record.message]
    assert said and all(each.startswith("the process died during this case: exit status 0; ") for each in said)
    assert all(each.endswith(", and in one of its own it is pass: the crash is charged to nobody") for each in said)
    ends, lacks = (run[0][name, NEW[1]] for name in ("Ends", "Lacks"))
    assert ends.status is Status.CRASH and "before the case began, 3 times: exit status 3" in ends.message
    assert lacks.status is Status.UNAVAILABLE and lacks.message.endswith(f"exit status {LACKED_MEMORY}, out of memory")


def test_a_call_is_given_up_and_a_declaration_that_differs_between_processes_is_a_failure(run: Any) -> None:
    records, printed = run
    said = [record.message for (name, _), record in records.items() if name == "TwoFaced" and record.failed]
    assert said and all("'rounded-p'" in each and "where it was judged" in each for each in said)
    found = {case: record.status for (name, case), record in records.items() if name == "DiesOfContext"}
    assert found == dict.fromkeys(NEW, Status.PASS) | dict.fromkeys(CHUNKS[:2], Status.CRASH)
    assert "2 NOT RUN: gave up on context_chunk after 2 equal failures of its process" in " ".join(printed.split())


def test_a_report_is_final(folder: Path, run: tuple[Records, str]) -> None:
    records, printed = run
    assert {records["RewritesTheReport", case].status for case in NEW} == {Status.FAIL}
    left = (folder / "left").read_text().split()
    assert left and not [process for process in left if Path("/proc", process).exists()]
    digest = hashlib.sha256((folder / "out" / "report.json").read_bytes()).hexdigest()
    assert printed.splitlines()[-1].endswith(f"report.json beside it, SHA-256 {digest}")
    assert list(Journal(folder / "out" / JOURNAL_NAME).events())[-2:] == [Completed(), Reported(digest)]
    assert Journal(folder / "out" / JOURNAL_NAME).is_finished()


PAGE = Path(__file__).parents[2] / "docs" / "threat-model.md"
CHEATS = cheats()
DECIDED = ("SearchesTheHeap", "RewritesTheJudge", "ReplacesTheGoldenResult", "ForgesTheAnswer")
"""Those that a judge in the kernel's process would let through, by what they reach for."""
RENEW = "run `mla-conformance cheats --out fixtures/cheats.json --table docs/threat-model.md`"


def test_the_stored_report_is_as_expected(tmp_path: Path, monkeypatch: Any, refused: Any) -> None:
    report = stored()
    assert report.digest == deciding_digest(), f"the stored report is stale; {RENEW}"
    assert report.outcomes.keys() == CHEATS.keys() and report.unexpected == []
    assert section_of(PAGE, "cheats")[1].strip() == markdown(report), f"the table is stale; {RENEW}"
    monkeypatch.setattr(reports, "files", lambda package: tmp_path)  # as where there are no tests
    assert "pip install -e ." in refused("cheats")


def test_what_reaches_for_the_judge_is_caught(keepers_started_anew: None) -> None:
    """In processes that have judged nothing else."""
    entries = {CHEATS[name].reference: CHEATS[name] for name in DECIDED}
    with closing(Supervisor(60.0)) as supervisor:
        supervisor.add_place(Setup("cpu"), {})
        tasks = Tasks([[Judge(reference, entry.case, fresh=True)] for reference, entry in entries.items()])
        records = {each.task.reference: each.answer.record for each in supervisor.run(tasks)}
    for reference, entry in entries.items():
        assert (record := records[reference]) and entry.caught in sentence(record), reference


@pytest.mark.parametrize("name", [name for name, entry in CHEATS.items() if entry.salted])
def test_what_was_recorded_beforehand_answers_nothing_that_is_drawn_with_a_salt(name: str) -> None:
    entry = CHEATS[name]
    assert entry.caught in sentence(judged(entry.reference, entry.case, Context(SALT)))
    assert sentence(judged(entry.reference, entry.case, Context())) == ""

"""Cheats fare as their classes say, now and in the stored table, which the threat model shows."""

from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
import torch

from mla_conformance.cases.case import Case
from mla_conformance.cli import main
from mla_conformance.commands import options
from mla_conformance.engine.messages import Judge, Setup
from mla_conformance.engine.supervisor import Supervisor
from mla_conformance.engine.tasks import Tasks
from mla_conformance.files.outputs import Section
from mla_conformance.tests.cheats import report
from mla_conformance.tests.cheats.cheat import FAMILIES, Cheat, CheatError, ThreeTimes, cheat, cheats
from mla_conformance.tests.cheats.report import SALT, CheatReport, deciding_digest, markdown, sentence, stored
from mla_conformance.trials.context import Context
from mla_conformance.trials.judge_one import judge_one
from mla_conformance.trials.subject import Subject

PAGE = Path(__file__).parents[2] / "docs" / "threat-model.md"
CHEATS = cheats()
DECIDED = [
    CHEATS[name] for name in ("SearchesTheHeap", "RewritesTheJudge", "ReplacesTheGoldenResult", "ForgesTheAnswer")
]
"""Those that a judge in the kernel's process would let through, by what they reach for."""
RENEW = "run `mla-conformance cheats --out fixtures/cheats.json --table docs/threat-model.md`"


def test_every_family_is_listed() -> None:
    files = {path.stem for path in Path(report.__file__).parent.glob("*.py")}
    assert files == {*FAMILIES, "__init__", "cheat", "report"}


def test_where_there_are_no_tests_it_is_said_where_they_are(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(options, "files", lambda package: tmp_path)
    assert main(["cheats"]) == 2
    assert "pip install -e ." in capsys.readouterr().err


def test_the_stored_report_is_that_of_this_code() -> None:
    assert stored().digest == deciding_digest(), f"the stored report is stale; {RENEW}"


def test_every_cheat_fared_as_expected() -> None:
    assert stored().outcomes.keys() == CHEATS.keys() and stored().unexpected == []


def test_the_threat_model_holds_the_stored_table() -> None:
    assert Section.of(PAGE, "cheats").content.strip() == markdown(stored()), f"the table is stale; {RENEW}"


@pytest.fixture(scope="module")
def said(keepers_started_anew: None) -> dict[str, str]:
    """By reference, what is said of each cheat, in processes that have judged nothing else."""
    with Supervisor(60.0) as supervisor:
        supervisor.add_place(Setup("cpu"), {})
        tasks = Tasks([[Judge(entry.reference, entry.case, fresh=True)] for entry in DECIDED])
        return {
            each.task.reference: sentence(each.answer.record) for each in supervisor.run(tasks) if each.answer.record
        }


@pytest.mark.parametrize("entry", DECIDED, ids=lambda entry: entry.name)
def test_what_reaches_for_the_judge_is_caught(entry: Cheat, said: dict[str, str]) -> None:
    assert entry.caught in said[entry.reference]


@pytest.mark.parametrize("entry", [entry for entry in CHEATS.values() if entry.salted], ids=lambda entry: entry.name)
def test_what_was_recorded_beforehand_answers_nothing_that_is_drawn_with_a_salt(entry: Cheat) -> None:
    subject, case = Subject.of(entry.reference, torch.device("cpu")), Case.parse(entry.case)
    assert entry.caught in sentence(judge_one(subject, case, Context(SALT)))
    assert sentence(judge_one(subject, case, Context())) == ""


@pytest.fixture
def otherwise(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """The name of a cheat that got through although it should be caught, in what the command finds."""
    name = next(name for name, entry in CHEATS.items() if entry.caught)
    outcomes = {**stored().outcomes, name: ""}
    monkeypatch.setattr(report, "run_cheats", lambda: CheatReport("of today", outcomes))
    yield name


def test_one_that_fares_otherwise_is_told(otherwise: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    page, out = tmp_path / "page.md", tmp_path / "cheats.json"
    page.write_text("before\n<!-- cheats:begin --><!-- cheats:end -->\nafter\n")
    assert main(["cheats", "--table", str(page), "--out", str(out)]) == 1
    assert f"✘ {otherwise}" in capsys.readouterr().out
    assert msgspec.json.decode(out.read_bytes(), type=CheatReport).unexpected == [otherwise]
    assert page.read_text().startswith("before\n") and f"| `{otherwise}` |" in page.read_text()


@pytest.mark.parametrize(("caught", "trust"), [("", ""), ("output is", "nobody")])
def test_a_cheat_is_either_caught_or_explained(caught: str, trust: str) -> None:
    class Undecided(ThreeTimes):
        """Attempts something."""

    with pytest.raises(CheatError, match="either what catches it or why nothing does"):
        cheat(caught=caught, trust=trust)(Undecided)

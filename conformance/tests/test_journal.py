"""A run's folder, in use by one run at a time, and its journal: what an earlier run wrote is never lost."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from mla_conformance.engine.journal import JOURNAL_NAME, Completed, GaveUp, Journal, Judgement, Resumed, RunFolder
from mla_conformance.files.whole import InputError
from mla_conformance.judging.record import Record, Status

Refused = Callable[..., str]
AWKWARD = "line\u2028separator, next line\x85, 1.5 × its budget, half a pair \udc80\n"


def test_a_journal_cut_at_any_byte_keeps_its_whole_lines_and_is_written_on(tmp_path: Path) -> None:
    journal = Journal(tmp_path / JOURNAL_NAME)
    record = Record("EAGER", "EAGER", "lse", "lse:q=[4]", Status.PASS, message=AWKWARD)
    journal.append(Judgement(record))
    whole, (seal,) = journal.path.read_bytes(), journal.seals
    for cut in range(0, len(whole), 7):
        journal.path.write_bytes(whole + whole[:cut])
        assert len(list(journal.events())) == 1
        assert journal.take_up() == []
        journal.append(Completed())
        assert list(journal.events()) == [Judgement(record), Completed()] and journal.is_finished()
        assert list(journal.sealed().values()) == list(journal.events())
        journal.seals[0].rename(seal)


HEAT = b'{"heat": {"part": "p", "heads": 1, "rows": 1, "lines": ["a"]}}'
NO_EVENTS = [b"{", b"[1]", b"\xff\xfe\x00", b'{"event": "verdict", "record": {"backend": 1}}', b"[" * 10**5]
NO_EVENTS += [b'{"event": "gave_up", "backend": "EAGER"}', b'{"event": "resume", "after": ""}']
NO_EVENTS += [b'{"event": "learned", "backend": "E", "found": {"traced": 7}}']
NO_EVENTS += [b'{"event": "learned", "backend": "E", "case": "c", "found": ' + HEAT + b"}"]


@pytest.mark.parametrize("line", NO_EVENTS, ids=range(len(NO_EVENTS)))
def test_a_line_of_another_is_left_out_wherever_it_stands(tmp_path: Path, line: bytes) -> None:
    journal = Journal(tmp_path / JOURNAL_NAME)
    for event in (Resumed(), Completed()):
        with journal.path.open("ab") as file:
            file.write(line + b"\n")
        journal.append(event)
    with journal.path.open("ab") as file:
        file.write(line + b"\n")
    assert journal.sealed() == {2: Resumed(), 4: Completed()}
    assert journal.take_up() == [1, 3, 5]
    assert journal.sealed() == {1: Resumed(), 2: Completed()}


def test_a_run_that_was_killed_between_line(tmp_path: Path, monkeypatch: Any) -> None:
    journal = Journal(tmp_path / JOURNAL_NAME)
    journal.append(Resumed())
    (sealed,) = journal.seals
    journal.append(GaveUp("EAGER", AWKWARD))
    os.mkfifo(sealed)
    assert len(journal.sealed()) == 2  # behind the second seal, with the first one still there
    next(seal for seal in journal.seals if seal != sealed).unlink()
    assert journal.take_up() == [2] and journal.sealed() == {1: Resumed()}
    journal = Journal(tmp_path / JOURNAL_NAME)
    gone = tmp_path / f".{journal.path.name}-gone"
    monkeypatch.setattr(Path, "glob", lambda folder, pattern: iter([gone]))
    journal.append(Completed())
    assert journal.is_finished()


CERTIFY = ("certify", "--backend=EAGER", "--device=cpu", "--out")
UNFINISHED = '{"event": "plan"}\n{"event": "verdict"}\n'
FINISHED = UNFINISHED + '{"event": "end"}\n'


@pytest.fixture
def hold(tmp_path: Path) -> Callable[[str], Path]:
    def make(journal: str) -> Path:
        folder = tmp_path / "run"
        folder.mkdir()
        (folder / "journal.jsonl").write_text(journal)
        for name in ("run.log", "report.json", "report.html", "mine.txt"):
            (folder / name).write_text(f"earlier {name}")
        return folder

    return make


def contents(folder: Path) -> dict[str, str]:
    return {path.name: path.read_text() for path in folder.iterdir()}


def test_the_second_of_two_runs_into_one_folder_is_refused(tmp_path: Path, refused: Refused) -> None:
    first = RunFolder.claim(tmp_path)
    assert f"--out {tmp_path}: another run is writing into it" in refused(*CERTIFY, tmp_path)
    os.close(first.lock)
    os.close(RunFolder.claim(tmp_path).lock)


@pytest.mark.parametrize(
    ("journal", "asked", "said"),
    [
        *((FINISHED, [wrong], "expected") for wrong in ("--workers=0", "--backend=NOPE", "--expectations=/nowhere")),
        (FINISHED, ["--nonsense"], "--nonsense"),
        (UNFINISHED, [], "--resume {} continues it, --fresh sets it aside"),
    ],
)
def test_a_refused_run_leaves_a_folder_as_it_was(hold: Any, refused: Any, journal: str, asked: Any, said: str) -> None:
    folder = hold(journal)
    before = contents(folder)
    assert said.format(folder) in refused(*CERTIFY, folder, *asked)
    assert contents(folder) == before and [folder] == list(folder.parent.iterdir())


@pytest.mark.parametrize(("journal", "anew"), [(FINISHED, False), (UNFINISHED, True)], ids=["finished", "--fresh"])
def test_what_an_earlier_run_wrote_is_kept_in_a_folder_beside(hold: Any, journal: str, anew: bool) -> None:
    folder = hold(journal)
    before = contents(folder)
    run = RunFolder.claim(folder, anew=anew)
    assert contents(folder) == before  # until the new run begins
    run.begin()
    (beside,) = set(folder.parent.iterdir()) - {folder}
    assert beside.name.startswith("run-") and contents(folder) == {"mine.txt": before.pop("mine.txt")}
    assert contents(beside) == before


def test_a_run_without_a_folder_gets_one_that_latest_names(here: Path) -> None:
    for _ in range(2):
        run = RunFolder.claim(None)
        run.begin()
        assert (here / "build/mla-conformance/latest").resolve() == run.path
    assert len(list((here / "build/mla-conformance").iterdir())) == 3
    RunFolder.claim(here / "new").discard()
    assert not (here / "new").exists()
    RunFolder.claim(here).discard()
    assert here.exists()


@pytest.mark.parametrize("below", ["", "deeper/still"])
def test_a_folder_that_cannot_be_written(tmp_path: Path, below: str) -> None:
    (tmp_path / "file").write_text("kept")
    with pytest.raises(InputError, match=f"--out {tmp_path / 'file' / below}: expected a writable folder: "):
        RunFolder.claim(tmp_path / "file" / below)
    assert (tmp_path / "file").read_text() == "kept"

"""The journal: what was written is read again, whatever happened to the last line."""

import json
import os
from pathlib import Path

import pytest

from mla_conformance.engine.journal import Completed, GaveUp, Journal, Judgement, Resumed
from mla_conformance.judging.record import Record
from mla_conformance.judging.verdict import Status

AWKWARD = "line\u2028separator, next line\x85, 1.5 × its budget, half a pair \udc80\n"


def test_events_come_back_in_order(tmp_path: Path) -> None:
    journal = Journal.inside(tmp_path)
    assert list(journal.events()) == []
    for number in range(3):
        journal.append(GaveUp(str(number), AWKWARD))
    assert list(journal.events()) == [GaveUp(str(number), AWKWARD) for number in range(3)]


def test_a_journal_cut_at_any_byte_keeps_its_whole_lines_and_is_written_on(tmp_path: Path) -> None:
    journal = Journal.inside(tmp_path)
    record = Record("EAGER", "EAGER", "lse", "lse:q=[4]", Status.PASS, message=AWKWARD)
    journal.append(Judgement(record))
    whole, (seal,) = journal.path.read_bytes(), journal.seals
    for cut in range(len(whole)):
        journal.path.write_bytes(whole + whole[:cut])
        assert len(list(journal.events())) == 1
        assert journal.take_up() == []
        journal.append(Completed())
        assert list(journal.events()) == [Judgement(record), Completed()] and journal.is_finished()
        assert list(journal.sealed().values()) == list(journal.events())
        assert journal.records() == {("EAGER", "lse:q=[4]"): record}
        journal.seals[0].rename(seal)


def test_the_last_verdict_on_a_question_counts(tmp_path: Path) -> None:
    journal = Journal.inside(tmp_path)
    for status in (Status.FAIL, Status.PASS):
        journal.append(Judgement(Record("EAGER", "EAGER", "lse", "lse:q=[4]", status)))
    assert [record.status for record in journal.records().values()] == [Status.PASS]


NO_EVENTS = [b"{", b"[1]", b"\xff\xfe\x00", b'{"event": "verdict", "record": {"backend": 1}}', b"[" * 10**5]
NO_EVENTS += [b'{"event": "gave_up", "backend": "EAGER"}', b'{"event": "traced", "backend": "EAGER", "traced": 7}']
NO_EVENTS += [
    b'{"event": "heat", "backend": "E", "case": "c", "heat": {"part": "p", "heads": 1, "rows": 1, "lines": ["a"]}}'
]
NO_EVENTS += [b'{"event": "resume", "after": ""}']


@pytest.mark.parametrize("line", NO_EVENTS, ids=range(len(NO_EVENTS)))
def test_a_line_of_another_is_left_out_wherever_it_stands(tmp_path: Path, line: bytes) -> None:
    journal = Journal.inside(tmp_path)
    for event in (Resumed(), Completed()):
        with journal.path.open("ab") as file:
            file.write(line + b"\n")
        journal.append(event)
    with journal.path.open("ab") as file:
        file.write(line + b"\n")
    assert journal.sealed() == {2: Resumed(), 4: Completed()}
    assert journal.take_up() == [1, 3, 5]
    assert journal.sealed() == {1: Resumed(), 2: Completed()}


def test_a_run_that_was_killed_between_line_and_seal_goes_on(tmp_path: Path) -> None:
    journal = Journal.inside(tmp_path)
    journal.append(Resumed())
    (sealed,) = journal.seals
    journal.append(GaveUp("EAGER", AWKWARD))
    os.mkfifo(sealed)
    assert len(journal.sealed()) == 2  # behind the second seal, with the first one still there
    next(seal for seal in journal.seals if seal != sealed).unlink()
    assert journal.take_up() == [2] and journal.sealed() == {1: Resumed()}


def test_files_named_as_seals_that_come_and_go_end_no_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    journal = Journal.inside(tmp_path)
    gone = tmp_path / f".{journal.path.name}-gone"
    monkeypatch.setattr(Path, "glob", lambda folder, pattern: iter([gone]))
    journal.append(Completed())
    assert journal.is_finished()


def test_bytes_that_are_no_text_cost_their_line_only(tmp_path: Path) -> None:
    journal = Journal.inside(tmp_path)
    journal.append(Resumed())
    with journal.path.open("ab") as file:
        file.write(b"\xff\xfe\x00\n")
    journal.append(Completed())
    assert list(journal.events()) == [Resumed(), Completed()]


def test_one_event_is_one_line(tmp_path: Path) -> None:
    journal = Journal.inside(tmp_path)
    journal.append(GaveUp("EAGER", AWKWARD))
    (line,) = journal.path.read_text(encoding="ascii").splitlines()
    assert json.loads(line) == {"after": "", "event": "gave_up", "backend": "EAGER", "reason": AWKWARD}

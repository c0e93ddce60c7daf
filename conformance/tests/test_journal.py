"""The journal: what was written is read again, whatever happened to the last line."""

import json
from pathlib import Path

import pytest

from mla_conformance.engine.journal import Completed, GaveUp, Journal, JournalError, Judgement, Resumed
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
    whole = journal.path.read_bytes()
    for cut in range(len(whole)):
        journal.path.write_bytes(whole + whole[:cut])
        assert len(list(journal.events())) == 1
        journal.repair()
        journal.append(Completed())
        assert list(journal.events()) == [Judgement(record), Completed()] and journal.is_finished()
        assert journal.records() == {("EAGER", "lse:q=[4]"): record}


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


@pytest.mark.parametrize("line", NO_EVENTS, ids=range(len(NO_EVENTS)))
def test_a_line_that_is_no_event_is_named(tmp_path: Path, line: bytes) -> None:
    journal = Journal.inside(tmp_path)
    journal.append(Resumed())
    journal.check()
    with journal.path.open("ab") as file:
        file.write(line + b"\n")
    with pytest.raises(JournalError, match=r"journal.jsonl, line 2: expected an event of a run as JSON, got "):
        journal.check()


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
    assert json.loads(line) == {"event": "gave_up", "backend": "EAGER", "reason": AWKWARD}

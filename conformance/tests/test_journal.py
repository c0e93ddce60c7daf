"""The journal: what was written is read again, whatever happened to the last line."""

import json
from pathlib import Path

import pytest

from mla_conformance.isolation.journal import Journal

AWKWARD = "line\u2028separator, next line\x85, 1.5 × its budget, half a pair \udc80\n"


def test_events_come_back_in_order(tmp_path: Path) -> None:
    journal = Journal.inside(tmp_path)
    assert list(journal.events()) == []
    for number in range(3):
        journal.append("verdict", number=number, message=AWKWARD)
    assert [event["number"] for event in journal.events()] == [0, 1, 2]
    assert {event["message"] for event in journal.events()} == {AWKWARD}


@pytest.mark.parametrize("cut", range(1, 60, 7))
def test_a_line_that_was_cut_off_is_left_out(tmp_path: Path, cut: int) -> None:
    journal = Journal.inside(tmp_path)
    journal.append("verdict", message=AWKWARD)
    journal.append("verdict", message=AWKWARD)
    journal.path.write_bytes(journal.path.read_bytes()[: -1 - cut])
    assert [event["message"] for event in journal.events()] == [AWKWARD]


def test_a_reader_goes_on_where_whole_lines_ended(tmp_path: Path) -> None:
    journal = Journal.inside(tmp_path)
    journal.append("start")
    events, position = journal.events_from(0)
    journal.append("verdict", message=AWKWARD)
    whole = journal.path.read_bytes()
    journal.path.write_bytes(whole[:-9])
    assert ([event["event"] for event in events], journal.events_from(position)) == (["start"], ([], position))
    journal.path.write_bytes(whole)
    assert journal.events_from(position) == ([{"event": "verdict", "message": AWKWARD}], len(whole))


def test_bytes_that_are_no_text_cost_their_line_only(tmp_path: Path) -> None:
    journal = Journal.inside(tmp_path)
    journal.append("start")
    with journal.path.open("ab") as file:
        file.write(b"\xff\xfe\x00\n")
    journal.append("verdict")
    assert [event["event"] for event in journal.events()] == ["start", "verdict"]


def test_one_event_is_one_line(tmp_path: Path) -> None:
    journal = Journal.inside(tmp_path)
    journal.append("verdict", message=AWKWARD)
    (line,) = journal.path.read_text(encoding="ascii").splitlines()
    assert json.loads(line) == {"event": "verdict", "message": AWKWARD}

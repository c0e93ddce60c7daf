"""Heat maps: what may be one, which part of a failure is shown, and what the picture of it says."""

import re
from typing import Any
from xml.etree import ElementTree

import msgspec
import pytest
import torch

from mla_conformance.backends.eager import EagerPrefillBackend
from mla_conformance.cases.case import Case
from mla_conformance.diagnosis import heat
from mla_conformance.diagnosis.heat import heat_map, heat_maps, heat_of
from mla_conformance.diagnosis.heat_map import HeatMap
from mla_conformance.engine.folder import RunFolder
from mla_conformance.engine.journal import HeatShown, Journal, Judgement, Planned
from mla_conformance.engine.request import RunRequest
from mla_conformance.engine.run import Run
from mla_conformance.judging.measured import Measured
from mla_conformance.judging.record import BackendFacts, Record
from mla_conformance.judging.verdict import Status
from mla_conformance.report.pages import picture, picture_file, words
from mla_conformance.trials.context import Context
from mla_conformance.trials.judge_one import judged_trial
from mla_conformance.trials.subject import Subject
from mla_conformance.trials.trial import Trial

CASE = "lse:dims=small;heads=2;q=[4,7]"
WRONG = Record("EAGER", "EAGER", "lse", CASE, Status.FAIL, check="lse")
SMALL = HeatMap("LSE of new tokens", 2, 3, ("012", "000"))


class LastHeadWrong(EagerPrefillBackend):
    """The output of one head of two is wrong, and its LSE in one row."""

    def run_prefill_new_tokens(self, *arguments: Any, **options: Any) -> Any:
        output, lse = super().run_prefill_new_tokens(*arguments, **options)
        output[:, 1] += 1.0
        lse[1, 3] += 1.0
        return output, lse


@pytest.fixture
def failed() -> tuple[Trial, Record]:
    subject = Subject.of(f"{LastHeadWrong.__module__}:LastHeadWrong", torch.device("cpu"))
    return judged_trial(subject, Case.parse(CASE), Context())


def test_a_picture_shows_where_errors_are() -> None:
    got, golden = torch.zeros(200, 3, 2), torch.zeros(200, 3, 2)
    got[-1, 2, 0], got[0, 1, 1], got[1, 1, 0] = torch.nan, 1.0, 25.0
    found = heat_map("output of decode", Measured(got.double(), golden.double(), torch.ones(200, 3, 1).double()))
    assert found == HeatMap("output of decode", 3, 200, ("0" * 64, "2" + "0" * 63, "0" * 63 + "9"))
    said = (
        "output of decode: 2 of 192 cells over their budget; 3 heads down, 200 rows to the right; the worst of several"
    )
    assert words(found).startswith(said)
    drawn = re.findall(r'class="over" d="(.+?)".+?fill-opacity="([\d.]+)"', picture(found))
    assert drawn == [("M0 1h1v1h-1z", "0.61"), ("M63 2h1v1h-1z", "1.00")]


def test_neighbours_are_drawn_as_one_and_the_file_stands_alone() -> None:
    assert 'd="M1 0h2v1h-2zM0 1h1v1h-1z"' in picture(HeatMap("LSE", 2, 3, ("011", "100")))
    assert words(SMALL) == (
        "LSE of new tokens: 2 of 6 cells over their budget; 2 heads down, 3 rows to the right; "
        "stronger colour = further over budget"
    )
    part = msgspec.structs.replace(SMALL, part="<a & b>")
    root = ElementTree.fromstring(picture_file(part))
    assert root.tag == "{http://www.w3.org/2000/svg}svg" and root.get("role") == "img"
    assert root[0].text == words(part)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"lines": ["012", "0000"]}, "expected 2 lines of 3 digits"),
        ({"lines": ["01\n", "000"]}, "matching regex"),
        ({"lines": ["01٣", "000"]}, "matching regex"),
        ({"rows": 100, "lines": ["0" * 100] * 2}, "matching regex"),
        ({"rows": 0, "lines": ["", ""]}, ">= 1"),
    ],
)
def test_what_is_no_map_is_refused(change: dict[str, Any], said: str) -> None:
    plain = msgspec.to_builtins(SMALL)
    assert msgspec.convert(plain, HeatMap) == SMALL
    with pytest.raises(msgspec.ValidationError, match=re.escape(said)):
        msgspec.convert({**plain, **change}, HeatMap)


def test_the_part_with_most_cells_over_their_budget_is_shown(failed: tuple[Trial, Record]) -> None:
    assert failed[1].check == "lse"
    found = heat_of(*failed)
    assert found and (found.part, found.heads, found.rows, found.wrong) == ("output of new tokens", 2, 11, 11)
    assert set(found.lines[0]) == {"0"} and "0" not in found.lines[1]


def test_without_wrong_numbers_or_without_memory_there_is_none(
    failed: tuple[Trial, Record], monkeypatch: pytest.MonkeyPatch
) -> None:
    trial, record = failed
    assert heat_of(trial, record.with_fields(check="call")) is None
    empty = Measured(*(torch.zeros(2, 0, dtype=torch.double),) * 3)
    assert heat_maps({"LSE of rank 1": empty}) == []
    for error, raised in ((MemoryError(), False), (RuntimeError("a programming error"), True)):
        monkeypatch.setattr(heat, "measure", lambda *_, error=error: (_ for _ in ()).throw(error))
        if raised:
            with pytest.raises(RuntimeError, match="a programming error"):
                heat_of(trial, record)
        else:
            assert heat_of(trial, record) is None


def test_what_the_journal_tells_of_failures_is_kept_when_a_run_is_resumed(tmp_path: Any) -> None:
    journal, passes = Journal.inside(tmp_path), "lse:q=[4]"
    journal.append(Planned({}))
    for case in (CASE, passes):
        journal.append(HeatShown("EAGER", case, SMALL))
    for record in (WRONG, WRONG.with_fields(case=passes, status=Status.PASS)):
        journal.append(Judgement(record))
    run = Run(RunRequest.of(["EAGER"], device="cpu", cases=[CASE, passes]), RunFolder.claim(tmp_path, resume=True))
    run.facts, run.environment = [BackendFacts("EAGER", "EAGER")], {}
    run.resume()
    assert run.summary().backends[0].heat == {CASE: SMALL}
    run.supervisor.log.close()
    run.folder.release()

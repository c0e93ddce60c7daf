"""What a failure's own numbers show: a finding that is no other mistake, and the map of its errors."""

import math
import re
from typing import Any
from unittest.mock import Mock
from xml.etree import ElementTree

import msgspec
import pytest
import torch

from mla_conformance.backends.eager import EagerPrefillBackend
from mla_conformance.cases.case import Case
from mla_conformance.diagnosis import reach
from mla_conformance.diagnosis.heat_map import HeatMap
from mla_conformance.diagnosis.reach import heat_maps, heat_of
from mla_conformance.judging.diagnosis import TRANSPOSED, UNWRITTEN, explain_lse, explain_output
from mla_conformance.judging.steps import Measured
from mla_conformance.report.html import picture_file, words
from mla_conformance.tests.drawn import CONTEXT, changed, subject_of
from mla_conformance.trials.trial import judged_trial

SMALL = HeatMap("LSE of new tokens", 2, 3, ("012", "000"))


def last_head_wrong(run: Any, *arguments: Any, **options: Any) -> Any:
    output, lse = run(*arguments, **options)
    output[:, 1] += 1.0
    lse[1, 3] += 1.0
    return output, lse


def test_a_picture_shows_where_errors_are() -> None:
    got, golden = torch.zeros(200, 3, 2), torch.zeros(200, 3, 2)
    got[-1, 2, 0], got[0, 1, 1], got[1, 1, 0] = torch.nan, 1.0, 25.0
    (found,) = heat_maps({"output of decode": Measured(got.double(), golden.double(), torch.ones(200, 3, 1).double())})
    assert found == HeatMap("output of decode", 3, 200, ("0" * 64, "2" + "0" * 63, "0" * 63 + "9"))
    assert found.curves(8) == {"by row": "▂······█", "by head": "·▂█"}
    said = "output of decode: 2 of 192 cells over their budget; 3 heads down, 200 rows to the right; the worst of"
    assert words(found).startswith(f"{said} several")
    drawn = re.findall(r'class="over" d="(.+?)".+?fill-opacity="([\d.]+)"', picture_file(found))
    assert drawn == [("M0 1h1v1h-1z", "0.61"), ("M63 2h1v1h-1z", "1.00")]


def test_neighbours_are_drawn_as_one_and_the_file_stands_alone() -> None:
    assert 'd="M1 0h2v1h-2zM0 1h1v1h-1z"' in picture_file(HeatMap("LSE", 2, 3, ("011", "100")))
    said = "LSE of new tokens: 2 of 6 cells over their budget; 2 heads down, 3 rows to the right; "
    assert words(SMALL) == f"{said}stronger colour = further over budget"
    part = msgspec.structs.replace(SMALL, part="<a & b>")
    root = ElementTree.fromstring(picture_file(part))
    assert root.tag == "{http://www.w3.org/2000/svg}svg" and root.get("role") == "img"
    assert root[0].text == words(part)


NO_MAPS = [(["012", "0000"], 3, "expected 2 lines of 3 digits"), (["", ""], 0, ">= 1")]
NO_MAPS += [(lines, len(lines[0]), "matching regex") for lines in (["01\n", "000"], ["01٣", "000"], ["0" * 100] * 2)]


@pytest.mark.parametrize(("lines", "rows", "said"), NO_MAPS)
def test_what_is_no_map_is_refused(lines: list[str], rows: int, said: str) -> None:
    plain = msgspec.to_builtins(SMALL)
    assert msgspec.convert(plain, HeatMap) == SMALL
    with pytest.raises(msgspec.ValidationError, match=re.escape(said)):
        msgspec.convert({**plain, "lines": lines, "rows": rows}, HeatMap)


def test_the_part_with_most_cells_over_their_budget_is_shown_if_there_is_any(monkeypatch: Any) -> None:
    kernel = changed(EagerPrefillBackend, run_prefill_new_tokens=last_head_wrong)
    trial, record = judged_trial(subject_of(kernel), Case.parse("lse:dims=small;heads=2;q=[4,7]"), CONTEXT)
    found = heat_of(trial, record)
    assert found and (found.part, found.heads, found.rows, found.wrong) == ("output of new tokens", 2, 11, 11)
    assert record.check == "lse" and set(found.lines[0]) == {"0"} and "0" not in found.lines[1]
    assert heat_of(trial, record.with_fields(check="call")) is None
    empty = Measured(*(torch.zeros(2, 0, dtype=torch.double),) * 3)
    assert heat_maps({"LSE of rank 1": empty}) == []
    monkeypatch.setattr(reach, "measure", Mock(side_effect=MemoryError))
    assert heat_of(trial, record) is None


LSE = torch.tensor([[0.5, 2.0, -1.0], [3.0, 1.5, 0.7], [1.2, -2.0, 4.0]], dtype=torch.float64)
OUTPUT = torch.arange(24, dtype=torch.float64).view(2, 3, 4).sin()


@pytest.mark.parametrize(
    ("explain", "wrong", "golden", "found"),
    [
        (explain_lse, LSE / math.log(2), LSE, "the LSE is in base 2, expected the natural logarithm"),
        (explain_lse, LSE * math.log(2), LSE, "the LSE is multiplied by ln 2, as if it had been in base 2"),
        (explain_lse, LSE.mT, LSE, TRANSPOSED),
        (explain_lse, LSE * 1.4, LSE, ""),
        (explain_lse, torch.full_like(LSE, 2 / math.log(2)), torch.full_like(LSE, 2.0), ""),
        (explain_lse, LSE[:1, :1] / math.log(2), LSE[:1, :1], ""),
        (explain_lse, LSE + LSE.mT + 0.5, LSE + LSE.mT, ""),
        (explain_lse, torch.where(LSE > 2, torch.nan, LSE / math.log(2)), LSE, ""),
        (explain_output, OUTPUT.roll(1, 1), OUTPUT, "heads are rotated by 1"),
        (explain_output, 1e-3 * OUTPUT.roll(2, 1), 1e-3 * OUTPUT, "heads are rotated by 2"),
        (explain_output, torch.zeros_like(OUTPUT), OUTPUT, ""),
        (explain_output, OUTPUT * torch.tensor([1.0, 0.0, 0.0]).view(3, 1), OUTPUT, UNWRITTEN),
        (explain_output, OUTPUT * torch.tensor([1.0, 0.0, 1.0]).view(3, 1), OUTPUT, ""),
        (explain_output, OUTPUT[:, :1].expand(2, 3, 4) + 1e-4, OUTPUT[:, :1].expand(2, 3, 4), ""),
        (explain_output, 1e-3 * OUTPUT + 1e-3, 1e-3 * OUTPUT, ""),
        (explain_output, OUTPUT.roll(1, 0), OUTPUT, ""),
    ],
)
def test_what_wrong_numbers_are_is_found(explain: Any, wrong: torch.Tensor, golden: torch.Tensor, found: str) -> None:
    assert explain(wrong, golden) == found

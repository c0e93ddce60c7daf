"""What is told beside verdicts: bits that stay the same, errors as they are spread, and races in many calls."""

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from mla_conformance.backends import eager
from mla_conformance.backends.roles import Role
from mla_conformance.cases.case import Case
from mla_conformance.defects.known import known_defects
from mla_conformance.expectations import Expectations
from mla_conformance.gating.gate import Gate, GateFinding
from mla_conformance.judging.record import BackendFacts
from mla_conformance.judging.traits import Answer, BitwiseAnswer, ErrorSpread, Question, Repeated, Traits
from mla_conformance.report.html import html
from mla_conformance.report.json_report import load_report, report_form, to_text
from mla_conformance.report.outcome import backend_lines
from mla_conformance.report.summary import BackendSummary, RunSummary
from mla_conformance.tests.drawn import CPU
from mla_conformance.traits import examine, repeats
from mla_conformance.trials.subject import Subject
from mla_conformance.trials.trial import Context, Trial


class Alternating(eager.EagerPrefillBackend):
    """Every other call adds up the keys in another order."""

    def _tiles(self, keys: int) -> Iterator[slice]:
        self._calls = getattr(self, "_calls", 0) + 1
        tiles = [slice(start, min(start + 32, keys)) for start in range(0, keys, 32)]
        return iter(tiles[::-1] if self._calls % 2 else tiles)


class SplitsByMaximum(eager.EagerPrefillBackend):
    """The tile follows from the longest request of the batch, as the metadata tell it."""

    def _tiles(self, keys: int) -> Iterator[slice]:
        tile = 4 if self._prefill_metadata.max_query_len > 100 else 64
        return (slice(start, min(start + tile, keys)) for start in range(0, keys, tile))


def answers(kernel: type) -> dict[Question, BitwiseAnswer]:
    subject = Subject.of(f"{__name__}:{kernel.__name__}", CPU)
    with pytest.MonkeyPatch.context() as patch:  # the two smaller cases of three
        patch.setattr(examine, "_ASKED", {Role.PREFILL: examine._ASKED[Role.PREFILL][:2]})
        return {each.question: each for each in examine.bitwise(subject, Context())}


def test_whether_a_kernel_gives_the_same_from_run_to_run_and_for_any_maximum_is_found() -> None:
    repeats = answers(Alternating)[Question.REPEATS]
    assert repeats.answer is Answer.NO and "q=[" in repeats.why and "rows" in repeats.why
    found = answers(SplitsByMaximum)
    assert [found[each].answer for each in (Question.REPEATS, Question.PAGES)] == [Answer.YES, Answer.NOT_APPLICABLE]
    assert found[Question.SPLITS].answer is Answer.NO and found[Question.ALONE].answer is Answer.NO
    Case.parse(found[Question.SPLITS].why.partition(": ")[0])


@pytest.mark.parametrize("role", [Role.PREFILL, Role.DECODE, Role.SPARSE, Role.INDEXER, Role.LAYER])
def test_a_variant_keeps_the_operands_of_its_rows(role: Role) -> None:
    trial = Trial(Subject.of("EAGER", CPU), examine.bases(role)[0], Context())
    for variant in (each for question in Question for each in examine.variants(trial, question)):
        against = (variant.against or trial.problem).calls[0].q
        theirs = variant.problem.calls[0].q
        expected = against[: len(theirs)] if variant.rows is None else against[variant.rows]
        assert torch.equal(expected.float(), theirs[: len(expected)].float())


def test_the_errors_of_a_right_kernel_are_within_their_budget_and_ordered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(examine, "DATA", ("normal", "outliers"))
    found = examine.accuracy(Subject.of(f"{__name__}:{Alternating.__name__}", CPU), Context())
    assert {each.dtype for each in found} == {"bf16", "fp16", "fp32"}
    for each in found:
        assert list(each.budget) == sorted(each.budget) and list(each.ulp) == sorted(each.ulp)
        assert 0 < each.budget[-1] <= 1 and each.elements > 1000


def run_with(traits: Traits) -> RunSummary:
    environment = {"suite": "1", "version": "1", "tier": "smoke", "device": "cpu", "torch": "2"}
    return RunSummary(environment, (BackendSummary(BackendFacts("MINE", "a.py:MINE"), traits=traits),), ())


NO = BitwiseAnswer(Question.PAGES, "decode", Answer.NO, 3, "decode:q=[1]: other pages, output differs")
YES = BitwiseAnswer(Question.REPEATS, "decode", Answer.YES, 3)
SPREAD = ErrorSpread("decode", "bf16", "normal", 1, 9, (0.1, 0.5, 0.9), (0.2, 3.0, 8.0))


def test_answers_reach_text_page_report_and_gate(tmp_path: Path) -> None:
    run = run_with(Traits((NO, YES), (SPREAD,)))
    lines = list(backend_lines(run.backends[0], 200))
    assert any("on any pages: decode ✘" in line for line in lines) and any(NO.why in line for line in lines)
    page = html(run)
    assert NO.why in page and "0.1 / 0.5 / 0.9 · 0.2 / 3 / 8 ulp" in page
    (tmp_path / "report.json").write_text(to_text(report_form(run)), encoding="utf-8")
    assert load_report(tmp_path / "report.json").backends[0].traits == run.backends[0].traits
    gate = Gate([run], Expectations(()), suites=["1"], bitwise=[Question.PAGES, Question.REPEATS])
    assert [row.what for row in gate.rows() if row.finding is GateFinding.BITWISE] == [Question.PAGES]
    gate = Gate([run_with(Traits())], Expectations(()), suites=["1"], bitwise=[Question.REPEATS])
    (row,) = [row for row in gate.rows() if row.finding is GateFinding.BITWISE]
    assert "not measured" in row.detail and gate.blocks(row), "a question that nobody asked closes the gate"


PREFILL = "determinism:dims=small;heads=2;q=[70]"
DECODE = "determinism:call=decode;dims=small;heads=2;q=[1,1];kv=[130,40];page=64"


def of(reference: str, case: str, calls: int) -> Repeated:
    return repeats.repeated(Subject.of(reference, CPU), Context(), Case.parse(case), calls)


def test_a_race_is_found_and_what_is_always_wrong_or_returns_nothing_is_not_repeated() -> None:
    found = of(known_defects()["spec-metadata-pinned-temp-freed"].reference, DECODE, 40)
    assert found.differing and found.breaks and "LSE is" in found.wrong
    assert found.first <= 40 and found.calls_for(0.95) > 1
    found = of(f"{__name__}:Alternating", PREFILL, 20)
    assert found.differing and not found.wrong and found.breaks
    for reference, case in (("EAGER", PREFILL), ("TORCH_SDPA", DECODE)):
        found = of(reference, case, 50)
        assert (found.differing, found.breaks, found.failed) == (0, False, "")
    case = "decode_lse:call=decode;dims=small;heads=2;q=[1];kv=[40]"
    assert "LSE" in of("mla_conformance.defects.decodes:lse_base2_dcp_combine_flashinfer_mla", case, 5).failed
    assert "return nothing to compare" in of("EAGER", "slot_mapping:q=[40,5,9];kv=[10,100,0];page=16", 5).failed


KERNELS = """
import threading
from mla_conformance.backends.eager import EagerPrefillBackend
class Crowded(EagerPrefillBackend):
    def _batch(self, *operands, **options):
        output, lse = super()._batch(*operands, **options)
        return output * (1.5 if threading.active_count() > THREADS else 1.0), lse
class Remembers(EagerPrefillBackend):
    shape = None
    def prepare_metadata(self, prefill):
        self.before, self.shape = self.shape, prefill.query_start_loc.tolist()
        super().prepare_metadata(prefill)
    def _batch(self, *operands, **options):
        output, lse = super()._batch(*operands, **options)
        return output * (1.0 if self.before in (None, self.shape) else 1.5), lse
"""


@pytest.mark.parametrize(
    ("kernel", "begin", "where"),
    [("Crowded", 18, "beside other streams or threads"), ("Remembers", 34, "between calls of another batch")],
)
def test_what_else_goes_on_is_part_of_what_is_found(tmp_path: Path, kernel: str, begin: int, where: str) -> None:
    (tmp_path / "kernels.py").write_text(KERNELS.replace("THREADS", str(threading.active_count())))
    found = of(f"{tmp_path}/kernels.py:{kernel}", PREFILL, 60)
    assert begin <= found.first < begin + 16 and found.what.endswith(where) and "output is" in found.wrong


def test_the_command_keeps_the_smallest_case(here: Path, told: Any) -> None:
    out = told(1, "replay", PREFILL, "--backend", f"{__file__}:Alternating", "--device", "cpu", "--repeats", "6")
    assert "have other bits than the first" in out and "smallest case that differs" in out
    assert list(here.rglob("race-*.json"))

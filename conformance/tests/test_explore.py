"""Exploration: it goes on behind a failure, tells every cause, stays in what is declared, and ends in time."""

import time
from collections.abc import Callable
from typing import Any, ClassVar

import pytest
import torch
from hypothesis import settings

from mla_conformance.backends.eager import EagerPrefillBackend
from mla_conformance.backends.references import BackendReference
from mla_conformance.backends.roles import Role
from mla_conformance.cases.case import Case
from mla_conformance.cases.extent import Extent
from mla_conformance.cases.strategies import profile
from mla_conformance.cli import main
from mla_conformance.files.inputs import InputError
from mla_conformance.judging.record import Record
from mla_conformance.judging.verdict import Check, Status
from mla_conformance.trials.context import Context
from mla_conformance.trials.explore import explore
from mla_conformance.trials.subject import Subject

CPU = torch.device("cpu")
Fails = Callable[[Case], str]


class Narrow(EagerPrefillBackend):
    """Of one dtype."""

    supported_dtypes: ClassVar[list[torch.dtype]] = [torch.bfloat16]


class Nothing(EagerPrefillBackend):
    supported_dtypes: ClassVar[list[torch.dtype]] = [torch.float64]


def explored(
    monkeypatch: pytest.MonkeyPatch, fails: Fails, draws: int = 60, seconds: float = 0.0, kernel: type = Narrow
) -> tuple[list[Case], Record]:
    """The cases that were judged, each of which fails a check that ``fails`` names, and the record."""
    judged: list[Case] = []

    def judge(subject: Subject, case: Case, *more: Any) -> Record:
        judged.append(case)
        check = fails(case)
        status = Status.FAIL if check else Status.PASS
        return Record("K", "K", case.capability, case.id, status, check=check, message=f"{check} of {len(judged)}")

    monkeypatch.setattr("mla_conformance.trials.explore.judge_one", judge)
    subject = Subject(BackendReference(kernel.__name__, f"{kernel.__module__}:{kernel.__name__}"), CPU)
    subject._classes[Role.PREFILL] = kernel
    return judged, explore(subject, draws, seconds, ("combinations",), Context())


def test_drawn_cases_that_hold_are_counted_and_stay_in_what_is_declared(monkeypatch: pytest.MonkeyPatch) -> None:
    judged, record = explored(monkeypatch, lambda case: "")
    assert record.status is Status.PASS and record.capability == "explored"
    assert 30 < len(judged) == len(set(judged)) == record.cases <= 60
    assert record.message == f"{len(judged)} of {len(judged)} drawn cases hold, none fails"
    assert {case.dtype for case in judged} == {"bf16"} and len({case.call for case in judged}) == 3
    assert judged == explored(monkeypatch, lambda case: "")[0], "the same number draws the same cases"


def test_two_causes_are_found_in_one_call_and_both_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(case: Case) -> str:
        return Check.LSE if case.pad else Check.OUTPUT if case.poison == "inf" else ""

    judged, record = explored(monkeypatch, fails)
    assert record.status is Status.FAIL and " drawn cases, made small: " in record.message
    told = {Check.LSE, Check.OUTPUT}
    assert record.check in told and all(check in record.message for check in told)
    assert len([case for case in judged if not fails(case)]) > 5, "it goes on behind a failure"


def test_a_cause_is_made_small(monkeypatch: pytest.MonkeyPatch) -> None:
    _, record = explored(monkeypatch, lambda case: Check.OUTPUT if case.pad else "")
    case = Case.parse(record.case)
    assert case.pad and (case.data, case.layout, case.seed) == ("needle", "kv_b_proj", 0)


def test_a_failure_that_does_not_repeat_is_still_told(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[Case] = []

    def once(case: Case) -> str:
        calls.append(case)
        return Check.OUTPUT if len(calls) == 3 else ""

    _, record = explored(monkeypatch, once)
    assert record.status is Status.FAIL and record.message.endswith("when run again the case passed")


def test_time_ends_an_exploration(monkeypatch: pytest.MonkeyPatch) -> None:
    began = time.monotonic()
    judged, record = explored(monkeypatch, lambda case: "", draws=0, seconds=0.5)
    assert record.status is Status.PASS and len(judged) > 60
    assert time.monotonic() - began < 60


def test_a_backend_that_declares_nothing_is_unsupported(monkeypatch: pytest.MonkeyPatch) -> None:
    judged, record = explored(monkeypatch, lambda case: "", kernel=Nothing)
    assert (judged, record.status, record.capability) == ([], Status.UNSUPPORTED, "explored")
    assert record.message == "declares nothing of what could be drawn"


@pytest.mark.parametrize(
    ("text", "extent"),
    [("0", Extent()), ("2000", Extent(draws=2000)), ("90s", Extent(seconds=90)), ("10m", Extent(seconds=600))],
)
def test_an_extent_is_a_number_or_a_time(text: str, extent: Extent) -> None:
    assert Extent.of(text) == extent and str(extent) in (text, "600s") and bool(extent) == (text != "0")


@pytest.mark.parametrize("text", ["-1", "", "0s", "1d", "1000001", "169h", "ten"])
def test_another_extent_is_refused(text: str) -> None:
    with pytest.raises(InputError, match="expected a number of cases up to 1,000,000, or a time such as"):
        Extent.of(text)


def test_capabilities_without_a_space_cannot_be_explored(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["certify", "--device", "cpu", "--backend", "EAGER", "--explore", "5", "--capability", "lse"]) == 2
    assert "none of these capabilities is selected" in capsys.readouterr().err


def test_without_hypothesis_the_message_says_how_to_get_it(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("mla_conformance.engine.request.find_spec", lambda name: None)
    assert main(["certify", "--device", "cpu", "--backend", "EAGER", "--explore", "5"]) == 2
    assert "pip install 'hypothesis>=6.130'" in capsys.readouterr().err


def test_the_profile_leaves_nothing_to_settings_outside() -> None:
    given_here = repr(profile(7))
    settings.register_profile("loud", max_examples=3, derandomize=True, database=None, print_blob=True, deadline=1)
    before = settings.get_current_profile_name()
    settings.load_profile("loud")
    try:
        assert repr(profile(7)) == given_here
    finally:
        settings.load_profile(before)

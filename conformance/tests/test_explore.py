"""Exploration: honest backends survive it, a wrong one is found and made small, and nothing of it goes uncounted."""

import contextlib
import json
import shlex
import sys
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from hypothesis import HealthCheck, given, settings

from mla_conformance.backends.eager import EagerPrefillBackend
from mla_conformance.backends.references import BackendReference, parse_reference
from mla_conformance.cases.case import Call, Case, CaseError
from mla_conformance.cases.drawn import (
    DRAWN,
    OPTIONS,
    DrawnOption,
    DrawnOptions,
    declared_options,
    options_of,
    plain_case,
)
from mla_conformance.cases.strategies import cases, profile
from mla_conformance.cli import main
from mla_conformance.engine.journal import CaseStarted, Journal
from mla_conformance.judging.record import Record
from mla_conformance.judging.verdict import Check, Status
from mla_conformance.trials.context import Context
from mla_conformance.trials.explore import explore
from mla_conformance.trials.subject import Subject

CPU = torch.device("cpu")
CERTIFY = ["certify", "--device", "cpu", "-n", "1", "--tier", "smoke", "--capability", "new_tokens", "--explore"]

BACKENDS = """
import os, signal
from mla_conformance.backends.eager import EagerPrefillBackend

class ThreeHeads(EagerPrefillBackend):
    def _batch(self, q, k, v, query_start_loc, key_start_loc, causal):
        output, lse = super()._batch(q, k, v, query_start_loc, key_start_loc, causal)
        return output * (0.9 if self.num_heads % 2 and self.num_heads > 1 and len(query_start_loc) > 2 else 1.0), lse

class Dies(EagerPrefillBackend):
    def _batch(self, *args, **more):
        if self.num_heads >= 11:
            os.kill(os.getpid(), signal.SIGKILL)
        return super()._batch(*args, **more)
"""


def test_an_honest_library_holds_on_drawn_cases() -> None:
    record = explore(Subject(parse_reference("TORCH_SDPA"), CPU), 10, tuple(DRAWN), Context())
    assert record.status is Status.PASS and record.cases > 7, record.message


def valid(capability: str, call: Call) -> DrawnOptions:
    """What some case can have of a call's options."""

    def can_be(fields: DrawnOption) -> bool:
        try:
            return bool(plain_case(capability, call, fields))
        except CaseError:
            return False

    return options_of(capability, declared_options(OPTIONS[call], can_be))


EVERYTHING = {name: {call: valid(name, call) for call in calls} for name, calls in DRAWN.items()}


@profile(200)
@given(case=cases(EVERYTHING))
def test_a_drawn_case_is_plain_and_reads_back_from_its_id(case: Case) -> None:
    assert Case.parse(case.id) == case and case.call in DRAWN[case.capability]
    assert max(case.q + case.kv) <= 700 and len(case.q) <= 5 and case.heads <= 128


def drawn(count: int) -> list[Case]:
    """The cases of an exploration of this length."""
    found: list[Case] = []
    profile(count)(given(case=cases(EVERYTHING))(lambda case: found.append(case)))()
    return found


def test_every_role_is_drawn_with_what_is_special_to_it() -> None:
    found = drawn(1000)  # what is drawn depends on the modules that are loaded, too
    assert {case.capability for case in found} == DRAWN.keys() and {case.call for case in found} == OPTIONS.keys()
    of_prefills = ({"quant": "fp8"}, {"merge": "own"}, {"dtype": "e4m3"}, {"out": True}, {"pad": 3}, {"inflate": 100})
    of_caches = ({"cache": "fp8_ds_mla"}, {"ranks": 2}, {"order": "decodes_first"}, {"layers": 3}, {"tails": "huge"})
    for fields in of_prefills + of_caches:
        assert any(fields.items() <= vars(case).items() for case in found), fields
    assert not [case.id for case in found if case.capability == "call_order" and "ranks=" in case.id]


def test_the_same_number_draws_the_same_cases() -> None:
    assert [case.id for case in drawn(30)] == [case.id for case in drawn(30)]


@pytest.mark.parametrize("page", [16, 64])
def test_what_a_backend_does_not_declare_is_not_drawn(page: int) -> None:
    declared = declared_options(OPTIONS[Call.DECODE], lambda fields: fields["page"] == page and "ranks" not in fields)
    assert {option["page"] for option in declared["configuration"]} == {page}
    assert declared["ranks"] == [{}] and len(declared["tails"]) == 4
    assert declared_options(OPTIONS[Call.DECODE], lambda fields: False) == {}


def test_the_profile_leaves_nothing_to_settings_outside() -> None:
    given_here = profile(7)
    settings.register_profile("loud", max_examples=3, derandomize=False, print_blob=True, deadline=1)
    before = settings.get_current_profile_name()
    settings.load_profile("loud")
    try:
        assert repr(profile(7)) == repr(given_here)
    finally:
        settings.load_profile(before)
    assert (given_here.max_examples, given_here.deadline, given_here.database) == (7, None, None)
    assert given_here.derandomize and not given_here.print_blob
    assert given_here.suppress_health_check == (HealthCheck.too_slow, HealthCheck.filter_too_much)


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """The folder of one run in which an honest backend, a wrong one and a deadly one are explored, and what it said."""
    folder = tmp_path_factory.mktemp("explored")
    (folder / "mine.py").write_text(BACKENDS)
    backends = ["--backend=EAGER", *(f"--backend={folder / 'mine.py'}:{name}" for name in ("ThreeHeads", "Dies"))]
    with pytest.MonkeyPatch.context() as patch, (folder / "printed").open("w") as printed:
        patch.setattr(sys, "stdout", printed)
        assert main([*CERTIFY, "15", *backends, "--out", str(folder / "out")]) == 1
    return folder / "out", (folder / "printed").read_text()


def explored_of(folder: Path, name: str) -> dict[str, Any]:
    """What the report says of a backend's exploration."""
    report = json.loads((folder / "report.json").read_text(encoding="utf-8"))
    found: dict[str, Any] = report["backends"][name]["capabilities"]["explored"]
    return found


def test_an_honest_backend_survives(report: tuple[Path, str]) -> None:
    folder, printed = report
    explored = explored_of(folder, "EAGER")
    assert explored["status"] == "pass" and explored["listed"] == explored["passed"] and 12 <= explored["passed"] <= 15
    assert 0.3 < explored["error_budget_used"] <= 1
    assert "3 cases and 15 drawn ones" in printed and f"✔ new_tokens 3, explored {explored['passed']}\n" in printed
    started = [event for event in Journal.inside(folder).events() if isinstance(event, CaseStarted)]
    assert [event.backend for event in started].count("EAGER") == explored["passed"] + 3


def test_a_wrong_backend_is_found_and_its_case_made_small(
    report: tuple[Path, str], capsys: pytest.CaptureFixture[str]
) -> None:
    folder, printed = report
    explored = explored_of(folder, "ThreeHeads")
    (failure,) = explored["failures"]
    assert (explored["status"], explored["failed"], explored["not_run"]) == ("fail", 1, 0)
    case = Case.parse(failure["case"])
    assert (case.capability, case.heads, len(case.q), case.dims) == ("new_tokens", 3, 2, "small")
    assert sum(case.q) <= 4 and (case.data, case.layout) == ("normal", "kv_b_proj")
    assert failure["message"].startswith("drawn case ") and ", made small: " in failure["message"]
    assert "wrong: ThreeHeads, 1 likely cause, 1 case: " in printed
    assert case.id in printed and "✘ explored 0/1" in printed
    command, *arguments = shlex.split(failure["replay"])
    assert command == "mla-conformance" and main(arguments) == 1
    assert "wrong: ThreeHeads, 1 likely cause, 1 case: " in capsys.readouterr().out


def test_a_drawn_case_that_kills_its_process_is_named(report: tuple[Path, str]) -> None:
    (failure,) = explored_of(report[0], "Dies")["failures"]
    assert failure["status"] == "crash" and Case.parse(failure["case"]).heads >= 11


class Nothing(EagerPrefillBackend):
    supported_dtypes: ClassVar[list[torch.dtype]] = [torch.float64]


def test_a_backend_that_declares_nothing_of_it_is_unsupported() -> None:
    assert explored(Nothing)[1].status is Status.UNSUPPORTED


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--explore", "-1"], "--explore: expected a number of at least 0"),
        (
            ["--explore", "5", "--capability", "lse"],
            "context_chunk, chunked_context, decode, sparse_decode, sparse_prefill, mixed_batch",
        ),
    ],
)
def test_what_cannot_be_explored(options: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    with contextlib.suppress(SystemExit):  # of the parser
        assert main(["certify", "--device", "cpu", "--backend", "EAGER", *options]) == 2
    assert said in capsys.readouterr().err


def test_without_hypothesis_the_message_says_how_to_get_it(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("mla_conformance.engine.request.find_spec", lambda name: None)
    assert main(["certify", "--device", "cpu", "--backend", "EAGER", "--explore", "5"]) == 2
    assert "pip install 'hypothesis>=6.130'" in capsys.readouterr().err


class Unsteady(EagerPrefillBackend):
    """Wrong in the first of all its calls."""

    calls = 0

    def run_prefill_new_tokens(self, *args: Any, **kwargs: Any) -> Any:
        Unsteady.calls += 1
        output, lse = super().run_prefill_new_tokens(*args, **kwargs)
        return (output * 0.5, lse) if Unsteady.calls == 1 else (output, lse)


class FailsTwice(EagerPrefillBackend):
    """A wrong LSE for many heads, and an exception for two."""

    def _batch(self, q: torch.Tensor, *rest: Any, **more: Any) -> tuple[torch.Tensor, torch.Tensor]:
        if self.num_heads == 2:
            raise RuntimeError("another fault")
        output, lse = super()._batch(q, *rest, **more)
        return output, lse + (1.0 if self.num_heads > 4 else 0.0)


def explored(kernel: type[EagerPrefillBackend]) -> tuple[list[Case], Record]:
    """The cases that were started, and the record."""
    subject = Subject(BackendReference(kernel.__name__, f"{kernel.__module__}:{kernel.__name__}"), CPU)
    started: list[Case] = []
    return started, explore(subject, 40, ("new_tokens",), Context(), started.append)


def test_a_failure_that_does_not_repeat_is_still_reported() -> None:
    started, record = explored(Unsteady)
    assert record.status is Status.FAIL and record.message.endswith("passed when it was run again")
    assert record.case == started[-1].id and record.capability == "explored"


def test_a_failure_does_not_shrink_into_another_one() -> None:
    started, record = explored(FailsTwice)
    assert record.check == Check.LSE and started[-1].heads == 5

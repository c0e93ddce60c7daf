"""Exploration: honest backends survive it, a wrong one is found and made small, and nothing of it goes uncounted."""

import json
import shlex
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings

from mla_conformance.backends.eager import EagerPrefillBackend
from mla_conformance.backends.references import BackendReference, parse_reference
from mla_conformance.cases.case import Case
from mla_conformance.cases.strategies import CONFIGURATIONS, cases, profile
from mla_conformance.cli import main
from mla_conformance.driving.subject import Subject
from mla_conformance.judging.verdict import Check, Status, Verdict
from mla_conformance.trials.execute import execute, failing
from mla_conformance.trials.explore import DRAWN, Exploration
from mla_conformance.trials.trial import Trial

CPU = torch.device("cpu")
CERTIFY = ["certify", "--device", "cpu", "-n", "1", "--tier", "smoke", "--capability", "new_tokens", "--explore"]

BACKENDS = """
import os, signal
from mla_conformance.backends.eager import EagerPrefillBackend

class ThreeHeads(EagerPrefillBackend):
    def _batch(self, q, k, v, query_start_loc, key_start_loc, causal):
        output, lse = super()._batch(q, k, v, query_start_loc, key_start_loc, causal)
        return output * (0.9 if self.num_heads >= 3 and len(query_start_loc) > 2 else 1.0), lse

class Dies(EagerPrefillBackend):
    def _batch(self, *args, **more):
        if self.num_heads >= 11:
            os.kill(os.getpid(), signal.SIGKILL)
        return super()._batch(*args, **more)

class Nothing(EagerPrefillBackend):
    supported_dtypes = []
"""


@pytest.mark.parametrize("name", ["EAGER", "TORCH_SDPA"])
def test_honest_backends_hold_on_drawn_cases(name: str) -> None:
    subject = Subject(parse_reference(name), CPU)

    @profile(50)
    @given(case=cases(DRAWN, CONFIGURATIONS))
    def holds(case: Case) -> None:
        verdict = execute(Trial(subject, case))
        assert not failing(verdict), f"{case.id}: {verdict.message}"

    holds()


@profile(100)
@given(case=cases(DRAWN, CONFIGURATIONS))
def test_a_drawn_case_is_plain_and_reads_back_from_its_id(case: Case) -> None:
    assert Case.parse(case.id) == case and case.capability in DRAWN
    assert (case.dims, case.dtype) in CONFIGURATIONS


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
    assert given_here.suppress_health_check == (HealthCheck.too_slow,)


def certified(folder: Path, name: str, draws: int) -> tuple[int, dict[str, Any]]:
    """Exit status, and what the report says of the exploration."""
    (folder / "mine.py").write_text(BACKENDS)
    status = main([*CERTIFY, str(draws), "--backend", f"{folder / 'mine.py'}:{name}", "--out", str(folder)])
    report = json.loads((folder / "report.json").read_text(encoding="utf-8"))
    explored: dict[str, Any] = report["backends"][name]["capabilities"]["explored"]
    return status, explored


def test_an_honest_backend_survives(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*CERTIFY, "30", "--backend", "EAGER", "--out", str(tmp_path)]) == 0
    report = json.loads((tmp_path / "report.json").read_text(encoding="utf-8"))
    explored = report["backends"]["EAGER"]["capabilities"]["explored"]
    assert explored["status"] == "pass" and explored["listed"] == explored["passed"] and 25 <= explored["passed"] <= 30
    assert 0.3 < explored["error_budget_used"] <= 1
    printed = capsys.readouterr().out
    assert "3 cases and 30 drawn ones" in printed and f"explored ✔ {explored['passed']}/{explored['passed']}" in printed
    events = [json.loads(line) for line in (tmp_path / "journal.jsonl").read_text().splitlines()]
    kinds = [event["event"] for event in events if event.get("record", {}).get("capability") == "explored"]
    assert kinds == ["start"] * explored["passed"] + ["verdict"]


def test_a_wrong_backend_is_found_and_its_case_made_small(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    status, explored = certified(tmp_path, "ThreeHeads", 60)
    (failure,) = explored["failures"]
    assert (status, explored["status"], explored["failed"], explored["not_run"]) == (1, "fail", 1, 0)
    assert failure["message"].startswith("drawn case ") and ", made small: " in failure["message"]
    case = Case.parse(failure["case"])
    assert (case.capability, case.heads, len(case.q), case.dims) == ("new_tokens", 3, 2, "small")
    assert sum(case.q) <= 4 and (case.data, case.layout) == ("normal", "kv_b_proj")
    printed = capsys.readouterr().out
    assert f"FAIL ThreeHeads explored · case {case.id}" in printed and "explored ✘ 0/1" in printed
    command, *arguments = shlex.split(failure["replay"])
    assert command == "mla-conformance" and main(arguments) == 1
    assert f"FAIL ThreeHeads new_tokens · case {case.id}" in capsys.readouterr().out


def test_a_drawn_case_that_kills_its_process_is_named(tmp_path: Path) -> None:
    status, explored = certified(tmp_path, "Dies", 60)
    (failure,) = explored["failures"]
    assert status == 1 and failure["status"] == "crash" and Case.parse(failure["case"]).heads >= 11


def test_a_backend_that_declares_nothing_of_it_is_unsupported(tmp_path: Path) -> None:
    status, explored = certified(tmp_path, "Nothing", 5)
    assert (status, explored["status"], explored["failed"]) == (3, "unsupported", 0)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--explore", "-1"], "--explore: expected a number of cases, got -1"),
        (["--explore", "5", "--capability", "lse"], "draws cases of new_tokens, context_chunk, chunked_context; none"),
    ],
)
def test_what_cannot_be_explored(options: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["certify", "--device", "cpu", "--backend", "EAGER", *options]) == 2
    assert said in capsys.readouterr().err


def test_without_hypothesis_the_message_says_how_to_get_it(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("mla_conformance.running.selection.find_spec", lambda name: None)
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


def explored(kernel: type[EagerPrefillBackend]) -> tuple[list[Trial], Verdict]:
    trials: list[Trial] = []
    subject = Subject(BackendReference(kernel.__name__, f"{kernel.__module__}:{kernel.__name__}"), CPU)
    return trials, Exploration(subject, 40, ("new_tokens",), trials.append).search()


def test_a_failure_that_does_not_repeat_is_still_reported() -> None:
    trials, verdict = explored(Unsteady)
    assert verdict.status is Status.FAIL and verdict.message.endswith("passed when it was run again")
    assert trials[-1].verdict == verdict


def test_a_failure_does_not_shrink_into_another_one() -> None:
    trials, verdict = explored(FailsTwice)
    assert verdict.check is Check.LSE and trials[-1].case.heads == 5

"""The answer for a deployed model: which group a backend falls into, in which words, and that it lasts."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from mla_conformance.backends.roles import Role
from mla_conformance.cases.case import Case
from mla_conformance.cli import main
from mla_conformance.commands import certify
from mla_conformance.judging.record import BackendFacts, Record
from mla_conformance.judging.verdict import Status
from mla_conformance.models.profile import Deployment
from mla_conformance.report import ci_views, outcome
from mla_conformance.report.html import html
from mla_conformance.report.json_report import load_report, report_json, write_json
from mla_conformance.report.summary import BackendSummary, Group, RunSummary, summarise
from mla_conformance.tests.reports import write_sealed

PREFILL, DECODE = "new_tokens:q=[64]", "decode:q=[1];kv=[64]"
SPARSE = "sparse_decode:heads=64;q=[1];kv=[64]"
CASES = (PREFILL, DECODE, SPARSE)
ENVIRONMENT = {"suite": "1", "tier": "full", "device": "H200", "torch": "2"}
DEPLOYMENT = Deployment(model="glm-5", tp=8, kv_cache="fp8", heads=8)
NO_ROLE, NO_PREFILL = (Status.UNSUPPORTED, "prefill only"), (Status.UNSUPPORTED, "decode only")
Said = dict[str, tuple[Status, str]]


def backend(said: Said, name: str = "A", **facts: Any) -> BackendSummary:
    """One backend with a record of each of these cases."""
    records = [
        Record(name, name, case.partition(":")[0], case, status, message=message)
        for case, (status, message) in said.items()
    ]
    return BackendSummary(BackendFacts(name, name, **facts), summarise(records, CASES))


def run(*backends: BackendSummary) -> RunSummary:
    return RunSummary(ENVIRONMENT, backends, CASES, deployment=DEPLOYMENT)


PASS, FAIL = (Status.PASS, ""), (Status.FAIL, "the LSE is wrong")
ONLY_PREFILL = {PREFILL: PASS, DECODE: NO_ROLE, SPARSE: NO_ROLE}
NO_DIMS = (Status.UNSUPPORTED, "latent dims (L, R) = (256, 32) not supported")
GROUPS: dict[str, tuple[BackendSummary, Group, str]] = {
    "prefills": (backend(ONLY_PREFILL), Group.RIGHT, "prefill 1/1"),
    "of some cases": (
        backend({PREFILL: PASS, DECODE: NO_DIMS, SPARSE: PASS}),
        Group.RIGHT,
        "prefill 1/1 · sparse decode 1/1 · no decode: latent dims (L, R) = (256, 32) not supported",
    ),
    "emulated": (backend(ONLY_PREFILL, emulated=True), Group.EMULATED, "prefill 1/1"),
    "wrong": (backend(ONLY_PREFILL | {PREFILL: FAIL}), Group.WRONG, "prefill 0/1"),
    "expected to be wrong": (
        backend(ONLY_PREFILL | {PREFILL: (Status.EXPECTED_FAILURE, "known")}),
        Group.WAIVED,
        "prefill 0/1",
    ),
    "interrupted": (backend({PREFILL: PASS}), Group.INCOMPLETE, "prefill 1/1 · 2 NOT RUN"),
    "out of memory": (
        backend({case: (Status.UNAVAILABLE, "out of memory") for case in CASES}),
        Group.INCOMPLETE,
        "no prefill: out of memory",
    ),
    "of other dims": (
        backend({PREFILL: NO_PREFILL, DECODE: NO_DIMS, SPARSE: NO_PREFILL}),
        Group.REFUSED,
        "no decode: latent dims (L, R) = (256, 32) not supported",
    ),
    "of another role": (
        backend(dict.fromkeys(CASES, (Status.UNSUPPORTED, "indexer only"))),
        Group.REFUSED,
        "indexer only, which this model does not call",
    ),
    "absent": (
        BackendSummary(BackendFacts("A", "A", ("needs compute capability 10.x",))),
        Group.UNTESTED,
        "needs compute capability 10.x",
    ),
}


@pytest.mark.parametrize("what", GROUPS)
def test_a_backend_is_what_its_verdicts_say(what: str) -> None:
    summary, group, reported = GROUPS[what]
    assert summary.group is group and reported in outcome.answer(summary)


def test_the_lines_answer_first_and_say_what_nothing_is_right_for() -> None:
    wrong = backend({PREFILL: NO_PREFILL, DECODE: FAIL}, "B")
    lines = list(outcome.outcome_lines(run(backend(ONLY_PREFILL, "A"), wrong), 118))
    assert lines[:3] == [
        "right for glm-5 at TP 8, fp8 cache:",
        "  A  prefill 1/1",
        "nothing right for: decode, sparse decode",
    ]
    assert lines[3].startswith("wrong: B, 1 case: ") and lines[-2] == "wrong, part by part:"
    # Without a right backend the first line says so.
    emulated = backend(ONLY_PREFILL, emulated=True)
    first, second, *_ = outcome.outcome_lines(run(emulated), 118)
    assert first == "right for glm-5 at TP 8, fp8 cache: none of the backends that can run here"
    assert second == "right, but emulated, which is no evidence for glm-5 at TP 8, fp8 cache:"


@pytest.mark.parametrize("view", [html, ci_views.markdown])
def test_views_carry_the_model_and_its_answer(view: Any) -> None:
    text = view(run(backend(ONLY_PREFILL, "MINE"))).replace("\\", "")
    assert "glm-5 at TP 8, fp8 cache" in text and "prefill 1/1" in text
    assert "glm-5" not in view(replace(run(backend(ONLY_PREFILL, "MINE")), deployment=None))


def test_the_gate_refuses_to_mix_models(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    mine = run(backend(ONLY_PREFILL))
    write_json(tmp_path / "a.json", report_json(mine))
    write_json(tmp_path / "b.json", report_json(replace(mine, deployment=None)))
    assert main(["gate", f"{tmp_path}/a.json", "--baseline", f"{tmp_path}/b.json"]) == 2
    assert "expected a run of glm-5 at TP 8, fp8 cache as in" in capsys.readouterr().err


def first_of_each_role(*arguments: Any) -> tuple[Case, ...]:
    """Few of a model's cases, and small ones, so that a run takes seconds."""
    found = {case.role: case for case in reversed(CASES_OF(*arguments)) if sum(case.kv) < 500}
    return tuple(found[role] for role in (Role.PREFILL, Role.DECODE))


CASES_OF = certify.cases_of


def test_a_deployed_model_is_judged_and_the_run_resumed(tmp_path: Path, capsys: Any, monkeypatch: Any) -> None:
    monkeypatch.setattr(certify, "cases_of", first_of_each_role)
    asked = ["--model", "youtu-llm-2b", "--tp", "8", "--backend", "TORCH_SDPA", "--device", "cpu", "-n", "1"]
    out = tmp_path / "out"
    assert main(["certify", *asked, "--out", str(out)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert "· youtu-llm-2b at TP 8 · 2 cases ·" in lines[0]
    at = lines.index("right for youtu-llm-2b at TP 8, on this CPU:")
    assert lines[at + 1] == "  TORCH_SDPA  prefill 1/1 · decode 1/1"
    assert "judged on a CPU; verdicts on GPUs: mla-conformance scoreboard --out site" in lines
    journal = (out / "journal.jsonl").read_text().splitlines()
    write_sealed(out, journal[:-3])  # as if it had been killed before its last verdict
    assert main(["certify", "--resume", str(out), "-n1"]) == 0
    assert "right for youtu-llm-2b at TP 8, on this CPU:" in capsys.readouterr().out
    assert load_report(out).deployment == Deployment(model="youtu-llm-2b", tp=8, kv_cache="auto", heads=2)

"""Models: what is read of a configuration, which cases a deployment has, and the answer for a deployed one."""

import json
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from mla_conformance.backends.roles import Role
from mla_conformance.cases.case import Case
from mla_conformance.cli import main
from mla_conformance.commands import certify
from mla_conformance.judging.record import BackendFacts, Record, Status
from mla_conformance.models.config import find_model, model_names, read_config, stored_model
from mla_conformance.models.profile import Deployment, ModelProfile, cases_of, dims_of
from mla_conformance.report.ci_views import markdown
from mla_conformance.report.html import html
from mla_conformance.report.json_report import load_report, report_form, to_text
from mla_conformance.report.outcome import answer, outcome_lines
from mla_conformance.report.summary import BackendSummary, Group, RunSummary, summarise
from mla_conformance.tests.reports import write_sealed
from mla_conformance.vocabulary.capabilities import CAPABILITIES

Config = dict[str, Any]
STORED = {name: stored_model(name) for name in model_names()}
ALIKE = ("deepseek-r1", "glm-5.2", "kimi-k2.5")
"""Models whose attention is that of others; their cases take no time of the tests."""
DEPLOYED = [(name, list(find_model(name).cache_layouts)[1]) for name in model_names() if name not in ALIKE]


def test_a_deployment_has_ordinary_cases_at_its_sizes() -> None:
    for name, cache in DEPLOYED:
        profile = find_model(name)
        tp = profile.tensor_parallel_sizes[-2]
        found = cases_of(profile, Deployment.of(profile, tp, cache))
        assert [Case.parse(case.id) for case in found[::9]] == list(found[::9]) and len(set(found)) == len(found)
        assert 60 <= len(found) <= 250 and {case.capability for case in found} <= CAPABILITIES.keys()
        kernels = [case for case in found if case.role is not Role.INDEXER]
        assert {(case.dims, case.scale) for case in kernels} == {(dims_of(profile.dims), profile.scale)}
        own = profile.heads // tp
        assert {case.heads for case in kernels} - {own} == ({64} if profile.selection else set())
        selects = profile.selection is not None
        assert (Role.SPARSE in {case.role for case in found}) == selects
        assert (Role.DECODE in {case.role for case in found}) == (not selects)


def as_transformers_writes(config: Config) -> Config:
    """Since version 5: one field for everything about rotation, and fields that do not concern attention."""
    reported = dict(config)
    rope = reported.pop("rope_scaling", None) or reported.pop("rope_parameters", None) or {}
    rope = {"rope_type": rope.get("type", "default"), "rope_theta": reported.pop("rope_theta", 10000.0), **rope}
    ratios = reported.pop("compress_ratios", None)
    if ratios:
        kinds = {0: "sliding_attention", 4: "compressed_sparse_attention", 128: "heavily_compressed_attention"}
        reported["layer_types"] = [kinds[ratio] for ratio in ratios[: reported["num_hidden_layers"]]]
        rope = {"main": {"rope_type": "default", "rope_theta": 10000.0}, "compress": rope}
    further = {"vocab_size": 1000, "transformers_version": "5.17.0", "id2label": {"0": "A"}}
    return {**reported, "rope_parameters": rope, **further}


FORMS: dict[str, Callable[[Config], Config]] = {
    "as published": lambda config: config,
    "as transformers writes it": as_transformers_writes,
    "inside a multimodal model": lambda config: {"model_type": "any", "vision_config": {}, "text_config": config},
}


def attention(profile: ModelProfile) -> ModelProfile:
    return replace(profile, name="", rope="")


@pytest.mark.parametrize("form", FORMS)
def test_a_name_and_its_configuration_give_the_same_profile(tmp_path: Path, form: str) -> None:
    path = tmp_path / "config.json"
    for name, stored in STORED.items():
        path.write_text(json.dumps(FORMS[form](stored.config)))
        assert attention(read_config(path)) == attention(find_model(name))
    # The softmax scale has the square of YaRN's mscale.
    scales = {name: find_model(name).scale for name in ("deepseek-v3", "deepseek-v2-lite", "kimi-k2", "glm-5")}
    assert scales == {"deepseek-v3": 187, "deepseek-v2-lite": 159, "kimi-k2": 181, "glm-5": 100}
    assert [find_model(name).rope for name in ("kimi-linear", "kimi-k3", "glm-5.3-flash")] == ["none"] * 3


GLM = STORED["glm-5"].config
BAD: dict[str, tuple[Config, str]] = {
    "an unknown architecture": ({"model_type": "llama"}, "model_type 'llama' is not known here as an architecture"),
    "a list": ({"model_type": ["glm_moe_dsa"]}, "model_type ['glm_moe_dsa'] is not known"),
    "no latent": ({"kv_lora_rank": ...}, "kv_lora_rank: expected a number, got none"),
    "a negative number": ({"num_attention_heads": -64}, "num_attention_heads: expected `int` >= 1"),
    "a size of 0": ({"v_head_dim": 0}, "v_head_dim: expected `int` >= 1"),
    "an odd rotation": ({"qk_rope_head_dim": 63}, "qk_rope_head_dim: expected `int` that's a multiple of 2"),
    "a factor of text": ({"rope_parameters": {"factor": "x"}}, "rope parameters: factor: expected `float`, got `str`"),
    "a list of one": ({"index_topk": 1}, "no case can be made of these numbers: expected one non-negative length"),
    "too few kinds": ({"layer_types": ["full_attention"]}, "num_hidden_layers: expected 1, one for each kind, got 78"),
}


@pytest.mark.parametrize("what", BAD)
def test_a_bad_field_is_named_with_what_was_expected(tmp_path: Path, refused: Callable[..., str], what: str) -> None:
    changed, said = BAD[what]
    config = {name: value for name, value in {**GLM, **changed}.items() if value is not ...}
    path = tmp_path / "config.json"
    path.write_text(json.dumps(config))
    error = refused("certify", "--config", path)
    assert str(path) in error and said in error and "Traceback" not in error


def test_heads_may_be_wider_than_the_latent(tmp_path: Path) -> None:
    (path := tmp_path / "config.json").write_text(json.dumps({**STORED["kimi-k2"].config, "kv_lora_rank": 64}))
    profile = read_config(path)
    assert any("weights=dense" in case.id for case in cases_of(profile, Deployment.of(profile, 1, "auto")))


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--model=gpt-2"], "unknown model 'gpt-2'; expected one of deepseek-r1, deepseek-v2, "),
        (["--model=glm-4.7-flash", "--tp=8"], "has 20 heads; expected one of 1, 2, 4, 5, 10, 20"),
        (["--model=kimi-k2", "--kv-cache=fp8_v4"], "expected one of auto, fp8 for kimi-k2"),
        (["--model=kimi-k2", "--certificate=x"], "--certificate: cannot be combined with --model"),
        (["--model=kimi-k2", "--tier=smoke"], "--tier: cannot be combined with --model"),
    ],
)
def test_what_does_not_fit_a_model_is_refused(refused: Callable[..., str], arguments: list[str], said: str) -> None:
    assert said in refused("certify", *arguments)


def test_models_are_listed_and_told_in_detail(told: Any, tmp_path: Path) -> None:
    *lines, explained = re.sub("\n +", " ", told(0, "models")).splitlines()
    assert explained.startswith("P-R-V-L: ")
    listed = {line.split()[0]: line for line in lines}
    assert list(listed) == list(model_names()) and len(listed) >= 10
    assert all(f" {STORED[name].published}: " in line for name, line in listed.items())
    assert listed["deepseek-r1"].endswith(": 10 figures confirmed")
    read = "q_lora_rank, kv_lora_rank, qk_nope_head_dim, qk_rope_head_dim"
    assert listed["longcat-flash"].endswith(f": 5 figures confirmed, unconfirmed: {read}")
    reported = told(0, "models", "glm-5")
    assert "192-64-256-512" in reported and "top 2048; indexer 32 × 128" in reported
    assert "confirmed        hidden_size, num_hidden_layers" in reported and "zai-org--GLM-5_config.json" in reported
    assert "--tp             1, 2, 4, 8, 16, 32, 64" in reported and "cache layouts fp8, fp8_ds_mla" in reported
    docs = Path(__file__).parents[2] / "docs" / "models.md"
    written = tmp_path / "models.md"
    written.write_text(docs.read_text("utf-8"), "utf-8")
    assert main(["models", "--docs", str(written)]) == 0
    assert written.read_text("utf-8") == docs.read_text("utf-8")
    assert "**unconfirmed**: found no copy" in written.read_text("utf-8")


PREFILL, DECODE = "new_tokens:q=[64]", "decode:q=[1];kv=[64]"
SPARSE = "sparse_decode:heads=64;q=[1];kv=[64]"
CASES = (PREFILL, DECODE, SPARSE)
ENVIRONMENT = {"suite": "1", "tier": "full", "device": "H200", "torch": "2"}
DEPLOYMENT = Deployment(model="glm-5", tp=8, kv_cache="fp8", heads=8)
NO_ROLE, NO_PREFILL = (Status.UNSUPPORTED, "prefill only"), (Status.UNSUPPORTED, "decode only")
Said = dict[str, tuple[Status, str]]


def backend(said: Said, name: str = "A", **facts: Any) -> BackendSummary:
    made = {case: Record(name, name, case.partition(":")[0], case, status) for case, (status, _) in said.items()}
    records = [record.with_fields(message=said[case][1]) for case, record in made.items()]
    return BackendSummary(BackendFacts(name, name, **facts), summarise(records, CASES))


def run(*backends: BackendSummary) -> RunSummary:
    return RunSummary(ENVIRONMENT, backends, CASES, deployment=DEPLOYMENT)


PASS, FAIL, WAIVED = (Status.PASS, ""), (Status.FAIL, "the LSE is wrong"), (Status.EXPECTED_FAILURE, "known")
ONLY_PREFILL = {PREFILL: PASS, DECODE: NO_ROLE, SPARSE: NO_ROLE}
NO_DIMS = (Status.UNSUPPORTED, "latent dims (L, R) = (256, 32) not supported")
NO_MEMORY, NOT_CALLED = (Status.UNAVAILABLE, "out of memory"), (Status.UNSUPPORTED, "indexer only")
SOME = {PREFILL: PASS, DECODE: NO_DIMS, SPARSE: PASS}
OF_OTHERS = {PREFILL: NO_PREFILL, DECODE: NO_DIMS, SPARSE: NO_PREFILL}
NO_DECODE = "no decode: latent dims (L, R) = (256, 32) not supported"
ABSENT = BackendSummary(BackendFacts("A", "A", ("needs compute capability 10.x",)))
GROUPS: dict[str, tuple[BackendSummary, Group, str]] = {
    "prefills": (backend(ONLY_PREFILL), Group.RIGHT, "prefill 1/1"),
    "of some cases": (backend(SOME), Group.RIGHT, f"prefill 1/1 · sparse decode 1/1 · {NO_DECODE}"),
    "emulated": (backend(ONLY_PREFILL, emulated=True), Group.EMULATED, "prefill 1/1"),
    "wrong": (backend(ONLY_PREFILL | {PREFILL: FAIL}), Group.WRONG, "prefill 0/1"),
    "expected to be wrong": (backend(ONLY_PREFILL | {PREFILL: WAIVED}), Group.WAIVED, "prefill 0/1"),
    "interrupted": (backend({PREFILL: PASS}), Group.INCOMPLETE, "prefill 1/1 · 2 NOT RUN"),
    "out of memory": (backend(dict.fromkeys(CASES, NO_MEMORY)), Group.INCOMPLETE, "no prefill: out of memory"),
    "of other dims": (backend(OF_OTHERS), Group.REFUSED, NO_DECODE),
    "of another role": (backend(dict.fromkeys(CASES, NOT_CALLED)), Group.REFUSED, "which this model does not call"),
    "absent": (ABSENT, Group.UNTESTED, "needs compute capability 10.x"),
}


@pytest.mark.parametrize("what", GROUPS)
def test_a_backend_is_what_its_verdicts_say(what: str) -> None:
    summary, group, reported = GROUPS[what]
    assert summary.group is group and reported in answer(summary)


def test_the_lines_answer_first_and_the_gate_refuses_to_mix_models(tmp_path: Path, refused: Callable[..., str]) -> None:
    wrong = backend({PREFILL: NO_PREFILL, DECODE: FAIL}, "B")
    lines = list(outcome_lines(run(backend(ONLY_PREFILL, "A"), wrong), 118))
    first = "right for glm-5 at TP 8, fp8 cache:"
    assert lines[:3] == [first, "  A  prefill 1/1", "nothing right for: decode, sparse decode"]
    assert lines[3].startswith("wrong: B, 1 case: ") and lines[-2] == "wrong, part by part:"
    # Without a right backend the first line says so.
    emulated = backend(ONLY_PREFILL, emulated=True)
    first, second, *_ = outcome_lines(run(emulated), 118)
    assert first == "right for glm-5 at TP 8, fp8 cache: none of the backends that can run here"
    assert second == "right, but emulated, which is no evidence for glm-5 at TP 8, fp8 cache:"
    mine = run(backend(ONLY_PREFILL))
    for name, each in (("a", mine), ("b", replace(mine, deployment=None))):
        (tmp_path / f"{name}.json").write_text(to_text(report_form(each)), "utf-8")
    said = refused("gate", f"{tmp_path}/a.json", "--baseline", f"{tmp_path}/b.json")
    assert "expected a run of glm-5 at TP 8, fp8 cache as in" in said


@pytest.mark.parametrize("view", [html, markdown])
def test_views_carry_the_model_and_its_answer(view: Any) -> None:
    text = view(run(backend(ONLY_PREFILL, "MINE"))).replace("\\", "")
    assert "glm-5 at TP 8, fp8 cache" in text and "prefill 1/1" in text
    assert "glm-5" not in view(replace(run(backend(ONLY_PREFILL, "MINE")), deployment=None))


def test_a_deployed_model_is_judged_and_the_run_resumed(tmp_path: Path, told: Any, monkeypatch: Any) -> None:
    profile = find_model("youtu-llm-2b")
    small = [case for case in cases_of(profile, Deployment.of(profile, 8, "auto")) if sum(case.kv) < 500]
    first = {case.role: case for case in reversed(small)}  # few cases and small ones: the run takes seconds
    monkeypatch.setattr(certify, "cases_of", lambda *_: (first[Role.PREFILL], first[Role.DECODE]))
    asked = ["--model", "youtu-llm-2b", "--tp", "8", "--backend", "TORCH_SDPA", "--device", "cpu", "-n", "1"]
    out = tmp_path / "out"
    lines = told(0, "certify", *asked, "--out", out).splitlines()
    assert "· youtu-llm-2b at TP 8 · 2 cases ·" in lines[0]
    at = lines.index("right for youtu-llm-2b at TP 8, on this CPU:")
    assert lines[at + 1] == "  TORCH_SDPA  prefill 1/1 · decode 1/1"
    assert "judged on a CPU; verdicts on GPUs: mla-conformance scoreboard --out site" in lines
    journal = (out / "journal.jsonl").read_text().splitlines()
    write_sealed(out, journal[:-3])  # as if it had been killed before its last verdict
    assert "right for youtu-llm-2b at TP 8, on this CPU:" in told(0, "certify", "--resume", out, "-n1")
    assert load_report(out).deployment == Deployment(model="youtu-llm-2b", tp=8, kv_cache="auto", heads=2)

"""Known defects die where they should and honest kernels live; the published table is that of this very code."""

import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from importlib.resources import files
from pathlib import Path
from typing import Any

import pytest
import torch

from mla_conformance.backends.eager import EagerPrefillBackend
from mla_conformance.backends.eager_decode import EagerDecodeBackend
from mla_conformance.backends.roles import Role
from mla_conformance.cases.capabilities import CAPABILITIES, Tier
from mla_conformance.cases.case import Case
from mla_conformance.cli import main
from mla_conformance.defects.honest import HONEST
from mla_conformance.defects.known import DefectError, KnownDefect, judged_roles, known_defect, known_defects
from mla_conformance.defects.layered import LayeredDecode
from mla_conformance.defects.matrix import CHOSEN, NORMAL, OURS, Kernel, Outcome, run_case
from mla_conformance.defects.not_emulated import NOT_EMULATED
from mla_conformance.defects.report import (
    DefectReport,
    deciding_digest,
    markdown,
    section,
    stored,
    summarise,
    terminal_lines,
)
from mla_conformance.judging.golden import expect
from mla_conformance.judging.policies import POLICIES, Golden, close, either, twice_low_precision
from mla_conformance.problems.build import build_problem
from mla_conformance.trials.execute import execute, failing
from mla_conformance.trials.trial import Trial

ROOT = Path(__file__).parents[2]
DEFECTS = known_defects()
EMULATED = [Kernel(cls.__name__, f"{cls.__module__}:{cls.__name__}", True, judged_roles(cls)) for cls in HONEST]
"""The real kernels are judged by the conformance suite itself, which runs beside these tests."""
REGENERATE = "run `mla-conformance defects --out fixtures/defects.json --readme README.md`"
ENTRIES_OF_THESE_LAYERS = 144
"""Reported bugs of new tokens, chunks, e4m3 operands, merging, quantised output, selection, decode, cache and ranks."""


def first_failure(kernels: Sequence[Kernel], capability: str, tier: Tier = Tier.SMOKE) -> str:
    """What fails first in a tier, and why; empty if nothing does. Kernels share a case's golden result."""
    for case in CAPABILITIES[capability].select(tier):
        for kernel in filter(lambda kernel: kernel.serves(case), kernels):
            verdict = execute(Trial(kernel.subject(), case))
            if failing(verdict):
                return f"{kernel.name} on {case.id}: {verdict.message}"
    return ""


@pytest.mark.parametrize("entry", DEFECTS.values(), ids=DEFECTS)
def test_a_known_defect_is_killed_by_its_capability_and_by_nothing_unrelated_first(entry: KnownDefect) -> None:
    defect = [Kernel(entry.id, entry.reference, False, entry.roles)]
    # The bugs of decode and of layers are many and special; some need a case that does not stand among the first few.
    tier = Tier.SMOKE if entry.roles == (Role.PREFILL,) else Tier.FULL
    assert first_failure(defect, entry.killed_by, tier), f"{entry.killed_by} does not kill it in the {tier} tier"
    earlier = list(CAPABILITIES)[: list(CAPABILITIES).index(entry.killed_by)]
    for name in earlier:
        if name not in entry.related:
            assert not first_failure(defect, name), f"{name} kills it first, and is not related"


@pytest.mark.parametrize("capability", CAPABILITIES)
def test_every_honest_kernel_passes_the_smoke_tier(capability: str) -> None:
    assert not first_failure(EMULATED, capability)


def test_a_kernel_is_run_on_cases_of_its_roles_only() -> None:
    roles = {name: judged_roles(cls) for name, cls in (("own", EagerDecodeBackend), ("layered", LayeredDecode))}
    assert roles == {"own": (Role.DECODE,), "layered": (Role.DECODE, Role.LAYER)}
    prefill, decode, layer = (
        Case.parse(text) for text in ("lse:q=[3]", "decode:q=[1];kv=[5]", "graph_padding:call=layer;q=[1];kv=[5]")
    )
    kernel = Kernel("own", "", honest=True, roles=roles["own"])
    assert [kernel.serves(case) for case in (prefill, decode, layer)] == [False, True, False]
    assert replace(kernel, roles=roles["layered"]).serves(layer) and Kernel("EAGER", "EAGER", True).serves(prefill)
    ran = {outcome.kernel for outcome in run_case(Case.parse("decode:dims=small;q=[1];kv=[5]"), compare=False)}
    assert "LayeredDecode" in ran and "EagerPrefillBackend" not in ran and "TORCH_SDPA" in ran


def declared(**changes: Any) -> Callable[[], object]:
    """Declares a defect with something wrong about it."""
    kernel = type("Wrong", (EagerPrefillBackend,), {"__doc__": changes.pop("doc", "It is wrong.")})
    fields = {"id": "brand-new", "killed_by": "lse", "sources": ("someone/something#1",), **changes}
    return lambda: known_defect(fields.pop("id"), **fields)(kernel)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"killed_by": "nope"}, "no capability 'nope'; expected one of new_tokens, lse"),
        ({"related": ("lse", "nope")}, "no capability 'nope'"),
        ({"id": next(iter(DEFECTS))}, "the id is taken by mla_conformance.defects."),
        ({"sources": ()}, "expected at least one source and a docstring"),
        ({"doc": ""}, "expected at least one source and a docstring"),
    ],
)
def test_a_wrong_declaration_names_the_entry(changes: dict[str, Any], said: str) -> None:
    with pytest.raises(DefectError) as caught:
        declared(**changes)()
    assert said in str(caught.value)
    assert f"known defect '{changes.get('id', 'brand-new')}'" in str(caught.value) and "Wrong)" in str(caught.value)
    assert known_defects() == DEFECTS


def test_what_is_not_emulated_has_a_reason() -> None:
    assert all(len(reason) > 20 for reason in NOT_EMULATED.values())
    assert not NOT_EMULATED.keys() & DEFECTS.keys()
    assert len(NOT_EMULATED) + len(DEFECTS) == ENTRIES_OF_THESE_LAYERS


def test_every_source_is_a_public_thread() -> None:
    for entry in DEFECTS.values():
        assert all(source.count("/") == 1 and source.partition("#")[2].isdigit() for source in entry.sources), entry.id


def test_the_stored_report_is_that_of_this_code() -> None:
    text = (files("mla_conformance.fixtures") / "defects.json").read_text(encoding="utf-8")
    assert json.loads(text)["digest"] == deciding_digest(), f"the stored report is stale; {REGENERATE}"


def test_the_stored_report_is_clean() -> None:
    report = stored()
    assert (report.tier, report.survivors, report.false_alarms) == ("full", [], [])
    assert report.honest_pairs >= 2000 and report.kills.keys() == DEFECTS.keys()
    ours = [rate for rate in report.rates if rate.rule == OURS]
    assert len(ours) == 2 and all(rate.false_alarms == 0 for rate in ours)
    assert DefectReport.from_json(json.loads(json.dumps(report.to_json()))) == report


def test_the_readme_holds_the_stored_table() -> None:
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    assert section(readme).strip() == markdown(stored()), f"the README's table is stale; {REGENERATE}"


@pytest.mark.parametrize(
    "text", ["", "<!-- defects:end --><!-- defects:begin -->", 2 * "<!-- defects:begin -->x<!-- defects:end -->"]
)
def test_a_readme_without_a_place_for_the_table(text: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "README.md").write_text(text)
    assert main(["defects", "--readme", str(tmp_path / "README.md")]) == 2
    assert "expected <!-- defects:begin --> and <!-- defects:end -->, once each" in capsys.readouterr().err
    assert (tmp_path / "README.md").read_text() == text


def test_the_command_rewrites_the_table_and_nothing_else(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("mla_conformance.defects.matrix.run_matrix", lambda tier: outcomes({}))
    path = tmp_path / "README.md"
    path.write_text("before\n<!-- defects:begin -->old<!-- defects:end -->\nafter\n")
    assert main(["defects", "--tier", "smoke", "--readme", str(path)]) == 1
    assert f"0 of {len(DEFECTS)} known defects killed as expected" in capsys.readouterr().out
    written = path.read_text(encoding="utf-8")
    assert written.startswith("before\n<!-- defects:begin -->\n0 of ") and "old" not in written
    assert written.endswith("<!-- defects:end -->\nafter\n")


def outcomes(killed: dict[str, set[str]]) -> list[Outcome]:
    """One outcome of each capability for the honest kernel and the first known defect, ``killed`` by kernel."""
    keys = {(OURS, NORMAL), (OURS, CHOSEN)}
    return [
        Outcome(
            kernel,
            name,
            f"{name}:q=[1]",
            name in killed.get(kernel, ()),
            "wrong",
            frozenset(keys if name in killed.get(kernel, ()) else ()),
            frozenset(keys),
        )
        for kernel in ("EagerPrefillBackend", next(iter(DEFECTS)))
        for name in CAPABILITIES
    ]


def test_survivors_false_alarms_and_rates_are_counted() -> None:
    (entry, *_) = DEFECTS.values()
    report = summarise(outcomes({entry.id: {entry.killed_by, "refusals"}}), "smoke", "0")
    assert entry.id not in report.survivors and report.kills[entry.id] == [entry.killed_by, "refusals"]
    assert report.false_alarms == [] and report.honest_pairs == len(CAPABILITIES)
    counts = [(rate.killed, rate.wrong, rate.false_alarms, rate.honest) for rate in report.rates]
    assert counts == 2 * [(1, 1, 0, len(CAPABILITIES))]
    assert any(line.startswith(f"✔ {entry.family}") for line in terminal_lines(report))


def test_an_unrelated_kill_makes_a_survivor_and_a_false_alarm_makes_no_kill() -> None:
    (entry, *_) = DEFECTS.values()
    unrelated = next(name for name in CAPABILITIES if name not in (entry.killed_by, *entry.related))
    assert list(CAPABILITIES).index(unrelated) < list(CAPABILITIES).index(entry.killed_by)
    both = {entry.id: {unrelated, entry.killed_by}, "EagerPrefillBackend": {unrelated, entry.killed_by}}
    report = summarise(outcomes(both), "smoke", "0")
    assert entry.id in report.survivors and len(report.false_alarms) == 2
    assert report.rates[0].killed == 0, "a rule that rejects the honest kernel on a case says nothing there"
    assert any(line.startswith("FALSE ALARM EagerPrefillBackend on new_tokens") for line in terminal_lines(report))


GOLDEN = Golden(torch.tensor([[[1.0, -2.0]], [[0.0, 100.0]]]).double(), torch.tensor([[3.0, -torch.inf]]).double())
EXACT, NAN = 0.0, torch.nan


def opinion(name: str, output_error: float, lse_error: float) -> bool:
    (policy,) = (policy for policy in POLICIES if policy.name == name)
    return policy.accepts(GOLDEN.output + output_error, GOLDEN.lse + lse_error, GOLDEN)


@pytest.mark.parametrize(
    ("name", "fine", "wrong", "lse_fine", "lse_wrong"),
    [
        ("vLLM 1e-2", 0.009, 0.03, 5.0, None),
        ("SGLang 3e-2", 0.029, 0.08, 5.0, None),
        ("TensorRT-LLM", 0.0029, 0.05, 5.0, None),
        ("FlashInfer 1e-3", 0.0009, 0.003, 0.003, 0.01),
        ("FlashMLA", 0.0007, 0.02, 3e-4, 1e-3),
        ("tokenspeed", 0.009, 0.03, 0.03, 0.1),
        ("flashinfer-bench", 0.009, 0.02, 0.02, 0.1),
    ],
)
def test_a_policy_accepts_and_rejects_as_it_was_read(
    name: str, fine: float, wrong: float, lse_fine: float, lse_wrong: float | None
) -> None:
    assert opinion(name, EXACT, EXACT) and opinion(name, fine, EXACT) and not opinion(name, wrong, EXACT)
    assert not opinion(name, NAN, EXACT)
    assert opinion(name, EXACT, lse_fine)
    assert lse_wrong is None or not (opinion(name, EXACT, lse_wrong) or opinion(name, EXACT, NAN))


def test_every_policy_is_asked_here_and_names_its_source() -> None:
    assert len({policy.name for policy in POLICIES}) == len(POLICIES) == 7
    assert all(policy.source for policy in POLICIES)


@pytest.mark.parametrize("rule", [close(1e-2, 1e-2), either(1e-2, 1e-2)])
def test_rules_treat_infinities_as_values(rule: Callable[[torch.Tensor, torch.Tensor], bool]) -> None:
    empty, finite = torch.tensor([-torch.inf]).double(), torch.tensor([-1e4]).double()
    assert rule(empty, empty) and not rule(finite, empty) and not rule(empty, finite) and not rule(-empty, empty)


def test_a_direction_that_is_off_everywhere_is_rejected_by_the_cosine_rule_alone() -> None:
    want = torch.full((1, 1, 64), 0.01).double()
    got = want + 7e-4 * torch.where(torch.arange(64) % 2 == 0, 1.0, -1.0)
    (flash_mla,) = (policy for policy in POLICIES if policy.name == "FlashMLA")
    assert either(8e-4, 2.01 / 128)(got, want) and not flash_mla.output(got, want)


@pytest.mark.parametrize("text", ["new_tokens:dims=small;q=[9,5]", "context_chunk:dims=small;q=[3,5];kv=[40,9]"])
def test_twice_the_error_of_low_precision_is_measured_on_the_problem(text: str) -> None:
    problem = build_problem(Case.parse(text), torch.device("cpu"))
    trial = Trial(Kernel("EAGER", "EAGER", honest=True).subject(), problem.case)
    assert not failing(execute(trial)) and trial.last is not None
    output, lse = trial.last.returned[0].value
    golden = Golden(*golden_of(problem.case))
    policy = twice_low_precision(problem)
    assert policy.accepts(output, lse, golden)
    assert not policy.accepts(output * 0.9, lse, golden) and not policy.accepts(output * torch.nan, lse, golden)


def golden_of(case: Case) -> tuple[torch.Tensor, torch.Tensor]:
    state = expect(build_problem(case, torch.device("cpu"))).calls[0]
    return state.output, state.lse

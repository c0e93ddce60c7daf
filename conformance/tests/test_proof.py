"""The golden layer is what released models compute, and the proof of it would notice if it were not."""

import re
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from pkgutil import resolve_name

import pytest

from mla_conformance.commands import proof as command
from mla_conformance.files.inputs import InputError
from mla_conformance.files.outputs import Section
from mla_conformance.proof.families import FAMILIES
from mla_conformance.proof.prove import BOUND, COLUMNS, FAR_ANGLES, INDEX_SCORES, needs, prove
from mla_conformance.reference.rope import Rotation

DOCS = Path(__file__).parents[2] / "docs" / "models.md"
BY_MODEL = {family.spec.model: family for family in FAMILIES}
needs_transformers = pytest.mark.skipif(find_spec("transformers") is None, reason="needs the extra 'models'")


@needs_transformers
@pytest.mark.parametrize("model", BY_MODEL)
def test_the_golden_layer_is_the_models_own(model: str) -> None:
    """And each place that stays in float32 shows: what float32 does is measured, not assumed."""
    family = BY_MODEL[model]
    proof = prove(family)
    assert proof.holds, proof.differences
    assert set(proof.differences) == {*COLUMNS, INDEX_SCORES} - (set() if family.indexer else {INDEX_SCORES})
    far = proof.effects.pop(FAR_ANGLES, None)
    assert all(1e-9 < effect < 1e-5 for effect in proof.effects.values()), proof.effects
    assert (far is None) == (family.spec.rotation is None) and (far is None or 1e-6 < far < 1e-2)
    assert "norms" in proof.effects and ("angles" in proof.effects) == (family.spec.rotation is not None)


V3 = BY_MODEL["DeepSeek-V3, R1, Kimi-K2"]
WRONG = {
    "a scale without YaRN's factor": (V3, {"scale": V3.spec.dims.head.qk_head_dim**-0.5}),
    "frequencies without YaRN": (V3, {"rotation": Rotation.plain(8, interleaved=True)}),
    "pairs of halves": (BY_MODEL["GLM-5"], {"rotation": Rotation.plain(8, base=1e6, interleaved=False)}),
    "another epsilon": (BY_MODEL["GLM-5.3"], {"kv_norm": 1e-6}),
    "queries as they were": (BY_MODEL["LongCat-Flash"], {"q_factor": 1.0}),
    "a rotary part that is rotated": (BY_MODEL["Kimi-Linear"], {"rotation": Rotation.plain(8, interleaved=True)}),
    "queries that do not grow": (BY_MODEL["Mistral 4"], {"growth": None}),
}


@needs_transformers
@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_part_of_a_layer_is_seen(name: str) -> None:
    family, change = WRONG[name]
    assert not prove(replace(family, spec=replace(family.spec, **change))).holds


@needs_transformers
def test_a_window_that_is_off_by_one_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    name = "transformers.masking_utils.sliding_window_causal_mask_function"
    theirs = resolve_name(name)
    monkeypatch.setattr(name, lambda window: theirs(window + 1))
    assert not prove(BY_MODEL["DeepSeek-V3 in a window"]).holds


@needs_transformers
def test_no_model_with_mla_is_left_out() -> None:
    """A projection from latents to keys and values is what tells MLA."""
    models = Path(str(resolve_name("transformers").__file__)).parent / "models"
    files = [path for path in models.glob("*/modeling_*.py") if "self.kv_b_proj = " in path.read_text("utf-8")]
    assert {path.parent.name for path in files} == {family.module for family in FAMILIES}


@needs_transformers
def test_the_command_prints_and_writes_the_tables(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    docs = tmp_path / "docs.md"
    docs.write_text("before\n<!-- proof:begin -->\nold\n<!-- proof:end -->\nafter\n")
    wrong = replace(V3, spec=replace(V3.spec, model="Wrong", scale=1.0))
    monkeypatch.setattr(command, "FAMILIES", (V3, wrong))
    assert command.prove(docs) == 1
    printed = capsys.readouterr().out
    assert "| DeepSeek-V3, R1, Kimi-K2 | `DeepseekV3Attention` |" in printed
    assert printed.endswith("more than 1e-12 apart: Wrong\n")
    assert Section.of(docs, "proof").content.strip() in printed and docs.read_text().endswith("\nafter\n")
    monkeypatch.setattr(command, "FAMILIES", (V3,))
    assert command.prove() == 0
    assert capsys.readouterr().out.endswith("all 1 agree to 1e-12\n")


@needs_transformers
def test_a_model_that_transformers_does_not_have_is_a_usage_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(command, "FAMILIES", (replace(V3, module="dots9"),))
    with pytest.raises(InputError, match=r"transformers .*dots9.*pip install mla-conformance\[models\]"):
        command.prove()


def test_without_transformers_the_command_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(command, "find_spec", lambda name: None)
    with pytest.raises(InputError, match=r"not installed; pip install mla-conformance\[models\]"):
        command.prove()


def test_the_docs_show_the_proof_of_these_models() -> None:
    """The numbers are a machine's own, but for their size; the rest is what the command would write here."""
    rows = [line.strip("| ").split(" | ") for line in Section.of(DOCS, "proof").content.splitlines() if line[:1] == "|"]
    shown = [row for row in rows if row[0] in BY_MODEL]
    assert [row[0] for row in shown] == [*BY_MODEL, *BY_MODEL]
    for row in shown[: len(FAMILIES)]:
        family = BY_MODEL[row[0]]
        assert (row[1], row[-1]) == (f"`{family.prefix}{family.attention}`", "; ".join(needs(family.spec)) or "–")
        numbers = [cell for cell in row[2:-1] if cell != "–"]
        assert len(numbers) == len(COLUMNS) + (family.indexer is not None)
        assert all(float(number) <= BOUND for number in numbers)
    assert re.search(r"from transformers 5\.17\.0,", Section.of(DOCS, "proof").content)

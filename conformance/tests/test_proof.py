"""The golden layer is what released models compute: their own modules in transformers, in float64, differ by rounding.

A small module gets random weights and three calls, a prefill, a decode step and an extension; the golden layer takes
each of its paths with the same weights. ``docs/models.md`` says what came of it.
"""

from collections.abc import Iterable
from importlib.util import find_spec
from pathlib import Path
from pkgutil import resolve_name

import pytest
import torch

from mla_conformance.reference import layer as routes
from mla_conformance.reference.selected import NO_KEY
from mla_conformance.tests.proof.families import FAMILIES, HIDDEN, ProofFamily
from mla_conformance.tests.proof.layers import CALLS, TOKENS, GoldenLayer, TheirCall, TheirRun, run_layer

pytestmark = pytest.mark.skipif(
    find_spec("transformers") is None, reason="needs transformers: pip install -r ci/models/requirements.txt"
)
BOUND = 1e-12
"""The largest difference that float64 sums in two orders may have; outputs and scores are of size 0.2 to 1.4."""
FAR = 100_000
"""The position from which what float32 does to angles is measured too."""
EXPANDED: routes.Path = "compute_friendly"
PATHS: dict[str, tuple[routes.Path, tuple[int, ...]]] = {
    "prefill, expanded": (EXPANDED, (0, 2)),
    "prefill, absorbed": ("data_movement_friendly", (0, 2)),
    "prefill, in chunks": ("chunked_prefill", (2,)),
    "decode, expanded": (EXPANDED, (1,)),
    "decode, absorbed": ("data_movement_friendly", (1,)),
}
"""What is compared: the path, and the numbers of the calls."""
BY_MODEL = {family.spec.model: family for family in FAMILIES}


def hidden_states() -> torch.Tensor:
    return torch.randn(TOKENS, HIDDEN, generator=torch.Generator().manual_seed(1), dtype=torch.float64)


def differences(family: ProofFamily) -> tuple[dict[str, float], TheirRun]:
    """Largest absolute differences by path, and of index scores where they are told; their code in float64."""
    hidden = hidden_states()
    theirs = run_layer(family, hidden)
    golden = GoldenLayer(family, theirs.weights, hidden, 0)
    found = {
        name: outputs(golden, [(CALLS[i], theirs.calls[i]) for i in calls], path)
        for name, (path, calls) in PATHS.items()
    }
    if family.indexer is not None:
        found["index scores"] = scores(golden, theirs.calls)
    return found, theirs


def effect(family: ProofFamily, place: str, first: int = 0) -> float:
    hidden = hidden_states()
    theirs = run_layer(family, hidden, first=first, kept=[place])
    golden = GoldenLayer(family, theirs.weights, hidden, first)
    found = outputs(golden, zip(CALLS, theirs.calls, strict=True), EXPANDED)
    return found if family.indexer is None else max(found, scores(golden, theirs.calls))


def outputs(golden: GoldenLayer, calls: Iterable[tuple[tuple[int, int], TheirCall]], path: routes.Path) -> float:
    return max(apart(golden.output(*tokens, call.selected, path), call.output) for tokens, call in calls)


def scores(golden: GoldenLayer, calls: Iterable[TheirCall]) -> float:
    """Of index scores, and of those of what was chosen from the highest."""
    found = []
    for tokens, call in zip(CALLS, calls, strict=True):
        assert call.scores is not None and call.selected is not None
        own = golden.scores(*tokens)
        chosen = own.gather(1, call.selected.clamp(min=0)).masked_fill(call.selected == NO_KEY, -torch.inf)
        highest = own.topk(chosen.shape[1]).values
        found += [apart(own, call.scores), apart(chosen.sort(dim=1, descending=True).values, highest)]
    return max(found)


def apart(a: torch.Tensor, b: torch.Tensor) -> float:
    """The largest difference; equal infinities are none, and a NaN is infinite."""
    return torch.where(a == b, 0.0, (a - b).abs()).nan_to_num(nan=torch.inf, posinf=torch.inf).max().item()


@pytest.mark.parametrize("model", BY_MODEL)
def test_the_golden_layer_is_the_models_own(model: str) -> None:
    """And each place that stays in float32 shows: what float32 does is measured, not assumed."""
    family = BY_MODEL[model]
    found, theirs = differences(family)
    assert max(found.values()) <= BOUND, found
    # Of an indexer whose scores are not compared, float32 would show in nothing but another choice.
    places = theirs.places if family.indexer else theirs.places - {"index scores"}
    effects = {place: effect(family, place) for place in places}
    assert all(1e-9 < one < 1e-5 for one in effects.values()), effects
    assert "norms" in effects and ("angles" in effects) == (family.spec.rotation is not None)
    assert "angles" not in effects or 1e-6 < effect(family, "angles", FAR) < 1e-2


def test_no_model_with_mla_is_left_out() -> None:
    """A projection from latents to keys and values is what tells MLA."""
    models = Path(str(resolve_name("transformers").__file__)).parent / "models"
    files = [path for path in models.glob("*/modeling_*.py") if "self.kv_b_proj = " in path.read_text("utf-8")]
    assert {path.parent.name for path in files} == {family.module for family in FAMILIES}

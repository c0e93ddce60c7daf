"""How far the golden layer and a model's own code are apart, and what of that code's float32 shows, as two tables."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from math import isclose

import torch
from torch import Tensor

from mla_conformance.proof.families import HIDDEN, ProofFamily
from mla_conformance.proof.layers import CALLS, TOKENS, GoldenLayer, TheirCall, run_layer
from mla_conformance.proof.oracles import Oracle
from mla_conformance.reference.layer import LayerSpec
from mla_conformance.reference.mla import Path
from mla_conformance.reference.selected import NO_KEY

BOUND = 1e-12
"""The largest difference that float64 sums in two orders may have; outputs and scores are of size 0.2 to 1.4."""
FAR = 100_000
"""The position from which what float32 does to angles is measured too."""
FAR_ANGLES = f"angles from {FAR:,}"
_EXPANDED: Path = "compute_friendly"
COLUMNS: dict[str, tuple[Path, tuple[int, ...]]] = {
    "prefill, expanded": (_EXPANDED, (0, 2)),
    "prefill, absorbed": ("data_movement_friendly", (0, 2)),
    "prefill, in chunks": ("chunked_prefill", (2,)),
    "decode, expanded": (_EXPANDED, (1,)),
    "decode, absorbed": ("data_movement_friendly", (1,)),
}
"""What is compared: the path, and the numbers of the calls."""
INDEX_SCORES = "index scores"


@dataclass(frozen=True)
class Proof:
    """Largest absolute differences of one family.

    Attributes:
        family: the models.
        differences: by column, with their code in float64 throughout; of index scores where it has them.
        effects: of float32 in one of its places alone, by place.
    """

    family: ProofFamily
    differences: dict[str, float]
    effects: dict[str, float]

    @property
    def holds(self) -> bool:
        """Whether all differences are within the bound."""
        return agree(self.differences)


def agree(differences: Mapping[str, float]) -> bool:
    """Whether all differences are within the bound."""
    return all(difference <= BOUND for difference in differences.values())


@contextmanager
def _one_thread() -> Iterator[None]:
    """Over tensors of a few elements threads wait for each other, and for minutes where others use the cores."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


@_one_thread()
def prove(family: ProofFamily) -> Proof:
    """Hold the golden layer of a family against its module of transformers.

    Raises ImportError without transformers, or with one that has no such model.
    """
    hidden = torch.randn(TOKENS, HIDDEN, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    theirs = run_layer(family, hidden)
    golden = GoldenLayer(family, theirs.weights, hidden, 0)
    differences = {
        name: _outputs(golden, [(CALLS[i], theirs.calls[i]) for i in calls], path)
        for name, (path, calls) in COLUMNS.items()
    }
    if family.indexer is not None:
        differences[INDEX_SCORES] = _scores(golden, theirs.calls)
    # Of an indexer whose scores are not compared, float32 would show in nothing but another choice.
    places = theirs.places if family.indexer else theirs.places - {INDEX_SCORES}
    effects = {place: _effect(family, hidden, place, 0) for place in sorted(places)}
    if "angles" in effects:
        effects[FAR_ANGLES] = _effect(family, hidden, "angles", FAR)
    return Proof(family, differences, effects)


@_one_thread()
def prove_by(oracle: Oracle, family: ProofFamily) -> dict[str, float]:
    """Largest absolute differences from an author's code in float64 throughout, by path of the golden layer."""
    hidden = torch.randn(TOKENS, HIDDEN, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    weights, calls = oracle.run(family, hidden)
    golden = GoldenLayer(family, weights, hidden, 0)
    behind = [(tokens, call) for tokens, call in calls if tokens[0] > 0]
    return {
        "expanded": _outputs(golden, calls, _EXPANDED),
        "absorbed": _outputs(golden, calls, "data_movement_friendly"),
        "in chunks": _outputs(golden, behind, "chunked_prefill"),
    }


def _effect(family: ProofFamily, hidden: Tensor, place: str, first: int) -> float:
    """The largest difference of an output or a score where one place stays in float32."""
    theirs = run_layer(family, hidden, first=first, kept=[place])
    golden = GoldenLayer(family, theirs.weights, hidden, first)
    outputs = _outputs(golden, zip(CALLS, theirs.calls, strict=True), _EXPANDED)
    return outputs if family.indexer is None else max(outputs, _scores(golden, theirs.calls))


def _outputs(golden: GoldenLayer, calls: Iterable[tuple[tuple[int, int], TheirCall]], path: Path) -> float:
    return max(_apart(golden.output(*tokens, call.selected, path), call.output) for tokens, call in calls)


def _scores(golden: GoldenLayer, calls: Iterable[TheirCall]) -> float:
    """Of index scores, and of those of what was chosen from the highest."""
    found = []
    for tokens, call in zip(CALLS, calls, strict=True):
        assert call.scores is not None and call.selected is not None
        scores = golden.scores(*tokens)
        chosen = scores.gather(1, call.selected.clamp(min=0)).masked_fill(call.selected == NO_KEY, -torch.inf)
        highest = scores.topk(chosen.shape[1]).values
        found += [_apart(scores, call.scores), _apart(chosen.sort(dim=1, descending=True).values, highest)]
    return max(found)


def _apart(a: Tensor, b: Tensor) -> float:
    """The largest difference; equal infinities are none, and a NaN is infinite."""
    return torch.where(a == b, 0.0, (a - b).abs()).nan_to_num(nan=torch.inf, posinf=torch.inf).max().item()


def section(proofs: Sequence[Proof], version: str) -> list[str]:
    """Lines of Markdown."""
    columns = [*COLUMNS, INDEX_SCORES]
    places = sorted({place for proof in proofs for place in proof.effects})
    return [
        f"Largest absolute differences from transformers {version}, whose code computes in float64 throughout; up to",
        f"{BOUND:.0e} is right. A dash is what a model does not have.",
        "",
        *_table(["models", "class", *columns, "beyond the plain layer"], [_row(proof, columns) for proof in proofs]),
        "",
        "The same where one place of that code stays in float32, as it is released, at positions from 0, and for",
        f"angles from {FAR:,} as well.",
        "",
        *_table(["models", *places], [[p.family.spec.model, *_numbers(p.effects, places)] for p in proofs]),
    ]


def _row(proof: Proof, columns: Iterable[str]) -> list[str]:
    family = proof.family
    numbers = _numbers(proof.differences, columns)
    return [family.spec.model, f"`{family.prefix}{family.attention}`", *numbers, "; ".join(needs(family.spec)) or "–"]


def _numbers(values: Mapping[str, float], names: Iterable[str]) -> list[str]:
    return [f"{values[name]:.0e}" if name in values else "–" for name in names]


def _table(header: list[str], rows: list[list[str]]) -> list[str]:
    lines = [header, ["---"] * len(header), *rows]
    return ["| " + " | ".join(cells) + " |" for cells in lines]


def needs(spec: LayerSpec) -> list[str]:
    """What a layer has beyond two normalised latents, pairs that turn by powers of a base, and the plain scale."""
    plain_scale, rotary, rotation = spec.dims.head.qk_head_dim**-0.5, spec.dims.head.qk_rope_head_dim, spec.rotation
    parts = {
        "no latent query": spec.dims.q_lora_rank is None,
        "queries from the latent beside its norm": spec.doubled_query_latent,
        "no rotary part": rotary == 0,
        "a rotary part that is not rotated": rotary > 0 and rotation is None,
        "RoPE in halves": rotation is not None and not rotation.interleaved,
        "frequencies of an extended context": rotation is not None and not _is_geometric(rotation.frequencies),
        "rotated parts with a factor": rotation is not None and rotation.magnitude != 1,
        "a factor of the scale": spec.scale != plain_scale,
        "rescaled latents": (spec.q_factor, spec.kv_factor) != (1.0, 1.0),
        "queries that grow with the position": spec.growth is not None,
        "a window": spec.window is not None,
        "selected tokens": spec.selects,
        "a sink of each head": spec.sink,
        "a gate of the output": spec.gate is not None,
    }
    return [words for words, holds in parts.items() if holds]


def _is_geometric(frequencies: Sequence[float]) -> bool:
    ratios = [b / a for a, b in pairwise(frequencies)]
    return all(isclose(ratio, ratios[0]) for ratio in ratios)

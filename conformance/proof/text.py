"""The proof as two tables: differences in float64, and what float32 does in the places that ask for it."""

from collections.abc import Iterable, Sequence
from itertools import pairwise
from math import isclose

from mla_conformance.proof.prove import BOUND, COLUMNS, FAR, INDEX_SCORES, Proof
from mla_conformance.reference.layer import LayerSpec


def section(proofs: Sequence[Proof], version: str) -> list[str]:
    """Lines of Markdown."""
    columns = [*COLUMNS, INDEX_SCORES]
    places = sorted({place for proof in proofs for place in proof.effects})
    return [
        f"Largest absolute differences from transformers {version}, whose code computes in float64 throughout; up to",
        f"{BOUND:.0e} is right. A dash is what a model does not have.",
        "",
        *_table(["models", "class", *columns, "beyond the plain layer"], (_row(proof, columns) for proof in proofs)),
        "",
        "The same where one place of that code stays in float32, as it is released, at positions from 0, and for",
        f"angles from {FAR:,} as well.",
        "",
        *_table(["models", *places], (_effects(proof, places) for proof in proofs)),
    ]


def _row(proof: Proof, columns: Iterable[str]) -> list[str]:
    family = proof.family
    numbers = [_number(proof.differences.get(name)) for name in columns]
    return [family.spec.model, f"`{family.prefix}{family.attention}`", *numbers, "; ".join(needs(family.spec)) or "–"]


def _effects(proof: Proof, places: Iterable[str]) -> list[str]:
    return [proof.family.spec.model, *(_number(proof.effects.get(place)) for place in places)]


def _number(value: float | None) -> str:
    return "–" if value is None else f"{value:.0e}"


def _table(header: list[str], rows: Iterable[list[str]]) -> list[str]:
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

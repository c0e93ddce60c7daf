"""Digests of the reference's results on fixed inputs, so that a change of its values is noticed, whoever makes it.

Inputs are made of integers, not of a random generator, and are exact in float64. Results are rounded to 8 decimals,
which no reordering of sums and no platform shows in. After an intended change of the reference, run this file as a
program (`python reference/tests/test_digests.py`); it rewrites fixtures/golden/reference_digests.json.
"""

import hashlib
import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from mla_conformance.fixtures import load
from mla_conformance.reference.attention import AttentionState, attention
from mla_conformance.reference.dimensions import PRESETS
from mla_conformance.reference.kv_cache import PagedContext
from mla_conformance.reference.layer import LayerSpec, mla_layer
from mla_conformance.reference.mla import Path as Route
from mla_conformance.reference.mla import chunked_prefill
from mla_conformance.reference.projections import MLAWeights
from mla_conformance.reference.quantization import quantize_e4m3
from mla_conformance.reference.rope import Rotation, rope

FILE = Path(__file__).parents[2] / "fixtures" / "golden" / "reference_digests.json"


def integers(seed: int, *shape: int) -> Tensor:
    """Multiples of 1/256 in [-2, 2), from a multiplicative hash of the index."""
    index = torch.arange(math.prod(shape)) + 1009 * seed
    return ((index * 2654435761 % 2**32 // 2**12 % 1024) / 256 - 2).to(torch.float64).reshape(shape)


def digest(*tensors: Tensor) -> str:
    """SHA-256 of the shapes and the values in units of 1e-8, an infinity spelled out."""
    text = []
    for tensor in tensors:
        units = (f"{round(x * 1e8)}" if math.isfinite(x) else f"{x}" for x in tensor.double().flatten().tolist())
        text.append(f"{tuple(tensor.shape)}:{','.join(units)}")
    return hashlib.sha256(";".join(text).encode()).hexdigest()


def of_state(state: AttentionState) -> str:
    terms = state.terms.by_name().values() if state.terms else ()
    return digest(state.output, state.lse, *terms)


def varlen_attention(causal: bool, kv_heads: int) -> str:
    q, k, v = integers(1, 12, 4, 24), integers(2, 40, kv_heads, 24), integers(3, 40, kv_heads, 16)
    starts: dict[str, Any] = {"query_start_loc": (0, 5, 6, 12), "key_start_loc": (0, 31, 31, 34)}
    return of_state(attention(q, k, v, **starts, scale=0.2, causal=causal, with_terms=True))


def context() -> PagedContext:
    return PagedContext(integers(4, 6, 4, 40), torch.tensor([[3, 0, 5], [1, 2, 4]]), (10, 3), workspace_tokens=8)


def chunked() -> str:
    operands = integers(5, 7, 4, 16), integers(6, 7, 4, 8), integers(7, 7, 32), integers(8, 7, 8)
    weight = integers(9, 32, 4, 32) / 8
    return of_state(chunked_prefill(*operands, weight, query_start_loc=(0, 3, 7), context=context(), scale=0.125))


def layer(path: Route) -> str:
    shapes = (64, 24), (24, 4, 16), (24, 4, 8), (64, 32), (32, 4, 16), (64, 8), (32, 4, 16), (64, 64)
    weights = MLAWeights(*(integers(10 + i, *shape) / 8 for i, shape in enumerate(shapes)))
    positions = torch.tensor([10, 11, 12, 3, 4, 5, 6])
    spec = LayerSpec(model="small", dims=PRESETS["small"], scale=0.125, rotation=turn(interleaved=True))
    starts = (0, 3, 7)
    return digest(
        mla_layer(integers(20, 7, 64), positions, weights, spec, query_start_loc=starts, context=context(), path=path)
    )


def turn(interleaved: bool) -> Rotation:
    return Rotation.plain(8, interleaved=interleaved)


def rotated(interleaved: bool) -> str:
    return digest(rope(integers(21, 9, 2, 8), torch.arange(9) * 101, turn(interleaved)))


CASES: dict[str, Callable[[], str]] = {
    "attention_causal": lambda: varlen_attention(causal=True, kv_heads=4),
    "attention_unmasked_one_kv_head": lambda: varlen_attention(causal=False, kv_heads=1),
    "chunked_prefill": chunked,
    "layer_compute_friendly": lambda: layer("compute_friendly"),
    "layer_data_movement_friendly": lambda: layer("data_movement_friendly"),
    "layer_chunked_prefill": lambda: layer("chunked_prefill"),
    "rope_interleaved": lambda: rotated(interleaved=True),
    "rope_halves": lambda: rotated(interleaved=False),
    "quantize_e4m3": lambda: digest(quantize_e4m3(integers(22, 512), 0.01).view(torch.uint8)),
}


def rewrite() -> None:
    """Write the digests of today's reference, keeping the file's header."""
    golden = json.loads(FILE.read_text(encoding="utf-8"))
    golden["payload"] = {name: compute() for name, compute in CASES.items()}
    canonical = json.dumps(golden["payload"], sort_keys=True, separators=(",", ":"))
    golden["provenance"]["payload_sha256"] = hashlib.sha256(canonical.encode()).hexdigest()
    FILE.write_text(json.dumps(golden, indent=2) + "\n", encoding="utf-8")


@pytest.mark.parametrize("name", CASES)
def test_reference_has_not_drifted(name: str) -> None:
    assert load("reference_digests")["payload"][name] == CASES[name]()


def test_every_digest_is_checked() -> None:
    assert set(load("reference_digests")["payload"]) == set(CASES)


if __name__ == "__main__":
    rewrite()

"""The cases that decide each capability of a sparse layer, the most telling first; see ``prefill_caselists``."""

from collections.abc import Iterator
from typing import Any

from mla_conformance.cases.grammar import Fields, Lengths


def step(q: Lengths, kv: Lengths, decodes: int = 0, **fields: Any) -> Fields:
    """A step of these requests, of which the first so many decode."""
    return {"call": "sparse_layer", "q": q, "kv": kv, "decodes": decodes, **fields}


def layers() -> Iterator[Fields]:
    yield step((1, 1, 9), (40, 70, 30), 2)

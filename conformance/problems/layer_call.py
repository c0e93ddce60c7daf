"""A call of a layer."""

from dataclasses import dataclass
from typing import Any, Protocol

import torch

from mla_conformance.backends.layer.mla_requests import LayerRequest
from mla_conformance.problems.cache_bytes import CacheImage
from mla_conformance.problems.calls import AttentionCall, Question
from mla_conformance.problems.layer_weights import Linear, PackedLinear, as_linear
from mla_conformance.problems.memory import Guarded


class LayerDriver(Protocol):
    """What a call needs of the layer under test."""

    def load(self, linear: Linear | PackedLinear) -> None:
        """Load or update weights."""

    def prepare(self, call: "LayerCall") -> None:
        """Build the metadata of a batch."""

    def forward(self, call: "LayerCall") -> Any:
        """The layer's result."""


@dataclass(frozen=True, kw_only=True)
class LayerCall(AttentionCall):
    """``forward`` of a layer; q, k and v are what it means: [T, N, P + R], [S, N, P + R] and [S, N, V] in float64.

    Attributes:
        query: [T, N·(P + R)], as handed over.
        kv_c: [T, L].
        k_pe: [T, 1, R].
        weight: [L, N, P + V] float64 of ``kv_b_proj``.
        packed: whether ``kv_b_proj`` holds codes under another name.
        requests: the batch.
        padding: rows of padding behind it; -1 where no graph is used.
        padding_counts: whether the metadata counts these rows, as requests without tokens.
        image: the cache before the call, and what it must hold after it.
        chunks: context chunks that a prefill merges with its new tokens.
    """

    query: torch.Tensor
    kv_c: torch.Tensor
    k_pe: torch.Tensor
    weight: torch.Tensor
    requests: tuple[LayerRequest, ...]
    padding: int
    padding_counts: bool
    image: CacheImage
    chunks: int
    packed: bool = False

    @property
    def name(self) -> str:
        """How messages call it."""
        return "layer"

    @property
    def merges(self) -> int:
        """Merges of stored results that a prefill with context takes."""
        return self.chunks

    @property
    def returns_lse(self) -> bool:
        """A layer has none."""
        return False

    def owned(self) -> dict[str, torch.Tensor]:
        """The operands; the cache is written, so its bytes are compared with what they must be."""
        return {name: getattr(self, name) for name in ("query", "kv_c", "k_pe")}

    def prepare(self, backend: LayerDriver) -> None:
        """Weights and metadata."""
        dense = as_linear(self.weight, self.query.dtype, self.query.device)
        backend.load(PackedLinear(dense) if self.packed else dense)
        backend.prepare(self)

    def invoke(self, backend: LayerDriver, out: Guarded | None) -> Any:
        """``forward`` on the cache as it was before; its result by heads."""
        self.image.reset()
        result = backend.forward(self)
        if not isinstance(result, torch.Tensor) or result.shape[0] != self.query.shape[0]:
            return result
        return result[: self.q.shape[0]].unflatten(-1, (self.q.shape[1], -1))

    def wrong_writes(self) -> str:
        """What the last call wrote into the cache that it should not have, or failed to write."""
        return self.image.difference()

    def question(self) -> Question:
        """Attention over keys and values as a prefill has them; a decode computes the same."""
        starts = (self.query_start_loc, self.key_start_loc)
        return Question(self.q, self.k, self.v, *starts, causal=True, dequantised=self.image.case.holds_codes)

"""Cases of a whole MLA layer: a batch of prefills and decodes over a paged cache, into which it writes."""

from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, ClassVar

from mla_conformance.backends.layer.mla_context import MAX_WORKSPACE_TOKENS
from mla_conformance.backends.roles import Role
from mla_conformance.cases.cached import CachedCase
from mla_conformance.cases.case import Call, at_least, given, one_of
from mla_conformance.cases.grammar import Data

LATENTS = (
    *(Data.NORMAL, Data.OUTLIERS, Data.LOW_RANK, Data.INTEGERS, Data.RISING, Data.TINY_VALUES),
    *("large", "tiny_tiles", "zero_tiles"),
)
"""What cached latents are like: as a regime of that name makes keys, 64 times as large, or with a tile of each entry
a millionth of the others, or zeros."""


class Order(StrEnum):
    """Which requests of a layer's batch come first."""

    PREFILLS_FIRST = "prefills_first"
    """As the earlier builder lays out a batch of requests."""
    DECODES_FIRST = "decodes_first"
    """As the present builder wants a batch reordered."""


@dataclass(frozen=True, kw_only=True)
class LayerCase(CachedCase):
    """A question to a layer."""

    role: ClassVar[Role] = Role.LAYER
    calls: ClassVar[tuple[Call, ...]] = (Call.LAYER,)

    decodes: int = at_least(0, 0, "requests of the batch that decode")
    order: str = one_of(Order, Order.PREFILLS_FIRST, "which requests of the batch come first")
    latents: str = one_of(
        LATENTS,
        Data.NORMAL,
        "what the latents are like; `data` is about the queries alone, since ids are older than this field",
    )
    weights: str = one_of(
        ("selection", "dense"),
        "selection",
        "whether a column of `kv_b_proj` picks one latent, so that nothing rounds, or weighs all of them",
    )
    model: int = at_least(
        0, 0, "number of the weights, which all batches of the same head dims then have; 0 draws them with the batch"
    )
    out: bool = given(False, "whether an output tensor is handed in")

    @property
    def decoding(self) -> range:
        """The requests that decode."""
        first = 0 if self.order == Order.DECODES_FIRST else len(self.q) - self.decodes
        return range(first, first + self.decodes)

    @property
    def padding_counts(self) -> bool:
        """Whether rows of padding are requests; behind prefills that come last, no decode can follow."""
        return self.order == Order.PREFILLS_FIRST or self.decodes == len(self.q)

    @property
    def decode_queries(self) -> tuple[int, ...]:
        return self.q[self.decoding.start : self.decoding.stop] + (1,) * (self.pad * self.padding_counts)

    @property
    def prefill_contexts(self) -> tuple[int, ...]:
        """Context tokens of each request that prefills."""
        return tuple(kv for index, kv in enumerate(self.kv) if index not in self.decoding)

    @property
    def is_merged(self) -> bool:
        return False  # ranks of a layer merge their states themselves

    @property
    def workspace_tokens(self) -> int:
        """Tokens of the workspace that a layer gathers context into: no layer has more than 128 Ki."""
        return min(self.workspace, MAX_WORKSPACE_TOKENS)

    def heads_of(self, rank: int) -> slice:
        """The heads that a rank computes: equal shares, in order."""
        each = self.heads // self.ranks
        return slice(rank * each, (rank + 1) * each)

    def without(self, requests: range) -> dict[str, Any]:
        return {**super().without(requests), "decodes": sum(index not in requests for index in self.decoding)}

    def contradictions(self) -> Iterator[str]:
        yield from super().contradictions()
        if self.decodes > len(self.q):
            yield (f"field decodes: expected at most the {len(self.q)} requests of a layer, got {self.decodes}")
        longest, prefills = max(self.decode_queries, default=1), self.q[self.decodes :]
        if self.order == Order.DECODES_FIRST and min(prefills, default=longest + 1) <= longest:
            yield (
                f"order decodes_first: a builder knows a prefill by more query tokens than a decode has, expected more "
                f"than {longest}, got q={list(self.q)} with {self.decodes} decodes"
            )
        widest = max(self.dimensions.qk_nope_head_dim, self.dimensions.v_head_dim)
        if self.weights == "selection" and widest > self.kv_lora_rank:
            yield f"field dims: a layer's weights pick latents, P and V may not exceed L, got {self.dims}"
        if self.heads % self.ranks:
            yield f"field heads: expected a multiple of the {self.ranks} ranks, got {self.heads}"
        if self.ranks > 1 and (self.weights == "dense" or self.out):
            yield (
                f"field ranks: expected weights=selection and no out where {self.ranks} ranks share the tokens, got "
                f"weights={self.weights}, out={self.out}"
            )

"""Cases of a sparse layer: hidden states in, hidden states out, both caches written and tokens selected on the way."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, ClassVar

from mla_conformance.backends.roles import Role
from mla_conformance.cases.cached import CachedCase
from mla_conformance.cases.case import Call, Sizes, at_least, given, one_of
from mla_conformance.cases.grammar import Data
from mla_conformance.reference.entry_formats import TILE_SCALES
from mla_conformance.roles.indexer.case import CODES, PLAIN
from mla_conformance.roles.prepare.case import PAIRS

INDEX_DIM = 128
"""D, columns of an index key."""
MOST_QUERIES = 12
"""Of a latent query of 1536 columns, as DeepSeek's."""
WHOLE = 64
LATENTS = (Data.NORMAL, Data.INTEGERS)
_USUAL_HEADS, _USUAL_TOPK = 64, 2048


@dataclass(frozen=True, kw_only=True)
class SparseLayerCase(CachedCase):
    """A question to a sparse layer; ``layout`` is that of the hidden states."""

    role: ClassVar[Role] = Role.SPARSE_LAYER
    calls: ClassVar[tuple[Call, ...]] = (Call.SPARSE_LAYER,)

    dtype: str = one_of(("bf16", "fp16"), "bf16")
    dims: str = "32-32-32-128"
    page: int = at_least(1, 64)
    data: str = one_of(
        LATENTS,
        Data.NORMAL,
        "what latents are like; of a cache of codes they are always whole numbers, which it stores as they are",
    )
    cache: str = one_of(("auto", "fp8_ds_mla"), "auto", "layout of the latent cache")
    decodes: int = at_least(0, 0, "requests that decode, the first ones")
    index_cache: str = one_of((CODES, PLAIN), CODES, "layout of the index cache")
    index_scales: str = one_of(TILE_SCALES, "float32", "of its codes")
    index_heads: int = at_least(2, 4, "heads of the indexer")
    topk: int = at_least(2, 8, "tokens selected for each query token")
    pairs: str = one_of(PAIRS, "halves", "what the indexer rotates together")
    rope_last: bool = given(False, "whether it rotates the last columns")
    layer_pairs: str = one_of(PAIRS, "neighbours", "what the layer rotates together")
    shared: bool = given(False, "whether an earlier layer's selection is reused")
    tp: int = at_least(1, 1, "ranks that share the heads, each with a replica of the indexer and caches of its own")

    @property
    def is_merged(self) -> bool:
        return False  # one rank has all tokens

    @property
    def is_causal(self) -> bool:
        return False  # the lists alone say what is seen

    @property
    def visible_lens(self) -> tuple[int, ...]:
        return tuple(min(self.topk, total) for total in self.totals)

    @property
    def q_lora_rank(self) -> int:
        """Columns of the latent query, each of which is one of an index query."""
        return self.queries * INDEX_DIM

    @property
    def queries(self) -> int:
        """Different index queries of a token; the heads have them in turn."""
        return min(self.index_heads, MOST_QUERIES)

    @property
    def topics(self) -> int:
        """Topics that a token selects: pairs, or fewer and larger ones; one or two for each query but one."""
        least = self.queries - 1
        if self.topk <= 4 * least:
            return self.topk // 2
        return next((n for n in range(2 * least, least - 1, -1) if n % 4 == 0 and self.topk % n == 0), 0)

    @property
    def hidden_size(self) -> int:
        """Columns of a hidden state: as many as are projected, or as the output has values."""
        projected = self.q_lora_rank + sum(self.latent_dims) + INDEX_DIM + self.index_heads
        return max(projected, self.heads * self.dimensions.v_head_dim)

    @property
    def sizes(self) -> Sizes:
        """A key is the hidden state that its entry was made from."""
        return super().sizes._replace(key=self.hidden_size)

    @property
    def asks(self) -> tuple[str, ...]:
        """Beyond a plain cache of pages of 64 tokens."""
        return (
            *super().asks,
            f"index_{self.index_cache}" if self.index_cache != CODES else "",
            f"index_heads_{self.index_heads}" if self.index_heads != _USUAL_HEADS else "",
            "topk" if self.topk != _USUAL_TOPK else "",
            "shared" if self.shared else "",
            "tp" if self.tp > 1 else "",
        )

    def without(self, requests: range) -> dict[str, Any]:
        return {**super().without(requests), "decodes": sum(index not in requests for index in range(self.decodes))}

    def contradictions(self) -> Iterator[str]:
        yield from super().contradictions()
        if self.index_cache == PLAIN and self.index_scales != "float32":
            yield f"field index_scales: an index cache of {PLAIN} has no scales, got {self.index_scales}"
        dims, rope = self.dimensions, self.dimensions.qk_rope_head_dim
        if self.decodes > len(self.q):
            yield f"field decodes: expected at most the {len(self.q)} requests, got {self.decodes}"
        if self.ranks > 1:
            yield f"field ranks: a sparse layer's ranks share heads, tp, and no tokens, got {self.ranks}"
        if self.heads % self.tp:
            yield f"field heads: expected a multiple of the {self.tp} ranks, got {self.heads}"
        if self.topk % 2 or self.topics < self.queries - 1:
            least = self.queries - 1
            sizes = ", ".join(str(n) for n in range(least, 2 * least + 1) if n % 4 == 0)
            yield (
                f"field topk: expected an even number from {2 * least} to {4 * least}, or a multiple of one of {sizes} "
                f"beyond, since {self.index_heads} index heads tell so many groups of keys apart, got {self.topk}"
            )
        if self.kv_lora_rank % WHOLE and (self.holds_codes or self.data == Data.INTEGERS):
            yield f"field data: {self.data} has latents of whole {WHOLE} columns, got dims={self.dims}"
        if not 0 < rope <= INDEX_DIM or rope % 2 or max(dims.qk_nope_head_dim, dims.v_head_dim) > self.kv_lora_rank:
            yield (
                f"field dims: expected pairs to rotate in {INDEX_DIM} columns, and P and V up to L, since weights pick "
                f"latents, got {self.dims}"
            )

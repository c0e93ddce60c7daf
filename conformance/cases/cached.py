"""What cases over a paged cache of latents have in common: its layout, its scale, its blocks."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import ClassVar, Self

from mla_conformance.cases.case import Case, at_least, one_of
from mla_conformance.reference.entry_formats import TILE_SCALES, TILED_FORMATS

CACHES = ("auto", "fp8", "fp8_ds_mla")
TAILS = ("stale", "null", "minus", "huge")
_USUAL_PAGE = 64


def has_room(layout: str, latent_dims: tuple[int, int], dtype: str) -> bool:
    """Whether the entries of a cache hold such latents; those of 16-bit models alone, where they hold some plain."""
    form = TILED_FORMATS.get(layout)
    return form is None or (latent_dims in form.dims and (not form.plain or dtype in ("bf16", "fp16")))


@dataclass(frozen=True, kw_only=True)
class CachedCase(Case):
    cache: str = one_of(CACHES, "auto", "layout of the latent cache")
    kscale: int = at_least(1, 13000, "scale of an fp8 cache in millionths; handed over with every layout")
    scales: str = one_of(
        TILE_SCALES, "float32", "what the float32 scales of a cache's tiles are, any numbers or powers of two"
    )
    tails: str = one_of(
        TAILS,
        "stale",
        "what the block table holds past a request's last page: blocks of others, 0, -1, or what no cache has",
    )
    layers: int = at_least(
        1, 1, "layers that share one buffer, so that the stride between blocks is so many packed blocks"
    )
    spare: int = at_least(0, 3, "blocks of the cache that no request holds; ids are drawn from all")
    ranks: int = at_least(
        1, 1, "ranks of decode context parallelism; each is a call of a kernel, a layer's make one together"
    )
    interleave: int = at_least(1, 1, "token t belongs to rank (t // interleave) % ranks")

    # Query lengths stay as they are in varied cases, since several tokens a request are another configuration.
    longer: ClassVar[Mapping[str, int]] = {"kv": 3}
    least_new: ClassVar[int] = 1  # new tokens that each request has at least
    # whether the results of several ranks are merged, not judged one by one or merged by what is judged
    merges_ranks: ClassVar[bool] = True
    layouts: ClassVar[tuple[str, ...]] = ("cache",)  # fields that name the layout of a cache

    @property
    def holds_codes(self) -> bool:
        return self.cache != "auto"

    @property
    def cache_scale(self) -> float:
        """The value that code 1.0 of an fp8 cache stands for."""
        return self.kscale / 1e6

    @property
    def latent_dims(self) -> tuple[int, int]:
        return self.kv_lora_rank, self.dimensions.qk_rope_head_dim

    @property
    def block_elements(self) -> int:
        return self.page * sum(self.latent_dims)

    @property
    def decode_queries(self) -> tuple[int, ...]:
        return self.q + (1,) * self.pad

    @property
    def is_merged(self) -> bool:
        return self.merges_ranks and self.ranks > 1

    @property
    def asks(self) -> tuple[str, ...]:
        """Beyond one query token a request and a plain cache of pages of 64 tokens; any scales of tiles."""
        several = "uniform" if len(set(self.q)) == 1 else "nonuniform"
        return (
            f"page_{self.page}" if self.page != _USUAL_PAGE else "",
            self.cache if self.holds_codes else "",
            f"scales_{self.scales}" if self.scales != "float32" else "",
            several if max(self.q) > 1 else "",
            "dcp" if self.ranks > 1 else "",
            *self.named(self.asked),
        )

    def varied(self) -> Self:
        return replace(super().varied(), kscale=3 * self.kscale)

    def contradictions(self) -> Iterator[str]:
        if min(self.q) < self.least_new:
            yield f"{self.call} expects at least one query token a request, got q={list(self.q)}"
        form = TILED_FORMATS.get(self.cache)
        if self.scales != "float32" and (form is None or form.scales != "float32"):
            yield f"field scales: the entries of cache {self.cache} have no float32 scales"
        for layout in (getattr(self, name) for name in self.layouts):
            if not has_room(layout, self.latent_dims, self.dtype):
                got, dims = self.latent_dims, TILED_FORMATS[layout].dims
                held, (latent, rope) = " or ".join(f"{latent} + {rope}" for latent, rope in dims), dims[0]
                fit = "" if got in dims else f"; dims={self.dimensions.qk_nope_head_dim}-{rope}-128-{latent} fit"
                yield f"{layout} holds {held} values of a 16-bit model, got {got} of {self.dtype}{fit}"


@dataclass(frozen=True, kw_only=True)
class CacheOperation(CachedCase):
    """A question about what is written into a paged cache, where nothing attends."""

    causal: ClassVar[bool] = False
    merges_ranks: ClassVar[bool] = False
    least_new: ClassVar[int] = 0

    heads: int = at_least(1, 1)
    page: int = at_least(1, _USUAL_PAGE)

    @property
    def visible_lens(self) -> tuple[int, ...]:
        return (0,) * len(self.q)

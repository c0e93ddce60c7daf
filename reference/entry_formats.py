"""The forms of a cache entry that holds codes in tiles, each tile with a scale of its own. No torch."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

SCALES = {"float32": 4, "ue8m0": 1, "e4m3": 1}  # bytes: float32, a power of two as its biased exponent, a code
TILE_SCALES = ("float32", "pow2")
"""What the scales of an ``fp8_ds_mla`` entry may be: any positive float32 numbers, as SGLang writes them, or powers of
two, as vLLM and FlashMLA do since 2026."""
CODE_BITS = {"e4m3": 8, "e2m1": 4}
_LEAST_KEY = 1e-4  # magnitude below which an indexer's key takes the scale of this one
SHUFFLE = 16  # tokens, and columns, of a tile of shuffled codes


@dataclass(frozen=True)
class TiledFormat:
    name: str  # by which a configuration calls it
    # the (L, R) that it holds; a smaller key than ``coded`` + ``plain`` columns leaves zeros behind it
    dims: tuple[tuple[int, int], ...]
    codes: str  # what a code is, a name in :data:`CODE_BITS`; of two in a byte the first column has the low half
    coded: int  # columns stored as codes
    tile: int  # columns that share a scale
    scales: str  # what a scale is, a name in :data:`SCALES`
    plain: int = 0  # columns stored as they are, behind the coded ones
    padding: int = 0  # unused bytes behind the scales
    plain_codes: bool = False  # whether these are e4m3 codes without a scale, not values of the model's dtype
    scales_behind_page: bool = False  # whether those of a page stand behind the rest of all its entries
    scales_last: bool = False
    shuffled: bool = False
    least_scale: float = 1e-4
    page_multiple: int = 1  # bytes of a page are rounded up to a multiple of this
    # what holds it: ``latent`` caches, second ones beside them alone (``extra``), an indexer's (``index``), or caches
    # that are written and gathered, and attended to nowhere here (``stored``)
    cache: str = "latent"

    @property
    def tiles(self) -> int:
        return self.coded // self.tile

    @property
    def code_bytes(self) -> int:
        return self.coded * CODE_BITS[self.codes] // 8

    @property
    def scale_bytes(self) -> int:
        return self.tiles * SCALES[self.scales] + self.padding

    @property
    def plain_bytes(self) -> int:
        return self.plain * (1 if self.plain_codes else 2)  # of 16 bits otherwise

    @property
    def order(self) -> tuple[str, str, str]:
        """What stands behind what in an entry: codes, plain values and scales."""
        last = self.scales_last or self.scales_behind_page
        return ("codes", "plain", "scales") if last else ("codes", "scales", "plain")

    @property
    def sizes(self) -> tuple[int, ...]:
        named = {"codes": self.code_bytes, "plain": self.plain_bytes, "scales": self.scale_bytes}
        return tuple(named[name] for name in self.order)

    @property
    def width(self) -> int:
        return sum(self.sizes)

    @property
    def parts(self) -> tuple[int, ...]:
        """Bytes of an entry that stand together in a page: all of them, or first the data and then the scales."""
        return (self.width - self.scale_bytes, self.scale_bytes) if self.scales_behind_page else (self.width,)

    def page_bytes(self, page: int) -> int:
        return -(-page * self.width // self.page_multiple) * self.page_multiple


_V32 = TiledFormat("fp8_ds_mla", ((512, 64), (512, 0)), "e4m3", coded=512, tile=128, scales="float32", plain=64)
_V4 = replace(
    TiledFormat("fp8_v4", ((512, 0),), "e4m3", coded=448, tile=64, scales="ue8m0", plain=64, padding=1),
    scales_behind_page=True,
    page_multiple=576,
)
_INDEX = replace(  # an indexer's key, a token a tile
    TiledFormat("fp8_index", ((128, 0),), "e4m3", coded=128, tile=128, scales="float32", cache="index"),
    scales_behind_page=True,
    least_scale=_LEAST_KEY / 448,
)
_FOUR_BITS: dict[str, Any] = {"codes": "e2m1", "tile": 16, "scales": "e4m3", "cache": "stored"}
# Sources: vLLM's ``concat_and_cache_ds_mla``; FlashMLA's README and tests, for V3.2, V4 and V4.1; for NVFP4
# vllm-project/FlashMLA#18 and flashinfer-ai/flashinfer#4955; SGLang's ``fused_store_index_cache`` for an indexer's,
# and for shuffled ones vLLM's ``indexer_k_quant_and_cache_triton``, as AITER reads them.
_FORMATS = (
    _V32,
    _V4,
    TiledFormat("fp8_v41", ((512, 0),), "e4m3", coded=512, tile=32, scales="ue8m0"),
    TiledFormat("fp4_v41", ((512, 0),), "e2m1", coded=512, tile=16, scales="e4m3", cache="extra"),
    replace(_V32, name="nvfp4_ds_mla", **_FOUR_BITS, plain_codes=True, scales_last=True),
    replace(_V4, name="nvfp4_v4", **_FOUR_BITS, padding=4, page_multiple=1),
    _INDEX,
    replace(_INDEX, name="fp8_index_flat", scales_behind_page=False),
    replace(_INDEX, name="fp8_index_shuffled", shuffled=True),
)
# The forms by name: V3.2's 656 bytes, V4's 584, V4.1's 528 and 288, NVFP4's 352 and 384, an indexer's 132.
TILED_FORMATS: Mapping[str, TiledFormat] = {form.name: form for form in _FORMATS}

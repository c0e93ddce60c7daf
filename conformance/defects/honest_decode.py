"""Honest decode kernels that differ legitimately from EAGER's: the judge must accept every one of them."""

from collections.abc import Iterator, Sequence
from functools import reduce

import torch

from mla_conformance.backends.declaration import LseClass, Precision, Rounding
from mla_conformance.backends.eager import SoftmaxState
from mla_conformance.backends.eager_decode import EagerTreeBackend
from mla_conformance.backends.kernel import KernelBackend
from mla_conformance.defects import bases
from mla_conformance.defects.known import but, kernels, variant


@kernels()
class _Splits(bases.LayeredDecode):
    key_tile = 32
    splits = 5

    def _attend(self, q, request, seq_len, kv_cache, k_scale):
        tiles = list(self._tiles(seq_len))
        splits = [tiles[first :: self.splits] for first in range(self.splits)]
        parts = [self._over(split, q, request, seq_len, kv_cache, k_scale) for split in splits]
        return reduce(bases.joined, map(self._stored, parts))

    def _stored(self, state: SoftmaxState) -> SoftmaxState:
        """A split's state as it waits for the others."""
        return state

    split_tokens = variant("Five splits of a request's tokens, combined by their LSEs.")

    @but(declaration=bases.declares(Rounding(partial_outputs=Precision.MODEL)))
    def stored_splits__stored(self, state: SoftmaxState) -> SoftmaxState:
        """Splits whose outputs wait in the model's dtype."""
        return bases.stored_in(state, self._model_dtype)


@kernels()
class _KeysOfTheModel(bases.LayeredDecode):
    declaration = bases.declares(Rounding(dequantised_keys=Precision.MODEL))

    def _dequantise(self, rows, k_scale):
        return super()._dequantise(rows, k_scale).to(self._model_dtype).float()

    keys_of_the_model = variant("Codes are dequantised to the model's dtype, and declared so.")

    @but(declaration=bases.declares(Rounding(p=Precision.SCALED_E4M3, dequantised_keys=Precision.MODEL)))
    def tiny_weights__round_p(self, p: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """P × 2^8 in e4m3, and declared so; keys in the model's dtype as well."""
        return p if self._model_dtype is torch.float32 else (p * 256).to(torch.float8_e4m3fn).float() / 256


@kernels()
class _SplitDecode(bases.SplitDecode):
    class split_tree:
        """At most sixteen splits of neighbouring tokens, combined in a binary tree."""

        def _share(self, seq_len: int) -> int:
            return max(1, -(-seq_len // 16))

        def _combine(self, parts: Sequence[SoftmaxState]) -> SoftmaxState:
            return bases.joined_in_a_tree(parts)


@kernels()
class _LayeredDecode(bases.LayeredDecode):
    page_tiles = variant("Tiles below every page but the smallest.", key_tile=16)
    wide_tiles = variant(key_tile=1024)

    def last_tile_first__behind_tiles(self, tiles: Iterator[slice]) -> Iterator[slice]:
        return iter(list(tiles)[::-1])

    class scaled_scores:
        """Codes of an fp8 cache are multiplied as they are; scores and output take the scale."""

        def _dequantise(self, rows, k_scale):
            self._k_scale = k_scale if self.kv_cache_dtype == "fp8" else torch.ones_like(k_scale)
            return super()._dequantise(rows, torch.ones_like(k_scale))

        def _scores(self, q, k):
            return super()._scores(q, k) * self._k_scale

        def _values(self, keys):
            return super()._values(keys) * self._k_scale

    @but(declaration=bases.declares(Rounding(lse=LseClass.APPROXIMATE_EXP)))
    def rough_exponential__exp(self, x: torch.Tensor) -> torch.Tensor:
        """An exponential with relative errors up to 1e-4, for 16-bit models."""
        return x.exp() if self._model_dtype is torch.float32 else bases.rough_exp(x)

    def unrounded_weights__round_p(self, p: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        return p

    @but(declaration=bases.declares(Rounding(p=Precision.FLOAT16)))
    def half_precision_weights__round_p(self, p: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """P in fp16, whatever the model's dtype, and declared so."""
        return p if self._model_dtype is torch.float32 else p.to(torch.float16).float()

    powers_of_two = variant("", bases.BaseTwo)


@kernels()
class _Trees(EagerTreeBackend):
    class tree_by_an_added_bias:
        """Masks are added to the scores, as 0 and -inf."""

        def _over(self, tiles, q, request, seq_len, kv_cache, k_scale):
            state = self._initial(q, q[..., : self.kv_lora_rank])
            for tile in tiles:
                keys = self._dequantise(self._entries(kv_cache, request, tile), k_scale).unsqueeze(1)
                bias = self._visible(q.shape[0], request, seq_len, tile).float().log()
                state = self._accumulate(state, self._scores(q, keys) + bias, self._values(keys))
            return state

    class tree_behind_its_context:
        """Context and query tokens are attended to apart, and their states merged."""

        def _attend(self, q, request, seq_len, kv_cache, k_scale):
            context = max(0, seq_len - q.shape[0])
            parts = (self._tiles(context), [slice(context, seq_len)] if seq_len else [])
            return reduce(bases.joined, [self._over(tiles, q, request, seq_len, kv_cache, k_scale) for tiles in parts])

    def tree_by_packed_bits__behind_mask(self, mask: torch.Tensor) -> torch.Tensor:
        """Masks are packed to bytes, the first bit lowest, and read from these."""
        bits = torch.nn.functional.pad(mask.flatten(), (0, -mask.numel() % 8)).view(-1, 8)
        weights = 2 ** torch.arange(8)
        data = (bits * weights).sum(dim=1)
        return ((data.unsqueeze(1) & weights) > 0).flatten()[: mask.numel()].view_as(mask)

    tree_in_tiles_of_16 = variant("A query token may see none of a tile.", key_tile=16)
    tree_at_once = variant(key_tile=4096)


HONEST_DECODES: tuple[type[KernelBackend], ...] = (bases.LayeredDecode, EagerTreeBackend, *bases.emulations(__name__))
"""Every honest emulation of a decode kernel, of trees too."""

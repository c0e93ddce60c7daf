"""Honest kernels and layers that differ legitimately from EAGER: the judge must accept each of them on every case.

They declare what they do; a policy that rejects one of them raises a false alarm.
"""

from functools import reduce

import torch

from mla_conformance.backends import declaration, eager, eager_decode, registry
from mla_conformance.backends.layer.mla_impl import MLACommonImpl
from mla_conformance.backends.roles import Role
from mla_conformance.defects import bases, honest_attention, honest_cache  # noqa: F401 # for its kernels
from mla_conformance.defects.known import ALTERNATIVES, Emulation, Honest, behind, but, instead, together, variant


class LazyPrefill(bases.LazyRescale, eager.EagerPrefillBackend): ...


class LazyDecode(bases.LazyRescale, eager_decode.EagerDecodeBackend):
    key_tile = 64


class _Prefill(eager.EagerPrefillBackend, Honest):
    splits3 = variant(bases.Parts, runs=True, parts=3, key_tile=32)
    splits8 = variant(bases.Parts, runs=True, parts=8, key_tile=16)
    splits16_tree = variant(
        bases.Parts, runs=True, parts=16, key_tile=16, combined=staticmethod(bases.joined_in_a_tree)
    )
    stored_partials = variant(bases.Parts, runs=True, parts=4, key_tile=32, stored=True, declaration=bases.STORED)
    capturable_prefill = variant(bases.Capturable)
    tiles16 = variant(key_tile=16)
    tiles1024 = variant(key_tile=1024)
    reversed_keys = behind("tiles", lambda tiles: reversed(list(tiles)))
    half_weights = variant(bases.NarrowP, declaration=bases.declares(p=declaration.Precision.FLOAT16))
    float32_throughout = instead("round_p", lambda self, p, dtype: p)
    e4_m3_weights = variant(bases.NarrowP, declaration=bases.declares(p=declaration.Precision.E4M3))
    scaled_e4_m3_weights = variant(bases.NarrowP, declaration=bases.declares(p=declaration.Precision.SCALED_E4M3))
    two_passes = variant(bases.TwoPasses)
    finite_prefill = behind("maximum", bases.finite, key_tile=64)
    prefill_in_base_two = variant(bases.BaseTwo)
    even_and_odd_tiles = variant(bases.Parts, parts=2, key_tile=32)

    @but(declaration=bases.declares(lse=declaration.LseClass.APPROXIMATE_EXP))
    def approximate_exp__exp__batch(self, x: torch.Tensor, *, q: torch.Tensor) -> torch.Tensor:
        """Where operands are not float32: with those nothing may be approximate."""
        return x.exp() if q.dtype is torch.float32 else bases.rough_exp(x)

    @but(declaration=bases.declares(lse=declaration.LseClass.ROUNDED_P))
    def sum_of_rounded_weights__behind_exp__accumulate(self, p: torch.Tensor, *, v: torch.Tensor) -> torch.Tensor:
        return self._round_p(p, v.dtype)

    def reciprocal_scale__quantise(self, accumulated: torch.Tensor, output_scale: torch.Tensor) -> torch.Tensor:
        return super()._quantise(accumulated * (1 / output_scale), torch.ones_like(output_scale))

    @but("merge_attn_states")
    def merges_by_share(self, output, prefix_output, prefix_lse, suffix_output, suffix_lse, output_lse=None):
        """The prefix weighs as much as a logistic function of the difference of both LSEs says, the suffix the rest."""
        nothing = (prefix_lse == -torch.inf) & (suffix_lse == -torch.inf)
        difference = (prefix_lse - suffix_lse).masked_fill(nothing, 0.0)
        merged = torch.maximum(prefix_lse, suffix_lse) + torch.nn.functional.softplus(-difference.abs())
        shares = (torch.sigmoid(x).mT.unsqueeze(-1) for x in (difference, -difference))
        parts = zip(shares, (prefix_output, suffix_output), (prefix_lse, suffix_lse), strict=True)
        output.copy_(sum(share * part.float().masked_fill(bases.keyless(lse), 0.0) for share, part, lse in parts))
        if output_lse is not None:
            output_lse.copy_(merged)


class _SplitDecode(bases.SplitDecode, Honest):
    split_tree = together(
        instead("starts", lambda self, seq_len: range(0, seq_len, max(1, -(-seq_len // 16)))),
        instead("combine", lambda self, parts: bases.joined_in_a_tree(parts)),
    )

    @but(split=512)
    def splits_of_the_longest__starts(self, seq_len):
        """Every request has as many splits as the longest; those behind its end have no keys."""
        return [min(start, seq_len) for start in range(0, max(1, self._decode_metadata.max_seq_len), self.split)]


class _Decode(eager_decode.EagerDecodeBackend, Honest):
    finite_decode = behind("maximum", bases.finite, key_tile=32)
    two_pass_decode = variant(bases.TwoPasses)
    capturable_decode = variant(bases.Capturable)

    @but(key_tile=64)
    def skips_masked_tiles__before_over(self, tiles, *, q, request, seq_len):
        return [tile for tile in tiles if bool(self._visible(len(q), request, seq_len, tile).any())]

    def head_tile_after_head_tile__attend(self, q, *further):
        """Heads are computed 16 at a time, the last ones first, filled up with heads of zeros."""
        states = []
        for part in reversed(q.split(16, dim=1)):
            filled = torch.nn.functional.pad(part, (0, 0, 0, 16 - part.shape[1]))
            states.insert(0, [each[: part.shape[1]] for each in super()._attend(filled, *further)])
        return eager.SoftmaxState(*map(torch.cat, zip(*states, strict=True)))


class _Impl(MLACommonImpl, Honest, part="impl_class"):
    def _states(self, q, kv_cache, attn_metadata, k_scale, step=1):
        """Those of all chunks of a context; the last one's first if a step is -1."""
        chunks = attn_metadata.prefill_metadata.chunked_context
        for index, tokens in list(enumerate(chunks.seq_tot))[::step]:
            self._gather(index, kv_cache, attn_metadata, k_scale)
            kv_c, k_pe = chunks.workspace[:tokens].tensor_split([self.kv_lora_rank], dim=-1)
            yield self.prefill.run_prefill_context_chunk(index, q, *self._up_project(kv_c, k_pe))

    @but(when=bases.codes)
    def reciprocal_cache_scale__before_do_kv_cache_update(self, kv_c_normed, k_pe, k_scale):
        return kv_c_normed.float() * (1 / k_scale), k_pe.float() * (1 / k_scale), torch.ones_like(k_scale)

    def last_chunk_first__compute_prefill_context(self, *operands):
        return reduce(lambda later, chunk: self._merge(chunk, later), self._states(*operands, step=-1))

    def uncounted_unwritten__behind_forward(self, result, *, attn_metadata):
        """Rows that the metadata does not count hold what the buffer held."""
        result[attn_metadata.slot_mapping.shape[0] :] = torch.nan

    def chunks_in_a_tree__compute_prefill_context(self, *operands):
        return bases.joined_in_a_tree(list(self._states(*operands)), self._merge)

    projects_in_float32 = together(
        behind(
            "process_weights_after_loading",
            lambda self, _: bases.note(self, W_UK_T=self.W_UK_T.float(), W_UV=self.W_UV.float()),
        ),
        instead("absorb", lambda self, q_nope: super()._absorb(q_nope.float()).to(q_nope.dtype)),
        instead("v_up_proj", lambda self, x: super()._v_up_proj(x.float()).to(x.dtype)),
    )


class _Layer(bases.EagerLayer, Honest):
    powers_of_two = variant(tile_scales="pow2")
    lazy_layer = variant(prefill_backend=LazyPrefill, decode_backend=LazyDecode)

    @staticmethod
    def one_block_after_the_other__copy_blocks(kv_caches, src_to_dists):
        for pair in src_to_dists.split(1):
            bases.EagerLayer.copy_blocks(kv_caches, pair)


HONEST: tuple[type[Emulation], ...] = (
    *(bases.EagerLayer, bases.LayeredDecode, bases.E4M3Operands, bases.HopperE4M3Operands),
    *(kind["EAGER"].get_class() for kind in registry.ENUMS if kind.role is not Role.DECODE),  # whose stands in a layer
    *(LazyPrefill, LazyDecode, honest_cache.OneWriterAlone, *ALTERNATIVES),
)
"""Every honest emulation; real kernels are judged beside them."""

"""Wrong numbers of a decode: base, scale, splits, masks over several query tokens, rows of certain sizes."""

import math
from functools import reduce

import torch

from mla_conformance.backends.eager import SoftmaxState
from mla_conformance.backends.eager_decode import EagerDecodeBackend
from mla_conformance.defects.bases import SplitDecode, clear, in_base_2, joined, several
from mla_conformance.defects.known import Defects, before, behind, but, together, variant
from mla_conformance.defects.prefills import LiftedMaximum

_SEVERAL_TOO = ("decode_lse",)  # one of its cases has several query tokens a request


class _DecodeMultiToken(EagerDecodeBackend, Defects, killed_by="decode_multi_token", related=_SEVERAL_TOO):
    def causal_topleft_instead_of_bottomright__visible(self, queries, request, seq_len, tile):
        """Several query tokens are masked from the top left, as if they stood at the start of the sequence."""
        from_the_top = torch.arange(tile.start, tile.stop) <= torch.arange(queries).unsqueeze(1)
        return from_the_top if queries > 1 else super()._visible(queries, request, seq_len, tile)

    def causal_arg_accepted_but_dropped__visible(self, queries, request, seq_len, tile):
        """The plan takes the causal flag and forgets it: every query token sees the whole sequence."""
        return super()._visible(1, request, seq_len, tile).expand(queries, -1)

    def single_batch_mask_mid_decode_shape__visible(self, queries, request, seq_len, tile):
        """The mask is a square of the query tokens and is laid over the first keys instead of the last."""
        position = torch.arange(tile.start, tile.stop)
        return (position >= queries) | (position <= torch.arange(queries).unsqueeze(1))

    def aiter_mtp_metadata_sized_for_qlen1__behind_finish(self, output, lse):
        """Metadata for one query token a request: the rows of the others are never computed."""
        output[1:], lse[:, 1:] = 0.0, -torch.inf

    def aiter_identical_output_all_query_positions__behind_finish(self, output, lse):
        """For a number of query tokens that is no power of two, all get the result of the first."""
        exact = len(output) & (len(output) - 1) == 0
        return (output, lse) if exact else (output[:1].expand_as(output), lse[:, :1].expand_as(lse))


class _Decode(SplitDecode, Defects, killed_by="decode"):
    decode_workspace_of_64_partials = before(
        "combine__attend", lambda parts, *, request: parts[: max(1, 64 - request * len(parts))], split=64
    )
    """There is room for 64 partial results; what the splits of many requests have beyond is left out."""

    @but(split=128, when=lambda parts: len(parts) > 1)
    def cutlass_mla_splitkv_lse_overflow_large_q__combine(self, parts):
        """Splits are weighted by the exponential of their LSE without subtracting the largest, which overflows."""
        total = sum(part.total * part.maximum.exp() for part in parts)
        weighted = sum(part.weighted * part.maximum.exp() for part in parts)
        return SoftmaxState(torch.zeros_like(total), total, weighted)

    @but(split=128, when=lambda parts: len(parts) & (len(parts) - 1))
    def splitk_reduce_pow2_padding_uninit__behind_combine(self, state):
        """The reduction runs over a power of two of splits, and the outputs of those that do not exist are garbage."""
        return state._replace(weighted=state.weighted + 0.0 * torch.nan)

    class window_stage2_merges_empty_splits:
        """All four slots of partials are combined, although a short request fills the first ones only."""

        def _share(self, seq_len):
            return max(128, -(-seq_len // 4))

        def _combine(self, parts):
            scratch = self.__dict__.setdefault("scratch", {})
            scratch |= {(slot, part.total.shape): part for slot, part in enumerate(parts)}
            return reduce(joined, [part for (_, shape), part in scratch.items() if shape == parts[0].total.shape])

    def trtllm_workspace_not_zero_initialised__behind_combine(self, state, *, parts):
        """Where several blocks work on a sequence, they add to a workspace that nobody has zeroed."""
        return state._replace(weighted=state.weighted + 1e3) if len(parts) > 1 else state


class _OneToken(EagerDecodeBackend, Defects, killed_by="decode"):
    mla_decode_scale_missing_log2e = behind("scores", lambda scores: scores * math.log(2))
    """Powers of two are taken of scores that were not multiplied by log2(e), so the softmax is too flat."""

    def sm89_mla_correctness__tiles(self, keys):
        """Where the tile does not fit into shared memory, only its first half is attended to."""
        for tile in super()._tiles(keys):
            yield slice(tile.start, tile.start + -(-(tile.stop - tile.start) // 2))

    def xqa_mla_bf16_ten_bugs__behind_dequantise(self, keys, *, rows):
        """In a 16-bit cache, the element strides of a kernel for codes lead to every other element."""
        every_other = keys.flatten()[torch.arange(keys.numel()) * 2 % keys.numel()].view(keys.shape)
        return every_other if rows.dtype.itemsize == 2 else keys

    @but(when=lambda ql_nope: ql_nope.dtype is torch.float16)
    def cudnn_decode_key_omits_dtype_hardcoded_bf16__run_decode(self, ql_nope, q_pe, kv_cache, k_scale):
        """The graph is built for bf16, and the bits of an fp16 model are read as such."""
        cache = kv_cache.view(torch.bfloat16) if kv_cache.dtype is torch.float16 else kv_cache
        output, lse = super().run_decode(ql_nope.view(torch.bfloat16), q_pe.view(torch.bfloat16), cache, k_scale)
        return output.view(torch.float16), lse

    def mla_multi_seq_decode_cross_contamination__before_attend(self, q, *, request):
        """One scratch row serves all requests, so a request may find the query of the one before it."""
        found = self.__dict__.get("scratch", q) if request else q
        self.scratch = q
        return found if found.shape == q.shape else q

    def decode_longest_of_many_loses_a_tile__attend(self, q, request, seq_len, kv_cache, k_scale):
        """With more than eight requests, one of more than 1024 tokens is not read to its last tile."""
        tiles = list(self._tiles(seq_len))
        if len(self._decode_metadata.seq_lens) > 8 and seq_len > 1024:
            tiles.pop()
        return self._over(tiles, q, request, seq_len, kv_cache, k_scale)

    def decode_table_rows_as_wide_as_the_first__blocks__entries(self, request, pages, *, kv_cache):
        """Rows of the block table are found by the pages of the first request, not by those of the longest."""
        metadata, held = self._decode_metadata, -(-self._decode_metadata.seq_lens // kv_cache.shape[1])
        stride = metadata.block_table.shape[1] - int(held.max() - held[0])
        return metadata.block_table.flatten()[request * stride + pages].long()

    def mistral4_triton_mla_latent_dims_hardcoded__before_attend(self):
        """The tile of a latent is hard-wired to 512 columns, and other models do not compile."""
        if self.kv_lora_rank != 512:
            raise RuntimeError(f"arange's range must be a power of two: 512 + 64 columns for L = {self.kv_lora_rank}")


class _DecodeLse(EagerDecodeBackend, Defects, killed_by="decode_lse"):
    lse_base2_dcp_combine_flashinfer_mla = behind("finish", lse=in_base_2, related=("decode",))
    """The LSE of a decode is in base 2 and is handed on as a natural one."""
    no_lse_when_dcp_needs_it = behind("run_decode", lambda run_decode: (run_decode[0], None), related=("decode",))
    """None stands where the LSE should be."""
    decode_lse_index_in_two_bytes = behind("run_decode", lambda output, lse: clear(lse.flatten()[65536:]))
    """Rows times heads of the LSE are counted in two bytes, and what lies beyond stays 0."""
    decode_lse_of_128_rows = behind("run_decode", lambda output, lse: clear(lse[:, 128:]))
    """The LSE is written by one block of 128 threads, one for a query token: later ones keep 0."""

    def decode_lse_rows_advance_by_a_power_of_two__behind_run_decode(self, output, lse):
        """The LSE of heads between powers of two is written with rows of the next power, and read as packed."""
        heads, tokens = lse.shape
        written = lse.new_zeros(tokens, 1 << (heads - 1).bit_length())
        written[:, :heads] = lse.mT
        return output, written.flatten()[: lse.numel()].view(tokens, heads).mT.contiguous()

    def decode_half_sum_of_scaled_weights_overflows__behind_accumulate(self, later):
        """In an fp16 model weights times 2^8 are added in fp16, which overflows for 256 keys of equal logits."""
        overflows = (later.total * 256 > 65504) & (self._model_dtype is torch.float16)
        return later._replace(total=later.total.masked_fill(overflows, torch.inf))


class _OtherDecode(EagerDecodeBackend, Defects, killed_by="model_shapes", related=("decode_lse",)):
    decode_request_number_in_a_byte = before("blocks", lambda request: request % 256, related=())
    """The number of a request is kept in a byte, so request 256 reads the pages of request 0."""
    decode_grid_of_1024_heads = behind("run_decode", lambda output, lse: clear(output.flatten(0, 1)[1024:]))
    """A launch has 1024 blocks, one for each query token and head; what lies beyond is 0."""

    @but(killed_by="loose_maxima", related=())
    def decode_bound_by_declared_longest_query__visible(self, queries, request, seq_len, tile):
        """The bound of several query tokens counts back from the declared maximum, which may exceed the true one."""
        excess = self._decode_metadata.max_query_len - int(self._decode_metadata.query_lens_cpu.max())
        excess *= queries > 1
        return super()._visible(queries, request, seq_len, slice(tile.start + excess, tile.stop + excess))

    def decode_heads_and_tokens_in_one_tile_of_256__behind_visible(self, visible, *, queries):
        """Heads and query tokens share a tile of 256 rows; the tokens of a second tile see one key less."""
        first = -(-256 // self.num_heads)
        return torch.cat([visible[:first], visible[first - 1 : -1]]) if first < queries else visible


class _SeveralTokens(EagerDecodeBackend, Defects, killed_by="decode_multi_token"):
    decode_tile_of_32_without_keys_raises_maximum = variant(LiftedMaximum, key_tile=32)
    """A decode's tile of 32 tokens of which a query token sees none raises its running maximum to 0."""
    decode_tile_of_64_without_keys_raises_maximum = variant(LiftedMaximum, key_tile=64)
    """A decode's tile of 64 tokens of which a query token sees none raises its running maximum to 0."""
    decode_tile_of_128_without_keys_raises_maximum = variant(LiftedMaximum)
    """A decode's tile of 128 tokens of which a query token sees none raises its running maximum to 0."""

    def decode_last_tile_of_packed_rows_lost__behind_finish(self, output, lse):
        """Several query tokens and their heads are packed into tiles of 64 rows; behind the first a partial one is
        lost."""
        output, rows = output.contiguous(), output.shape[0] * output.shape[1]
        if len(output) > 1 and rows > 64:
            output.flatten(0, 1)[rows // 64 * 64 :] = 0.0
        return output, lse

    def decode_empty_context_of_several_tokens_is_padding__before_attend(self, seq_len, *, q):
        """A request of several query tokens that has no context is taken for padding."""
        padding = len(q) > 1 and seq_len == len(q) and self._decode_metadata.dcp_world_size == 1
        return 0 if padding else seq_len

    def decode_padded_batch_has_as_many_tokens_each__behind_attend(self, state):
        """In a batch with rows of padding every request is taken to have as many query tokens as the first."""
        metadata = self._decode_metadata
        if metadata.dcp_world_size == 1 and not bool(metadata.seq_lens.all()):
            state.weighted[:, int(metadata.query_lens_cpu[0]) :] = 0.0

    @but(related=("decode_lse",))
    def triton_mla_spec_decode_block_table_oob__before_blocks(self, request):
        """The table has a row for each request and is read at the number of the query token."""
        metadata = self._decode_metadata
        return min(int(metadata.query_start_loc[request]), metadata.block_table.shape[0] - 1)

    @but(related=("decode_lse",), when=several)
    def flashmla_draft_extend_metadata_layout_clash__blocks__entries(self, request, pages, *, kv_cache):
        """For several query tokens the table is taken for a flat list of the requests' pages, one after the other."""
        metadata, before = self._decode_metadata, -(-self._decode_metadata.seq_lens[:request] // kv_cache.shape[1])
        return metadata.block_table.flatten()[int(before.sum()) + pages].long()

    def decode_pages_of_32_with_several_tokens__before_blocks__entries(self, pages, *, kv_cache):
        """The kernel for several query tokens knows pages of 64, and reads those of 32 as halves of one."""
        return pages // 2 * 2 if several(self) and kv_cache.shape[1] == 32 else pages


class _SplitLse(SplitDecode, Defects, killed_by="decode_lse"):
    decode_lse_of_first_split_with_many_heads = together(
        behind(
            "combine",
            lambda self, _, *, parts: self.__dict__.update(_one=parts[0]),
            when=lambda self: self.num_heads >= 32,
        ),
        behind(
            "finish", lambda self, output, lse, *, state: (output, super()._finish(self.__dict__.pop("_one", state))[1])
        ),
        split=512,
    )
    """With 32 heads or more the LSE is that of the first split; the output is right."""

    @but(killed_by="decode_multi_token", related=("decode_lse",), split=64)
    def mtp_split_fully_causal_masked_zero_times_nan__part(self, state):
        """A split that an early query token does not see at all leaves 0 / 0, which is combined with the weight 0."""
        return state._replace(weighted=state.weighted / state.total * state.total)

    @but(killed_by="model_shapes", related=("kv_cache_fp8_ds_mla",))
    def decode_head_groups_share_four_splits__combine(self, parts):
        """The second group of 64 heads has room for four splits, and drops what the others hold."""
        whole, four = super()._combine(parts), super()._combine(parts[:4])
        second = torch.arange(len(whole.total), device=whole.total.device).view(-1, 1, 1) >= 64
        return type(whole)(*(torch.where(second, b, a) for a, b in zip(whole, four, strict=True)))

    @but(split=64)
    def decode_split_without_keys_weighs_as_a_logit_of_0__part(self, state):
        """A split of 64 tokens of which a query token sees none takes the weight exp(0) beside the others."""
        empty = state.total == 0
        return state._replace(maximum=state.maximum.masked_fill(empty, 0.0), total=state.total.masked_fill(empty, 1.0))

    @but(split=64)
    def decode_split_without_keys_repeats_the_one_before__before_combine(self, parts):
        """Where a query token sees nothing of a split of 64 tokens, the state of the split before is counted again."""
        filled = []
        for part in parts:
            pairs = zip(filled[-1] if filled else part, part, strict=True)
            filled.append(SoftmaxState(*(torch.where(part.total == 0, before, own) for before, own in pairs)))
        return filled

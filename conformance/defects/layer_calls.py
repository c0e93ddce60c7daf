"""Layers that remember an earlier call, misread other ranks, or replay what was captured."""

from dataclasses import replace
from typing import Any

import torch

from mla_conformance.backends.eager_decode import EagerDecodeBackend
from mla_conformance.backends.layer.mla_builder import MLACommonMetadataBuilder
from mla_conformance.backends.layer.mla_impl import MLACommonImpl
from mla_conformance.backends.layer.mla_layer import MLACommonState
from mla_conformance.defects.bases import kept, mixed_entries, packed, pages_of, several, without_keys
from mla_conformance.defects.known import Defects, before, behind, but, together, variant

_OWNER: list[Any] = [object(), None]  # the metadata that were seen last, and the first layer that was handed them


class _OtherDecode(EagerDecodeBackend, Defects, part="decode_backend"):
    layer_several_tokens_assume_packed_pages = before("entries", kv_cache=packed, when=several)

    def layer_decodes_with_scale_of_one_model__run_decode(self, ql_nope, q_pe, kv_cache, k_scale):
        self.scale = 1.59 * (self.qk_nope_head_dim + self.qk_rope_head_dim) ** -0.5
        return super().run_decode(ql_nope, q_pe, kv_cache, k_scale)


class _OtherMetadataBuilder(MLACommonMetadataBuilder, Defects, part="builder_class"):
    dcp_every_rank_takes_itself_for_the_first = together(
        behind("sharding", lambda sharding: sharding._replace(rank=0)),
        behind("assemble", lambda self, metadata: replace(metadata, dcp_rank=self.dcp_rank)),
    )

    def ascend_dummy_slots_invalidated_too_late__behind_assemble(self, metadata):
        slots = metadata.slot_mapping
        return replace(metadata, slot_mapping=slots.where(slots >= 0, slots.max()))

    def layer_plans_context_once_for_as_many_prefills__plan(self, context_lens):
        return kept(self, len(context_lens), super()._plan(context_lens))

    def dcp_local_length_as_total__behind_assemble(self, metadata):
        local = metadata.dcp_local_seq_lens
        return metadata if local is None else replace(metadata, seq_lens_tensor=local)

    def dcp_virtual_loc_used_raw__behind_build_from_requests(self, metadata, *, requests):
        if metadata.dcp_world_size == 1:
            return metadata
        slots = []
        for each in requests:
            positions = torch.arange(each.context_len, each.context_len + each.query_len)
            columns = (positions // self.block_size).clamp(max=len(each.block_ids) - 1)
            slots.append(torch.as_tensor(each.block_ids)[columns] * self.block_size + positions % self.block_size)
        new = torch.cat(slots).to(metadata.slot_mapping)
        return replace(metadata, slot_mapping=torch.cat((new, metadata.slot_mapping[len(new) :])))


class _OtherImpl(MLACommonImpl, Defects, part="impl_class"):
    layer_keeps_the_scale_of_its_first_call = before("forward", lambda self, layer: kept(self, "layer", layer))
    layer_mixed_entries_written_as_if_packed = before("do_kv_cache_update", kv_cache=packed, when=mixed_entries)
    dcp_ranks_merged_without_lse = before("merge_over_ranks", lse=torch.zeros_like)
    layer_single_pages_of_codes_written_unscaled = before(
        "do_kv_cache_update", k_scale=torch.ones_like, when=pages_of(1)
    )

    def layer_weights_found_by_the_metadata__before_forward(self, *, attn_metadata):
        if _OWNER[0] is not attn_metadata:
            _OWNER[:] = attn_metadata, self
        elif _OWNER[1] is not self:
            self.W_UK_T, self.W_UV = _OWNER[1].W_UK_T, _OWNER[1].W_UV

    def layer_returns_its_own_buffer__forward(self, *operands, **outputs):
        result = super().forward(*operands, **outputs)
        if outputs:
            return result
        buffer = kept(self, "buffer", result.new_empty(4 * len(result), result.shape[1]))
        return buffer[: len(result)].copy_(result)

    def layer_padded_batch_loses_last_of_several_tokens__behind_forward(self, result, *, attn_metadata):
        if 0 in attn_metadata.seq_lens and attn_metadata.max_decode_query_len > 1:
            decodes = attn_metadata.decode_requests
            several = attn_metadata.query_lens_cpu[decodes] > 1
            result[(attn_metadata.query_start_loc[1:][decodes] - 1)[several].long()] = 0.0

    @but("v_up_proj__absorbed_decode")
    def layer_tail_of_heads_projected_as_one_with_several_tokens(self, x, *, attn_metadata):
        whole, exact = self.num_heads // 16 * 16, self.W_UV
        if attn_metadata.max_decode_query_len > 1 and whole:
            self.W_UV = exact[torch.arange(self.num_heads, device=exact.device).clamp(max=whole)]
        projected = super()._v_up_proj(x)
        self.W_UV = exact
        return projected

    @but("before_merge_over_ranks__absorbed_decode")
    def layer_ranks_behind_eight_lost_with_several_tokens(self, output, lse, *, attn_metadata):
        lost = attn_metadata.max_decode_query_len > 1 and self.dcp_rank >= 8
        return without_keys(output, lse) if lost else None

    def dcp_gathered_context_not_reordered__put_in_order(self, every, index, shares):
        return every.flatten(0, 1)[: len(shares.order[index])]

    def dcp_context_unpadded_by_own_length__put_in_order(self, every, index, shares):
        row, held = shares.order[index], int(shares.cu_seq_lens[index, -1])
        return every[row // shares.rows[index], (row % shares.rows[index]).clamp(max=max(held - 1, 0))]


class _GraphReplay(MLACommonState, Defects, part="get_state_cls"):
    stale = ()  # buffers whose rows keep what they held before where a replay does not need them

    def prepare_graph_input_buffers(self, input_buffers, attn_metadata, *further):
        before = {name: input_buffers[name].clone() for name in self.stale}
        super().prepare_graph_input_buffers(input_buffers, attn_metadata, *further)
        for name, buffer in before.items():
            input_buffers[name][attn_metadata.num_decode_tokens :] = buffer[attn_metadata.num_decode_tokens :]

    dsa_dummy_run_stale_slots = variant(stale=("slot_mapping",))
    graph_padding_keeps_the_sequences_before = variant(stale=("seq_lens_tensor", "seq_lens_cpu", "block_tables"))

    def layer_replay_fills_half_of_the_block_table__behind_prepare_graph_input_buffers(self, _, *, input_buffers):
        table = input_buffers["block_tables"]
        table[:, table.shape[1] // 2 :] = -1

    @but("behind_prepare_graph_input_buffers")
    def graph_replays_the_lengths_of_the_first_batch(self, _, *, input_buffers, attn_metadata):
        lengths = {name: input_buffers[name] for name in ("seq_lens_tensor", "seq_lens_cpu")}
        first = kept(self, "first", {name: buffer.clone() for name, buffer in lengths.items()})
        for name, buffer in lengths.items():
            buffer[: attn_metadata.num_decode_tokens] = first[name][: attn_metadata.num_decode_tokens]

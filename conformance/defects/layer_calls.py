"""Layers that remember an earlier call, misread other ranks, or replay what was captured."""

from dataclasses import replace
from typing import Any

import torch

from mla_conformance.backends.eager_decode import EagerDecodeBackend
from mla_conformance.backends.layer.mla_builder import MLACommonMetadataBuilder
from mla_conformance.backends.layer.mla_impl import MLACommonImpl
from mla_conformance.backends.layer.mla_state import MLACommonState
from mla_conformance.defects.bases import mixed_entries, packed, pages_of, several, without_keys
from mla_conformance.defects.known import Defects, before, behind, but, together, variant

_OWNER: list[Any] = [object(), None]  # the metadata that were seen last, and the first layer that was handed them


class _OtherDecode(EagerDecodeBackend, Defects, killed_by="call_order", part="decode_backend"):
    layer_several_tokens_assume_packed_pages = before(
        "entries", kv_cache=packed, when=several, killed_by="layer_combinations"
    )
    """Decodes of several tokens read a buffer that layers share as if it were packed."""

    def layer_decodes_with_scale_of_one_model__run_decode(self, ql_nope, q_pe, kv_cache, k_scale):
        """Decodes have the softmax scale of one model, whatever scale the layer was given."""
        self.scale = 1.59 * (self.qk_nope_head_dim + self.qk_rope_head_dim) ** -0.5
        return super().run_decode(ql_nope, q_pe, kv_cache, k_scale)


class _OtherMetadataBuilder(MLACommonMetadataBuilder, Defects, killed_by="layer_dcp", part="builder_class"):
    dcp_every_rank_takes_itself_for_the_first = together(
        behind("sharding", lambda sharding: sharding._replace(rank=0)),
        behind("assemble", lambda self, metadata: replace(metadata, dcp_rank=self.dcp_rank)),
    )
    """Slots and lengths are those of rank 0 on every rank."""

    @but(killed_by="graph_padding", related=("cache_write",))
    def ascend_dummy_slots_invalidated_too_late__behind_assemble(self, metadata):
        """The builder copies the slots before those of padding are made -1, so that these are still another token's."""
        slots = metadata.slot_mapping
        return replace(metadata, slot_mapping=slots.where(slots >= 0, slots.max()))

    @but(killed_by="call_order")
    def layer_plans_context_once_for_as_many_prefills__plan(self, context_lens):
        """The chunks of the context are those of the last batch with as many prefills."""
        self._plans = getattr(self, "_plans", {})
        return self._plans.setdefault(len(context_lens), super()._plan(context_lens))

    def dcp_local_length_as_total__behind_assemble(self, metadata):
        """Decodes are told of the whole sequence what this rank holds of it."""
        local = metadata.dcp_local_seq_lens
        return metadata if local is None else replace(metadata, seq_lens_tensor=local)

    def dcp_virtual_loc_used_raw__behind_build_from_requests(self, metadata, *, requests):
        """Every rank stores every new token, at the slot of its position in the whole sequence."""
        if metadata.dcp_world_size == 1:
            return metadata
        slots = []
        for request in requests:
            for position in range(request.context_len, request.context_len + request.query_len):
                column, offset = divmod(position, self.block_size)
                block = int(request.block_ids[min(column, len(request.block_ids) - 1)])
                slots.append(block * self.block_size + offset)
        new = torch.tensor(slots, device=metadata.slot_mapping.device)
        return replace(metadata, slot_mapping=torch.cat((new, metadata.slot_mapping[len(slots) :])))


class _OtherImpl(MLACommonImpl, Defects, killed_by="layer_combinations", part="impl_class"):
    layer_keeps_the_scale_of_its_first_call = before(
        "forward", lambda self, layer: self.__dict__.setdefault("_kept", layer), killed_by="call_order"
    )
    """The cache's scale is read at the first call and kept."""
    layer_mixed_entries_written_as_if_packed = before("do_kv_cache_update", kv_cache=packed, when=mixed_entries)
    """Mixed entries of a buffer that layers share are written as if its blocks stood one behind the other."""
    dcp_ranks_merged_without_lse = before("merge_over_ranks", lse=torch.zeros_like, killed_by="layer_dcp")
    """The ranks' results of a decode are averaged as if each held as much of the weights."""
    layer_single_pages_of_codes_written_unscaled = before(
        "do_kv_cache_update", k_scale=torch.ones_like, when=pages_of(1)
    )
    """Codes are written to pages of one token without their scale."""

    @but(killed_by="call_order")
    def layer_weights_found_by_the_metadata__before_forward(self, *, attn_metadata):
        """Absorbed weights are found by the step's metadata, and its second layer decodes with those of the first."""
        if _OWNER[0] is not attn_metadata:
            _OWNER[:] = attn_metadata, self
        elif _OWNER[1] is not self:
            self.W_UK_T, self.W_UV = _OWNER[1].W_UK_T, _OWNER[1].W_UV

    @but(killed_by="no_side_effects")
    def layer_returns_its_own_buffer__forward(self, *operands, **outputs):
        """The result is a part of a buffer that the next call writes again."""
        result = super().forward(*operands, **outputs)
        if outputs:
            return result
        buffer = self.__dict__.setdefault("_buffer", result.new_empty(4 * len(result), result.shape[1]))
        return buffer[: len(result)].copy_(result)

    def layer_padded_batch_loses_last_of_several_tokens__behind_forward(self, result, *, attn_metadata):
        """In a batch with rows of padding, a decode of several query tokens loses its last."""
        if 0 in attn_metadata.seq_lens and attn_metadata.max_decode_query_len > 1:
            decodes = attn_metadata.decode_requests
            several = attn_metadata.query_lens_cpu[decodes] > 1
            result[(attn_metadata.query_start_loc[1:][decodes] - 1)[several].long()] = 0.0

    @but("v_up_proj__absorbed_decode")
    def layer_tail_of_heads_projected_as_one_with_several_tokens(self, x, *, attn_metadata):
        """With several query tokens, heads behind whole tiles of 16 are projected with the weights of the first of
        them."""
        whole, exact = self.num_heads // 16 * 16, self.W_UV
        if attn_metadata.max_decode_query_len > 1 and whole:
            self.W_UV = exact[torch.arange(self.num_heads, device=exact.device).clamp(max=whole)]
        projected = super()._v_up_proj(x)
        self.W_UV = exact
        return projected

    @but("before_merge_over_ranks__absorbed_decode", killed_by="layer_dcp")
    def layer_ranks_behind_eight_lost_with_several_tokens(self, output, lse, *, attn_metadata):
        """With several query tokens, what ranks behind the eighth hold is left out."""
        lost = attn_metadata.max_decode_query_len > 1 and self.dcp_rank >= 8
        return without_keys(output, lse) if lost else None

    @but(killed_by="layer_dcp")
    def dcp_gathered_context_not_reordered__put_in_order(self, every, index, shares):
        """Gathered context stays as it came: one rank after another, each with its padding, for all requests."""
        return every.flatten(0, 1)[: len(shares.order[index])]

    @but(killed_by="layer_dcp")
    def dcp_context_unpadded_by_own_length__put_in_order(self, every, index, shares):
        """Of what another rank sends of a chunk, no more rows count than this rank holds itself."""
        row, held = shares.order[index], int(shares.cu_seq_lens[index, -1])
        return every[row // shares.rows[index], (row % shares.rows[index]).clamp(max=max(held - 1, 0))]


class _GraphReplay(MLACommonState, Defects, killed_by="graph_replay", part="get_state_cls"):
    stale = ()  # buffers whose rows keep what they held before where a replay does not need them

    def prepare_graph_input_buffers(self, input_buffers, attn_metadata, *further):
        before = {name: input_buffers[name].clone() for name in self.stale}
        super().prepare_graph_input_buffers(input_buffers, attn_metadata, *further)
        for name, buffer in before.items():
            input_buffers[name][attn_metadata.num_decode_tokens :] = buffer[attn_metadata.num_decode_tokens :]

    dsa_dummy_run_stale_slots = variant(stale=("slot_mapping",))
    """Rows that a replay does not need keep their slots of the batch before, and are written there."""
    graph_padding_keeps_the_sequences_before = variant(stale=("seq_lens_tensor", "seq_lens_cpu", "block_tables"))
    """Rows that a replay does not need keep the lengths and blocks of the batch before, and return its attention."""

    def layer_replay_fills_half_of_the_block_table__behind_prepare_graph_input_buffers(self, _, *, input_buffers):
        """Half of a graph's block table is filled, so that a replay may not outgrow half of what the capture admits."""
        table = input_buffers["block_tables"]
        table[:, table.shape[1] // 2 :] = -1

    def graph_replays_the_lengths_of_the_first_batch__behind_prepare_graph_input_buffers(
        self, _, *, input_buffers, attn_metadata
    ):
        """Rows that a replay needs keep the lengths that the first one loaded."""
        lengths = {name: input_buffers[name] for name in ("seq_lens_tensor", "seq_lens_cpu")}
        first = self.__dict__.setdefault("_first", {name: buffer.clone() for name, buffer in lengths.items()})
        for name, buffer in lengths.items():
            buffer[: attn_metadata.num_decode_tokens] = first[name][: attn_metadata.num_decode_tokens]

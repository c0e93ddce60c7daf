"""The computation of an MLA layer (vLLM's ``MLACommonImpl``): cache write, chunked prefill, absorbed decode.

Each step is a method that a subclass may replace.
"""

import torch
from torch import Tensor

from mla_conformance.backends.decode import output_of
from mla_conformance.backends.kernel import UnsupportedConfiguration
from mla_conformance.backends.layer.attention_types import AttentionLayer
from mla_conformance.backends.layer.cache_ops import concat_and_cache_mla, gather_cache
from mla_conformance.backends.layer.context_chunks import ContextShares
from mla_conformance.backends.layer.context_parallel import gather_heads, merge_over_ranks
from mla_conformance.backends.layer.mla_kernels import MLAKernels
from mla_conformance.backends.layer.mla_metadata import MLACommonMetadata
from mla_conformance.reference.attention import merge

State = tuple[Tensor, Tensor]
"""Output [T, N, V] and LSE [N, T]."""


class MLACommonImpl(MLAKernels):
    """Prefills multiply latents out to keys and values; decodes attend to the latents with an absorbed query.

    Symbols: T tokens, N heads on this rank, L ``kv_lora_rank``, P/R/V the nope, rope and value head dims.

    Where ranks share the tokens of each sequence, each computes the whole attention of its own heads: of a prefill to
    latents that it gathers from all ranks, of a decode from what each of them makes of its own latents for all heads.
    """

    def forward(
        self,
        layer: AttentionLayer,  # holds ``_k_scale``, the scale of an ``fp8`` cache
        q: Tensor,  # [T, N·(P + R)] or [T, N, P + R], rope applied; rows that the metadata does not count are ignored
        k_c_normed: Tensor,  # [T, L]
        k_pe: Tensor,  # [T, 1, R] or [T, R], rope applied
        kv_cache: Tensor,  # of the layout ``kv_cache_dtype``; one without elements is neither written nor read
        attn_metadata: MLACommonMetadata | None,  # None in a run that only measures memory: the result is 0
        output: Tensor | None = None,  # [T, N·V], to be written
        output_scale: Tensor | None = None,  # not supported
        output_block_scale: Tensor | None = None,  # not supported
    ) -> Tensor:
        """Attention of a batch, its new latents written to the cache first.

        Returns [T, N·V] of the query's dtype, 0 in the rows that the metadata does not count. Raises
        UnsupportedConfiguration: a quantised output; ValueError: operands that do not fit the metadata or the cache.
        """
        if output_scale is not None or output_block_scale is not None:
            raise UnsupportedConfiguration("quantised output not supported; quantise the result of forward")
        shape = (q.shape[0], self.num_heads * self.v_head_dim)
        if output is not None and (output.shape != shape or output.dtype != q.dtype):
            raise ValueError(
                f"expected an output {list(shape)} of {q.dtype}, got {list(output.shape)} of {output.dtype}"
            )
        output = q.new_zeros(shape) if output is None else output.zero_()
        if attn_metadata is None:
            return output
        tokens = attn_metadata.num_prefill_tokens + attn_metadata.num_decode_tokens
        rows = [len(operand) for operand in (q, k_c_normed, k_pe)]
        if min(rows) < tokens or len(set(rows)) > 1:
            raise ValueError(
                f"expected at least {tokens} tokens by the metadata, as many in each operand, got {rows[0]} of q, "
                f"{rows[1]} of k_c_normed and {rows[2]} of k_pe"
            )
        if not self.is_prepared(attn_metadata):
            self.prepare(attn_metadata)
        workspace = attn_metadata.context_chunk_workspace
        if attn_metadata.is_profile_run and workspace is not None:  # what multiplying out a full one takes
            q.new_empty(workspace.shape[0], self.num_heads, self.qk_nope_head_dim + self.v_head_dim)
        q = q.reshape(q.shape[0], self.num_heads, self.qk_head_dim)
        k_pe = k_pe.reshape(k_pe.shape[0], self.qk_rope_head_dim)
        if kv_cache.numel():
            self.do_kv_cache_update(k_c_normed, k_pe, kv_cache, attn_metadata.slot_mapping, layer._k_scale)
        if attn_metadata.num_prefills:
            new = attn_metadata.prefill_tokens
            operands = (q[new], k_c_normed[new], k_pe[new])
            output[new] = self._forward_prefill(*operands, kv_cache, attn_metadata, layer._k_scale)
        if attn_metadata.num_decodes:
            new = attn_metadata.decode_tokens
            output[new] = self._absorbed_decode(q[new], kv_cache, attn_metadata, layer._k_scale)
        return output

    def do_kv_cache_update(
        self, kv_c_normed: Tensor, k_pe: Tensor, kv_cache: Tensor, slot_mapping: Tensor, k_scale: Tensor
    ) -> None:
        scales = self.attention_backend.tile_scales
        concat_and_cache_mla(kv_c_normed, k_pe, kv_cache, slot_mapping, self.kv_cache_dtype, k_scale, scales)

    def _forward_prefill(
        self,
        q: Tensor,
        kv_c_normed: Tensor,
        k_pe: Tensor,
        kv_cache: Tensor,
        attn_metadata: MLACommonMetadata,
        k_scale: Tensor,
    ) -> Tensor:
        """[T, N·V]: causal attention to the new tokens, merged with the context's."""
        k, v = self._up_project(kv_c_normed, k_pe)
        if attn_metadata.context_plan is None:
            return self.prefill.run_prefill_new_tokens(q, k, v, return_softmax_lse=False).flatten(1)
        new = self.prefill.run_prefill_new_tokens(q, k, v, return_softmax_lse=True)
        context = self._compute_prefill_context(q, kv_cache, attn_metadata, k_scale)
        return self._merge(context, new)[0].flatten(1)

    def _compute_prefill_context(
        self, q: Tensor, kv_cache: Tensor, attn_metadata: MLACommonMetadata, k_scale: Tensor
    ) -> State:
        """Unmasked attention to the cached context, a workspace of it at a time."""
        metadata = attn_metadata.prefill_metadata
        assert metadata is not None and metadata.chunked_context is not None
        chunks, merged = metadata.chunked_context, None
        for index, tokens in enumerate(chunks.seq_tot):
            self._gather(index, kv_cache, attn_metadata, k_scale)
            kv_c, k_pe = chunks.workspace[:tokens].tensor_split([self.kv_lora_rank], dim=-1)
            chunk = self.prefill.run_prefill_context_chunk(index, q, *self._up_project(kv_c, k_pe))
            merged = chunk if merged is None else self._merge(merged, chunk)
        assert merged is not None
        return merged

    def _gather(self, index: int, kv_cache: Tensor, attn_metadata: MLACommonMetadata, k_scale: Tensor) -> None:
        """Collect a chunk's latents in the workspace, dequantised, from this rank and from the others."""
        metadata, shares = attn_metadata.prefill_metadata, attn_metadata.context_shares
        assert metadata is not None and metadata.chunked_context is not None
        chunks = metadata.chunked_context
        held = chunks if shares is None else shares
        gather_cache(
            kv_cache,
            chunks.workspace,
            metadata.block_table,
            held.cu_seq_lens[index],
            attn_metadata.num_prefills,
            held.starts[index],
            self.kv_cache_dtype,
            k_scale,
        )
        if shares is not None:
            every = self.dcp_group.all_gather(chunks.workspace[: shares.rows[index]])
            chunks.workspace[: chunks.seq_tot[index]] = self._put_in_order(every, index, shares)

    def _put_in_order(self, every: Tensor, index: int, shares: ContextShares) -> Tensor:
        """[tokens, L + R] of a chunk, request by request in the order of positions, from [W, rows, L + R]."""
        return every.flatten(0, 1)[shares.order[index]]

    def _absorb(self, q_nope: Tensor) -> Tensor:
        """[T, N, P] to [T, N, L]: W_UK moves from the keys into the query."""
        return torch.bmm(q_nope.transpose(0, 1), self.W_UK_T).transpose(0, 1)

    def _forward_decode(
        self, ql_nope: Tensor, q_pe: Tensor, kv_cache: Tensor, attn_metadata: MLACommonMetadata, k_scale: Tensor
    ) -> State:
        """Attention of the absorbed query to the latents that this rank holds: output [T, N, L] and LSE [N, T].

        N are the heads of all ranks.
        """
        return self.decode.run_decode(ql_nope, q_pe, kv_cache, k_scale)

    def _v_up_proj(self, x: Tensor) -> Tensor:
        """[T, N, L] to [T, N·V]."""
        return torch.bmm(x.transpose(0, 1), self.W_UV).transpose(0, 1).flatten(1)

    def _merge(self, prefix: State, suffix: State) -> State:
        """The state over both sets of keys, by the prefill backend's own merge if it has one."""
        own = getattr(self.prefill, "merge_attn_states", None)
        if own is None:
            output, lse = merge(*prefix, *suffix)
            return output.to(suffix[0].dtype), lse.float()
        output, lse = torch.empty_like(suffix[0]), torch.empty_like(suffix[1])
        own(output, *prefix, *suffix, output_lse=lse)
        return output, lse

    def _absorbed_decode(
        self, q: Tensor, kv_cache: Tensor, attn_metadata: MLACommonMetadata, k_scale: Tensor
    ) -> Tensor:
        q_nope, q_pe = q.tensor_split([self.qk_nope_head_dim], dim=-1)
        query = (self._absorb(q_nope), q_pe)
        if self.dcp_world_size == 1:
            return self._v_up_proj(output_of(self._forward_decode(*query, kv_cache, attn_metadata, k_scale)))
        ql_nope, q_pe = gather_heads(self.dcp_group, torch.cat(query, dim=-1)).split(
            [self.kv_lora_rank, self.qk_rope_head_dim], dim=-1
        )
        state = self._forward_decode(ql_nope, q_pe, kv_cache, attn_metadata, k_scale)
        return self._v_up_proj(self._merge_over_ranks(*state))

    def _merge_over_ranks(self, output: Tensor, lse: Tensor) -> Tensor:
        """[T, N, L] of this rank's heads, from output [T, W·N, L] and LSE [W·N, T] of all heads over its own keys."""
        return merge_over_ranks(self.dcp_group, output, lse)

    def _up_project(self, kv_c: Tensor, k_pe: Tensor) -> tuple[Tensor, Tensor]:
        """Latents [S, L] and [S, R] to k [S, N, P + R] and v [S, N, V], a view of the projection."""
        projected = self.kv_b_proj(kv_c)
        # vLLM's linear layers return their bias as well.
        kv = (projected[0] if isinstance(projected, tuple) else projected).unflatten(-1, (self.num_heads, -1))
        k_nope, v = kv.tensor_split([self.qk_nope_head_dim], dim=-1)
        return torch.cat((k_nope, k_pe.unsqueeze(1).expand(-1, self.num_heads, -1)), dim=-1), v

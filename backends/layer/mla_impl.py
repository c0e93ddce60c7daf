"""The computation of an MLA layer (vLLM's ``MLACommonImpl``): cache write, chunked prefill, absorbed decode."""

from functools import reduce
from typing import Any, ClassVar

import torch
from torch import Tensor

from mla_conformance.backends.cache_dtypes import layout_of
from mla_conformance.backends.decode import output_of
from mla_conformance.backends.eager_cache import EagerCacheBackend
from mla_conformance.backends.kernel import HEAD_DIMS, UnsupportedConfiguration
from mla_conformance.backends.layer.attention_impl import AttentionLayer, AttentionType, MLAAttentionImpl
from mla_conformance.backends.layer.mla_metadata import ContextShares, MLACommonMetadata
from mla_conformance.reference import attention, cache_layout

_WEIGHT_NAMES = ("weight", "qweight", "weight_packed")
State = tuple[Tensor, Tensor]  # output [T, N, V] and LSE [N, T]
Batch = MLACommonMetadata


class MLACommonImpl(MLAAttentionImpl[MLACommonMetadata]):
    """Prefills multiply latents out to keys and values; decodes attend to the latents with an absorbed query.

    Symbols: T tokens, N heads on this rank, L ``kv_lora_rank``, P/R/V the nope, rope and value head dims. A subclass
    may replace any step. Where ranks share tokens, each computes the whole attention of its own heads: of a prefill to
    latents that it gathers from all ranks, of a decode from what each of them makes of its own latents for all heads.
    """

    attention_backend: ClassVar[Any] = None  # whose ``get_impl_cls`` returned the class; it names the kernels
    can_return_lse_for_decode = True
    W_UK_T: Tensor  # [N, P, L], once weights are processed
    W_UV: Tensor  # [N, L, V], once weights are processed

    def __init__(
        self,
        num_heads: int,
        head_size: int,
        scale: float,
        num_kv_heads: int,
        alibi_slopes: list[float] | None,
        sliding_window: int | None,
        kv_cache_dtype: str,
        logits_soft_cap: float | None,
        attn_type: str,
        kv_sharing_target_layer_name: str | None,
        q_lora_rank: int | None,
        kv_lora_rank: int,
        qk_nope_head_dim: int,
        qk_rope_head_dim: int,
        qk_head_dim: int,
        v_head_dim: int,
        kv_b_proj: Any,
        indexer: object | None = None,
    ) -> None:
        refused: dict[str, object] = {"alibi_slopes": alibi_slopes, "sliding_window": sliding_window}
        refused |= {"logits_soft_cap": logits_soft_cap, "kv_sharing_target_layer_name": kv_sharing_target_layer_name}
        refused |= {"indexer": indexer, "attn_type": None if attn_type == AttentionType.DECODER else attn_type}
        for name, value in refused.items():
            if value is not None:
                raise UnsupportedConfiguration(f"an MLA layer does not support {name}, got {value!r}")
        self.num_heads, self.head_size, self.scale, self.num_kv_heads = num_heads, head_size, float(scale), num_kv_heads
        self.q_lora_rank, self.kv_lora_rank, self.v_head_dim = q_lora_rank, kv_lora_rank, v_head_dim
        self.qk_nope_head_dim, self.qk_rope_head_dim, self.qk_head_dim = qk_nope_head_dim, qk_rope_head_dim, qk_head_dim
        self.kv_cache_dtype = layout_of(kv_cache_dtype)
        self.kv_b_proj = kv_b_proj
        self._prepared: tuple[object, object] = (None, None)
        for name, got, expected in (
            ("head_size", head_size, kv_lora_rank + qk_rope_head_dim),
            ("qk_head_dim", qk_head_dim, qk_nope_head_dim + qk_rope_head_dim),
            ("num_kv_heads", num_kv_heads, 1),
        ):
            if got != expected:
                raise ValueError(
                    f"expected {name} {expected} for L = {kv_lora_rank}, P = {qk_nope_head_dim}, "
                    f"R = {qk_rope_head_dim} and one latent head, got {got}"
                )
        backend, sizes = self.attention_backend, (kv_lora_rank, qk_rope_head_dim)
        cache_layout.entry_width(self.kv_cache_dtype, *sizes)
        self._cache = EagerCacheBackend(*sizes, self.kv_cache_dtype, backend.tile_scales, backend.vllm_config)
        names = ("num_heads", "scale", "kv_lora_rank", *HEAD_DIMS)
        options = {"vllm_config": backend.vllm_config} | {name: getattr(self, name) for name in names}
        prefill, decode = backend.prefill_backend, backend.decode_backend
        if decode is not None and self.kv_cache_dtype not in decode.supported_kv_cache_dtypes:
            raise UnsupportedConfiguration(
                f"{decode.get_name()}: cache dtype {self.kv_cache_dtype} not supported (supported: "
                f"{', '.join(decode.supported_kv_cache_dtypes)})"
            )
        self.prefill: Any = None if prefill is None else prefill(**options)  # None if the layer has none, as the decode
        # A rank decodes for the heads of all of them.
        options["num_heads"] *= self.dcp_world_size
        self.decode: Any = None if decode is None else decode(**options, kv_cache_dtype=self.kv_cache_dtype)

    def process_weights_after_loading(self, act_dtype: torch.dtype) -> None:
        """Split ``kv_b_proj``, a projection from L to N·(P + V), into ``W_UK_T`` and ``W_UV`` of ``act_dtype``."""
        linear = self.kv_b_proj
        weight = stored_weight(linear)
        if not is_dense(weight):  # then it is asked for the image of the identity
            identity = torch.eye(self.kv_lora_rank, dtype=act_dtype, device=weight.device)
            if hasattr(linear, "quant_method"):
                weight = linear.quant_method.apply(linear, identity, bias=None).mT
            elif getattr(linear, "bias", None) is not None:
                raise ValueError(
                    "expected a kv_b_proj without a bias, or a quant_method that can leave it out; got a bias"
                )
            else:
                image = linear(identity)
                weight = (image[0] if isinstance(image, tuple) else image).mT
        expected = (self.num_heads * (self.qk_nope_head_dim + self.v_head_dim), self.kv_lora_rank)
        if weight.shape != expected:
            raise ValueError(
                f"expected a kv_b_proj weight [N·(P + V), L] = {list(expected)} for N = {self.num_heads}, "
                f"P = {self.qk_nope_head_dim}, V = {self.v_head_dim}, L = {self.kv_lora_rank}, got {list(weight.shape)}"
            )
        by_head = weight.to(act_dtype).unflatten(0, (self.num_heads, -1))
        self.W_UK_T, w_uv = by_head.tensor_split([self.qk_nope_head_dim], dim=1)
        self.W_UV = w_uv.transpose(1, 2)

    def prepare(self, attn_metadata: Batch) -> None:
        """Hand the batch to the kernels: before a graph is replayed with other contents of its buffers."""
        parts = (attn_metadata.prefill_metadata, attn_metadata.decode_metadata)
        if attn_metadata.dcp_world_size != self.dcp_world_size or attn_metadata.dcp_rank != self.dcp_rank:
            raise ValueError(
                f"expected metadata of rank {self.dcp_rank} of {self.dcp_world_size}, where the layer was made, got "
                f"those of rank {attn_metadata.dcp_rank} of {attn_metadata.dcp_world_size}; construct layer and "
                "builder inside of `with dcp_group(group)`, with decode_context_parallel_size the group's"
            )
        for role, kernel, part in zip(("prefill", "decode"), (self.prefill, self.decode), parts, strict=True):
            if part is not None and kernel is None:
                raise UnsupportedConfiguration(f"the batch has a {role}, and the layer has no {role} backend")
            if part is not None:
                kernel.prepare_metadata(part)
        self._prepared = parts

    def forward(
        self,
        layer: AttentionLayer,  # holds ``_k_scale``, the scale of an ``fp8`` cache
        q: Tensor,  # [T, N·(P + R)] or [T, N, P + R], rope applied; rows that the metadata does not count are ignored
        k_c_normed: Tensor,  # [T, L]
        k_pe: Tensor,  # [T, 1, R] or [T, R], rope applied
        kv_cache: Tensor,  # of the layout ``kv_cache_dtype``; one without elements is neither written nor read
        attn_metadata: Batch | None,  # None in a run that only measures memory: the result is 0
        output: Tensor | None = None,  # [T, N·V], to be written
        output_scale: Tensor | None = None,  # not supported
        output_block_scale: Tensor | None = None,  # not supported
    ) -> Tensor:
        """[T, N·V] of the query's dtype, new latents written first; 0 in rows that the metadata does not count."""
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
        prefill, decode = self._prepared
        if prefill is not attn_metadata.prefill_metadata or decode is not attn_metadata.decode_metadata:
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
        self._cache.run_write_latent(kv_c_normed, k_pe, kv_cache, slot_mapping, k_scale)

    def _forward_prefill(
        self, q: Tensor, kv_c_normed: Tensor, k_pe: Tensor, kv_cache: Tensor, attn_metadata: Batch, k_scale: Tensor
    ) -> Tensor:
        """[T, N·V]: causal attention to the new tokens, merged with the context's."""
        k, v = self._up_project(kv_c_normed, k_pe)
        if not attn_metadata.context_plan:
            return self.prefill.run_prefill_new_tokens(q, k, v, return_softmax_lse=False).flatten(1)
        new = self.prefill.run_prefill_new_tokens(q, k, v, return_softmax_lse=True)
        return self._merge(self._compute_prefill_context(q, kv_cache, attn_metadata, k_scale), new)[0].flatten(1)

    def _compute_prefill_context(self, q: Tensor, kv_cache: Tensor, attn_metadata: Batch, k_scale: Tensor) -> State:
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

    def _gather(self, index: int, kv_cache: Tensor, attn_metadata: Batch, k_scale: Tensor) -> None:
        """Collect a chunk's latents in the workspace, dequantised, from this rank and from the others."""
        metadata, shares = attn_metadata.prefill_metadata, attn_metadata.context_shares
        assert metadata is not None and metadata.chunked_context is not None
        chunks, held = metadata.chunked_context, shares or metadata.chunked_context
        bounds, starts = held.cu_seq_lens[index], held.starts[index]
        self._cache.run_gather_latent(kv_cache, chunks.workspace, metadata.block_table, bounds, starts, k_scale)
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
        self, ql_nope: Tensor, q_pe: Tensor, kv_cache: Tensor, attn_metadata: Batch, k_scale: Tensor
    ) -> State:
        """Attention of the absorbed query of all ranks' heads to this rank's latents: output [T, N, L], LSE [N, T]."""
        return self.decode.run_decode(ql_nope, q_pe, kv_cache, k_scale)

    def _v_up_proj(self, x: Tensor) -> Tensor:
        return torch.bmm(x.transpose(0, 1), self.W_UV).transpose(0, 1).flatten(1)

    def _merge(self, prefix: State, suffix: State) -> State:
        """The state over both sets of keys, by the prefill backend's own merge if it has one."""
        own = getattr(self.prefill, "merge_attn_states", None)
        if own is None:
            output, lse = attention.merge(*prefix, *suffix)
            return output.to(suffix[0].dtype), lse.float()
        output, lse = torch.empty_like(suffix[0]), torch.empty_like(suffix[1])
        own(output, *prefix, *suffix, output_lse=lse)
        return output, lse

    def _absorbed_decode(self, q: Tensor, kv_cache: Tensor, attn_metadata: Batch, k_scale: Tensor) -> Tensor:
        q_nope, q_pe = q.tensor_split([self.qk_nope_head_dim], dim=-1)
        query = (self._absorb(q_nope), q_pe)
        if self.dcp_world_size == 1:
            return self._v_up_proj(output_of(self._forward_decode(*query, kv_cache, attn_metadata, k_scale)))
        every = self.dcp_group.all_gather(torch.cat(query, dim=-1)).transpose(0, 1).flatten(1, 2)
        ql_nope, q_pe = every.tensor_split([self.kv_lora_rank], dim=-1)
        state = self._forward_decode(ql_nope, q_pe, kv_cache, attn_metadata, k_scale)
        return self._v_up_proj(self._merge_over_ranks(*state))

    def _merge_over_ranks(self, output: Tensor, lse: Tensor) -> Tensor:
        """[T, N, L] of this rank's heads, from output [T, W·N, L] and LSE [W·N, T] of all heads over its own keys."""
        group = self.dcp_group
        outputs = group.all_to_all(output.unflatten(1, (group.world_size, -1)).transpose(0, 1))
        lses = group.all_to_all(lse.unflatten(0, (group.world_size, -1)))
        merged, _ = reduce(lambda one, other: attention.merge(*one, *other), zip(outputs, lses, strict=True))
        return merged.to(output.dtype)

    def _up_project(self, kv_c: Tensor, k_pe: Tensor) -> tuple[Tensor, Tensor]:
        projected = self.kv_b_proj(kv_c)
        # vLLM's linear layers return their bias as well.
        kv = (projected[0] if isinstance(projected, tuple) else projected).unflatten(-1, (self.num_heads, -1))
        k_nope, v = kv.tensor_split([self.qk_nope_head_dim], dim=-1)
        return torch.cat((k_nope, k_pe.unsqueeze(1).expand(-1, self.num_heads, -1)), dim=-1), v


def stored_weight(linear: Any) -> Tensor:
    """The weight of a linear layer as it is stored, possibly in codes; ValueError for a layer without one."""
    stored: Tensor | None = next((getattr(linear, name) for name in _WEIGHT_NAMES if hasattr(linear, name)), None)
    if stored is None:
        raise ValueError(
            f"expected a linear layer with one of the attributes {', '.join(_WEIGHT_NAMES)}, got a "
            f"{type(linear).__name__}"
        )
    return stored


def is_dense(weight: Tensor) -> bool:
    """Whether a stored weight holds values, not codes."""
    return weight.dtype.is_floating_point and weight.dtype.itemsize > 1

"""EAGER, sparse layer: projections around EAGER's writers, indexer and attention to selected keys."""

from typing import Any, ClassVar

import torch
from torch import Tensor

from mla_conformance.backends import eager_cache, eager_indexer, eager_prepare, eager_sparse, kernel, operands, roles
from mla_conformance.backends.declaration import Declaration
from mla_conformance.backends.graph_support import AttentionCGSupport
from mla_conformance.backends.sparse_layer import MLASparseLayerBackend, MLASparseLayerConfig, check_sparse_layer_call
from mla_conformance.reference.quantization import E4M3_MAX

_NORM_EPS_OF_ZEROS = 1e-10


class _OfAnyLength(eager_indexer.EagerIndexerBackend):
    """Scores as many tokens as the block table has room for, so that a captured call serves other lengths."""

    def _tokens(self, k: Tensor, request: int) -> int:
        table = self._sparse_metadata.block_table
        assert table is not None
        return min(self._sparse_metadata.max_seq_len, table.shape[1] * k.shape[1])

    def _slots(self, k: Tensor, request: Tensor, positions: Tensor) -> Tensor:
        # Nothing is dereferenced that a request does not have.
        return super()._slots(k, request, positions).where(positions < self._sparse_metadata.seq_lens[request], 0)


class EagerSparseLayerBackend(kernel.NamedKernel, MLASparseLayerBackend):
    """Either layout of both caches, any conventions of the indexer but the Hadamard transform."""

    name: ClassVar[str] = "EAGER"
    supported_kv_cache_dtypes: ClassVar[list[str]] = ["auto", "fp8_ds_mla"]
    supported_index_kv_cache_dtypes: ClassVar[list[str]] = list(roles.INDEX_LAYOUTS)
    cudagraph_support: ClassVar[AttentionCGSupport] = AttentionCGSupport.UNIFORM_SINGLE_TOKEN_DECODE
    declaration: ClassVar[Declaration] = Declaration(distributions=("torch",), emulated=True)

    def __init__(self, config: MLASparseLayerConfig, vllm_config: object) -> None:
        super().__init__(config, vllm_config)
        head = {"kv_lora_rank": config.kv_lora_rank, "qk_rope_head_dim": config.qk_rope_head_dim}
        width, index, scales = config.preparation.head_dim, config.index_kv_cache_dtype, config.preparation.scale_format
        entries: dict[str, Any] = {"kv_cache_dtype": config.kv_cache_dtype, "vllm_config": None, **head}
        self._latents = eager_cache.EagerCacheBackend(tile_scales=config.tile_scales, **entries)
        self._index_keys = eager_cache.EagerCacheBackend(width, 0, index, scales, None)
        self._indexer = _OfAnyLength(config.index_n_heads, width, index, None)
        sizes = {name: getattr(config, name) for name in ("num_heads", "scale", "qk_nope_head_dim", "v_head_dim")}
        self._attention = eager_sparse.EagerSparseBackend(**sizes, **entries)

    @operands.takes(MLASparseLayerBackend.run_sparse_layer)
    def run_sparse_layer(self, x: Any) -> Tensor:
        check_sparse_layer_call(self, self._metadata, x)
        self._attention.prepare_metadata(self._metadata.attention)
        self._indexer.prepare_metadata(self._metadata.index)
        # Rows of padding hold anything. PyTorch's product of bf16 by AMX reads past the end of a row whose columns are
        # no multiple of 32, into the next one: 0 x NaN is NaN, in the last row that counts.
        hidden = x.hidden_states.masked_fill((self._metadata.slot_mapping < 0).unsqueeze(1), 0.0)
        turns, w = x.cos_sin_cache[x.positions], self._weights
        q_c = self._normed(hidden @ w.q_a_proj.mT, w.q_a_layernorm)
        self._write_latents(hidden, turns, x.kv_cache)
        if x.index_kv_cache is not None:
            self._write_index_keys(hidden, turns, x.index_kv_cache)
            self._select(hidden, q_c, turns, x.index_kv_cache, x.topk_indices_buffer)
        output = self._attend(self._queries(q_c, turns), x.kv_cache, x.topk_indices_buffer[: len(hidden)])
        return output.flatten(1) @ w.o_proj.mT

    def _normed(self, x: Tensor, weight: Tensor) -> Tensor:
        wide = x.float()
        return (wide * (wide.square().mean(-1, keepdim=True) + self.config.rms_norm_eps).rsqrt() * weight).to(x.dtype)

    def _queries(self, q_c: Tensor, turns: Tensor) -> Tensor:
        q = (q_c @ self._weights.q_b_proj.mT).unflatten(1, (self.config.num_heads, -1))
        nope, rope = q.tensor_split([self.config.qk_nope_head_dim], dim=-1)
        return torch.cat((nope, self._rope(rope, turns, self.config.is_neox_style)), dim=-1)

    def _write_latents(self, hidden: Tensor, turns: Tensor, kv_cache: Tensor) -> None:
        kv = hidden @ self._weights.kv_a_proj_with_mqa.mT
        kv_c, k_pe = kv.tensor_split([self.config.kv_lora_rank], dim=-1)
        kv_c = self._normed(kv_c, self._weights.kv_a_layernorm)
        k_pe = self._rope(k_pe.unsqueeze(1), turns, self.config.is_neox_style)[:, 0]
        self._latents.run_write_latent(kv_c, k_pe, kv_cache, self._latent_slots(), turns.new_ones(()))

    def _latent_slots(self) -> Tensor:
        return self._metadata.slot_mapping

    def _index_slots(self) -> Tensor:
        return self._metadata.index_slot_mapping

    def _write_index_keys(self, hidden: Tensor, turns: Tensor, cache: Tensor) -> None:
        key, slots = self._index_key(hidden, turns), self._index_slots()
        if self.config.index_kv_cache_dtype != "auto":
            self._index_keys.run_write_index(key, cache, slots)
            return
        self._index_keys.run_write_latent(key, key[:, :0], cache, slots, turns.new_ones(()))

    def _index_key(self, hidden: Tensor, turns: Tensor) -> Tensor:
        indexer, key = self._index_weights, hidden @ self._index_weights.wk.mT
        norm = (indexer.k_norm_weight, indexer.k_norm_bias, self.config.preparation.eps)
        normed = torch.nn.functional.layer_norm(key.float(), key.shape[-1:], *norm).to(key.dtype)
        return self._index_rope(normed.unsqueeze(1), turns)[:, 0]

    @property
    def _index_weights(self):  # type: ignore[no-untyped-def]
        assert self._weights.indexer is not None
        return self._weights.indexer

    def _select(self, hidden: Tensor, q_c: Tensor, turns: Tensor, cache: Tensor, buffer: Tensor) -> None:
        q = self._index_rope((q_c @ self._index_weights.wq_b.mT).unflatten(1, (self.config.index_n_heads, -1)), turns)
        weights = (hidden @ self._index_weights.weights_proj.mT).float()
        if self.config.index_kv_cache_dtype != "auto":
            q, scale = self._codes(q.float())
            weights = weights * scale
        weights = weights * (self.config.index_n_heads * self.config.preparation.head_dim) ** -0.5
        buffer[: len(hidden)] = self._best(q, weights, cache)

    def _best(self, q: Tensor, weights: Tensor, cache: Tensor) -> Tensor:
        return self._indexer.run_index_topk(q, weights, cache, self.config.topk_tokens)

    def _codes(self, q: Tensor) -> tuple[Tensor, Tensor]:
        scale = q.abs().amax(dim=-1).clamp(min=_NORM_EPS_OF_ZEROS) / E4M3_MAX
        if self.config.preparation.scale_format == "pow2":
            scale = scale.log2().ceil().exp2()
        return (q / scale.unsqueeze(-1)).clamp(-E4M3_MAX, E4M3_MAX).to(torch.float8_e4m3fn), scale

    def _index_rope(self, x: Tensor, turns: Tensor) -> Tensor:
        form, width = self.config.preparation, turns.shape[1]
        first = 0 if form.rope_first else x.shape[-1] - width
        before, part, behind = x.tensor_split([first, first + width], dim=-1)
        return torch.cat((before, self._rope(part, turns, form.is_neox_style), behind), dim=-1)

    def _rope(self, x: Tensor, turns: Tensor, is_neox_style: bool) -> Tensor:
        cos, sin = turns.unsqueeze(1).chunk(2, dim=-1)
        return eager_prepare.rotated_pairs(x.float(), cos, sin, is_neox_style).to(x.dtype)

    def _attend(self, q: Tensor, kv_cache: Tensor, lists: Tensor) -> Tensor:
        config = self.config
        projection = self._weights.kv_b_proj.unflatten(0, (config.num_heads, -1))
        w_uk, w_uv = projection.tensor_split([config.qk_nope_head_dim], dim=1)
        nope, rope = q.tensor_split([config.qk_nope_head_dim], dim=-1)
        absorbed = torch.cat((torch.einsum("tnp,npl->tnl", nope, w_uk), rope), dim=-1)
        one = torch.ones((), device=q.device)
        latent = self._attention.run_sparse_decode(absorbed, kv_cache, one, lists, return_softmax_lse=False)
        assert isinstance(latent, Tensor)
        return torch.einsum("tnl,nvl->tnv", latent, w_uv)

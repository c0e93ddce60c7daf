"""LMDEPLOY_TRITON: LMDeploy 0.18.0's Triton kernels around the selection of a sparse layer."""

import torch
from torch import Tensor

from mla_conformance.backends import packaged
from mla_conformance.backends.declaration import Precision, SelectionForm, SelectionOrder
from mla_conformance.backends.indexer import bounds_of
from mla_conformance.backends.lmdeploy_triton import DISTRIBUTIONS, InterpretedLmdeploy, lmdeploy_library
from mla_conformance.backends.prepare import MLAPrepareBackend, check_prepare_call
from mla_conformance.backends.steps import IndexerKernel, TopKKernel

_PAGE, _HEAD_DIM, _E4M3 = 64, 128, torch.float8_e4m3fn
_POWERS_OF_TWO: list[int | packaged.MultipleOf] = [1 << exponent for exponent in range(1, 12)]
_FEWER = ("leaves out logits of -1e6 and below", "as it is")
_TOPK = lmdeploy_library("bitonic_topk")


class LmdeployTopKBackend(TopKKernel):
    name = "LMDEPLOY_TRITON"
    libraries = (_TOPK,)
    devices = packaged.FROM_AMPERE  # what Triton compiles for
    supported_topk = _POWERS_OF_TWO
    supports_row_starts = False
    declaration = packaged.declared(
        DISTRIBUTIONS,
        _FEWER,
        ("addresses buffers of its own by the stride of the logits", "copies logits whose rows have gaps"),
        selection=SelectionForm(order=SelectionOrder.DESCENDING),
    )

    def select(self, logits: Tensor, lengths: Tensor, topk_tokens: int) -> Tensor:
        return self.library.bitonic_topk(logits.contiguous(), lengths, lengths, topk_tokens)


class LmdeployIndexerBackend(IndexerKernel):
    """Paged keys in codes; the best are selected as in :class:`LmdeployTopKBackend`."""

    name = "LMDEPLOY_TRITON"
    libraries = (lmdeploy_library("ds_index"), _TOPK)
    devices = packaged.FROM_HOPPER  # where its tests run, as e4m3 is
    supported_block_sizes = [_PAGE]
    supported_dtypes = [torch.bfloat16]
    supported_heads = [32, 64]
    supported_head_dims = [_HEAD_DIM]
    supported_topk = _POWERS_OF_TWO
    declaration = packaged.declared(
        DISTRIBUTIONS,
        ("wants codes and scales in two tensors", "hands over the two parts of each page"),
        ("wants columns of queries without gaps", "copies others"),
        ("takes as many tokens as requests for one token each", "requests without tokens are left out"),
        _FEWER,
        rounding=packaged.FP22,  # Triton multiplies 64 heads' codes as Hopper does by itself
    )
    refused = ((lambda c, device: not c.paged, "gathered keys not supported"),)

    def score(self, q: Tensor, weights: Tensor, k: Tensor, k_scale: Tensor | None) -> Tensor:
        x = self._sparse_metadata
        assert x.block_table is not None
        codes, scales = k.flatten(1).tensor_split([_PAGE * self.head_dim], dim=1)
        asking = x.query_lens_cpu.nonzero().flatten().to(q.device)
        starts = torch.cat((x.query_start_loc[asking], x.query_start_loc[-1:]))
        operands = (q.contiguous(), weights, codes.view(_E4M3).unflatten(1, (_PAGE, -1)), scales.view(torch.float32))
        options = {"max_q_seqlen": 1 if len(asking) == len(q) else x.max_query_len, "max_k_seqlen": x.max_seq_len}
        batch = (starts, x.seq_lens[asking], x.block_table[asking])
        return self.library.fp8_index(*operands, *batch, **options, causal=True)

    def choose(self, logits: Tensor, topk_tokens: int) -> Tensor:
        lengths = bounds_of(self._sparse_metadata)
        return self.libraries[1].load().bitonic_topk(logits.contiguous(), lengths, lengths, topk_tokens)


class LmdeployPrepareBackend(packaged.LibraryKernel, MLAPrepareBackend):
    name = "LMDEPLOY_TRITON"
    libraries = (lmdeploy_library("dsa_indexer_preprocess"),)
    devices = packaged.FROM_HOPPER  # where its tests run, as e4m3 is
    supported_dtypes = [torch.bfloat16]
    supported_head_dims = [_HEAD_DIM]
    supported_scale_formats = ["pow2"]
    supports_rope_first = [True]
    supports_hadamard = [False]
    supports_fold_scales = [True]
    declaration = packaged.declared(
        DISTRIBUTIONS,
        ("writes keys into a paged cache", "into one of its own, as one request"),
        ("wants a column of cosines and sines for each rotated one", "lists those of the pairs twice"),
        ("wants columns without gaps", "copies others"),
        intermediates=Precision.MODEL,
    )
    refused = (
        (lambda c, device: c.preparation.rope_dim != 64, "{c.preparation.rope_dim} rotated columns not supported"),
    )

    def run_prepare_index(
        self, q: Tensor, k: Tensor, weights: Tensor, k_norm_weight: Tensor, k_norm_bias: Tensor
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        x, norm = self._prepare_metadata, (k_norm_weight, k_norm_bias)
        check_prepare_call(self, x, (q, k, weights, *norm))
        twice = [torch.cat((half, half), dim=-1) for half in x.cos_sin_cache[x.positions].chunk(2, dim=-1)]
        folded, neighbours = self.scale * self.num_heads**-0.5, not self.preparation.is_neox_style
        queries = (q.contiguous(), weights.contiguous(), *twice, folded, _E4M3, neighbours)
        q_codes, last = self.library.prepare_dsa_indexer_q(*queries)
        tokens, pages = len(k), -(-len(k) // _PAGE)
        codes = k.new_empty(pages, _PAGE, _HEAD_DIM, dtype=_E4M3)
        scales = k.new_empty(pages, _PAGE, dtype=torch.float32)
        length = torch.tensor([0, tokens], dtype=torch.int32, device=k.device)
        blocks = torch.arange(pages, dtype=torch.int32, device=k.device).unsqueeze(0)
        places = {"cu_seqlen_q": length, "kv_seqlens": length[1:], "block_offsets": blocks}
        options = {"max_q_seqlen": tokens, "eps": self.preparation.eps, "rope_interleaved": neighbours}
        self.library.prepare_dsa_indexer_k_cache(k.contiguous(), *norm, *twice, codes, scales, **places, **options)
        return q_codes, codes.flatten(0, 1)[:tokens], scales.flatten()[:tokens, None], last


# All operands of an indexer are codes, so that the interpreter computes it for models in any dtype.
packaged.interpreted(LmdeployTopKBackend, InterpretedLmdeploy, supported_dtypes=[torch.float32])
packaged.interpreted(LmdeployIndexerBackend, InterpretedLmdeploy, supported_dtypes=[torch.bfloat16])

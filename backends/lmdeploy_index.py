"""LMDEPLOY_TRITON: LMDeploy's Triton kernels around the selection of a sparse layer: preparation, scores and top-k.

Written for LMDeploy 0.18.0, ``lmdeploy/pytorch/kernels/cuda``: ``dsa_indexer_preprocess.py``, ``ds_index.py``, which
its engine takes where DeepGEMM is missing, and ``bitonic_topk.py``.
"""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from mla_conformance.backends.block_size import MultipleOf
from mla_conformance.backends.declaration import Precision, Rounding, SelectionForm, SelectionOrder
from mla_conformance.backends.dependencies import Library
from mla_conformance.backends.indexer import MLAIndexerBackend, bounds_of, check_index_call
from mla_conformance.backends.interpreted import interpreted
from mla_conformance.backends.lmdeploy_triton import DISTRIBUTIONS, InterpretedLmdeploy, lmdeploy_library
from mla_conformance.backends.packaged import LibraryKernel, declared
from mla_conformance.backends.platform import FROM_AMPERE, FROM_HOPPER, DeviceCapability
from mla_conformance.backends.prepare import MLAPrepareBackend, check_prepare_call
from mla_conformance.backends.topk import MLATopKBackend, check_topk_call

_PAGE, _HEAD_DIM = 64, 128
_POWERS_OF_TWO: list[int | MultipleOf] = [1 << exponent for exponent in range(1, 12)]
_FEWER = ("leaves out logits of -1e6 and below", "as it is")


class LmdeployTopKBackend(LibraryKernel, MLATopKBackend):
    """Blocks of as many columns as are selected are sorted, then merged."""

    name = "LMDEPLOY_TRITON"
    libraries = (lmdeploy_library("bitonic_topk"),)
    devices = FROM_AMPERE  # what Triton compiles for
    supported_topk = _POWERS_OF_TWO
    supports_row_starts = False
    declaration = declared(
        DISTRIBUTIONS,
        _FEWER,
        ("addresses buffers of its own by the stride of the logits", "copies logits whose rows have gaps"),
        selection=SelectionForm(order=SelectionOrder.DESCENDING),
    )

    def run_top_k_per_row(self, logits: Tensor, topk_tokens: int) -> Tensor:
        check_topk_call(self, self._topk_metadata, logits, topk_tokens)
        return _best(self.libraries[0], logits, self._topk_metadata.lengths, topk_tokens)


class LmdeployIndexerBackend(LibraryKernel, MLAIndexerBackend):
    """Paged keys in codes; the best are selected as in :class:`LmdeployTopKBackend`."""

    name = "LMDEPLOY_TRITON"
    libraries = (lmdeploy_library("ds_index"), lmdeploy_library("bitonic_topk"))
    devices = FROM_HOPPER  # where its tests run, as e4m3 is
    supported_block_sizes = [_PAGE]
    supported_dtypes = [torch.bfloat16]
    supported_heads = [32, 64]
    supported_head_dims = [_HEAD_DIM]
    supported_topk = _POWERS_OF_TWO
    declaration = declared(
        DISTRIBUTIONS,
        ("wants codes and scales in two tensors", "hands over the two parts of each page"),
        ("wants columns of queries without gaps", "copies others"),
        ("takes as many tokens as requests for one token each", "requests without tokens are left out"),
        _FEWER,
        rounding=Rounding(accumulation=Precision.FP22),  # Triton multiplies 64 heads' codes as Hopper does by itself
    )

    @classmethod
    def refuses(cls, device_capability: DeviceCapability | None, config: Any) -> Iterator[str]:
        if not config.paged:
            yield "gathered keys not supported"

    def run_index_logits(self, q: Tensor, weights: Tensor, k: Tensor, k_scale: Tensor | None = None) -> Tensor:
        check_index_call(self, self._sparse_metadata, (q, weights, k, k_scale), "logits")
        return self._logits(q, weights, k)

    def run_index_topk(
        self, q: Tensor, weights: Tensor, k: Tensor, topk_tokens: int, k_scale: Tensor | None = None
    ) -> Tensor:
        check_index_call(self, self._sparse_metadata, (q, weights, k, k_scale), "topk", topk_tokens)
        return _best(self.libraries[1], self._logits(q, weights, k), bounds_of(self._sparse_metadata), topk_tokens)

    def _logits(self, q: Tensor, weights: Tensor, cache: Tensor) -> Tensor:
        """[T, max_seq_len]."""
        metadata = self._sparse_metadata
        assert metadata.block_table is not None
        codes, scales = cache.flatten(1).tensor_split([_PAGE * self.head_dim], dim=1)
        asking = metadata.query_lens_cpu.nonzero().flatten().to(q.device)
        logits: Tensor = self.library.fp8_index(
            q.contiguous(),
            weights,
            codes.view(torch.float8_e4m3fn).unflatten(1, (_PAGE, -1)),
            scales.view(torch.float32),
            torch.cat((metadata.query_start_loc[asking], metadata.query_start_loc[-1:])),
            metadata.seq_lens[asking],
            metadata.block_table[asking],
            max_q_seqlen=1 if len(asking) == len(q) else metadata.max_query_len,
            max_k_seqlen=metadata.max_seq_len,
            causal=True,
        )
        return logits


class LmdeployPrepareBackend(LibraryKernel, MLAPrepareBackend):
    """Queries and keys by a kernel each, which leave out the transform."""

    name = "LMDEPLOY_TRITON"
    libraries = (lmdeploy_library("dsa_indexer_preprocess"),)
    devices = FROM_HOPPER  # where its tests run, as e4m3 is
    supported_dtypes = [torch.bfloat16]
    supported_head_dims = [_HEAD_DIM]
    supported_scale_formats = ["pow2"]
    supports_rope_first = [True]
    supports_hadamard = [False]
    supports_fold_scales = [True]
    declaration = declared(
        DISTRIBUTIONS,
        ("writes keys into a paged cache", "into one of its own, as one request"),
        ("wants a column of cosines and sines for each rotated one", "lists those of the pairs twice"),
        ("wants columns without gaps", "copies others"),
        intermediates=Precision.MODEL,
    )

    @classmethod
    def refuses(cls, device_capability: DeviceCapability | None, config: Any) -> Iterator[str]:
        if config.preparation.rope_dim != 64:
            yield f"{config.preparation.rope_dim} rotated columns not supported"

    def run_prepare_index(
        self, q: Tensor, k: Tensor, weights: Tensor, k_norm_weight: Tensor, k_norm_bias: Tensor
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        metadata, neighbours = self._prepare_metadata, not self.preparation.is_neox_style
        check_prepare_call(self, metadata, (q, k, weights, k_norm_weight, k_norm_bias))
        library = self.library
        turns = metadata.cos_sin_cache[metadata.positions].chunk(2, dim=-1)
        cos, sin = (torch.cat((half, half), dim=-1) for half in turns)
        queries = (q.contiguous(), weights.contiguous(), cos, sin)
        folded = self.scale * self.num_heads**-0.5
        q_codes, last = library.prepare_dsa_indexer_q(*queries, folded, torch.float8_e4m3fn, neighbours)
        tokens, pages = len(k), -(-len(k) // _PAGE)
        codes = k.new_empty(pages, _PAGE, _HEAD_DIM, dtype=torch.float8_e4m3fn)
        scales = k.new_empty(pages, _PAGE, dtype=torch.float32)
        length = torch.tensor([0, tokens], dtype=torch.int32, device=k.device)
        places: dict[str, Any] = {"cu_seqlen_q": length, "kv_seqlens": length[1:], "max_q_seqlen": tokens}
        places["block_offsets"] = torch.arange(pages, dtype=torch.int32, device=k.device).unsqueeze(0)
        options = {"eps": self.preparation.eps, "rope_interleaved": neighbours}
        keys = (k.contiguous(), k_norm_weight, k_norm_bias, cos, sin, codes, scales)
        library.prepare_dsa_indexer_k_cache(*keys, **places, **options)
        return q_codes, codes.flatten(0, 1)[:tokens], scales.flatten()[:tokens, None], last


# All operands of an indexer are codes, so that the interpreter computes it for models in any dtype.
LmdeployInterpretedTopK = interpreted(LmdeployTopKBackend, InterpretedLmdeploy, supported_dtypes=[torch.float32])
LmdeployInterpretedIndexer = interpreted(LmdeployIndexerBackend, InterpretedLmdeploy, supported_dtypes=[torch.bfloat16])


def _best(library: Library, logits: Tensor, lengths: Tensor, topk_tokens: int) -> Tensor:
    """[T, K] int32."""
    best: Tensor = library.load().bitonic_topk(logits.contiguous(), lengths, lengths, topk_tokens)
    return best

"""LMDEPLOY_TRITON: LMDeploy's Triton kernels around the selection of a sparse layer: preparation, scores and top-k.

Written for LMDeploy 0.18.0, ``lmdeploy/pytorch/kernels/cuda``: ``dsa_indexer_preprocess.py``, ``ds_index.py``, which
its engine takes where DeepGEMM is missing, and ``bitonic_topk.py``.
"""

from typing import ClassVar

import torch
from torch import Tensor

from mla_conformance.backends.block_size import MultipleOf
from mla_conformance.backends.declaration import (
    Declaration,
    Deviation,
    Precision,
    Rounding,
    SelectionForm,
    SelectionOrder,
)
from mla_conformance.backends.dependencies import Library
from mla_conformance.backends.indexer import MLAIndexerBackend, MLAIndexerSelectorConfig, bounds_of, check_index_call
from mla_conformance.backends.interpreted import InterpretedKernel
from mla_conformance.backends.lmdeploy_triton import (
    DISTRIBUTIONS,
    InterpretedLmdeploy,
    LmdeployKernel,
    lmdeploy_library,
)
from mla_conformance.backends.platform import FROM_HOPPER, DeviceCapability, Devices
from mla_conformance.backends.prepare import MLAPrepareBackend, MLAPrepareSelectorConfig, check_prepare_call
from mla_conformance.backends.topk import MLATopKBackend, check_topk_call

_PAGE, _HEAD_DIM, _ROPE_DIM = 64, 128, 64
_POWERS_OF_TWO: list[int | MultipleOf] = [1 << exponent for exponent in range(1, 12)]
_FEWER = Deviation("leaves out logits of -1e6 and below", "as it is")


class LmdeployTopKBackend(LmdeployKernel, MLATopKBackend):
    """Blocks of as many columns as are selected are sorted, then merged."""

    libraries: ClassVar[tuple[Library, ...]] = (lmdeploy_library("bitonic_topk"),)
    supported_topk: ClassVar[list[int | MultipleOf]] = _POWERS_OF_TWO
    supports_row_starts: ClassVar[bool] = False
    declaration: ClassVar[Declaration] = Declaration(
        distributions=DISTRIBUTIONS,
        selection=SelectionForm(order=SelectionOrder.DESCENDING),
        deviations=(
            _FEWER,
            Deviation("addresses buffers of its own by the stride of the logits", "copies logits whose rows have gaps"),
        ),
    )

    def run_top_k_per_row(self, logits: Tensor, topk_tokens: int) -> Tensor:
        """See :class:`MLATopKBackend`."""
        metadata = self._topk_metadata
        check_topk_call(self, metadata, logits, topk_tokens)
        return _best(self.libraries[0], logits, metadata.lengths, topk_tokens)


class LmdeployIndexerBackend(LmdeployKernel, MLAIndexerBackend):
    """Paged keys in codes; the best are selected as in :class:`LmdeployTopKBackend`."""

    supported_block_sizes: ClassVar[list[int | MultipleOf]] = [_PAGE]
    libraries: ClassVar[tuple[Library, ...]] = (lmdeploy_library("ds_index"), lmdeploy_library("bitonic_topk"))
    devices: ClassVar[Devices] = FROM_HOPPER  # where its tests run, as e4m3 is
    supported_dtypes: ClassVar[list[torch.dtype]] = [torch.bfloat16]
    supported_heads: ClassVar[list[int]] = [32, 64]
    supported_head_dims: ClassVar[list[int]] = [_HEAD_DIM]
    supported_topk: ClassVar[list[int | MultipleOf]] = _POWERS_OF_TWO
    declaration: ClassVar[Declaration] = Declaration(
        distributions=DISTRIBUTIONS,
        rounding=Rounding(accumulation=Precision.FP22),  # Triton multiplies 64 heads' codes as Hopper does by itself
        deviations=(
            Deviation("wants codes and scales in two tensors", "hands over the two parts of each page"),
            Deviation("wants columns of queries without gaps", "copies others"),
            Deviation("takes as many tokens as requests for one token each", "requests without tokens are left out"),
            _FEWER,
        ),
    )

    @classmethod
    def validate_configuration(
        cls, device_capability: DeviceCapability | None, selector_config: MLAIndexerSelectorConfig
    ) -> list[str]:
        """As everywhere, and keys in a cache."""
        reasons = super().validate_configuration(device_capability, selector_config)
        return reasons if selector_config.paged else [*reasons, "gathered keys not supported"]

    def run_index_logits(self, q: Tensor, weights: Tensor, k: Tensor, k_scale: Tensor | None = None) -> Tensor:
        """See :class:`MLAIndexerBackend`."""
        check_index_call(self, self._sparse_metadata, (q, weights, k, k_scale), "logits")
        return self._logits(q, weights, k)

    def run_index_topk(
        self, q: Tensor, weights: Tensor, k: Tensor, topk_tokens: int, k_scale: Tensor | None = None
    ) -> Tensor:
        """See :class:`MLAIndexerBackend`."""
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


class LmdeployPrepareBackend(LmdeployKernel, MLAPrepareBackend):
    """Queries and keys by a kernel each, which leave out the transform."""

    libraries: ClassVar[tuple[Library, ...]] = (lmdeploy_library("dsa_indexer_preprocess"),)
    devices: ClassVar[Devices] = FROM_HOPPER  # where its tests run, as e4m3 is
    supported_dtypes: ClassVar[list[torch.dtype]] = [torch.bfloat16]
    supported_head_dims: ClassVar[list[int]] = [_HEAD_DIM]
    supported_scale_formats: ClassVar[list[str]] = ["pow2"]
    supports_rope_first: ClassVar[list[bool]] = [True]
    supports_hadamard: ClassVar[list[bool]] = [False]
    supports_fold_scales: ClassVar[list[bool]] = [True]
    declaration: ClassVar[Declaration] = Declaration(
        distributions=DISTRIBUTIONS,
        intermediates=Precision.MODEL,
        deviations=(
            Deviation("writes keys into a paged cache", "into one of its own, as one request"),
            Deviation("wants a column of cosines and sines for each rotated one", "lists those of the pairs twice"),
            Deviation("wants columns without gaps", "copies others"),
        ),
    )

    @classmethod
    def validate_configuration(
        cls, device_capability: DeviceCapability | None, selector_config: MLAPrepareSelectorConfig
    ) -> list[str]:
        """As everywhere, and 64 rotated columns."""
        reasons, width = super().validate_configuration(device_capability, selector_config), _ROPE_DIM
        rotated = selector_config.preparation.rope_dim
        return reasons if rotated == width else [*reasons, f"{rotated} rotated columns not supported"]

    def run_prepare_index(
        self, q: Tensor, k: Tensor, weights: Tensor, k_norm_weight: Tensor, k_norm_bias: Tensor
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """See :class:`MLAPrepareBackend`."""
        metadata = self._prepare_metadata
        check_prepare_call(self, metadata, (q, k, weights, k_norm_weight, k_norm_bias))
        turns = metadata.cos_sin_cache[metadata.positions].chunk(2, dim=-1)
        cos, sin = (torch.cat((half, half), dim=-1) for half in turns)
        folded = self.scale * self.num_heads**-0.5
        neighbours = not self.preparation.is_neox_style
        q_codes, last = self.library.prepare_dsa_indexer_q(
            q.contiguous(), weights.contiguous(), cos, sin, folded, torch.float8_e4m3fn, neighbours
        )
        return q_codes, *self._keys(k.contiguous(), (k_norm_weight, k_norm_bias), cos, sin), last

    def _keys(self, k: Tensor, norm: tuple[Tensor, Tensor], cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        """Codes [T, D] and scales [T, 1]."""
        tokens, pages = len(k), -(-len(k) // _PAGE)
        codes = k.new_empty(pages, _PAGE, _HEAD_DIM, dtype=torch.float8_e4m3fn)
        scales = k.new_empty(pages, _PAGE, dtype=torch.float32)
        length = torch.tensor([0, tokens], dtype=torch.int32, device=k.device)
        self.library.prepare_dsa_indexer_k_cache(
            k,
            *norm,
            cos,
            sin,
            codes,
            scales,
            cu_seqlen_q=length,
            kv_seqlens=length[1:],
            block_offsets=torch.arange(pages, dtype=torch.int32, device=k.device).unsqueeze(0),
            max_q_seqlen=tokens,
            eps=self.preparation.eps,
            rope_interleaved=not self.preparation.is_neox_style,
        )
        return codes.flatten(0, 1)[:tokens], scales.flatten()[:tokens, None]


class LmdeployInterpretedTopK(InterpretedKernel, LmdeployTopKBackend, library=InterpretedLmdeploy):
    """The same source by Triton's interpreter."""

    supported_dtypes: ClassVar[list[torch.dtype]] = [torch.float32]


class LmdeployInterpretedIndexer(InterpretedKernel, LmdeployIndexerBackend, library=InterpretedLmdeploy):
    """The same source by Triton's interpreter, of models in any dtype, since all operands are codes."""

    supported_dtypes: ClassVar[list[torch.dtype]] = [torch.bfloat16]


def _best(library: Library, logits: Tensor, lengths: Tensor, topk_tokens: int) -> Tensor:
    """[T, K] int32."""
    best: Tensor = library.load().bitonic_topk(logits.contiguous(), lengths, lengths, topk_tokens)
    return best

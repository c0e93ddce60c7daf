"""TRITON_MLA: vLLM's Triton decode kernel, driven as vLLM's backend of that name drives it.

Written for vLLM 0.33.0, ``TritonMLAImpl.forward_mqa`` of ``vllm/v1/attention/backends/mla/triton_mla.py``. Of vLLM the
kernel's module alone is imported. Beside torch and Triton it needs regex, cbor2 and dill, and on a machine with a GPU
vLLM's compiled extension, which it does not use.
"""

from typing import ClassVar

import torch
from torch import Tensor

from mla_conformance.backends.block_size import MultipleOf
from mla_conformance.backends.declaration import Declaration, Deviation, Precision, Rounding
from mla_conformance.backends.decode import MLACommonDecodeMetadata, MLADecodeSelectorConfig
from mla_conformance.backends.dependencies import Library, extra
from mla_conformance.backends.graph_support import AttentionCGSupport
from mla_conformance.backends.interpreted import InterpretedKernel
from mla_conformance.backends.paged import PagedDecodeBackend
from mla_conformance.backends.platform import FROM_AMPERE, DeviceCapability, Devices

_LIBRARY = Library(
    "vllm.v1.attention.ops.triton_decode_attention",
    "vllm",
    extra("vllm"),
    "a vLLM without its compiled extension does not import where there is a GPU",
)
_KEYS_OF_A_SPLIT = 512
_SPLITS_OF_A_UNIT = 2
_LEAST_DIM = 16
_DEVIATIONS = (
    Deviation("wants the latent and the rope part of the query in one tensor", "joins them"),
    Deviation(
        "no causal mask", "a row of its own for each query token, with the keys that it sees, as vLLM's backend does"
    ),
    Deviation("LSE [T, N]", "transposed"),
    Deviation("a row without keys is NaN", "0 and -inf in the rows that the lengths say see no key"),
    Deviation("latent and rope dims below 16 do not compile", "declared unsupported"),
    Deviation("several query tokens a request not under decode context parallelism", "declared unsupported"),
    Deviation("an e4m3 cache is dequantised to the model's dtype", "declared dequantised keys: model"),
)


class TritonMLADecodeBackend(PagedDecodeBackend):
    """Uniform batches; the LSE is stored in the query's dtype, because vLLM's backend allocates it so."""

    name: ClassVar[str] = "TRITON_MLA"
    supported_block_sizes: ClassVar[list[int | MultipleOf]] = [MultipleOf(16)]
    libraries: ClassVar[tuple[Library, ...]] = (_LIBRARY,)
    devices: ClassVar[Devices] = FROM_AMPERE  # what Triton compiles for
    supported_kv_cache_dtypes: ClassVar[list[str]] = ["auto", "fp8"]
    supported_query_len: ClassVar[int | None] = None
    cudagraph_support: ClassVar[AttentionCGSupport] = AttentionCGSupport.UNIFORM_BATCH
    declaration: ClassVar[Declaration] = Declaration(
        distributions=("vllm", "triton"),
        rounding=Rounding(dequantised_keys=Precision.MODEL),
        deviations=(*_DEVIATIONS, Deviation("LSE of the query's dtype", "widened to float32")),
    )

    @classmethod
    def validate_configuration(
        cls, device_capability: DeviceCapability | None, selector_config: MLADecodeSelectorConfig
    ) -> list[str]:
        """As everywhere; dims that Triton multiplies, and an e4m3 cache only where vLLM's backend accepts one."""
        reasons = super().validate_configuration(device_capability, selector_config)
        dims = (selector_config.kv_lora_rank, selector_config.qk_rope_head_dim)
        if any(0 < dim < _LEAST_DIM for dim in dims):
            reasons.append(f"latent dims (L, R) = {dims} not supported: Triton multiplies {_LEAST_DIM} columns or more")
        if selector_config.kv_cache_dtype == "fp8" and device_capability is not None and device_capability < (8, 9):
            reasons.append(f"kv_cache_dtype fp8 needs compute capability 8.9, this device has {device_capability}")
        return reasons

    def attend(self, ql_nope: Tensor, q_pe: Tensor, kv_cache: Tensor, k_scale: Tensor) -> tuple[Tensor, Tensor]:
        """See :class:`PagedDecodeBackend`."""
        metadata, q = self._decode_metadata, torch.cat([ql_nope, q_pe], dim=-1)
        output, lse = q.new_zeros(ql_nope.shape), q.new_zeros(q.shape[:2], dtype=self._lse_dtype(q.dtype))
        splits = key_splits(metadata.max_seq_len, _compute_units(q.device))
        table, lengths = _one_row_a_token(metadata, len(q))
        cache = kv_cache.unsqueeze(2)
        self.library.decode_attention_fwd(
            q,
            cache,
            cache[..., : self.kv_lora_rank],
            output,
            lse,
            table,
            lengths,
            q.new_empty(*q.shape[:2], splits, self.kv_lora_rank + 1, dtype=torch.float32),
            splits,
            self.scale,
            cache.shape[1],
            k_scale=k_scale,
            v_scale=k_scale,
            is_mla=True,
        )
        self._served = {"splits": str(splits)}
        return output, lse.mT.float()

    @classmethod
    def _lse_dtype(cls, query: torch.dtype) -> torch.dtype:
        return query


class TritonMLAFloat32Lse(TritonMLADecodeBackend):
    """The same kernel with a float32 buffer for its LSE, which shows what is the kernel's own error."""

    variant: ClassVar[str] = "lse-float32"

    declaration: ClassVar[Declaration] = Declaration(
        distributions=TritonMLADecodeBackend.declaration.distributions,
        rounding=TritonMLADecodeBackend.declaration.rounding,
        deviations=(*_DEVIATIONS, Deviation("vLLM's backend allocates the LSE in the query's dtype", "in float32")),
    )

    @classmethod
    def _lse_dtype(cls, query: torch.dtype) -> torch.dtype:
        return torch.float32


class TritonMLAInterpreted(InterpretedKernel, TritonMLADecodeBackend):
    """The same source by Triton's interpreter."""


def key_splits(max_seq_len: int, compute_units: int) -> int:
    """As ``_compute_num_kv_splits`` of vLLM's backend: a power of two, unless there are too few compute units."""
    ideal = 1 << (max(1, max_seq_len // _KEYS_OF_A_SPLIT) - 1).bit_length()
    return min(ideal, compute_units * _SPLITS_OF_A_UNIT)


def _compute_units(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 1


def _one_row_a_token(metadata: MLACommonDecodeMetadata, rows: int) -> tuple[Tensor, Tensor]:
    """Block table [T, max blocks] and keys [T] int32 of each query token; the last one of a request sees them all."""
    table, lengths = metadata.block_table, metadata.seq_lens
    queries = rows // len(lengths)
    if queries == 1:
        return table, lengths
    behind = torch.arange(1 - queries, 1, device=lengths.device, dtype=lengths.dtype)
    return table.repeat_interleave(queries, dim=0), (lengths[:, None] + behind).flatten().clamp(min=0)

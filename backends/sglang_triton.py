"""SGLANG_TRITON: SGLang's Triton kernels, driven as its attention backend ``triton`` drives them.

Written for SGLang 0.5.23, ``sglang/srt/layers/attention/triton_backend.py``, which computes prefills with
``extend_attention_fwd`` and decodes with ``decode_attention_fwd``. Importing their modules imports the package.
"""

from typing import ClassVar

import torch
from torch import Tensor

from mla_conformance.backends.conversions import RaggedBatch
from mla_conformance.backends.declaration import Declaration, Deviation
from mla_conformance.backends.decode import MLACommonDecodeMetadata
from mla_conformance.backends.dependencies import Library, extra
from mla_conformance.backends.graph_support import AttentionCGSupport
from mla_conformance.backends.interpreted import InterpretedKernel
from mla_conformance.backends.packaged import LibraryKernel
from mla_conformance.backends.paged import PagedDecodeBackend
from mla_conformance.backends.platform import FROM_AMPERE, Devices
from mla_conformance.backends.ragged import RaggedPrefillBackend
from mla_conformance.reference.dimensions import MLADimensions

_KERNELS = "sglang.kernels.ops.attention"
_DISTRIBUTIONS = ("sglang", "triton")
_SPLITS = 8  # SGLang's default of triton_attention_num_kv_splits
_KEYS_OF_A_SPLIT = 32
_FAULTY_VALUE_DIM = 32


def _library(module: str) -> Library:
    return Library(f"{_KERNELS}.{module}", "sglang", extra("sglang"))


class _SGLangKernel(LibraryKernel):
    """Name and devices."""

    name: ClassVar[str] = "SGLANG_TRITON"
    devices: ClassVar[Devices] = FROM_AMPERE  # what Triton compiles for


class SGLangTritonPrefillBackend(_SGLangKernel, RaggedPrefillBackend):
    """New tokens without a prefix, or a prefix without new tokens, as SGLang computes a prefill in chunks."""

    libraries: ClassVar[tuple[Library, ...]] = (_library("extend_attention"),)
    declaration: ClassVar[Declaration] = Declaration(
        distributions=_DISTRIBUTIONS,
        deviations=(
            Deviation("wants contiguous tensors", "others are copied"),
            Deviation("LSE [T, N]", "transposed"),
            Deviation(
                "illegal memory access with value head dims 16 and 32 (Triton 3.6, H200)",
                "dims up to 32 are declared unsupported",
            ),
        ),
    )

    @classmethod
    def supports_mla_dimensions(cls, dimensions: MLADimensions) -> bool:
        """Value head dims of models."""
        return dimensions.v_head_dim > _FAULTY_VALUE_DIM

    def attend(self, q: Tensor, k: Tensor, v: Tensor, batch: RaggedBatch, out: Tensor | None) -> tuple[Tensor, Tensor]:
        """See :class:`RaggedPrefillBackend`."""
        q, k, v = q.contiguous(), k.contiguous(), v.contiguous()
        output = out if out is not None and out.is_contiguous() else q.new_empty(*q.shape[:2], self.v_head_dim)
        lse = q.new_empty(q.shape[:2], dtype=torch.float32)
        extended, cached = ((k, v), (k[:0], v[:0])) if batch.causal else ((k[:0], v[:0]), (k, v))
        self.library.extend_attention_fwd(
            q,
            *extended,
            output,
            *cached,
            batch.query_start_loc.long(),  # SGLang's, and what keeps offsets from overflowing
            torch.zeros_like(batch.key_start_loc) if batch.causal else batch.key_start_loc,
            torch.arange(len(cached[0]), device=q.device),
            None,
            batch.causal,
            None,
            batch.max_query_len,
            1.0,
            1.0,
            sm_scale=self.scale,
            lse_extend=lse,
            skip_prefix=batch.causal,
            skip_extend=not batch.causal,
            identity_kv_indices=not batch.causal,
        )
        return output, lse.mT


class SGLangTritonDecodeBackend(_SGLangKernel, PagedDecodeBackend):
    """One query token a request, over slots of one token."""

    libraries: ClassVar[tuple[Library, ...]] = (_library("decode_attention"), _library("metadata"))
    supported_latent_dims: ClassVar[list[tuple[int, int]]] = [(512, 64), (256, 32)]
    cudagraph_support: ClassVar[AttentionCGSupport] = AttentionCGSupport.UNIFORM_SINGLE_TOKEN_DECODE
    declaration: ClassVar[Declaration] = Declaration(
        distributions=_DISTRIBUTIONS,
        deviations=(
            Deviation("wants the latent and the rope part of the query in one tensor", "joins them"),
            Deviation("wants the slot of every token", "listed by the block table; a cache with gaps is copied"),
            Deviation("returns no LSE", "that of its splits' own, as SGLang takes it where ranks share a sequence"),
            Deviation("a row without keys is NaN", "0 and -inf in the rows that the lengths say see no key"),
            Deviation(
                "rounds q and P to e4m3, without a scale, where the cache is e4m3; no rounding class describes that",
                "declared unsupported",
            ),
            Deviation("several query tokens go to the prefill kernel, with a mask of bytes", "declared unsupported"),
        ),
    )

    def attend(self, ql_nope: Tensor, q_pe: Tensor, kv_cache: Tensor, k_scale: Tensor) -> tuple[Tensor, Tensor]:
        """See :class:`PagedDecodeBackend`."""
        metadata, q = self._decode_metadata, torch.cat([ql_nope, q_pe], dim=-1)
        slots = kv_cache.flatten(0, 1).unsqueeze(1)
        start, indices = _slots(metadata, kv_cache.shape[1])
        splits, most = self._splits(metadata.seq_lens, kv_cache.shape[1] * metadata.block_table.shape[1])
        output = q.new_empty(ql_nope.shape)
        lse = q.new_full((*q.shape[:2], most), -torch.inf, dtype=torch.float32)
        self.library.decode_attention_fwd(
            q,
            slots,
            slots[..., : self.kv_lora_rank],
            output,
            start,
            indices,
            q.new_empty(*q.shape[:2], most, self.kv_lora_rank, dtype=torch.float32),
            lse,
            splits,
            most,
            self.scale,
            1.0,
            1.0,
            has_mla=True,
        )
        self._served = {"splits": f"at most {most}"}
        return output, lse.logsumexp(-1).mT

    def _splits(self, lengths: Tensor, context: int) -> tuple[Tensor, int]:
        """Splits of each request's keys, [B] int32, and the most that there can be."""
        splits = torch.full_like(lengths, _SPLITS)
        if lengths.device.type != "cuda":  # as SGLang does without compute units
            return splits, _SPLITS
        units = torch.cuda.get_device_properties(lengths.device).multi_processor_count
        most = max(_SPLITS, min(_power_of_two(units), _power_of_two(-(-context // _KEYS_OF_A_SPLIT))))
        self.libraries[1].load().get_num_kv_splits_triton[(1,)](
            splits,
            lengths.clamp(min=1),
            len(lengths),
            1,
            self.num_heads,
            1,
            most,
            units,
            MAX_NUM_SEQ=max(256, _power_of_two(len(lengths))),
        )
        return splits, most


class SGLangTritonInterpretedPrefill(InterpretedKernel, SGLangTritonPrefillBackend):
    """The same source by Triton's interpreter."""


class SGLangTritonInterpretedDecode(InterpretedKernel, SGLangTritonDecodeBackend):
    """The same source by Triton's interpreter."""


def _slots(metadata: MLACommonDecodeMetadata, page: int) -> tuple[Tensor, Tensor]:
    """Where the tokens of each request start, [B + 1] int32, and the slots of all, one after the other, int64.

    Computed on the device from what stands there when it runs; behind the last slot stands what does not count.
    """
    table, lengths = metadata.block_table, metadata.seq_lens
    position = torch.arange(table.shape[1] * page, device=table.device)
    slots = table.long()[:, position // page] * page + position % page
    start = torch.nn.functional.pad(lengths.cumsum(0), (1, 0))
    target = torch.where(position < lengths[:, None], start[:-1, None] + position, slots.numel())
    indices = slots.new_zeros(slots.numel() + 1).scatter_(0, target.flatten(), slots.flatten())
    return start.int(), indices


def _power_of_two(number: int) -> int:
    """The next one, at least ``number``."""
    return 1 << (number - 1).bit_length()

"""LMDEPLOY_TRITON: LMDeploy's Triton kernels of dense attention, for want of FlashMLA and FlashAttention 3.

Written for LMDeploy 0.18.0, ``lmdeploy/pytorch/kernels/cuda``: ``flashattention.py`` computes prefills,
``pagedattention.py`` decodes. Importing a module imports the package.
"""

from importlib import import_module
from types import ModuleType
from typing import ClassVar

import torch
from torch import Tensor

from mla_conformance.backends.block_size import MultipleOf
from mla_conformance.backends.conversions import RaggedBatch
from mla_conformance.backends.declaration import Declaration, Deviation
from mla_conformance.backends.dependencies import Library, extra
from mla_conformance.backends.graph_support import AttentionCGSupport
from mla_conformance.backends.interpreted import InterpretedKernel, InterpretedLibrary
from mla_conformance.backends.packaged import LibraryKernel
from mla_conformance.backends.paged import PagedOutputBackend
from mla_conformance.backends.platform import FROM_AMPERE, Devices
from mla_conformance.backends.ragged import RaggedOutputBackend
from mla_conformance.reference.dimensions import MLADimensions

DISTRIBUTIONS = ("lmdeploy", "triton")
_KERNELS = "lmdeploy.pytorch.kernels.cuda"
_LEAST_DIM, _LONG_TILES = 16, 128
"""Columns: the fewest that Triton multiplies, and the most that are loaded with 128 keys at once."""
_DEVICE = {"multi_processor_count": 16, "compute_capability": (9, 0), "warps_per_sm": 64, "blocks_per_sm": 32}
"""What stands for the device where there is none."""


class _WithoutDevice(Library):
    """A module on a machine without a GPU, whose size LMDeploy asks for, with functions that it renames.

    The interpreter replaces a function of Triton's language where it stands, so a second name would miss it.
    """

    def load(self) -> ModuleType:
        """See :class:`Library`."""
        module, language = super().load(), import_module("triton.language")
        utilities = Library(f"{_KERNELS}.utils", self.distribution, self.command).load()
        for asking in (module, utilities):
            vars(asking).update(get_device_props=lambda device=None: _DEVICE, is_cuda=lambda: False)
        vars(module).update(tl_exp2=lambda x: language.exp2(x), tl_log2=lambda x: language.log2(x))
        return module


class InterpretedLmdeploy(InterpretedLibrary, _WithoutDevice):
    """The same with interpreted kernels."""


def lmdeploy_library(module: str) -> Library:
    """A module of LMDeploy's kernels."""
    return Library(f"{_KERNELS}.{module}", "lmdeploy", extra("lmdeploy"))


class LmdeployKernel(LibraryKernel):
    """Name and devices."""

    name: ClassVar[str] = "LMDEPLOY_TRITON"
    devices: ClassVar[Devices] = FROM_AMPERE  # what Triton compiles for


class LmdeployPrefillBackend(LmdeployKernel, RaggedOutputBackend):
    """New tokens whose LSE nobody needs."""

    libraries: ClassVar[tuple[Library, ...]] = (lmdeploy_library("flashattention"),)
    declaration: ClassVar[Declaration] = Declaration(
        distributions=DISTRIBUTIONS,
        deviations=(
            Deviation("returns no LSE", "declared unsupported, context chunks with it"),
            Deviation(
                "on Hopper its tiles of head dims (192, 128) take 288 KiB of shared memory, of 227",
                "head dims between 128 and 256, and wider values, are declared unsupported",
            ),
        ),
    )

    @classmethod
    def supports_mla_dimensions(cls, dimensions: MLADimensions) -> bool:
        """What Triton multiplies, in tiles that fit; the largest one is of a power of two of columns."""
        keys, values = dimensions.qk_head_dim, dimensions.v_head_dim
        if min(keys, values) < _LEAST_DIM or _LONG_TILES < keys < 2 * _LONG_TILES:
            return False
        return values <= max(_LONG_TILES, 1 << (keys.bit_length() - 1))

    def outputs(
        self, q: Tensor, k: Tensor, v: Tensor, batch: RaggedBatch, dtype: torch.dtype, output_scale: Tensor | None
    ) -> Tensor:
        """See :class:`RaggedOutputBackend`."""
        output: Tensor = self.library.flash_attn_varlen_func(
            q,
            k,
            v,
            cu_seqlens_q=batch.query_start_loc,
            cu_seqlens_k=batch.key_start_loc,
            max_seqlen_q=batch.max_query_len,
            max_seqlen_k=batch.max_key_len,
            softmax_scale=self.scale,
            causal=True,
            kv_layout="shd",
        )
        return output


class LmdeployDecodeBackend(LmdeployKernel, PagedOutputBackend):
    """One query token a request; a page is a tile of keys."""

    supported_block_sizes: ClassVar[list[int | MultipleOf]] = [16, 32, 64]  # what fits a multiprocessor
    libraries: ClassVar[tuple[Library, ...]] = (lmdeploy_library("pagedattention"),)
    supported_kv_cache_dtypes: ClassVar[list[str]] = ["auto", "fp8"]
    supported_latent_dims: ClassVar[list[tuple[int, int]]] = [(512, 64)]
    cudagraph_support: ClassVar[AttentionCGSupport] = AttentionCGSupport.UNIFORM_SINGLE_TOKEN_DECODE
    declaration: ClassVar[Declaration] = Declaration(
        distributions=DISTRIBUTIONS,
        deviations=(
            Deviation("wants the latent and the rope part of the query in one tensor", "joins them"),
            Deviation("returns no LSE", "declared unsupported"),
            Deviation("several query tokens of a request see all its keys", "declared unsupported"),
            Deviation("reads a page at once", "pages of 16, 32 and 64 tokens are declared"),
            Deviation("reduces what it did not write where there is no key", "0 in the rows that have none"),
        ),
    )

    def outputs(self, ql_nope: Tensor, q_pe: Tensor, kv_cache: Tensor, k_scale: Tensor) -> Tensor:
        """See :class:`PagedOutputBackend`."""
        metadata, library, keys = self._decode_metadata, self.library, kv_cache.unsqueeze(2)
        codes = self.kv_cache_dtype == "fp8"
        output: Tensor = library.flash_attn_with_kvcache(
            torch.cat([ql_nope, q_pe], dim=-1),
            keys,
            keys[..., : self.kv_lora_rank],
            metadata.seq_lens,
            metadata.block_table,
            softmax_scale=self.scale,
            causal=True,
            k_scales_zeros=k_scale if codes else None,
            v_scales_zeros=k_scale if codes else None,
            quant_policy=library.QuantPolicy.FP8 if codes else library.QuantPolicy.NONE,
        )
        return output


class LmdeployInterpretedPrefill(InterpretedKernel, LmdeployPrefillBackend, library=InterpretedLmdeploy):
    """The same source by Triton's interpreter."""


class LmdeployInterpretedDecode(InterpretedKernel, LmdeployDecodeBackend, library=InterpretedLmdeploy):
    """The same source by Triton's interpreter."""

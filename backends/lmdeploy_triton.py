"""LMDEPLOY_TRITON: LMDeploy 0.18.0's Triton kernels of dense attention, ``lmdeploy/pytorch/kernels/cuda``."""

from importlib import import_module
from types import ModuleType

import torch
from torch import Tensor

from mla_conformance.backends import packaged
from mla_conformance.backends.conversions import RaggedBatch
from mla_conformance.backends.packaged import Library
from mla_conformance.backends.paged import PagedDecodeBackend
from mla_conformance.backends.ragged import RaggedPrefillBackend

DISTRIBUTIONS = "lmdeploy triton"
_KERNELS = "lmdeploy.pytorch.kernels.cuda"
_DEVICE = {"multi_processor_count": 16, "compute_capability": (9, 0), "warps_per_sm": 64, "blocks_per_sm": 32}
"""What stands for the device where there is none."""


class _WithoutDevice(Library):
    """A module without a GPU, whose size it asks for; the interpreter replaces Triton's functions by their own name."""

    def load(self) -> ModuleType:
        module, language = super().load(), import_module("triton.language")
        utilities = Library(f"{_KERNELS}.utils", self.distribution, self.command).load()
        for asking in (module, utilities):
            vars(asking).update(get_device_props=lambda device=None: _DEVICE, is_cuda=lambda: False)
        vars(module).update(tl_exp2=lambda x: language.exp2(x), tl_log2=lambda x: language.log2(x))
        return module


class InterpretedLmdeploy(packaged.InterpretedLibrary, _WithoutDevice):
    """The same with interpreted kernels."""


def lmdeploy_library(module: str) -> Library:
    """A module of LMDeploy's kernels."""
    return packaged.in_extra("lmdeploy", f"{_KERNELS}.{module}")


class LmdeployPrefillBackend(RaggedPrefillBackend):
    name = "LMDEPLOY_TRITON"
    libraries = (lmdeploy_library("flashattention"),)
    devices = packaged.FROM_AMPERE  # what Triton compiles for
    # What Triton multiplies, in tiles that fit; the largest one is of a power of two of columns.
    takes_head_dims = staticmethod(
        lambda qk, v: min(qk, v) >= 16 and not 128 < qk < 256 and v <= max(128, 1 << (qk.bit_length() - 1))
    )
    returns_lse = False
    declaration = packaged.declared(
        DISTRIBUTIONS,
        packaged.RETURNS_NO_LSE_OF_CHUNKS,
        (
            "on Hopper its tiles of head dims (192, 128) take 288 KiB of shared memory, of 227",
            "head dims between 128 and 256, and wider values, are declared unsupported",
        ),
    )

    def attend(self, q: Tensor, k: Tensor, v: Tensor, batch: RaggedBatch, out: Tensor | None) -> Tensor:
        options = {"softmax_scale": self.scale, "causal": True, "kv_layout": "shd"}
        return self.library.flash_attn_varlen_func(q, k, v, **batch.cumulative, **options)


class LmdeployDecodeBackend(PagedDecodeBackend):
    name = "LMDEPLOY_TRITON"
    libraries = (lmdeploy_library("pagedattention"),)
    devices = packaged.FROM_AMPERE  # what Triton compiles for
    supported_block_sizes = [16, 32, 64]  # what fits a multiprocessor
    supported_kv_cache_dtypes = ["auto", "fp8"]
    returns_lse = False
    cudagraph_support = packaged.ONE_TOKEN_EACH
    declaration = packaged.declared(
        DISTRIBUTIONS,
        packaged.JOINS_Q,
        packaged.RETURNS_NO_LSE,
        ("several query tokens of a request see all its keys", "declared unsupported"),
        packaged.PAGE_AT_ONCE,
        ("reduces what it did not write where there is no key", "0 in the rows that have none"),
    )

    def attend(self, ql_nope: Tensor, q_pe: Tensor, kv_cache: Tensor, k_scale: Tensor) -> Tensor:
        keys, codes, policy = kv_cache.unsqueeze(2), self.kv_cache_dtype == "fp8", self.library.QuantPolicy
        operands = (torch.cat([ql_nope, q_pe], dim=-1), keys, keys[..., : self.kv_lora_rank])
        scales = dict.fromkeys(("k_scales_zeros", "v_scales_zeros"), k_scale if codes else None)
        options = {"causal": True, "quant_policy": policy.FP8 if codes else policy.NONE, **scales}
        batch = (self._decode_metadata.seq_lens, self._decode_metadata.block_table)
        return self.library.flash_attn_with_kvcache(*operands, *batch, softmax_scale=self.scale, **options)


packaged.interpreted(LmdeployPrefillBackend, InterpretedLmdeploy)
packaged.interpreted(LmdeployDecodeBackend, InterpretedLmdeploy)

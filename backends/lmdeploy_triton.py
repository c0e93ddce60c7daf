"""LMDEPLOY_TRITON: LMDeploy 0.18.0's Triton kernels, ``lmdeploy/pytorch/kernels/cuda``."""

from importlib import import_module
from types import ModuleType

import torch
from torch import Tensor

from mla_conformance.backends import conversions, indexer, library_roles, packaged, prepare
from mla_conformance.backends.declaration import Precision, SelectionForm, SelectionOrder

DISTRIBUTIONS = "lmdeploy triton"
_KERNELS = "lmdeploy.pytorch.kernels.cuda"
_DEVICE = {"multi_processor_count": 16, "compute_capability": (9, 0), "warps_per_sm": 64, "blocks_per_sm": 32}
"""What stands for the device where there is none."""


class InterpretedLmdeploy(packaged.InterpretedLibrary):
    """A module without a GPU, whose size it asks for; the interpreter replaces Triton's functions by their own name."""

    def interpreted(self) -> ModuleType:
        module, language = super().interpreted(), import_module("triton.language")
        utilities = packaged.Library(f"{_KERNELS}.utils", self.distribution, self.command).load()
        for asking in (module, utilities):
            vars(asking).update(get_device_props=lambda device=None: _DEVICE, is_cuda=lambda: False)
        vars(module).update(tl_exp2=lambda x: language.exp2(x), tl_log2=lambda x: language.log2(x))
        return module


def lmdeploy_library(module: str) -> packaged.Library:
    """A module of LMDeploy's kernels."""
    return packaged.in_extra("lmdeploy", f"{_KERNELS}.{module}")


class LmdeployPrefillBackend(library_roles.RaggedPrefillBackend):
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

    def attend(self, q: Tensor, k: Tensor, v: Tensor, batch: conversions.RaggedBatch, out: Tensor | None) -> Tensor:
        options = {"softmax_scale": self.scale, "causal": True, "kv_layout": "shd"}
        return self.library.flash_attn_varlen_func(q, k, v, **batch.cumulative, **options)


class LmdeployDecodeBackend(library_roles.PagedDecodeBackend):
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


_PAGE, _HEAD_DIM, _E4M3 = 64, 128, torch.float8_e4m3fn
_POWERS_OF_TWO: list[int | packaged.MultipleOf] = [1 << exponent for exponent in range(1, 12)]
_FEWER = ("leaves out logits of -1e6 and below", "as it is")
_TOPK = lmdeploy_library("bitonic_topk")


class LmdeployTopKBackend(library_roles.TopKKernel):
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


class LmdeployIndexerBackend(library_roles.IndexerKernel):
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
    refused = {"gathered keys not supported": lambda c, _: not c.paged}

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
        lengths = indexer.bounds_of(self._sparse_metadata)
        return self.libraries[1].load().bitonic_topk(logits.contiguous(), lengths, lengths, topk_tokens)


class LmdeployPrepareBackend(packaged.LibraryKernel, prepare.MLAPrepareBackend):
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
    refused = {"{c.preparation.rope_dim} rotated columns not supported": lambda c, _: c.preparation.rope_dim != 64}

    def run_prepare_index(
        self, q: Tensor, k: Tensor, weights: Tensor, k_norm_weight: Tensor, k_norm_bias: Tensor
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        x, norm = self._prepare_metadata, (k_norm_weight, k_norm_bias)
        prepare.check_prepare_call(self, x, (q, k, weights, *norm))
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

"""FLASHMLA, FLASHMLA_SPARSE: DeepSeek's kernels for Hopper, from whichever build of ``flash_mla`` has them."""

import inspect
from typing import Any

import torch
from torch import Tensor

from mla_conformance.backends import cache_dtypes, decode, graph_support, library_roles, packaged
from mla_conformance.backends.conversions import aligned
from mla_conformance.backends.selected import Selected, SelectedKeysBackend

_NOTE = "it asks for torch 2.14.1 and runs on 2.11 with --no-deps too"
FORK = packaged.in_extra("flashmla", "flash_mla", "sgl-flash-mla", _NOTE)  # the build on the package index
_DEEPSEEK = packaged.Library("flash_mla", "flash-mla", FORK.command)


class FlashMLADecodeBackend(library_roles.PagedDecodeBackend):
    name = "FLASHMLA"
    libraries = (FORK,)
    devices = packaged.HOPPER
    supported_block_sizes = [64]
    supported_query_len = None
    cudagraph_support = packaged.UNIFORM_BATCH
    declaration = packaged.declared(
        "sgl-flash-mla flash-mla torch",
        packaged.JOINS_Q,
        ("LSE [B, N, queries of a request]", "[N, T]"),
        packaged.LSE_INFINITE,
        ("a schedule holds for one batch of lengths", "kept until the next; a graph has its own, made on the device"),
        ("faults on rows that do not start at multiples of 16 bytes", "such a cache is copied"),
        ("reads an e4m3 cache only where a list of tokens is given", "declared unsupported"),
        ("sgl-flash-mla: reads one without a list too, under queries in e4m3", "declared unsupported"),
        ("sgl-flash-mla: dense decode on request only", "use_legacy"),
    )

    @classmethod
    def lacks(cls) -> str:
        library, build, reason = FORK.load(), FORK if is_fork(FORK.load()) else _DEEPSEEK, ""
        schedule = inspect.signature(library.get_mla_metadata).parameters.values()
        if build is FORK:
            legacy = library.has_legacy()
            reason = "" if legacy else "it was built without its legacy kernels, dense decode among them"
        elif inspect.signature(library.flash_mla_with_kvcache).parameters["is_fp8_kvcache"].default:
            reason = "DeepSeek's release of 2026-09-30 and later ones have no dense decode"
        elif any(each.kind is each.POSITIONAL_OR_KEYWORD for each in schedule):
            reason = "its get_mla_metadata takes lengths: a version before 1.0.0+9241ae3, none of which was tried"
        installed = f"package {build.distribution} {build.version()} is installed"
        return f"{installed}, but {reason} ({build.command})" if reason else ""

    def kernel_evidence(self) -> dict[str, str]:
        build, served = (FORK, {"kernels": "legacy"}) if is_fork(self.library) else (_DEEPSEEK, {})
        return {build.distribution: build.version(), **served}

    def prepare_metadata(self, decode_metadata: decode.MLACommonDecodeMetadata) -> None:
        super().prepare_metadata(decode_metadata)
        self._schedule = self.library.get_mla_metadata()[0]  # made by the first call that is given it

    def attend(self, ql_nope: Tensor, q_pe: Tensor, kv_cache: Tensor, k_scale: Tensor) -> tuple[Tensor, Tensor]:
        x, library, queries = self._decode_metadata, self.library, int(self._decode_metadata.query_lens_cpu.max())
        query = torch.cat([ql_nope, q_pe], dim=-1).unflatten(0, (len(x.query_lens_cpu), queries))
        schedule = self._schedule if graph_support.may_look_at(query) else library.get_mla_metadata()[0]
        batch = (x.block_table, x.seq_lens, self.kv_lora_rank, schedule)
        options: dict[str, Any] = {"softmax_scale": self.scale, "causal": queries > 1}
        options |= {"use_legacy": True} if is_fork(library) else {}
        output, lse = library.flash_mla_with_kvcache(query, aligned(kv_cache).unsqueeze(2), *batch, **options)
        return output.flatten(0, 1), lse.transpose(0, 1).flatten(1)


def is_fork(library: Any) -> bool:
    """Whether a module ``flash_mla`` is that build."""
    return packaged.has_parameter(library.flash_mla_with_kvcache, "use_legacy")


_V32, _V4 = "fp8_ds_mla", "fp8_v4"
_FEWER_COLUMNS = "topk {c.topk} of a prefill not supported (supported: multiples of 128)"
_COARSE_SCALES = "keeps the scales of V3.2's entries in bfloat16"
_KEPT = packaged.declared(
    "sgl-flash-mla torch",
    ("decode: lengths are of requests, not of query tokens", "each token is a request of one"),
    ("LSE [B, N, queries of a request] of a decode, [T, N] of a prefill", "[N, T]"),
    ("LSE +inf in a row without keys", "-inf where it is +inf"),
    packaged.NEW_SCHEDULE,
    ("reads queries in units of 16 bytes", "queries that start elsewhere are copied"),
    ("reads V3.2's entries without lengths and without a second cache", "declared unsupported"),
    ("reads V3.2's entries with a rope part alone", "others declared unsupported"),
    ("kernels for Hopper on request only", "use_legacy"),
    rounding=packaged.DEQUANTISES,
)


def _is_v32(config: Any) -> bool:
    return config.call == "decode" and cache_dtypes.layout_of(config.kv_cache_dtype) == _V32


class FlashMLASparseBackend(packaged.LibraryKernel, SelectedKeysBackend):
    name = "FLASHMLA_SPARSE"
    libraries = (FORK,)
    devices = packaged.HOPPER
    supported_dtypes = [torch.bfloat16]
    supported_kv_cache_dtypes = [_V32, _V4]
    supported_extra_kv_cache_dtypes = [_V4]
    supported_tile_scales = ["pow2"]
    supported_latent_dims = [(512, 64), (512, 0)]
    supported_heads = [64, 128]
    supported_topk = [packaged.MultipleOf(64)]
    supports_topk_length = True
    supports_sink = True
    cudagraph_support = packaged.UNIFORM_BATCH
    declaration = packaged.further(_KEPT, (_COARSE_SCALES, "declared: powers of two, which that leaves"))

    @classmethod
    def lacks(cls) -> str:
        if not is_fork(FORK.load()):
            return f"package flash-mla is installed, but this adapter drives {FORK.distribution} ({FORK.command})"
        built = f"package {FORK.distribution} {FORK.version()} was built without its legacy kernels ({FORK.command})"
        return "" if FORK.load().has_legacy() else built

    refused = {
        _FEWER_COLUMNS: lambda c, _: c.call == "prefill" and c.topk % 128,
        f"{_V32} of keys without a rope part not supported": lambda c, _: _is_v32(c) and not c.qk_rope_head_dim,
        f"topk_length of lists over {_V32} not supported": lambda c, _: _is_v32(c) and c.topk_length,
        f"a second cache beside {_V32} not supported": lambda c, _: _is_v32(c) and c.extra_kv_cache_dtype is not None,
    }

    def attend(self, q: Tensor, sources: list[Selected], k_scale: Tensor, sink: Tensor | None) -> tuple[Tensor, Tensor]:
        library, (main, *others), latent = self.library, sources, self.kv_lora_rank
        query, indices = aligned(q), main.indices.unsqueeze(1)
        options: dict[str, Any] = {"attn_sink": sink, "topk_length": main.length, "use_legacy": True}
        if not main.paged:
            output, _, lse = library.flash_mla_sparse_fwd(query, main.cache, indices, self.scale, latent, **options)
            return output, lse.masked_fill(lse == torch.inf, -torch.inf).mT
        for other in others:
            options |= {"extra_k_cache": other.cache.unsqueeze(2), "extra_topk_length": other.length}
            options["extra_indices_in_kvcache"] = other.indices.unsqueeze(1)
        options |= {"softmax_scale": self.scale, "indices": indices}
        batch = (query.unsqueeze(1), main.cache.unsqueeze(2), None, None, latent, library.get_mla_metadata()[0])
        output, lse = library.flash_mla_with_kvcache(*batch, **options)
        return output.squeeze(1), lse.squeeze(2).masked_fill(lse.squeeze(2) == torch.inf, -torch.inf).mT


# The same decode over entries of V3.2 with any float32 scales, as SGLang writes them: no power of two hides what the
# kernel rounds them to.
FlashMLASparseBackend.also(
    "float32",
    declaration=packaged.further(_KEPT, (_COARSE_SCALES, "float32 ones, as they are")),
    supported_calls=["decode"],
    supported_kv_cache_dtypes=[_V32],
    supported_extra_kv_cache_dtypes=[],
    supported_tile_scales=["float32"],
    supported_latent_dims=[(512, 64)],
    supports_topk_length=False,
)

"""FLASHMLA: DeepSeek's dense decode kernel for Hopper, from whichever build of the module ``flash_mla`` is installed.

DeepSeek's own package had it until its release of 2026-09-30; the fork on the package index keeps it.
"""

import inspect
from typing import Any

import torch
from torch import Tensor

from mla_conformance.backends import packaged
from mla_conformance.backends.conversions import aligned
from mla_conformance.backends.paged import PagedDecodeBackend

_NOTE = "it asks for torch 2.14.1 and runs on 2.11 with --no-deps too"
FORK = packaged.in_extra("flashmla", "flash_mla", "sgl-flash-mla", _NOTE)  # the build on the package index
_DEEPSEEK = packaged.Library("flash_mla", "flash-mla", FORK.command)


class FlashMLADecodeBackend(PagedDecodeBackend):
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
        packaged.NEW_SCHEDULE,
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

    def attend(self, ql_nope: Tensor, q_pe: Tensor, kv_cache: Tensor, k_scale: Tensor) -> tuple[Tensor, Tensor]:
        x, library, queries = self._decode_metadata, self.library, int(self._decode_metadata.query_lens_cpu.max())
        query = torch.cat([ql_nope, q_pe], dim=-1).unflatten(0, (len(x.query_lens_cpu), queries))
        batch = (x.block_table, x.seq_lens, self.kv_lora_rank, library.get_mla_metadata()[0])
        options: dict[str, Any] = {"softmax_scale": self.scale, "causal": queries > 1}
        options |= {"use_legacy": True} if is_fork(library) else {}
        output, lse = library.flash_mla_with_kvcache(query, aligned(kv_cache).unsqueeze(2), *batch, **options)
        return output.flatten(0, 1), lse.transpose(0, 1).flatten(1)


def is_fork(library: Any) -> bool:
    """Whether a module ``flash_mla`` is that build."""
    return packaged.has_parameter(library.flash_mla_with_kvcache, "use_legacy")

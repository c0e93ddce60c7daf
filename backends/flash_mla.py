"""FLASHMLA: DeepSeek's dense decode kernel for Hopper, from whichever build of the module ``flash_mla`` is installed.

DeepSeek's own package had it until its release of 2026-09-30, which is sparse alone; the fork on the package index
keeps it behind ``use_legacy``. Which build it is, its functions' parameters tell.
"""

import inspect
from typing import Any

import torch
from torch import Tensor

from mla_conformance.backends.conversions import aligned
from mla_conformance.backends.dependencies import Library, extra
from mla_conformance.backends.packaged import JOINS_Q, LSE_INFINITE, NEW_SCHEDULE, UNIFORM_BATCH, declared
from mla_conformance.backends.paged import PagedDecodeBackend
from mla_conformance.backends.platform import HOPPER

FORK = Library(
    "flash_mla", "sgl-flash-mla", extra("flashmla"), "it asks for torch 2.14.1 and runs on 2.11 with --no-deps too"
)
"""The build on the package index."""
_DEEPSEEK = Library("flash_mla", "flash-mla", FORK.command)


class FlashMLADecodeBackend(PagedDecodeBackend):
    """Uniform batches over pages of 64 tokens."""

    name = "FLASHMLA"
    libraries = (FORK,)
    devices = HOPPER
    supported_block_sizes = [64]
    supported_latent_dims = [(512, 64)]
    supported_query_len = None
    cudagraph_support = UNIFORM_BATCH
    declaration = declared(
        "sgl-flash-mla flash-mla torch",
        JOINS_Q,
        ("LSE [B, N, queries of a request]", "[N, T]"),
        LSE_INFINITE,
        NEW_SCHEDULE,
        ("faults on rows that do not start at multiples of 16 bytes", "such a cache is copied"),
        ("reads an e4m3 cache only where a list of tokens is given", "declared unsupported"),
        ("sgl-flash-mla: reads one without a list too, under queries in e4m3", "declared unsupported"),
        ("sgl-flash-mla: dense decode on request only", "use_legacy"),
    )

    @classmethod
    def lacks(cls) -> list[str]:
        """The module may be there without this kernel."""
        flash_mla, reason = FORK.load(), ""
        schedule = inspect.signature(flash_mla.get_mla_metadata).parameters.values()
        if is_fork(flash_mla):
            reason = (
                "" if flash_mla.has_legacy() else "it was built without its legacy kernels, dense decode among them"
            )
        elif inspect.signature(flash_mla.flash_mla_with_kvcache).parameters["is_fp8_kvcache"].default:
            reason = "DeepSeek's release of 2026-09-30 and later ones have no dense decode"
        elif any(each.kind is each.POSITIONAL_OR_KEYWORD for each in schedule):
            reason = "its get_mla_metadata takes lengths: a version before 1.0.0+9241ae3, none of which was tried"
        build = FORK if is_fork(flash_mla) else _DEEPSEEK
        name = f"package {build.distribution} {build.version()}"
        return [f"{name} is installed, but {reason} ({build.command})"] if reason else []

    def kernel_evidence(self) -> dict[str, str]:
        if is_fork(FORK.load()):
            return {FORK.distribution: FORK.version(), "kernels": "legacy"}
        return {_DEEPSEEK.distribution: _DEEPSEEK.version()}

    def attend(self, ql_nope: Tensor, q_pe: Tensor, kv_cache: Tensor, k_scale: Tensor) -> tuple[Tensor, Tensor]:
        metadata, flash_mla = self._decode_metadata, FORK.load()
        requests, queries = len(metadata.query_lens_cpu), int(metadata.query_lens_cpu.max())
        query = torch.cat([ql_nope, q_pe], dim=-1).view(requests, queries, self.num_heads, -1)
        schedule, _ = flash_mla.get_mla_metadata()
        batch = (metadata.block_table, metadata.seq_lens, self.kv_lora_rank, schedule)
        options: dict[str, Any] = {"softmax_scale": self.scale, "causal": queries > 1}
        options |= {"use_legacy": True} if is_fork(flash_mla) else {}
        output, lse = flash_mla.flash_mla_with_kvcache(query, aligned(kv_cache).unsqueeze(2), *batch, **options)
        return output.flatten(0, 1), lse.transpose(0, 1).flatten(1)


def is_fork(flash_mla: Any) -> bool:
    """Whether a module ``flash_mla`` is that build."""
    return "use_legacy" in inspect.signature(flash_mla.flash_mla_with_kvcache).parameters

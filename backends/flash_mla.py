"""FLASHMLA: DeepSeek's dense decode kernel for Hopper, from whichever build of the module ``flash_mla`` is installed.

DeepSeek's own package had it until its release of 2026-09-30, which is sparse alone; the fork on the package index
keeps it behind ``use_legacy``. Which build it is, its functions' parameters tell.
"""

import inspect
from typing import Any, ClassVar

import torch
from torch import Tensor

from mla_conformance.backends.block_size import MultipleOf
from mla_conformance.backends.conversions import aligned
from mla_conformance.backends.declaration import Declaration, Deviation
from mla_conformance.backends.dependencies import Library, extra
from mla_conformance.backends.graph_support import AttentionCGSupport
from mla_conformance.backends.paged import PagedDecodeBackend
from mla_conformance.backends.platform import HOPPER, Devices

FORK = Library(
    "flash_mla", "sgl-flash-mla", extra("flashmla"), "it asks for torch 2.14.1 and runs on 2.11 with --no-deps too"
)
"""The build on the package index."""

_DEEPSEEK = Library("flash_mla", "flash-mla", FORK.command)


class FlashMLADecodeBackend(PagedDecodeBackend):
    """Uniform batches over pages of 64 tokens."""

    name: ClassVar[str] = "FLASHMLA"
    supported_block_sizes: ClassVar[list[int | MultipleOf]] = [64]
    libraries: ClassVar[tuple[Library, ...]] = (FORK,)
    devices: ClassVar[Devices] = HOPPER
    supported_latent_dims: ClassVar[list[tuple[int, int]]] = [(512, 64)]
    supported_query_len: ClassVar[int | None] = None
    cudagraph_support: ClassVar[AttentionCGSupport] = AttentionCGSupport.UNIFORM_BATCH
    declaration: ClassVar[Declaration] = Declaration(
        distributions=("sgl-flash-mla", "flash-mla", "torch"),
        deviations=(
            Deviation("wants the latent and the rope part of the query in one tensor", "joins them"),
            Deviation("LSE [B, N, queries of a request]", "[N, T]"),
            Deviation("LSE +inf in a row without keys", "-inf in the rows that the lengths say see no key"),
            Deviation("a schedule holds for one batch of lengths", "a new one at each call, made on the device"),
            Deviation("faults on rows that do not start at multiples of 16 bytes", "such a cache is copied"),
            Deviation("reads an e4m3 cache only where a list of tokens is given", "declared unsupported"),
            Deviation("sgl-flash-mla: reads one without a list too, under queries in e4m3", "declared unsupported"),
            Deviation("sgl-flash-mla: dense decode on request only", "use_legacy"),
        ),
    )

    @classmethod
    def lacks(cls) -> list[str]:
        """The module may be there without this kernel."""
        library = _package()
        name = f"package {library.distribution} {library.version()}"
        return [f"{name} is installed, but {reason} ({library.command})" for reason in _lacks(library.load())]

    def kernel_evidence(self) -> dict[str, str]:
        """Which build served."""
        library = _package()
        kernels = {"kernels": "legacy"} if is_fork(library.load()) else {}
        return {library.distribution: library.version(), **kernels}

    def attend(self, ql_nope: Tensor, q_pe: Tensor, kv_cache: Tensor, k_scale: Tensor) -> tuple[Tensor, Tensor]:
        """See :class:`PagedDecodeBackend`."""
        metadata, library = self._decode_metadata, FORK.load()
        requests, queries = len(metadata.query_lens_cpu), int(metadata.query_lens_cpu.max())
        query = torch.cat([ql_nope, q_pe], dim=-1).view(requests, queries, self.num_heads, -1)
        schedule, _ = library.get_mla_metadata()
        build: dict[str, Any] = {"use_legacy": True} if is_fork(library) else {}
        output, lse = library.flash_mla_with_kvcache(
            query,
            aligned(kv_cache).unsqueeze(2),
            metadata.block_table,
            metadata.seq_lens,
            self.kv_lora_rank,
            schedule,
            softmax_scale=self.scale,
            causal=queries > 1,
            **build,
        )
        return output.flatten(0, 1), lse.transpose(0, 1).flatten(1)


def _package() -> Library:
    """The distribution that the installed module comes from."""
    return FORK if is_fork(FORK.load()) else _DEEPSEEK


def is_fork(library: Any) -> bool:
    """Whether a module ``flash_mla`` is that build."""
    return "use_legacy" in inspect.signature(library.flash_mla_with_kvcache).parameters


def _lacks(library: Any) -> list[str]:
    """Why this build has no dense decode kernel to call; empty if it has."""
    if is_fork(library):
        return [] if library.has_legacy() else ["it was built without its legacy kernels, dense decode among them"]
    if inspect.signature(library.flash_mla_with_kvcache).parameters["is_fp8_kvcache"].default:
        return ["DeepSeek's release of 2026-09-30 and later ones have no dense decode"]
    if any(p.kind is p.POSITIONAL_OR_KEYWORD for p in inspect.signature(library.get_mla_metadata).parameters.values()):
        return ["its get_mla_metadata takes lengths: a version before 1.0.0+9241ae3, none of which was tried"]
    return []

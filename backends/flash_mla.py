"""FLASHMLA: DeepSeek's dense decode kernel for Hopper, built from its repository; no package index has it built."""

from typing import ClassVar

import torch

from mla_conformance.backends.block_size import MultipleOf
from mla_conformance.backends.conversions import aligned
from mla_conformance.backends.declaration import Declaration, Deviation
from mla_conformance.backends.dependencies import Library
from mla_conformance.backends.graph_support import AttentionCGSupport
from mla_conformance.backends.paged import PagedDecodeBackend
from mla_conformance.backends.platform import DeviceCapability

_LIBRARY = Library(
    "flash_mla",
    "flash-mla",
    "pip install --no-build-isolation git+https://github.com/deepseek-ai/FlashMLA",
    "flash-mla on PyPI lacks its headers and does not build",
)
_PAGE = 64


class FlashMLADecodeBackend(PagedDecodeBackend):
    """Uniform batches over pages of 64 tokens."""

    libraries: ClassVar[tuple[Library, ...]] = (_LIBRARY,)
    needed_capability: ClassVar[str] = "9.0"
    supported_latent_dims: ClassVar[list[tuple[int, int]]] = [(512, 64)]
    supported_query_len: ClassVar[int | None] = None
    cudagraph_support: ClassVar[AttentionCGSupport] = AttentionCGSupport.UNIFORM_BATCH
    declaration: ClassVar[Declaration] = Declaration(
        distributions=("flash-mla", "torch"),
        deviations=(
            Deviation("wants the latent and the rope part of the query in one tensor", "joins them"),
            Deviation("LSE [B, N, queries of a request]", "[N, T]"),
            Deviation("LSE +inf in a row without keys", "-inf in the rows that the lengths say see no key"),
            Deviation("a schedule holds for one batch of lengths", "a new one at each call, made on the device"),
            Deviation("faults on rows that do not start at multiples of 16 bytes", "such a cache is copied"),
            Deviation("reads an e4m3 cache only where a list of tokens is given", "declared unsupported"),
        ),
    )

    @staticmethod
    def get_name() -> str:
        """Name of the backend."""
        return "FLASHMLA"

    @staticmethod
    def get_supported_kernel_block_sizes() -> list[int | MultipleOf]:
        """Pages of 64 tokens."""
        return [_PAGE]

    @classmethod
    def supports_compute_capability(cls, device_capability: DeviceCapability | None) -> bool:
        """Hopper."""
        return device_capability is not None and device_capability.major == 9

    def attend(
        self, ql_nope: torch.Tensor, q_pe: torch.Tensor, kv_cache: torch.Tensor, k_scale: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """See :class:`PagedDecodeBackend`."""
        metadata, library = self._decode_metadata, _LIBRARY.load()
        requests, queries = len(metadata.query_lens_cpu), int(metadata.query_lens_cpu.max())
        query = torch.cat([ql_nope, q_pe], dim=-1).view(requests, queries, self.num_heads, -1)
        schedule, _ = library.get_mla_metadata()
        output, lse = library.flash_mla_with_kvcache(
            query,
            aligned(kv_cache).unsqueeze(2),
            metadata.block_table,
            metadata.seq_lens,
            self.kv_lora_rank,
            schedule,
            softmax_scale=self.scale,
            causal=queries > 1,
        )
        return output.flatten(0, 1), lse.transpose(0, 1).flatten(1)

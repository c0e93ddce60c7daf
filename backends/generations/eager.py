"""EAGER behind the other generations of the prefill interface."""

from typing import Any, ClassVar

import torch
from torch import Tensor

from mla_conformance.backends.eager import EagerKernel, EagerPrefillBackend
from mla_conformance.backends.generations import earlier, present
from mla_conformance.backends.kernel import NamedKernel
from mla_conformance.backends.metadata import MLACommonPrefillMetadata


class EagerPrefillImpl(earlier.MLAPrefillImpl):
    requires_v_padding = False
    kernel: ClassVar[type[EagerPrefillBackend]] = EagerPrefillBackend  # what computes

    def __init__(self, *, device: torch.device, **sizes: Any) -> None:
        super().__init__(**sizes, device=device)
        self._kernel = self.kernel(**sizes)

    def run_prefill_new_tokens(
        self, prefill_metadata: MLACommonPrefillMetadata, q: Tensor, k: Tensor, v: Tensor, return_softmax_lse: bool
    ) -> Tensor | tuple[Tensor, Tensor]:
        self._kernel.prepare_metadata(prefill_metadata)
        return self._kernel.run_prefill_new_tokens(q, k, v, return_softmax_lse)

    def run_prefill_context_chunk(
        self, prefill_metadata: MLACommonPrefillMetadata, chunk_idx: int, q: Tensor, k: Tensor, v: Tensor
    ) -> tuple[Tensor, Tensor]:
        self._kernel.prepare_metadata(prefill_metadata)
        return self._kernel.run_prefill_context_chunk(chunk_idx, q, k, v)


class EarlierEagerPrefillBackend(NamedKernel, earlier.MLAPrefillBackend):
    name, variant = "EAGER", "earlier"
    supported_dtypes = EagerPrefillBackend.supported_dtypes
    declaration = EagerPrefillBackend.declaration

    @staticmethod
    def get_prefill_impl_cls() -> type[earlier.MLAPrefillImpl]:
        return EagerPrefillImpl


class PresentEagerPrefillBackend(EagerKernel, present.MLAPrefillBackend):
    variant = "present"

    def supports_out(self) -> bool:
        return True

    def run_prefill_context_chunk(
        self, chunk: present.ContextChunk, q: Tensor, k: Tensor, v: Tensor, out: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        query_start_loc, key_start_loc = chunk.query_start_loc.tolist(), chunk.cu_seq_lens.tolist()
        accumulated, lse = self._batch(q, k, v, query_start_loc, key_start_loc, causal=False)
        return self._store(accumulated, q.dtype, out, None), lse

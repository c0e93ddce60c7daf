"""The present generation of the MLA prefill interface, as in vLLM 0.33: context chunks are objects, not indices.

A chunk is a run of neighbouring requests that all have keys in it, of which only the first may continue a context that
an earlier chunk began. Symbols: T query tokens, N heads, V value head dim; n requests, t query tokens and s keys of one
chunk.
"""

from abc import abstractmethod
from dataclasses import dataclass
from typing import Any, Self

from torch import Tensor

from mla_conformance.backends import metadata
from mla_conformance.backends.interface import PrefillKernelBackend


@dataclass
class ContextChunk:
    """A slice of the cached context of a run of requests."""

    index: int  # position in the plan
    request_slice: slice  # the requests of the run
    token_slice: slice  # their query tokens among those of the batch
    continuation_token_end: int  # end of the first request's query tokens in the batch
    is_continuation: bool  # whether an earlier chunk began the first request's context
    num_context_tokens: int  # s
    query_start_loc: Tensor  # [n + 1] int32, on the device, 0 first
    max_query_len: int  # longest query of the run
    cu_seq_lens: Tensor  # [n + 1] int32, on the device; delimits the keys of each request
    starts: Tensor  # [n] int32, on the device; first context position of each request
    max_seq_len: int  # most keys of a request
    seq_lens: Tensor  # [n] int32, on the CPU
    token_to_seq: Tensor  # [s] int32, on the device; the request of each key, counted from the run's first
    all_rows_active: bool  # whether every request has queries and keys
    # with decode context parallelism only, as all that follows but ``num_local_context_tokens``: keys on this rank,
    # padded where ranks share the sequences
    padded_local_seq_lens: list[int] | None = None
    local_context_lens_allranks: list[list[int]] | None = None
    padded_local_cu_seq_lens: Tensor | None = None
    padded_local_token_to_seq: Tensor | None = None
    num_local_context_tokens: int = 0
    local_starts: list[int] | None = None

    @property
    def num_requests(self) -> int:
        return int(self.request_slice.stop - self.request_slice.start)


@dataclass
class ChunkedContextMetadata:
    """All chunks of a batch of B requests."""

    context_lens: Tensor  # [B] int32, on the device
    workspace: Tensor  # [workspace tokens, L + R], holds a chunk's gathered latents
    chunks: list[ContextChunk]  # in the order in which they are attended to
    context_lens_list: list[int]  # the same lengths, on the host
    empty_token_slices: list[slice]  # query tokens of each request without context
    dcp_manager: Any = None  # collectives of decode context parallelism; None without


@dataclass
class MLACommonPrefillMetadata(metadata.MLACommonPrefillMetadata):
    """What a prefill backend may know of a batch, with this generation's chunks.

    Attributes:
        chunked_context: None when no request has cached context.
    """

    chunked_context: ChunkedContextMetadata | None = None  # type: ignore[assignment]
    prefill_backend: Any = None  # the instance that was prepared with this metadata
    use_dense_mha: bool = False  # a sparse model's choice of dense attention; never here
    topk_mask_workspace: Tensor | None = None  # a sparse model's workspace; never here


class MLAPrefillBackend(PrefillKernelBackend):
    """Prefill attention as vLLM calls it today."""

    def supports_out(self) -> bool:
        """Whether both entries write a given ``out`` [tokens, N, V] in place and return it.

        A backend that says no may also return more than V columns, of which its caller takes the first V.
        """
        return False

    def clone(self) -> Self:
        """Another instance of the same configuration; a metadata builder prepares one of its own."""
        return type(self)(**self.sizes)

    @abstractmethod
    def run_prefill_context_chunk(
        self, chunk: ContextChunk, q: Tensor, k: Tensor, v: Tensor, out: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """Unmasked attention of a run's new tokens to one chunk of its cached context.

        Args:
            chunk: one of the prepared ``chunked_context.chunks``.
            q: [t, N, P + R], the run's query tokens.
            k: [s, N, P + R].
            v: [s, N, V]; any strides.
            out: [t, N, V] to be written in place, given only to a backend that supports it.

        Returns (output [t, N, V], lse [N, t] float32, natural logarithm).
        """

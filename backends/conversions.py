"""What the adapters convert: lengths, LSE base and layout, padding of head dims, rows without keys."""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from mla_conformance.backends.metadata import MLACommonPrefillMetadata

ALIGNMENT = 16
"""Bytes; GPU kernels load and store in units of it, and few of them check."""


@dataclass(frozen=True)
class RaggedBatch:
    """The lengths of one call: B requests, packed one after the other.

    Attributes:
        chunk_idx: the context chunk that is attended to; None for the new tokens, which attend causally.
    """

    chunk_idx: int | None
    query_start_loc: Tensor  # [B + 1] int32, on the device
    key_start_loc: Tensor  # [B + 1] int32, on the device
    query_lens: tuple[int, ...]  # on the host
    key_lens: tuple[int, ...]  # on the host

    @staticmethod
    def new_tokens(metadata: MLACommonPrefillMetadata) -> "RaggedBatch":
        """Each request's new tokens against themselves."""
        lengths = _query_lens(metadata)
        return RaggedBatch(None, metadata.query_start_loc, metadata.query_start_loc, lengths, lengths)

    @staticmethod
    def context_chunk(metadata: MLACommonPrefillMetadata, chunk_idx: int) -> "RaggedBatch":
        """The new tokens against one chunk of the cached context.

        Raises:
            ValueError: the metadata has no chunked context.
        """
        context = metadata.chunked_context
        if context is None:
            raise ValueError(f"context chunk {chunk_idx} asked for, but the prepared metadata has no chunked context")
        key_lens = tuple(context.seq_lens[chunk_idx].tolist())
        return RaggedBatch(
            chunk_idx, metadata.query_start_loc, context.cu_seq_lens[chunk_idx], _query_lens(metadata), key_lens
        )

    @property
    def causal(self) -> bool:
        """Whether the mask is causal; query and key lengths are then the same."""
        return self.chunk_idx is None

    @cached_property
    def query_tokens(self) -> int:
        """Rows of q that count."""
        return sum(self.query_lens)

    @cached_property
    def key_tokens(self) -> int:
        """Rows of k and v that count."""
        return sum(self.key_lens)

    @cached_property
    def max_query_len(self) -> int:
        return max(self.query_lens)

    @cached_property
    def max_key_len(self) -> int:
        return max(self.key_lens)

    @property
    def cumulative(self) -> dict[str, Any]:
        """The lengths by the names that functions after ``flash_attn_varlen_func`` give them."""
        starts = {"cu_seqlens_q": self.query_start_loc, "cu_seqlens_k": self.key_start_loc}
        return {**starts, "max_seqlen_q": self.max_query_len, "max_seqlen_k": self.max_key_len}

    def requests(self) -> Iterator[tuple[slice, slice]]:
        """Rows of q and of k of each request that has both."""
        ends = zip(accumulate(self.query_lens), accumulate(self.key_lens), strict=True)
        for queries, keys, (last_query, last_key) in zip(self.query_lens, self.key_lens, ends, strict=True):
            if queries and keys:
                yield slice(last_query - queries, last_query), slice(last_key - keys, last_key)

    def without_empty_requests(self) -> "RaggedBatch":
        """The same rows as a batch of requests that have queries; where these are the keys' requests too."""
        kept = [index for index, queries in enumerate(self.query_lens) if queries]
        lengths = [tuple(each[index] for index in kept) for each in (self.query_lens, self.key_lens)]
        bounds = torch.tensor([*kept, len(self.query_lens)], device=self.query_start_loc.device)
        return RaggedBatch(self.chunk_idx, self.query_start_loc[bounds], self.key_start_loc[bounds], *lengths)

    def rows_without_keys(self) -> Tensor | None:
        """[T] bool on the device, or None if every row sees a key; launches no synchronisation."""
        if all(keys or not queries for queries, keys in zip(self.query_lens, self.key_lens, strict=True)):
            return None
        keyless = self.key_start_loc.diff() == 0
        return keyless.repeat_interleave(self.query_start_loc.diff(), output_size=self.query_tokens)


def starts_of(lengths: Tensor) -> Tensor:
    """[B + 1] int32: where each of B requests starts, and the end."""
    return pad(lengths.cumsum(0), (1, 0)).int()


def _query_lens(metadata: MLACommonPrefillMetadata) -> tuple[int, ...]:
    lengths = metadata.query_lens_cpu
    return tuple((metadata.query_start_loc.diff() if lengths is None else lengths).tolist())


def pad_head_dim(x: Tensor, width: int) -> Tensor:
    """``x`` [tokens, N, D] with zeros up to ``width`` columns; ``x`` itself if it has them."""
    return x if x.shape[-1] == width else pad(x, (0, width - x.shape[-1]))


def aligned(x: Tensor) -> Tensor:
    """``x``, copied unless its columns are adjacent and every row of it starts at a multiple of 16 bytes.

    Its columns must fill a multiple of 16 bytes, or no copy would help.
    """
    rows = [stride * x.element_size() for stride, size in zip(x.stride()[:-1], x.shape[:-1], strict=True) if size > 1]
    misaligned = any(offset % ALIGNMENT for offset in (x.data_ptr(), *rows))
    return x.clone(memory_format=torch.contiguous_format) if misaligned or x.stride(-1) != 1 else x


def natural_heads_first(lse: Tensor) -> Tensor:
    """[T, N] of logarithms to base 2 as [N, T] of natural ones."""
    return lse.mT * math.log(2)


def rows_that_count(padded: Tensor, batch: RaggedBatch) -> Tensor:
    """[N, T] of an LSE [B, at least the longest query, N] that is padded a request; launches no synchronisation."""
    lengths = batch.query_start_loc.diff()
    requests = torch.arange(len(lengths), device=padded.device)
    request = requests.repeat_interleave(lengths, output_size=batch.query_tokens)
    position = torch.arange(batch.query_tokens, device=padded.device) - batch.query_start_loc[request]
    return padded[request, position].mT


def blank_lse(lse: Tensor, batch: RaggedBatch) -> Tensor:
    """``lse`` [N, T] with -inf in the rows that see no key, whatever the kernel left there."""
    keyless = batch.rows_without_keys()
    return lse if keyless is None else lse.masked_fill(keyless, -torch.inf)


def blank_output(output: Tensor, batch: RaggedBatch) -> Tensor:
    """``output`` [T, N, V], set to 0 in place in the rows that see no key, whatever the kernel left there."""
    keyless = batch.rows_without_keys()
    return output if keyless is None else output.masked_fill_(keyless[:, None, None], 0.0)

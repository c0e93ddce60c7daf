"""What the adapters convert: lengths, LSE base and layout, padding of head dims, rows without keys."""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from mla_conformance.backends.metadata import MLACommonPrefillMetadata

ALIGNMENT = 16  # bytes; GPU kernels load and store in units of it, and few of them check


@dataclass(frozen=True)
class RaggedBatch:
    chunk_idx: int | None  # the context chunk that is attended to; None for the new tokens, which attend causally
    query_start_loc: Tensor  # [B + 1] int32, on the device
    key_start_loc: Tensor  # [B + 1] int32, on the device
    query_lens: tuple[int, ...]  # on the host
    key_lens: tuple[int, ...]  # on the host

    @staticmethod
    def of(metadata: MLACommonPrefillMetadata, chunk_idx: int | None = None) -> "RaggedBatch":
        starts, context, on_host = metadata.query_start_loc, metadata.chunked_context, metadata.query_lens_cpu
        query_lens = tuple((starts.diff() if on_host is None else on_host).tolist())
        if chunk_idx is None:
            return RaggedBatch(None, starts, starts, query_lens, query_lens)
        if context is None:
            raise ValueError(f"context chunk {chunk_idx} asked for, but the prepared metadata has no chunked context")
        key_lens = tuple(context.seq_lens[chunk_idx].tolist())
        return RaggedBatch(chunk_idx, starts, context.cu_seq_lens[chunk_idx], query_lens, key_lens)

    @property
    def causal(self) -> bool:
        return self.chunk_idx is None

    @property
    def query_tokens(self) -> int:
        return sum(self.query_lens)

    @property
    def key_tokens(self) -> int:
        return sum(self.key_lens)

    @property
    def lengths(self) -> tuple[Tensor, Tensor, int, int]:  # as torch's own operators take them
        return self.query_start_loc, self.key_start_loc, max(self.query_lens), max(self.key_lens)

    @property
    def cumulative(self) -> dict[str, Any]:  # as functions after ``flash_attn_varlen_func`` call them
        return dict(zip(("cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "max_seqlen_k"), self.lengths, strict=True))

    def requests(self) -> Iterator[tuple[slice, slice]]:  # rows of q and of k of each that has both
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

    def rows_that_count(self, padded: Tensor) -> Tensor:
        """[N, T] of an LSE [B, at least the longest query, N] that is padded a request; launches no synchronisation."""
        lengths = self.query_start_loc.diff()
        requests = torch.arange(len(lengths), device=padded.device)
        request = requests.repeat_interleave(lengths, output_size=self.query_tokens)
        position = torch.arange(self.query_tokens, device=padded.device) - self.query_start_loc[request]
        return padded[request, position].mT


def starts_of(lengths: Tensor) -> Tensor:
    """[B + 1] int32: where each of B requests starts, and the end."""
    return pad(lengths.cumsum(0), (1, 0)).int()


def pad_head_dim(x: Tensor, width: int) -> Tensor:
    """``x`` [tokens, N, D] with zeros up to ``width`` columns; ``x`` itself if it has them."""
    return x if x.shape[-1] == width else pad(x, (0, width - x.shape[-1]))


def aligned(x: Tensor) -> Tensor:
    """``x``, copied unless its columns are adjacent and every row of it starts at a multiple of 16 bytes."""
    rows = [stride * x.element_size() for stride, size in zip(x.stride()[:-1], x.shape[:-1], strict=True) if size > 1]
    misaligned = any(offset % ALIGNMENT for offset in (x.data_ptr(), *rows))
    return x.clone(memory_format=torch.contiguous_format) if misaligned or x.stride(-1) != 1 else x


def writable(out: Tensor | None, columns: int = 0) -> Tensor | None:
    """``out`` if a kernel can write it as it is: without gaps, and where its columns are told, aligned and so wide."""
    if out is None or not out.is_contiguous() or (columns and (out.shape[-1] != columns or aligned(out) is not out)):
        return None
    return out


def natural_heads_first(lse: Tensor) -> Tensor:
    """[T, N] of logarithms to base 2 as [N, T] of natural ones."""
    return lse.mT * math.log(2)

"""What library adapters have in common around attention: indexers, top-k, preparations and operations on caches."""

from abc import abstractmethod
from typing import Any

import torch
from torch import Tensor

from mla_conformance.backends import cache
from mla_conformance.backends.indexer import MLAIndexerBackend, check_index_call
from mla_conformance.backends.operands import takes
from mla_conformance.backends.packaged import LibraryKernel
from mla_conformance.backends.topk import MLATopKBackend, check_topk_call


class IndexerKernel(LibraryKernel, MLAIndexerBackend):
    def run_index_logits(self, q: Tensor, weights: Tensor, k: Tensor, k_scale: Tensor | None = None) -> Tensor:
        check_index_call(self, (q, weights, k, k_scale), "logits")
        return self.score(q, weights, k, k_scale)

    def run_index_topk(
        self, q: Tensor, weights: Tensor, k: Tensor, topk_tokens: int, k_scale: Tensor | None = None
    ) -> Tensor:
        check_index_call(self, (q, weights, k, k_scale), "topk", topk_tokens)
        return self.choose(self.score(q, weights, k, k_scale), topk_tokens)

    @abstractmethod
    def score(self, q: Tensor, weights: Tensor, k: Tensor, k_scale: Tensor | None) -> Tensor:
        """What ``run_index_logits`` returns."""

    def choose(self, logits: Tensor, topk_tokens: int) -> Tensor:
        raise AssertionError("not declared, so refused before")


class TopKKernel(LibraryKernel, MLATopKBackend):
    def run_top_k_per_row(self, logits: Tensor, topk_tokens: int) -> Tensor:
        check_topk_call(self, self._topk_metadata, logits, topk_tokens)
        return self.select(logits, self._topk_metadata.lengths, topk_tokens)

    @abstractmethod
    def select(self, logits: Tensor, lengths: Tensor, topk_tokens: int) -> Tensor:
        """What ``run_top_k_per_row`` returns, for rows of lengths [T]."""


class CacheKernel(LibraryKernel, cache.MLACacheBackend):
    """What is written and gathered: ``write_latent(x)`` and so on find in ``x`` what the call was given, by its name.

    A call without slots writes nothing. A gather finds besides ``starts``, the first entry of each request, ``lengths``
    [B] and ``request`` [S], that of each row.
    """

    # of those that ``supported_calls`` names
    write_latent: Any
    write_index: Any
    gather_latent: Any
    gather_index: Any

    @takes(cache.MLACacheBackend.run_write_latent)
    def run_write_latent(self, x: Any) -> None:
        if self._is_written("write_latent", x, kv_c=x.kv_c, k_pe=x.k_pe):
            self.write_latent(x)

    @takes(cache.MLACacheBackend.run_write_index)
    def run_write_index(self, x: Any) -> None:
        if self._is_written("write_index", x, k=x.k):
            self.write_index(x)

    @takes(cache.MLACacheBackend.run_gather_latent)
    def run_gather_latent(self, x: Any) -> None:
        as_stored = x.workspace.dtype == x.kv_cache.dtype
        dtype = torch.bfloat16 if as_stored and self.kv_cache_dtype != "auto" else x.workspace.dtype
        asked = {"dequantise": not as_stored, "compress_ratio": x.compress_ratio}
        cache.require_call(self, "gather_latent", x.kv_cache, dtype, **asked)
        cache.check_workspace(self, x.kv_cache, x.workspace)
        self.gather_latent(self._looked_up(x, workspace=x.workspace))

    @takes(cache.MLACacheBackend.run_gather_index)
    def run_gather_index(self, x: Any) -> None:
        cache.require_call(self, "gather_index", x.kv_cache, torch.bfloat16, compress_ratio=x.compress_ratio)
        cache.check_forms(self, "gather_index", torch.bfloat16, kv_cache=x.kv_cache, k=x.k, k_scale=x.k_scale)
        self.gather_index(self._looked_up(x, k=x.k, k_scale=x.k_scale))

    def _is_written(self, call: str, x: Any, **rows: Tensor) -> bool:
        model = next(iter(rows.values())).dtype
        cache.require_call(self, call, x.kv_cache, model, slot_dtype=x.slot_mapping.dtype)
        cache.check_written(self, call, x.kv_cache, x.slot_mapping, **rows)
        return len(x.slot_mapping) > 0

    def _looked_up(self, x: Any, **workspaces: Tensor) -> Any:
        cache.check_gather(x, **workspaces)
        x.starts, x.lengths = x.seq_starts // x.compress_ratio, x.cu_seq_lens.diff()
        numbers = torch.arange(len(x.lengths), dtype=torch.int32, device=x.lengths.device)
        x.request = numbers.repeat_interleave(x.lengths)
        return x

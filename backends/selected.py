"""What sparse backends of ours have in common: both calls as lists over one or two caches, checked first."""

from abc import abstractmethod
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from mla_conformance.backends import cache_dtypes, kernel, operands, roles, sparse
from mla_conformance.reference.selected import NO_KEY


@dataclass(frozen=True)
class Selected:
    """Lists over one cache, or over gathered keys, which are a cache of pages of one token."""

    cache: Tensor  # [blocks, page, width], or gathered keys [S, 1, D]
    paged: bool  # whether it is a cache
    layout: str  # what its entries are; ``auto`` of gathered keys
    indices: Tensor  # [T, K] int32
    length: Tensor | None  # [T] int32, or None
    space: roles.IndexSpace  # what the lists count

    def rows(self, rows: slice) -> "Selected":
        length = None if self.length is None else self.length[rows]
        return replace(self, indices=self.indices[rows], length=length)


class SelectedKeysBackend(sparse.MLASparseBackend):
    """Operands are checked; the lists of a second cache stand behind those of the first."""

    @operands.takes(sparse.MLASparseBackend.run_sparse_decode)
    def run_sparse_decode(self, x: Any) -> Tensor | tuple[Tensor, Tensor]:
        space = self._sparse_metadata.index_space
        sources = [Selected(x.kv_cache, True, self.kv_cache_dtype, x.topk_indices, x.topk_length, space)]
        if x.extra_kv_cache is not None:
            if self.extra_kv_cache_dtype is None or x.extra_topk_indices is None:
                expected = "expected extra_topk_indices with it and its dtype at construction"
                raise ValueError(f"extra_kv_cache: {expected}, got extra_kv_cache_dtype={self.extra_kv_cache_dtype!r}")
            extra = x.extra_topk_indices, x.extra_topk_length, roles.IndexSpace.SLOT
            sources.append(Selected(x.extra_kv_cache, True, self.extra_kv_cache_dtype, *extra))
        return self._run(x.q, sources, x.k_scale, x.attn_sink, x.return_softmax_lse)

    @operands.takes(sparse.MLASparseBackend.run_sparse_prefill)
    def run_sparse_prefill(self, x: Any) -> Tensor | tuple[Tensor, Tensor]:
        gathered = Selected(x.kv, False, "auto", x.topk_indices, x.topk_length, self._sparse_metadata.index_space)
        return self._run(x.q, [gathered], x.q.new_ones((), dtype=torch.float32), x.attn_sink, x.return_softmax_lse)

    @abstractmethod
    def attend(self, q: Tensor, sources: list[Selected], k_scale: Tensor, sink: Tensor | None) -> tuple[Tensor, Any]:
        """Call the library with q [T, N, D] of any strides, the lists, and behind them those of a second cache, if any.

        Returns (output [T, N, L] of the query's dtype, lse [N, T] float32, natural logarithm, or None without).
        """

    def _run(
        self, q: Tensor, sources: list[Selected], k_scale: Tensor, sink: Tensor | None, return_softmax_lse: bool
    ) -> Tensor | tuple[Tensor, Tensor]:
        """Refuse what is not declared and what does not fit, SPEC 3.8 and 7.11, with expected and got; then attend."""
        names = (("kv_cache", "topk_indices"), ("extra_kv_cache", "extra_topk_indices"))
        named = list(zip(sources, names if sources[0].paged else (("kv", "topk_indices"),), strict=False))
        for source, (_, lists) in named:
            shape, dtype = source.indices.shape, source.indices.dtype
            if dtype != torch.int32:
                raise ValueError(f"{lists}: expected lists of torch.int32, got {dtype}; convert them")
            if len(shape) != 2 or shape[0] != len(q):
                raise ValueError(f"{lists}: expected a list for each of {len(q)} query tokens, got shape {list(shape)}")
            if source.length is not None:
                kernel.expect(
                    "topk_length", source.length, (len(q),), torch.int32, f"the length of each list of {lists}"
                )
        # Not on a stream of a caller's own, or in a graph's capture: there reading would wait for inputs that are still
        # to come, and hide a library that does not wait for them.
        reads = q.device.type != "cuda" or torch.cuda.current_stream(q.device) == torch.cuda.default_stream(q.device)
        twice = reads and not self.supports_duplicates and any(names_twice(x.indices, x.length) for x in sources)
        metadata, main, extra = self._sparse_metadata, sources[0], sources[1] if len(sources) > 1 else None
        asked: dict[str, Any] = {"index_space": main.space, "topk_length": main.length is not None}
        asked |= {"kv_cache_dtype": main.layout, "block_size": main.cache.shape[1], "topk": main.indices.shape[1]}
        asked |= {"sink": sink is not None, "extra_kv_cache_dtype": extra.layout if extra else None}
        if extra:
            asked |= {"extra_block_size": extra.cache.shape[1], "extra_topk": extra.indices.shape[1]}
        # An instance cannot see what the tile scales are; its caller asked what the class reads.
        asked |= {"tile_scales": self.supported_tile_scales[0], "dcp_world_size": metadata.dcp_world_size}
        asked |= {"call": "decode" if main.paged else "prefill", "lse": return_softmax_lse, "duplicates": twice}
        kernel.require_declared(self, q.device, sparse.MLASparseSelectorConfig, dtype=q.dtype, **asked)
        heads, width = self.num_heads, self.kv_lora_rank + self.qk_rope_head_dim
        tokens = int(metadata.query_lens_cpu.sum())
        if q.shape != (tokens, heads, width):
            raise ValueError(f"q: expected {tokens} tokens of [{heads}, {width}] by the metadata, got {list(q.shape)}")
        operands.require_forms(sparse.MLASparseBackend.run_sparse_decode, {"attn_sink": sink}, {"N": heads})
        for source, (cache, lists) in named:
            cache_dtypes.check_cache(cache, source.cache, source.layout, self, q.dtype)
            if reads:
                self._check_selection(lists, source)
        output, lse = self.attend(q, sources, k_scale, sink)
        return (output, lse) if return_softmax_lse else output

    def _check_selection(self, name: str, source: Selected) -> None:
        """Refuse lengths beyond the lists, by this name, and numbers that name nothing; reads the lists."""
        metadata, indices, length = self._sparse_metadata, source.indices, source.length
        columns = indices.shape[1]
        if length is not None and bool((off := (length < 0) | (length > columns)).any()):
            row = int(off.nonzero()[0])
            got = int(length[row])
            raise ValueError(f"topk_length: expected 0 to {columns}, the columns of {name}, got {got} in row {row}")
        if source.space is roles.IndexSpace.SLOT:
            slots = source.cache.shape[0] * source.cache.shape[1]
            limit = torch.full((1, 1), slots, device=indices.device)
        else:
            ranks = metadata.dcp_world_size if source.space is roles.IndexSpace.POSITION else 1
            # A rank is not told how many tokens others hold: at most so many more each.
            bound = metadata.seq_lens * ranks + (ranks - 1) * metadata.cp_kv_cache_interleave_size
            limit = bound[metadata.req_id_per_token.long()].unsqueeze(1)
        outside = listed(indices, length) & ((indices < NO_KEY) | (indices >= limit))
        if bool(outside.any()):
            row, column = outside.nonzero()[0].tolist()
            most = int(limit.expand(len(indices), 1)[row]) - 1
            got = int(indices[row, column])
            raise ValueError(f"{name}: expected 0 to {most}, or -1, got {got} in row {row}, column {column}")


def listed(indices: Tensor, length: Tensor | None) -> Tensor:
    """[T, K] bool: what of the lists counts and names a key."""
    named = indices != NO_KEY
    if length is None:
        return named
    return named & (torch.arange(indices.shape[1], device=indices.device) < length.unsqueeze(1))


def packed(numbers: Tensor, named: Tensor) -> tuple[Tensor, Tensor]:
    """[T, K] int32: the numbers at ``named`` [T, K] in their order, -1 behind them; [T] int32: how many they are."""
    order = named.sort(dim=1, descending=True, stable=True).indices
    return numbers.masked_fill(~named, NO_KEY).gather(1, order), named.sum(dim=1, dtype=torch.int32)


def names_twice(indices: Tensor, length: Tensor | None) -> bool:
    """Whether a list names a key more than once; reads the lists."""
    ordered = indices.masked_fill(~listed(indices, length), NO_KEY).sort(dim=1).values
    return bool(((ordered[:, 1:] == ordered[:, :-1]) & (ordered[:, 1:] != NO_KEY)).any())

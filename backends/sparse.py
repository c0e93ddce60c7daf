"""The abstract sparse MLA backend: attention of each query token to the keys that a list of its own names.

What vLLM calls a sparse MLA implementation: an indexer has scored the cached tokens and left the numbers of the best in
``topk_indices``; the kernel gathers them, from a paged cache (``run_sparse_decode``) or from rows that were gathered
before (``run_sparse_prefill``). Heads share a key of D = L + R columns, whose first L are its value; a model whose
value holds the rotated part too, such as DeepSeek V4, has R = 0. Sources: FlashMLA's ``flash_mla_with_kvcache`` with
``indices`` and ``flash_mla_sparse_fwd``, vLLM's ``flashmla_sparse``.
"""

from abc import abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from mla_conformance.backends.block_size import MultipleOf, accepts_block_size
from mla_conformance.backends.cache_dtypes import LatentKernel, layout_of
from mla_conformance.backends.declaration import NO_LSE
from mla_conformance.backends.index_space import IndexSpace
from mla_conformance.reference.cache_layout import require_layout


@dataclass
class MLASparseMetadata:
    """What a sparse backend may know of the batch; B requests, T query tokens, requests end to end.

    A row of padding is a request of one query token without keys: its list names none.
    """

    query_start_loc: Tensor  # [B + 1] int32, on the device
    req_id_per_token: Tensor  # [T] int32, on the device; the request of each query token
    # [B] int32, on the device; tokens of each request in the cache of this rank, or among the gathered keys, its new
    # ones included
    seq_lens: Tensor
    # [B, max blocks] int32, on the device, of a cache; None with gathered keys. Entries past a request's last page may
    # hold anything
    block_table: Tensor | None
    # [B] int32, on the device; row of the gathered keys at which each request begins. None with a cache
    workspace_starts: Tensor | None
    index_space: IndexSpace  # what the lists count; lists of a second cache always count its slots
    max_query_len: int  # longest query in tokens; may exceed the true one
    max_seq_len: int  # longest sequence in tokens; may exceed the true one
    query_lens_cpu: Tensor  # [B] int32, on the CPU
    seq_lens_cpu: Tensor  # [B] int32, on the CPU
    dcp_world_size: int = 1  # ranks that share the sequences' tokens
    dcp_rank: int = 0  # this rank
    cp_kv_cache_interleave_size: int = 1  # token t belongs to rank (t // this) % dcp_world_size


class MLASparseSelectorConfig(NamedTuple):
    """What a sparse backend is validated against; hashable."""

    call: str  # ``decode`` over a paged cache, or ``prefill`` over gathered keys of the queries' dtype
    dtype: torch.dtype  # of the queries and of the output
    kv_cache_dtype: str  # ``auto`` (the model's dtype), ``fp8``, or a name of ``reference.entry_formats``
    block_size: int  # tokens of a page
    kv_lora_rank: int  # L
    qk_rope_head_dim: int  # R
    num_heads: int  # N
    topk: int  # columns of the lists
    index_space: str = IndexSpace.SLOT  # what the lists count
    topk_length: bool = False  # whether lengths are handed over beside the lists
    sink: bool = False  # whether sinks are handed over
    duplicates: bool = False  # whether a list may name a key twice
    lse: bool = True  # whether the LSE is asked for
    extra_kv_cache_dtype: str | None = None  # layout of a second cache; None without one
    extra_block_size: int = 0  # tokens of its pages
    extra_topk: int = 0  # columns of its lists
    dcp_world_size: int = 1  # ranks that share a sequence
    # what the scales of an ``fp8_ds_mla`` cache are: ``float32`` numbers, or ``pow2``, powers of two
    tile_scales: str = "float32"


class MLASparseBackend(LatentKernel):
    """Attention to selected keys.

    Symbols: T query tokens, N heads on this rank, K ``topk``, L ``kv_lora_rank``, R ``qk_rope_head_dim``, D = L + R.
    """

    # ``decode``, ``prefill`` or both; the other one is refused
    supported_calls: ClassVar[list[str]] = ["decode", "prefill"]
    # those of a second cache; none of them means no second cache
    supported_extra_kv_cache_dtypes: ClassVar[list[str]] = []
    supported_heads: ClassVar[list[int]] = []  # numbers of heads; empty means any
    supported_topk: ClassVar[list[int | MultipleOf]] = [MultipleOf(1)]  # numbers of columns of a list
    supported_index_spaces: ClassVar[list[str]] = [IndexSpace.SLOT]  # what the lists may count
    supports_topk_length: ClassVar[bool] = False  # whether lengths may be handed over beside the lists
    supports_sink: ClassVar[bool] = False  # whether sinks may be
    supports_duplicates: ClassVar[bool] = True  # whether a list may name a key twice, which then counts twice

    @classmethod
    def _reasons(cls, config: MLASparseSelectorConfig) -> Iterator[str]:
        yield from cls._shape_reasons(config)
        yield from cls._list_reasons(config)
        if config.call == "decode":
            yield from cls._cache_reasons(config, config.extra_kv_cache_dtype)
            if config.extra_kv_cache_dtype is not None:
                yield from cls._extra_reasons(config)

    @classmethod
    def _shape_reasons(cls, config: MLASparseSelectorConfig) -> Iterator[str]:
        if config.call not in cls.supported_calls:
            yield f"sparse {config.call} not supported"
        yield from cls._latent_reasons(config)
        if cls.supported_heads and config.num_heads not in cls.supported_heads:
            yield f"{config.num_heads} heads not supported (supported: {cls.supported_heads})"
        if config.sink and not cls.supports_sink:
            yield "sinks not supported"
        if config.lse and not cls.returns_lse:
            yield NO_LSE

    @classmethod
    def _list_reasons(cls, config: MLASparseSelectorConfig) -> Iterator[str]:
        if not accepts_block_size(cls.supported_topk, config.topk):
            yield f"topk {config.topk} not supported"
        if config.index_space not in cls.supported_index_spaces:
            read = ", ".join(cls.supported_index_spaces)
            yield f"lists that count by {config.index_space} not supported (supported: {read})"
        if config.topk_length and not cls.supports_topk_length:
            yield "topk_length not supported"
        if config.duplicates and not cls.supports_duplicates:
            yield "lists that name a key twice not supported"

    @classmethod
    def _extra_reasons(cls, config: MLASparseSelectorConfig) -> Iterator[str]:
        if layout_of(config.extra_kv_cache_dtype or "") not in cls.supported_extra_kv_cache_dtypes:
            yield f"a second cache of {config.extra_kv_cache_dtype} not supported"
        yield from cls._page_reasons(config.extra_block_size, " of a second cache")
        if not accepts_block_size(cls.supported_topk, config.extra_topk):
            yield f"topk {config.extra_topk} of a second cache not supported"

    def __init__(
        self,
        num_heads: int,
        scale: float,
        kv_lora_rank: int,
        qk_nope_head_dim: int,
        qk_rope_head_dim: int,
        v_head_dim: int,
        kv_cache_dtype: str,
        vllm_config: Any,
        extra_kv_cache_dtype: str | None = None,
    ) -> None:
        sizes = (num_heads, scale, kv_lora_rank, qk_nope_head_dim, qk_rope_head_dim, v_head_dim)
        super().__init__(*sizes, require_layout(layout_of(kv_cache_dtype)), vllm_config)
        self.extra_kv_cache_dtype = extra_kv_cache_dtype and require_layout(layout_of(extra_kv_cache_dtype))

    def prepare_metadata(self, sparse_metadata: MLASparseMetadata) -> None:
        """Take the metadata of the next calls; called once per batch, outside of any graph capture."""
        self._sparse_metadata = sparse_metadata

    @abstractmethod
    def run_sparse_decode(
        self,
        q: Tensor,
        kv_cache: Tensor,
        k_scale: Tensor,
        topk_indices: Tensor,
        return_softmax_lse: bool,
        topk_length: Tensor | None = None,
        attn_sink: Tensor | None = None,
        extra_kv_cache: Tensor | None = None,
        extra_topk_indices: Tensor | None = None,
        extra_topk_length: Tensor | None = None,
    ) -> Tensor | tuple[Tensor, Tensor]:
        """Attention of each query token to the entries of a paged cache that its list names; no other mask.

        Args:
            q: [T, N, D], absorbed and rotated; any strides.
            kv_cache: [blocks, page, D] of the model's dtype (``auto``) or of e4m3 (``fp8``), or [blocks, page, bytes of
                an entry] uint8; the stride between blocks may exceed a packed block.
            k_scale: float32 scalar tensor, the value that code 1.0 of an ``fp8`` cache stands for; without influence
                on the other layouts.
            topk_indices: [T, K] int32, in the metadata's index space; -1 names no key, wherever it stands.
            return_softmax_lse: whether to return the LSE as well.
            topk_length: [T] int32; entries of a list from there on are no part of it, whatever they hold.
            attn_sink: [N] float32, the logit of each head's sink, natural: it takes its share of the weights, so the
                output becomes output · e^lse / (e^lse + e^sink), and the LSE stays that of the keys.
            extra_kv_cache: a second cache of ``extra_kv_cache_dtype``, attended to together with the first.
            extra_topk_indices: [T, K'] int32 slots of it, or -1.
            extra_topk_length: [T] int32, likewise.

        Returns:
            The output [T, N, L] of the query's dtype, or (output, lse) with lse [N, T] float32, natural logarithm; a
            row without keys is 0 and -inf.
        """

    @abstractmethod
    def run_sparse_prefill(
        self,
        q: Tensor,
        kv: Tensor,
        topk_indices: Tensor,
        return_softmax_lse: bool,
        topk_length: Tensor | None = None,
        attn_sink: Tensor | None = None,
    ) -> Tensor | tuple[Tensor, Tensor]:
        """Attention of each query token to the gathered rows that its list names; no other mask.

        Args:
            q: [T, N, D].
            kv: [S, 1, D] of the query's dtype.
            topk_indices: [T, K] int32 rows of ``kv``, or in the metadata's index space; -1 names none.
            return_softmax_lse: whether to return the LSE as well.
            topk_length: [T] int32.
            attn_sink: [N] float32.

        Returns:
            As of :meth:`run_sparse_decode`.
        """

"""The abstract sparse MLA backend: attention of each query token to the keys that a list of its own names.

Heads share a key of D = L + R columns, whose first L are its value; where that holds the rotated part, too, R is 0.
Sources: FlashMLA's ``flash_mla_with_kvcache`` and ``flash_mla_sparse_fwd``, vLLM's ``flashmla_sparse``.
"""

from abc import abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated, ClassVar, NamedTuple

import torch
from torch import Tensor

from mla_conformance.backends.block_size import MultipleOf
from mla_conformance.backends.cache_dtypes import LatentKernel, layout_of
from mla_conformance.backends.declaration import NO_LSE
from mla_conformance.backends.kernel import accepts_block_size, unless
from mla_conformance.backends.operands import Form, table
from mla_conformance.backends.roles import IndexSpace
from mla_conformance.reference.cache_layout import require_layout

Queries = Annotated[Tensor, Form("T, N, D")]
Cache = Annotated[Tensor, Form("blocks, page, width")]
Lists = Annotated[Tensor, Form("T, K", torch.int32)]
Lengths = Annotated[Tensor | None, Form("T", torch.int32)]
Sink = Annotated[Tensor | None, Form("N", torch.float32, "a logit for each head")]


@table
@dataclass
class MLASparseMetadata:
    """What a sparse backend may know of the batch; B requests, T query tokens, requests end to end.

    A row of padding is a request of one query token without keys: its list names none.
    """

    query_start_loc: Annotated[Tensor, Form("B + 1", torch.int32)]  # on the device
    req_id_per_token: Annotated[Tensor, Form("T", torch.int32)]  # on the device; the request of each query token
    # on the device; tokens of each request in the cache of this rank, or among the gathered keys, its new ones included
    seq_lens: Annotated[Tensor, Form("B", torch.int32)]
    # on the device, of a cache; None with gathered keys. Entries past a request's last page may hold anything
    block_table: Annotated[Tensor | None, Form("B, max blocks", torch.int32)]
    # on the device; row of the gathered keys at which each request begins. None with a cache
    workspace_starts: Annotated[Tensor | None, Form("B", torch.int32)]
    index_space: IndexSpace  # what the lists count; lists of a second cache always count its slots
    max_query_len: int  # longest query in tokens; may exceed the true one
    max_seq_len: int  # longest sequence in tokens; may exceed the true one
    query_lens_cpu: Annotated[Tensor, Form("B", torch.int32)]  # on the CPU
    seq_lens_cpu: Annotated[Tensor, Form("B", torch.int32)]  # on the CPU
    dcp_world_size: int = 1  # ranks that share the sequences' tokens
    dcp_rank: int = 0  # this rank
    cp_kv_cache_interleave_size: int = 1  # token t belongs to rank (t // this) % dcp_world_size


class MLASparseSelectorConfig(NamedTuple):
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
    tile_scales: str = "float32"  # scales of an ``fp8_ds_mla`` cache: ``float32`` numbers, or ``pow2``, powers of two


@dataclass(eq=False, repr=False)
class MLASparseBackend(LatentKernel):
    """Attention to selected keys: T query tokens, N heads on this rank, lists of K, keys of D = L + R columns."""

    extra_kv_cache_dtype: str | None = None

    supported_calls: ClassVar[list[str]] = ["decode", "prefill"]  # one of them or both; the other one is refused
    supported_extra_kv_cache_dtypes: ClassVar[list[str]] = []  # those of a second cache; none means no second cache
    supported_heads: ClassVar[list[int]] = []  # numbers of heads; empty means any
    supported_topk: ClassVar[list[int | MultipleOf]] = [MultipleOf(1)]  # numbers of columns of a list
    supported_index_spaces: ClassVar[list[str]] = [IndexSpace.SLOT]  # what the lists may count
    supports_topk_length: ClassVar[bool] = False  # whether lengths may be handed over beside the lists
    supports_sink: ClassVar[bool] = False  # whether sinks may be
    supports_duplicates: ClassVar[bool] = True  # whether a list may name a key twice, which then counts twice

    @classmethod
    def _reasons(cls, config: MLASparseSelectorConfig) -> Iterator[str]:
        heads, spaces = cls.supported_heads, cls.supported_index_spaces
        counted = f"lists that count by {config.index_space} not supported (supported: {', '.join(spaces)})"
        yield from unless(
            (config.call in cls.supported_calls, f"sparse {config.call} not supported"),
            *((False, reason) for reason in cls._latent_reasons(config)),
            (not heads or config.num_heads in heads, f"{config.num_heads} heads not supported (supported: {heads})"),
            (cls.supports_sink or not config.sink, "sinks not supported"),
            (cls.returns_lse or not config.lse, NO_LSE),
            (accepts_block_size(cls.supported_topk, config.topk), f"topk {config.topk} not supported"),
            (config.index_space in spaces, counted),
            (cls.supports_topk_length or not config.topk_length, "topk_length not supported"),
            (cls.supports_duplicates or not config.duplicates, "lists that name a key twice not supported"),
        )
        second, columns = config.extra_kv_cache_dtype, config.extra_topk
        if config.call == "decode":
            yield from cls._cache_reasons(config, second)
        if config.call == "decode" and second is not None:
            layouts = cls.supported_extra_kv_cache_dtypes
            pages, page = cls.get_supported_kernel_block_sizes(), config.extra_block_size
            yield from unless(
                (layout_of(second) in layouts, f"a second cache of {second} not supported"),
                (accepts_block_size(pages, page), f"block_size {page} of a second cache not supported"),
                (accepts_block_size(cls.supported_topk, columns), f"topk {columns} of a second cache not supported"),
            )

    def __post_init__(self) -> None:
        super().__post_init__()
        require_layout(self.kv_cache_dtype)
        self.extra_kv_cache_dtype = self.extra_kv_cache_dtype and require_layout(layout_of(self.extra_kv_cache_dtype))

    def prepare_metadata(self, sparse_metadata: MLASparseMetadata) -> None:
        self._sparse_metadata = sparse_metadata

    @abstractmethod
    @table
    def run_sparse_decode(
        self,
        q: Queries,
        kv_cache: Cache,
        k_scale: Annotated[Tensor, Form("", torch.float32)],
        topk_indices: Lists,
        return_softmax_lse: bool,
        topk_length: Lengths = None,
        attn_sink: Sink = None,
        extra_kv_cache: Annotated[Tensor | None, Form("blocks, page, width")] = None,
        extra_topk_indices: Annotated[Tensor | None, Form("T, K'", torch.int32)] = None,
        extra_topk_length: Lengths = None,
    ) -> Tensor | tuple[Tensor, Tensor]:
        """Attention of each query token to the entries of a paged cache that its list names; no other mask.

        q is absorbed and rotated, of any strides; the cache [blocks, page, D] of the model's dtype (``auto``) or of
        e4m3 (``fp8``), whose code 1.0 stands for ``k_scale``, or [blocks, page, bytes of an entry] uint8, its blocks
        any stride apart. Lists are in the metadata's index space, of a second cache its slots; -1 names no key, and
        what stands from ``topk_length`` on is no part of them. The sink of a head is a natural logit that takes its
        share of the weights: the output becomes output · e^lse / (e^lse + e^sink), and the LSE stays that of the keys.
        Returns output [T, N, L] of the query's dtype, and if asked lse [N, T] float32, natural; without keys 0, -inf.
        """

    @abstractmethod
    @table
    def run_sparse_prefill(
        self,
        q: Queries,
        kv: Annotated[Tensor, Form("S, 1, D", "model")],
        topk_indices: Lists,
        return_softmax_lse: bool,
        topk_length: Lengths = None,
        attn_sink: Sink = None,
    ) -> Tensor | tuple[Tensor, Tensor]:
        """The same over the gathered rows that lists name, or that they count in the metadata's index space."""

"""The abstract cache operations of an MLA model: entries written, entries gathered, and slots computed.

What vLLM calls ``concat_and_cache_mla``, ``indexer_k_quant_and_cache``, ``gather_and_maybe_dequant_cache``,
``cp_gather_indexer_k_quant_cache``, ``get_compressed_slot_mapping`` and ``convert_req_index_to_global_index``. Every
call writes into memory of its caller and returns nothing that is looked at. A class declares which calls it has; the
others raise. A cache is as in ``sparse`` and ``indexer``, its layouts are those of ``reference.entry_formats``.
"""

from collections.abc import Iterator
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from mla_conformance.backends.block_size import PagedKernel
from mla_conformance.backends.kernel import UnsupportedConfiguration
from mla_conformance.reference.cache_layout import CACHE_LAYOUTS
from mla_conformance.reference.entry_formats import TILE_SCALES, TILED_FORMATS

CACHE_CALLS = ("write_latent", "write_index", "gather_latent", "gather_index", "slot_mapping", "global_slots")
NO_SLOT = -1


class MLACacheSelectorConfig(NamedTuple):
    """What a class is validated against; hashable."""

    call: str  # one of :data:`CACHE_CALLS`
    dtype: torch.dtype  # of the model
    kv_cache_dtype: str  # the layout, a name of ``CACHE_LAYOUTS``
    block_size: int  # entries of a page
    kv_lora_rank: int  # L, or the columns of an indexer's key
    qk_rope_head_dim: int  # R, 0 of an indexer's key
    tile_scales: str = "float32"  # what the float32 scales of a layout are that is written, one of ``TILE_SCALES``
    slot_dtype: torch.dtype = torch.int64  # of a slot mapping
    dequantise: bool = False  # whether gathered entries become values of the model's dtype
    compress_ratio: int = 1  # tokens that an entry stands for
    dcp_world_size: int = 1  # ranks that share the tokens
    outside: bool = False  # whether lists name positions that the block table has no column for


class MLACacheBackend(PagedKernel):
    """Operations over a paged cache.

    Symbols: T tokens, B requests, S gathered entries, L, R and D columns of a latent, a rotated key and an index key.
    """

    supported_calls: ClassVar[list[str]] = list(CACHE_CALLS)  # those of :data:`CACHE_CALLS` that the class has
    supported_kv_cache_dtypes: ClassVar[list[str]] = ["auto"]  # layouts that it writes and gathers
    # what it writes as float32 scales, where it is constructed so
    supported_tile_scales: ClassVar[list[str]] = ["float32"]
    supported_slot_dtypes: ClassVar[list[torch.dtype]] = [torch.int64]  # of slot mappings
    supports_dequantise: ClassVar[bool] = True  # whether it gathers into the model's dtype
    supports_compression: ClassVar[bool] = True  # whether an entry may stand for several tokens
    supports_dcp: ClassVar[bool] = True  # whether it maps the tokens of one of several ranks
    supports_outside: ClassVar[bool] = True  # whether positions beyond the block table become -1

    @classmethod
    def _reasons(cls, config: MLACacheSelectorConfig) -> Iterator[str]:
        if config.call not in cls.supported_calls:
            yield f"{config.call} not supported"
        yield from cls._page_reasons(config.block_size)
        if config.call in CACHE_CALLS[:4] and config.kv_cache_dtype not in cls.supported_kv_cache_dtypes:
            yield f"kv_cache_dtype {config.kv_cache_dtype} not supported"
        if has_tile_scales(config.kv_cache_dtype) and config.tile_scales not in cls.supported_tile_scales:
            yield f"{config.tile_scales} scales not supported (writes {', '.join(cls.supported_tile_scales)})"
        if config.slot_dtype not in cls.supported_slot_dtypes:
            yield f"slots of {config.slot_dtype} not supported"
        asked = (
            (config.dequantise, cls.supports_dequantise, "gathering into the model's dtype"),
            (config.compress_ratio > 1, cls.supports_compression, "entries of several tokens"),
            (config.dcp_world_size > 1, cls.supports_dcp, "ranks that share the tokens"),
            (config.outside, cls.supports_outside, "positions beyond the block table"),
        )
        yield from (f"{what} not supported" for asks, declared, what in asked if asks and not declared)

    def __init__(
        self, kv_lora_rank: int, qk_rope_head_dim: int, kv_cache_dtype: str, tile_scales: str, vllm_config: Any
    ) -> None:
        if kv_cache_dtype not in CACHE_LAYOUTS:
            raise ValueError(f"kv_cache_dtype: expected one of {', '.join(CACHE_LAYOUTS)}, got {kv_cache_dtype!r}")
        if tile_scales not in TILE_SCALES:
            raise ValueError(f"tile_scales: expected one of {', '.join(TILE_SCALES)}, got {tile_scales!r}")
        self.kv_lora_rank, self.qk_rope_head_dim = kv_lora_rank, qk_rope_head_dim
        self.kv_cache_dtype, self.tile_scales, self.vllm_config = kv_cache_dtype, tile_scales, vllm_config

    def run_write_latent(
        self, kv_c: Tensor, k_pe: Tensor, kv_cache: Tensor, slot_mapping: Tensor, k_scale: Tensor
    ) -> None:
        """Write the entries of T tokens to their slots; -1 writes nothing, and so do rows from T on.

        Args:
            kv_c: [T or more, L] of the model's dtype; rows may have any stride.
            k_pe: [T or more, R], the same.
            kv_cache: [blocks, page, width]; the stride between blocks may exceed a packed block.
            slot_mapping: [T] int64 or int32, block · page + offset, none twice.
            k_scale: float32 scalar, what a code of 1.0 in an ``fp8`` cache stands for.
        """
        self._lacks("write_latent")

    def run_write_index(self, k: Tensor, kv_cache: Tensor, slot_mapping: Tensor) -> None:
        """Write the codes of index keys k [T or more, D] and their scales; otherwise as :meth:`run_write_latent`."""
        self._lacks("write_index")

    def run_gather_latent(
        self,
        kv_cache: Tensor,
        workspace: Tensor,
        block_table: Tensor,
        cu_seq_lens: Tensor,
        seq_starts: Tensor,
        k_scale: Tensor,
        compress_ratio: int = 1,
    ) -> None:
        """Gather entries of each request into rows of a workspace, one request after the other.

        Args:
            kv_cache: as of :meth:`run_write_latent`.
            workspace: [S or more, width] of the cache's dtype, for entries as they are, or [S or more, L + R] of the
                model's, for what they mean; rows from S on are not written.
            block_table: [B, columns] int32, blocks of each request; columns past its last entry may hold anything.
            cu_seq_lens: [B + 1] int32, the first row of each request, and S.
            seq_starts: [B] int32, the first token of each request that is gathered; any, not only that of a page.
            k_scale: as of :meth:`run_write_latent`.
            compress_ratio: tokens that an entry stands for; token t is in entry t // compress_ratio.
        """
        self._lacks("gather_latent")

    def run_gather_index(
        self,
        kv_cache: Tensor,
        k: Tensor,
        k_scale: Tensor,
        block_table: Tensor,
        cu_seq_lens: Tensor,
        seq_starts: Tensor,
        compress_ratio: int = 1,
    ) -> None:
        """Gather codes into k [S or more, D] e4m3 and scales into k_scale [S or more] float32; otherwise as above."""
        self._lacks("gather_index")

    def run_slot_mapping(
        self,
        slot_mapping: Tensor,
        query_start_loc: Tensor,
        positions: Tensor,
        block_table: Tensor,
        block_size: int,
        compress_ratio: int = 1,
        dcp_world_size: int = 1,
        dcp_rank: int = 0,
        cp_kv_cache_interleave_size: int = 1,
    ) -> None:
        """Fill slot_mapping [T or more] with the slot of each token; -1 where this rank writes no entry for it.

        Args:
            slot_mapping: int64 or int32; behind the last counted token it is filled with -1.
            query_start_loc: [B + 1] int32, the first token of each request, and T.
            positions: [T or more] int64, of the tokens in their requests.
            block_table: [B, columns] int32.
            block_size: entries of a page.
            compress_ratio: tokens of an entry, which the last of them writes.
            dcp_world_size: ranks, to which entry e of a request is dealt by (e // interleave) % ranks.
            dcp_rank: this one.
            cp_kv_cache_interleave_size: entries in a row that a rank gets; a divisor of ``block_size``.
        """
        self._lacks("slot_mapping")

    def run_global_slots(
        self, out: Tensor, req_id_per_token: Tensor, block_table: Tensor, token_indices: Tensor, block_size: int
    ) -> None:
        """Fill out [T, K] int32 with the slots of the positions token_indices [T, K] int32 of each row's request.

        Args:
            out: what is filled; -1 where the list holds -1, or a position that the block table has no column for.
            req_id_per_token: [T] int32.
            block_table: [B, columns] int32.
            token_indices: positions, in any order.
            block_size: entries of a page.
        """
        self._lacks("global_slots")

    def _lacks(self, call: str) -> None:
        raise UnsupportedConfiguration(f"{self.get_name()}: {call} not supported")


def has_tile_scales(layout: str) -> bool:
    """Whether a layout has float32 scales, which may be powers of two."""
    return layout in TILED_FORMATS and TILED_FORMATS[layout].scales == "float32"

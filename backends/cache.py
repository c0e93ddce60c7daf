"""The abstract cache operations of an MLA model: entries written, entries gathered and slots, in memory of callers."""

from collections.abc import Iterator
from typing import Annotated, Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from mla_conformance.backends import kernel
from mla_conformance.backends.operands import Form, require_forms, table
from mla_conformance.reference.cache_layout import CACHE_LAYOUTS, cache_dtype, entry_width
from mla_conformance.reference.entry_formats import TILE_SCALES, TILED_FORMATS

CACHE_CALLS = ("write_latent", "write_index", "gather_latent", "gather_index", "slot_mapping", "global_slots")
NO_SLOT = -1
Scalar = Annotated[Tensor, Form("", torch.float32)]
Latents = Annotated[Tensor, Form("T or more, L", "model")]
Rotated = Annotated[Tensor, Form("T or more, R", "model")]
Keys = Annotated[Tensor, Form("T or more, D", "model")]
Cache = Annotated[Tensor, Form("blocks, page, width", "entries")]
WrittenCache = Annotated[Tensor, Form("blocks, page, width", "entries", written=True)]
Slots = Annotated[Tensor, Form("T", (torch.int64, torch.int32))]
SlotsToFill = Annotated[Tensor, Form("T or more", (torch.int64, torch.int32), written=True)]
Rows = Annotated[Tensor, Form("S or more, columns", written=True)]
Codes = Annotated[Tensor, Form("S or more, D", torch.float8_e4m3fn, written=True)]
Scales = Annotated[Tensor, Form("S or more", torch.float32, written=True)]
Table = Annotated[Tensor, Form("B, columns", torch.int32)]
Starts = Annotated[Tensor, Form("B + 1", torch.int32)]
PerRequest = Annotated[Tensor, Form("B", torch.int32)]
Positions = Annotated[Tensor, Form("T or more", torch.int64)]
Requests = Annotated[Tensor, Form("T", torch.int32)]
Lists = Annotated[Tensor, Form("T, K", torch.int32)]
FilledLists = Annotated[Tensor, Form("T, K", torch.int32, written=True)]


class MLACacheSelectorConfig(NamedTuple):
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


class MLACacheBackend(kernel.PagedKernel):
    """Operations over a paged cache: T tokens, B requests, S gathered entries; latents, ropes, index keys."""

    supported_calls: ClassVar[list[str]] = list(CACHE_CALLS)  # those of :data:`CACHE_CALLS` that the class has
    supported_kv_cache_dtypes: ClassVar[list[str]] = ["auto"]  # layouts that it writes and gathers
    supported_tile_scales: ClassVar[list[str]] = ["float32"]  # what it writes as float32 scales, if constructed so
    supported_slot_dtypes: ClassVar[list[torch.dtype]] = [torch.int64]  # of slot mappings
    supports_dequantise: ClassVar[bool] = True  # whether it gathers into the model's dtype
    supports_compression: ClassVar[bool] = True  # whether an entry may stand for several tokens
    supports_dcp: ClassVar[bool] = True  # whether it maps the tokens of one of several ranks
    supports_outside: ClassVar[bool] = True  # whether positions beyond the block table become -1

    @classmethod
    def _reasons(cls, config: MLACacheSelectorConfig) -> Iterator[str]:
        layout, scales, writes = config.kv_cache_dtype, config.tile_scales, cls.supported_tile_scales
        pages, page = cls.get_supported_kernel_block_sizes(), config.block_size
        reads = config.call not in CACHE_CALLS[:4] or layout in cls.supported_kv_cache_dtypes
        return kernel.unless(
            (config.call in cls.supported_calls, f"{config.call} not supported"),
            (kernel.accepts_block_size(pages, page), f"block_size {page} not supported"),
            (reads, f"kv_cache_dtype {layout} not supported"),
            (
                layout not in TILED_FORMATS or TILED_FORMATS[layout].scales != "float32" or scales in writes,
                f"{scales} scales not supported (writes {', '.join(writes)})",
            ),
            (config.slot_dtype in cls.supported_slot_dtypes, f"slots of {config.slot_dtype} not supported"),
            (cls.supports_dequantise or not config.dequantise, "gathering into the model's dtype not supported"),
            (cls.supports_compression or config.compress_ratio == 1, "entries of several tokens not supported"),
            (cls.supports_dcp or config.dcp_world_size == 1, "ranks that share the tokens not supported"),
            (cls.supports_outside or not config.outside, "positions beyond the block table not supported"),
        )

    def __init__(
        self, kv_lora_rank: int, qk_rope_head_dim: int, kv_cache_dtype: str, tile_scales: str, vllm_config: Any
    ) -> None:
        kernel.expect_one("kv_cache_dtype", kv_cache_dtype, CACHE_LAYOUTS)
        kernel.expect_one("tile_scales", tile_scales, TILE_SCALES)
        self.kv_lora_rank, self.qk_rope_head_dim = kv_lora_rank, qk_rope_head_dim
        self.kv_cache_dtype, self.tile_scales, self.vllm_config = kv_cache_dtype, tile_scales, vllm_config

    @table
    def run_write_latent(
        self, kv_c: Latents, k_pe: Rotated, kv_cache: WrittenCache, slot_mapping: Slots, k_scale: Scalar
    ) -> None:
        """Write the entries of T tokens to their slots; -1 writes nothing, and so do rows from T on.

        Rows of ``kv_c`` and ``k_pe`` may have any stride, and that between blocks may exceed a packed block. Slots are
        block · page + offset, none twice; ``k_scale`` is what a code of 1.0 in an ``fp8`` cache stands for.
        """
        self._lacks("write_latent")

    @table
    def run_write_index(self, k: Keys, kv_cache: WrittenCache, slot_mapping: Slots) -> None:
        """Write the codes of index keys and their scales; otherwise as :meth:`run_write_latent`."""
        self._lacks("write_index")

    @table
    def run_gather_latent(
        self,
        kv_cache: Cache,
        workspace: Rows,
        block_table: Table,
        cu_seq_lens: Starts,
        seq_starts: PerRequest,
        k_scale: Scalar,
        compress_ratio: int = 1,
    ) -> None:
        """Gather entries of each request into rows of a workspace, one request after the other.

        The workspace is [S or more, width] of the cache's dtype, for entries as they are, or [S or more, L + R] of the
        model's, for what they mean; rows from S on are not written. ``cu_seq_lens`` are the first row of each request,
        and S, ``seq_starts`` the first token that is gathered, any; token t is in entry t // compress_ratio.
        """
        self._lacks("gather_latent")

    @table
    def run_gather_index(
        self,
        kv_cache: Cache,
        k: Codes,
        k_scale: Scales,
        block_table: Table,
        cu_seq_lens: Starts,
        seq_starts: PerRequest,
        compress_ratio: int = 1,
    ) -> None:
        """Gather codes into ``k`` and scales into ``k_scale``; otherwise as above."""
        self._lacks("gather_index")

    @table
    def run_slot_mapping(
        self,
        slot_mapping: SlotsToFill,
        query_start_loc: Starts,
        positions: Positions,
        block_table: Table,
        block_size: int,
        compress_ratio: int = 1,
        dcp_world_size: int = 1,
        dcp_rank: int = 0,
        cp_kv_cache_interleave_size: int = 1,
    ) -> None:
        """Fill slot_mapping with the slot of each token by its position in its request.

        It is -1 where this rank writes no entry for it, and behind the last counted token. The last token of an entry
        writes it. Entry e of a request is dealt to rank (e // interleave) % ranks; entries in a row that a rank gets
        are a divisor of ``block_size``, the entries of a page.
        """
        self._lacks("slot_mapping")

    @table
    def run_global_slots(
        self, out: FilledLists, req_id_per_token: Requests, block_table: Table, token_indices: Lists, block_size: int
    ) -> None:
        """Fill ``out`` with slots of positions; -1 where a list holds -1, or the block table has no column."""
        self._lacks("global_slots")

    def _lacks(self, call: str) -> None:
        raise kernel.UnsupportedConfiguration(f"{self.get_name()}: {call} not supported")


SLOT_DTYPES = (torch.int64, torch.int32)


def require_call(backend: MLACacheBackend, call: str, kv_cache: Tensor, model_dtype: torch.dtype, **asked: Any) -> None:
    """Refuse a call of this name that is not declared, with further fields of :class:`MLACacheSelectorConfig`."""
    own = {"call": call, "dtype": model_dtype, "block_size": kv_cache.shape[1]}
    kernel.require_declared(backend, kv_cache.device, MLACacheSelectorConfig, **own, **asked)


def check_forms(backend: MLACacheBackend, call: str, model: torch.dtype, **given: Tensor) -> None:
    """Refuse operands of other forms, a cache of another layout or without room for such a model among them."""
    layout, sizes = backend.kv_cache_dtype, (backend.kv_lora_rank, backend.qk_rope_head_dim)
    known = {"model": model, "width": entry_width(layout, *sizes), "entries": cache_dtype(layout, model)}
    known |= {"L": sizes[0], "D": sizes[0], "R": sizes[1]}
    require_forms(getattr(MLACacheBackend, f"run_{call}"), given, known)


def check_written(backend: MLACacheBackend, call: str, kv_cache: Tensor, slots: Tensor, **rows: Tensor) -> None:
    """Refuse rows that are no entries, slots that are none of the cache, and fewer rows than slots; reads the slots."""
    check_forms(backend, call, next(iter(rows.values())).dtype, kv_cache=kv_cache, **rows)
    if slots.dim() != 1 or slots.dtype not in SLOT_DTYPES:
        raise ValueError(f"slot_mapping: expected [T] of int64 or int32, got {list(slots.shape)} of {slots.dtype}")
    for name, x in rows.items():
        if x.dim() != 2 or len(x) < len(slots):
            raise ValueError(f"{name}: expected a row for each of {len(slots)} slots, got shape {list(x.shape)}")
    count = kv_cache.shape[0] * kv_cache.shape[1]
    refuse("slot_mapping: slot", slots, (slots < NO_SLOT) | (slots >= count), f"-1 or 0..{count - 1}")


def check_gather(x: Any, **workspaces: Tensor) -> None:
    """Refuse tables and lengths that do not fit together, or reach beyond the table, cache or workspace; reads them."""
    page, block_table, cu_seq_lens, first = x.kv_cache.shape[1], x.block_table, x.cu_seq_lens, x.seq_starts
    given = {name: getattr(x, name) for name in ("block_table", "cu_seq_lens", "seq_starts")}
    require_forms(MLACacheBackend.run_gather_latent, given, {"B": len(block_table), "B + 1": len(block_table) + 1})
    lengths = cu_seq_lens.diff()
    refuse("cu_seq_lens: length", lengths, lengths < 0, "no less than 0")
    for name, workspace in workspaces.items():
        if len(workspace) < int(cu_seq_lens[-1]):
            raise ValueError(f"{name}: expected at least {int(cu_seq_lens[-1])} rows, got {len(workspace)}")
    pages = -(-(first // x.compress_ratio + lengths) // page) * (lengths > 0)
    columns = block_table.shape[1]
    refuse("block_table: pages of a request", pages, pages > columns, f"at most the table's {columns}")
    named = torch.arange(columns, device=pages.device) < pages.unsqueeze(1)
    named &= torch.arange(columns, device=pages.device) >= (first // x.compress_ratio // page).unsqueeze(1)
    outside = named & ((block_table < 0) | (block_table >= len(x.kv_cache)))
    refuse("block_table: block", block_table, outside, f"0..{len(x.kv_cache) - 1}")


def check_workspace(backend: MLACacheBackend, kv_cache: Tensor, workspace: Tensor) -> None:
    """Refuse a workspace that holds neither entries nor what they mean, and a cache of another layout."""
    as_stored = workspace.dtype == kv_cache.dtype
    model = kv_cache.dtype if backend.kv_cache_dtype == "auto" else torch.bfloat16
    check_forms(backend, "gather_latent", model, kv_cache=kv_cache)
    width = kv_cache.shape[2] if as_stored else backend.kv_lora_rank + backend.qk_rope_head_dim
    if workspace.dim() != 2 or workspace.shape[1] != width or not (as_stored or workspace.is_floating_point()):
        got = f"got {list(workspace.shape)} of {workspace.dtype}"
        raise ValueError(f"workspace: expected rows of {width} in {kv_cache.dtype} or in the model's dtype, {got}")


def refuse(name: str, numbers: Tensor, wrong: Tensor, expected: str) -> None:
    """Refuse by ValueError the first of the numbers that is wrong."""
    if bool(wrong.any()):
        raise ValueError(f"{name}: expected {expected}, got {int(numbers[wrong][0])}")

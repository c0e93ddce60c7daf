"""What cache operations of ours check before they launch: the refusals of SPEC 9.6, with expected and got."""

from typing import Any

import torch
from torch import Tensor

from mla_conformance.backends.cache import NO_SLOT, MLACacheBackend, MLACacheSelectorConfig
from mla_conformance.backends.kernel import require_declared
from mla_conformance.backends.operands import require_forms
from mla_conformance.reference.cache_layout import cache_dtype, entry_width

_SLOTS = (torch.int64, torch.int32)


def require_call(backend: MLACacheBackend, call: str, kv_cache: Tensor, model_dtype: torch.dtype, **asked: Any) -> None:
    """Refuse a call of this name that is not declared, with further fields of :class:`MLACacheSelectorConfig`."""
    own = {"call": call, "dtype": model_dtype, "block_size": kv_cache.shape[1]}
    require_declared(backend, kv_cache.device, MLACacheSelectorConfig, **own, **asked)


def check_forms(backend: MLACacheBackend, call: str, model: torch.dtype, **given: Tensor) -> None:
    """Refuse operands of other forms, a cache of another layout or without room for such a model among them."""
    layout, sizes = backend.kv_cache_dtype, (backend.kv_lora_rank, backend.qk_rope_head_dim)
    known = {"model": model, "width": entry_width(layout, *sizes), "entries": cache_dtype(layout, model)}
    known |= {"L": sizes[0], "D": sizes[0], "R": sizes[1]}
    require_forms(getattr(MLACacheBackend, f"run_{call}"), given, known)


def check_written(backend: MLACacheBackend, call: str, kv_cache: Tensor, slots: Tensor, **rows: Tensor) -> None:
    """Refuse rows that are no entries, slots that are none of the cache, and fewer rows than slots; reads the slots."""
    check_forms(backend, call, next(iter(rows.values())).dtype, kv_cache=kv_cache, **rows)
    if slots.dim() != 1 or slots.dtype not in _SLOTS:
        raise ValueError(f"slot_mapping: expected [T] of int64 or int32, got {list(slots.shape)} of {slots.dtype}")
    for name, x in rows.items():
        if x.dim() != 2 or len(x) < len(slots):
            raise ValueError(f"{name}: expected a row for each of {len(slots)} slots, got shape {list(x.shape)}")
    count = kv_cache.shape[0] * kv_cache.shape[1]
    _refuse("slot_mapping: slot", slots, (slots < NO_SLOT) | (slots >= count), f"-1 or 0..{count - 1}")


def check_gather(
    kv_cache: Tensor,
    block_table: Tensor,
    cu_seq_lens: Tensor,
    seq_starts: Tensor,
    compress_ratio: int,
    **workspaces: Tensor,
) -> None:
    """Refuse tables and lengths that do not fit together, or reach beyond the table, cache or workspace; reads them."""
    page, given = kv_cache.shape[1], {"block_table": block_table, "cu_seq_lens": cu_seq_lens, "seq_starts": seq_starts}
    require_forms(MLACacheBackend.run_gather_latent, given, {"B": len(block_table), "B + 1": len(block_table) + 1})
    lengths = cu_seq_lens.diff()
    _refuse("cu_seq_lens: length", lengths, lengths < 0, "no less than 0")
    for name, workspace in workspaces.items():
        if len(workspace) < int(cu_seq_lens[-1]):
            raise ValueError(f"{name}: expected at least {int(cu_seq_lens[-1])} rows, got {len(workspace)}")
    pages = -(-(seq_starts // compress_ratio + lengths) // page) * (lengths > 0)
    columns = block_table.shape[1]
    _refuse("block_table: pages of a request", pages, pages > columns, f"at most the table's {columns}")
    named = torch.arange(columns, device=pages.device) < pages.unsqueeze(1)
    named &= torch.arange(columns, device=pages.device) >= (seq_starts // compress_ratio // page).unsqueeze(1)
    outside = named & ((block_table < 0) | (block_table >= len(kv_cache)))
    _refuse("block_table: block", block_table, outside, f"0..{len(kv_cache) - 1}")


def check_workspace(backend: MLACacheBackend, kv_cache: Tensor, workspace: Tensor) -> None:
    """Refuse a workspace that holds neither entries nor what they mean, and a cache of another layout."""
    as_stored = workspace.dtype == kv_cache.dtype
    model = kv_cache.dtype if backend.kv_cache_dtype == "auto" else torch.bfloat16
    check_forms(backend, "gather_latent", model, kv_cache=kv_cache)
    width = kv_cache.shape[2] if as_stored else backend.kv_lora_rank + backend.qk_rope_head_dim
    if workspace.dim() != 2 or workspace.shape[1] != width or not (as_stored or workspace.is_floating_point()):
        raise ValueError(
            f"workspace: expected rows of {width} in {kv_cache.dtype} or in the model's dtype, got "
            f"{list(workspace.shape)} of {workspace.dtype}"
        )


def check_mapping(
    slot_mapping: Tensor, query_start_loc: Tensor, positions: Tensor, block_table: Tensor, tokens_of_a_page: int
) -> None:
    """Refuse mappings and positions that are too short or of another dtype, and positions beyond the block table.

    Args:
        slot_mapping: what is filled.
        query_start_loc: of the batch.
        positions: of its tokens.
        block_table: of its requests.
        tokens_of_a_page: on all ranks, with what is compressed.
    """
    named = {"query_start_loc": query_start_loc, "positions": positions, "block_table": block_table}
    require_forms(MLACacheBackend.run_slot_mapping, named, {"B + 1": len(block_table) + 1})
    counted = int(query_start_loc[-1])
    for name, x in (("slot_mapping", slot_mapping), ("positions", positions)):
        if len(x) < counted:
            raise ValueError(f"{name}: expected one for each of {counted} tokens, got {len(x)}")
    if slot_mapping.dtype not in _SLOTS:
        raise ValueError(f"slot_mapping: expected int64 or int32, got {slot_mapping.dtype}")
    room, given = block_table.shape[1] * tokens_of_a_page, positions[:counted]
    _refuse(
        "positions: position", given, (given < 0) | (given >= room), f"0..{room - 1}, which the table has blocks for"
    )


def check_lists(out: Tensor, req_id_per_token: Tensor, token_indices: Tensor, requests: int) -> None:
    """Refuse lists of another dtype than int32, results of another shape, and requests without a row in the table."""
    known = dict(zip(("T", "K"), (len(req_id_per_token), *token_indices.shape[1:2]), strict=False))
    require_forms(MLACacheBackend.run_global_slots, {"token_indices": token_indices, "out": out}, known)
    wrong = (req_id_per_token < 0) | (req_id_per_token >= requests)
    _refuse("req_id_per_token: request", req_id_per_token, wrong, f"0..{requests - 1}")


def _refuse(name: str, numbers: Tensor, wrong: Tensor, expected: str) -> None:
    if bool(wrong.any()):
        raise ValueError(f"{name}: expected {expected}, got {int(numbers[wrong][0])}")

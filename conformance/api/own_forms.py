"""The forms of what functions of each role are called with, and what own tensors are read with."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from mla_conformance.backends import decode, indexer, interface, kernel, sparse, topk
from mla_conformance.backends.operands import AT_LEAST, Form, forms_of
from mla_conformance.backends.slots import slots_at
from mla_conformance.cases.case import Case, CaseError
from mla_conformance.files.whole import InputError
from mla_conformance.problems import operands
from mla_conformance.reference import selected
from mla_conformance.reference.cache_layout import cache_dtype, decode_rows, entry_width, read_entries

_STARTS = {name: Form("B + 1", torch.int32) for name in ("cu_seqlens_q", "cu_seqlens_k")}
_DECODE = forms_of(decode.MLADecodeBackend.run_decode)
_ABSORBED = Form(_DECODE["q_pe"].shape.replace("R", "L + R"))
_LISTED = forms_of(sparse.MLASparseMetadata)
FORMS: Mapping[str, Mapping[str, Form]] = {
    "prefill": {**forms_of(interface.MLAPrefillBackend.run_prefill_new_tokens), **_STARTS},
    "decode": {**forms_of(decode.MLACommonDecodeMetadata), **_DECODE, **_STARTS, "q": _ABSORBED},
    "sparse": {
        **_LISTED,
        **forms_of(sparse.MLASparseBackend.run_sparse_prefill),
        **forms_of(sparse.MLASparseBackend.run_sparse_decode),
        **_STARTS,
        "q": replace(_ABSORBED, shape=_ABSORBED.shape.replace(AT_LEAST, "")),
        "k_scale": _DECODE["k_scale"],
    },
    "indexer": {**_LISTED, **forms_of(indexer.MLAIndexerBackend.run_index_logits), **_STARTS},
    "top-k": {**forms_of(topk.TopKMetadata), **forms_of(topk.MLATopKBackend.run_top_k_per_row)},
}
IN_WORDS = {("indexer", "k")}  # whose form is another one in each call
Starts = Tensor | Sequence[int] | None
_DTYPES = {dtype: name for name, dtype in operands.TORCH_DTYPES.items()}
_NOPE = 128  # columns of a head before absorption, which own tensors do not tell; no result depends on them


def require(role: str, sizes: Mapping[str, int], **given: Tensor | None) -> None:
    """Refuse what is no tensor of the table's form, where a dimension without a size may have any."""
    for name, x in given.items():
        form = FORMS[role].get(name)
        if x is None or form is None or (role, name) in IN_WORDS:
            continue
        dims = form.shape.split(", ")
        wanted = [(sizes.get(dim.removesuffix(AT_LEAST)), dim.endswith(AT_LEAST)) for dim in dims]
        if isinstance(x, Tensor) and x.dim() == len(dims):
            fits = (size is None or (got >= size if least else got == size)
                    for got, (size, least) in zip(x.shape, wanted, strict=True))  # fmt: skip
            if all(fits):
                continue
        shown = ", ".join(str(sizes.get(dim.removesuffix(AT_LEAST), dim)) for dim in dims)
        got = f"shape {list(x.shape)}" if isinstance(x, Tensor) else f"a {type(x).__name__}"
        raise InputError(f"{name}: expected a tensor [{form.shape}]"
                         f"{f', here [{shown}]' if shown != form.shape else ''}, got {got}")  # fmt: skip


def starts_of(name: str, given: Starts, rows: int, requests: int = 0) -> tuple[int, ...]:
    """First row of each request, and the end; by default of one request with all rows."""
    if given is None:
        return 0, rows
    starts = tuple(given.tolist() if isinstance(given, Tensor) else given)
    if len(starts) < 2 or starts[0] or any(b < a for a, b in pairwise(starts)) or starts[-1] > rows:
        raise InputError(f"{name}: expected cumulative lengths from 0 to at most the {rows} rows, got {list(starts)}")
    if requests and len(starts) != requests + 1:
        raise InputError(f"{name}: expected {requests + 1} numbers for {requests} requests, got {len(starts)}")
    return starts


def one_each(given: Starts, q: Tensor, seq_lens: Tensor) -> Starts:
    """By default each request has one query."""
    if given is None and len(q) != len(seq_lens):
        raise InputError(f"cu_seqlens_q: expected the first row of each of the {len(seq_lens)} requests in the "
                         f"{len(q)} rows of q, got none")  # fmt: skip
    return range(len(q) + 1) if given is None else given


def lengths_of(starts: Sequence[int]) -> tuple[int, ...]:
    """Rows of each request."""
    return tuple(b - a for a, b in pairwise(starts))


def case_of(capability: str, scale: float | None, like: Tensor, **fields: Any) -> Any:
    """What stands for the form of own tensors where the house wants a case; it draws nothing."""
    if like.dtype not in _DTYPES:
        raise InputError(f"q: expected a tensor of one of {', '.join(_DTYPES.values())}, got {like.dtype}")
    heads = like.shape[1] if like.dim() == 3 else 1
    try:
        case = Case.of(capability=capability, dtype=_DTYPES[like.dtype], heads=heads, poison="large", **fields)
    except CaseError as error:
        raise InputError(f"assert_close: {error}") from error
    if scale is not None:
        vars(case)["softmax_scale"] = float(scale)  # of which a case holds whole percents alone
    return case


def latent_case(
    capability: str, scale: float, q: Tensor, rank: int, lengths: Sequence[int], totals: Sequence[int], **fields: Any
) -> Any:
    """The case over latents, whose contexts are what a request has beyond its queries."""
    dims = f"{_NOPE}-{q.shape[2] - rank}-{_NOPE}-{rank}"
    contexts = tuple(max(0, total - length) for total, length in zip(totals, lengths, strict=True))
    return case_of(capability, scale, q, dims=dims, q=tuple(lengths), kv=contexts, **fields)


def slots_of(
    cache: Tensor, layout: str, q: Tensor, rank: int, block_table: Tensor, totals: Sequence[int], name: str = "kv_cache"
) -> Tensor:
    """[S] slots of all tokens, request by request."""
    require_entries(name, cache, layout, q, rank)
    blocks, page, _ = cache.shape
    if totals and max(totals) > block_table.shape[1] * page:
        raise InputError(f"block_table: expected room for {max(totals)} tokens in pages of {page}, got "
                         f"{block_table.shape[1]} blocks a request")  # fmt: skip
    request = torch.arange(len(totals)).repeat_interleave(torch.tensor(totals)).to(cache.device)
    token = torch.cat([torch.arange(total, device=cache.device) for total in totals])
    slots = slots_at(block_table.to(cache.device), request, token, page)
    block = slots // page
    if bool(((block < 0) | (block >= blocks)).any()):
        raise InputError(f"block_table: expected blocks in 0..{blocks - 1} up to each request's length, got "
                         f"{int(block.min())}..{int(block.max())}")  # fmt: skip
    return slots


def require_entries(name: str, cache: Tensor, layout: str, q: Tensor, rank: int) -> None:
    """Refuse a cache of another width or dtype than its layout has."""
    if not isinstance(cache, Tensor) or cache.dim() != 3:
        got = f"shape {list(cache.shape)}" if isinstance(cache, Tensor) else f"a {type(cache).__name__}"
        raise InputError(f"{name}: expected a tensor [blocks, page, width], got {got}")
    if not 0 < rank <= q.shape[2]:
        raise InputError(f"kv_lora_rank: expected at most the {q.shape[2]} columns of q, got {rank}")
    try:
        width, dtype = entry_width(layout, rank, q.shape[2] - rank), cache_dtype(layout, kernel.output_dtype(q.dtype))
    except ValueError as error:
        raise InputError(f"kv_cache_dtype: {error}") from error
    if cache.shape[2] != width or cache.dtype != dtype:
        why = f"kv_cache_dtype {layout!r}, kv_lora_rank {rank} and {q.shape[2]} columns of q"
        raise InputError(f"{name}: expected [blocks, page, {width}] of {dtype} by {why}, got {list(cache.shape)} of "
                         f"{cache.dtype}")  # fmt: skip


def meaning_of(cache: Tensor, slots: Tensor, layout: str, k_scale: Tensor | float, rank: int, q: Tensor) -> Tensor:
    """[S, 1, L + R] float64, what the entries of these slots mean."""
    rows = read_entries(cache, slots, layout)
    parts = decode_rows(rows, layout, float(k_scale), rank, q.shape[2] - rank, kernel.output_dtype(q.dtype))
    return torch.cat(parts, dim=-1).unsqueeze(1)


def counted(indices: Tensor, length: Tensor | None) -> Tensor:
    """[T, K] int64; what stands after a row's length is none."""
    numbers = indices.long()
    if length is None:
        return numbers
    return numbers.where(torch.arange(numbers.shape[1], device=numbers.device) < length.unsqueeze(1), selected.NO_KEY)


def places_of(name: str, numbers: Tensor, stored: Tensor) -> tuple[Tensor, Tensor]:
    """Slots that are named, ascending, and the lists as places among these."""
    most = stored.shape[0] * stored.shape[1]
    if numbers.numel() and (int(numbers.min()) < selected.NO_KEY or int(numbers.max()) >= most):
        got = f"{int(numbers.min())}..{int(numbers.max())}"
        raise InputError(f"{name}: expected -1 or slots in 0..{most - 1}, got {got}")
    used = numbers[numbers != selected.NO_KEY].unique()
    places = torch.searchsorted(used, numbers.clamp(min=0)) if len(used) else torch.zeros_like(numbers)
    return used, places.where(numbers != selected.NO_KEY, selected.NO_KEY)

"""What whoever drives an MLA layer without vLLM tells it: the part of vLLM's configuration it reads, and batches."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad
from torch.nn.utils.rnn import pad_sequence

from mla_conformance.backends.layer.attention_impl import CommonAttentionMetadata
from mla_conformance.backends.layer.context_parallel import Sharding, local_seq_lens, local_token
from mla_conformance.reference.chunking import MAX_WORKSPACE_TOKENS
from mla_conformance.reference.dimensions import MLADimensions


def layer_config(
    *,
    dtype: torch.dtype,  # of the model
    max_model_len: int,  # longest sequence in tokens
    head_size: int,  # L + R
    max_num_seqs: int,  # most requests at once
    block_size: int,  # tokens of a page
    cache_dtype: str = "auto",  # name of its layout
    chunked_prefill_enabled: bool = True,  # whether prompts are split
    enable_prefix_caching: bool = False,
    ranks: int = 1,
    interleave: int = 1,  # consecutive tokens that a rank keeps
    drafted: int | None = None,  # tokens a step
) -> SimpleNamespace:
    """What stands for a ``VllmConfig``."""
    model = {"dtype": dtype, "max_model_len": max_model_len, "head_size": head_size}
    cache = {"block_size": block_size, "cache_dtype": cache_dtype, "enable_prefix_caching": enable_prefix_caching}
    scheduler = {"max_num_seqs": max_num_seqs, "chunked_prefill_enabled": chunked_prefill_enabled}
    return SimpleNamespace(
        model_config=SimpleNamespace(**model, get_head_size=lambda: head_size),
        scheduler_config=SimpleNamespace(**scheduler),
        cache_config=SimpleNamespace(**cache),
        parallel_config=SimpleNamespace(decode_context_parallel_size=ranks, cp_kv_cache_interleave_size=interleave),
        speculative_config=SimpleNamespace(num_speculative_tokens=drafted),
        compilation_config=SimpleNamespace(static_forward_context={}),  # the layers of the model by name
    )


_current: ContextVar[Any] = ContextVar("current layer configuration")
get_current_config = _current.get


@contextmanager
def set_current_config(config: Any) -> Iterator[None]:
    """Layers that are made inside of it may ask for ``config``, which their constructors do not receive."""
    before = _current.set(config)
    try:
        yield
    finally:
        _current.reset(before)


@dataclass(frozen=True, kw_only=True)
class MLAAttentionSpec:
    block_size: int  # tokens of a page
    head_size: int  # elements of an entry's latents
    num_kv_heads: int = 1
    cache_dtype_str: str = "auto"  # name of the layout


def workspace_tokens(config: Any) -> int:
    """Tokens of the workspace: eight longest sequences or four pages a request; 0 where no prefill can have context."""
    if not (config.scheduler_config.chunked_prefill_enabled or config.cache_config.enable_prefix_caching):
        return 0
    pages = config.scheduler_config.max_num_seqs * config.cache_config.block_size
    tokens: int = min(max(8 * config.model_config.max_model_len, 4 * pages), MAX_WORKSPACE_TOKENS)
    if tokens < pages:
        raise ValueError(
            f"expected a context workspace of at least a page for each request, {config.scheduler_config.max_num_seqs} "
            f"requests x {config.cache_config.block_size} tokens, got {tokens} tokens; lower max_num_seqs"
        )
    return tokens


class BatchForm(NamedTuple):
    decodes: tuple[int, ...]  # new tokens of each request that decodes
    prefills: tuple[int, ...]  # new tokens of each request that prefills
    padding: int  # rows of padding that count as requests
    kv_cache_dtype: str  # layout of the cache
    dtype: torch.dtype  # of the model
    dimensions: MLADimensions  # head dims


def check_lengths(query_lens: Tensor, seq_lens: Tensor) -> None:
    """Refuse negative lengths [B], on the host, and queries longer than their sequences."""
    # A sequence of 0 with a query of 1 is a row of padding.
    longer = (query_lens > seq_lens) & ~((seq_lens == 0) & (query_lens == 1))
    for name, wrong, expected in (
        ("query", query_lens < 0, "0 or more tokens"),
        ("sequence", seq_lens < 0, "0 or more tokens"),
        ("query", longer, "no more tokens than its sequence, whose length counts the new tokens"),
    ):
        if bool(wrong.any()):
            request = int(wrong.int().argmax())
            raise ValueError(
                f"request {request}: expected a {name} of {expected}, got query_len {int(query_lens[request])} and "
                f"seq_len {int(seq_lens[request])}"
            )


def count_decodes(query_lens: Tensor, threshold: int | None, uniform: bool) -> int:
    """Decodes at the front of a batch of queries [B], as vLLM's builder splits it; by ``threshold`` None decodes none.

    A short query behind a prefill prefills as well, and if decodes must be ``uniform`` one of another length. Requests
    without a query pad a batch of decodes of one length for a graph, and decode.
    """
    if threshold is None or int(query_lens[0]) > threshold:
        return 0
    decodes = query_lens <= threshold
    if uniform and not (threshold == 1 and bool(decodes.all())):
        decodes = (query_lens == query_lens[0]) | (query_lens == 0)
    return int(decodes.int().cumprod(dim=0).sum())


class LayerRequest(NamedTuple):
    query_len: int  # new tokens
    context_len: int  # tokens computed before
    block_ids: Sequence[int]  # physical blocks in the order of its tokens, on this rank, or more
    is_prompt: bool  # whether it prefills


def common_metadata(
    requests: Sequence[LayerRequest], *, padding: int, block_size: int, device: torch.device, sharding: Sharding
) -> CommonAttentionMetadata:
    """The batch as every layer of a model sees it, padding behind the requests; refuses contradictory ones."""
    if not requests or padding < 0:
        raise ValueError(f"expected at least one request and no negative padding, got {len(requests)} and {padding}")
    new, context = torch.tensor([(r.query_len, r.context_len) for r in requests], dtype=torch.int64).unbind(1)
    if bool((context < 0).any()):
        request = int(context.argmin())
        raise ValueError(f"request {request}: expected a context of 0 or more tokens, got {context[request]}")
    query, seq_lens = pad(new, (0, padding), value=1), pad(new + context, (0, padding))
    check_lengths(query, seq_lens)
    local, starts = local_seq_lens(seq_lens, sharding), pad(query.cumsum(dim=0), (1, 0)).int()
    held, needed = torch.tensor([len(r.block_ids) for r in requests]), -(-local[: len(requests)] // block_size)
    if bool((needed > held).any()):
        request = int((needed > held).int().argmax())
        raise ValueError(
            f"request {request}: the block table is too short: {local[request]} tokens need {needed[request]} "
            f"blocks of {block_size}, got {held[request]}; allocate blocks for the new tokens as well"
        )
    # 0 behind a request's blocks, where a kernel may prefetch.
    table = pad_sequence([torch.as_tensor(r.block_ids, dtype=torch.int32) for r in requests], batch_first=True)
    table = pad(table, (0, not table.shape[1]))
    wrong = ((table < 0) & (torch.arange(table.shape[1]) < needed[:, None])).any(dim=1)
    if bool(wrong.any()):
        request = int(wrong.int().argmax())
        raise ValueError(f"request {request}: expected blocks >= 0, got {min(requests[request].block_ids)}")
    whose = torch.arange(len(new)).repeat_interleave(new)
    position = (context - (new.cumsum(dim=0) - new))[whose] + torch.arange(len(whose))
    rank, token = local_token(position, sharding)
    # A token of another rank may lie behind this rank's last page; its slot is not used.
    block = table[whose, (token // block_size).clamp(max=table.shape[1] - 1)].long()
    slots = torch.where(rank == sharding.rank, block * block_size + token % block_size, -1)
    sharded = sharding.world_size > 1
    return CommonAttentionMetadata(
        query_start_loc=starts.to(device),
        query_start_loc_cpu=starts,
        seq_lens=seq_lens.int().to(device),
        num_reqs=len(query),
        num_actual_tokens=int(starts[-1]),
        max_query_len=int(query.max()),
        max_seq_len=int(seq_lens.max()),
        block_table_tensor=pad(table, (0, 0, 0, padding), value=-1).to(device),
        slot_mapping=pad(slots, (0, padding), value=-1).to(device),
        dcp_local_seq_lens=local.int().to(device) if sharded else None,
        dcp_local_seq_lens_cpu=local.int() if sharded else None,
        _seq_lens_cpu=seq_lens.int(),
    )

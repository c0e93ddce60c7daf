"""A batch of an MLA layer: its form and its requests, and what is refused on the way to its metadata."""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad
from torch.nn.utils.rnn import pad_sequence

from mla_conformance.backends.layer.attention_impl import CommonAttentionMetadata
from mla_conformance.backends.layer.context_parallel import Sharding, local_seq_lens, local_token
from mla_conformance.reference.dimensions import MLADimensions


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


def check_common(common: CommonAttentionMetadata, block_size: int, sharding: Sharding) -> None:
    """Refuse contradictory lengths, too few slots, or a block table that is too short."""
    query_lens = common.query_start_loc_cpu[: common.num_reqs + 1].diff()
    seq_lens = common.host_seq_lens()[: common.num_reqs]
    if not common.num_reqs or len(query_lens) != common.num_reqs or len(seq_lens) != common.num_reqs:
        raise ValueError(
            f"expected at least one request, with a query and a sequence, got num_reqs {common.num_reqs}, "
            f"{len(query_lens)} queries and {len(seq_lens)} sequences"
        )
    check_lengths(query_lens, seq_lens)
    tokens, slots = int(query_lens.sum()), common.slot_mapping.shape[0]
    if not tokens <= common.num_actual_tokens <= slots:
        raise ValueError(
            f"expected {tokens} tokens by query_start_loc, no more than num_actual_tokens, and a slot for each of "
            f"these, got num_actual_tokens {common.num_actual_tokens} and {slots} slots"
        )
    rows, columns = common.block_table_tensor.shape
    longest = int(local_seq_lens(seq_lens, sharding).max())
    if rows < common.num_reqs or columns * block_size < longest:
        raise ValueError(
            f"the block table is too short: expected {common.num_reqs} rows for up to {longest} tokens in blocks of "
            f"{block_size}, got {rows} rows of {columns} blocks"
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
    table = _block_table([r.block_ids for r in requests], local[: len(requests)], block_size)
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
        slot_mapping=pad(_slots(new, context, table, block_size, sharding), (0, padding), value=-1).to(device),
        dcp_local_seq_lens=local.int().to(device) if sharded else None,
        dcp_local_seq_lens_cpu=local.int() if sharded else None,
        _seq_lens_cpu=seq_lens.int(),
    )


def _block_table(block_ids: Sequence[Sequence[int]], seq_lens: Tensor, block_size: int) -> Tensor:
    """[B, max blocks] int32: 0 behind a request's blocks, where a kernel may prefetch."""
    held, needed = torch.tensor([len(ids) for ids in block_ids]), -(-seq_lens // block_size)
    if bool((needed > held).any()):
        request = int((needed > held).int().argmax())
        raise ValueError(
            f"request {request}: the block table is too short: {seq_lens[request]} tokens need {needed[request]} "
            f"blocks of {block_size}, got {held[request]}; allocate blocks for the new tokens as well"
        )
    table = pad_sequence([torch.as_tensor(ids, dtype=torch.int32) for ids in block_ids], batch_first=True)
    table = pad(table, (0, not table.shape[1]))
    wrong = ((table < 0) & (torch.arange(table.shape[1]) < needed[:, None])).any(dim=1)
    if bool(wrong.any()):
        request = int(wrong.int().argmax())
        raise ValueError(f"request {request}: expected blocks >= 0, got {min(block_ids[request])}")
    return table


def _slots(new: Tensor, context: Tensor, table: Tensor, block_size: int, sharding: Sharding) -> Tensor:
    """[T] int64: where each new token is stored on this rank; -1 elsewhere."""
    request = torch.arange(len(new)).repeat_interleave(new)
    position = (context - (new.cumsum(dim=0) - new))[request] + torch.arange(len(request))
    owner, token = local_token(position, sharding)
    # A token of another rank may lie behind this rank's last page; its slot is not used.
    block = table[request, (token // block_size).clamp(max=table.shape[1] - 1)].long()
    return torch.where(owner == sharding.rank, block * block_size + token % block_size, -1)

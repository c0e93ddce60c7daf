"""A batch from its requests: slots, block tables, padding for a captured graph (the seed builder's first half)."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch

from mla_conformance.backends.layer.attention_metadata import CommonAttentionMetadata
from mla_conformance.backends.layer.mla_batch import check_lengths
from mla_conformance.backends.layer.mla_sharding import Sharding, local_seq_lens, local_token


class LayerRequest(NamedTuple):
    """One request of a batch.

    Attributes:
        query_len: new tokens.
        context_len: tokens computed before.
        block_ids: physical blocks in the order of its tokens, on this rank; may be longer than needed.
        is_prompt: whether it prefills.
    """

    query_len: int
    context_len: int
    block_ids: Sequence[int] | np.ndarray
    is_prompt: bool


def common_metadata(
    requests: Sequence[LayerRequest], *, padding: int, block_size: int, device: torch.device, sharding: Sharding
) -> CommonAttentionMetadata:
    """The batch as every layer of a model sees it.

    Args:
        requests: at least one.
        padding: rows of padding behind them.
        block_size: tokens of a page.
        device: where the kernels read the tensors.
        sharding: which of the tokens this rank stores.

    Raises:
        ValueError: no request, contradictory lengths, or blocks that do not hold a request's tokens.
    """
    if not requests or padding < 0:
        raise ValueError(f"expected at least one request and no negative padding, got {len(requests)} and {padding}")
    lengths = np.array([(r.query_len, r.context_len) for r in requests], dtype=np.int64)
    query = np.concatenate((lengths[:, 0], np.ones(padding, dtype=np.int64)))
    sequence = np.concatenate((lengths.sum(axis=1), np.zeros(padding, dtype=np.int64)))
    _check_contexts(lengths[:, 1])
    check_lengths(torch.from_numpy(query), torch.from_numpy(sequence))
    local = local_seq_lens(torch.from_numpy(sequence), sharding)
    table = _block_table([r.block_ids for r in requests], local.numpy(), block_size)
    starts = torch.from_numpy(np.concatenate(([0], query.cumsum()))).int()
    seq_lens, sharded = torch.from_numpy(sequence).int(), sharding.world_size > 1
    return CommonAttentionMetadata(
        query_start_loc=starts.to(device),
        query_start_loc_cpu=starts,
        seq_lens=seq_lens.to(device),
        num_reqs=len(query),
        num_actual_tokens=int(starts[-1]),
        max_query_len=int(query.max()),
        max_seq_len=int(sequence.max()),
        block_table_tensor=torch.from_numpy(table).to(device),
        slot_mapping=torch.from_numpy(_slots(lengths, table, block_size, sharding, padding)).to(device),
        dcp_local_seq_lens=local.int().to(device) if sharded else None,
        dcp_local_seq_lens_cpu=local.int() if sharded else None,
        _seq_lens_cpu=seq_lens,
    )


def _check_contexts(context_lens: np.ndarray) -> None:
    if (context_lens < 0).any():
        request = int(context_lens.argmin())
        raise ValueError(f"request {request}: expected a context of 0 or more tokens, got {context_lens[request]}")


def _block_table(block_ids: Sequence[Sequence[int] | np.ndarray], seq_lens: np.ndarray, block_size: int) -> np.ndarray:
    """[B + padding, max blocks] int32: 0 behind a request's blocks, where a kernel may prefetch; -1 in padding."""
    held = np.fromiter(map(len, block_ids), dtype=np.int64, count=len(block_ids))
    needed = -(-seq_lens[: len(held)] // block_size)
    short = needed > held
    if short.any():
        request = int(short.argmax())
        raise ValueError(
            f"request {request}: the block table is too short: {seq_lens[request]} tokens need {needed[request]} "
            f"blocks of {block_size}, got {held[request]}; allocate blocks for the new tokens as well"
        )
    table = np.zeros((len(seq_lens), max(1, int(held.max()))), dtype=np.int32)
    table[len(held) :] = -1
    columns = np.arange(table.shape[1])
    table[: len(held)][columns < held[:, None]] = np.concatenate([np.asarray(ids, dtype=np.int32) for ids in block_ids])
    used = columns < needed[:, None]
    if (table[: len(held)] < 0)[used].any():
        request = int(((table[: len(held)] < 0) & used).any(axis=1).argmax())
        raise ValueError(f"request {request}: expected blocks >= 0, got {min(block_ids[request])}")
    return table


def _slots(lengths: np.ndarray, table: np.ndarray, block_size: int, sharding: Sharding, padding: int) -> np.ndarray:
    """[T] int64: where each new token is stored on this rank; -1 elsewhere and in padding."""
    query, context = lengths[:, 0], lengths[:, 1]
    request = np.arange(len(query)).repeat(query)
    first = (context - (query.cumsum() - query)).repeat(query)
    owner, token = local_token(torch.from_numpy(first + np.arange(len(request))), sharding)
    page, offset = np.divmod(token.numpy(), block_size)
    # A token of another rank may lie behind this rank's last page; its slot is not used.
    block = table[request, page.clip(max=table.shape[1] - 1)].astype(np.int64)
    slots = np.where(owner.numpy() == sharding.rank, block * block_size + offset, -1)
    return np.concatenate((slots, np.full(padding, -1, dtype=np.int64)))

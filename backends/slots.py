"""Where the tokens of a batch are: their slots in a paged cache, block · page + offset, or their gathered rows."""

import torch
from torch import Tensor

from mla_conformance.backends import decode, sparse


def slots_at(block_table: Tensor, request: Tensor | slice, token: Tensor, page: int) -> Tensor:
    """Int64 slots of tokens by request and number, or of each request's; any slot where the table has no column."""
    column = (token // page).clamp(0, block_table.shape[1] - 1)
    return block_table[request, column].long() * page + token % page


def slots_of(metadata: decode.MLACommonDecodeMetadata | sparse.MLASparseMetadata, page: int) -> Tensor:
    """[B, max_seq_len] int64, the slot of each token that a request has on this rank; -1 behind its last one.

    Gathered keys' rows are their slots. Nothing waits for the device.
    """
    token = torch.arange(metadata.max_seq_len, device=metadata.seq_lens.device)
    if metadata.block_table is None:
        assert isinstance(metadata, sparse.MLASparseMetadata) and metadata.workspace_starts is not None
        slots = metadata.workspace_starts.long().unsqueeze(1) + token
    else:
        slots = slots_at(metadata.block_table, slice(None), token, page)
    return slots.masked_fill(token >= metadata.seq_lens.unsqueeze(1), -1)

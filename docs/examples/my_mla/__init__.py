"""A decode kernel as a repository of a hub would hold it, in plain PyTorch: one new token a request."""

import torch
from torch import Tensor

__all__ = ["mla_decode"]


def mla_decode(
    q: Tensor, kv_cache: Tensor, block_table: Tensor, seq_lens: Tensor, scale: float, value_dim: int
) -> tuple[Tensor, Tensor]:
    """Output [requests, heads, value_dim] and natural LSE [requests, heads]."""
    output, lse = torch.zeros_like(q[..., :value_dim]), torch.full(q.shape[:2], -torch.inf, device=q.device)
    for row, length in enumerate(seq_lens.tolist()):
        blocks = block_table[row, : -(-length // kv_cache.shape[1])].long()
        keys = kv_cache[blocks].flatten(0, 1)[:length].float()
        scores = scale * q[row].float() @ keys.mT
        lse[row] = scores.logsumexp(-1)
        output[row] = (scores.softmax(-1).to(q.dtype).float() @ keys[:, :value_dim]).to(q.dtype)
    return output, lse

"""Compressed keys: what m tokens of a sequence become, and what rounding does to it.

Each token has a key state and a gate score in every column. An entry is the mean of its group's states, weighted in
each column by the softmax of the scores with a learned number for each place in the group; it is normalised, and its
last columns are rotated by the position of the group's first token. With overlap a group also takes the tokens of the
one before, and each token has twice the columns: the first half for the group behind its own, the second for its own.
Sources: vLLM's ``DeepseekCompressor``, the compressors of transformers' ``deepseek_v4``, and the pools of its
``glm5_next``, which are neither normalised nor rotated.
"""

import torch
from torch import Tensor

from mla_conformance.reference.prepare_index import Prepared


def windows(x: Tensor, ratio: int, overlap: bool, missing: float) -> Tensor:
    """[G, C·m, D] of columns [S, C·D] of a request's tokens: those that each complete group of m takes.

    C is 2 with overlap and else 1. missing: what stands for the tokens before the first group.
    """
    groups = x[: len(x) // ratio * ratio].unflatten(0, (-1, ratio))
    if not overlap:
        return groups
    before, own = groups.chunk(2, dim=-1)
    nobody = torch.full_like(before[:1], missing)
    return torch.cat((torch.cat((nobody, before[:-1])), own), dim=1)


def pooled(k: Tensor, score: Tensor, ape: Tensor, least: float) -> Prepared:
    """[G, D] Σ softmax(score + ape) · k over the W tokens of each group, column by column.

    k, score: [G, W, D] float64, a score of -inf leaves its token out. ape: [W, D]. least: see `Prepared`.
    """
    logits = score + ape
    weights = logits.softmax(dim=1)
    values = (weights * k).sum(dim=1)
    sizes = (score.abs() + ape.abs()).masked_fill(logits == -torch.inf, 0.0)
    steps = 1 + sizes + sizes.amax(dim=1, keepdim=True)
    accumulated = (weights * steps * (k.abs() + values.abs().unsqueeze(1))).sum(dim=1)
    return Prepared(values, accumulated, torch.zeros_like(values), least)


def rms_norm(x: Prepared, weight: Tensor, eps: float) -> Prepared:
    """x / sqrt(mean x² + eps) · weight over the last dimension, weight [D]; its result may be rounded once more."""
    square = x.values.square().mean(dim=-1, keepdim=True) + eps
    factor = weight.to(torch.float64) / square.sqrt()
    normed = x.values * factor
    shared = (x.values.abs() * x.accumulated).mean(dim=-1, keepdim=True) / square
    accumulated = factor.abs() * x.accumulated + normed.abs() * (1 + shared)
    return Prepared(normed, accumulated, x.rounded(normed), x.least)

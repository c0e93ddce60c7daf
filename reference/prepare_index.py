"""Steps of index queries, of index keys and of compressed keys, and by how much a faithful kernel may be off.

Sources: the ``Indexer`` of DeepSeek-V3.2-Exp's inference code and vLLM's ``fused_indexer_q_rope_quant``; vLLM's
``DeepseekCompressor``, the compressors of transformers' ``deepseek_v4`` and the pools of its ``glm5_next``.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from mla_conformance.reference import error_budget, quantization, rope

LARGEST_FLOOR = 1e-4  # a kernel may take the largest magnitude of a block for this where it is less, as DeepSeek's does
_SCALE_STEPS = 8  # roundings of a scale, and of a weight times its factors


@dataclass(frozen=True)
class Prepared:
    values: Tensor  # [..., D] float64
    accumulated: Tensor  # [..., D], sums of magnitudes that a float32 accumulation is relative to
    stored: Tensor  # [..., D], sums of magnitudes that a rounding of intermediate results is relative to
    least: float  # the smallest normal number of their dtype, below which a rounding is no longer relative

    @staticmethod
    def of(x: Tensor) -> "Prepared":
        values = x.to(torch.float64)
        least = float(torch.finfo(x.dtype).smallest_normal)
        return Prepared(values, torch.zeros_like(values), torch.zeros_like(values), least)

    def rounded(self, values: Tensor) -> Tensor:
        return values.abs().clamp(min=self.least)

    def error(self, accumulation: float, intermediates: float) -> Tensor:
        """[..., D], by roundings of a float32 accumulation, and the unit roundoff of what is between steps."""
        float32 = accumulation * error_budget.FLOAT32_ROUNDOFF * (self.accumulated + self.values.abs())
        return float32 + intermediates * self.stored


def layer_norm(x: Prepared, weight: Tensor, bias: Tensor, eps: float) -> Prepared:
    """LayerNorm over the last dimension; the variance may be the mean square less the squared mean."""
    values = x.values
    mean, square = values.mean(-1, keepdim=True), values.square().mean(-1, keepdim=True)
    variance = values.var(-1, keepdim=True, correction=0) + eps
    factor = weight.to(torch.float64) / variance.sqrt()
    scaled = (values - mean) * factor
    normed = scaled + bias.to(torch.float64)
    moved = factor.abs() * (values.abs().mean(-1, keepdim=True) + values.abs())
    accumulated = moved + scaled.abs() * (1 + (square + eps) / (2 * variance)) + normed.abs()
    return Prepared(normed, accumulated, x.rounded(normed), x.least)


def rotated(x: Prepared, cos_sin: Tensor, first: int, interleaved: bool) -> Prepared:
    """Rotate R columns from ``first`` on of every row; cos_sin: [T, R], the cosines of the pairs, then the sines."""
    width = cos_sin.shape[1]
    turn = cos_sin.to(torch.float64).reshape(len(cos_sin), *[1] * (x.values.dim() - 2), width)
    cos, sin = turn.tensor_split(2, dim=-1)

    def within(whole: Tensor, sign: int) -> Tensor:  # by magnitudes where the sign is positive
        own_cos, own_sin = (cos, sin) if sign < 0 else (cos.abs(), sin.abs())
        a, b = rope.split_pairs(whole[..., first : first + width], interleaved)
        return rope.join_pairs(a * own_cos + sign * b * own_sin, b * own_cos + a * own_sin, interleaved)

    def joined(whole: Tensor, part: Tensor) -> Tensor:
        return torch.cat((whole[..., :first], part, whole[..., first + width :]), dim=-1)

    values = joined(x.values, within(x.values, -1))
    accumulated = joined(x.accumulated, within(x.accumulated, 1) + within(x.values.abs(), 1))
    stored = joined(x.stored, within(x.stored, 1) + x.rounded(values[..., first : first + width]))
    return Prepared(values, accumulated, stored, x.least)


def hadamard(x: Prepared) -> Prepared:
    """The orthonormal Hadamard transform of the last dimension, a power of two, in Sylvester's order."""
    matrix = sylvester(x.values.shape[-1], x.values.device)
    values, magnitude = x.values @ matrix, matrix.abs()
    accumulated = (x.accumulated + x.values.abs()) @ magnitude
    return Prepared(values, accumulated, x.stored @ magnitude + x.rounded(values), x.least)


def sylvester(size: int, device: torch.device) -> Tensor:
    """[n, n] float64, the orthonormal Hadamard matrix of a power of two in Sylvester's order."""
    if size < 1 or size & (size - 1):
        raise ValueError(f"expected a power of two, got {size}")
    matrix = torch.ones(1, 1, dtype=torch.float64, device=device)
    while len(matrix) < size:
        matrix = torch.cat((torch.cat((matrix, matrix), 1), torch.cat((matrix, -matrix), 1)))
    return matrix / size**0.5


def scale_bounds(largest: Tensor, error: Tensor, powers_of_two: bool) -> tuple[Tensor, Tensor]:
    """The least and the greatest scale of blocks: their largest magnitude, which may be off, over 448, or a power."""
    slack = _SCALE_STEPS * error_budget.FLOAT32_ROUNDOFF
    low = (largest - error).clamp(min=0) / quantization.E4M3_MAX * (1 - slack)
    high = (largest + error).clamp(min=LARGEST_FLOOR) / quantization.E4M3_MAX * (1 + slack)
    if not powers_of_two:
        return low, high
    low, high = (torch.where(x > 0, torch.exp2(quantization.next_exponent(x)), 0.0) for x in (low, high))
    return low, high


def nearest_power(scale: Tensor) -> Tensor:
    """The power of two that a scale stands for where products have rounded it; elsewhere the scale itself."""
    power = torch.exp2(scale.log2().round())
    return torch.where((scale / power - 1).abs() <= _SCALE_STEPS * error_budget.FLOAT32_ROUNDOFF, power, scale)


def windows(x: Tensor, ratio: int, overlap: bool, missing: float) -> Tensor:
    """[G, C·m, D] of columns [S, C·D] of a request's tokens: those that each complete group of m takes.

    C is 2 with overlap and else 1. missing: what stands for the tokens before the first group.
    """
    groups = x[: len(x) // ratio * ratio].unflatten(0, (-1, ratio))
    if not overlap:
        return groups
    before, own = groups.chunk(2, dim=-1)
    return torch.cat((torch.cat((torch.full_like(before[:1], missing), before[:-1])), own), dim=1)


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

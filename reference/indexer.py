"""The golden lightning indexer: scores of tokens and top-k of logits; index queries, index keys and compressed keys.

score(t, s) = Σ_h w[t, h] · relu(q[t, h] · k[s]), for every token s of the row's request up to its own. Of the steps
that queries and keys are prepared by, it is said by how much a faithful kernel may be off.
Sources: vLLM's ``sparse_attn_indexer``, ``top_k_per_row_prefill``, ``fused_indexer_q_rope_quant`` and
``DeepseekCompressor``, DeepGEMM's ``fp8_mqa_logits``, the ``Indexer`` of DeepSeek-V3.2-Exp's inference code, and the
compressors of transformers' ``deepseek_v4`` and the pools of its ``glm5_next``.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from mla_conformance.reference import attention, error_budget, quantization

_SUMS = 2  # a score is a sum over heads of sums over columns


@dataclass(frozen=True)
class IndexScores:
    """Scores of n rows against the tokens of their requests, and what their errors are measured by."""

    scores: Tensor  # [n, W] float64 by position, -inf from a row's bound on
    magnitude: Tensor  # [n, W], Σ_h |w| · Σ_d |q| · |k|, magnitudes of everything that is added; 0 from there on
    bounds: Tensor  # [n] int64, tokens that a row may see

    @property
    def visible(self) -> Tensor:
        return torch.arange(self.scores.shape[1], device=self.bounds.device) < self.bounds.unsqueeze(1)

    def fewest(self, columns: int) -> Tensor:
        """[n] int64, tokens that a selection of so many columns names at least."""
        return self.bounds.clamp(max=columns)

    def budget(self, roundoffs: error_budget.Roundoffs) -> Tensor:
        """[n, W] largest error of a faithful kernel: products are exact in float32, sums are not."""
        relative = _SUMS * roundoffs.accumulation * error_budget.FLOAT32_ROUNDOFF + roundoffs.keys + roundoffs.scores
        return relative * self.magnitude


def index_scores(
    q: Tensor,  # [T, H, D]
    weights: Tensor,  # [T, H]
    k: Tensor,  # [S, D]; any float dtype
    *,
    query_start_loc: attention.Starts,
    key_start_loc: attention.Starts,  # a request without keys sees none
    rows: Sequence[int] | None = None,  # ascending query numbers; None for all
) -> IndexScores:
    """Scores of each query token for the tokens of its request up to its own, which is the last of as many."""
    if q.dim() != 3 or weights.shape != q.shape[:2] or k.dim() != 2 or k.shape[1] != q.shape[2]:
        shapes = f"{tuple(q.shape)}, {tuple(weights.shape)} and {tuple(k.shape)}"
        raise ValueError(f"expected q [T, H, D], weights [T, H] and k [S, D], got {shapes}")
    q = q.to(torch.float32) if q.dtype.itemsize == 1 else q  # float8 cannot be indexed everywhere
    chosen = torch.arange(len(q)) if rows is None else torch.tensor(rows, dtype=torch.long)
    # A row may see the tokens of its request without the queries behind it.
    batch = list(zip(attention.segments(query_start_loc), attention.segments(key_start_loc), strict=True))
    counts = [
        max(0, keys.stop - keys.start - queries.stop + row + 1)
        for queries, keys in batch
        for row in range(queries.start, queries.stop)
    ]
    bounds = torch.tensor(counts, dtype=torch.long)[chosen].to(q.device)
    scores = torch.full((len(chosen), int(bounds.max()) if len(bounds) else 0), -torch.inf, dtype=torch.float64)
    found = IndexScores(scores.to(q.device), torch.zeros_like(scores, device=q.device), bounds)
    for queries, keys in batch:
        own = ((chosen >= queries.start) & (chosen < queries.stop)).nonzero()[:, 0].to(q.device)
        key = k[keys].to(torch.float64)
        # So many rows at a time that their products with all keys fit the workspace.
        for part in own.split(max(1, attention.workspace_elements(q.device) // (q.shape[1] * max(1, len(key))))):
            number = chosen.to(q.device)[part]
            query, weight = q[number].to(torch.float64), weights[number].to(torch.float64).unsqueeze(1)
            dots = (query.flatten(0, 1) @ key.mT).view(*query.shape[:2], len(key))
            found.scores[part, : len(key)] = (weight @ dots.clamp(min=0.0)).squeeze(1)
            # Σ_h |w| · Σ_d |q| · |k| = Σ_d (Σ_h |w| · |q|) · |k|.
            found.magnitude[part, : len(key)] = (weight.abs() @ query.abs()).squeeze(1) @ key.abs().mT
    found.scores.masked_fill_(~found.visible, -torch.inf)
    found.magnitude.masked_fill_(~found.visible, 0.0)
    return found


_FLUSHED = 2.0**-126  # below it processors flush subnormals to 0
_BEYOND = 1e300  # stands for infinity: larger than any logit, and finite, so that differences are numbers


@dataclass(frozen=True)
class WindowScores(IndexScores):
    """Logits of n rows by position in their windows; exact, so that the magnitude of what is added is 0."""

    unordered: Tensor  # [n] bool, rows that hold a NaN, of which no order is known

    def fewest(self, columns: int) -> Tensor:
        """[n] int64, columns that a selection names at least; of a row without an order it may leave out any."""
        return super().fewest(columns).masked_fill(self.unordered, 0)


def window_scores(logits: Tensor, lengths: Tensor, row_starts: Tensor | None = None) -> WindowScores:
    """The logits [n, C] of each row's window as scores, by lengths [n] and first columns [n], None for 0."""
    bounds, rows, columns = lengths.long(), *logits.shape
    starts = torch.zeros_like(bounds) if row_starts is None else row_starts.long()
    position = torch.arange(int(bounds.max()) if rows else 0, device=logits.device)
    visible = position < bounds.unsqueeze(1)
    column = (starts.unsqueeze(1) + position).clamp(max=max(0, columns - 1))
    values = logits.gather(1, column).double() if columns else logits.new_zeros(rows, 0, dtype=torch.float64)
    unordered = (values.isnan() & visible).any(dim=1)
    scores = values.masked_fill(values.abs() < _FLUSHED, 0.0).nan_to_num(0.0, _BEYOND, -_BEYOND)
    scores = scores.masked_fill(unordered.unsqueeze(1), 0.0).masked_fill(~visible, -torch.inf)
    return WindowScores(scores, torch.zeros_like(scores), bounds, unordered)


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
        part = whole[..., first : first + width]
        a, b = (part[..., 0::2], part[..., 1::2]) if interleaved else part.tensor_split(2, dim=-1)
        turned = a * own_cos + sign * b * own_sin, b * own_cos + a * own_sin
        return torch.stack(turned, dim=-1).flatten(-2) if interleaved else torch.cat(turned, dim=-1)

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

"""The terms of an error budget: sums over the visible keys that a first-order bound is made of, from the definition.

What projecting rounds has terms of its own, where the weights of ``kv_b_proj`` are dense. A faithful layer multiplies
latents out to keys and values, or absorbs W_UK into the query and applies W_UV to what it attended; either way each
product is accumulated in float32 and rounded once to the model's dtype.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, fields
from itertools import pairwise

import torch
from torch import Tensor

from mla_conformance.reference.projections import split_kv_b_proj


@dataclass(frozen=True)
class ErrorTerms:
    """Sums over the visible keys that a first-order error bound is made of, float64; float32 from `blockwise`.

    magnitude [T, N, V]: Σ p·|v|, the error of rounding p or v relative to a unit roundoff.
    score [T, N, V]: Σ p·(Σ_d |scale|·|q_d|·|k_d|)·|v|, that of accumulating the scores.
    squares [T, N, V]: Σ p²·v², the variance of independent roundings of p.
    peak [T, N, V]: max(p)·Σ |v|, the error of p's absolute floor: a kernel stores p relative to the largest, and what
        is tiny beside it rounds to a subnormal or to 0.
    lse_score [N, T]: Σ p·(Σ_d |scale|·|q_d|·|k_d|), what the score's accumulation does to the LSE.

    Where they are asked for, what rounding each key, and the value that it holds, once more does by the scores:
    key_spread [T, N, V]: Σ p²·(Σ_d (scale·q_d·k_d)²)·(v - o)², the variance of roundings that are independent.
    key_shared [T, N]: Σ_d (scale·q_d)²·(Σ p·k_d·(v - o))², averaged over the columns, that of roundings which all keys
        have in common, element by element; estimated from random combinations of the columns, since the sum itself has
        as many products for each row as a layer has for all.
    key_shift [T, N, V]: |Σ p·s·(v - o)| + |o| with s the score, the error of one that all elements of all keys share.
    """

    magnitude: Tensor
    score: Tensor
    squares: Tensor
    peak: Tensor
    lse_score: Tensor
    key_spread: Tensor | None = None
    key_shared: Tensor | None = None
    key_shift: Tensor | None = None

    def by_name(self) -> dict[str, Tensor]:
        """The terms that were asked for."""
        return {name: term for name, term in vars(self).items() if term is not None}

    def map(self, change: Callable[[Tensor], Tensor]) -> "ErrorTerms":
        """Each of them changed; ``change`` is given tensors with the tokens first."""
        return ErrorTerms(
            **{name: change(x.mT).mT if name == "lse_score" else change(x) for name, x in self.by_name().items()}
        )

    def parts(self) -> Iterator[Tensor]:
        """The terms that were asked for, views with the tokens first."""
        return (x.mT if name == "lse_score" else x for name, x in self.by_name().items())


@dataclass(frozen=True)
class ProjectedTerms:
    """Sums over the visible keys, [T, N, V] float64.

    A, E and E_l, Q, W and Y are terms of `ErrorTerms` (SPEC 4.2), with ~ those of an absorbed query and latents for
    keys; o_c = Σ p·c is what a row attended of the latents, before W_UV.

    rounding: the error of projections that are rounded to a unit roundoff, by the route where it is larger: keys and
        values, E + E_l·|o| + A, or the absorbed query and the attended latent, E~ + E_l~·|o| + Σ_l |o_c|·|W_UV|.
    variance: the same of independent roundings, Q + o² + W + Y or Y~ + Σ_l o_c²·W_UV².
    latent_rounding: that of latents rounded once, E~ + E_l~·|o| + magnitude.
    latent_variance: W~ + Y~ + latent_squares.
    magnitude: Σ p·Σ_l |c|·|W_UV|, the error of accumulating latents or of rounding parts of their sum.
    latent_squares: Σ_l W_UV²·(Σ p²·c² + o_c²), the variance of such roundings, independent or the same for all keys.
    accumulation: magnitude and what accumulating every product of a score does, Σ |q|·|W_UK|·|c|.
    """

    rounding: Tensor
    variance: Tensor
    latent_rounding: Tensor
    latent_variance: Tensor
    magnitude: Tensor
    latent_squares: Tensor
    accumulation: Tensor

    def map(self, change: Callable[[Tensor], Tensor]) -> "ProjectedTerms":
        """Each of them changed."""
        return ProjectedTerms(**{name: change(term) for name, term in vars(self).items()})


def key_terms(q: Tensor, k: Tensor, v: Tensor, p: Tensor, scores: Tensor, scale: float) -> dict[str, Tensor]:
    """The key terms by name for operands with the heads first, weights and scores [N, T, S]."""
    output, weights = p @ v, p.square() * (scale**2 * (q.square() @ k.square().mT))
    # Σ w·(v - o)², multiplied out: the differences themselves are too many to be held.
    spread = weights @ v.square() - 2 * output * (weights @ v) + output.square() * weights.sum(dim=-1, keepdim=True)
    scored = p * scores
    shift = (scored @ v - output * scored.sum(dim=-1, keepdim=True)).abs() + output.abs()
    shared = _shared_variance(q, k, v, p, output, scale)
    return {
        "key_spread": spread.clamp(min=0.0).transpose(0, 1),
        "key_shared": shared.mT,
        "key_shift": shift.transpose(0, 1),
    }


_COMBINATIONS = 4


def _shared_variance(q: Tensor, k: Tensor, v: Tensor, p: Tensor, output: Tensor, scale: float) -> Tensor:
    """[N, T] estimate of key_shared; a sum of squares over columns is the mean over random signs of them."""
    generator = torch.Generator().manual_seed(0)
    signs = torch.randint(0, 2, (v.shape[-1], _COMBINATIONS), generator=generator).to(v) * 2 - 1
    deviations = p.unsqueeze(-1) * ((v @ signs).unsqueeze(1) - (output @ signs).unsqueeze(2))
    moments = torch.einsum("nsd,ntsr->ntdr", k.expand(len(q), -1, -1), deviations)
    return (scale**2 * q.square().unsqueeze(-1) * moments.square()).sum(dim=(2, 3)) / signs.numel()


def error_terms(q: Tensor, k: Tensor, v: Tensor, p: Tensor, visible: Tensor, scale: float) -> ErrorTerms:
    """The sums of ErrorTerms for operands with the heads first, weights p [N, T, S] and visible [T, S]."""
    weighted_scores = p * (scale * (q.abs() @ k.abs().mT))
    largest = p.amax(dim=-1, keepdim=True) if p.shape[-1] else p.sum(dim=-1, keepdim=True)
    return ErrorTerms(
        magnitude=(p @ v.abs()).transpose(0, 1),
        score=(weighted_scores @ v.abs()).transpose(0, 1),
        squares=(p.square() @ v.square()).transpose(0, 1),
        peak=(largest * (visible.to(torch.float64) @ v.abs())).transpose(0, 1),
        lse_score=weighted_scores.sum(dim=-1),
    )


@dataclass(frozen=True)
class Projection:
    """What k and v are projected from: latents kv_c [S, L] and w_kv_b [L, N, P + V], both float64."""

    kv_c: Tensor
    w_kv_b: Tensor


def projected_terms(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    projection: Projection,
    *,
    query_start_loc: Sequence[int],
    key_start_loc: Sequence[int],
    scale: float,
) -> ProjectedTerms:
    """The terms of causal attention, operands as for ``attention``; all pairs of a request are held in memory."""
    nope = projection.w_kv_b.shape[-1] - v.shape[-1]
    w_uk, w_uv = (part.transpose(0, 1) for part in split_kv_b_proj(projection.w_kv_b, nope))
    found = []
    for (first, last), (start, stop) in zip(pairwise(query_start_loc), pairwise(key_start_loc), strict=True):
        by_head = [x.transpose(0, 1).double() for x in (q[first:last], k[start:stop], v[start:stop])]
        found.append(_Request(by_head, projection.kv_c[start:stop], (w_uk, w_uv), scale).terms())
    return ProjectedTerms(
        **{field.name: torch.cat([getattr(part, field.name) for part in found]) for field in fields(ProjectedTerms)}
    )


class _Request:
    """One request: q [N, T, P + R], k [N, S, P + R] and v [N, S, V]; kv_c [S, L]; w_uk [N, L, P] and w_uv [N, L, V]."""

    def __init__(self, operands: Sequence[Tensor], kv_c: Tensor, weights: tuple[Tensor, Tensor], scale: float) -> None:
        self.q, self.k, self.v = q, k, v = operands
        self.kv_c, self.scale, (self.w_uk, self.w_uv) = kv_c, scale, weights
        tokens, keys = q.shape[1], k.shape[1]
        self.visible = torch.ones(tokens, keys, dtype=torch.bool, device=q.device).tril(keys - tokens)
        scores = scale * (q @ k.mT)
        # Masked again, as in the definition: a row without visible keys must weigh nothing.
        self.p = torch.softmax(scores.masked_fill(~self.visible, -torch.inf), dim=-1).masked_fill(~self.visible, 0.0)
        self.scores = scores.masked_fill(~self.visible, 0.0)
        self.output, self.attended = self.p @ v, self.p @ kv_c

    def terms(self) -> ProjectedTerms:
        latents = torch.cat([self.kv_c.expand(len(self.q), -1, -1), self.k[..., self.w_uk.shape[-1] :]], dim=-1)
        absorbed, every_product = self._absorbed(self.q, self.w_uk), self._absorbed(self.q.abs(), self.w_uk.abs())
        spread, shared = self._variances(self.q, self.k)
        latent_spread, latent_shared = self._variances(absorbed, latents)
        moved, weighted = self._moved(absorbed, latents), self.w_uv.abs()
        magnitude = (self.p @ self.kv_c.abs()) @ weighted
        attended_squares = self.attended.square() @ self.w_uv.square()
        latent_squares = (self.p.square() @ self.kv_c.square()) @ self.w_uv.square() + attended_squares
        multiplied_out = self._moved(self.q, self.k) + self.p @ self.v.abs()
        independent = self.p.square() @ self.v.square() + self.output.square() + spread + shared
        terms = ProjectedTerms(
            rounding=torch.maximum(multiplied_out, moved + self.attended.abs() @ weighted),
            variance=torch.maximum(independent, latent_shared + attended_squares),
            latent_rounding=moved + magnitude,
            latent_variance=latent_spread + latent_shared + latent_squares,
            magnitude=magnitude,
            latent_squares=latent_squares,
            accumulation=magnitude + self._moved(every_product, latents),
        )
        return terms.map(lambda term: term.transpose(0, 1))

    def _absorbed(self, q: Tensor, w_uk: Tensor) -> Tensor:
        """[N, T, L + R]."""
        q_nope, q_pe = q.tensor_split([w_uk.shape[-1]], dim=-1)
        return torch.cat([q_nope @ w_uk.mT, q_pe], dim=-1)

    def _moved(self, q: Tensor, k: Tensor) -> Tensor:
        """[N, T, V] what scores do that are off by the sums of magnitudes of these operands."""
        terms = error_terms(q, k, self.v, self.p, self.visible, abs(self.scale))
        return terms.score.transpose(0, 1) + terms.lse_score.unsqueeze(-1) * self.output.abs()

    def _variances(self, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        """W [N, T, V] and Y [N, T, 1] of these operands."""
        terms = key_terms(q, k, self.v, self.p, self.scores, self.scale)
        return terms["key_spread"].transpose(0, 1), terms["key_shared"].mT.unsqueeze(-1)

"""The terms of what projecting rounds, from the definition: what a layer multiplies out, and what it absorbs."""

from collections.abc import Sequence
from dataclasses import dataclass, fields

import torch
from torch import Tensor

from mla_conformance.reference.attention import error_terms, key_terms, segments
from mla_conformance.reference.projected_terms import ProjectedTerms
from mla_conformance.reference.projections import split_kv_b_proj


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
    for rows, keys in zip(segments(query_start_loc), segments(key_start_loc), strict=True):
        by_head = [x.transpose(0, 1).double() for x in (q[rows], k[keys], v[keys])]
        found.append(_Request(by_head, projection.kv_c[keys], (w_uk, w_uv), scale).terms())
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

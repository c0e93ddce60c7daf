"""The matrices of an MLA layer (arXiv:2405.04434), the products with them and RoPE in float64; what projecting rounds.

A faithful layer multiplies latents out to keys and values, or absorbs W_UK into the query and applies W_UV to what it
attended; either way each product is accumulated in float32 and rounded once to the model's dtype.
"""

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from mla_conformance.reference.attention import ProjectedTerms, Starts, key_terms, segments


@dataclass(frozen=True)
class MLAWeights:
    """The weights of one layer, one float dtype and device."""

    W_DQ: Tensor | None  # hidden to latent query; None where queries are projected from the hidden state
    W_UQ: Tensor  # latent query to the two query parts
    W_QR: Tensor
    W_DKV: Tensor  # hidden to the cached latent
    W_UK: Tensor  # latent to key
    W_KR: Tensor  # hidden to the shared rotary key
    W_UV: Tensor  # latent to value
    W_O: Tensor  # heads to hidden
    q_norm: Tensor | None = None  # of the RMSNorms of the two latents and of the rotary key
    kv_norm: Tensor | None = None
    k_pe_norm: Tensor | None = None
    W_G: Tensor | None = None  # to a gate of each value, or of each head
    sink: Tensor | None = None  # [N], logits

    def widened(self) -> "MLAWeights":
        return replace(self, **{name: weight.double() for name, weight in vars(self).items() if weight is not None})


def kv_b_proj(w_uk: Tensor, w_uv: Tensor) -> Tensor:
    """[W_UK; W_UV] concatenated per head: [L, N, P] and [L, N, V] give [L, N, P+V], dtype kept."""
    return torch.cat((w_uk, w_uv), dim=-1)


def split_kv_b_proj(weight: Tensor, qk_nope_head_dim: int) -> tuple[Tensor, Tensor]:
    """The inverse of `kv_b_proj`: [L, N, P+V] gives views (W_UK [L, N, P], W_UV [L, N, V])."""
    return weight[..., :qk_nope_head_dim], weight[..., qk_nope_head_dim:]


def up_project(kv_c: Tensor, w_kv_b: Tensor) -> Tensor:
    """Latents [S, L] to keys (first P columns) and values (last V): [S, N, P+V] float64."""
    return torch.einsum("sl,lnd->snd", kv_c.to(torch.float64), w_kv_b.to(torch.float64))


def expand_key(k_nope: Tensor, k_pe: Tensor) -> Tensor:
    """Give every head the shared rotary part: k_nope [S, N, P] and k_pe [S, R] give k [S, N, P+R], dtype kept."""
    return torch.cat((k_nope, k_pe.unsqueeze(1).expand(-1, k_nope.shape[1], -1)), dim=-1)


def rms_norm(x: Tensor, weight: Tensor, epsilon: float) -> Tensor:
    """Rows of x [..., D] by the root of their mean square, times weight [D]: float64. Source: arXiv:1910.07467."""
    x = x.to(torch.float64)
    return weight.to(torch.float64) * (x * torch.rsqrt(x.square().mean(dim=-1, keepdim=True) + epsilon))


@dataclass(frozen=True, kw_only=True)
class Rotation:
    frequencies: tuple[float, ...]  # radians a token, one for each of the R/2 pairs
    interleaved: bool  # True pairs elements (2i, 2i+1), as DeepSeek does; False pairs (i, i + R/2), the NeoX style
    magnitude: float = 1.0  # factor of what was rotated, 1 but for YaRN

    @staticmethod
    def plain(dim: int, *, base: float = 10000.0, interleaved: bool) -> "Rotation":
        """Pair i of the R = ``dim`` elements turns by base^(-2i/R) radians a token."""
        return Rotation(frequencies=plain_frequencies(dim, base), interleaved=interleaved)

    @property
    def dim(self) -> int:
        return 2 * len(self.frequencies)

    def table(self, positions: Tensor) -> Tensor:
        """[n, R] float64 for positions [n]: the cosines of the R/2 pairs times the magnitude, then their sines."""
        frequencies = torch.tensor(self.frequencies, dtype=torch.float64, device=positions.device)
        angle = positions.to(torch.float64)[:, None] * frequencies
        return self.magnitude * torch.cat((angle.cos(), angle.sin()), dim=-1)


def plain_frequencies(dim: int, base: float) -> tuple[float, ...]:
    """base^(-2i/dim) for each of the dim/2 pairs i, radians a token."""
    exponent = torch.arange(0, dim, 2, dtype=torch.float64) / max(dim, 1)
    return tuple(torch.pow(base, -exponent).tolist())


@dataclass(frozen=True)
class Projection:
    """What k and v are projected from: latents kv_c [S, L] and w_kv_b [L, N, P + V], both float64."""

    kv_c: Tensor
    w_kv_b: Tensor


def projected_terms(
    q: Tensor, k: Tensor, v: Tensor, source: Projection, *, query_start_loc: Starts, key_start_loc: Starts, scale: float
) -> ProjectedTerms:
    """The terms of causal attention, operands as for ``attention``; all pairs of a request are held in memory."""
    nope = source.w_kv_b.shape[-1] - v.shape[-1]
    w_uk, w_uv = (part.transpose(0, 1) for part in split_kv_b_proj(source.w_kv_b, nope))
    found = []
    for rows, seen in zip(segments(query_start_loc), segments(key_start_loc), strict=True):
        queries, keys, values = (x.transpose(0, 1).double() for x in (q[rows], k[seen], v[seen]))
        found.append(_request_terms(queries, keys, values, source.kv_c[seen], w_uk, w_uv, scale))
    return ProjectedTerms(**{name: torch.cat([part[name] for part in found]) for name in found[0]})


def _request_terms(
    q: Tensor, k: Tensor, v: Tensor, kv_c: Tensor, w_uk: Tensor, w_uv: Tensor, scale: float
) -> dict[str, Tensor]:
    """Of q [N, T, P + R], k [N, S, P + R] and v [N, S, V]; kv_c [S, L]; w_uk [N, L, P] and w_uv [N, L, V]."""
    tokens, keys, nope = q.shape[1], k.shape[1], w_uk.shape[-1]
    visible = torch.ones(tokens, keys, dtype=torch.bool, device=q.device).tril(keys - tokens)
    scores = scale * (q @ k.mT)
    # Masked again, as in the definition: a row without visible keys must weigh nothing.
    p = torch.softmax(scores.masked_fill(~visible, -torch.inf), dim=-1).masked_fill(~visible, 0.0)
    scores = scores.masked_fill(~visible, 0.0)
    output, attended, absolute = p @ v, p @ kv_c, v.abs()

    def absorbed(q: Tensor, w_uk: Tensor) -> Tensor:
        """[N, T, L + R]."""
        return torch.cat([q[..., :nope] @ w_uk.mT, q[..., nope:]], dim=-1)

    def moved(q: Tensor, k: Tensor) -> Tensor:
        """[N, T, V] what scores do that are off by the sums of magnitudes of these operands."""
        weighted = (q.abs() @ k.abs().mT).mul_(abs(scale)).mul_(p)
        return weighted @ absolute + weighted.sum(dim=-1, keepdim=True) * output.abs()

    def variances(q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        """W [N, T, V] and Y [N, T, 1] of these operands."""
        terms = key_terms(q, k, v, p, output, scores, scale)
        return terms["key_spread"].transpose(0, 1), terms["key_shared"].mT.unsqueeze(-1)

    latents = torch.cat([kv_c.expand(len(q), -1, -1), k[..., nope:]], dim=-1)
    query = absorbed(q, w_uk)
    spread, shared = variances(q, k)
    latent_spread, latent_shared = variances(query, latents)
    by_latents, weighted = moved(query, latents), w_uv.abs()
    magnitude = (p @ kv_c.abs()) @ weighted
    attended_squares = attended.square() @ w_uv.square()
    latent_squares = (p.square() @ kv_c.square()) @ w_uv.square() + attended_squares
    multiplied_out = moved(q, k) + p @ absolute
    independent = p.square() @ v.square() + output.square() + spread + shared
    terms = {
        "rounding": torch.maximum(multiplied_out, by_latents + attended.abs() @ weighted),
        "variance": torch.maximum(independent, latent_shared + attended_squares),
        "latent_rounding": by_latents + magnitude,
        "latent_variance": latent_spread + latent_shared + latent_squares,
        "magnitude": magnitude,
        "latent_squares": latent_squares,
        "accumulation": magnitude + moved(absorbed(q.abs(), w_uk.abs()), latents),
    }
    return {name: term.transpose(0, 1) for name, term in terms.items()}

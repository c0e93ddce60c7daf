"""An MLA layer (arXiv:2405.04434) in float64: matrices, the products with them, RoPE, and the steps that judge layers.

Behind them its indexer, up to what scores are made of: queries, keys and weights. Last what projecting rounds. A
faithful layer multiplies latents out to keys and values, or absorbs W_UK into the query and applies W_UV to what it
attended; either way each product is accumulated in float32 and rounded once to the model's dtype. Sources of the
indexer: that of DeepSeek-V3.2-Exp's inference code and of transformers' DeepSeek-V3.2, GLM-5 and HY-V4.
"""

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from mla_conformance.reference.attention import ProjectedTerms, Starts, key_terms, segments
from mla_conformance.reference.indexer import Prepared, layer_norm, rotated


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


@dataclass(frozen=True, kw_only=True)
class LayerSpec:
    rotation: Rotation | None  # RoPE of queries and shared key; None rotates nothing, however wide the rotary part is
    q_norm: float | None = None  # epsilon of an RMSNorm of the latent query; None without
    kv_norm: float | None = None  # of the cached latent
    k_pe_norm: float | None = None  # of the shared key before it is rotated
    doubled_query_latent: bool = False  # whether queries are projected from the latent as it was as well
    q_factor: float = 1.0  # of the queries, behind the norms
    kv_factor: float = 1.0  # of the cached latent


def latents(hidden: Tensor, positions: Tensor, weights: MLAWeights, spec: LayerSpec) -> tuple[Tensor, Tensor]:
    """What a layer caches of hidden states [T, H] at positions [T]: (kv_c [T, L], k_pe [T, R]), float64."""
    w, h = weights.widened(), hidden.to(torch.float64)
    kv_c = _normed(h @ w.W_DKV, w.kv_norm, spec.kv_norm)
    k_pe = _normed(h @ w.W_KR, w.k_pe_norm, spec.k_pe_norm)
    return spec.kv_factor * kv_c, _rotated(k_pe, positions, spec)


def query_latent(hidden: Tensor, weights: MLAWeights, spec: LayerSpec) -> Tensor:
    """[T, columns] float64 that queries are projected from, of hidden states [T, H]."""
    w, h = weights.widened(), hidden.to(torch.float64)
    q_c = h if w.W_DQ is None else h @ w.W_DQ
    normed = _normed(q_c, w.q_norm, spec.q_norm)
    return torch.cat((normed, q_c), dim=-1) if spec.doubled_query_latent else normed


def queries(q_c: Tensor, positions: Tensor, weights: MLAWeights, spec: LayerSpec) -> tuple[Tensor, Tensor]:
    """q_nope [T, N, P] and q_pe [T, N, R] float64, the latter rotated, of what `query_latent` gives."""
    w = weights.widened()
    q_nope, q_pe = (torch.einsum("tl,lnd->tnd", q_c, part) for part in (w.W_UQ, w.W_QR))
    return spec.q_factor * q_nope, spec.q_factor * _rotated(q_pe, positions, spec)


def _normed(x: Tensor, weight: Tensor | None, epsilon: float | None) -> Tensor:
    if epsilon is None:
        return x
    assert weight is not None, "a layer with a norm has its weight"
    return rms_norm(x, weight, epsilon)


def _rotated(x: Tensor, positions: Tensor, spec: LayerSpec) -> Tensor:
    if spec.rotation is None:
        return x
    return rotated(Prepared.of(x), spec.rotation.table(positions), 0, spec.rotation.interleaved).values


@dataclass(frozen=True)
class IndexerWeights:
    wq_b: Tensor  # [Lq, H, D], latent query to the queries of H heads
    wk: Tensor  # [hidden, D]
    k_norm: Tensor  # [D], of the keys' LayerNorm
    k_norm_bias: Tensor  # [D]
    weights_proj: Tensor  # [hidden, H]


@dataclass(frozen=True, kw_only=True)
class IndexerSpec:
    rotation: Rotation  # RoPE of queries and keys
    rope_last: bool  # whether the last columns are rotated, not the first
    epsilon: float  # of the keys' norm


def index_keys(hidden: Tensor, positions: Tensor, weights: IndexerWeights, spec: IndexerSpec) -> Prepared:
    """Keys [T, D] of hidden states [T, hidden] at positions [T]: normalised, then rotated."""
    k = Prepared.of(hidden.to(torch.float64) @ weights.wk.to(torch.float64))
    return _turned(layer_norm(k, weights.k_norm, weights.k_norm_bias, spec.epsilon), positions, spec)


def index_queries(query_latent: Tensor, positions: Tensor, weights: IndexerWeights, spec: IndexerSpec) -> Prepared:
    q = torch.einsum("tl,lhd->thd", query_latent.to(torch.float64), weights.wq_b.to(torch.float64))
    return _turned(Prepared.of(q), positions, spec)


def index_weights(hidden: Tensor, weights: IndexerWeights) -> Tensor:
    """[T, H] float64 weights of the heads with all that scales a score."""
    scale = weights.wq_b[0].numel() ** -0.5
    return hidden.to(torch.float64) @ weights.weights_proj.to(torch.float64) * scale


def _turned(x: Prepared, positions: Tensor, spec: IndexerSpec) -> Prepared:
    first = (x.values.shape[-1] - spec.rotation.dim) * spec.rope_last
    return rotated(x, spec.rotation.table(positions), first, spec.rotation.interleaved)


Projection = tuple[Tensor, Tensor]  # what k and v are projected from: latents [S, L] and weights [L, N, P + V], float64


def projected_terms(
    q: Tensor, k: Tensor, v: Tensor, source: Projection, *, query_start_loc: Starts, key_start_loc: Starts, scale: float
) -> ProjectedTerms:
    """The terms of causal attention, operands as for ``attention``; all pairs of a request are held in memory."""
    kv_c, w_kv_b = source
    split = split_kv_b_proj(w_kv_b, w_kv_b.shape[-1] - v.shape[-1])
    w_uk, w_uv = (part.transpose(0, 1) for part in split)
    found = []
    for rows, seen in zip(segments(query_start_loc), segments(key_start_loc), strict=True):
        queries, keys, values = (x.transpose(0, 1).double() for x in (q[rows], k[seen], v[seen]))
        found.append(_request_terms(queries, keys, values, kv_c[seen], w_uk, w_uv, scale))
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

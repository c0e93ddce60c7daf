"""The matrices of an MLA layer and the products with them.

The names are those of the DeepSeek-V2 paper (arXiv:2405.04434) as vLLM's MLA documentation spells them. The golden
products widen their inputs to float64 and never round; `expand_key` and the two `kv_b_proj` functions only copy.
"""

from dataclasses import dataclass, replace

import torch
from torch import Tensor


@dataclass(frozen=True)
class MLAWeights:
    """The weights of one layer, one float dtype and device.

    W_DQ [H, Lq] hidden to latent query, None where queries are projected from the hidden state, so that Lq is H;
    W_UQ [Lq, N, P] and W_QR [Lq, N, R] latent query to the two query parts; W_DKV [H, L] hidden to the cached latent;
    W_KR [H, R] hidden to the shared rotary key; W_UK [L, N, P] and W_UV [L, N, V] latent to key and value;
    W_O [N*V, H] heads to hidden.

    Where a model has them: q_norm [Lq], kv_norm [L] and k_pe_norm [R], the weights of RMSNorms of the two latents and
    of the rotary key; W_G [H or Lq, N, V or 1] to a gate of each value, or of each head; sink [N], logits.
    `layer.LayerSpec` says which, and of what shape.
    """

    W_DQ: Tensor | None
    W_UQ: Tensor
    W_QR: Tensor
    W_DKV: Tensor
    W_UK: Tensor
    W_KR: Tensor
    W_UV: Tensor
    W_O: Tensor
    q_norm: Tensor | None = None
    kv_norm: Tensor | None = None
    k_pe_norm: Tensor | None = None
    W_G: Tensor | None = None
    sink: Tensor | None = None

    def present(self) -> dict[str, Tensor]:
        """The weights that the layer has, by name."""
        return {name: weight for name, weight in vars(self).items() if weight is not None}

    def widened(self) -> "MLAWeights":
        """The same in float64."""
        return replace(self, **{name: weight.to(torch.float64) for name, weight in self.present().items()})


def kv_b_proj(w_uk: Tensor, w_uv: Tensor) -> Tensor:
    """[W_UK; W_UV] concatenated per head: [L, N, P] and [L, N, V] give [L, N, P+V], dtype kept."""
    return torch.cat((w_uk, w_uv), dim=-1)


def split_kv_b_proj(weight: Tensor, qk_nope_head_dim: int) -> tuple[Tensor, Tensor]:
    """The inverse of `kv_b_proj`: [L, N, P+V] gives views (W_UK [L, N, P], W_UV [L, N, V]).

    Raises ValueError when no column is left for V.
    """
    if not 0 < qk_nope_head_dim < weight.shape[-1]:
        raise ValueError(
            f"qk_nope_head_dim must leave columns for W_UK and W_UV: expected 1..{weight.shape[-1] - 1}, "
            f"got {qk_nope_head_dim} for a weight of shape {tuple(weight.shape)}"
        )
    return weight[..., :qk_nope_head_dim], weight[..., qk_nope_head_dim:]


def up_project(kv_c: Tensor, w_kv_b: Tensor) -> Tensor:
    """Latents [S, L] to keys (first P columns) and values (last V): [S, N, P+V] float64."""
    return torch.einsum("sl,lnd->snd", kv_c.to(torch.float64), w_kv_b.to(torch.float64))


def expand_key(k_nope: Tensor, k_pe: Tensor) -> Tensor:
    """Give every head the shared rotary part: k_nope [S, N, P] and k_pe [S, R] give k [S, N, P+R], dtype kept."""
    shared = k_pe.unsqueeze(1).expand(-1, k_nope.shape[1], -1)
    return torch.cat((k_nope, shared), dim=-1)


def absorb_query(q_nope: Tensor, w_uk: Tensor) -> Tensor:
    """Move W_UK from the keys into the query: q_nope [T, N, P], w_uk [L, N, P] give [T, N, L] float64.

    q·(kv_c W_UK) = (q W_UK^T)·kv_c, so that the cached latent itself serves as the key of all heads.
    """
    return torch.einsum("tnp,lnp->tnl", q_nope.to(torch.float64), w_uk.to(torch.float64))


def up_project_output(o: Tensor, w_uv: Tensor) -> Tensor:
    """Attention over latents to values: o [T, N, L], w_uv [L, N, V] give [T, N, V] float64."""
    return torch.einsum("tnl,lnv->tnv", o.to(torch.float64), w_uv.to(torch.float64))


def rms_norm(x: Tensor, weight: Tensor, epsilon: float) -> Tensor:
    """Rows of x [..., D] by the root of their mean square, times weight [D]: float64. Source: arXiv:1910.07467."""
    x = x.to(torch.float64)
    return weight.to(torch.float64) * (x * torch.rsqrt(x.square().mean(dim=-1, keepdim=True) + epsilon))

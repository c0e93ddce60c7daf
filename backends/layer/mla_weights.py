"""The two halves of ``kv_b_proj`` as an MLA layer's decode needs them."""

from typing import Any

import torch

_WEIGHT_NAMES = ("weight", "qweight", "weight_packed")


def split_kv_b_proj(
    kv_b_proj: Any, *, num_heads: int, kv_lora_rank: int, qk_nope_head_dim: int, v_head_dim: int, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor]:
    """(W_UK_T [N, P, L], W_UV [N, L, V]) of ``dtype``, of a projection from L to N·(P + V).

    Args:
        kv_b_proj: a linear layer; one with quantised weights is asked for the image of the identity, without its bias.
        num_heads: N.
        kv_lora_rank: L.
        qk_nope_head_dim: P.
        v_head_dim: V.
        dtype: of the activations.

    Raises:
        ValueError: no weight, or one of another shape.
    """
    weight = dense_weight(kv_b_proj, kv_lora_rank, dtype)
    expected = (num_heads * (qk_nope_head_dim + v_head_dim), kv_lora_rank)
    if weight.shape != expected:
        raise ValueError(
            f"expected a kv_b_proj weight [N·(P + V), L] = {list(expected)} for N = {num_heads}, "
            f"P = {qk_nope_head_dim}, V = {v_head_dim}, L = {kv_lora_rank}, got {list(weight.shape)}"
        )
    by_head = weight.to(dtype).unflatten(0, (num_heads, -1))
    w_uk, w_uv = by_head.tensor_split([qk_nope_head_dim], dim=1)
    return w_uk, w_uv.transpose(1, 2)


def dense_weight(linear: Any, in_features: int, dtype: torch.dtype) -> torch.Tensor:
    """[out, in] weight of a linear layer, dequantised if it is stored in codes.

    Raises:
        ValueError: a layer without a weight, or one that adds a bias.
    """
    stored = stored_weight(linear)
    if is_dense(stored):
        return stored
    identity = torch.eye(in_features, dtype=dtype, device=stored.device)
    if hasattr(linear, "quant_method"):
        return linear.quant_method.apply(linear, identity, bias=None).mT
    if getattr(linear, "bias", None) is not None:
        raise ValueError("expected a kv_b_proj without a bias, or a quant_method that can leave it out; got a bias")
    image = linear(identity)
    return (image[0] if isinstance(image, tuple) else image).mT


def stored_weight(linear: Any) -> torch.Tensor:
    """The weight of a linear layer as it is stored, possibly in codes.

    Raises:
        ValueError: a layer without a weight.
    """
    stored: torch.Tensor | None = next((getattr(linear, name) for name in _WEIGHT_NAMES if hasattr(linear, name)), None)
    if stored is None:
        raise ValueError(
            f"expected a linear layer with one of the attributes {', '.join(_WEIGHT_NAMES)}, got a "
            f"{type(linear).__name__}"
        )
    return stored


def is_dense(weight: torch.Tensor) -> bool:
    """Whether a stored weight holds values, not codes."""
    return weight.dtype.is_floating_point and weight.dtype.itemsize > 1

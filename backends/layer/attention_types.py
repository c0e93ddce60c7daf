"""What the classes of the attention-layer interface share (vLLM's ``v1.attention.backend``)."""

from enum import StrEnum
from typing import Protocol

import torch

from mla_conformance.backends.cache_dtypes import layout_of


class AttentionType(StrEnum):
    """Which tokens attend to which; a string, so that it can be compared with one."""

    DECODER = "decoder"
    """Causal attention among the tokens of a decoder."""
    ENCODER = "encoder"
    """Attention among the encoder's tokens of an encoder-decoder model."""
    ENCODER_ONLY = "encoder_only"
    """Attention among the tokens of a model without a decoder."""
    ENCODER_DECODER = "encoder_decoder"
    """The decoder's queries to the encoder's keys."""


class AttentionMetadata:
    """Base of what a builder tells a layer of a batch."""


class AttentionLayer(Protocol):
    """The layer on whose behalf an ``AttentionImpl`` computes: it holds the scales of quantised operands.

    Scales are float32 scalar tensors, the value that code 1.0 stands for; the floats are the same on the host.
    """

    _q_scale: torch.Tensor
    _k_scale: torch.Tensor
    _v_scale: torch.Tensor
    _q_scale_float: float
    _k_scale_float: float
    _v_scale_float: float
    _prob_scale: torch.Tensor

    def forward(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        kv_cache: torch.Tensor,
        attn_metadata: AttentionMetadata,
    ) -> torch.Tensor:
        """Attention of ``query`` to the cache after ``key`` and ``value`` were written to it."""
        ...


def is_quantized_kv_cache(kv_cache_dtype: str) -> bool:
    """Whether the cache holds codes rather than values of the model's dtype."""
    return layout_of(kv_cache_dtype) != "auto"

"""The constructor of an MLA layer's computation: sizes, kernels, weights; the steps are in ``mla_impl``."""

from typing import Any, ClassVar

import torch
from torch import Tensor

from mla_conformance.backends.cache_dtypes import layout_of
from mla_conformance.backends.kernel import HEAD_DIMS, UnsupportedConfiguration
from mla_conformance.backends.layer.attention_impl import MLAAttentionImpl
from mla_conformance.backends.layer.attention_types import AttentionType
from mla_conformance.backends.layer.cache_ops import entry_width
from mla_conformance.backends.layer.mla_metadata import MLACommonMetadata

_WEIGHT_NAMES = ("weight", "qweight", "weight_packed")


class MLAKernels(MLAAttentionImpl[MLACommonMetadata]):
    """What an MLA layer computes with.

    Symbols: N heads on this rank, L ``kv_lora_rank``, P/R/V the nope, rope and value head dims.

    Attributes:
        prefill: an instance of its prefill backend; None if it has none.
        decode: an instance of its decode backend, for the heads of all ranks; None if it has none.
    """

    # the backend whose ``get_impl_cls`` returned the class; it names the kernels
    attention_backend: ClassVar[Any] = None
    can_return_lse_for_decode = True
    W_UK_T: Tensor  # [N, P, L], once weights are processed
    W_UV: Tensor  # [N, L, V], once weights are processed

    def __init__(
        self,
        num_heads: int,
        head_size: int,
        scale: float,
        num_kv_heads: int,
        alibi_slopes: list[float] | None,
        sliding_window: int | None,
        kv_cache_dtype: str,
        logits_soft_cap: float | None,
        attn_type: str,
        kv_sharing_target_layer_name: str | None,
        q_lora_rank: int | None,
        kv_lora_rank: int,
        qk_nope_head_dim: int,
        qk_rope_head_dim: int,
        qk_head_dim: int,
        v_head_dim: int,
        kv_b_proj: Any,
        indexer: object | None = None,
    ) -> None:
        for name, value in (
            ("alibi_slopes", alibi_slopes),
            ("sliding_window", sliding_window),
            ("logits_soft_cap", logits_soft_cap),
            ("kv_sharing_target_layer_name", kv_sharing_target_layer_name),
            ("indexer", indexer),
            ("attn_type", None if attn_type == AttentionType.DECODER else attn_type),
        ):
            if value is not None:
                raise UnsupportedConfiguration(f"an MLA layer does not support {name}, got {value!r}")
        self.num_heads, self.head_size, self.scale, self.num_kv_heads = num_heads, head_size, float(scale), num_kv_heads
        self.q_lora_rank, self.kv_lora_rank, self.v_head_dim = q_lora_rank, kv_lora_rank, v_head_dim
        self.qk_nope_head_dim, self.qk_rope_head_dim, self.qk_head_dim = qk_nope_head_dim, qk_rope_head_dim, qk_head_dim
        self.kv_cache_dtype = layout_of(kv_cache_dtype)
        self.kv_b_proj = kv_b_proj
        self._prepared: tuple[object, object] = (None, None)
        entry_width(self.kv_cache_dtype, kv_lora_rank, qk_rope_head_dim)
        for name, got, expected in (
            ("head_size", head_size, kv_lora_rank + qk_rope_head_dim),
            ("qk_head_dim", qk_head_dim, qk_nope_head_dim + qk_rope_head_dim),
            ("num_kv_heads", num_kv_heads, 1),
        ):
            if got != expected:
                raise ValueError(
                    f"expected {name} {expected} for L = {kv_lora_rank}, P = {qk_nope_head_dim}, "
                    f"R = {qk_rope_head_dim} and one latent head, got {got}"
                )
        backend = self.attention_backend
        names = ("num_heads", "scale", "kv_lora_rank", *HEAD_DIMS)
        sizes = {"vllm_config": backend.vllm_config} | {name: getattr(self, name) for name in names}
        prefill, decode = backend.prefill_backend, backend.decode_backend
        if decode is not None and self.kv_cache_dtype not in decode.supported_kv_cache_dtypes:
            raise UnsupportedConfiguration(
                f"{decode.get_name()}: cache dtype {self.kv_cache_dtype} not supported (supported: "
                f"{', '.join(decode.supported_kv_cache_dtypes)})"
            )
        self.prefill: Any = None if prefill is None else prefill(**sizes)
        # A rank decodes for the heads of all of them.
        sizes["num_heads"] *= self.dcp_world_size
        self.decode: Any = None if decode is None else decode(**sizes, kv_cache_dtype=self.kv_cache_dtype)

    def process_weights_after_loading(self, act_dtype: torch.dtype) -> None:
        """Split ``kv_b_proj``, a projection from L to N·(P + V), into ``W_UK_T`` and ``W_UV`` of ``act_dtype``.

        One with quantised weights is asked for the image of the identity, without its bias.

        Raises ValueError: a projection without a weight, or with one of another shape.
        """
        linear = self.kv_b_proj
        weight = stored_weight(linear)
        if not is_dense(weight):
            identity = torch.eye(self.kv_lora_rank, dtype=act_dtype, device=weight.device)
            if hasattr(linear, "quant_method"):
                weight = linear.quant_method.apply(linear, identity, bias=None).mT
            elif getattr(linear, "bias", None) is not None:
                raise ValueError(
                    "expected a kv_b_proj without a bias, or a quant_method that can leave it out; got a bias"
                )
            else:
                image = linear(identity)
                weight = (image[0] if isinstance(image, tuple) else image).mT
        expected = (self.num_heads * (self.qk_nope_head_dim + self.v_head_dim), self.kv_lora_rank)
        if weight.shape != expected:
            raise ValueError(
                f"expected a kv_b_proj weight [N·(P + V), L] = {list(expected)} for N = {self.num_heads}, "
                f"P = {self.qk_nope_head_dim}, V = {self.v_head_dim}, L = {self.kv_lora_rank}, got {list(weight.shape)}"
            )
        by_head = weight.to(act_dtype).unflatten(0, (self.num_heads, -1))
        self.W_UK_T, w_uv = by_head.tensor_split([self.qk_nope_head_dim], dim=1)
        self.W_UV = w_uv.transpose(1, 2)

    def prepare(self, attn_metadata: MLACommonMetadata) -> None:
        """Hand the batch to the kernels.

        ``forward`` does so for a batch it has not seen; before a captured graph is replayed with new contents of the
        same buffers, whoever replays it does.

        Raises UnsupportedConfiguration: no kernel for a part of the batch; ValueError: metadata of another rank.
        """
        parts = (attn_metadata.prefill_metadata, attn_metadata.decode_metadata)
        if attn_metadata.dcp_world_size != self.dcp_world_size or attn_metadata.dcp_rank != self.dcp_rank:
            raise ValueError(
                f"expected metadata of rank {self.dcp_rank} of {self.dcp_world_size}, where the layer was made, got "
                f"those of rank {attn_metadata.dcp_rank} of {attn_metadata.dcp_world_size}; construct layer and "
                "builder inside of `with dcp_group(group)`, with decode_context_parallel_size the group's"
            )
        for role, kernel, part in zip(("prefill", "decode"), (self.prefill, self.decode), parts, strict=True):
            if part is not None and kernel is None:
                raise UnsupportedConfiguration(f"the batch has a {role}, and the layer has no {role} backend")
            if part is not None:
                kernel.prepare_metadata(part)
        self._prepared = parts

    def is_prepared(self, attn_metadata: MLACommonMetadata) -> bool:
        """Whether the last batch that the kernels were handed is this one, as it is now."""
        prefill, decode = self._prepared
        return prefill is attn_metadata.prefill_metadata and decode is attn_metadata.decode_metadata


def stored_weight(linear: Any) -> Tensor:
    """The weight of a linear layer as it is stored, possibly in codes.

    Raises ValueError: a layer without a weight.
    """
    stored: Tensor | None = next((getattr(linear, name) for name in _WEIGHT_NAMES if hasattr(linear, name)), None)
    if stored is None:
        raise ValueError(
            f"expected a linear layer with one of the attributes {', '.join(_WEIGHT_NAMES)}, got a "
            f"{type(linear).__name__}"
        )
    return stored


def is_dense(weight: Tensor) -> bool:
    """Whether a stored weight holds values, not codes."""
    return weight.dtype.is_floating_point and weight.dtype.itemsize > 1

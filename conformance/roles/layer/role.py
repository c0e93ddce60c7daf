"""What the role layer is: its support and its roundings, told from its class and the kernels that it is composed of."""

from typing import Any

import torch

from mla_conformance.backends.foreign import reasons_of
from mla_conformance.backends.kernel import DeviceCapability
from mla_conformance.backends.layer.attention_types import AttentionType
from mla_conformance.backends.layer.mla_batch import BatchForm
from mla_conformance.backends.roles import Role
from mla_conformance.roles.decode.problem import DECODE
from mla_conformance.roles.definition import RoleDefinition
from mla_conformance.roles.layer.case import LayerCase, Order
from mla_conformance.roles.layer.driver import Layer, LayerOnRanks
from mla_conformance.roles.layer.problem import LayerBatch
from mla_conformance.roles.prefill.problem import PREFILL

_ASKED = {
    "cache_write": ("get_kv_cache_shape", "copy_blocks", "swap_blocks"),
    "graph_replay": ("get_state_cls",),
}
"""What a capability asks of a layer's class that later generations have no more."""


def _kernel_reasons(layer: Any, case: LayerCase, dtype: torch.dtype, capability: DeviceCapability | None) -> list[str]:
    prefill, decode = (getattr(layer, f"{role}_backend", None) for role in ("prefill", "decode"))
    reasons: list[str] = []
    if prefill is not None and case.decodes < len(case.q):
        asked = reasons_of(prefill.validate_configuration(capability, PREFILL.config_of(case, dtype)))
        reasons += (f"prefill: {reason}" for reason in asked)
        if any(case.prefill_contexts) and not getattr(prefill, "returns_lse", True):
            reasons.append("prefill: LSE not declared, by which contexts are merged")
    if decode is not None and case.decodes:
        asked = reasons_of(decode.validate_configuration(capability, DECODE.config_of(case, dtype, lse=case.ranks > 1)))
        reasons += (f"decode: {reason}" for reason in asked)
    return reasons


class _Layer(RoleDefinition):
    def kernel(self, kernel: Any, case: LayerCase, dtype: torch.dtype, device: torch.device) -> Layer | LayerOnRanks:
        return (Layer if case.ranks == 1 else LayerOnRanks)(kernel, case, dtype, device)

    def reasons(self, kernel: Any, case: Any, dtype: torch.dtype, capability: DeviceCapability | None) -> list[str]:
        reasons = reasons_of(
            kernel.validate_configuration(
                head_size=case.kv_lora_rank + case.dimensions.qk_rope_head_dim,
                dtype=dtype,
                kv_cache_dtype=case.cache,
                block_size=case.page,
                use_mla=True,
                has_sink=False,
                use_sparse=False,
                use_mm_prefix=False,
                device_capability=capability,
                attn_type=AttentionType.DECODER,
            )
        )
        if case.order == Order.PREFILLS_FIRST and not hasattr(kernel.get_builder_cls(), "build_from_requests"):
            reasons.append("its builder takes no requests, prefills first")
        written = getattr(kernel, "tile_scales", "float32")
        if case.cache == "fp8_ds_mla" and case.scales != written:
            reasons.append(f"fp8_ds_mla with {case.scales} scales not supported (writes {written})")
        if case.out and not getattr(kernel, "accept_output_buffer", False):
            reasons.append("output buffer not declared (accept_output_buffer)")
        if case.ranks > 1 and not getattr(kernel.get_impl_cls(), "can_return_lse_for_decode", False):
            reasons.append("ranks that share tokens not declared (can_return_lse_for_decode)")
        missing = [name for name in _ASKED.get(case.capability, ()) if not hasattr(kernel, name)]
        if missing:
            reasons.append(f"not asked of its class, which has no {', '.join(missing)}")
        if hasattr(kernel, "unsupported_batch"):
            form = BatchForm(
                decodes=tuple(case.q[index] for index in case.decoding),
                prefills=tuple(q for index, q in enumerate(case.q) if index not in case.decoding),
                padding=case.pad * case.padding_counts,
                kv_cache_dtype=case.cache,
                dtype=dtype,
                dimensions=case.dimensions,
            )
            reasons += reasons_of(kernel.unsupported_batch(form), "unsupported_batch")
        return reasons or _kernel_reasons(kernel, case, dtype, capability)


LAYER = _Layer(role=Role.LAYER, batch=LayerBatch, config=None, parts=("prefill_backend", "decode_backend"))

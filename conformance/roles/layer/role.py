"""What the role layer is: how its classes are driven, and what they support by themselves and by their kernels."""

from collections.abc import Sequence
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch

from mla_conformance.backends.foreign import reasons_of
from mla_conformance.backends.kernel import DeviceCapability
from mla_conformance.backends.layer import layer_config as engine
from mla_conformance.backends.layer.attention_impl import AttentionType
from mla_conformance.backends.layer.context_parallel import (
    ContextParallelGroup,
    Lockstep,
    OnlyRank,
    Sharding,
    dcp_group,
)
from mla_conformance.backends.layer.mla_batch import BatchForm, common_metadata
from mla_conformance.backends.roles import Role
from mla_conformance.roles.decode.problem import DECODE
from mla_conformance.roles.definition import RoleDefinition
from mla_conformance.roles.layer.call import LayerCall, Linear, PackedLinear
from mla_conformance.roles.layer.case import LayerCase, Order
from mla_conformance.roles.layer.problem import LayerBatch
from mla_conformance.roles.prefill.problem import PREFILL


class Layer:
    """One layer of a model on one rank, driven as an engine drives it: its computation, its builder, its state."""

    impl: Any  # its computation, once weights were loaded
    builder: Any  # of the metadata, made with the computation
    metadata: Any  # of the batch that was prepared last

    def __init__(
        self,
        backend: Any,  # the class under test, an ``AttentionBackend``
        case: LayerCase,
        dtype: torch.dtype,
        device: torch.device,
        group: ContextParallelGroup | None = None,
    ) -> None:
        self.backend, self._case, self._device, self._group = backend, case, device, group or OnlyRank()
        # The workspace, eight times the longest sequence that is admitted, has the case's tokens, and decodes may be as
        # long as the case's. Prefixes are cached; prompts are split only where decodes come first: either alone brings
        # prefills with context.
        self.config = config = engine.LayerConfig(
            model_config=engine.ModelConfig(
                dtype=dtype,
                max_model_len=max(1, case.workspace // 8),
                head_size=case.kv_lora_rank + case.dimensions.qk_rope_head_dim,
            ),
            scheduler_config=engine.SchedulerConfig(
                max_num_seqs=max(1, min(case.workspace // 4, case.workspace_tokens) // case.page),
                chunked_prefill_enabled=case.order == Order.DECODES_FIRST,
            ),
            cache_config=engine.CacheConfig(block_size=case.page, cache_dtype=case.cache, enable_prefix_caching=True),
            parallel_config=engine.ParallelConfig(
                decode_context_parallel_size=case.ranks, cp_kv_cache_interleave_size=case.interleave
            ),
            speculative_config=engine.SpeculativeConfig(num_speculative_tokens=max(case.decode_queries, default=1) - 1),
        )
        told = {name: getattr(config, name) for name in ("model_config", "scheduler_config", "cache_config")}
        runner = SimpleNamespace(**told, device=device)
        self.state = backend.get_state_cls()(runner) if hasattr(backend, "get_state_cls") else None
        self._linear: Linear | PackedLinear | None = None

    def load(self, linear: Linear | PackedLinear) -> None:
        """Load weights, or update dense ones in place as an engine that trains does; either way they are processed.

        Weights that it has already are left alone, so that what an earlier call made of them stays.
        """
        if isinstance(self._linear, Linear) and isinstance(linear, Linear):
            if torch.equal(self._linear.weight, linear.weight):
                return
            self._linear.weight.copy_(linear.weight)
        else:
            self._linear = linear
            case, dims, head_size = self._case, self._case.dimensions, self.config.model_config.head_size
            with dcp_group(self._group), engine.set_current_config(self.config):
                self.impl = self.backend.get_impl_cls()(
                    num_heads=case.heads // case.ranks,
                    head_size=head_size,
                    scale=case.softmax_scale,
                    num_kv_heads=1,
                    kv_cache_dtype=case.cache,
                    attn_type=AttentionType.DECODER,
                    kv_lora_rank=case.kv_lora_rank,
                    kv_b_proj=linear,
                    **{name: getattr(dims, name) for name in _HEAD_DIMS},
                    **dict.fromkeys(_NOT_HERE),
                )
                # Behind its layer, which some builders look up.
                spec = engine.MLAAttentionSpec(block_size=case.page, head_size=head_size, cache_dtype_str=case.cache)
                self.builder = self.backend.get_builder_cls()(spec, ["layer"], self.config, self._device)
        self.impl.process_weights_after_loading(self.config.model_config.dtype)

    def prepare(self, call: LayerCall) -> None:
        case = self._case
        if case.order == Order.PREFILLS_FIRST:
            self.metadata = self.builder.build_from_requests(call.requests, call.padding)
            if self.state is not None:
                self.state.begin_forward(SimpleNamespace(attn_metadata=self.metadata, input_tokens=call.query))
            return
        common = common_metadata(
            call.requests,
            padding=max(call.padding, 0) if call.padding_counts else 0,
            block_size=case.page,
            device=self._device,
            sharding=Sharding(case.ranks, call.rank, case.interleave),
        )
        self.metadata = self.builder.build(0, common)

    def forward(self, call: LayerCall, output: torch.Tensor | None) -> Any:
        given = {} if output is None else {"output": output}
        operands = (call.query, call.kv_c, call.k_pe, call.image.cache)
        return self.impl.forward(self.attention_layer(call.case), *operands, self.metadata, **given)

    def kernel_evidence(self) -> dict[str, str]:
        impl = getattr(self, "impl", None)
        reported: dict[str, str] = getattr(impl, "kernel_evidence", dict)()
        for role in ("prefill", "decode"):
            found: dict[str, str] = getattr(getattr(impl, role, None), "kernel_evidence", dict)()
            reported = reported | {f"{role} {name}": value for name, value in found.items()}
        return reported

    def attention_layer(self, case: LayerCase) -> Any:
        """The module that holds a case's scales; tensors and their twins on the host, all different but the keys'."""
        scales = {"q": 0.7, "k": case.cache_scale, "v": 1.9}
        tensors = {f"_{name}_scale": torch.tensor(x, device=self._device) for name, x in scales.items()}
        floats = {f"_{name}_scale_float": x for name, x in scales.items()}
        return SimpleNamespace(**tensors, **floats, _prob_scale=torch.tensor(0.3, device=self._device))


class LayersOnRanks:
    """The ranks in this process, one after another: each to its end, or in lockstep up to each exchange."""

    def __init__(self, layers: Sequence[Any], lockstep: Lockstep | None = None) -> None:
        self._layers, self._lockstep = layers, lockstep

    def prepare(self, parts: Sequence[Any]) -> None:
        for layer, part in zip(self._layers, parts, strict=True):
            part.prepare(layer)

    def forward(self, parts: Sequence[Any]) -> list[Any]:
        for part in parts:
            part.reset()
        steps = [partial(part.on_rank, layer) for layer, part in zip(self._layers, parts, strict=True)]
        return [step() for step in steps] if self._lockstep is None else self._lockstep.run(steps)

    def kernel_evidence(self) -> dict[str, str]:
        reported: dict[str, str] = getattr(self._layers[0], "kernel_evidence", dict)()
        return reported


_HEAD_DIMS = ("qk_nope_head_dim", "qk_rope_head_dim", "qk_head_dim", "v_head_dim")
_NOT_HERE = ("alibi_slopes", "sliding_window", "logits_soft_cap", "kv_sharing_target_layer_name", "q_lora_rank")
_ASKED = {
    "cache_write": ("get_kv_cache_shape", "copy_blocks", "swap_blocks"),
    "graph_replay": ("get_state_cls",),
}
"""What a capability asks of a layer's class that later generations have no more."""


class _Layer(RoleDefinition):
    def kernel(self, kernel: Any, case: LayerCase, dtype: torch.dtype, device: torch.device) -> Layer | LayersOnRanks:
        if case.ranks == 1:
            return Layer(kernel, case, dtype, device)
        lockstep = Lockstep(case.ranks)
        return LayersOnRanks([Layer(kernel, case, dtype, device, group) for group in lockstep.groups], lockstep)

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
        if reasons:
            return reasons
        prefill, decode = (getattr(kernel, f"{role}_backend", None) for role in ("prefill", "decode"))
        if prefill is not None and case.decodes < len(case.q):
            asked = reasons_of(prefill.validate_configuration(capability, PREFILL.config_of(case, dtype)))
            reasons += (f"prefill: {reason}" for reason in asked)
            if any(case.prefill_contexts) and not getattr(prefill, "returns_lse", True):
                reasons.append("prefill: LSE not declared, by which contexts are merged")
        if decode is not None and case.decodes:
            config = DECODE.config_of(case, dtype, lse=case.ranks > 1)
            asked = reasons_of(decode.validate_configuration(capability, config))
            reasons += (f"decode: {reason}" for reason in asked)
        return reasons


LAYER = _Layer(role=Role.LAYER, batch=LayerBatch, config=None, parts=("prefill_backend", "decode_backend"))

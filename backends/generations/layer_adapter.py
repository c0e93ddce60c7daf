"""Drives an attention backend of vLLM's as a layer: the class that names its parts, unchanged, in vLLM's own module."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from importlib import import_module
from types import SimpleNamespace
from typing import Any, ClassVar, Self

import torch
from torch import Tensor

from mla_conformance.backends import cache_dtypes, foreign, kernel
from mla_conformance.backends.block_size import MultipleOf
from mla_conformance.backends.declaration import Declaration, Deviation, Precision, Rounding
from mla_conformance.backends.generations import adapted
from mla_conformance.backends.layer import context_parallel, mla_batch
from mla_conformance.backends.layer.attention_impl import AttentionLayer, AttentionMetadata, CommonAttentionMetadata
from mla_conformance.backends.layer.mla_impl import is_dense, stored_weight
from mla_conformance.reference import dimensions


@dataclass
class AdaptedLayerMetadata(AttentionMetadata):
    translated: Any  # its metadata
    # [T] int64, the caller's row of each row of the batch that the builder saw; None if they are the same
    order: Tensor | None = None


class AdaptedLayerBuilder:
    """The builder of an attention backend, made when the layer is there that it is for."""

    def __init__(self, kv_cache_spec: Any, layer_names: list[str], vllm_config: Any, device: torch.device) -> None:
        self._page, self._device = kv_cache_spec.block_size, device
        impl = vllm_config.compilation_config.static_forward_context[layer_names[0]]
        spec = impl.wrapped.customize_spec(impl.module.get_kv_cache_spec(impl.config))
        with adapted.current_config(impl.config):
            self._builder = impl.wrapped.get_builder_cls()(spec, layer_names, impl.config, device)

    def build(
        self, common_prefix_len: int, common_attn_metadata: CommonAttentionMetadata, fast_build: bool = False
    ) -> AdaptedLayerMetadata:
        """The batch is handed over as vLLM's runner describes it: rows of padding have no query and the first block."""
        common = common_attn_metadata
        seq_lens, starts_cpu = common.host_seq_lens(), common.query_start_loc_cpu
        padding = starts_cpu.diff() > seq_lens
        if bool(padding.any()):
            starts_cpu = starts_cpu.clamp(max=int(starts_cpu[int(padding.int().argmax())]))
        table = common.block_table_tensor
        same = ("num_reqs", "num_actual_tokens", "max_query_len", "max_seq_len", "seq_lens", "slot_mapping", "causal")
        translated = import_module("vllm.v1.attention.backend").CommonAttentionMetadata(
            **{name: getattr(common, name) for name in same},
            query_start_loc=starts_cpu.to(common.query_start_loc.device),
            query_start_loc_cpu=starts_cpu,
            block_table_tensor=table.masked_fill(padding.to(table.device)[:, None], 0),
            seq_lens_cpu_upper_bound=seq_lens,
        )
        return AdaptedLayerMetadata(self._builder.build(common_prefix_len, translated))

    def build_from_requests(
        self, requests: Sequence[mla_batch.LayerRequest], cuda_graph_pad_size: int = -1
    ) -> AdaptedLayerMetadata:
        """The metadata of a batch whose prefills come first: its decodes are moved before them, as an engine does."""
        order = sorted(range(len(requests)), key=lambda request: requests[request].is_prompt)
        if cuda_graph_pad_size > 0 and requests[0].is_prompt:
            raise kernel.UnsupportedConfiguration("rows of padding behind prefills not supported")
        form = {"block_size": self._page, "device": self._device, "sharding": context_parallel.Sharding()}
        moved = [requests[request] for request in order]
        built = self.build(0, mla_batch.common_metadata(moved, padding=max(cuda_graph_pad_size, 0), **form))
        if order != list(range(len(requests))):
            lengths = [request.query_len for request in requests]
            rows = torch.arange(sum(lengths)).split(lengths)
            built.order = torch.cat([rows[request] for request in order]).to(self._device)
        return built


class AdaptedLayerImpl:
    """One ``MLAAttention`` over an attention backend, with the interface of ``MLAAttentionImpl`` as it was before."""

    def __init__(self, wrapped: Any, *, num_heads: int, kv_lora_rank: int, kv_b_proj: Any, **others: Any) -> None:
        config, self.wrapped = mla_batch.get_current_config(), wrapped
        dims = dimensions.MLADimensions(**{name: others[name] for name in kernel.HEAD_DIMS})
        self._heads, self._qk_head_dim, self._v_head_dim = num_heads, dims.qk_head_dim, dims.v_head_dim
        dtype, cache = config.model_config.dtype, config.cache_config
        sizes = (config.scheduler_config.max_num_seqs, kv_lora_rank + dims.qk_rope_head_dim, num_heads)
        text = {"kv_lora_rank": kv_lora_rank, "q_lora_rank": None, "num_attention_heads": num_heads}
        model: dict[str, Any] = {"hf_text_config": SimpleNamespace(**asdict(dims), **text), "dtype": dtype}
        model["max_model_len"] = config.model_config.max_model_len
        self.config = adapted.engine_config(cache.block_size, cache.cache_dtype, *sizes, **model)
        if config.speculative_config and (drafted := adapted.drafts(config.speculative_config.num_speculative_tokens)):
            self.config.speculative_config = drafted
        weight, linear = stored_weight(kv_b_proj), kv_b_proj
        if not hasattr(kv_b_proj, "quant_method"):  # with what vLLM's layers ask of one of their own
            own = None if is_dense(weight) else SimpleNamespace(apply=lambda layer, x, bias: kv_b_proj(x)[0])
            linear = _Linear(kv_b_proj, quant_method=own, input_size_per_partition=kv_lora_rank, params_dtype=dtype)
        with adapted.current_config(self.config), weight.device:
            prefill = adapted.prefill_class(dtype, dims)[0] or NoPrefill
            form = {name: others[name] for name in ("scale", "q_lora_rank", *kernel.HEAD_DIMS)}
            form |= {"num_heads": num_heads, "kv_lora_rank": kv_lora_rank, "cache_config": self.config.cache_config}
            parts = {"kv_b_proj": linear, "attn_backend": wrapped, "prefill_backend_cls": prefill}
            make = import_module(adapted.LAYER_MODULE).MLAAttention
            self.module = make(prefix=adapted.LAYER_NAME, **form, **parts)
        config.compilation_config.static_forward_context[adapted.LAYER_NAME] = self

    def process_weights_after_loading(self, act_dtype: torch.dtype) -> None:
        with adapted.current_config(self.config):
            self.module.process_weights_after_loading(act_dtype)

    def forward(
        self, layer: AttentionLayer, q: Tensor, k_c_normed: Tensor, k_pe: Tensor, kv_cache: Tensor, attn_metadata: Any
    ) -> Tensor:
        for name in ("_q_scale", "_k_scale", "_v_scale", "_prob_scale"):
            getattr(self.module, name).copy_(getattr(layer, name))
        for name in ("_q_scale_float", "_k_scale_float", "_v_scale_float"):
            setattr(self.module, name, getattr(layer, name))
        self.module.bind_kv_cache(kv_cache.unsqueeze(1))
        order = attn_metadata.order
        operands = (q.view(-1, self._heads, self._qk_head_dim), k_c_normed, k_pe)
        given = operands if order is None else tuple(x[order] for x in operands)
        batch, name = attn_metadata.translated, adapted.LAYER_NAME
        with adapted.forward_context(self.config, {name: batch}, {name: batch.slot_mapping}):
            shape = torch.Size((len(given[0]), self._heads * self._v_head_dim))
            result: Tensor = self.module(*given, output_shape=shape)
        return result if order is None else torch.empty_like(result).index_copy_(0, order, result)

    def kernel_evidence(self) -> dict[str, str]:
        parts = {"layer": self.module, "decode": self.module.impl, "prefill": self.module.prefill_backend}
        return {name: f"{type(part).__module__}.{type(part).__name__}" for name, part in parts.items()}


class NoPrefill:
    """What a layer is made with where vLLM has no prefill backend, so that its decodes can be driven."""

    def __init__(self, **sizes: Any) -> None:
        pass

    @staticmethod
    def get_name() -> str:
        return "none"

    def clone(self) -> "NoPrefill":
        return self

    def prepare_metadata(self, prefill_metadata: Any) -> None:
        raise kernel.UnsupportedConfiguration("the batch has prefills, and vLLM has no MLA prefill backend here")


class _Linear:
    def __init__(self, linear: Any, **attributes: Any) -> None:
        vars(self).update(attributes, _linear=linear)

    def __call__(self, x: Tensor) -> Any:
        return self._linear(x)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._linear, name)


_DEVIATIONS = (
    Deviation("its layer writes the cache and absorbs the weights", "vLLM's ``MLAAttention`` is made around it"),
    Deviation("reads an engine's configuration", "vLLM's defaults, eager, with the sizes of the case"),
    Deviation("takes decodes first only", "of a batch whose prefills come first the rows are reordered, and back"),
    Deviation("padding is requests without a query in block 0", "translated, as vLLM's runner pads a batch"),
    Deviation("knows a decode by its length alone", "declared unsupported where a cache of codes tells the difference"),
)
# Its prefills gather context into a workspace of the model's dtype.
_DECLARATION = Declaration(distributions=("vllm", "torch"), rounding=Rounding(dequantised_keys=Precision.MODEL))


class AdaptedLayerBackend:
    """An attention backend whose computation is split into ``forward_mha`` and ``forward_mqa``."""

    wrapped: ClassVar[Any]  # the class that is driven
    tile_scales: ClassVar[str] = "pow2"  # what vLLM's writer makes the scales of an ``fp8_ds_mla`` entry
    get_builder_cls = staticmethod(lambda: AdaptedLayerBuilder)

    @classmethod
    def adapt(cls, wrapped: Any) -> type[Self]:
        declared = getattr(wrapped, "declaration", None) or _DECLARATION
        declaration = replace(declared, deviations=(*declared.deviations, *_DEVIATIONS))
        return adapted.adapter_of(wrapped, cls, declaration=declaration)

    @classmethod
    def get_impl_cls(cls) -> Any:
        return partial(AdaptedLayerImpl, cls.wrapped)

    @classmethod
    def supports_compute_capability(cls, capability: kernel.DeviceCapability | None) -> bool:
        return adapted.runs_on(cls.wrapped, capability)

    @classmethod
    def validate_configuration(
        cls, head_size: int, dtype: torch.dtype, kv_cache_dtype: str | None, block_size: int, **asked: Any
    ) -> list[str]:
        if not cls.supports_compute_capability(asked["device_capability"]):
            return ["compute capability not supported"]
        # Of the kernel; vLLM's class also takes pages that its engine splits.
        pages = cls.wrapped.get_supported_kernel_block_sizes()
        ours = [size if isinstance(size, int) else MultipleOf(size.base) for size in pages]
        if not kernel.accepts_block_size(ours, block_size):
            return [f"pages of {block_size} tokens not supported"]
        entries = {"head_size": head_size, "kv_cache_dtype": kv_cache_dtype, "block_size": block_size}
        given = {**entries, "dtype": dtype, "use_per_head_quant_scales": False, **asked}
        reasons = foreign.reasons_of(cls.wrapped.validate_configuration(**given))
        if not import_module(adapted.LAYER_MODULE).MLACommonBackend.supports_head_size(head_size):
            reasons.append(f"head size {head_size} not supported by vLLM's MLA metadata")
        return reasons

    @classmethod
    def unsupported_batch(cls, batch: mla_batch.BatchForm) -> list[str]:
        reasons = []
        if batch.prefills and batch.padding:
            reasons.append("rows of padding behind prefills: vLLM leaves them undefined")
        missing = adapted.prefill_class(batch.dtype, batch.dimensions)[1] if batch.prefills else ""
        if missing:
            reasons.append(f"prefills: {missing}")
        if cache_dtypes.layout_of(batch.kv_cache_dtype) != "auto":
            builder = cls.wrapped.get_builder_cls()  # which sees lengths alone
            support, threshold = builder.query_len_support.value, builder.reorder_batch_threshold
            if support != "single_only":
                threshold = max(threshold, *batch.decodes, 1)
            lengths = torch.tensor([*batch.decodes, *batch.prefills])
            if mla_batch.count_decodes(lengths, threshold, support != "varlen") != len(batch.decodes):
                reasons.append("a decode that its builder takes for a prefill, or the reverse, over a cache of codes")
        return reasons

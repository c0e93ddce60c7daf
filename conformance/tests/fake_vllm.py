"""A stand-in for an installed vLLM whose attention backends have two computations and a module around them.

It has the names that such a vLLM has, and as much behind them as a layer needs; the maths is in float32.
"""

import sys
from collections.abc import Mapping
from dataclasses import make_dataclass
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
import torch

from mla_conformance.backends.layer.mla_batch import count_decodes

STATE: dict[str, Any] = {"config": None, "batch": None, "prefill": True}
# A batch has these fields and no others.
FIELDS = "query_start_loc query_start_loc_cpu seq_lens num_reqs num_actual_tokens max_query_len max_seq_len "
FIELDS += "block_table_tensor slot_mapping causal seq_lens_cpu_upper_bound"
CommonAttentionMetadata = make_dataclass("CommonAttentionMetadata", FIELDS.split(), kw_only=True)


class Builder:
    reorder_batch_threshold = 1
    query_len_support = SimpleNamespace(value="uniform")

    def __init__(self, spec: Any, names: list[str], config: Any, device: torch.device) -> None:
        self.prefill = config.compilation_config.static_forward_context[names[0]].prefill_backend.clone()
        drafted = getattr(config.speculative_config, "num_speculative_tokens", 0)
        self.threshold = max(self.reorder_batch_threshold, 1 + drafted)

    def build(self, common_prefix_len: int, common: Any) -> Any:
        lengths = common.query_start_loc_cpu.diff()
        decodes = count_decodes(lengths, self.threshold, uniform=True)
        if decodes < common.num_reqs:
            self.prefill.prepare_metadata(common)
        return SimpleNamespace(common=common, slot_mapping=common.slot_mapping, decodes=decodes)


class Prefill:
    def __init__(self, **sizes: Any) -> None:
        self.sizes = sizes

    def clone(self) -> "Prefill":
        return type(self)(**self.sizes)

    def prepare_metadata(self, metadata: Any) -> None: ...


class Impl:
    def __init__(self, scale: float, kv_b_proj: Any, heads: int, nope: int) -> None:
        self.scale, self.kv_b_proj, self.heads, self.nope = scale, kv_b_proj, heads, nope

    def forward_mha(self, q: torch.Tensor, kv_c: torch.Tensor, k_pe: torch.Tensor) -> torch.Tensor:
        k_nope, v = self.kv_b_proj(kv_c)[0].unflatten(-1, (self.heads, -1)).tensor_split([self.nope], dim=-1)
        k = torch.cat([k_nope, k_pe.unsqueeze(1).expand(-1, self.heads, -1)], dim=-1)
        return self._attend(q, k, v)

    def forward_mqa(self, q: torch.Tensor, entries: torch.Tensor, rank: int) -> torch.Tensor:
        keys = entries.unsqueeze(1).expand(-1, self.heads, -1)
        return self._attend(q, keys, keys[..., :rank])

    def _attend(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        scores = torch.einsum("tnd,snd->nts", q.float(), k.float()) * self.scale
        hidden = torch.ones(scores.shape[1:], dtype=torch.bool).triu(len(k) - len(q) + 1)
        return (scores.masked_fill(hidden, -torch.inf).softmax(dim=-1) @ v.float().transpose(0, 1)).transpose(0, 1)


class Cached:
    cache: torch.Tensor

    def get_kv_cache_spec(self, config: Any) -> Any:
        return SimpleNamespace(block_size=config.cache_config.block_size)

    def bind_kv_cache(self, cache: torch.Tensor) -> None:
        self.cache = cache.squeeze(1)


class MLAAttention(Cached):
    """Writes, absorbs, and calls the backend's computation."""

    kv_b_proj: Any
    num_heads: int
    qk_nope_head_dim: int
    kv_lora_rank: int
    prefix: str

    def __init__(self, **given: Any) -> None:
        config = STATE["config"]
        vars(self).update(given)
        self.impl = given["attn_backend"].get_impl_cls()(
            given["scale"], given["kv_b_proj"], given["num_heads"], given["qk_nope_head_dim"]
        )
        self.prefill_backend = given["prefill_backend_cls"](num_heads=given["num_heads"])
        config.compilation_config.static_forward_context[given["prefix"]] = self
        for name in ("_q_scale", "_k_scale", "_v_scale", "_prob_scale"):
            setattr(self, name, torch.tensor(1.0))

    def process_weights_after_loading(self, act_dtype: torch.dtype) -> None:
        linear = self.kv_b_proj
        coded = linear.quant_method is not None
        identity = torch.eye(linear.input_size_per_partition, dtype=act_dtype)
        weight = linear.quant_method.apply(linear, identity, bias=None).mT if coded else linear.weight
        by_head = weight.clone().unflatten(0, (self.num_heads, -1))
        self.w_uk, self.w_uv = by_head.tensor_split([self.qk_nope_head_dim], dim=1)

    def __call__(self, q: torch.Tensor, kv_c: torch.Tensor, k_pe: torch.Tensor, output_shape: Any) -> torch.Tensor:
        batch = STATE["batch"].attn_metadata[self.prefix]
        self.write(torch.cat([kv_c, k_pe[:, 0]], dim=-1), STATE["batch"].slot_mapping[self.prefix])
        output = q.new_full(output_shape, torch.nan)
        starts = batch.common.query_start_loc_cpu.tolist()
        for request, rows in enumerate(map(slice, starts[:-1], starts[1:])):
            entries = self._entries(batch.common, request)
            attend = self._decode if request < batch.decodes else self._prefill
            if rows.stop > rows.start:
                output[rows] = attend(q[rows], entries).to(q.dtype).flatten(1)
        output[starts[-1] : batch.common.num_actual_tokens] = 0
        return output

    def write(self, entries: torch.Tensor, slots: torch.Tensor) -> None:
        page = self.cache.shape[1]
        for entry, slot in zip(entries, slots.tolist(), strict=False):
            if slot >= 0:
                self.cache[slot // page, slot % page] = entry

    def _entries(self, common: Any, request: int) -> torch.Tensor:
        length, page = int(common.seq_lens[request]), self.cache.shape[1]
        blocks = common.block_table_tensor[request, : -(-length // page)].long()
        return self.cache[blocks].flatten(0, 1)[:length]

    def _prefill(self, q: torch.Tensor, entries: torch.Tensor) -> torch.Tensor:
        return self.impl.forward_mha(q, *entries.tensor_split([self.kv_lora_rank], dim=1))

    def _decode(self, q: torch.Tensor, entries: torch.Tensor) -> torch.Tensor:
        nope, rope = q.tensor_split([self.qk_nope_head_dim], dim=-1)
        absorbed = torch.einsum("tnp,npl->tnl", nope.float(), self.w_uk.float())
        latent = self.impl.forward_mqa(torch.cat([absorbed, rope], dim=-1), entries, self.kv_lora_rank)
        return torch.einsum("tnl,nvl->tnv", latent, self.w_uv.float())


class MLACommonBackend:
    __module__ = "vllm.v1.attention.backends.mla.fake"

    get_name = staticmethod(lambda: "FAKE_MLA")
    get_impl_cls: Any = staticmethod(lambda: Impl)
    get_builder_cls: Any = staticmethod(lambda: Builder)
    get_supported_kernel_block_sizes = staticmethod(lambda: [SimpleNamespace(base=16)])
    customize_spec = staticmethod(lambda spec: spec)
    supports_head_size = staticmethod(lambda head_size: head_size < 600)
    supports_compute_capability = staticmethod(lambda capability: True)
    validate_configuration: Any = staticmethod(
        lambda *, use_per_head_quant_scales, dtype, **asked: [] if dtype == torch.bfloat16 else ["dtype not supported"]
    )


def _vllm_config(compilation_config: Any) -> Any:
    parts = ("scheduler_config", "cache_config", "attention_config", "kernel_config")
    empty = {name: SimpleNamespace() for name in parts}
    return SimpleNamespace(compilation_config=compilation_config, speculative_config=None, **empty)


def _get_mla_prefill_backend(config: Any) -> Any:
    if STATE["prefill"]:
        return Prefill
    raise ValueError("No valid MLA prefill backend found")


def install(monkeypatch: pytest.MonkeyPatch, further: Mapping[str, Mapping[str, Any]]) -> None:
    parts: dict[str, Mapping[str, Any]] = {
        "vllm.config": {
            "VllmConfig": _vllm_config,
            "CompilationConfig": lambda mode, cudagraph_mode: SimpleNamespace(static_forward_context={}),
            "CompilationMode": SimpleNamespace(NONE=0),
            "CUDAGraphMode": SimpleNamespace(NONE=0, FULL=1),
            "set_current_vllm_config": lambda config: patch.dict(STATE, config=config),
        },
        "vllm.forward_context": {
            "ForwardContext": SimpleNamespace,
            "override_forward_context": lambda batch: patch.dict(STATE, batch=batch),
        },
        **further,
    }
    packages = {name.rsplit(".", depth)[0] for name in parts for depth in range(1, name.count(".") + 1)}
    for name in sorted({*packages, *parts}):
        module = ModuleType(name)
        vars(module).update(parts.get(name, {}))
        monkeypatch.setitem(sys.modules, name, module)


LAYERS = "vllm.model_executor.layers.attention"
LAYER: dict[str, Mapping[str, Any]] = {
    "vllm.v1.attention.backend": {"CommonAttentionMetadata": CommonAttentionMetadata},
    "vllm.v1.attention.backends.mla.prefill": {"get_mla_prefill_backend": _get_mla_prefill_backend},
    f"{LAYERS}.mla_attention": {"MLAAttention": MLAAttention, "MLACommonBackend": MLACommonBackend},
}

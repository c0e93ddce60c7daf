"""A whole layer, hidden states in and out, as vLLM 0.33.0 makes it around a sparse attention backend, unchanged.

VLLM_SPARSE_LAYER: around its FLASHMLA_SPARSE or its FLASH_ATTN_MLA_SPARSE.
"""

import math
from collections.abc import Iterator
from importlib import import_module
from types import SimpleNamespace
from typing import Any, ClassVar, NamedTuple, Self

import torch
from torch import Tensor

from mla_conformance.backends import block_size, foreign, graph_support, kernel, operands, packaged, sparse
from mla_conformance.backends.generations import adapted
from mla_conformance.backends.sparse_layer import MLASparseLayerBackend, MLASparseLayerConfig, check_sparse_layer_call

_CLASSES = "vllm.v1.attention.backends.mla"
_LAYERS = "vllm.models.deepseek_v32.attention"
_PREFIX = "model.layers.0.self_attn"


class _Room(NamedTuple):
    longest: int = 8192  # tokens of a sequence
    tokens: int = 4096  # of a batch
    requests: int = 256


class AdaptedSparseLayer(MLASparseLayerBackend):
    wrapped: ClassVar[Any] = None  # the class that is driven
    _layer: Any  # vLLM's layer; None before it is made
    declaration = packaged.declared(
        "vllm torch",
        ("is the attention of a layer alone", "vLLM's ``DeepseekV32Attention`` is made around it"),
        ("reads an engine's configuration", "vLLM's defaults, eager, one rank, with the sizes of the case"),
        ("computes its rotations from the model's configuration", "the caller's table stands in their place"),
        ("scales by the heads' columns and by YaRN's factor", "the factor that makes the scale the caller's"),
        ("selects into a buffer of the model's", "the caller's is set, as vLLM sets that of a draft model"),
        ("padding is requests without a query in block 0", "translated, as vLLM's runner pads a batch"),
        ("leaves rows of padding undefined", "they stand behind, as in its piecewise graphs"),
        ("has one configuration for all batches", "builders for as many drafted tokens as decodes have"),
        ("names selected tokens in another order from call to call", "declared not deterministic"),
        rounding=packaged.DEQUANTISES,
        deterministic=False,
    )
    supported_tile_scales = ["pow2"]
    supported_topk = [block_size.MultipleOf(128)]  # tiles of the kernel that maps tokens to slots
    supported_block_sizes = [64]  # of the indexer's cache
    cudagraph_support = graph_support.AttentionCGSupport.UNIFORM_BATCH

    @classmethod
    def adapt(cls, wrapped: Any) -> type[Self]:
        names = [each for each in ("auto", "fp8_ds_mla") if each in wrapped.supported_kv_cache_dtypes]
        dtypes = [each for each in wrapped.supported_dtypes if each.itemsize == 2]
        return adapted.adapter_of(wrapped, cls, supported_dtypes=dtypes, supported_kv_cache_dtypes=names)

    @classmethod
    def driven(cls) -> Any:
        return cls.wrapped

    @classmethod
    def supports_compute_capability(cls, device_capability: kernel.DeviceCapability | None) -> bool:
        return adapted.runs_on(cls.driven(), device_capability)

    @classmethod
    def broken_dependencies(cls) -> list[str]:
        has_scores = import_module("vllm.utils.import_utils").has_deep_gemm()
        return [] if has_scores else ["package vllm was built without DeepGEMM, which its indexer calls"]

    @classmethod
    def validate_configuration(
        cls, device_capability: kernel.DeviceCapability | None, selector_config: MLASparseLayerConfig
    ) -> list[str]:
        reasons = super().validate_configuration(device_capability, selector_config)
        if reasons:
            return reasons
        config, width = selector_config, selector_config.kv_lora_rank + selector_config.qk_rope_head_dim
        asked: dict[str, Any] = {"use_mla": True, "use_sparse": True, "attn_type": "decoder"}
        asked |= dict.fromkeys(("has_sink", "use_mm_prefix", "use_per_head_quant_scales"), False)
        entries = (width, config.dtype, config.kv_cache_dtype, config.block_size)
        theirs = cls.driven().validate_configuration(*entries, device_capability=device_capability, **asked)
        return foreign.reasons_of(theirs)

    @classmethod
    def _reasons(cls, config: MLASparseLayerConfig) -> Iterator[str]:
        yield from super()._reasons(config)
        form, latent = config.preparation, (config.kv_lora_rank, config.qk_rope_head_dim)
        yield from kernel.unless(
            (latent == (512, 64), f"latent dims (L, R) = {latent} not supported (supported: (512, 64))"),
            (config.num_heads <= 128, f"{config.num_heads} heads not supported (supported: up to 128)"),
            (not config.is_neox_style, "a layer that rotates halves not supported (rotates neighbours)"),
            (config.index_n_heads in (32, 64), f"{config.index_n_heads} index heads not supported (supported: 32, 64)"),
            (form.rope_first, "an indexer that rotates its last columns not supported"),
            (not form.hadamard, "Hadamard's transform of index queries and keys not supported"),
            (form.scale_format == "pow2", f"{form.scale_format} scales of index keys not supported (writes pow2)"),
            (form.eps == 1e-6, f"a norm of index keys with epsilon {form.eps} not supported"),  # a constant there
        )

    def __init__(self, config: MLASparseLayerConfig, vllm_config: Any) -> None:
        super().__init__(config, vllm_config)
        self._drafted = 0
        self._start(_Room())

    def _start(self, room: _Room) -> None:
        self._room, self._layer = room, None
        self._columns = room.longest // self.config.block_size  # of a block table
        self._builders: dict[int, tuple[Any, Any]] = {}
        self._held: dict[tuple[str, int], tuple[Tensor, Tensor]] = {}  # by cache and number of requests

    def load_weights(self, weights: Any) -> None:
        super().load_weights(weights)
        if self._layer is None:
            self._layer, self._engine = self._made(weights)
        adapted.load_layer(self._layer, self._layer.fused_qkv_a_proj, weights)
        with adapted.current_config(self._engine):
            self._layer.process_weights_after_loading(self.config.dtype)

    def _made(self, weights: Any) -> tuple[Any, Any]:
        config, device, (latent, hidden) = self.config, weights.o_proj.device, weights.q_a_proj.shape
        base = (config.qk_nope_head_dim + config.qk_rope_head_dim) ** -0.5
        yarn = {"rope_type": "yarn", "factor": math.e, "mscale_all_dim": 10 * (math.sqrt(config.scale / base) - 1)}
        yarn |= {"mscale": 1.0, "original_max_position_embeddings": self._room.longest}
        model = SimpleNamespace(
            **{name: getattr(config, name) for name in (*kernel.HEAD_DIMS, "kv_lora_rank", "rms_norm_eps")},
            hidden_size=hidden,
            q_lora_rank=latent,
            num_attention_heads=config.num_heads,
            num_hidden_layers=1,
            max_position_embeddings=self._room.longest,
            rope_parameters={"rope_theta": 10000.0} | ({"rope_type": "default"} if config.scale == base else yarn),
            index_topk=config.topk_tokens,
            index_n_heads=config.index_n_heads,
            index_head_dim=config.preparation.head_dim,
            index_topk_pattern="S" if config.skip_topk else "F",
            indexer_rope_interleave=not config.preparation.is_neox_style,
        )
        sizes = (self._room.requests, config.kv_lora_rank + config.qk_rope_head_dim, config.num_heads)
        of_heads = SimpleNamespace(total_num_attention_heads=config.num_heads)
        described: dict[str, Any] = {"hf_config": model, "hf_text_config": model, "is_moe": False}
        described |= {"model_arch_config": of_heads, "dtype": config.dtype, "max_model_len": self._room.longest}
        engine = adapted.engine_config(config.block_size, config.kv_cache_dtype, *sizes, **described)
        engine.scheduler_config.max_num_batched_tokens = self._room.tokens
        engine.attention_config.sparse_mla_prefill_workspace_factor = 5  # its default, of a model of its own
        engine.kernel_config.enable_jit_warmup = False
        with adapted.default_dtype(config.dtype), adapted.current_config(engine), torch.device(device):
            adapted.begin_one_rank(device)
            buffer = torch.empty(self._room.tokens, config.topk_tokens, dtype=torch.int32)
            layer = import_module(_LAYERS).DeepseekV32Attention(engine, model, _PREFIX, buffer, self.driven())
        return layer, engine

    def prepare_metadata(self, sparse_layer_metadata: Any) -> None:
        super().prepare_metadata(sparse_layer_metadata)
        batch, lens = sparse_layer_metadata, sparse_layer_metadata.attention.seq_lens_cpu
        needed = (int(lens.max()), len(batch.slot_mapping), len(lens))
        room = _Room(*(max(has, 1 << (needs - 1).bit_length()) for has, needs in zip(self._room, needed, strict=True)))
        if room != self._room:
            self._start(room)
            self.load_weights(self._weights)
        layer, indexer = self._layer, self._layer.indexer
        if batch.num_decodes:
            self._drafted = int(batch.attention.query_lens_cpu[: batch.num_decodes].max()) - 1
        if self._drafted not in self._builders:
            self._builders[self._drafted] = self._made_builders()
        attention, index = self._builders[self._drafted]
        built = {layer.layer_name: attention.build(0, self._common("latents", batch.attention, batch.slot_mapping))}
        slots = {layer.layer_name: batch.slot_mapping}
        if indexer is not None:
            name = indexer.k_cache.prefix
            built[name] = index.build(0, self._common("index keys", batch.index, batch.index_slot_mapping))
            slots[name] = batch.index_slot_mapping
        self._batch = built, slots

    def _made_builders(self) -> tuple[Any, Any]:
        layer, engine, device = self._layer, self._engine, self._layer.o_proj.weight.device
        engine.speculative_config = adapted.drafts(self._drafted)
        with adapted.current_config(engine):
            spec = self.driven().customize_spec(layer.get_kv_cache_spec(engine))
            attention = self.driven().get_builder_cls()(spec, [layer.layer_name], engine, device)
            if layer.indexer is None:
                return attention, None
            cache = layer.indexer.k_cache
            made = cache.get_attn_backend().get_builder_cls()
            spec = cache.get_kv_cache_spec(engine)
            return attention, made(spec, [cache.prefix], engine, device, block_table_width=self._columns)

    def _common(self, cache: str, batch: sparse.MLASparseMetadata, slots: Tensor) -> Any:
        """The batch of a cache as vLLM's runner describes it; of single decodes, which a graph may capture, padding
        too.
        """
        lens, queries = batch.seq_lens_cpu, batch.query_lens_cpu
        real, tokens = int((lens > 0).sum()), int(queries[lens > 0].sum())
        single = bool((queries[:real] == 1).all())
        requests, rows = (len(lens), len(slots)) if single else (real, tokens)
        starts = torch.zeros(requests + 1, dtype=torch.int32)
        starts[1:] = queries[:requests].masked_fill(lens[:requests] == 0, 0).cumsum(0)
        assert batch.block_table is not None
        # In buffers that keep their addresses, as the runner's, for what a graph has captured.
        if (cache, requests) not in self._held:
            empty = torch.zeros(requests, self._columns, dtype=torch.int32, device=slots.device)
            self._held[cache, requests] = empty, starts.to(slots.device)
        table, on_device = self._held[cache, requests]
        columns = min(table.shape[1], batch.block_table.shape[1])
        table[:real, :columns] = batch.block_table[:real, :columns]
        table[real:] = 0
        return import_module("vllm.v1.attention.backend").CommonAttentionMetadata(
            query_start_loc=on_device.copy_(starts),
            query_start_loc_cpu=starts,
            seq_lens=batch.seq_lens[:requests],
            seq_lens_cpu_upper_bound=lens[:requests],
            num_reqs=requests,
            num_actual_tokens=rows,
            max_query_len=int(queries[:real].max()),
            max_seq_len=int(lens.max()),
            block_table_tensor=table,
            slot_mapping=slots[:rows],
        )

    @operands.takes(MLASparseLayerBackend.run_sparse_layer)
    def run_sparse_layer(self, x: Any) -> Tensor:
        check_sparse_layer_call(self, self._metadata, x)
        layer, indexer, (metadata, slots) = self._layer, self._layer.indexer, self._batch
        layer.rotary_emb.cos_sin_cache = layer.indexer_rope_emb.cos_sin_cache = x.cos_sin_cache
        layer.bind_kv_cache(x.kv_cache.unsqueeze(1))
        layer.topk_indices_buffer = x.topk_indices_buffer
        if indexer is None:
            layer.impl.topk_indices_buffer = x.topk_indices_buffer
        else:
            indexer.k_cache.bind_kv_cache(None if x.index_kv_cache is None else x.index_kv_cache.unsqueeze(1))
            indexer.topk_indices_buffer = x.topk_indices_buffer
        captures = x.hidden_states.is_cuda and torch.cuda.is_current_stream_capturing()
        if captures:  # as the runner says when it captures: a replay may be as long as a sequence can be
            for each in metadata.values():
                each.max_seq_len = self._room.longest
        with adapted.forward_context(self._engine, metadata, slots, captures):
            result: Tensor = layer(x.positions, x.hidden_states)
        return result

    def kernel_evidence(self) -> dict[str, str]:
        layer = self._layer
        parts = {"layer": layer, "attention": layer.impl, "prefill": layer.prefill_backend, "indexer": layer.indexer}
        kinds = {name: type(part) for name, part in parts.items() if part is not None}
        return {name: f"{kind.__module__}.{kind.__name__}" for name, kind in kinds.items()}


class VllmSparseLayerBackend(packaged.LibraryKernel, AdaptedSparseLayer):
    name = "VLLM_SPARSE_LAYER"
    libraries = (packaged.in_extra("vllm", f"{_CLASSES}.flashmla_sparse"),)
    devices = packaged.HOPPER
    kernel: ClassVar[str] = "FlashMLASparseBackend"  # the class that is driven
    supported_dtypes = [torch.bfloat16]
    supported_kv_cache_dtypes = ["auto", "fp8_ds_mla"]

    @classmethod
    def driven(cls) -> Any:
        return getattr(cls.libraries[0].found().load(), cls.kernel)

    @classmethod
    def lacks(cls) -> str:
        return next(iter(AdaptedSparseLayer.broken_dependencies()), "")

    def kernel_evidence(self) -> dict[str, str]:
        return super().kernel_evidence() | AdaptedSparseLayer.kernel_evidence(self)


VllmSparseLayerBackend.also(
    "flash-attn",
    libraries=(packaged.in_extra("vllm", f"{_CLASSES}.flashattn_mla_sparse"),),
    kernel="FlashAttnMLASparseBackend",
    supported_dtypes=[torch.float16, torch.bfloat16],
    supported_kv_cache_dtypes=["auto"],
)

"""One attention layer of SGLang's (0.5.23) around an attention backend of its own: settings, weights, batches."""

from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from importlib import import_module
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from mla_conformance.backends.generations.adapted import default_dtype, load_layer
from mla_conformance.backends.kernel import int32
from mla_conformance.backends.packaged import environment
from mla_conformance.backends.sparse_layer import MLASparseLayerConfig, SparseLayerWeights

PAGE = 64  # tokens of a page of either cache
_CACHE_DTYPES = {"auto": ("bfloat16", torch.bfloat16), "fp8_ds_mla": ("fp8_e4m3", torch.float8_e4m3fn)}
"""By layout, what a server calls the dtype of its cache, and the dtype."""
_ONCE = ("num_sms", "paged_mqa_logits_metadata_fn", "fp8_paged_mqa_logits_fn", "fp8_mqa_logits_fn")
"""What the environment decides when it is first asked for."""
_ROOM = 2**20  # longest sequence, in tokens; what has this size is not allocated


@dataclass(frozen=True)
class Part:
    """Requests that SGLang computes in one batch: such that decode, by as many tokens each, or such that prefill."""

    decodes: bool
    requests: range  # their numbers
    rows: range  # of the step's tokens
    lengths: list[int]  # tokens of each in the cache, new ones included
    new: list[int]  # new tokens of each

    @property
    def drafted(self) -> int:
        """Tokens that a decode verifies; 0 of a plain one and of prefills."""
        return self.new[0] if self.decodes and self.new[0] > 1 else 0


def parts(lengths: list[int], new: list[int], num_decodes: int) -> list[Part]:
    """The batches of a step in their order; rows of padding, requests without tokens, are in none."""
    found, first, row = [], 0, 0
    count = sum(length > 0 for length in lengths)
    while first < count:
        decodes, end = first < num_decodes, first + 1
        while end < count and (end < num_decodes) == decodes and (not decodes or new[end] == new[first]):
            end += 1
        asked = new[first:end]
        found.append(Part(decodes, range(first, end), range(row, row + sum(asked)), lengths[first:end], asked))
        first, row = end, row + sum(asked)
    return found


class AttentionLayer:
    """One ``DeepseekV2AttentionMLA`` over an attention backend of the class ``wrapped``, on one rank.

    ``arguments`` of ``ServerArgs``, and ``variables`` of the environment, are those where SGLang's defaults do not
    hold.
    """

    def __init__(
        self, wrapped: Any, config: MLASparseLayerConfig, weights: SparseLayerWeights, arguments: Any, variables: Any
    ) -> None:
        self._device, self._variables, self._model = weights.o_proj.device, variables, _model(config, weights)
        with environment(variables):
            self._context = self._server({"kv_cache_dtype": _CACHE_DTYPES[config.kv_cache_dtype][0], **arguments})
        with self._active(), torch.device(self._device), default_dtype(config.dtype):
            latent = {"kv_lora_rank": config.kv_lora_rank, "qk_rope_head_dim": config.qk_rope_head_dim}
            heads = {**latent, "qk_nope_head_dim": config.qk_nope_head_dim}
            self.module = self._attention(config, heads)
            self.pool = self._pool(config, latent)
            self.backend = wrapped(self._runner(config, heads))
        self.load(config, weights)

    def _server(self, arguments: Mapping[str, Any]) -> Any:
        """A context of its own, as an engine inside another program has one: one rank, no drafts."""
        runtime = import_module("sglang.srt.runtime_context")
        fixed = {"model_path": "dummy", "page_size": PAGE, "attention_backend": "dsa", "disable_cuda_graph": True}
        made = import_module("sglang.srt.server_args").ServerArgs(device=self._device.type, **fixed, **arguments)
        ranks = runtime.SpawnRanks(world_rank=0, gpu_id=self._device.index)
        context = runtime.create_context(made, role="scheduler", ranks=ranks)
        context.parallel.override_permanently(tp_group=SimpleNamespace(world_size=1))  # without processes
        return context

    def _attention(self, config: MLASparseLayerConfig, heads: dict[str, int]) -> Any:
        module = import_module("sglang.srt.models.deepseek_v2").DeepseekV2AttentionMLA(
            config=self._model,
            hidden_size=self._model.hidden_size,
            num_heads=config.num_heads,
            v_head_dim=config.v_head_dim,
            q_lora_rank=self._model.q_lora_rank,
            max_position_embeddings=PAGE,
            reduce_results=False,
            layer_id=0,
            **heads,
        )
        for each in (module, module.attn_mqa, module.attn_mha):
            each.scaling = config.scale
        return module

    def _pool(self, config: MLASparseLayerConfig, latent: dict[str, int]) -> Any:
        # An entry of codes has a float32 scale for 128 of them, and its rope part is bfloat16.
        coded = config.kv_lora_rank + config.kv_lora_rank // 128 * 4 + config.qk_rope_head_dim * 2
        return import_module("sglang.srt.mem_cache.memory_pool").DSATokenToKVPool(
            size=PAGE,
            page_size=PAGE,
            dtype=_CACHE_DTYPES[config.kv_cache_dtype][1],
            layer_num=1,
            device=str(self._device),
            index_head_dim=config.preparation.head_dim,
            enable_memory_saver=False,
            kv_cache_dim=sum(latent.values()) if config.kv_cache_dtype == "auto" else coded,
            skip_topk_layers=[config.skip_topk],
            **latent,
        )

    def _runner(self, config: MLASparseLayerConfig, heads: dict[str, int]) -> Any:
        described = {"hf_config": self._model, "context_len": _ROOM, "num_attention_heads": config.num_heads, **heads}
        return SimpleNamespace(
            device=str(self._device),
            page_size=PAGE,
            model_config=SimpleNamespace(**described),
            token_to_kv_pool=self.pool,
            req_to_token_pool=SimpleNamespace(req_to_token=None, size=_ROOM),
            kv_cache_dtype=self.pool.dtype,
            hisparse_coordinator=None,
            is_draft_worker=False,
            max_running_requests=_ROOM,
        )

    def load(self, config: MLASparseLayerConfig, w: SparseLayerWeights) -> None:
        """Weights of these sizes, as SGLang's loader lays them out, which also makes the absorbed ones."""
        load_layer(self.module, self.module.fused_qkv_a_proj_with_mqa, w)
        if w.indexer is not None:
            self.module.indexer.k_norm.variance_epsilon = config.preparation.eps
        loader = import_module("sglang.srt.models.deepseek_common.deepseek_weight_loader").DeepseekV2WeightLoaderMixin
        layers = SimpleNamespace(start_layer=0, end_layer=1, layers=[SimpleNamespace(self_attn=self.module)])
        with self._active(), torch.no_grad():
            loader.post_load_weights(SimpleNamespace(config=self._model, model=layers, quant_config=None))

    def bind(self, latents: Tensor, index_keys: Tensor | None, table: Tensor, turns: Tensor) -> None:
        """What the next batches read and write: latents [slots, 1, width], index keys by pages, slots of positions,
        rotations.
        """
        self.pool.kv_buffer[0] = latents
        self.pool.size = len(latents) - PAGE
        if index_keys is not None:
            self.pool.index_key_cache.buffer[0] = index_keys
        self.backend.req_to_token_pool.req_to_token = self.backend.req_to_token = table
        for owner in filter(None, (self.module, self.module.indexer)):
            owner.rotary_emb.cos_sin_cache = turns

    def forward(
        self, part: Part, hidden: Tensor, positions: Tensor, slots: Tensor, selected: Tensor | None
    ) -> tuple[Tensor, Tensor | None]:
        """Output of a batch and what it selected, if it did, as SGLang names it; ``selected`` is what it reuses."""
        inputs = import_module("sglang.srt.layers.layer_boundary.adapters.attention")
        forward_context = import_module("sglang.srt.model_executor.forward_context")
        self.backend.speculative_num_draft_tokens = part.drafted or None
        with self._active(), torch.no_grad():
            batch = self._batch(part, positions, slots)
            with forward_context.forward_context(forward_context.ForwardContext(attn_backend=self.backend)):
                self.backend.init_forward_metadata(batch)
                tensor_parallel = inputs.get_attn_tp_context()
                with tensor_parallel.maybe_input_scattered(batch):
                    prepared = inputs.AttentionInputs(hidden, batch, self.module.prepare_qkv_latent)
                    tensor_parallel.set_attn_inputs(prepared)
                    given = {"zero_allocator": None, "prev_topk_indices": selected}
                    result = self.module(positions, hidden, batch, **given)
        return result if isinstance(result, tuple) else (result, None)

    def _batch(self, part: Part, positions: Tensor, slots: Tensor) -> Any:
        info = import_module("sglang.srt.model_executor.forward_batch_info")
        mode = "EXTEND" if not part.decodes else "TARGET_VERIFY" if part.drafted else "DECODE"
        lengths = torch.tensor(part.lengths) - part.drafted
        extends: dict[str, Any] = {}
        if not part.decodes:
            prior = [length - new for length, new in zip(part.lengths, part.new, strict=True)]
            new = int32(part.new, self._device)
            extends |= {"extend_num_tokens": len(part.rows), "extend_seq_lens": new, "extend_seq_lens_cpu": part.new}
            extends |= {"extend_prefix_lens": int32(prior, self._device), "extend_prefix_lens_cpu": prior}
            extends["extend_start_loc"] = (new.cumsum(0) - new).int()
        return info.ForwardBatch(
            forward_mode=info.ForwardMode[mode],
            batch_size=len(part.requests),
            input_ids=torch.zeros_like(positions),
            req_pool_indices=torch.tensor(list(part.requests), device=self._device),
            seq_lens=lengths.to(self._device),
            seq_lens_cpu=lengths,
            seq_lens_sum=int(lengths.sum()),
            out_cache_loc=slots,
            positions=positions,
            **extends,
        )

    @contextmanager
    def _active(self) -> Iterator[None]:
        """The layer's settings hold inside, those that are read once among them."""
        utils = import_module("sglang.srt.layers.attention.dsa.utils")
        with ExitStack() as stack:
            stack.enter_context(environment(self._variables))
            for name in _ONCE:
                getattr(utils, f"resolve_{name}").cache_clear()
            stack.enter_context(import_module("sglang.srt.runtime_context").use_context(self._context))
            yield


def _model(config: MLASparseLayerConfig, weights: SparseLayerWeights) -> Any:
    """What a model's file says of itself, as far as it is read."""
    return SimpleNamespace(
        architectures=["DeepseekV32ForCausalLM"],
        hidden_size=weights.o_proj.shape[0],
        q_lora_rank=weights.q_a_proj.shape[0],
        rms_norm_eps=config.rms_norm_eps,
        rope_interleave=not config.is_neox_style,
        indexer_rope_interleave=not config.preparation.is_neox_style,
        index_topk=config.topk_tokens,
        index_n_heads=config.index_n_heads,
        index_head_dim=config.preparation.head_dim,
        # The layer behind shares the selection, so that this one returns it.
        indexer_types=["shared" if config.skip_topk else "full", "shared"],
    )

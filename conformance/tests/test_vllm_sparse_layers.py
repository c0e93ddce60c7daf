"""Sparse attention backends of an installed vLLM, unchanged, as whole layers: a stand-in that computes what EAGER does.

It knows of a batch what vLLM's metadata say, and of a layer what vLLM's configuration and its parameters do, so that
whatever is translated wrongly is wrong.
"""

import math
from dataclasses import make_dataclass
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from mla_conformance.backends import eager_sparse_layer, prepare, roles, sparse, sparse_layer
from mla_conformance.judging.record import Record, Status
from mla_conformance.tests import fake_vllm as fake
from mla_conformance.tests.drawn import judged as judged_on
from mla_conformance.tests.drawn import subject_of
from mla_conformance.trials.facts import describe

BACKENDS = "vllm.v1.attention.backends.mla.fake_sparse"
ENGINE = "dims=32-64-32-512;index_scales=pow2;index_heads=32;topk=128"
DECODES = f"sparse_layer:call=sparse_layer;{ENGINE};q=[1,1];kv=[140,9];decodes=2"
BOTH = f"sparse_layer:call=sparse_layer;{ENGINE};q=[1,3,9];kv=[140,9,130];decodes=1"
STATE = fake.STATE
# This vLLM does not ask whether a batch is causal.
Common = make_dataclass("CommonAttentionMetadata", fake.FIELDS.replace(" causal", "").split(), kw_only=True)


def vector(*shape: int, dtype: torch.dtype | None = None) -> Any:
    return torch.nn.Parameter(torch.full(shape, torch.nan, dtype=dtype), requires_grad=False)


def linear(rows: int, columns: int) -> Any:
    return SimpleNamespace(weight=vector(rows, columns))


class Builder:
    """Hands on what it was told, by values where vLLM keeps them and by buffers where it keeps those."""

    def __init__(self, spec: Any, names: list[str], config: Any, device: torch.device, **width: int) -> None:
        self.config, self.drafted = config, getattr(config.speculative_config, "num_speculative_tokens", 0)

    def build(self, common_prefix_len: int, common: Any) -> Any:
        starts = common.query_start_loc_cpu
        assert common.query_start_loc.tolist() == starts.tolist() and common.num_actual_tokens >= int(starts[-1])
        assert common.block_table_tensor.shape == (common.num_reqs, self.config.model_config.max_model_len // 64)
        queries = starts.diff()
        whole = common.num_actual_tokens > int(starts[-1])
        assert not whole or int(queries.max()) == 1, "only decodes of a token each are padded"
        return SimpleNamespace(common=common, drafted=self.drafted, max_seq_len=common.max_seq_len)


class Cache(fake.Cached):
    prefix = "model.layers.0.self_attn.indexer.k_cache"

    def get_attn_backend(self) -> Any:
        return SimpleNamespace(get_builder_cls=lambda: Builder)


class DeepseekV32Attention(fake.Cached):
    """The layer; EAGER computes."""

    prefill_backend = None

    def __init__(self, engine: Any, model: Any, prefix: str, buffer: Tensor, backend: Any) -> None:
        assert STATE["config"] is engine and torch.get_default_dtype() is engine.model_config.dtype
        heads, latent, rope = model.num_attention_heads, model.kv_lora_rank, model.qk_rope_head_dim
        qk, columns = model.qk_nope_head_dim + rope, model.index_head_dim
        self.layer_name, self.model, self.engine, self.topk_indices_buffer = f"{prefix}.attn", model, engine, buffer
        self.fused_qkv_a_proj = linear(model.q_lora_rank + latent + rope, model.hidden_size)
        self.q_b_proj = linear(heads * qk, model.q_lora_rank)
        self.kv_b_proj = linear(heads * (model.qk_nope_head_dim + model.v_head_dim), latent)
        self.o_proj = linear(model.hidden_size, heads * model.v_head_dim)
        self.q_a_layernorm = SimpleNamespace(weight=vector(model.q_lora_rank))
        self.kv_a_layernorm = SimpleNamespace(weight=vector(latent))
        self.rotary_emb, self.indexer_rope_emb = SimpleNamespace(), SimpleNamespace()
        self.impl, self.indexer = backend.get_impl_cls()(), None
        if model.index_topk_pattern == "F":
            norm = SimpleNamespace(**{name: vector(columns, dtype=torch.float32) for name in ("weight", "bias")})
            self.indexer = SimpleNamespace(
                wq_b=linear(model.index_n_heads * columns, model.q_lora_rank),
                wk_weights_proj=linear(columns + model.index_n_heads, model.hidden_size),
                k_norm=norm,
                k_cache=Cache(),
                topk_indices_buffer=buffer,
            )

    def process_weights_after_loading(self, dtype: torch.dtype) -> None:
        self.kv_b = self.kv_b_proj.weight.clone()

    def __call__(self, positions: Tensor, hidden: Tensor) -> Tensor:
        batch, model, indexer = STATE["batch"], self.model, self.indexer
        layer = eager_sparse_layer.EagerSparseLayerBackend(self._config(), None)
        layer.load_weights(self._weights())
        mine = batch.attn_metadata[self.layer_name].common
        theirs = mine if indexer is None else batch.attn_metadata[indexer.k_cache.prefix].common
        tokens = int(mine.query_start_loc_cpu[-1])
        decodes = int((mine.query_start_loc_cpu.diff() == 1).cumprod(0).sum())
        slots = mine.slot_mapping[:tokens], theirs.slot_mapping[:tokens]
        metadata = sparse_layer.MLASparseLayerMetadata(
            _batch(mine), _batch(theirs), *slots, min(decodes, mine.num_reqs)
        )
        layer.prepare_metadata(metadata)
        output = torch.full((len(hidden), model.hidden_size), torch.nan, dtype=hidden.dtype)
        buffer = (self.impl if indexer is None else indexer).topk_indices_buffer
        caches = self.cache, None if indexer is None else indexer.k_cache.cache
        table = self.rotary_emb.cos_sin_cache
        output[:tokens] = layer.run_sparse_layer(hidden[:tokens], positions[:tokens], table, *caches, buffer)
        return output

    def _config(self) -> sparse_layer.MLASparseLayerConfig:
        model, engine, rope = self.model, self.engine, self.model.rope_parameters
        yarn = 1.0 + 0.1 * rope.get("mscale_all_dim", 0) * math.log(rope.get("factor", 1))
        alike = ("qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim", "kv_lora_rank", "rms_norm_eps", "index_n_heads")
        told: dict[str, Any] = {name: getattr(model, name) for name in alike}
        told |= {"dtype": engine.model_config.dtype, "num_heads": model.num_attention_heads, "is_neox_style": False}
        told |= {"scale": (model.qk_nope_head_dim + model.qk_rope_head_dim) ** -0.5 * yarn**2}
        told |= {"topk_tokens": model.index_topk, "skip_topk": self.indexer is None}
        told |= {"kv_cache_dtype": engine.cache_config.cache_dtype, "block_size": engine.cache_config.block_size}
        halves = not model.indexer_rope_interleave
        form = (model.index_head_dim, model.qk_rope_head_dim, True, halves, False, "pow2", True, 1e-6)
        caches: Any = {"tile_scales": "pow2", "index_kv_cache_dtype": "fp8_index"}
        return sparse_layer.MLASparseLayerConfig(preparation=prepare.IndexPreparation(*form), **caches, **told)

    def _weights(self) -> sparse_layer.SparseLayerWeights:
        model, indexer = self.model, self.indexer
        q_a, kv_a = self.fused_qkv_a_proj.weight.data.tensor_split([model.q_lora_rank])
        theirs = None
        if indexer is not None:
            wk, weights = indexer.wk_weights_proj.weight.data.tensor_split([model.index_head_dim])
            norm = indexer.k_norm
            theirs = sparse_layer.SparseIndexerWeights(
                indexer.wq_b.weight.data, wk, norm.weight.data, norm.bias.data, weights
            )
        norms = self.q_a_layernorm.weight.data, self.kv_a_layernorm.weight.data
        return sparse_layer.SparseLayerWeights(
            q_a, norms[0], self.q_b_proj.weight.data, kv_a, norms[1], self.kv_b, self.o_proj.weight.data, theirs
        )


def _batch(common: Any) -> sparse.MLASparseMetadata:
    """What vLLM says of a batch, as EAGER is told; requests without a query are padding and are left out."""
    queries = common.query_start_loc_cpu.diff()
    asked = queries > 0
    queries, lengths = queries[asked], common.seq_lens_cpu_upper_bound[asked]
    assert lengths.tolist() == common.seq_lens[asked].tolist()
    starts = torch.cat((queries.new_zeros(1), queries.cumsum(0).int()))
    requests = torch.arange(len(queries), dtype=torch.int32).repeat_interleave(queries)
    longest = {"max_query_len": common.max_query_len, "max_seq_len": common.max_seq_len}
    host = {"query_lens_cpu": queries, "seq_lens_cpu": lengths}
    table, space = common.block_table_tensor[asked], roles.IndexSpace.POSITION
    return sparse.MLASparseMetadata(starts, requests, lengths, table, None, space, **longest, **host)


class Backend(fake.MLACommonBackend):
    __module__ = BACKENDS
    supported_dtypes = (torch.bfloat16,)
    supported_kv_cache_dtypes = ("auto", "bfloat16", "fp8_ds_mla")

    is_sparse = staticmethod(lambda: True)
    get_impl_cls = staticmethod(lambda: type("Impl", (), {"forward_mqa": lambda self: None}))
    get_builder_cls = staticmethod(lambda: Builder)
    validate_configuration = staticmethod(
        lambda head_size, dtype, cache, page, **asked: [] if head_size == 576 and asked["use_sparse"] else ["size"]
    )


@pytest.fixture
def judged(monkeypatch: pytest.MonkeyPatch) -> Any:
    def judge(case: str, layer: type = DeepseekV32Attention, deep_gemm: bool = True) -> Record:
        parts: dict[str, dict[str, Any]] = {
            "vllm.distributed.parallel_state": {"model_parallel_is_initialized": lambda: True},
            "vllm.v1.worker.workspace": {"is_workspace_manager_initialized": lambda: True},
            "vllm.utils.import_utils": {"has_deep_gemm": lambda: deep_gemm},
            "vllm.v1.attention.backend": {"CommonAttentionMetadata": Common},
            "vllm.models.deepseek_v32.attention": {"DeepseekV32Attention": layer},
            BACKENDS: {"Backend": Backend},
        }
        fake.install(monkeypatch, parts)
        return judged_on(f"{BACKENDS}:Backend", case)

    return judge


@pytest.mark.parametrize(
    "case",
    [
        f"{DECODES};scale=50",
        f"{BOTH};layers=2;tails=huge",
        f"sparse_layer_shared_indices:call=sparse_layer;{ENGINE};q=[1,3,9];kv=[140,9,130];decodes=1;shared=1",
        f"sparse_layer_caches:call=sparse_layer;{ENGINE};q=[1,1];kv=[140,9];decodes=2;pad=2;poison=inf",
        f"sparse_layer_caches:call=sparse_layer;{ENGINE};q=[3,3];kv=[140,9];decodes=2;pad=2;poison=inf",
        f"sparse_layer_caches:call=sparse_layer;{ENGINE};q=[1,3];kv=[140,9];decodes=1;pad=2;cache=fp8_ds_mla;scales=pow2",
        f"sparse_layer_conventions:call=sparse_layer;{ENGINE};q=[1];kv=[140];decodes=1;pairs=neighbours",
        f"sparse_layer_ranks:call=sparse_layer;{ENGINE};q=[1];kv=[140];decodes=1;tp=2",
        f"sparse_layer_graph:call=sparse_layer;{ENGINE};q=[1,1];kv=[140,9];decodes=2",
    ],
)
def test_an_unchanged_backend_passes_as_a_whole_layer(case: str, judged: Any) -> None:
    found = judged(case)
    assert found.status is Status.PASS, found.message
    subject = subject_of(f"{BACKENDS}:Backend")
    assert subject.roles == (roles.Role.SPARSE_LAYER,)
    assert any("``DeepseekV32Attention`` is made around it" in adapter for _, adapter in describe(subject).deviations)


def test_a_layer_that_takes_one_table_for_both_caches_fails(judged: Any) -> None:
    class OneTable(DeepseekV32Attention):
        def __call__(self, positions: Tensor, hidden: Tensor) -> Tensor:
            if self.indexer is not None:
                batches = STATE["batch"].attn_metadata
                batches[self.indexer.k_cache.prefix] = batches[self.layer_name]
            return super().__call__(positions, hidden)

    found = judged(BOTH, OneTable)
    assert (found.status, "index_kv_cache" in found.message) == (Status.FAIL, True), found.message


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ("dims=32-32-32-128;index_scales=pow2;index_heads=32;topk=128", "latent dims (L, R) = (128, 32)"),
        (f"{ENGINE};layer_pairs=halves", "a layer that rotates halves"),
        (f"{ENGINE};rope_last=1", "rotates its last columns"),
        ("dims=32-64-32-512;index_heads=32;topk=128", "float32 scales of index keys"),
        ("dims=32-64-32-512;index_scales=pow2;topk=8", "4 index heads not supported (supported: 32, 64)"),
        (f"{ENGINE};page=128", "block_size 128"),
        (f"{ENGINE};dtype=fp16", "dtype torch.float16"),
    ],
)
def test_what_its_engine_does_not_do_is_unsupported(fields: str, said: str, judged: Any) -> None:
    found = judged(f"sparse_layer:call=sparse_layer;{fields};q=[1];kv=[140];decodes=1")
    assert found.status is Status.UNSUPPORTED, found.message
    assert said in found.message


def test_longer_sequences_than_its_buffers_hold_are_judged_and_a_build_without_scores_is_said(judged: Any) -> None:
    assert judged(f"sparse_layer:call=sparse_layer;{ENGINE};q=[1];kv=[8192];decodes=1").status is Status.PASS
    assert "without DeepGEMM" in judged(DECODES, deep_gemm=False).message

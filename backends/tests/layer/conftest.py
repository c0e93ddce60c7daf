"""A small MLA layer over an exact decode kernel, batches for it, and what the golden layer makes of them."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from types import SimpleNamespace
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from torch import Tensor

from mla_conformance.backends.decode import MLADecodeBackend
from mla_conformance.backends.eager import EagerPrefillBackend
from mla_conformance.backends.layer.attention_types import CommonAttentionMetadata
from mla_conformance.backends.layer.cache_ops import cache_dtype, decode
from mla_conformance.backends.layer.layer_config import (
    CacheConfig,
    LayerConfig,
    MLAAttentionSpec,
    ModelConfig,
    ParallelConfig,
    SchedulerConfig,
    SpeculativeConfig,
)
from mla_conformance.backends.layer.mla_batch import LayerRequest
from mla_conformance.backends.layer.mla_layer import MLACommonBackend, mla_backend
from mla_conformance.reference.attention import attention
from mla_conformance.reference.mla import compute_friendly, data_movement_friendly
from mla_conformance.reference.quantization import dequantize_e4m3, quantize_e4m3

CPU = torch.device("cpu")


class ExactDecode(MLADecodeBackend):
    """Golden attention over the latents that each request's pages hold."""

    supported_dtypes: ClassVar[list[torch.dtype]] = [torch.float16, torch.bfloat16, torch.float32]
    supported_kv_cache_dtypes: ClassVar[list[str]] = ["auto", "fp8", "fp8_ds_mla"]
    supported_query_len: ClassVar[int | None] = None
    supports_nonuniform_queries: ClassVar[bool] = True

    @staticmethod
    def get_name() -> str:
        return "EXACT"

    def run_decode(self, ql_nope: Tensor, q_pe: Tensor, kv_cache: Tensor, k_scale: Tensor) -> tuple[Tensor, Tensor]:
        metadata, page = self._decode_metadata, kv_cache.shape[1]
        starts = [0, *metadata.seq_lens.cumsum(dim=0).tolist()]
        rows = []
        for blocks, length in zip(metadata.block_table, metadata.seq_lens.tolist(), strict=True):
            token = torch.arange(length)
            entries = kv_cache[blocks.long()[token // page], token % page]
            rows.append(decode(entries, self.kv_cache_dtype, ql_nope.dtype, k_scale))
        latents = torch.cat(rows).unsqueeze(1)
        state = attention(
            torch.cat((ql_nope, q_pe), dim=-1),
            latents,
            latents[..., : self.kv_lora_rank],
            query_start_loc=metadata.query_start_loc.tolist(),
            key_start_loc=starts,
            scale=self.scale,
            causal=True,
        )
        return state.output.to(ql_nope.dtype), state.lse.float()


class Linear:
    """A linear layer as vLLM makes them: called, it returns its bias as well."""

    def __init__(self, weight: Tensor) -> None:
        self.weight = weight

    def __call__(self, x: Tensor) -> tuple[Tensor, None]:
        return x @ self.weight.mT, None


@dataclass(frozen=True)
class Dims:
    heads: int = 3
    nope: int = 16
    rope: int = 8
    value: int = 12
    latent: int = 32

    @property
    def width(self) -> int:
        return self.latent + self.rope


@dataclass
class World:
    """One layer, its configuration and its poisoned cache."""

    layout: str = "auto"
    dtype: torch.dtype = torch.float32
    dims: Dims = field(default_factory=Dims)
    page: int = 4
    max_seqs: int = 4
    max_model_len: int = 4
    speculative: int | None = 7
    ranks: int = 1
    interleave: int = 1
    prefill: Any = EagerPrefillBackend
    decode: Any = ExactDecode
    base: type[MLACommonBackend] = MLACommonBackend
    scale: float = 0.31
    k_scale: float = 0.5

    def __post_init__(self) -> None:
        self.config = LayerConfig(
            model_config=ModelConfig(dtype=self.dtype, max_model_len=self.max_model_len, head_size=self.dims.width),
            scheduler_config=SchedulerConfig(max_num_seqs=self.max_seqs),
            cache_config=CacheConfig(block_size=self.page, cache_dtype=self.layout),
            parallel_config=ParallelConfig(
                decode_context_parallel_size=self.ranks, cp_kv_cache_interleave_size=self.interleave
            ),
            speculative_config=SpeculativeConfig(num_speculative_tokens=self.speculative),
        )
        self.backend = mla_backend(self.prefill, self.decode, self.base)
        self.layer = SimpleNamespace(_k_scale=torch.tensor(self.k_scale))
        self.weight = self.normal(99, self.dims.latent, self.dims.heads, self.dims.nope + self.dims.value)
        self.weight = (self.weight / self.dims.latent**0.5).to(self.dtype)
        self.cache = self.empty_cache(64)

    def normal(self, seed: int, *shape: int) -> Tensor:
        generator = torch.Generator().manual_seed(seed)
        return torch.randn(*shape, generator=generator, dtype=torch.float64).to(self.dtype)

    def empty_cache(self, blocks: int) -> Tensor:
        """Every byte is poison: NaN in each of the layouts."""
        shape = self.backend.get_kv_cache_shape(blocks, self.page, 1, self.dims.width, self.layout)
        cache = torch.empty(shape, dtype=cache_dtype(self.layout, self.dtype))
        cache.view(torch.uint8).fill_(0xFF)
        return cache

    def builder(self, rank: int = 0) -> Any:
        spec = MLAAttentionSpec(block_size=self.page, head_size=self.dims.width, cache_dtype_str=self.layout)
        builder = self.backend.get_builder_cls()(spec, ["layer.0"], self.config, CPU)
        builder.dcp_rank = rank
        return builder

    def runner(self, max_batch: int = 8, max_seq_len: int = 64) -> Any:
        return SimpleNamespace(
            model_config=self.config.model_config,
            scheduler_config=self.config.scheduler_config,
            cache_config=self.config.cache_config,
            device=CPU,
            graph_block_tables=np.zeros((max_batch, max_seq_len // self.page), dtype=np.int32),
            max_seq_len_to_capture=max_seq_len,
        )

    def impl(self, **changes: Any) -> Any:
        d = self.dims
        arguments = {
            "num_heads": d.heads,
            "head_size": d.width,
            "scale": self.scale,
            "num_kv_heads": 1,
            "alibi_slopes": None,
            "sliding_window": None,
            "kv_cache_dtype": self.layout,
            "logits_soft_cap": None,
            "attn_type": "decoder",
            "kv_sharing_target_layer_name": None,
            "q_lora_rank": None,
            "kv_lora_rank": d.latent,
            "qk_nope_head_dim": d.nope,
            "qk_rope_head_dim": d.rope,
            "qk_head_dim": d.nope + d.rope,
            "v_head_dim": d.value,
            "kv_b_proj": Linear(self.weight.flatten(1).mT.contiguous()),
        }
        impl = self.backend.get_impl_cls()(**(arguments | changes))
        impl.process_weights_after_loading(self.dtype)
        return impl


@dataclass
class Batch:
    """Requests (query length, context length, whether it prefills) with random latents; padding rows last."""

    world: World
    lengths: Sequence[tuple[int, int, bool]]
    padding: int = 0
    seed: int = 0

    def __post_init__(self) -> None:
        w, d = self.world, self.world.dims
        self.latents = [w.normal(self.seed + i, q + c, d.width) for i, (q, c, _) in enumerate(self.lengths)]
        tokens = sum(q for q, _, _ in self.lengths)
        self.q = w.normal(self.seed + 77, tokens, d.heads, d.nope + d.rope)
        free = torch.randperm(w.cache.shape[0], generator=torch.Generator().manual_seed(self.seed)).tolist()
        self.requests = [
            LayerRequest(q, c, [free.pop() for _ in range(-(-(q + c) // w.page))], prompt)
            for q, c, prompt in self.lengths
        ]

    def store_context(self) -> None:
        """Put what was computed before into the cache, in the world's layout."""
        w = self.world
        for request, rows in zip(self.requests, self.latents, strict=True):
            token = torch.arange(request.context_len)
            entries = encode(w, rows[: request.context_len])
            blocks = torch.tensor(request.block_ids, dtype=torch.long)
            w.cache.view(torch.uint8)[blocks[token // w.page], token % w.page] = entries.view(torch.uint8)

    def operands(self) -> tuple[Tensor, Tensor, Tensor]:
        """q [T, N·D], kv_c [T, L], k_pe [T, 1, R] of the new tokens; NaN in the rows of padding."""
        rank = self.world.dims.latent
        new = torch.cat([rows[c:] for rows, (_, c, _) in zip(self.latents, self.lengths, strict=True)])
        q, new = (torch.cat((x, x.new_full((self.padding, x[0].numel()), torch.nan))) for x in (self.q.flatten(1), new))
        return q, new[:, :rank], new[:, rank:].unsqueeze(1)

    def common(self) -> CommonAttentionMetadata:
        """The batch for the second route, made of the first one's pieces."""
        from mla_conformance.backends.layer.context_parallel import Sharding
        from mla_conformance.backends.layer.mla_batch import common_metadata

        return common_metadata(
            self.requests, padding=self.padding, block_size=self.world.page, device=CPU, sharding=Sharding()
        )

    def golden(self) -> Tensor:
        """[T + padding, N·V]: a decode reads what its cache entries stand for, a prefill its new tokens as they are."""
        w, rank, rows = self.world, self.world.dims.latent, self.q.split([q for q, _, _ in self.lengths])
        outputs = []
        for q, latents, (query_len, context_len, prompt) in zip(rows, self.latents, self.lengths, strict=True):
            seen = stored_values(w, latents)
            if prompt:
                seen[context_len:] = latents[context_len:].double()
            route = compute_friendly if prompt else data_movement_friendly
            state = route(
                q[..., : w.dims.nope],
                q[..., w.dims.nope :],
                seen[:, :rank],
                seen[:, rank:],
                w.weight,
                query_start_loc=(0, query_len),
                key_start_loc=(0, query_len + context_len),
                scale=w.scale,
            )
            outputs.append(state.output.flatten(1))
        return torch.cat((*outputs, outputs[0].new_zeros(self.padding, outputs[0].shape[1])))

    @property
    def starts(self) -> list[int]:
        return list(accumulate((q for q, _, _ in self.lengths), initial=0))


def encode(world: World, rows: Tensor) -> Tensor:
    """Entries of latents by the layout's definition, tile by tile."""
    rank = world.dims.latent
    if world.layout == "auto":
        return rows
    if world.layout == "fp8":
        return quantize_e4m3(rows, world.k_scale)
    entries = [_deepseek_entry(row[:rank], row[rank:]) for row in rows]
    return torch.stack(entries) if entries else torch.empty(0, 656, dtype=torch.uint8)


def _deepseek_entry(latent: Tensor, rope: Tensor) -> Tensor:
    """The 656 bytes of one token."""
    scales = _tile_scales(latent.unsqueeze(0))[0]
    codes = [quantize_e4m3(tile, float(scale)) for tile, scale in zip(latent.split(128), scales, strict=True)]
    return torch.cat([part.view(torch.uint8) for part in (*codes, scales, rope.contiguous())])


def stored_values(world: World, rows: Tensor) -> Tensor:
    """What a consumer reads back of latents, float64."""
    rank = world.dims.latent
    if world.layout == "auto":
        return rows.double()
    if world.layout == "fp8":
        return dequantize_e4m3(quantize_e4m3(rows, world.k_scale), world.k_scale)
    scales = _tile_scales(rows[:, :rank])
    codes = encode(world, rows)[:, :512].contiguous().view(torch.float8_e4m3fn).double()
    latent = codes * scales.double().repeat_interleave(128, dim=1)
    return torch.cat((latent, rows[:, rank:].double()), dim=-1)


def _tile_scales(latents: Tensor) -> Tensor:
    """[T, 4] float32."""
    amax = latents.float().unflatten(-1, (4, 128)).abs().amax(dim=-1)
    return torch.where(amax == 0, 1.0, amax / 448)


DEEPSEEK = Dims(heads=2, nope=16, rope=64, value=12, latent=512)


@pytest.fixture
def world() -> type[World]:
    return World


@pytest.fixture
def batch() -> type[Batch]:
    return Batch


@pytest.fixture(params=["auto", "fp8", "fp8_ds_mla"])
def layout_world(request: pytest.FixtureRequest) -> World:
    """A layer for each layout of the cache."""
    if request.param == "fp8_ds_mla":
        return World(layout=request.param, dtype=torch.bfloat16, dims=DEEPSEEK, scale=0.05)
    return World(layout=request.param)

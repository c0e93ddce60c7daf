"""What adapters say that they do not do, asked for much of it at once: every limit is a reason of its own."""

from typing import Any

import pytest
import torch

from mla_conformance.backends.cache import MLACacheSelectorConfig
from mla_conformance.backends.decode import MLADecodeSelectorConfig
from mla_conformance.backends.indexer import MLAIndexerSelectorConfig
from mla_conformance.backends.kernel import DeviceCapability
from mla_conformance.backends.loading import load_role
from mla_conformance.backends.prepare import IndexPreparation, MLAPrepareSelectorConfig
from mla_conformance.backends.references import parse_reference
from mla_conformance.backends.roles import Role
from mla_conformance.backends.sparse import MLASparseSelectorConfig
from mla_conformance.backends.topk import MLATopKSelectorConfig

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
SCORES, SELECTION, PREPARATION = MLAIndexerSelectorConfig, MLATopKSelectorConfig, MLAPrepareSelectorConfig
MODEL = IndexPreparation(128, 32, False, True, True, "float32", False, 1e-6)
SECOND: dict[str, Any] = {"extra_kv_cache_dtype": "fp8_v4", "extra_block_size": 64, "extra_topk": 64}
MIXED, KEYS = "fp8_ds_mla", "fp8_index"


def decode(layout: str, page: int, latent: int = 512, rope: int = 64) -> MLADecodeSelectorConfig:
    """Two query tokens of requests of many lengths, on two ranks."""
    many: dict[str, Any] = {"max_query_len": 2, "uniform": False, "dcp_world_size": 2}
    return MLADecodeSelectorConfig(BF16, layout, page, latent, rope, **many)


def sparse(call: str, layout: str = "auto", page: int = 64, rope: int = 64, **asked: Any) -> MLASparseSelectorConfig:
    given: dict[str, Any] = {"dtype": BF16, "num_heads": 64, "topk": 128, "lse": False} | asked
    sizes: dict[str, Any] = {"block_size": page, "kv_lora_rank": 512, "qk_rope_head_dim": rope}
    return MLASparseSelectorConfig(call=call, kv_cache_dtype=layout, **sizes, **given)


def cache(call: str, layout: str, latent: int = 512, **asked: Any) -> MLACacheSelectorConfig:
    given: dict[str, Any] = {"dtype": BF16, "block_size": 64, "qk_rope_head_dim": 64, "tile_scales": "pow2"} | asked
    return MLACacheSelectorConfig(call=call, kv_cache_dtype=layout, kv_lora_rank=latent, **given)


ROLES: dict[type, Role] = {
    MLADecodeSelectorConfig: Role.DECODE,
    MLASparseSelectorConfig: Role.SPARSE,
    SCORES: Role.INDEXER,
    SELECTION: Role.TOPK,
    PREPARATION: Role.PREPARE,
    MLACacheSelectorConfig: Role.CACHE,
}
NEAR_UNION: dict[str, Any] = {"topk": 100, "topk_length": True, "duplicates": True, "lse": True}
"""What rows that share their keys do not take."""
SAID: list[tuple[str, int, Any, str]] = [
    ("TRITON_MLA", 8, decode("fp8", 8, 32, 8), "block_size 8 | requests | several | latent | kv_cache_dtype fp8 needs"),
    ("AITER_TRITON_SPARSE", 9, sparse("decode", page=1, num_heads=24, lse=True), "24 heads | LSE | block_size 1"),
    ("FLASH_ATTN_MLA_SPARSE", 9, sparse("decode", "fp8", dtype=FP32, sink=True), "dtype | sinks | kv_cache_dtype"),
    ("FLASHMLA_SPARSE", 9, sparse("decode", MIXED, num_heads=16), "16 heads | fp8_ds_mla with float32 scales"),
    ("FLASHMLA_SPARSE", 9, sparse("decode", MIXED, tile_scales="pow2", topk_length=True), "topk_length of lists"),
    ("FLASHMLA_SPARSE", 9, sparse("decode", MIXED, tile_scales="pow2", **SECOND), "a second cache beside"),
    ("FLASHMLA_SPARSE", 9, sparse("decode", MIXED, rope=0, tile_scales="pow2"), "fp8_ds_mla of keys without a rope"),
    ("FLASHMLA_SPARSE[float32]", 9, sparse("decode", MIXED), ""),
    ("FLASHMLA_SPARSE[float32]", 9, sparse("decode", MIXED, tile_scales="pow2"), "fp8_ds_mla with pow2 scales"),
    ("FLASHMLA_SPARSE", 9, sparse("prefill", topk=64), "topk 64 of a prefill"),
    ("FLASHMLA_SPARSE", 9, sparse("prefill", topk_length=True, sink=True), ""),
    ("FLASHINFER_MLA_SPARSE_SM90", 9, sparse("decode", "fp8", dtype=FP16), "kv_cache_dtype fp8 with"),
    (
        "SGLANG_TRITON_SPARSE[union2]",
        9,
        sparse("prefill", **NEAR_UNION),
        "64 heads | LSE | topk 100 | topk_length | lis",
    ),
    ("SGLANG_TRITON_SPARSE", 9, sparse("prefill", **NEAR_UNION | {"lse": False}), ""),
    (
        "DEEPGEMM_INDEXER",
        9,
        SCORES("topk", True, BF16, "auto", 16, 4, 64, 64),
        "kv | 4 heads | head dim | block | topk",
    ),
    ("LMDEPLOY_TRITON", 9, SCORES("topk", False, BF16, KEYS, 1, 4, 128, 100), "4 heads | topk 100 | gathered keys"),
    ("LMDEPLOY_TRITON", 9, SELECTION(FP32, 64, True), "rows that start"),
    ("LMDEPLOY_TRITON", 9, PREPARATION(BF16, 4, MODEL), "scales | rope_first | hadamard | fold_scales | 32 rotated"),
    ("VLLM_TOPK[cooperative]", 9, SELECTION(BF16, 100, True), "dtype torch.bfloat16 | topk 100 | rows that start"),
    ("SGLANG_TRITON_CACHE", 9, cache("gather_latent", "auto", compress_ratio=4), "entries of several tokens"),
    ("SGLANG_TRITON_CACHE", 9, cache("gather_latent", MIXED, tile_scales="float32"), "gathering fp8_ds_mla as it is"),
    ("SGLANG_TRITON_CACHE", 9, cache("gather_latent", MIXED, dequantise=True), "pow2 scales"),
    ("VLLM_CACHE", 9, cache("gather_latent", MIXED, dequantise=True, tile_scales="float32"), ""),
    ("VLLM_CACHE", 9, cache("gather_latent", MIXED, dequantise=True, dtype=FP16), "fp8_ds_mla becomes keys of 576"),
    ("VLLM_CACHE", 9, cache("gather_latent", "fp8", 16, dequantise=True), "keys of 80 columns are not dequantised"),
    ("VLLM_CACHE", 9, cache("write_latent", MIXED, dtype=FP32), "fp8_ds_mla of models in torch.float32"),
    ("VLLM_CACHE", 9, cache("write_latent", MIXED, tile_scales="float32"), "fp8_ds_mla with float32 scales"),
    ("VLLM_CACHE", 9, cache("write_index", KEYS, 128, block_size=16), "fp8_index in pages of 16"),
]


@pytest.mark.parametrize(("name", "major", "asked", "said"), SAID)
def test_every_limit_is_a_reason(name: str, major: int, asked: Any, said: str, monkeypatch: Any) -> None:
    adapter = load_role(parse_reference(name), ROLES[type(asked)])
    monkeypatch.setattr(adapter, "libraries", ())
    reasons, expected = adapter.validate_configuration(DeviceCapability(major, 0), asked), said.split(" | ")
    expected = expected if said else []
    assert len(reasons) == len(expected) and all(map(str.startswith, reasons, expected)), reasons

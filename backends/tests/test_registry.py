"""Names, variants, overrides, what a selector takes, and what adapters say that they do not do."""

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from mla_conformance.backends import eager, indexer, interface, registry, topk
from mla_conformance.backends.cache import MLACacheSelectorConfig
from mla_conformance.backends.compress import Compression, MLACompressSelectorConfig
from mla_conformance.backends.decode import MLADecodeSelectorConfig
from mla_conformance.backends.kernel import DeviceCapability
from mla_conformance.backends.loading import load_backend, load_role, unavailable_reasons
from mla_conformance.backends.prepare import IndexPreparation, MLAPrepareSelectorConfig
from mla_conformance.backends.references import BackendReferenceError, known_variants, parse_reference
from mla_conformance.backends.registry import (
    ENUMS,
    MLADecodeBackendEnum,
    MLAPrefillBackendEnum,
    register_mla_decode_backend,
    register_mla_prefill_backend,
)
from mla_conformance.backends.roles import Role
from mla_conformance.backends.selector import get_mla_prefill_backend, priorities, select_mla_prefill_backend
from mla_conformance.backends.sparse import MLASparseSelectorConfig
from mla_conformance.backends.torch_sdpa import TorchSDPAPrefillBackend
from mla_conformance.reference.dimensions import PRESETS

PATH = "mla_conformance.backends.torch_sdpa.TorchSDPAPrefillBackend"
CPU = torch.device("cpu")
HOPPER, BLACKWELL = DeviceCapability(9, 0), DeviceCapability(10, 0)
R1, GLM = PRESETS["r1"].head, PRESETS["glm"].head


@pytest.fixture
def overridden() -> Iterator[MLAPrefillBackendEnum]:
    yield MLAPrefillBackendEnum.FLASH_ATTN
    MLAPrefillBackendEnum.FLASH_ATTN.clear_override()


def test_an_override_lasts_until_it_is_cleared(overridden: MLAPrefillBackendEnum) -> None:
    ours = overridden.get_path()
    register_mla_prefill_backend(overridden, PATH)
    assert overridden.is_overridden() and overridden.get_class() is TorchSDPAPrefillBackend
    assert not overridden.variants()
    decorated = type("Decorated", (eager.EagerPrefillBackend,), {"__module__": __name__})
    assert register_mla_prefill_backend(overridden)(decorated) is decorated
    assert overridden.get_path() == f"{__name__}.Decorated"
    overridden.clear_override()
    assert not overridden.is_overridden() and overridden.get_path() == ours and overridden.variants()


def test_roles_have_enumerations_of_their_own_whose_errors_name_what_exists() -> None:
    register_mla_decode_backend(MLADecodeBackendEnum.CUSTOM, PATH)
    try:
        assert MLADecodeBackendEnum.CUSTOM.is_overridden() and not MLAPrefillBackendEnum.CUSTOM.is_overridden()
        assert MLADecodeBackendEnum.CUSTOM.get_path() == PATH
    finally:
        MLADecodeBackendEnum.CUSTOM.clear_override()
    with pytest.raises(ValueError, match=r"backend: 'NOPE'.*EAGER, TORCH_SDPA, .*FLASH_ATTN, .*CUSTOM"):
        MLAPrefillBackendEnum["NOPE"]
    with pytest.raises(ValueError, match=r"Unknown MLA decode backend: 'FLASH_ATTN'.*EAGER, .*TORCH_SDPA"):
        MLADecodeBackendEnum["FLASH_ATTN"]
    for enum in (enum for enum in ENUMS if "CUSTOM" in enum.__members__):
        with pytest.raises(ValueError, match="CUSTOM must be registered before use: register_mla_") as raised:
            enum.CUSTOM.get_class()  # type: ignore[attr-defined]
        function = str(raised.value).partition("before use: ")[2].partition("(")[0]
        assert callable(getattr(registry, function))


def test_a_path_that_leads_nowhere_is_an_import_error(overridden: MLAPrefillBackendEnum) -> None:
    for path, said in (("no_such_module.Class", "no_such_module"), (PATH.replace("Torch", "No"), "has no 'NoSDPA")):
        register_mla_prefill_backend(overridden, path)
        with pytest.raises(ImportError, match=said):
            overridden.get_class()


def test_the_registry_lists_exactly_the_variants_that_the_adapters_define() -> None:
    for member in (member for enum in ENUMS for member in enum if member.name != "CUSTOM"):
        assert set(getattr(member.get_class(), "variants", ())) <= set(member.variants())
        assert all(member.get_class(variant).variant == variant for variant in member.variants())
    for reference in known_variants():
        assert parse_reference(reference.name) == reference
        assert f"[{load_backend(reference).variant}]" in reference.name
    with pytest.raises(BackendReferenceError, match=r"did you mean FLASH_ATTN\[fa4\]"):
        parse_reference("FLASH_ATTN[fa5]")


@pytest.mark.parametrize(
    ("name", "needed", "devices"),
    [
        ("VLLM_TOPK[decode]", "7.5 or newer", "7.5 8.0 8.9 9.0 10.3 12.0"),
        ("VLLM_TOPK[cooperative]", "9.0 or newer, but not 12.x", "9.0 10.3"),
        ("FLASHMLA", "9.0", "9.0"),
        ("FLASHINFER[cutlass]", "10.x", "10.3"),
    ],
)
def test_a_kernel_runs_on_the_devices_that_it_says(name: str, needed: str, devices: str) -> None:
    backend, every = parse_reference(name), [(7, 0), (7, 5), (8, 0), (8, 9), (9, 0), (10, 3), (12, 0)]
    loaded = load_backend(backend)
    found = [c for c in every if loaded.supports_compute_capability(DeviceCapability(*c))]
    assert " ".join(f"{major}.{minor}" for major, minor in found) == devices
    said = unavailable_reasons(backend, DeviceCapability(7, 0))[0]
    assert said == f"needs compute capability {needed}: this device has 7.0"


def vllm_config(backend: MLAPrefillBackendEnum | None = None) -> SimpleNamespace:
    model = SimpleNamespace(dtype=torch.bfloat16, hf_text_config=GLM)
    return SimpleNamespace(model_config=model, attention_config=SimpleNamespace(mla_prefill_backend=backend))


@pytest.mark.parametrize("capability", [None, HOPPER, BLACKWELL])
def test_without_a_valid_backend_every_candidate_gives_its_reason(capability: Any) -> None:
    config = interface.MLAPrefillSelectorConfig(torch.float64, R1)  # which no library's kernel takes
    with pytest.raises(ValueError, match="no valid MLA prefill backend for") as caught:
        select_mla_prefill_backend(capability, config)
    _, *lines = str(caught.value).splitlines()
    names, reasons = zip(*(line.strip().split(": ", maxsplit=1) for line in lines), strict=True)
    assert list(names) == [backend.name for backend in priorities(capability, R1)]
    assert all(reasons)


def test_priorities_follow_the_device_and_the_model_and_an_explicit_choice_is_taken_or_refused() -> None:
    first = [priorities(*each)[0].name for each in ((HOPPER, R1), (BLACKWELL, R1), (BLACKWELL, GLM))]
    assert first == ["FLASH_ATTN", "FLASH_ATTN", "TRTLLM_RAGGED"]
    assert "TRTLLM_RAGGED" not in [backend.name for backend in priorities(HOPPER, R1)]
    assert set(priorities(BLACKWELL, GLM)) == set(priorities(BLACKWELL, R1))
    assert get_mla_prefill_backend(vllm_config(), CPU) is TorchSDPAPrefillBackend
    assert get_mla_prefill_backend(vllm_config(MLAPrefillBackendEnum.EAGER), CPU).get_name() == "EAGER"
    with pytest.raises(ValueError, match=r"CUSTOM: .*must be registered before use"):
        get_mla_prefill_backend(vllm_config(MLAPrefillBackendEnum.CUSTOM), CPU)
    config = interface.MLAPrefillSelectorConfig(torch.float64, R1)
    with pytest.raises(ValueError, match="requested MLA prefill backend is not valid") as caught:
        select_mla_prefill_backend(HOPPER, config, MLAPrefillBackendEnum.TORCH_SDPA)
    assert "TORCH_SDPA: compute capability 9.0 not supported; dtype torch.float64 not supported" in str(caught.value)
    assert "FLASH" not in str(caught.value)


BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
SCORES, SELECTION, PREPARATION = indexer.MLAIndexerSelectorConfig, topk.MLATopKSelectorConfig, MLAPrepareSelectorConfig
MODEL = IndexPreparation(128, 32, False, True, True, "float32", False, 1e-6)
SECOND: dict[str, Any] = {"extra_kv_cache_dtype": "fp8_v4", "extra_block_size": 64, "extra_topk": 64}
MIXED, KEYS, SHARING = "fp8_ds_mla", "fp8_index", "SGLANG_TRITON_SPARSE"


def decode(layout: str, page: int, latent: int = 512, rope: int = 64) -> MLADecodeSelectorConfig:
    many: dict[str, Any] = {"max_query_len": 2, "uniform": False, "dcp_world_size": 2}
    return MLADecodeSelectorConfig(BF16, layout, page, latent, rope, **many)


def sparse(call: str, layout: str = "auto", page: int = 64, rope: int = 64, **asked: Any) -> MLASparseSelectorConfig:
    given: dict[str, Any] = {"dtype": BF16, "num_heads": 64, "topk": 128, "lse": False} | asked
    sizes: dict[str, Any] = {"block_size": page, "kv_lora_rank": 512, "qk_rope_head_dim": rope}
    return MLASparseSelectorConfig(call=call, kv_cache_dtype=layout, **sizes, **given)


def cache(call: str, layout: str, latent: int = 512, **asked: Any) -> MLACacheSelectorConfig:
    given: dict[str, Any] = {"dtype": BF16, "block_size": 64, "qk_rope_head_dim": 64, "tile_scales": "pow2"} | asked
    return MLACacheSelectorConfig(call=call, kv_cache_dtype=layout, kv_lora_rank=latent, **given)


def pooled(page: int = 4, **changes: Any) -> MLACompressSelectorConfig:
    form: dict[str, Any] = {"head_dim": 512, "rope_dim": 64, "ratio": 4, "overlap": True, "norm": True, "eps": 1e-6}
    return MLACompressSelectorConfig(BF16, FP32, Compression(**form | changes), 64, page)


ALONE = decode("bfloat16", 16)._replace(uniform=True, dcp_world_size=1)
ROLES: dict[type, Role] = {MLADecodeSelectorConfig: Role.DECODE, MLASparseSelectorConfig: Role.SPARSE}
ROLES |= {SCORES: Role.INDEXER, SELECTION: Role.TOPK, PREPARATION: Role.PREPARE}
ROLES |= {MLACacheSelectorConfig: Role.CACHE, MLACompressSelectorConfig: Role.COMPRESS}
NEAR_UNION: dict[str, Any] = {"topk": 100, "topk_length": True, "duplicates": True, "lse": True}
"""What rows that share their keys do not take."""
SAID: list[tuple[str, int, Any, str]] = [
    ("TRITON_MLA", 8, decode("fp8", 8, 32, 8), "block_size 8 | requests | several | latent | kv_cache_dtype fp8 needs"),
    ("TRITON_MLA", 9, ALONE._replace(dtype=FP16), "kv_cache_dtype bfloat16 expects a model of bfloat16, got torch.flo"),
    ("TRITON_MLA", 9, ALONE, ""),
    ("FLASHMLA", 9, decode("fp8", 16, 256), "kv_cache_dtype fp8 | block_size 16 | latent dims | requests | several"),
    ("CUTLASS_MLA", 10, decode("auto", 128), "2 query tokens a request | requests with different numbers of | several"),
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
    (f"{SHARING}[union2]", 9, sparse("prefill", **NEAR_UNION), "64 heads | LSE | topk 100 | topk_length | lis"),
    (SHARING, 9, sparse("prefill", **NEAR_UNION | {"lse": False}), ""),
    ("DEEPGEMM_INDEXER", 9, SCORES("topk", True, BF16, "auto", 16, 4, 64, 64), "kv | 4 heads | head | block | topk"),
    ("LMDEPLOY_TRITON", 9, SCORES("topk", False, BF16, KEYS, 1, 4, 128, 100), "4 heads | topk 100 | gathered keys"),
    ("LMDEPLOY_TRITON", 9, SELECTION(FP32, 64, True), "rows that start"),
    ("LMDEPLOY_TRITON", 9, PREPARATION(BF16, 4, MODEL), "scales | rope_first | hadamard | fold_scales | 32 rotated"),
    ("VLLM_TOPK[cooperative]", 9, SELECTION(BF16, 100, True), "dtype torch.bfloat16 | topk 100 | rows that start"),
    ("SGLANG_TRITON_CACHE", 9, cache("gather_latent", "auto", compress_ratio=4), "entries of several tokens"),
    ("SGLANG_TRITON_CACHE", 9, cache("gather_latent", MIXED, tile_scales="float32"), "gathering fp8_ds_mla as it is"),
    ("SGLANG_TRITON_CACHE", 9, cache("gather_latent", MIXED, dequantise=True), "pow2 scales"),
    ("SGLANG_COMPRESS", 9, pooled(), ""),
    ("SGLANG_COMPRESS", 9, pooled(3, ratio=128, overlap=False), ""),
    ("SGLANG_COMPRESS", 9, pooled(6), "pages of 6 states not supported (supported: multiples of 4)"),
    ("SGLANG_COMPRESS", 9, pooled(overlap=False), "groups of 4, 512 columns, 64 of them rotated not supported"),
    ("SGLANG_COMPRESS", 9, pooled(head_dim=128), "overlapping groups of 4, 128 columns, 64 of them rotated not"),
    ("SGLANG_COMPRESS", 9, pooled(norm=False), "overlapping groups of 4, 512 columns, 64 of them rotated, as they are"),
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

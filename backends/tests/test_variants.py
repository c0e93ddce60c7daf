"""``NAME[variant]``: parsed without importing an adapter, loaded, listed, resolved."""

import pytest

from mla_conformance.backends.loading import load_backend, unavailable_reasons
from mla_conformance.backends.platform import DeviceCapability
from mla_conformance.backends.references import BackendReferenceError, known_variants, parse_reference
from mla_conformance.backends.registry import ENUMS, MLAPrefillBackendEnum, register_mla_prefill_backend


def test_the_registry_lists_exactly_the_variants_that_the_adapters_define() -> None:
    for member in (member for enum in ENUMS for member in enum if member.name != "CUSTOM"):
        assert set(getattr(member.get_class(), "variants", ())) <= set(member.variants())
        assert all(member.get_variant(variant).variant == variant for variant in member.variants())
    for reference in known_variants():
        assert parse_reference(reference.name) == reference
        assert f"[{load_backend(reference).variant}]" in reference.name


def test_an_unknown_variant_is_refused_with_one_that_exists() -> None:
    with pytest.raises(BackendReferenceError, match=r"did you mean FLASH_ATTN\[fa4\]"):
        parse_reference("FLASH_ATTN[fa5]")


def test_an_override_has_no_variants() -> None:
    register_mla_prefill_backend(MLAPrefillBackendEnum.FLASH_ATTN, "some.where.Else")
    try:
        assert not MLAPrefillBackendEnum.FLASH_ATTN.variants()
    finally:
        MLAPrefillBackendEnum.FLASH_ATTN.clear_override()


@pytest.mark.parametrize(
    ("name", "needed", "devices"),
    [
        ("VLLM_TOPK[decode]", "7.5 or newer", [(7, 5), (8, 0), (8, 9), (9, 0), (10, 3), (12, 0)]),
        ("TRITON_MLA", "8.0 or newer", [(8, 0), (8, 9), (9, 0), (10, 3), (12, 0)]),
        ("TRITON_ATTN", "8.9 or newer", [(8, 9), (9, 0), (10, 3), (12, 0)]),
        ("VLLM_TOPK[cooperative]", "9.0 or newer, but not 12.x", [(9, 0), (10, 3)]),
        ("FLASHMLA", "9.0", [(9, 0)]),
        ("FLASHINFER[cutlass]", "10.x", [(10, 3)]),
        ("TRTLLM_RAGGED", "10.x", [(10, 3)]),
        ("TOKENSPEED_MLA", "10.x", [(10, 3)]),
    ],
)
def test_a_kernel_runs_on_the_devices_that_it_says(name: str, needed: str, devices: list[tuple[int, int]]) -> None:
    backend, every = parse_reference(name), [(7, 0), (7, 5), (8, 0), (8, 9), (9, 0), (10, 3), (12, 0)]
    loaded = load_backend(backend)
    assert [c for c in every if loaded.supports_compute_capability(DeviceCapability(*c))] == devices
    said = unavailable_reasons(backend, DeviceCapability(7, 0))[0]
    assert said == f"needs compute capability {needed}: this device has 7.0"

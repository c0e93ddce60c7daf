"""``NAME[variant]``: parsed without importing an adapter, loaded, listed, resolved."""

from typing import Any

import pytest

from mla_conformance.backends.loading import load_backend, unavailable_reasons
from mla_conformance.backends.platform import DeviceCapability
from mla_conformance.backends.references import BackendReferenceError, known_variants, parse_reference
from mla_conformance.backends.registry import ENUMS, MLAPrefillBackendEnum, register_mla_prefill_backend


def test_the_registry_lists_exactly_the_variants_that_the_adapters_define() -> None:
    for member in (member for enum in ENUMS for member in enum if member.name != "CUSTOM"):
        assert set(getattr(member.get_class(), "variants", ())) <= set(member.variants())
        assert all(member.get_variant(variant).variant == variant for variant in member.variants())


@pytest.mark.parametrize("reference", known_variants(), ids=lambda reference: reference.name)
def test_every_variant_loads_by_name(reference: Any) -> None:
    assert parse_reference(reference.name) == reference
    loaded: Any = load_backend(reference)
    assert f"[{loaded.variant}]" in reference.name


def test_an_unknown_variant_is_refused_with_one_that_exists() -> None:
    with pytest.raises(BackendReferenceError, match=r"did you mean FLASH_ATTN\[fa4\]"):
        parse_reference("FLASH_ATTN[fa5]")


def test_an_override_has_no_variants() -> None:
    register_mla_prefill_backend(MLAPrefillBackendEnum.FLASH_ATTN, "some.where.Else")
    try:
        assert not MLAPrefillBackendEnum.FLASH_ATTN.variants()
    finally:
        MLAPrefillBackendEnum.FLASH_ATTN.clear_override()


@pytest.mark.parametrize("name", ["TRTLLM_RAGGED", "TOKENSPEED_MLA", "FLASHINFER[cutlass]"])
def test_blackwell_only_kernels_say_so_on_hopper(name: Any) -> None:
    reasons = unavailable_reasons(parse_reference(name), DeviceCapability(9, 0))
    assert reasons[0] == "needs compute capability 10.x: this device has 9.0"

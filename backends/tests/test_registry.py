"""The registry: class paths, overrides, and errors that name what exists."""

import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest

from mla_conformance.backends import registry
from mla_conformance.backends.eager import EagerPrefillBackend
from mla_conformance.backends.registry import (
    ENUMS,
    MLADecodeBackendEnum,
    MLAPrefillBackendEnum,
    register_mla_decode_backend,
    register_mla_prefill_backend,
    resolve_obj_by_qualname,
)
from mla_conformance.backends.torch_sdpa import TorchSDPAPrefillBackend

PATH = "mla_conformance.backends.torch_sdpa.TorchSDPAPrefillBackend"


class Decorated(EagerPrefillBackend):
    """Registered by the decorator."""


@pytest.fixture
def overridden() -> Iterator[MLAPrefillBackendEnum]:
    """A member whose override is taken back after the test."""
    yield MLAPrefillBackendEnum.EAGER
    MLAPrefillBackendEnum.EAGER.clear_override()


def test_members_are_classes_by_path() -> None:
    assert MLAPrefillBackendEnum.TORCH_SDPA.get_path() == PATH
    assert MLAPrefillBackendEnum.TORCH_SDPA.get_class() is TorchSDPAPrefillBackend
    assert MLAPrefillBackendEnum["EAGER"].get_class().get_name() == "EAGER"


def test_an_unknown_name_lists_the_valid_ones() -> None:
    with pytest.raises(ValueError, match=r"backend: 'NOPE'.*EAGER, TORCH_SDPA, .*FLASH_ATTN, .*CUSTOM"):
        MLAPrefillBackendEnum["NOPE"]


def test_an_override_by_path_lasts_until_it_is_cleared(overridden: MLAPrefillBackendEnum) -> None:
    register_mla_prefill_backend(overridden, PATH)
    assert overridden.is_overridden() and overridden.get_class() is TorchSDPAPrefillBackend
    overridden.clear_override()
    assert not overridden.is_overridden() and overridden.get_class() is EagerPrefillBackend


def test_the_decorator_registers_its_class_and_returns_it(overridden: MLAPrefillBackendEnum) -> None:
    assert register_mla_prefill_backend(overridden)(Decorated) is Decorated
    assert overridden.get_path() == f"{Decorated.__module__}.Decorated"


def test_decode_backends_have_an_enumeration_of_their_own() -> None:
    register_mla_decode_backend(MLADecodeBackendEnum.CUSTOM, PATH)
    try:
        assert MLADecodeBackendEnum.CUSTOM.is_overridden() and not MLAPrefillBackendEnum.CUSTOM.is_overridden()
        assert MLADecodeBackendEnum.CUSTOM.get_path() == PATH
    finally:
        MLADecodeBackendEnum.CUSTOM.clear_override()
    with pytest.raises(ValueError, match=r"MLA decode backend CUSTOM .*register_mla_decode_backend\(MLADecodeBackendE"):
        MLADecodeBackendEnum.CUSTOM.get_class()
    with pytest.raises(ValueError, match=r"Unknown MLA decode backend: 'FLASH_ATTN'.*EAGER, TORCH_SDPA"):
        MLADecodeBackendEnum["FLASH_ATTN"]


@pytest.mark.parametrize("enum", [enum for enum in ENUMS if "CUSTOM" in enum.__members__])
def test_custom_must_be_registered_first_by_a_function_that_there_is(enum: Any) -> None:
    with pytest.raises(ValueError, match="CUSTOM must be registered before use: register_mla_") as raised:
        enum.CUSTOM.get_class()
    function = str(raised.value).partition("before use: ")[2].partition("(")[0]
    assert callable(getattr(registry, function))


@pytest.mark.parametrize(
    ("path", "said"),
    [("no_such_module.Class", "no_such_module"), ("mla_conformance.backends.eager.Nope", "eager has no 'Nope'")],
)
def test_a_path_that_leads_nowhere_is_an_import_error(path: str, said: str) -> None:
    with pytest.raises(ImportError, match=said):
        resolve_obj_by_qualname(path)


CHECK = """
import sys
from mla_conformance.backends.references import known_variants, parse_reference
from mla_conformance.backends.registry import MLAPrefillBackendEnum
assert [parse_reference(each.name) for each in known_variants()] == known_variants()
assert MLAPrefillBackendEnum["FLASH_ATTN"].get_path().endswith("FlashAttnPrefillBackend")
print("torch" in sys.modules)
"""


def test_checking_references_imports_no_torch() -> None:
    done = subprocess.run([sys.executable, "-c", CHECK], capture_output=True, text=True, check=False)
    assert (done.stdout.strip(), done.stderr) == ("False", "")

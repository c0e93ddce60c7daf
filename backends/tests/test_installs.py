"""What adapters say of a library that is there without their kernel, that swallowed an error, or that is missing."""

import os
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from mla_conformance.backends.aiter_triton import aiter_library
from mla_conformance.backends.loading import load_role
from mla_conformance.backends.references import parse_reference
from mla_conformance.backends.roles import Role

_FLASH_MLA = r".*pip install 'mla-conformance\[flashmla\]'"


def _sparse(q: Any, k_cache: Any, is_fp8_kvcache: bool = True) -> None: ...


def _dense(q: Any, k_cache: Any, is_fp8_kvcache: bool = False) -> None: ...


def _fork(q: Any, k_cache: Any, is_fp8_kvcache: Any = None, use_legacy: bool = False) -> None: ...


def _schedule(*args: Any) -> None: ...


def _schedule_of_lengths(cache_seqlens: Any, num_heads_k: int) -> None: ...


def _flash_mla(decode: Any, schedule: Any = _schedule, legacy: bool = False) -> dict[str, dict[str, Any]]:
    functions = {"flash_mla_with_kvcache": decode, "get_mla_metadata": schedule, "has_legacy": lambda: legacy}
    return {"flash_mla": functions}


def _fa3(**flags: bool) -> dict[str, dict[str, Any]]:
    """Flags as tokenspeed-fa3 spells them, or as fa3-fwd does."""
    config = {"CONFIG": {"build_flags": flags}, "__spec__": "found"}
    return {"flash_attn_interface": {}, "flash_attn_config": config}


def _tokenspeed(**contents: Any) -> dict[str, dict[str, Any]]:
    return {"cutlass": {}, "tokenspeed_triton": {}, "tvm_ffi": {}, "tokenspeed_mla": contents}


_FA3_OF_VLLM = "vllm.vllm_flash_attn.flash_attn_interface"
_SWALLOWED = {"_IMPORT_ERROR": ModuleNotFoundError("No module named 'cutlass'")}
BUILDS: list[tuple[str, Role, dict[str, dict[str, Any]], str]] = [
    ("FLASHMLA", Role.DECODE, _flash_mla(_sparse), "^package flash-mla .*and later ones have no dense" + _FLASH_MLA),
    ("FLASHMLA", Role.DECODE, _flash_mla(_fork), "sgl-flash-mla .*built without its legacy kernels" + _FLASH_MLA),
    ("FLASHMLA", Role.DECODE, _flash_mla(_dense, _schedule_of_lengths), "get_mla_metadata takes lengths" + _FLASH_MLA),
    ("FLASHMLA_SPARSE", Role.SPARSE, _flash_mla(_fork), "sgl-flash-mla .* built without its legacy" + _FLASH_MLA),
    ("FLASHMLA_SPARSE", Role.SPARSE, _flash_mla(_dense), "drives sgl-flash-mla" + _FLASH_MLA),
    ("FLASHMLA_SPARSE", Role.SPARSE, _flash_mla(_fork, legacy=True), ""),
    (
        "FLASH_ATTN_MLA[upstream]",
        Role.DECODE,
        _fa3(FLASHATTENTION_DISABLE_PAGEDKV=False, FLASH_ATTENTION_DISABLE_HDIMDIFF64=True),
        r"built without the head dims \(64, 512\); build FlashAttention's folder hopper",
    ),
    (
        "FLASH_ATTN_MLA[upstream]",
        Role.DECODE,
        _fa3(FLASHATTENTION_DISABLE_PAGEDKV=True, FLASHATTENTION_DISABLE_FP8=True),
        "built without paged KV;",
    ),
    ("FLASH_ATTN_MLA[upstream]", Role.DECODE, _fa3(FLASHATTENTION_DISABLE_BACKWARD=True), ""),
    (
        "FLASH_ATTN_MLA[vllm]",
        Role.DECODE,
        {_FA3_OF_VLLM: {"fa_version_unsupported_reason": lambda version: f"no extension {version}"}},
        "^package vllm is installed, but has no FlashAttention 3: no extension 3$",
    ),
    ("CUTLASS_MLA", Role.DECODE, {"vllm._custom_ops": {}}, "lack sm100_cutlass_mla_decode"),
    ("TOKENSPEED_MLA", Role.PREFILL, _tokenspeed(**_SWALLOWED), "cannot run: No module named 'cutlass'"),
    ("TOKENSPEED_MLA", Role.DECODE, _tokenspeed(**_SWALLOWED), "cannot run: No module named 'cutlass'"),
    ("TOKENSPEED_MLA", Role.DECODE, _tokenspeed(), ""),
]


@pytest.mark.parametrize(("name", "role", "modules", "said"), BUILDS)
def test_a_build_without_this_kernel_says_so(name: str, role: Role, modules: Any, said: str, installed: Any) -> None:
    for module, contents in modules.items():
        installed(module, **contents)
    adapter = load_role(parse_reference(name), role)
    reasons = adapter.broken_dependencies()
    assert adapter.missing_dependencies() == [] and len(reasons) == bool(said)
    assert all(re.search(said, reason) for reason in reasons), reasons


def test_a_build_with_the_operator_has_the_kernel(installed: Any, monkeypatch: Any) -> None:
    installed("vllm._custom_ops")
    monkeypatch.setattr(torch.ops, "_C", SimpleNamespace(sm100_cutlass_mla_decode=None), raising=False)
    assert load_role(parse_reference("CUTLASS_MLA"), Role.DECODE).broken_dependencies() == []


@pytest.mark.parametrize(
    ("name", "role", "said"),
    [
        ("FLASHMLA", Role.DECODE, "package sgl-flash-mla not installed (pip install 'mla-conformance[flashmla]')"),
        ("TRTLLM_RAGGED", Role.PREFILL, "tensorrt-llm on PyPI is a stub"),
    ],
)
def test_says_how_to_install_it(name: str, role: Role, said: str, monkeypatch: Any) -> None:
    monkeypatch.setattr("mla_conformance.backends.dependencies._installed", lambda module: False)
    assert said in load_role(parse_reference(name), role).missing_dependencies()[0]


@pytest.fixture
def package(tmp_path: Path, monkeypatch: Any) -> Iterator[Any]:
    """``package("name.of.module", source)``: it stands on the path, and nothing of its package was imported."""
    tops = []

    def make(name: str, source: str) -> None:
        module = tmp_path.joinpath(*name.split(".")).with_suffix(".py")
        module.parent.mkdir(parents=True)
        for folder in list(module.relative_to(tmp_path).parents)[:-1]:
            (tmp_path / folder / "__init__.py").touch()
        module.write_text(source)
        tops.append(name.partition(".")[0])
        for loaded in [each for each in sys.modules if each.partition(".")[0] in tops]:
            monkeypatch.delitem(sys.modules, loaded)

    monkeypatch.syspath_prepend(tmp_path)
    yield make
    for loaded in [each for each in sys.modules if each.partition(".")[0] in tops]:
        del sys.modules[loaded]


def test_a_vllm_without_its_compiled_extension_says_what_is_missing(package: Any) -> None:
    package("vllm.v1.attention.ops.triton_decode_attention", "import vllm._C_stable_libtorch")
    adapter = load_role(parse_reference("TRITON_MLA"), Role.DECODE)
    assert adapter.missing_dependencies() == []
    (reason,) = adapter.broken_dependencies()
    assert "vllm is installed" in reason and "No module named 'vllm._C_stable_libtorch'" in reason


_LAUNCHER = """
import os
built = os.environ.get("AITER_TRITON_ONLY") != "1"
launched = []
class Kernel:
    def __getitem__(self, grid):
        return lambda **arguments: launched.append((grid, arguments))
triton_mla_prefill_fwd_kernel = triton_mla_decode_fwd_reduce_kernel = Kernel()
triton_mla_decode_fwd_kernel = Kernel()
"""


def test_aiter_is_imported_without_building_and_launches_without_amds_option(package: Any, monkeypatch: Any) -> None:
    monkeypatch.delenv("AITER_TRITON_ONLY", raising=False)
    package("aiter.ops.triton.attention.mla", _LAUNCHER)
    module = [aiter_library("mla").load() for _ in range(2)][1]
    assert not module.built and "AITER_TRITON_ONLY" not in os.environ
    for name in ("decode_fwd", "prefill_fwd", "decode_fwd_reduce"):
        getattr(module, f"triton_mla_{name}_kernel")[1, 2](output_ptr=3, waves_per_eu=1)
    assert module.launched == [((1, 2), {"output_ptr": 3, "waves_per_eu": 1}), *[((1, 2), {"output_ptr": 3})] * 2]

"""Installed, missing and broken libraries are told apart, and builds without a kernel; asking imports nothing."""

import os
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from mla_conformance.backends import aiter_triton, dependencies, kernel, packaged
from mla_conformance.backends.loading import load_role, roles_of, unavailable_reasons
from mla_conformance.backends.references import known_variants, parse_reference
from mla_conformance.backends.roles import Role

_FLASH_MLA = r".*pip install 'mla-conformance\[flashmla\]'"

_SPARSE, _DENSE = (lambda q, k, is_fp8_kvcache=True: None), (lambda q, k, is_fp8_kvcache=False: None)
_FORK, _SCHEDULE = (lambda q, k, is_fp8_kvcache=None, use_legacy=False: None), (lambda cache_seqlens, num_heads_k: None)


def _flash_mla(decode: Any, schedule: Any = lambda *args: None, legacy: bool = False) -> dict[str, dict[str, Any]]:
    functions = {"flash_mla_with_kvcache": decode, "get_mla_metadata": schedule, "has_legacy": lambda: legacy}
    return {"flash_mla": functions}


def _fa3(**flags: bool) -> dict[str, dict[str, Any]]:
    names = {name: "FLASH_ATTENTION" if name == "HDIMDIFF64" else "FLASHATTENTION" for name in flags}
    built = {f"{names[name]}_DISABLE_{name}": without for name, without in flags.items()}
    config = {"CONFIG": {"build_flags": built}, "__spec__": "found"}
    return {"flash_attn_interface": {}, "flash_attn_config": config}


def _tokenspeed(**contents: Any) -> dict[str, dict[str, Any]]:
    return {"cutlass": {}, "tokenspeed_triton": {}, "tvm_ffi": {}, "tokenspeed_mla": contents}


_UNSUPPORTED = {"fa_version_unsupported_reason": lambda version: f"no extension {version}"}
_FA3_OF_VLLM: dict[str, dict[str, Any]] = {"vllm.vllm_flash_attn.flash_attn_interface": _UNSUPPORTED}
_OLD_FLASHINFER: dict[str, dict[str, Any]] = {"tvm_ffi": {}, "flashinfer.mla": {"BatchMLAPagedAttentionWrapper": None}}
_SWALLOWED = {"_IMPORT_ERROR": ModuleNotFoundError("No module named 'cutlass'")}
BUILDS: list[tuple[str, Role, dict[str, dict[str, Any]], str]] = [
    ("FLASHMLA", Role.DECODE, _flash_mla(_SPARSE), "^package flash-mla .*and later ones have no dense" + _FLASH_MLA),
    ("FLASHMLA", Role.DECODE, _flash_mla(_FORK), "sgl-flash-mla .*built without its legacy kernels" + _FLASH_MLA),
    ("FLASHMLA", Role.DECODE, _flash_mla(_DENSE, _SCHEDULE), "get_mla_metadata takes lengths" + _FLASH_MLA),
    ("FLASHMLA_SPARSE", Role.SPARSE, _flash_mla(_FORK), "sgl-flash-mla .* built without its legacy" + _FLASH_MLA),
    ("FLASHMLA_SPARSE", Role.SPARSE, _flash_mla(_DENSE), "drives sgl-flash-mla" + _FLASH_MLA),
    ("FLASHMLA_SPARSE", Role.SPARSE, _flash_mla(_FORK, legacy=True), ""),
    ("FLASHINFER_MLA_SPARSE_SM90", Role.SPARSE, _OLD_FLASHINFER, "^needs flashinfer-python 0.7 or newer, not "),
    ("FLASH_ATTN_MLA[upstream]", Role.DECODE, _fa3(PAGEDKV=False, HDIMDIFF64=True), r"head dims \(64, 512\); build"),
    ("FLASH_ATTN_MLA[upstream]", Role.DECODE, _fa3(PAGEDKV=True, FP8=True), "built without paged KV;"),
    ("FLASH_ATTN_MLA[upstream]", Role.DECODE, _fa3(BACKWARD=True), ""),
    ("FLASH_ATTN_MLA[vllm]", Role.DECODE, _FA3_OF_VLLM, "^package vllm is .* FlashAttention 3: no extension 3$"),
    ("CUTLASS_MLA", Role.DECODE, {"vllm._custom_ops": {}}, "lack sm100_cutlass_mla_decode"),
    ("CUTLASS_MLA", Role.DECODE, {"vllm._custom_ops": {}}, ""),
    ("TOKENSPEED_MLA", Role.PREFILL, _tokenspeed(**_SWALLOWED), "cannot run: No module named 'cutlass'"),
    ("TOKENSPEED_MLA", Role.DECODE, _tokenspeed(**_SWALLOWED), "cannot run: No module named 'cutlass'"),
    ("TOKENSPEED_MLA", Role.DECODE, _tokenspeed(), ""),
]


@pytest.mark.parametrize(("name", "role", "modules", "said"), BUILDS)
def test_a_build_without_this_kernel_says_so(
    name: str, role: Role, modules: Any, said: str, installed: Any, monkeypatch: Any
) -> None:
    operators = SimpleNamespace() if said else SimpleNamespace(sm100_cutlass_mla_decode=None)
    monkeypatch.setattr(torch.ops, "_C", operators, raising=False)
    for module, contents in modules.items():
        installed(module, **contents)
    adapter = load_role(parse_reference(name), role)
    reasons = adapter.broken_dependencies()
    assert adapter.missing_dependencies() == [] and len(reasons) == bool(said)
    assert all(re.search(said, reason) for reason in reasons), reasons


@pytest.fixture
def package(tmp_path: Path, monkeypatch: Any) -> Iterator[Any]:
    """``package("name.of.module", source)``: it stands on the path, and nothing of its package was imported.

    What was, as Triton may be, goes as a whole and comes back as a whole: its extension is not imported twice.
    """
    real: dict[str, Any] = {}

    def loaded(top: str) -> list[str]:
        return [each for each in sys.modules if each.partition(".")[0] == top]

    def make(name: str, source: str) -> None:
        module = tmp_path.joinpath(*name.split(".")).with_suffix(".py")
        module.parent.mkdir(parents=True, exist_ok=True)
        for folder in list(module.relative_to(tmp_path).parents)[:-1]:
            (tmp_path / folder / "__init__.py").touch()
        module.write_text(source)
        real.setdefault(top := name.partition(".")[0], {each: sys.modules.pop(each) for each in loaded(top)})

    monkeypatch.syspath_prepend(tmp_path)
    yield make
    for top, modules in real.items():
        for each in loaded(top):
            del sys.modules[each]
        sys.modules.update(modules)


def _library(module: str) -> dependencies.Library:
    return dependencies.Library(module, "the-library", "pip install 'mla-conformance[the-extra]'", "a note")


def test_a_missing_install_and_a_broken_one_are_told_apart(package: Any, monkeypatch: Any, tmp_path: Path) -> None:
    missing = _library("no_such_library")
    assert missing.missing() == ["package the-library not installed (pip install 'mla-conformance[the-extra]'); a note"]
    assert missing.broken() == [] and missing.version() == "not installed as a distribution"
    package("broken_library", "raise OSError('libcudart.so.13: cannot open shared object file')")
    library = _library("broken_library")
    said = "package the-library is installed, but broken_library does not import: OSError: libcudart.so.13: cannot "
    said += "open shared object file"
    assert library.missing() == [] and library.broken() == [said]
    monkeypatch.setattr(dependencies, "_version", lambda distribution: "1.4, never tried (the-library<1.4 was)")
    assert library.broken() == [f"{said}; the installed version is 1.4, never tried (the-library<1.4 was)"]
    package("sound_library.inner.part", "answer = 42")
    part, other = _library("sound_library.inner.part"), _library("sound_library.inner.other")
    top, inner = (tmp_path / "sound_library" / name for name in ("__init__.py", "inner/__init__.py"))
    top.write_text("raise SystemError('imported')")
    assert part.missing() == [] != other.missing()
    inner.unlink()  # a folder in a package
    assert part.missing() == [] != other.missing() and "sound_library" not in sys.modules
    top.unlink()  # a namespace package
    assert part.missing() == [] != other.missing() and part.broken() == [] and part.load().answer == 42


@pytest.mark.parametrize(("found", "said"), [("1.6rc1", "1.6rc1"), ("2.0", "2.0, never tried (the-library<2,>=1 was)")])
def test_a_version_that_was_never_tried_says_so(found: str, said: str, monkeypatch: Any) -> None:
    required = ["torch>=2.9", 'The_Library>=1,<2; extra == "x"']
    dependencies._version.cache_clear()
    monkeypatch.setattr(dependencies, "version", lambda distribution: found)
    monkeypatch.setattr(dependencies, "requires", lambda distribution: required)
    assert _library("no_such_library").version() == said
    dependencies._version.cache_clear()
    del required[1]
    assert _library("no_such_library").version() == found  # of a library without an extra nothing is known
    dependencies._version.cache_clear()


def test_triton_interprets_what_is_defined_meanwhile_and_nothing_of_it_stays(package: Any, monkeypatch: Any) -> None:
    package("triton.experimental.gluon", "")
    package("triton_engine", "import os\nfound = os.environ.get('TRITON_INTERPRET')\n")
    library = packaged.InterpretedLibrary("triton_engine", "triton-engine", "pip install triton-engine")
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3")
    assert library.load().found == "1"
    assert "TRITON_INTERPRET" not in os.environ and os.environ["CUDA_VISIBLE_DEVICES"] == "3"
    monkeypatch.delitem(sys.modules, "triton_engine")
    monkeypatch.setattr("triton.language", SimpleNamespace(sum=len), raising=False)
    (reason,) = library.broken()
    assert "Triton was imported before, to compile" in reason


@pytest.mark.parametrize("reference", [each for each in known_variants() if "interpreted" in each.name], ids=str)
def test_an_interpreted_kernel_is_for_a_cpu_and_never_certified(reference: Any) -> None:
    for role in roles_of(reference):
        variant = load_role(reference, role)
        compiled = variant.__bases__[1]
        said = unavailable_reasons(reference, kernel.DeviceCapability(9, 0), role)[0]
        assert said.startswith("needs compute capability none")
        assert variant.supports_compute_capability(None) and variant.declaration.emulated
        assert "not certified" in variant.declaration.deviations[0].adapter and not compiled.declaration.emulated
        assert [library.module for library in variant.libraries] == [library.module for library in compiled.libraries]
        assert all(isinstance(library, packaged.InterpretedLibrary) for library in variant.libraries)


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
    module = [aiter_triton.aiter_library("mla").load() for _ in range(2)][1]
    assert not module.built and "AITER_TRITON_ONLY" not in os.environ
    for name in ("decode_fwd", "prefill_fwd", "decode_fwd_reduce"):
        getattr(module, f"triton_mla_{name}_kernel")[1, 2](output_ptr=3, waves_per_eu=1)
    assert module.launched == [((1, 2), {"output_ptr": 3, "waves_per_eu": 1}), *[((1, 2), {"output_ptr": 3})] * 2]

"""A library whose Triton kernels are interpreted: what it finds in the environment, and when it is too late."""

import os
import sys
from types import SimpleNamespace
from typing import Any

import pytest

from mla_conformance.backends.interpreted import InterpretedLibrary
from mla_conformance.backends.loading import load_role, roles_of, unavailable_reasons
from mla_conformance.backends.platform import DeviceCapability
from mla_conformance.backends.references import known_variants


@pytest.fixture
def library(tmp_path: Any, monkeypatch: Any) -> Any:
    """An engine that remembers whether Triton was to interpret while it was imported, and a Triton beside it."""
    (tmp_path / "triton" / "experimental").mkdir(parents=True)
    (tmp_path / "triton" / "experimental" / "gluon.py").touch()
    (tmp_path / "triton_engine.py").write_text("import os\nfound = os.environ.get('TRITON_INTERPRET')\n")
    monkeypatch.syspath_prepend(tmp_path)
    # A real Triton goes as a whole and comes back as a whole: its extension is not imported twice.
    real = {name: module for name, module in sys.modules.items() if name.partition(".")[0] == "triton"}
    for name in real:
        del sys.modules[name]
    yield InterpretedLibrary("triton_engine", "triton-engine", "pip install triton-engine")
    for name in [name for name in sys.modules if name.partition(".")[0] in ("triton", "triton_engine")]:
        del sys.modules[name]
    sys.modules.update(real)


def test_triton_interprets_what_is_defined_meanwhile_and_nothing_of_it_stays(library: Any, monkeypatch: Any) -> None:
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3")
    assert library.load().found == "1"
    assert "TRITON_INTERPRET" not in os.environ and os.environ["CUDA_VISIBLE_DEVICES"] == "3"


def test_a_triton_that_compiles_already_is_told(library: Any, monkeypatch: Any) -> None:
    monkeypatch.setitem(sys.modules, "triton", SimpleNamespace(language=SimpleNamespace(sum=len)))
    (reason,) = library.broken()
    assert "Triton was imported before, to compile" in reason


@pytest.mark.parametrize("reference", [each for each in known_variants() if "interpreted" in each.name], ids=str)
def test_an_interpreted_kernel_is_for_a_cpu_and_never_certified(reference: Any) -> None:
    for role in roles_of(reference):
        variant = load_role(reference, role)
        compiled = variant.__bases__[1]
        assert unavailable_reasons(reference, DeviceCapability(9, 0), role)[0].startswith(
            "needs compute capability none"
        )
        assert variant.supports_compute_capability(None) and variant.declaration.emulated
        assert "not certified" in variant.declaration.deviations[0].adapter and not compiled.declaration.emulated
        assert [library.module for library in variant.libraries] == [library.module for library in compiled.libraries]
        assert all(isinstance(library, InterpretedLibrary) for library in variant.libraries)

"""Installed, missing and broken libraries are told apart, and asking imports nothing."""

import sys
from typing import Any

import pytest

from mla_conformance.backends.dependencies import Library, extra


@pytest.fixture
def site(tmp_path: Any, monkeypatch: Any) -> Any:
    monkeypatch.syspath_prepend(tmp_path)
    yield tmp_path
    for name in [
        name
        for name in sys.modules
        if name.partition(".")[0] in ("sound_library", "broken_library", "namespace_library")
    ]:
        del sys.modules[name]


def _library(module: Any) -> Any:
    return Library(module, "the-library", extra("the-extra"), "a note")


def test_missing_names_the_command_and_the_note() -> None:
    assert _library("no_such_library").missing() == [
        "package the-library not installed (pip install 'mla-conformance[the-extra]'); a note"
    ]
    assert _library("no_such_library").broken() == []
    assert _library("no_such_library").version() == "not installed as a distribution"


def test_asking_whether_it_is_installed_imports_nothing(site: Any) -> None:
    (site / "sound_library").mkdir()
    (site / "sound_library" / "__init__.py").write_text("raise SystemError('imported')")
    (site / "sound_library" / "part.py").write_text("")
    assert _library("sound_library.part").missing() == []
    assert _library("sound_library.other").missing() != []
    assert "sound_library" not in sys.modules


def test_a_broken_install_is_told_apart_with_its_error(site: Any) -> None:
    (site / "broken_library.py").write_text("raise OSError('libcudart.so.13: cannot open shared object file')")
    library = _library("broken_library")
    assert library.missing() == []
    assert library.broken() == [
        "package the-library is installed, but broken_library does not import: "
        "OSError: libcudart.so.13: cannot open shared object file"
    ]


def test_a_part_of_a_namespace_package_is_found_without_the_rest(site: Any) -> None:
    (site / "namespace_library" / "cute").mkdir(parents=True)
    (site / "namespace_library" / "cute" / "__init__.py").write_text("answer = 42")
    assert _library("namespace_library.cute").missing() == []
    assert _library("namespace_library.interface").missing() != []
    assert _library("namespace_library.cute").broken() == []
    assert _library("namespace_library.cute").load().answer == 42


def test_a_version_that_was_not_tried_is_told(site: Any, monkeypatch: Any) -> None:
    (site / "broken_library.py").write_text("raise OSError('no symbol')")
    library = Library("broken_library", "the-library", "pip install the-library", tried=">=1.2,<1.4")
    monkeypatch.setattr("mla_conformance.backends.dependencies._version", lambda distribution: "1.3.0rc1")
    assert library.untried() == ""
    monkeypatch.setattr("mla_conformance.backends.dependencies._version", lambda distribution: "1.4.0")
    (reason,) = library.broken()
    assert reason.endswith("the-library 1.4.0 is not a version that the adapter was tried with (>=1.2,<1.4)")
    monkeypatch.undo()
    assert library.untried() == ""

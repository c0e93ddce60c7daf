"""Installed, missing and broken libraries are told apart, and asking imports nothing."""

import sys
from typing import Any

import pytest

from mla_conformance.backends import dependencies
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


@pytest.mark.parametrize(
    ("found", "said"),
    [
        ("1.5", "1.5"),
        ("1.6rc1", "1.6rc1"),
        ("2.0", "2.0, never tried (the-library<2,>=1 was)"),
    ],
)
def test_a_version_that_was_never_tried_says_so(found: str, said: str, monkeypatch: Any) -> None:
    dependencies._version.cache_clear()
    monkeypatch.setattr(dependencies, "version", lambda distribution: found)
    monkeypatch.setattr(
        dependencies, "requires", lambda distribution: ["torch>=2.9", 'The_Library>=1,<2; extra == "x"']
    )
    assert _library("no_such_library").version() == said
    dependencies._version.cache_clear()


def test_a_library_without_an_extra_has_no_range(monkeypatch: Any) -> None:
    monkeypatch.setattr(dependencies, "requires", lambda distribution: ["torch>=2.9"])
    assert not dependencies._tried("vllm")


def test_a_version_that_was_never_tried_is_told_where_it_does_not_import(site: Any, monkeypatch: Any) -> None:
    (site / "broken_library.py").write_text("raise OSError('no symbol')")
    library = _library("broken_library")
    monkeypatch.setattr(dependencies, "_version", lambda distribution: "1.4, never tried (the-library<1.4 was)")
    assert library.broken()[0].endswith(
        "OSError: no symbol; the installed version is 1.4, never tried (the-library<1.4 was)"
    )
    monkeypatch.setattr(dependencies, "_version", lambda distribution: "1.3")
    assert library.broken()[0].endswith("OSError: no symbol")

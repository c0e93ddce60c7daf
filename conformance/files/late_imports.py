"""Modules that a process which decides loads late: none that was written since its run began.

A kernel may write where modules lie, Python's library included, and what it wrote would decide along with whoever
imports it. Nor is bytecode read, which may be of another source.
"""

import codecs
import os
import sysconfig
from importlib.machinery import ExtensionFileLoader, SourceFileLoader
from typing import Any

_ENCODINGS = ("ascii", "latin_1", "unicode_escape")
"""Beside UTF-8, modules that are loaded when they are used first."""
_LIBRARY = sysconfig.get_path("platstdlib")
_get_code, _create_module = SourceFileLoader.get_code, ExtensionFileLoader.create_module


def refuse_written_since(began: float) -> None:
    """Load no such module from now on; of compiled ones, which others than kernels write into caches, Python's own.

    Args:
        began: when the run began, in seconds of the system's clock.
    """

    for name in _ENCODINGS:
        codecs.lookup(name)

    def get_code(loader: SourceFileLoader, name: str) -> Any:
        path = loader.get_filename(name)
        source = loader.get_data(path)
        _require_older(path, began)  # which is what was read, then
        return loader.source_to_code(source, path)

    def create_module(loader: ExtensionFileLoader, spec: Any) -> Any:
        if loader.path.startswith(_LIBRARY):
            _require_older(loader.path, began)
        return _create_module(loader, spec)

    SourceFileLoader.get_code = get_code  # type: ignore[assignment,method-assign]
    ExtensionFileLoader.create_module = create_module  # type: ignore[assignment,method-assign]


def load_all_again() -> None:
    """Load any module: this process is to run a kernel, or the run is over."""
    SourceFileLoader.get_code = _get_code  # type: ignore[method-assign]
    ExtensionFileLoader.create_module = _create_module  # type: ignore[method-assign]


def _require_older(path: str, began: float) -> None:
    if os.stat(path).st_ctime > began:  # noqa: PTH116 - what pathlib loads late would come back here
        raise ImportError(f"{path} was written while the run judged, and is not loaded", path=path)

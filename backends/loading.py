"""From what a user writes to a backend class: NAME, ``package.module:Class`` or ``path/to/file.py:Class``.

NAME is a member of the enumeration or an entry point of the group ``mla_conformance.backends``.
"""

import hashlib
import importlib.util
import sys
from dataclasses import dataclass
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path
from typing import Any

from mla_conformance.backends.interface import MLAPrefillBackend
from mla_conformance.backends.platform import DeviceCapability
from mla_conformance.backends.registry import MLAPrefillBackendEnum, resolve_obj_by_qualname

ENTRY_POINT_GROUP = "mla_conformance.backends"
_REQUIRED = (
    "get_name",
    "validate_configuration",
    "is_available",
    "supports_compute_capability",
    "supports_dtype",
    "prepare_metadata",
    "run_prefill_new_tokens",
    "run_prefill_context_chunk",
)


class BackendReferenceError(ValueError):
    """A backend reference that names nothing that can be judged."""


@dataclass(frozen=True)
class BackendReference:
    """A backend as the user names it.

    Attributes:
        name: by which it is selected and reported; the class name for a reference to a class.
        reference: what replays it, and what another process loads it by.
    """

    name: str
    reference: str


def _plugins() -> dict[str, EntryPoint]:
    return {point.name: point for point in entry_points(group=ENTRY_POINT_GROUP)}


def known_backends() -> list[BackendReference]:
    """Every registered backend: the enumeration's members, then the entry points."""
    members = [m.name for m in MLAPrefillBackendEnum if m is not MLAPrefillBackendEnum.CUSTOM or m.is_overridden()]
    return [BackendReference(name, name) for name in dict.fromkeys([*members, *_plugins()])]


def parse_reference(reference: str) -> BackendReference:
    """The backend that ``reference`` names, without importing it.

    Raises:
        BackendReferenceError: an unknown name, or a path that does not exist.
    """
    if ":" not in reference:
        names = [backend.name for backend in known_backends()]
        if reference not in names:
            raise BackendReferenceError(
                f"unknown backend '{reference}'; expected one of {', '.join(names)}, "
                "or package.module:Class, or path/to/file.py:Class"
            )
        return BackendReference(reference, reference)
    location, _, class_name = reference.rpartition(":")
    if location.endswith(".py"):
        path = Path(location).resolve()
        if not path.is_file():
            raise BackendReferenceError(f"'{reference}': no file {path}")
        return BackendReference(class_name, f"{path}:{class_name}")
    return BackendReference(class_name, reference)


def load_backend(backend: BackendReference) -> type[MLAPrefillBackend]:
    """Import the class of a backend and check that it has the interface.

    Raises:
        ImportError: an adapter that cannot be imported here.
        BackendReferenceError: a module, file or class that cannot be loaded, or a class without a required method.
    """
    if ":" in backend.reference:
        return _checked(_load_class(backend.reference), backend.reference)
    plugins = _plugins()
    if backend.name in plugins:
        return _checked(plugins[backend.name].load(), backend.reference)
    return MLAPrefillBackendEnum[backend.name].get_class()


def _load_class(reference: str) -> Any:
    location, _, class_name = reference.rpartition(":")
    try:
        if location.endswith(".py"):
            return getattr(_import_file(Path(location)), class_name)
        return resolve_obj_by_qualname(f"{location}.{class_name}")
    except AttributeError as error:
        raise BackendReferenceError(f"'{reference}': no class {class_name} in {location}") from error
    except Exception as error:
        raise BackendReferenceError(f"'{reference}' does not import: {type(error).__name__}: {error}") from error


def _import_file(path: Path) -> Any:
    name = f"mla_conformance_plugin_{path.stem}_{hashlib.sha256(str(path).encode()).hexdigest()[:8]}"
    if name not in sys.modules:
        spec = importlib.util.spec_from_file_location(name, path)
        if spec is None or spec.loader is None:
            raise ImportError(f"{path} is not a Python source file")
        module = importlib.util.module_from_spec(spec)
        sys.modules[name] = module
        try:
            spec.loader.exec_module(module)
        except BaseException:
            del sys.modules[name]
            raise
    return sys.modules[name]


def _checked(loaded: Any, reference: str) -> type[MLAPrefillBackend]:
    if not isinstance(loaded, type):
        raise BackendReferenceError(f"'{reference}': expected a class, got {type(loaded).__name__}")
    abstract: set[str] = getattr(loaded, "__abstractmethods__", set())
    missing = sorted(abstract | {name for name in _REQUIRED if not callable(getattr(loaded, name, None))})
    if missing:
        raise BackendReferenceError(f"'{reference}': class {loaded.__name__} lacks {', '.join(missing)}")
    return loaded


def unavailable_reasons(backend: BackendReference, device_capability: DeviceCapability | None) -> list[str]:
    """Why a backend cannot run on this machine at all; an empty list means that it can.

    Raises:
        BackendReferenceError: see :func:`load_backend`.
    """
    try:
        loaded = load_backend(backend)
    except ImportError as error:
        return [_import_reason(error)]
    reasons = []
    if not loaded.supports_compute_capability(device_capability):
        got = "this device has none" if device_capability is None else f"this device has {device_capability}"
        reasons.append(f"compute capability not supported: {got}")
    if not loaded.is_available():
        missing: list[str] = getattr(loaded, "missing_dependencies", list)()
        reasons += missing or ["required dependencies not available"]
    return reasons


def _import_reason(error: ImportError) -> str:
    if isinstance(error, ModuleNotFoundError) and (error.name or "").startswith("mla_conformance.backends."):
        return "this version has no adapter for it"
    return f"{type(error).__name__}: {error}"

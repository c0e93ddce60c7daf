"""From what a user writes to a backend class: NAME, ``package.module:Class`` or ``path/to/file.py:Class``.

NAME is a member of the enumeration or an entry point of the group ``mla_conformance.backends``; ``NAME[variant]`` is
one of the kernels that share a name.
"""

import hashlib
import importlib.util
import sys
from dataclasses import dataclass
from importlib import import_module
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path
from typing import Any

from mla_conformance.backends.declaration import declaration_of
from mla_conformance.backends.generations import as_prefill_backend
from mla_conformance.backends.interface import MLAPrefillBackend
from mla_conformance.backends.platform import DeviceCapability
from mla_conformance.backends.registry import MLAPrefillBackendEnum, resolve_class

ENTRY_POINT_GROUP = "mla_conformance.backends"
_REQUIRED = (
    "get_name",
    "validate_configuration",
    "is_available",
    "supports_compute_capability",
    "supports_dtype",
    "supports_quant_output",
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


def known_variants() -> list[BackendReference]:
    """Every kernel of the backends that have several, as ``NAME[variant]``."""
    names = [f"{member.name}[{variant}]" for member in MLAPrefillBackendEnum for variant in member.variants()]
    return [BackendReference(name, name) for name in names]


def parse_reference(reference: str) -> BackendReference:
    """The backend that ``reference`` names, without importing it.

    Raises:
        BackendReferenceError: an unknown name, or a path that does not exist.
    """
    if ":" not in reference:
        names = [backend.name for backend in (*known_backends(), *known_variants())]
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
        return _checked(as_prefill_backend(_load_class(backend.reference)), backend.reference)
    plugins = _plugins()
    if backend.name in plugins:
        return _checked(as_prefill_backend(_load_plugin(plugins[backend.name])), backend.reference)
    name, _, variant = backend.name.partition("[")
    loaded: Any = MLAPrefillBackendEnum[name].get_class()
    return as_prefill_backend(loaded.variants[variant.rstrip("]")] if variant else loaded)


def _load_plugin(point: EntryPoint) -> Any:
    try:
        return point.load()
    except AttributeError as error:
        raise BackendReferenceError(f"entry point {point.name} = {point.value}: {error}") from error


def _load_class(reference: str) -> Any:
    location, _, class_name = reference.rpartition(":")
    try:
        module = _import_file(Path(location)) if location.endswith(".py") else import_module(location)
    except (Exception, SystemExit) as error:
        raise BackendReferenceError(f"'{reference}' does not import: {type(error).__name__}: {error}") from error
    if not hasattr(module, class_name):
        raise BackendReferenceError(f"'{reference}': no class {class_name} in {location}")
    return getattr(module, class_name)


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
    try:
        declaration_of(loaded)
    except TypeError as error:
        raise BackendReferenceError(f"'{reference}': {error}") from error
    return loaded


def resolve_backend(backend: BackendReference, device_capability: DeviceCapability | None) -> type[MLAPrefillBackend]:
    """The class that a backend's calls go to on such a device; see :func:`load_backend` for what it raises."""
    return resolve_class(load_backend(backend), device_capability)


def unavailable_reasons(backend: BackendReference, device_capability: DeviceCapability | None) -> list[str]:
    """Why a backend cannot run on this machine at all; an empty list means that it can.

    Raises:
        BackendReferenceError: see :func:`load_backend`.
    """
    try:
        loaded = resolve_backend(backend, device_capability)
    except (ImportError, OSError) as error:  # the latter from a shared library that does not load
        return [_import_reason(error)]
    try:
        return _reasons(loaded, device_capability)
    except Exception as error:
        return [f"asked whether it can run here, it raised {type(error).__name__}: {error}"]


def _reasons(loaded: type[MLAPrefillBackend], device_capability: DeviceCapability | None) -> list[str]:
    reasons = []
    if not loaded.supports_compute_capability(device_capability):
        needed = getattr(loaded, "needed_capability", "")
        got = "this device has none" if device_capability is None else f"this device has {device_capability}"
        reasons.append(
            f"needs compute capability {needed}: {got}" if needed else f"compute capability not supported: {got}"
        )
    if not loaded.is_available():
        missing: list[str] = getattr(loaded, "missing_dependencies", list)()
        reasons += missing or ["required dependencies not available"]
    return reasons or getattr(loaded, "broken_dependencies", list)()


def _import_reason(error: Exception) -> str:
    if isinstance(error, ModuleNotFoundError) and (error.name or "").startswith("mla_conformance.backends."):
        return "this version has no adapter for it"
    return f"{type(error).__name__}: {error}"

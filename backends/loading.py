"""From what a user writes to a backend class: NAME, ``package.module:Class`` or ``path/to/file.py:Class``.

NAME is a member of an enumeration, or of several in as many roles, or an entry point of the group
``mla_conformance.backends``; ``NAME[variant]`` is one of the kernels that share a name. A class that was named itself
has the role that its methods give it, and those that it names siblings for.
"""

import hashlib
import importlib.util
import sys
from dataclasses import dataclass
from importlib import import_module
from importlib.metadata import EntryPoint, entry_points
from itertools import chain
from pathlib import Path
from typing import Any

from mla_conformance.backends.declaration import declaration_of
from mla_conformance.backends.generations.recognition import as_prefill_backend
from mla_conformance.backends.platform import DeviceCapability
from mla_conformance.backends.registry import ENUMS, BackendEnum, resolve_class
from mla_conformance.backends.roles import REQUIRED, Role, role_of, sibling

ENTRY_POINT_GROUP = "mla_conformance.backends"


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
    """Every registered backend: the enumerations' members, then the entry points."""
    members = [m.name for enum in ENUMS for m in enum if m.name != "CUSTOM" or m.is_overridden()]
    return [BackendReference(name, name) for name in dict.fromkeys([*members, *_plugins()])]


def known_variants() -> list[BackendReference]:
    """Every kernel of the backends that have several, as ``NAME[variant]``."""
    names = [f"{member.name}[{variant}]" for enum in ENUMS for member in enum for variant in member.variants()]
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


def roles_of(backend: BackendReference) -> tuple[Role, ...]:
    """The roles that a backend has; a class that was named itself is imported for it.

    Raises:
        ImportError: an entry point that cannot be imported here.
        BackendReferenceError: see :func:`load_role`.
    """
    members = _members(backend)
    if members:
        return tuple(member.role() for member in members)
    named = _load_named(backend)
    return tuple(role for role in Role if _in_role(named, role) is not None)


def load_role(backend: BackendReference, role: Role) -> Any:
    """Import the class of a backend in a role and check that it has the interface; None without that role.

    Raises:
        ImportError: an adapter that cannot be imported here.
        BackendReferenceError: a module, file or class that cannot be loaded, or a class without a required method.
    """
    members = _members(backend)
    if not members:
        loaded = _in_role(_load_named(backend), role)
        return None if loaded is None else _checked(loaded, backend.reference)
    _, _, variant = backend.name.partition("[")
    for member in members:
        if member.role() is role:
            found = member.get_class()
            return as_prefill_backend(found.variants[variant.rstrip("]")] if variant else found)
    return None


def load_backend(backend: BackendReference) -> Any:
    """Import the class that a reference names, or that of a name's first role; see :func:`load_role` for errors."""
    members = _members(backend)
    return load_role(backend, members[0].role() if members else role_of(_load_named(backend)))


def _members(backend: BackendReference) -> list[BackendEnum]:
    """The members of the enumerations that a name stands for; none for a class and for an entry point."""
    name, _, variant = backend.name.partition("[")
    if ":" in backend.reference or name in _plugins():
        return []
    found = [enum[name] for enum in ENUMS if name in enum.__members__]
    return [m for m in found if (variant.rstrip("]") in m.variants() if variant else m.value or m.is_overridden())]


def _load_named(backend: BackendReference) -> Any:
    """What a reference or an entry point names; a class, if it is a backend."""
    if ":" in backend.reference:
        return as_prefill_backend(_load_class(backend.reference))
    return as_prefill_backend(_load_plugin(_plugins()[backend.name]))


def _in_role(named: Any, role: Role) -> Any:
    return named if role_of(named) is role else sibling(named, role)


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


def _checked(loaded: Any, reference: str) -> type:
    if not isinstance(loaded, type):
        raise BackendReferenceError(f"'{reference}': expected a class, got {type(loaded).__name__}")
    abstract: set[str] = getattr(loaded, "__abstractmethods__", set())
    required = REQUIRED[role_of(loaded)]
    missing = sorted(abstract | {name for name in required if not callable(getattr(loaded, name, None))})
    if missing:
        raise BackendReferenceError(f"'{reference}': class {loaded.__name__} lacks {', '.join(missing)}")
    try:
        declaration_of(loaded)
    except TypeError as error:
        raise BackendReferenceError(f"'{reference}': {error}") from error
    return loaded


def resolve_backend(backend: BackendReference, device_capability: DeviceCapability | None, role: Role) -> Any:
    """The class that a backend's calls of a role go to on such a device; see :func:`load_role` for what it raises."""
    loaded = load_role(backend, role)
    return None if loaded is None else resolve_class(loaded, device_capability)


def unavailable_reasons(
    backend: BackendReference, device_capability: DeviceCapability | None, role: Role | None = None
) -> list[str]:
    """Why a backend cannot run on this machine; an empty list means that it can.

    Args:
        backend: what is asked about.
        device_capability: of the device.
        role: in which role; None asks whether it can run in any, and gives the reasons of all if it cannot.

    Raises:
        BackendReferenceError: see :func:`load_role`.
    """
    try:
        roles = roles_of(backend) if role is None else (role,)
    except (ImportError, OSError) as error:  # the latter from a shared library that does not load
        return [_import_reason(error)]
    found = [_role_reasons(backend, device_capability, each) for each in roles]
    return [] if [] in found else list(dict.fromkeys(chain.from_iterable(found)))


def _role_reasons(backend: BackendReference, device_capability: DeviceCapability | None, role: Role) -> list[str]:
    try:
        loaded = resolve_backend(backend, device_capability, role)
    except (ImportError, OSError) as error:
        return [_import_reason(error)]
    if loaded is None:
        return [f"no {role} class"]
    try:
        return _requirements(loaded, device_capability)
    except Exception as error:
        return [f"asked whether it can run here, it raised {type(error).__name__}: {error}"]


def _requirements(loaded: Any, device_capability: DeviceCapability | None) -> list[str]:
    reasons = []
    if not loaded.supports_compute_capability(device_capability):
        needed = getattr(loaded, "needed_capability", "")
        got = "this device has none" if device_capability is None else f"this device has {device_capability}"
        reasons.append(
            f"needs compute capability {needed}: {got}" if needed else f"compute capability not supported: {got}"
        )
    if not getattr(loaded, "is_available", lambda: True)():
        missing: list[str] = getattr(loaded, "missing_dependencies", list)()
        reasons += missing or ["required dependencies not available"]
    broken: list[str] = [] if reasons else getattr(loaded, "broken_dependencies", list)()
    return reasons or broken


def _import_reason(error: Exception) -> str:
    if isinstance(error, ModuleNotFoundError) and (error.name or "").startswith("mla_conformance.backends."):
        return "this version has no adapter for it"
    return f"{type(error).__name__}: {error}"

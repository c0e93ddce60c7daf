"""From a backend's reference to its class, and why one cannot run on this machine."""

import hashlib
import importlib.util
import inspect
import sys
from collections.abc import Callable, Iterator
from functools import partial
from importlib import import_module
from itertools import chain
from pathlib import Path
from typing import Any

import torch

from mla_conformance.backends import declaration, foreign, kernel, registry
from mla_conformance.backends.references import HUB, BackendReference, BackendReferenceError, hub, plugins
from mla_conformance.backends.roles import INDEX_LAYOUTS, ROLES, IndexSpace, Role, role_of
from mla_conformance.reference import cache_layout, entry_formats
from mla_conformance.reference.dimensions import MLADimensions


def roles_of(backend: BackendReference) -> tuple[Role, ...]:
    """The roles that a backend has; one that is no member of an enumeration is imported: see :func:`load_role`."""
    if members := backend.members():
        return tuple(member.role for member in members)
    return tuple(_named_by_role(backend))


def load_role(backend: BackendReference, role: Role) -> Any:
    """The class of a backend in a role, with the interface; None without that role.

    ImportError of an adapter that cannot be imported, BackendReferenceError of what cannot be loaded or lacks a method.
    """
    if members := backend.members():
        return next((as_backend(each.get_class(backend.variant)) for each in members if each.role is role), None)
    loaded = _named_by_role(backend).get(role)
    for said in () if loaded is None else _faults(loaded):
        raise BackendReferenceError(f"'{backend.reference}': {said}")
    return loaded


def _named_by_role(backend: BackendReference) -> dict[Role, Any]:
    """A class itself, and those that it names for other roles by an attribute such as ``decode_backend``."""
    named = _load_named(backend)
    others = {role: getattr(named, f"{role}_backend", None) for role in ROLES.values()}
    return {role: it for role, it in (others | {role_of(named): named}).items() if it is not None}


def load_backend(backend: BackendReference) -> Any:
    """Import the class that a reference names, or that of a name's first role; see :func:`load_role` for errors."""
    members = backend.members()
    return load_role(backend, members[0].role if members else role_of(_load_named(backend)))


def _load_named(backend: BackendReference) -> Any:
    plugin = None if ":" in backend.reference else plugins()[backend.name]
    said = f"entry point {plugin.name} = {plugin.value}" if plugin else f"'{backend.reference}'"
    location, _, name = backend.reference.rpartition(":")

    def load() -> Any:
        if plugin:
            return as_backend(plugin.load())
        if backend.reference.startswith(HUB):
            return as_backend(hub().load(backend.reference, import_file))
        module = import_file(Path(location)) if location.endswith(".py") else import_module(location)
        if not hasattr(module, name):
            raise BackendReferenceError(f"'{backend.reference}': no class {name} in {location}")
        return as_backend(getattr(module, name))

    try:
        return foreign.call_foreign(load, passing=(BackendReferenceError,))
    except foreign.ForeignError as error:
        raise BackendReferenceError(f"{said} does not import: {error}") from error


def import_file(path: Path) -> Any:
    """The module of a file, imported once, whoever names it: a role's kernels are of the classes that the role has."""
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


def _faults(loaded: Any) -> Iterator[str]:
    if not isinstance(loaded, type):
        yield f"expected a class, got {type(loaded).__name__}"
    lacking = {name for name in role_of(loaded).required if not callable(getattr(loaded, name, None))}
    if missing := sorted(lacking.union(getattr(loaded, "__abstractmethods__", ()))):
        yield f"class {loaded.__name__} lacks {', '.join(missing)}"
    try:
        declaration.declaration_of(loaded)
    except TypeError as error:
        yield str(error)
    yield from (f"{loaded.__name__}.{error}" for error in declared_errors(loaded))


_ADAPTED: dict[type, Any] = {}
_ADAPTERS = {
    "layer": "generations.layer_adapter.AdaptedLayerBackend",
    "sparse layer": "vllm_sparse_layer.AdaptedSparseLayer",
    "earlier prefill": "generations.earlier.EarlierAdapter",
    "present prefill": "generations.present.PresentAdapter",
    "prefill": "generations.adapted.AdaptedPrefillBackend",
    "part of a sparse layer": "sglang_dsa.SGLangDSABackend",
}
"""What drives classes of other interfaces as ours: it is imported when such a class comes, or all of it before."""


def _adapter(interface: str) -> Any:
    return registry.resolve_obj_by_qualname(f"mla_conformance.backends.{_ADAPTERS[interface]}")


def load_adapters() -> None:
    """Have them in memory before code of others runs, which may write where they are imported from."""
    for interface in _ADAPTERS:
        _adapter(interface)


def as_backend(loaded: Any) -> Any:
    """``loaded`` itself if it is no class or fits our interface, else a class that drives it, always the same."""
    if not isinstance(loaded, type):
        return loaded
    if loaded not in _ADAPTED:
        interface = _other_interface(loaded)
        _ADAPTED[loaded] = _adapter(interface).adapt(loaded) if interface else loaded
    return _ADAPTED[loaded]


def _other_interface(cls: Any) -> str:
    """The one that a class is of, by what it has, since one that was written for a vLLM derives from none of ours."""
    named, chunk = getattr(cls, "get_impl_cls", None), getattr(cls, "run_prefill_context_chunk", None)
    # The computation that a layer's class names may be in two parts, which a module around it calls.
    if callable(named) and foreign.is_from_vllm(cls) and callable(getattr(named(), "forward_mqa", None)):
        return "sparse layer" if getattr(cls, "is_sparse", bool)() else "layer"
    if callable(getattr(cls, "get_prefill_impl_cls", None)):
        return "earlier prefill"
    if callable(chunk) and "chunk" in inspect.signature(chunk).parameters:
        return "present prefill"
    if callable(chunk) and foreign.is_from_vllm(cls):
        return "prefill"
    return "part of a sparse layer" if callable(getattr(cls, "set_dsa_prefill_impl", None)) else ""


def resolve_backend(backend: BackendReference, device_capability: kernel.DeviceCapability | None, role: Role) -> Any:
    """The class that a backend's calls of a role go to on such a device; see :func:`load_role` for what it raises."""
    loaded = load_role(backend, role)
    # A class without ``resolve``, such as vLLM's, serves them itself.
    return loaded.resolve(device_capability) if hasattr(loaded, "resolve") else loaded


def unavailable_reasons(
    backend: BackendReference, device_capability: kernel.DeviceCapability | None, role: Role | None = None
) -> list[str]:
    """Why a backend cannot run on this machine, in no role if none is named; empty if it can."""
    # A name is not its user's: what is wrong with an installed backend must not refuse a run of all the others.
    passing = (BackendReferenceError,) if ":" in backend.reference else ()
    try:
        roles = foreign.call_foreign(lambda: roles_of(backend), passing) if role is None else (role,)
    except foreign.ForeignError as error:
        return [_import_reason(error)]

    def of_role(each: Role) -> list[str]:
        try:
            loaded = foreign.call_foreign(partial(resolve_backend, backend, device_capability, each), passing)
        except foreign.ForeignError as error:
            return [_import_reason(error)]
        if loaded is None:
            return [f"no {each} class"]
        try:
            return foreign.call_foreign(partial(_requirements, loaded, device_capability))
        except foreign.ForeignError as error:
            said = error.__cause__ if isinstance(error.__cause__, foreign.AnswerError) else f"it raised {error}"
            return [f"asked whether it can run here, {said}"]

    found = [*map(of_role, roles)]
    return [] if [] in found else list(dict.fromkeys(chain.from_iterable(found)))


def _requirements(loaded: Any, device_capability: kernel.DeviceCapability | None) -> list[str]:
    reasons = []
    if not foreign.yes_or_no(loaded.supports_compute_capability(device_capability), "supports_compute_capability"):
        needed, got = getattr(loaded, "needed_capability", ""), device_capability or "none"
        said = f"needs compute capability {needed}" if needed else "compute capability not supported"
        reasons.append(f"{said}: this device has {got}")
    if not foreign.yes_or_no(getattr(loaded, "is_available", lambda: True)(), "is_available"):
        missing = foreign.reasons_of(getattr(loaded, "missing_dependencies", list)(), "missing_dependencies")
        reasons += missing or ["required dependencies not available"]
    return reasons or foreign.reasons_of(getattr(loaded, "broken_dependencies", list)(), "broken_dependencies")


def _import_reason(error: foreign.ForeignError) -> str:
    cause = error.__cause__
    if isinstance(cause, ModuleNotFoundError) and (cause.name or "").startswith("mla_conformance.backends."):
        return "this version has no adapter for it"
    return str(cause) if isinstance(cause, BackendReferenceError) else str(error)


_CALLS = {
    Role.INDEXER: ("logits", "topk"),
    Role.CACHE: tuple(entry.removeprefix("run_") for entry in Role.CACHE.entries),
}
_MAY_BE_EMPTY = ["mla_dimensions", "latent_dims", "heads", "head_dims", "topk", "extra_kv_cache_dtypes"]
"""What lists ``supported_...`` mean anything, or nothing further, where they are empty."""


def declared_errors(backend: type) -> Iterator[str]:
    """What is wrong with a kernel's lists, one sentence each; nothing of a class that is not built on our interface."""
    if not issubclass(backend, kernel.KernelBackend):
        return
    role = role_of(backend)
    caches = INDEX_LAYOUTS if role is Role.INDEXER else cache_layout.CACHE_LAYOUTS
    numbers = (_is_positive, "positive numbers")
    dtypes = (lambda each: isinstance(each, torch.dtype), "torch dtypes")
    # Of each list, what an element is, and how that is said.
    checks: dict[str, tuple[Callable[[Any], bool], str]] = {
        "dtypes": dtypes,
        "slot_dtypes": dtypes,
        "kv_cache_dtypes": _one_of(caches),
        "extra_kv_cache_dtypes": _one_of(caches),
        "tile_scales": _one_of(entry_formats.TILE_SCALES),
        "calls": _one_of(_CALLS.get(role, ("decode", "prefill"))),
        "index_spaces": _one_of(tuple(IndexSpace)),
        "heads": numbers,
        "head_dims": numbers,
        "topk": (lambda each: _is_positive(getattr(each, "base", each)), "positive numbers or MultipleOf"),
        "mla_dimensions": (lambda each: isinstance(each, MLADimensions), "MLADimensions"),
        "latent_dims": (_are_latent_dims, "pairs (L, R)"),
    }
    for of, (fits, expected) in checks.items():
        name = f"supported_{of}"
        if (declared := getattr(backend, name, None)) is None:
            continue
        if not isinstance(declared, list | tuple):
            yield f"{name}: expected a list of {expected}, got {declared!r}"
        elif not declared and of not in _MAY_BE_EMPTY:
            yield f"{name}: expected {expected}, got none, so that nothing is left to judge"
        elif strange := [each for each in declared if not fits(each)]:
            yield f"{name}: expected {expected}, got {strange[0]!r}"
    length = getattr(backend, "supported_query_len", None)
    if not (length is None or _is_positive(length)):
        yield f"supported_query_len: expected a positive number or None, got {length!r}"
    if length == 1 and getattr(backend, "supports_nonuniform_queries", False):
        yield "supports_nonuniform_queries: expected False where supported_query_len is 1, got True"


def _one_of(names: tuple[str, ...]) -> tuple[Callable[[Any], bool], str]:
    return lambda each: each in names, f"some of {', '.join(names)}"


def _are_latent_dims(each: Any) -> bool:
    return isinstance(each, tuple) and len(each) == 2 and _is_positive(each[0]) and isinstance(each[1], int)


def _is_positive(each: Any) -> bool:
    return isinstance(each, int) and each > 0

"""Which of the packages that a record pins are the kernel's own: a process loads many more than its adapter names."""

from collections.abc import Mapping
from functools import cache

from mla_conformance.backends.references import BackendReferenceError, parse_reference


def behind(reference: str, versions: Mapping[str, str]) -> dict[str, str]:
    """Of these versions those of the distributions that a registered backend names, in its order; else all of them."""
    found = {name: versions[name] for name in _named(reference) if name in versions}
    return found or dict(versions)


@cache
def _named(reference: str) -> tuple[str, ...]:
    """What the adapters of a registered backend declare; nothing of any other, whose code a record must not run."""
    from mla_conformance.backends.declaration import declaration_of  # torch, which a list of commands does without
    from mla_conformance.backends.loading import load_role, roles_of

    try:
        backend = parse_reference(reference)
        if not backend.members():
            return ()
        declared = [declaration_of(load_role(backend, role)).distributions for role in roles_of(backend)]
    except (BackendReferenceError, ImportError):
        return ()
    return tuple(dict.fromkeys(name for names in declared for name in names))

"""A role from a file outside of this project, taken up beside those of ``roles/`` in each process that judges."""

import hashlib
import sys
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

from mla_conformance.backends import loading, roles
from mla_conformance.backends.foreign import ForeignError, call_foreign
from mla_conformance.cases.arrays import found_array
from mla_conformance.cases.case import CLASSES, FIELDS, CaseError
from mla_conformance.files.whole import InputError, read_bytes
from mla_conformance.roles.definition import DEFINITIONS, RoleDefinition
from mla_conformance.vocabulary.arrays import KEPT, SPACES
from mla_conformance.vocabulary.capabilities import CAPABILITIES, CapabilityError, add_role

_DIGEST = "@sha256:"


def take_up(named: str, array: Sequence[str] = ()) -> None:
    """Take up the role of a file, once; whatever becomes of it, no half of a role stays.

    ``named`` is its path, or PATH@sha256:DIGEST where it must have these bytes; ``array`` are ids of the cases of its
    covering array, where it was found before. InputError says why there is no role in it, or none to be judged.
    """
    location, _, digest = named.partition(_DIGEST)
    path = Path(location).resolve()
    found = hashlib.sha256(read_bytes(path)).hexdigest()
    if digest not in ("", found):
        raise InputError(f"{path}: the role was changed since the run began; start the run anew")
    file = f"{path}{_DIGEST}{found}"
    if file == roles.outside():  # as in a process that was forked
        return
    tables: tuple[dict[Any, Any], ...] = (roles.ROLES, CLASSES, FIELDS, SPACES, CAPABILITIES, DEFINITIONS)
    before, threads = [dict(table) for table in tables], torch.get_num_threads()
    torch.set_num_threads(1)  # a process that is forked waits for ever for threads that computed before
    try:
        call_foreign(lambda: _add(path, file, array), passing=(InputError, roles.RoleError, CaseError, CapabilityError))
    except (ForeignError, InputError, roles.RoleError, CaseError, CapabilityError) as error:
        for table, old in zip(tables, before, strict=True):
            table.clear()
            table.update(old)
        said = str(error).removeprefix("TypeError: ")  # of what is said of the role, which messages name
        raise InputError(f"--role {location}: {said}") from error
    finally:
        torch.set_num_threads(threads)


def _add(path: Path, file: str, array: Sequence[str]) -> None:
    known, name = set(roles.ROLES), path.stem
    module = loading.import_file(path)
    importable = name.isidentifier() and name not in sys.modules
    if importable and getattr(find_spec(name), "origin", None) in (None, str(path)):
        sys.modules[name] = module  # where a kernel's file imports the classes of its role from
    defined = [each for each in vars(module).values() if isinstance(each, RoleDefinition)]
    added = [each for each in defined if each.role not in known]
    if len(added) != 1:
        count = len(added) or "none"
        raise InputError(f"expected one role, a RoleDefinition as docs/add-a-role.md has it, got {count}")
    (definition,) = added
    role, space = definition.role, definition.space
    if space is None or space.role is not role:
        raise InputError(f"role {role}: expected a space of its own, which says what varies in its cases")
    DEFINITIONS[role], role.file = definition, file
    entries = add_role(space, definition.lists, definition.capabilities)
    if array or space.capability not in KEPT:
        KEPT[space.capability] = [*array] or [case.id for case in found_array(space, ())[0]]
    found = {case.call: case for entry in entries for case in reversed(entry.cases)}
    for case in found.values():
        if case.role is not role:
            raise InputError(f"{case.id}: expected a case of role {role}, got one of role {case.role}")
        definition.require_whole(case)

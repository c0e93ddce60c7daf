"""What backends and cases name alike, without torch: roles, and what the numbers of a list of keys count."""

import re
from enum import StrEnum
from typing import Any, ClassVar

_EVERY = (
    *("get_name", "validate_configuration", "is_available", "supports_compute_capability", "supports_dtype"),
    "prepare_metadata",
)


class RoleError(ValueError):
    """What cannot be a role, or takes what is another one's."""


class Role(str):
    """A kind of classes that calls go to, by its name: one object for each, ours or from outside."""

    PREFILL: ClassVar["Role"]
    DECODE: ClassVar["Role"]
    LAYER: ClassVar["Role"]
    SPARSE: ClassVar["Role"]
    INDEXER: ClassVar["Role"]
    TOPK: ClassVar["Role"]
    PREPARE: ClassVar["Role"]
    COMPRESS: ClassVar["Role"]
    CACHE: ClassVar["Role"]
    SPARSE_LAYER: ClassVar["Role"]
    TREE: ClassVar["Role"]

    entries: tuple[str, ...]  # methods of which only its classes have any, which tells that they are of this role
    required: tuple[str, ...]  # those that each of them must have, whether or not it inherits from ours
    file: str  # what defines it, as PATH@sha256:DIGEST; empty of a role of this project

    def __new__(cls, name: str, *entries: str, further: tuple[str, ...] = _EVERY) -> "Role":
        if not re.fullmatch("[a-z][a-z0-9_]*", name):
            raise RoleError(f"role {name!r}: expected a name of small letters, digits and underscores")
        if name in ROLES:
            raise RoleError(f"role {name}: the name is taken by a role of {ROLES[name].file or 'this project'}")
        for other in ROLES.values():
            if taken := set(entries).intersection(other.entries):
                raise RoleError(f"role {name}: expected entries of its own, {min(taken)} is one of role {other}")
        role = ROLES[name] = super().__new__(cls, name)
        role.entries, role.required, role.file = entries, (*further, *entries), ""
        setattr(cls, name.upper(), role)
        return role

    def __reduce__(self) -> tuple[Any, ...]:
        """The same object in any process that knows the role."""
        return getattr, (Role, self.upper())


ROLES: dict[str, Role] = {}  # every role by its name, in the order in which a class is asked for its own
Role("prefill", "run_prefill_new_tokens", "run_prefill_context_chunk", further=(*_EVERY, "supports_quant_output"))
Role("decode", "run_decode")
Role("layer", further=("get_name", "validate_configuration", "get_impl_cls", "get_builder_cls"))
Role("sparse", "run_sparse_decode", "run_sparse_prefill")
Role("indexer", "run_index_logits", "run_index_topk")
Role("topk", "run_top_k_per_row")
Role("prepare", "run_prepare_index")
Role("compress", "run_compress")
Role(
    "cache",
    *("run_write_latent", "run_write_index", "run_gather_latent", "run_gather_index"),
    *("run_slot_mapping", "run_global_slots"),
    further=_EVERY[:-1],
)
Role("sparse_layer", "run_sparse_layer", further=(*_EVERY, "load_weights"))
Role("tree", "run_tree_decode")


def outside() -> str:
    """The file of the role from outside; empty without one."""
    return next((role.file for role in ROLES.values() if role.file), "")


def role_of(loaded: type) -> Role:
    """The role of a class, by what it can be called for; of one that has nothing that tells it, prefill."""
    if callable(getattr(loaded, "get_impl_cls", None)):
        return Role.LAYER
    others = (role for role in ROLES.values() if role is not Role.PREFILL)
    told = (role for role in others if any(callable(getattr(loaded, name, None)) for name in role.entries))
    return next(told, Role.PREFILL)


INDEX_LAYOUTS = ("auto", "fp8_index")  # keys and queries of an indexer: of the model's dtype, or both in e4m3


class IndexSpace(StrEnum):
    """What the numbers of a list of selected keys count, from 0."""

    SLOT = "slot"  # entries of what is handed over: block · page + offset of a cache, rows of gathered keys
    POSITION = "position"  # tokens of the row's request, on all ranks
    RANK_LOCAL = "rank_local"  # those tokens of the row's request that this rank holds

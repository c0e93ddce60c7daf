"""Roles of a backend: what of an MLA layer it computes. One name may stand for a class in each role."""

from enum import StrEnum
from typing import Any


class Role(StrEnum):
    """Kinds of classes that calls go to."""

    PREFILL = "prefill"
    """A ``MLAPrefillBackend``."""
    DECODE = "decode"
    """A ``MLADecodeBackend``."""
    LAYER = "layer"
    """An ``AttentionBackend``: a whole layer with its metadata and its cache."""
    SPARSE = "sparse"
    """A ``MLASparseBackend``: attention to selected keys."""
    INDEXER = "indexer"
    """A ``MLAIndexerBackend``: scores of cached tokens, and the best of them."""
    TOPK = "topk"
    """A ``MLATopKBackend``: the columns with the largest of given logits."""
    PREPARE = "prepare"
    """A ``MLAPrepareBackend``: index queries and keys in codes."""
    COMPRESS = "compress"
    """A ``MLACompressBackend``: keys of several tokens compressed to one, with states carried from call to call."""
    CACHE = "cache"
    """A ``MLACacheBackend``: entries written and gathered, slots computed."""
    SPARSE_LAYER = "sparse_layer"
    """A ``MLASparseLayerBackend``: a whole layer with its indexer, from hidden states to hidden states."""


_EVERY = (
    "get_name",
    "validate_configuration",
    "is_available",
    "supports_compute_capability",
    "supports_dtype",
    "prepare_metadata",
)
REQUIRED = {
    Role.PREFILL: (*_EVERY, "supports_quant_output", "run_prefill_new_tokens", "run_prefill_context_chunk"),
    Role.DECODE: (*_EVERY, "run_decode"),
    Role.LAYER: ("get_name", "validate_configuration", "get_impl_cls", "get_builder_cls"),
    Role.SPARSE: (*_EVERY, "run_sparse_decode", "run_sparse_prefill"),
    Role.INDEXER: (*_EVERY, "run_index_logits", "run_index_topk"),
    Role.TOPK: (*_EVERY, "run_top_k_per_row"),
    Role.PREPARE: (*_EVERY, "run_prepare_index"),
    Role.COMPRESS: (*_EVERY, "run_compress"),
    Role.SPARSE_LAYER: (*_EVERY, "load_weights", "run_sparse_layer"),
    Role.CACHE: (
        *(name for name in _EVERY if name != "prepare_metadata"),
        "run_write_latent",
        "run_write_index",
        "run_gather_latent",
        "run_gather_index",
        "run_slot_mapping",
        "run_global_slots",
    ),
}
"""Methods that a class of a role must have, whether or not it inherits from ours."""
_TOLD_BY_CALLS = tuple(role for role in Role if role not in (Role.PREFILL, Role.LAYER))


def role_of(loaded: type) -> Role:
    """The role of a class, by what it can be called for."""
    if callable(getattr(loaded, "get_impl_cls", None)):
        return Role.LAYER
    calls = {role: [name for name in REQUIRED[role] if name.startswith("run_")] for role in _TOLD_BY_CALLS}
    found = (role for role, names in calls.items() if any(callable(getattr(loaded, name, None)) for name in names))
    return next(found, Role.PREFILL)


def sibling(loaded: type, role: Role) -> Any:
    """The class that ``loaded`` names for another role, by an attribute such as ``decode_backend``."""
    return getattr(loaded, f"{role}_backend", None)

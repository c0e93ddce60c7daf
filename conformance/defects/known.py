"""What a known defect is, and the list of all of them."""

from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from typing import TypeVar

from mla_conformance.backends.kernel import KernelBackend
from mla_conformance.backends.layer.attention_layer import AttentionBackend
from mla_conformance.backends.roles import Role, role_of, sibling
from mla_conformance.vocabulary.capabilities import CAPABILITIES

_PREFILL = ("lse", "empty_rows", "indexing", "masking", "precision", "quant_output", "state", "support", "merging")
_FP8 = ("fp8_operands",)
_DECODE = ("decode_softmax", "decode_splits", "decode_masking", "decode_indexing", "decode_pages", "decode_cache")
_DECODE_BATCHES = ("decode_ranks", "decode_state", "decode_support", "decode_graph")
_LAYER = ("layer_cache", "layer_batch", "layer_weights", "layer_graph")
_LAYERS = ("layer_precision", "layer_blocks", "layer_state", "layer_ranks")
_SPARSE = ("sparse_lists", "sparse_rows", "sparse_spaces", "sparse_lse", "sparse_sinks")
_SPARSE_CACHES = ("sparse_caches", "sparse_entries", "sparse_state")
_INDEXER = ("indexer",)
_STATE = ("neighbours", "batch_order", "replays", "refusals")
_SHAPES = ("prefill_shapes", "decode_shapes", "layer_shapes")
FAMILIES = (
    *_PREFILL,
    *_FP8,
    *_DECODE,
    *_DECODE_BATCHES,
    *_LAYER,
    *_LAYERS,
    *_STATE,
    *_SHAPES,
    *_SPARSE,
    *_SPARSE_CACHES,
    *_INDEXER,
)
_KNOWN: dict[str, "KnownDefect"] = {}
Judged = KernelBackend | AttentionBackend
"""What an emulation is: a kernel, or a layer around kernels."""
Kernel = TypeVar("Kernel", bound=type[Judged])


class DefectError(ValueError):
    """A known defect that is declared wrongly."""


@dataclass(frozen=True)
class KnownDefect:
    """A bug, emulated.

    Attributes:
        id: its id, of a reported one that in the catalogue of reported bugs.
        kernel: the emulation, of a backend of any role.
        killed_by: capability that is expected to kill it.
        related: capabilities that may fail before that one, because the bug is theirs too.
        sources: public threads that report it; none if the like of it was only thought of.
    """

    id: str
    kernel: type[Judged]
    killed_by: str
    related: tuple[str, ...]
    sources: tuple[str, ...]

    @property
    def roles(self) -> tuple[Role, ...]:
        """The roles that it is judged in."""
        return judged_roles(self.kernel)

    @property
    def family(self) -> str:
        """The kind of fault: the module that the emulation stands in."""
        return self.kernel.__module__.rpartition(".")[2]

    @property
    def sentence(self) -> str:
        """What is wrong, in one sentence."""
        return (self.kernel.__doc__ or "").strip().partition("\n")[0].rstrip(".")

    @property
    def reference(self) -> str:
        """What ``certify --backend`` takes."""
        return f"{self.kernel.__module__}:{self.kernel.__name__}"


def judged_roles(kernel: type[Judged]) -> tuple[Role, ...]:
    """The roles whose cases are about an emulation: its own, and of a kernel a layer if it names the one beside it."""
    own = role_of(kernel)
    other = {Role.PREFILL: Role.DECODE, Role.DECODE: Role.PREFILL}.get(own)
    return (own,) if other is None or sibling(kernel, other) is None else (own, Role.LAYER)


def known_defect(
    id: str, *, killed_by: str, sources: tuple[str, ...] = (), related: tuple[str, ...] = ()
) -> Callable[[Kernel], Kernel]:
    """Class decorator that enters an emulated bug into the list.

    Raises:
        DefectError: an id that is taken, a capability that does not exist, or no sentence.
    """

    def enter(kernel: Kernel) -> Kernel:
        entry = KnownDefect(id, kernel, killed_by, related, sources)
        _check(entry)
        _KNOWN[id] = entry
        return kernel

    return enter


def _check(entry: KnownDefect) -> None:
    where = f"known defect '{entry.id}' ({entry.reference})"
    if entry.id in _KNOWN:
        raise DefectError(f"{where}: the id is taken by {_KNOWN[entry.id].reference}")
    for name in (entry.killed_by, *entry.related):
        if name not in CAPABILITIES:
            raise DefectError(f"{where}: no capability '{name}'; expected one of {', '.join(CAPABILITIES)}")
    if not entry.sentence:
        raise DefectError(f"{where}: expected a docstring that says what is wrong")


def known_defects() -> dict[str, KnownDefect]:
    """All known defects by id, in the order of their families."""
    for family in FAMILIES:
        import_module(f"mla_conformance.defects.{family}")
    return dict(_KNOWN)

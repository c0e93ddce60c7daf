"""What a known defect is, the list of all of them, and the reported bugs that are not among them."""

from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from typing import TypeVar

from mla_conformance.backends.kernel import KernelBackend
from mla_conformance.backends.layer.attention_layer import AttentionBackend
from mla_conformance.backends.roles import Role, role_of, sibling
from mla_conformance.cases.capabilities import CAPABILITIES

_PREFILL = ("lse", "indexing", "precision", "state", "features")
_DECODE = ("decode_softmax", "decode_cache", "decode_state", "decode_graph")
_LAYER = ("layer_cache", "layer_weights", "layer_calls")
_ROLES = ("batches", "replays", "shapes")
_SPARSE = ("sparse_lists", "sparse_rows", "sparse_lse", "sparse_entries", "indexer")
FAMILIES = (*_PREFILL, *_DECODE, *_LAYER, *_ROLES, *_SPARSE)
"""The modules that known defects stand in, in the order in which these are tried and told."""
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
        return sentence_of(self.kernel)

    @property
    def reference(self) -> str:
        """What ``certify --backend`` takes."""
        return f"{self.kernel.__module__}:{self.kernel.__name__}"


def sentence_of(wrong: type) -> str:
    """What is wrong with a class, as its docstring says in one sentence."""
    return (wrong.__doc__ or "").strip().partition("\n")[0].rstrip(".")


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


NOT_EMULATED: dict[str, str] = {
    "trtllm-ragged-tma-batch-stride-int32-wrap": "needs more than 2^31 elements of K; a smaller number is another bug",
    "merge-uint32-offset-overflow": "needs more than 2^32 output elements (8.6 GB); a smaller number is another bug",
    "fp8-dim-product-int32": "needs more than 2^31 elements in one operand; a smaller number is another bug",
    "causal-main-tiles-beyond-kv": "needs more queries than keys under a causal mask, which no prefill call has",
    "fp8-output-ulp-boundary-division-vs-reciprocal": "no defect: both codes lie within the interval of SPEC 3.5; "
    "an honest variant multiplies by the reciprocal",
    "nvfp4-swizzled-output-scale-not-splittable-mixed-batch": "needs decode rows in the batch and block-scaled output",
    "mla-page-index-int32-overflow": "needs a cache of more than 2^31 elements; `large_offsets` has one on a GPU",
    "trtllm-insufficient-semaphores-deadlock": "a hang, which ends a run of defects; the watchdog's tests have one",
    "aiter-fp8-none-scale-assert": "the interface hands over a scale with every call",
    "weight-block-scale-transposed-view": "block-quantised weights are dequantised outside of the interface",
    "mlapo-rope-weight-permute-wrong-axis": "RoPE and the projections of hidden states precede every backend",
    "fp16-mla-overflow": "no defect of a kernel: in fp16 an absorbed query overflows before it is handed over",
    "workspace-locked-lazy-alloc": "the lock is the engine's, and no call of the interface sets it",
    "attn-sink-not-sliced-by-tp-rank": "the engine slices the sinks; a backend is handed those of its heads",
    "keyless-row-sink-underflow-lse": "the LSE that a sink is part of; by this contract it leaves the sink out",
    "eagle-kv-indices-underallocated": "tree drafting has no place in the interface",
    "rotary-dim-not-plumbed-oob": "RoPE precedes every backend",
    "ragged-plan-strided-indptr": "metadata tensors are packed by contract, as every engine builds them",
    "aiter-partial-buffer-sized-wrong": "callers of that library size its private buffers; this interface has none",
    "dcp-topk-tie-nondeterministic-partition": "who selects breaks ties; a backend is handed the lists",
    "o-aliased-as-partial-logits-buffer": "a decode returns an output of its own, so there is none to write beyond",
    "nan-kv-in-shared-prefix-block-crosses-requests": "a request whose own keys are NaN has no golden result; that "
    "other slots' NaN stays out of a result is asked by poisoning them, as in mla-last-page-nan-leak",
    "max-context-chunk-not-aligned-to-cp-virtual-block": "chunks are cut by whole sequences, whatever a rank holds of "
    "them, so that none has to be aligned to a turn of the ranks",
    "dcp-local-chunk-len-ignores-chunking": "a rank's lengths are counted chunk by chunk, and those of a "
    "whole context are not at hand where it gathers",
    "even-split-workspace-assert-zero-chunk": "no defect by the contract: the plan is that even split, and a workspace "
    "below a page for each context must be refused",
    "decode-output-depends-on-host-max-seq-len": "no defect by the contract: another maximum may round otherwise, and "
    "each result is held to its budget",
    "sparse-topk-depends-on-the-batch": "who selects breaks ties (vllm#53257); a backend is handed the lists",
    "sparse-padded-graph-rows-hang": "a hang (flashinfer#5015), which ends a run of defects",
    "sparse-indexer-event-in-a-broken-capture": "the engine captures its indexer in pieces (vllm#56785)",
}
"""Reported bugs of the same layers that have no emulation here, each with the reason."""

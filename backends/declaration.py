"""What an adapter says of its library as data; a class that declares nothing is held to the strictest classes."""

from dataclasses import dataclass, field
from enum import Enum
from typing import Any

import torch

NO_LSE = "LSE not declared"  # why a kernel that returns none does not support a call that asks for one


class LseClass(Enum):
    """How exactly the row sum behind the LSE is known; each class allows what the one before it allows."""

    EXACT = "exact"  # float32 probabilities of a float32 exponential
    APPROXIMATE_EXP = "approximate-exp"  # an exponential of reduced precision, the same for the sum and for P
    ROUNDED_P = "rounded-p"  # probabilities after rounding to P's dtype


class Precision(Enum):
    """Dtype of an intermediate result, relative to the model's dtype."""

    FLOAT32 = "float32"
    MODEL = "model"
    FLOAT16 = "float16"  # finer than bfloat16, but what is below 2^-25 of a row's largest vanishes
    MODEL_OR_FLOAT16 = "model or float16"  # a layer's, some rows of which come of a kernel of either
    E4M3 = "e4m3"  # P as it is, at most 1: what is below 2^-10 of a row's largest vanishes
    SCALED_E4M3 = "scaled-e4m3"  # P times 2^8
    FP22 = "fp22"  # 13 bits behind the point: what Hopper's tensor cores keep of sums of 8-bit products


@dataclass(frozen=True, kw_only=True)
class Rounding:
    """Where a kernel rounds when its operands have 16 bits or fewer: the classes of the error budget (SPEC 4.2).

    With float32 operands every kernel is held to float32 throughout.
    """

    lse: LseClass = LseClass.EXACT  # the row sum
    p: Precision = Precision.MODEL  # P before the second product
    partial_outputs: Precision = Precision.FLOAT32  # outputs of split keys before they are combined
    dequantised_keys: Precision = Precision.FLOAT32  # keys of a cache of codes, and their values, after dequantisation
    accumulation: Precision = Precision.FLOAT32  # sums of products, of q with k and of P with v


class SelectionOrder(Enum):
    ANY = "any"
    DESCENDING = "descending"  # the largest logit first
    ASCENDING = "ascending"  # the first column first


class Ties(Enum):
    """Which of columns with equal logits are selected where not all of them have a place."""

    FREE = "free"
    FIRST = "first"
    LAST = "last"


@dataclass(frozen=True, kw_only=True)
class SelectionForm:
    """How a top-k names the columns that it selects (SPEC 8.7)."""

    relative: bool = True  # they count from the row's start, not from the first column of the logits
    order: SelectionOrder = SelectionOrder.ANY  # in which they are named
    ties: Ties = Ties.FREE  # which of equal ones are taken
    padding_behind: bool = True  # -1 stands behind all of them, not anywhere


@dataclass(frozen=True)
class Deviation:
    """A convention of the library that differs from the contract, and what the adapter does about it."""

    library: str
    adapter: str


@dataclass(frozen=True, kw_only=True)
class Declaration:
    rounding: Rounding = field(default_factory=Rounding)  # rounding classes, verified by the judge
    e4m3_rounding: Rounding | None = None  # those where q, k and v are e4m3; None if the kernel widens them
    selection: SelectionForm = SelectionForm()  # how a top-k names what it selects
    intermediates: Precision = Precision.FLOAT32  # what stands between the steps of preparing index queries and keys
    deviations: tuple[Deviation, ...] = ()  # printed in the report
    distributions: tuple[str, ...] = ()  # names of the installed distributions whose versions belong into the record
    emulated: bool = False  # an emulation of a kernel; it is judged but never counts as certified
    deterministic: bool = True  # equal calls return equal bits
    batch_invariant: bool = False  # a request's bits do not depend on the other requests of its batch

    def rounding_of(self, dtype: torch.dtype) -> Rounding:
        return self.e4m3_rounding or self.rounding if dtype == torch.float8_e4m3fn else self.rounding


_COARSER = (
    Precision.FLOAT32,
    Precision.FLOAT16,
    Precision.MODEL,
    Precision.MODEL_OR_FLOAT16,
    Precision.SCALED_E4M3,
    Precision.E4M3,
)


def declaration_of(backend: Any) -> Declaration:
    """The declaration of a backend class, the strictest one if it has none; TypeError if it is no ``Declaration``.

    A layer without one is composed of kernels, and has the coarser of what these declare. It gathers context into a
    workspace of the model's dtype, so what was stored as codes is rounded to it.
    """
    said = getattr(backend, "declaration", None)
    declared = said or Declaration()
    if not isinstance(declared, Declaration):
        raise TypeError(f"{backend.__name__}.declaration must be a Declaration, got {type(declared).__name__}")
    if said is not None or not hasattr(backend, "get_impl_cls"):
        return declared
    named = (getattr(backend, f"{role}_backend", None) for role in ("prefill", "decode"))
    kernels = [declaration_of(kernel) for kernel in named if kernel]
    roundings, coarsest = [each.rounding for each in kernels] or [Rounding()], dict[str, Precision]()
    for name in ("p", "partial_outputs"):
        found: set[Precision] = {getattr(each, name) for each in roundings}
        # What allows what either does: fp16 is finer than bfloat16, and ends earlier.
        either = {Precision.MODEL_OR_FLOAT16} if found >= {Precision.FLOAT16, Precision.MODEL} else set()
        coarsest[name] = max(found | either, key=_COARSER.index)
    lse = max((each.lse for each in roundings), key=list(LseClass).index)
    return Declaration(
        rounding=Rounding(lse=lse, dequantised_keys=Precision.MODEL, **coarsest),
        emulated=any(each.emulated for each in kernels),
        deterministic=all(each.deterministic for each in kernels),
    )

"""Calls of a backend's interface, most of them also seen as attention of queries to keys and values."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any, ClassVar, Self, TypeVar

import torch

from mla_conformance.backends.kernel import output_dtype
from mla_conformance.backends.operands import Form, forms_of
from mla_conformance.cases.case import Case
from mla_conformance.problems.memory import Guarded, Written
from mla_conformance.problems.operands import rows_of, segments, start_loc


@dataclass(frozen=True)
class AttentionOperands:
    """Operands of the reference's ``attention``, except for the scale."""

    q: torch.Tensor  # [T, N, D]
    k: torch.Tensor  # [S, N, D], or [S, 1, D] shared by all heads
    v: torch.Tensor  # [S, N, V] or [S, 1, V]
    query_start_loc: tuple[int, ...]  # first query of each request, and the end
    key_start_loc: tuple[int, ...]  # first key of each request, and the end
    causal: bool  # whether query i of a request sees all keys but its last (queries - 1 - i)
    dequantised: bool = False  # whether the keys were stored as codes, so that a kernel may round them once more
    projection: tuple[torch.Tensor, torch.Tensor] | None = None  # where projecting rounds, as `projected_terms` has it
    value_weights: torch.Tensor | None = None  # [N, V], where v is projected: the larger of 1 and Σ |W_UV|
    selected: torch.Tensor | None = None  # [T, K] int64, the keys that each query attends to, or -1; None for all
    sink: torch.Tensor | None = None  # [N], the logit of each head's sink; None without
    # how the contexts of a batch may be cut into chunks that are merged: where those of each request end
    plans: tuple[tuple[tuple[int, ...], ...], ...] = ()


AnyMetadata = TypeVar("AnyMetadata")


@dataclass(frozen=True, kw_only=True)
class KernelCall(ABC):
    """One call: what it is about, and how a backend is asked; arguments are attributes, too, where no field is."""

    q: torch.Tensor  # [T, N, D]
    k: torch.Tensor  # [S, N, D], or [S, 1, D] shared by all heads
    query_start_loc: tuple[int, ...]  # first query of each request, and the end
    key_start_loc: tuple[int, ...]  # first key of each request, and the end
    case: Any = None  # what it was made from; it tells the entry, unless its class does
    metadata: Any = None  # of the batch, handed over before every call; None where every argument is in the call
    given: Mapping[str, Any] = field(default_factory=dict)  # arguments that stand in the order of the entry, by name
    named: Mapping[str, Any] = field(default_factory=dict)  # those that are handed over by name, or None
    written: Mapping[str, Written] = field(default_factory=dict)  # the memory that the call writes, by argument

    meant: ClassVar[tuple[str, ...]] = ("q", "k")  # names of the tensors that say what is asked
    token_dims: ClassVar[tuple[int, ...]] = (0, 1)  # the dimension in which each part of a result counts tokens
    interface: ClassVar[Any] = None  # the class that has the entry
    # names of the tensors that say what the operands stand for, and are handed to no backend; of each T or S if it has
    # a row for each query token or key
    means: ClassVar[Mapping[str, str]] = {}
    called: ClassVar[Mapping[str, str]] = {}  # what messages call some arguments otherwise

    def __getattr__(self, name: str) -> Any:
        arguments = {} if name.startswith("__") else {**vars(self).get("given", {}), **vars(self).get("named", {})}
        if name in arguments:
            return arguments[name]
        raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")

    @property
    def name(self) -> str:  # how messages call it
        return str(self.case.call).replace("_", " ")

    @property
    def entry(self) -> str:
        return f"run_{self.case.call}"

    @property
    def result_shape(self) -> tuple[int, ...]:
        return tuple(self.q.shape)

    @property
    def key_lens(self) -> tuple[int, ...]:
        return tuple(stop - start for start, stop in pairwise(self.key_start_loc))

    def owned(self) -> dict[str, torch.Tensor]:
        """Tensors that a backend may read and must not write, those of the metadata among them, by name."""
        named = {**self.given, **self.named, **(vars(self.metadata) if self.metadata is not None else {})}
        tensors = {name: x for name, x in named.items() if isinstance(x, torch.Tensor)}
        return {f"{self.called.get(name, name)} of {self.name}": x for name, x in tensors.items()}

    @property
    def reached(self) -> Iterable[torch.Tensor]:  # memory that is handed over, and looked at afterwards
        return [*self.owned().values(), *(image.cache for image in self.written.values())]

    def handed(self) -> Self:
        """The call as a backend may know it: of what its operands mean, the form alone; not what it must write."""
        known = {name: getattr(self, name) for name in self.means}
        meta = {name: x.to("meta") for name, x in known.items() if x is not None}
        return replace(self, **meta, written={name: image.handed() for name, image in self.written.items()})

    @property
    def forms(self) -> Mapping[str, Form]:
        return forms_of(getattr(self.interface, self.entry)) if self.interface else {}

    def query_operands(self) -> tuple[torch.Tensor, ...]:
        """The queries as they are handed over, tokens first: of what has a row for each of them, all that is values."""
        arguments, integers = {**self.given, **self.named}, (torch.int32, torch.int64)
        rows = (arguments[name] for name, form in self.forms.items() if form.has("T") and form.dtype not in integers)
        return tuple(rows) or (self.q,)

    def regrouped(self, case: Any, requests: Sequence[int], queries: int | None) -> Self:
        """The given requests in this order, cut to ``queries`` new tokens if not None; a cache stays."""
        starts = self.query_start_loc, self.key_start_loc
        rows, keys = (rows_of(each, requests, queries) for each in starts)
        means = {"q": "T", **self.means}
        each = [(name, rows if of == "T" else keys, getattr(self, name)) for name, of in means.items() if of]
        per_row = {name for name, form in self.forms.items() if form.has("T")}
        new, seen = (start_loc([len(rows_of(each, [request], queries)) for request in requests]) for each in starts)
        return replace(
            self,
            **{name: x[at.to(x.device)] for name, at, x in each},
            **self._arguments(lambda name, x: x if x is None or name not in per_row else x[rows.to(x.device)]),
            query_start_loc=new,
            key_start_loc=self.key_start_loc if self.means.get("k") == "" else seen,  # where all keys stay
            metadata=self.metadata and regrouped_metadata(self.metadata, requests, rows),
        )

    def given_otherwise(self, **arguments: Any) -> Self:
        return replace(self, **self._arguments(arguments.get))

    def _arguments(self, change: Callable[[str, Any], Any]) -> dict[str, Any]:
        return {part: {name: change(name, x) for name, x in vars(self)[part].items()} for part in ("given", "named")}

    def overwritten(self, other: Self) -> Self:
        """This call with the contents of another one of the same shapes, at its own addresses, and what they mean."""
        theirs = other.owned()
        for name, tensor in self.owned().items():
            tensor.copy_(theirs[name])
        return replace(self, **{name: getattr(other, name) for name in self.means})

    def output_buffer(self) -> Guarded | None:
        return None

    def prepare(self, backend: Any) -> None:
        if self.metadata is not None:
            backend.prepare_metadata(self.metadata)

    def invoke(self, backend: Any, out: Guarded | None) -> Any:
        self.reset()
        written = {name: image.cache for name, image in self.written.items()}
        named = {name: x for name, x in self.named.items() if x is not None}
        return getattr(backend, self.entry)(*self.given.values(), **written, **named)

    def reset(self) -> None:
        for image in self.written.values():
            image.reset()

    def wrong_writes(self) -> str:
        return next(filter(None, (image.difference() for image in self.written.values())), "")


def regrouped_metadata(metadata: AnyMetadata, requests: Sequence[int], rows: torch.Tensor) -> AnyMetadata:
    """Metadata of some of a batch's requests, in the given order, whose rows these are; the maxima stay as they are."""
    parts = {name: part for name, part in vars(metadata).items() if hasattr(part, "__dataclass_fields__")}
    held = {name: x for name, x in vars(metadata).items() if isinstance(x, torch.Tensor)}
    kind: Any = type(metadata)
    forms = {name: form for name, form in forms_of(kind).items() if name in held}
    found = {name: held[name][list(requests)] for name, form in forms.items() if form.has("B")}
    found |= {name: held[name][rows.to(held[name].device)] for name, form in forms.items() if form.has("T")}
    found |= {name: regrouped_metadata(part, requests, rows) for name, part in parts.items()}
    if "query_start_loc" in held:
        starts = start_loc(found["query_lens_cpu"].tolist())
        found["query_start_loc"] = torch.tensor(starts).to(held["query_start_loc"])
    if "req_id_per_token" in held:
        own = torch.arange(len(requests)).repeat_interleave(found["query_lens_cpu"])
        found["req_id_per_token"] = own.to(held["req_id_per_token"])
    return replace(metadata, **found)  # type: ignore[type-var]


@dataclass(frozen=True, kw_only=True)
class AttentionCall(KernelCall):
    v: torch.Tensor  # [S, N, V] or [S, 1, V]
    output_scale: torch.Tensor | None = None  # float32 scalar; None where the output is not quantised
    merges: int = 0  # of stored results, which the call itself makes
    selected: torch.Tensor | None = None  # [T, K] int64 rows of k and v that queries attend to, or -1; None for all

    meant: ClassVar = ("q", "k", "v")

    @property
    def name(self) -> str:
        alone = getattr(self.metadata, "dcp_world_size", 1) == 1
        return super().name if alone else f"rank {self.metadata.dcp_rank}"

    @property
    def key_lens(self) -> tuple[int, ...]:
        return super().key_lens if self.selected is None else longest_lists(self.selected, self.query_start_loc)

    @property
    def result_shape(self) -> tuple[int, ...]:
        return (*self.q.shape[:2], self.v.shape[-1])

    @property
    def returns_lse(self) -> bool:
        return bool(self.case.lse)

    @abstractmethod
    def operands(self) -> AttentionOperands:
        """The attention that the call computes."""

    def attended(self, **meant: Any) -> AttentionOperands:
        meant = {"selected": self.selected, "dequantised": getattr(self.case, "holds_codes", False), **meant}
        return AttentionOperands(self.q, self.k, self.v, self.query_start_loc, self.key_start_loc, **meant)


def longest_lists(selected: torch.Tensor, query_start_loc: Sequence[int]) -> tuple[int, ...]:
    """Keys of the longest list [T, K] of each request; -1 names none."""
    counts = (selected >= 0).sum(dim=1).tolist()
    return tuple(max(counts[rows], default=0) for rows in segments(query_start_loc))


def attention_call(call: KernelCall) -> AttentionCall:
    assert isinstance(call, AttentionCall), f"{call.name} asks for something else"
    return call


@dataclass(frozen=True, kw_only=True)
class CallOfARank(AttentionCall):  # of a whole layer, whose ranks may share heads or tokens
    rank: int = 0  # whose it is

    returns_lse = False
    takes: ClassVar[tuple[str, ...]]  # what is handed over, which has its address in all calls

    def owned(self) -> dict[str, torch.Tensor]:
        return {name: x for each in self.takes for name, x in _tensors(each, getattr(self, each))}

    def overwritten(self, other: Self) -> Self:
        super().overwritten(other)
        written = {name: replace(image, cache=self.written[name].cache) for name, image in other.written.items()}
        own = {name: getattr(self, name) for name in self.takes if name not in self.given}
        return replace(other, **own, given=self.given, written=written)

    @abstractmethod
    def joined(self, results: Sequence[Any], parts: Sequence[Any]) -> Any:
        """The result [T, N, V] of all heads, from what each rank returned for its part."""


def _tensors(name: str, value: Any) -> Iterator[tuple[str, torch.Tensor]]:
    """A tensor, or those of a dataclass and of those in it, by the names that lead to them."""
    if isinstance(value, torch.Tensor):
        yield name, value
    for part in getattr(value, "__dataclass_fields__", ()):
        yield from _tensors(f"{name}.{part}", getattr(value, part))


@dataclass(frozen=True, kw_only=True)
class CallOnRanks(AttentionCall):  # what several ranks do together
    parts: tuple[CallOfARank, ...]  # the call of each rank, of its own heads, with its own caches

    returns_lse = False
    means: ClassVar = {"q": "T", "k": "S", "v": "S"}

    @staticmethod
    def of(parts: tuple[CallOfARank, ...], merges: int = 0) -> "CallOfARank | CallOnRanks":
        if len(parts) == 1:
            return parts[0]
        qkv: dict[str, Any] = {name: torch.cat([vars(part)[name] for part in parts], dim=1) for name in ("q", "k", "v")}
        qkv |= {name: getattr(parts[0], name) for name in ("query_start_loc", "key_start_loc")}
        return CallOnRanks(parts=parts, **qkv, merges=merges)

    @property
    def name(self) -> str:
        return f"{self.parts[0].name} on {len(self.parts)} ranks"

    @property
    def key_lens(self) -> tuple[int, ...]:
        return self.parts[0].key_lens

    def owned(self) -> dict[str, torch.Tensor]:
        return {f"{name} of rank {p.rank}": tensor for p in self.parts for name, tensor in p.owned().items()}

    @property
    def reached(self) -> Iterable[torch.Tensor]:
        return [tensor for part in self.parts for tensor in part.reached]

    def handed(self) -> Self:
        return replace(super().handed(), parts=tuple(part.handed() for part in self.parts))

    def regrouped(self, case: Any, requests: Sequence[int], queries: int | None) -> Any:
        return self.of(tuple(part.regrouped(case, requests, queries) for part in self.parts), self.merges)

    def overwritten(self, other: Self) -> Self:
        pairs = zip(self.parts, other.parts, strict=True)
        return replace(other, parts=tuple(mine.overwritten(theirs) for mine, theirs in pairs))

    def prepare(self, backend: Any) -> None:
        backend.prepare(self.parts)

    def invoke(self, backend: Any, out: Guarded | None) -> Any:
        return self.parts[0].joined(backend.forward(self.parts), self.parts)

    def wrong_writes(self) -> str:
        wrong = ((part.rank, part.wrong_writes()) for part in self.parts)
        return next((f"on rank {rank}, {what}" for rank, what in wrong if what), "")

    def operands(self) -> AttentionOperands:
        own = [part.operands() for part in self.parts]
        value_weights = torch.cat([each.value_weights for each in own if each.value_weights is not None])
        return replace(own[0], q=self.q, k=self.k, v=self.v, value_weights=value_weights)


@dataclass(frozen=True)
class Problem:
    case: Case  # what it was made from
    key: str  # the case's id, the salt, and how the problem was changed since; equal keys mean equal values
    device: torch.device  # where the tensors are
    calls: tuple[KernelCall, ...]  # the calls to make, in order; all of the same queries
    # attention to the keys of all calls at once, where it was known before they were divided
    whole: AttentionOperands | None = None

    dtype: torch.dtype = field(init=False)  # of the operands, or of the model behind a cache
    output_dtype: torch.dtype = field(init=False)  # of unquantised results, and of the model behind operands in e4m3
    query_start_loc: tuple[int, ...] = field(init=False)  # of each call
    output_scale: torch.Tensor | None = field(init=False)  # of each attention; None where outputs are not quantised

    def __post_init__(self) -> None:
        first = self.calls[0]
        vars(self).update(
            dtype=first.q.dtype,
            output_dtype=output_dtype(first.q.dtype),
            query_start_loc=first.query_start_loc,
            output_scale=first.output_scale if isinstance(first, AttentionCall) else None,
        )

    @property
    def attention(self) -> tuple[AttentionCall, ...]:
        return tuple(map(attention_call, self.calls))

    @property
    def caller_owned(self) -> dict[str, torch.Tensor]:
        return {name: tensor for call in self.calls for name, tensor in call.owned().items()}

    def regrouped(self, requests: Sequence[int], queries: int | None = None) -> "Problem":
        """These requests of a problem of one call, in this order, each cut to its first ``queries`` new tokens."""
        call = self.calls[0].regrouped(self.case, requests, queries)
        return replace(self, key=f"{self.key}|requests={list(requests)}|queries={queries}", calls=(call,))

    def handed(self) -> "Problem":
        return replace(self, calls=tuple(call.handed() for call in self.calls), whole=None)

    def tensors(self) -> Iterator[torch.Tensor]:
        yield from self.caller_owned.values()
        for call in self.calls:
            yield from (getattr(call, name) for name in call.meant)
        if self.whole is not None:
            yield from (self.whole.q, self.whole.k, self.whole.v)

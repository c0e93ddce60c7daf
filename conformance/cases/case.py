"""The case: a frozen value of small numbers and names whose id is also its query and its replay key. No torch.

Here stands what all roles have in common; the ``case.py`` of each holds its fields and rules.
"""

import hashlib
from abc import ABC
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import Field, dataclass, field, fields, replace
from enum import StrEnum
from functools import cache, cached_property, lru_cache
from operator import add
from typing import Any, ClassVar, NamedTuple, Self, get_origin

from mla_conformance.backends.roles import Role
from mla_conformance.cases import grammar
from mla_conformance.cases.grammar import CaseError, Data, dimensions_of
from mla_conformance.reference.dimensions import MLADimensions

CASE_FORMAT = 1  # version of the id's grammar and of the inputs that an id stands for; part of the digest
SESSIONS = "call_order"  # the capability whose cases are sessions of tens of calls
Call = StrEnum(  # which entry of the interface a case drives
    "Call",
    "NEW_TOKENS CONTEXT_CHUNK CHUNKED_CONTEXT DECODE LAYER SPARSE_DECODE SPARSE_PREFILL INDEX_LOGITS INDEX_TOPK SELECT "
    "PREPARE_INDEX WRITE_LATENT WRITE_INDEX GATHER_LATENT GATHER_INDEX SLOT_MAPPING GLOBAL_SLOTS SPARSE_LAYER COMPRESS "
    "TREE_DECODE",
)


class Layout(StrEnum):
    KV_B_PROJ = "kv_b_proj"  # v is the second half of a kv_b_proj output, as in a model
    PACKED = "packed"
    SLICED = "sliced"  # q and k are slices of wider buffers whose other columns hold NaN
    HEADS_FIRST = "heads_first"  # q is a transposed view of [N, T, D]
    ODD = "odd"  # all three are slices of buffers with an odd row stride, which no vector load is aligned to


DTYPES = ("bf16", "fp16", "fp32", "fp64", "e4m3")
POISON = ("nan", "inf", "large")
FAR = ("none", *(operand + bits for bits in ("31", "32") for operand in ("q", "k", "v", "rows", "cache")))


def one_of(allowed: Iterable[str], default: str, means: str = "", joined: bool = False) -> Any:
    """A field with one of the ``allowed`` values, or several ``joined`` by +; ``means`` is for docs/case-ids.md."""
    return field(default=default, metadata={"allowed": tuple(allowed), "means": means, "joined": joined})


def at_least(least: int, default: int, means: str = "") -> Any:
    return field(default=default, metadata={"least": least, "means": means})


def given(default: Any, means: str) -> Any:
    """A field that no law of its own binds: text, a flag, lengths."""
    return field(default=default, metadata={"means": means})


class Sizes(NamedTuple):
    """What tells the work of a case, in elements."""

    columns: int  # of a head, that q·k and p·v take together
    row: int  # of a row's query and output
    output: int  # of a row's output
    key: int  # of a key and its value


CLASSES: dict[str, type["Case"]] = {}  # the class of each call's cases
FIELDS: dict[str, Any] = {}  # the type of every field of every role


@dataclass(frozen=True, kw_only=True)
class Case(ABC):
    """One question to a backend."""

    role: ClassVar[Role]  # what of a backend the cases of a class are for
    calls: ClassVar[tuple[str, ...]] = ()  # the entries that they may drive
    # own fields of a class that do not stand behind the common ones in ids, each with the one before it
    follows: ClassVar[Mapping[str, str]] = {}
    longer: ClassVar[Mapping[str, int]] = {}  # how much longer requests are in :meth:`varied`
    # what profiles name, each with how another value than the field's default is named, or than one that is told
    asked: ClassVar[Mapping[str, str | tuple[Any, str]]] = {}
    causal: ClassVar[bool] = True  # whether new tokens attend to each other, as in all calls but a chunk of context
    absorbed: ClassVar[bool] = False  # whether queries attend to latents, each of which is both key and value

    capability: str = field(metadata={"means": "the capability that the case decides; the prefix of the id"})
    call: str = given(
        "", "entry that is driven; by default the one that the capability is named after, else new_tokens"
    )
    dtype: str = one_of(DTYPES, "bf16", "dtype of q, k and v")
    dims: str = given("r1", "a preset of the reference, or `P-R-V-L`")
    heads: int = at_least(1, 4, "query heads on this rank")
    q: tuple[int, ...] = given((), "new tokens of each request")
    kv: tuple[int, ...] = given(
        (), "context tokens of each request; empty for new_tokens. A decode finds q + kv tokens in the cache"
    )
    page: int = at_least(1, 16, "tokens of a page of the latent cache")
    workspace: int = at_least(1, 256, "tokens of the context workspace, which decides the chunks")
    scale: int = at_least(
        1,
        159,
        "softmax scale in percent of (P + R)^-1/2; YaRN's factor included, 159 is DeepSeek-V2-Lite's and 187 "
        "DeepSeek-R1's",
    )
    data: str = one_of(
        Data, Data.NORMAL, "name of the data regime; requests have several, joined by +, in turn", joined=True
    )
    layout: str = one_of(Layout, Layout.KV_B_PROJ, "memory layout of the operands")
    lse: bool = given(
        True,
        "whether new_tokens or a decode is asked for the LSE; of a context chunk or of several ranks it always is",
    )
    pad: int = at_least(
        0, 0, "poisoned rows after the last counted token; of a decode, requests that pad a graph's batch"
    )
    poison: str = one_of(POISON, "nan", "what excluded bytes hold")
    inflate: int = at_least(1, 1, "factor of the maxima in the metadata over the true ones")
    seed: int = given(0, "another draw of the same case")
    far: str = one_of(
        FAR,
        "none",
        "what reaches beyond 2^31 or 2^32 elements: rows of q, k or v, the rows before the judged ones, or the blocks "
        "of the cache",
    )

    def __init_subclass__(cls) -> None:
        for name, part in vars(cls).items():
            if isinstance(part, Field):
                _require_value(f"{cls.__name__}.{name}", part.default, part.metadata)
        own: dict[str, Any] = vars(cls).get("__annotations__", {})
        FIELDS.update({name: kind for name, kind in own.items() if ClassVar not in (kind, get_origin(kind))})
        for call in vars(cls).get("calls", ()):
            if call in CLASSES:
                raise CaseError(f"{cls.__name__}.calls: {call} is a call of role {CLASSES[call].role}")
            CLASSES[call] = cls

    def __post_init__(self) -> None:
        if not self.call:
            object.__setattr__(self, "call", _usual_call(self.capability))
        if self.call not in self.calls:
            raise CaseError(f"field call: expected one of {', '.join(self.calls)}, got {self.call!r}")
        for part in _fields(type(self)):
            _require_value(part.name, getattr(self, part.name), part.metadata)
        dimensions_of(self.dims)
        if not self.q or min(self.q + self.kv) < 0:
            raise CaseError(f"expected one non-negative length per request, got q={list(self.q)} kv={list(self.kv)}")
        if self.call != Call.NEW_TOKENS and len(self.kv) != len(self.q):
            lengths = f"q={list(self.q)} kv={list(self.kv)}"
            raise CaseError(f"{self.call} expects one context length per request, got {lengths}")
        if sum(self.q) + sum(self.kv) > grammar.LARGEST:
            found = f"{sum(self.q):,} new ones and {sum(self.kv):,}"
            raise CaseError(f"expected at most {grammar.LARGEST:,} tokens, got {found}")
        for reason in self.contradictions():
            raise CaseError(reason)

    def contradictions(self) -> Iterator[str]:
        """Why there is no such case, though each field by itself is as it may be; the first reason first."""
        return iter(())

    @staticmethod
    def of(*, capability: str, call: str = "", **values: Any) -> "Case":
        """The case with these fields, of the role that its call belongs to, else CaseError.

        A field that only other roles have may be given at its default, and is dropped.
        """
        told = bool(call) or capability in CLASSES
        named = "" if told else max((of for of in Call if capability.startswith(of)), key=len, default="")
        call = call or _usual_call(capability)
        if call not in CLASSES:
            raise CaseError(f"field call: expected one of {', '.join(dict.fromkeys((*Call, *CLASSES)))}, got {call!r}")
        _require_known(values)
        cls = CLASSES[call]
        own = cls.defaults()
        for name, value in values.items():
            if name in own:
                continue
            others = [other for other in dict.fromkeys(CLASSES.values()) if name in other.defaults()]
            if all(value != other.defaults()[name] for other in others):
                *first, last = sorted(other.role for other in others)
                roles = f"{', '.join(first)} and {last}" if first else last
                said = f"a {cls.role} case has none, only {roles} cases"
                if not told:
                    meant = named or next(of for of in Call if any(of in other.calls for other in others))
                    said = f"only {roles} cases have one, and an id without call= is a {cls.role} case; write such as "
                    said += f"call={meant}"
                raise CaseError(f"field {name}: {said}; got {value!r}")
        try:
            return cls(capability=capability, call=call, **{name: values[name] for name in values if name in own})
        except CaseError as error:
            if not named:
                raise
            raise CaseError(f"{error}; an id without call= is a {cls.role} case, write call={named}") from None

    @staticmethod
    @lru_cache(maxsize=2**14)  # the same ids are read again from lists, journals and reports
    def parse(text: str) -> "Case":
        """The case with this id; CaseError if it is malformed or a value does not fit."""
        capability, separator, rest = text.strip().partition(":")
        if not separator:
            raise CaseError(f"malformed case id {text!r}: expected 'capability:field=value;…'")
        return Case.of(capability=capability, **parse_fields(rest))

    @staticmethod
    def from_json(data: dict[str, Any]) -> "Case":
        """The case that :meth:`to_json` wrote, else CaseError."""
        import msgspec  # which may stand in the current folder, that is not forgotten yet when this module loads

        values = dict(data)
        if values.pop("format", None) != CASE_FORMAT:
            raise CaseError(f"expected case format {CASE_FORMAT}, got {data.get('format')!r}")
        _require_known(values)
        if "capability" not in values:
            raise CaseError("expected a field 'capability' in the case")
        for name, value in values.items():
            kind = FIELDS[name]
            try:
                values[name] = msgspec.convert(value, kind)  # a tuple is a list there
            except msgspec.ValidationError:
                expected = {int: "an integer", bool: "true or false", str: "a string"}.get(kind, "a list of integers")
                raise CaseError(f"field {name}: expected {expected}, got {value!r}") from None
        return Case.of(**values)

    def to_json(self) -> dict[str, Any]:
        values = {name: getattr(self, name) for name in self.defaults()}
        return {"format": CASE_FORMAT, **values, "q": list(self.q), "kv": list(self.kv)}

    @classmethod
    @cache
    def defaults(cls) -> Mapping[str, Any]:
        """The role's fields in the order in which they stand in ids, with their defaults."""
        found = {field.name: field.default for field in fields(cls)}
        names = [name for name in found if name not in cls.follows]
        for name, before in cls.follows.items():
            names.insert(names.index(before) + 1, name)
        return {name: found[name] for name in names}

    @cached_property
    def id(self) -> str:
        """Capability and every field that differs from its default; the same text for the same case."""
        usual = {**self.defaults(), "call": _usual_call(self.capability), "capability": self.capability}
        told = ((name, getattr(self, name)) for name in usual)
        reported = (f"{name}={grammar.format_value(value)}" for name, value in told if value != usual[name])
        return f"{self.capability}:{';'.join(reported)}"

    @property
    def digest(self) -> str:
        return digest_of_id(self.id)

    @property
    def dimensions(self) -> MLADimensions:
        return dimensions_of(self.dims)[0]

    @property
    def kv_lora_rank(self) -> int:
        return dimensions_of(self.dims)[1]

    @property
    def head_dim(self) -> int:
        return self.dimensions.qk_head_dim

    @property
    def rope_dim(self) -> int:
        return self.dimensions.qk_rope_head_dim

    @cached_property
    def softmax_scale(self) -> float:
        """The softmax scale as the backend receives it; a stored one where an author's own tensors have no percent."""
        return float(self.scale / 100 * self.dimensions.qk_head_dim**-0.5)

    @property
    def is_merged(self) -> bool:
        """Whether the calls attend to parts of the keys, so that their results are merged."""
        return False

    @property
    def own_merge(self) -> bool:
        """Whether the backend's own ``merge_attn_states`` merges partial states, not the reference."""
        return getattr(self, "merge", "golden") != "golden"

    @property
    def merges_in_place(self) -> bool:
        """Whether that merge is given the running state both as its prefix and as its output."""
        return getattr(self, "merge", "golden") == "in_place"

    @cached_property
    def totals(self) -> tuple[int, ...]:
        return tuple(map(add, self.q, self.kv)) if self.kv else self.q

    def data_of(self, request: int) -> str:
        regimes = self.data.split("+")
        return regimes[request % len(regimes)]

    @cached_property
    def regimes(self) -> tuple[str, ...]:
        """The data regimes of requests with new tokens, that of the longest first."""
        if "+" not in self.data:
            return (self.data,)
        asked = (request for request, new in enumerate(self.q) if new)
        return tuple(dict.fromkeys(map(self.data_of, (self.leading[0], *asked))))

    @cached_property
    def leading(self) -> tuple[int, ...]:
        """Of the requests with new tokens the longest one, that with most of them or with most context; the first."""
        asked = [request for request, new in enumerate(self.q) if new] or [0]
        before = self.kv or (0,) * len(self.q)
        by_length = (self.totals.__getitem__, self.q.__getitem__, before.__getitem__)
        return (*(max(asked, key=length) for length in by_length), 0)

    @property
    def visible_lens(self) -> tuple[int, ...]:
        """Keys that a new token of each request sees, beside what new tokens see of each other."""
        return self.kv or (0,) * len(self.q)

    @property
    def profile(self) -> str:
        """What must-pass profiles of its cases begin with, since a kernel may have one entry; empty for the core."""
        return self.call

    def operations(self, new: Sequence[int] | None = None, beside: Sequence[int] | None = None) -> float:
        """Of q·k and p·v over visible pairs, of all calls and a merge: so many new tokens, and keys beside these."""
        new, beside = self.q if new is None else new, self.visible_lens if beside is None else beside
        causal = self.causal and self.call != Call.CONTEXT_CHUNK
        pairs = sum(length * (length + 1) / 2 for length in new) if causal else 0.0
        pairs += sum(queries * keys for queries, keys in zip(new, beside, strict=True))
        return 2.0 * self.sizes.columns * self.heads * pairs * (2 if self.is_merged else 1)

    @property
    def sizes(self) -> Sizes:
        columns = self.dimensions.qk_head_dim + self.dimensions.v_head_dim
        seen = 2 * self.kv_lora_rank + self.dimensions.qk_rope_head_dim if self.absorbed else columns
        return Sizes(seen, self.heads * columns, self.heads * self.dimensions.v_head_dim, self.heads * columns)

    @property
    def asks(self) -> tuple[str, ...]:
        """What is asked for beyond the plainest case of the role, as profiles of the must-pass list name it."""
        return tuple(self.named(self.asked))

    def named(self, asked: Mapping[str, str | tuple[Any, str]]) -> Iterator[str]:
        for name, told in asked.items():
            usual, words = told if isinstance(told, tuple) else (self.defaults()[name], told)
            if getattr(self, name) != usual:
                yield words.format(getattr(self, name))

    def varied(self) -> Self:
        """The same configuration with longer requests in reverse order and other values, for tests of state."""
        longer = {name: tuple(n + more for n in getattr(self, name)[::-1]) for name, more in self.longer.items()}
        changes: dict[str, Any] = {**longer, "seed": self.seed + 1}
        return replace(self, **changes)

    @property
    def decoding(self) -> range:  # requests of a batch that decode, where others prefill
        return range(getattr(self, "decodes", 0))

    def without(self, requests: range) -> dict[str, Any]:
        kept = [index for index in range(len(self.q)) if index not in requests]
        lengths = {name: tuple(x[i] for i in kept) for name, x in (("q", self.q), ("kv", self.kv)) if x}
        decodes = sum(index not in requests for index in self.decoding)
        return {**lengths, **({"decodes": decodes} if hasattr(self, "decodes") else {})}


_fields = cache(fields)
FIELDS |= {part.name: part.type for part in _fields(Case)}


def _usual_call(capability: str) -> str:
    return capability if capability in CLASSES else Call.NEW_TOKENS


def digest_of_id(id: str) -> str:
    return hashlib.sha256(f"{CASE_FORMAT}|{id}".encode()).hexdigest()[:12]


def parse_fields(text: str) -> dict[str, Any]:
    """The fields written as in an id, ``field=value;…``, else CaseError."""
    pairs = [pair.partition("=") for pair in text.split(";")] if text else []
    if not all(name for name, _, _ in pairs):
        raise CaseError(f"malformed case fields {text!r}: expected 'field=value' between semicolons")
    values = {name.strip(): value.strip() for name, _, value in pairs}
    _require_known(values)
    if "capability" in values or len(values) < len(pairs):
        raise CaseError(f"malformed case fields {text!r}: expected each field once, the capability before the colon")
    return {name: grammar.parse_value(name, FIELDS[name], value) for name, value in values.items()}


def _require_known(names: Iterable[str]) -> None:
    if unknown := sorted(set(names) - FIELDS.keys()):
        raise CaseError(f"unknown case field {', '.join(unknown)}; known fields: {', '.join(FIELDS)}")


def _require_value(name: str, value: Any, law: Mapping[str, Any]) -> None:
    allowed: Sequence[str] = law.get("allowed", ())
    joined = law.get("joined", False)
    if allowed and not set(value.split("+") if joined else (value,)).issubset(allowed):
        several = " or several of them joined by +," if joined else ""
        raise CaseError(f"field {name}: expected one of {', '.join(allowed)},{several} got {value!r}")
    if isinstance(value, tuple):
        grammar.require_requests(name, len(value))
    if isinstance(value, int) and abs(value) > grammar.LARGEST:
        raise CaseError(f"field {name}: expected at most {grammar.LARGEST:,}, got {value}")
    if "least" in law and value < law["least"]:
        expected = {0: "a non-negative number", 1: "a positive number"}.get(law["least"], f"at least {law['least']}")
        raise CaseError(f"field {name}: expected {expected}, got {value}")

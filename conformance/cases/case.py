"""The case: a frozen value of small numbers and names whose id is also its query and its replay key.

No tensor and no torch here: a case is written into journals, file names and bug reports.
"""

import hashlib
import re
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, fields
from enum import StrEnum
from functools import cached_property
from itertools import groupby
from typing import Any

from mla_conformance.backends.roles import Role
from mla_conformance.reference.chunking import PLANNERS
from mla_conformance.reference.dimensions import PRESETS, MLADimensions

CASE_FORMAT = 1
"""Version of the id's grammar and of the inputs that an id stands for; part of the digest."""


class CaseError(ValueError):
    """A case that cannot be read or contradicts itself."""


class Call(StrEnum):
    """Which entry of the interface a case drives."""

    NEW_TOKENS = "new_tokens"
    CONTEXT_CHUNK = "context_chunk"
    CHUNKED_CONTEXT = "chunked_context"
    DECODE = "decode"
    LAYER = "layer"

    @property
    def role(self) -> Role:
        """Whose interface the entry belongs to."""
        return {Call.DECODE: Role.DECODE, Call.LAYER: Role.LAYER}.get(self, Role.PREFILL)


class Order(StrEnum):
    """Which requests of a layer's batch come first."""

    PREFILLS_FIRST = "prefills_first"
    """As the earlier builder lays out a batch of requests."""
    DECODES_FIRST = "decodes_first"
    """As the present builder wants a batch reordered."""


class Layout(StrEnum):
    """Memory layout of the operands."""

    KV_B_PROJ = "kv_b_proj"
    """v is the second half of a kv_b_proj output, as in a model."""
    PACKED = "packed"
    SLICED = "sliced"
    """q and k are slices of wider buffers whose other columns hold NaN."""
    HEADS_FIRST = "heads_first"
    """q is a transposed view of [N, T, D]."""
    ODD = "odd"
    """All three are slices of buffers with an odd row stride, which no vector load is aligned to."""


DTYPES = ("bf16", "fp16", "fp32", "fp64", "e4m3")
QUANT = ("none", "fp8")
MERGE = ("golden", "own")
POISON = ("nan", "inf", "large")
FAR = ("none", *(operand + bits for bits in ("31", "32") for operand in ("q", "k", "v", "rows", "cache")))
CACHES = ("auto", "fp8", "fp8_ds_mla")
TAILS = ("stale", "null", "minus", "huge")


@dataclass(frozen=True, kw_only=True)
class Case:
    """One question to a backend.

    Attributes:
        capability: the capability that the case decides; the prefix of the id.
        call: entry that is driven; by default the one that the capability is named after, else new_tokens.
        dtype: dtype of q, k and v.
        dims: a preset of the reference, or ``P-R-V-L``.
        heads: query heads on this rank.
        q: new tokens of each request.
        kv: context tokens of each request; empty for new_tokens. A decode finds q + kv tokens in the cache.
        page: tokens of a page of the latent cache.
        workspace: tokens of the context workspace, which decides the chunks.
        planner: who plans the chunks, a name in the reference's ``PLANNERS``.
        scale: softmax scale in percent of (P + R)^-1/2; 159 is DeepSeek-R1's, YaRN factor included.
        data: name of the data regime.
        layout: memory layout of the operands.
        lse: whether new_tokens is asked for the LSE.
        out: whether an output tensor is handed in.
        quant: quantisation of the output.
        oscale: output scale in millionths.
        pad: poisoned rows after the last counted token; of a decode, requests that pad a graph's batch.
        poison: what excluded bytes hold.
        inflate: factor of the maxima in the metadata over the true ones.
        merge: who merges partial states, the reference or the backend's own ``merge_attn_states``.
        seed: another draw of the same case.
        far: what reaches beyond 2^31 or 2^32 elements: rows of q, k or v, the rows before the
            judged ones, or the blocks of the cache.
        cache: layout of the latent cache.
        kscale: scale of an fp8 cache in millionths; handed over with every layout.
        tails: what the block table holds past a request's last page: blocks of others, 0, -1, or what no cache has.
        layers: layers that share one buffer, so that the stride between blocks is so many packed blocks.
        spare: blocks of the cache that no request holds; ids are drawn from all.
        ranks: ranks of decode context parallelism; each is a call.
        interleave: token t belongs to rank (t // interleave) % ranks.
        decodes: requests of a layer's batch that decode.
        order: which requests of a layer's batch come first.
    """

    capability: str
    call: str = ""
    dtype: str = "bf16"
    dims: str = "r1"
    heads: int = 4
    q: tuple[int, ...] = ()
    kv: tuple[int, ...] = ()
    page: int = 16
    workspace: int = 256
    planner: str = "equal"
    scale: int = 159
    data: str = "normal"
    layout: str = Layout.KV_B_PROJ
    lse: bool = True
    out: bool = False
    quant: str = "none"
    oscale: int = 13000
    pad: int = 0
    poison: str = "nan"
    inflate: int = 1
    merge: str = "golden"
    seed: int = 0
    far: str = "none"
    cache: str = "auto"
    kscale: int = 13000
    tails: str = "stale"
    layers: int = 1
    spare: int = 3
    ranks: int = 1
    interleave: int = 1
    decodes: int = 0
    order: str = Order.PREFILLS_FIRST

    def __post_init__(self) -> None:
        if not self.call:
            object.__setattr__(self, "call", _default_call(self.capability))
        _validate(self)

    @cached_property
    def id(self) -> str:
        """Capability and every field that differs from its default; the same text for the same case."""
        default = Case(capability=self.capability, q=(1,), kv=(0,))
        changed = [
            f"{field.name}={_format(getattr(self, field.name))}"
            for field in fields(self)
            if field.name != "capability"
            and (field.name in ("q", "kv") or getattr(self, field.name) != getattr(default, field.name))
            and getattr(self, field.name) != ()
        ]
        return f"{self.capability}:{';'.join(changed)}"

    @property
    def digest(self) -> str:
        """Twelve hexadecimal digits that stand for this case in histories."""
        return hashlib.sha256(f"{CASE_FORMAT}|{self.id}".encode()).hexdigest()[:12]

    @property
    def dimensions(self) -> MLADimensions:
        """Head dims P, R, V."""
        return _dimensions(self.dims)[0]

    @property
    def kv_lora_rank(self) -> int:
        """Latent dim L."""
        return _dimensions(self.dims)[1]

    @property
    def role(self) -> Role:
        """What of a backend the case is for."""
        return Call(self.call).role

    @property
    def decode_queries(self) -> tuple[int, ...]:
        """New tokens of each request of a layer's batch that decodes."""
        first = self.order == Order.DECODES_FIRST
        return self.q[: self.decodes] if first else self.q[len(self.q) - self.decodes :]

    @property
    def softmax_scale(self) -> float:
        """The softmax scale as the backend receives it."""
        return float(self.scale / 100 * self.dimensions.qk_head_dim**-0.5)

    def to_json(self) -> dict[str, Any]:
        """All fields, tuples as lists, with the format's version."""
        return {"format": CASE_FORMAT, **asdict(self), "q": list(self.q), "kv": list(self.kv)}

    @staticmethod
    def from_json(data: dict[str, Any]) -> "Case":
        """The case that :meth:`to_json` wrote.

        Raises:
            CaseError: another format, an unknown field, or a value that does not fit.
        """
        values = dict(data)
        if values.pop("format", None) != CASE_FORMAT:
            raise CaseError(f"expected case format {CASE_FORMAT}, got {data.get('format')!r}")
        _reject_unknown(values)
        if "capability" not in values:
            raise CaseError("expected a field 'capability' in the case")
        for name, value in values.items():
            values[name] = _from_plain(name, value)
        return Case(**values)

    @staticmethod
    def parse(text: str) -> "Case":
        """The case with this id.

        Raises:
            CaseError: malformed text, an unknown field, or a value that does not fit.
        """
        capability, separator, rest = text.strip().partition(":")
        if not separator:
            raise CaseError(f"malformed case id {text!r}: expected 'capability:field=value;…'")
        return Case(capability=capability, **parse_fields(rest))


def parse_fields(text: str) -> dict[str, Any]:
    """The fields written as in an id, ``field=value;…``.

    Raises:
        CaseError: an unknown field, one that stands twice, or a value of another type.
    """
    pairs = [pair.partition("=") for pair in text.split(";") if pair]
    values = {name.strip(): value.strip() for name, _, value in pairs}
    _reject_unknown(values)
    if "capability" in values or len(values) < len(pairs):
        raise CaseError(f"malformed case fields {text!r}: expected each field once, the capability before the colon")
    return {name: _parse(name, value) for name, value in values.items()}


def _default_call(capability: str) -> str:
    return capability if capability in list(Call) else Call.NEW_TOKENS


def _format(value: object) -> str:
    if isinstance(value, tuple):
        return "[" + ",".join(_runs(value)) + "]"
    return str(int(value)) if isinstance(value, bool) else str(value)


_SHORTEST_RUN = 4


def _runs(lengths: tuple[int, ...]) -> Iterator[str]:
    """The lengths one by one; four or more equal ones in a row as LENGTHxTIMES."""
    for length, group in groupby(lengths):
        times = len(list(group))
        yield from [f"{length}x{times}"] if times >= _SHORTEST_RUN else [str(length)] * times


def _lengths(text: str) -> tuple[int, ...]:
    """What :func:`_runs` wrote; runs of any length are understood.

    Raises:
        ValueError: something else.
    """
    if not re.fullmatch(r"\[(\d+(x\d+)?(,\d+(x\d+)?)*)?\]", text):
        raise ValueError
    runs = [item.partition("x") for item in text[1:-1].split(",") if item]
    return tuple(int(length) for length, _, times in runs for _ in range(int(times or 1)))


_TYPES: dict[str, Any] = {field.name: field.type for field in fields(Case)}


def _parse(name: str, value: str) -> Any:
    kind = _TYPES[name]
    try:
        if kind is int:
            return int(value)
        if kind is bool:
            return {"0": False, "1": True}[value]
        if kind is str:
            return value
        return _lengths(value)
    except (ValueError, KeyError):
        expected = {int: "an integer", bool: "0 or 1"}.get(kind, "a list such as [64,0,17] or [1x48]")
        raise CaseError(f"field {name}: expected {expected}, got {value!r}") from None


def _from_plain(name: str, value: Any) -> Any:
    """A field's value from JSON, where a tuple is a list."""
    kind = _TYPES[name]
    if kind in (int, bool, str):
        fits = isinstance(value, kind) and isinstance(value, bool) == (kind is bool)
    else:
        fits = isinstance(value, list | tuple) and all(type(item) is int for item in value)
    if not fits:
        expected = {int: "an integer", bool: "true or false", str: "a string"}.get(kind, "a list of integers")
        raise CaseError(f"field {name}: expected {expected}, got {value!r}")
    return tuple(value) if isinstance(value, list) else value


def _reject_unknown(values: dict[str, Any]) -> None:
    unknown = sorted(set(values) - set(_TYPES))
    if unknown:
        raise CaseError(f"unknown case field {', '.join(unknown)}; known fields: {', '.join(_TYPES)}")


def _dimensions(name: str) -> tuple[MLADimensions, int]:
    if name in PRESETS:
        return PRESETS[name].head, PRESETS[name].kv_lora_rank
    numbers = re.fullmatch(r"(\d+)-(\d+)-(\d+)-(\d+)", name)
    if not numbers:
        raise CaseError(
            f"unknown dims {name!r}; expected one of {', '.join(PRESETS)}, or P-R-V-L such as 128-64-128-512"
        )
    nope, rope, value, latent = map(int, numbers.groups())
    if latent < 1:
        raise CaseError(f"dims {name!r}: expected a positive latent dim L, got {latent}")
    try:
        return MLADimensions(qk_nope_head_dim=nope, qk_rope_head_dim=rope, v_head_dim=value), latent
    except ValueError as error:
        raise CaseError(f"dims {name!r}: {error}") from error


_CHOICES: dict[str, Sequence[str]] = {
    "call": list(Call),
    "dtype": DTYPES,
    "layout": list(Layout),
    "quant": QUANT,
    "poison": POISON,
    "merge": MERGE,
    "planner": list(PLANNERS),
    "far": FAR,
    "cache": CACHES,
    "tails": TAILS,
    "order": list(Order),
}


_POSITIVE = ("heads", "page", "workspace", "scale", "oscale", "inflate", "kscale", "layers", "ranks", "interleave")


def _validate(case: Case) -> None:
    for name, allowed in _CHOICES.items():
        if getattr(case, name) not in allowed:
            raise CaseError(f"field {name}: expected one of {', '.join(allowed)}, got {getattr(case, name)!r}")
    _dimensions(case.dims)
    _require_lengths(case)
    for name in _POSITIVE:
        if getattr(case, name) < 1:
            raise CaseError(f"field {name}: expected a positive number, got {getattr(case, name)}")
    for name in ("pad", "spare", "decodes"):
        if getattr(case, name) < 0:
            raise CaseError(f"field {name}: expected a non-negative number, got {getattr(case, name)}")
    _require_plan(case)
    _require_cached(case)


def _require_lengths(case: Case) -> None:
    if not case.q or min(case.q) < 0 or (case.kv and min(case.kv) < 0):
        raise CaseError(f"expected one non-negative length per request, got q={list(case.q)} kv={list(case.kv)}")
    if case.call != Call.NEW_TOKENS and len(case.kv) != len(case.q):
        raise CaseError(f"{case.call} expects one context length per request, got q={list(case.q)} kv={list(case.kv)}")


def _require_plan(case: Case) -> None:
    if case.call != Call.CHUNKED_CONTEXT:
        return
    try:
        PLANNERS[case.planner](case.kv, workspace_tokens=case.workspace, page_size=case.page)
    except ValueError as error:
        raise CaseError(f"field workspace: {error}") from error


def _require_cached(case: Case) -> None:
    if case.call not in (Call.DECODE, Call.LAYER):
        return
    if min(case.q) < 1:
        raise CaseError(f"{case.call} expects at least one query token a request, got q={list(case.q)}")
    if case.out or case.quant != "none" or case.merge != "golden":
        raise CaseError(f"{case.call} has no output tensor, no quantised output and no merge of its own")
    _require_layer(case)
    dims = (case.kv_lora_rank, case.dimensions.qk_rope_head_dim)
    if case.cache == "fp8_ds_mla" and (dims != (512, 64) or case.dtype not in ("bf16", "fp16")):
        raise CaseError(f"fp8_ds_mla holds 512 + 64 values of a 16-bit model, got {dims} of {case.dtype}")


def _require_layer(case: Case) -> None:
    if case.decodes > len(case.q) or (case.decodes and case.call != Call.LAYER):
        raise CaseError(f"field decodes: expected at most the {len(case.q)} requests of a layer, got {case.decodes}")
    if case.call == Call.LAYER and case.order == Order.DECODES_FIRST:
        longest, prefills = max(case.decode_queries, default=1), case.q[case.decodes :]
        if min(prefills, default=longest + 1) <= longest:
            raise CaseError(
                f"order decodes_first: a builder knows a prefill by more query tokens than a decode has, expected more "
                f"than {longest}, got q={list(case.q)} with {case.decodes} decodes"
            )
    dims = case.dimensions
    if case.call == Call.LAYER and max(dims.qk_nope_head_dim, dims.v_head_dim) > case.kv_lora_rank:
        raise CaseError(f"field dims: a layer's weights pick latents, P and V may not exceed L, got {case.dims}")

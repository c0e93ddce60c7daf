"""Shapes that kernels are timed at, and the cases that have them; times as data, and the table of several. No torch.

The kernel's code shares the process that times come from: they are its word, and bounded as all that it says.
"""

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import product
from typing import Annotated, Any

from msgspec import Meta, Struct
from msgspec.structs import replace as told

from mla_conformance.cases.cached import CachedCase
from mla_conformance.cases.case import Call, Case, CaseError

_Text = Annotated[str, Meta(max_length=10_000)]
_Figure = Annotated[float, Meta(ge=0, le=1e15)]
_Count = Annotated[int, Meta(ge=0, le=2**62)]
_UNITS = ("µs", "ms", "s")
_WITH_LAUNCHES = "an earlier version timed plain calls with the waits for their launches: time them anew"


class Interval(Struct, frozen=True, forbid_unknown_fields=True):
    """Microseconds of a call: the median of the medians of several rounds, the least and the greatest of these."""

    median: _Figure
    low: _Figure
    high: _Figure

    def __str__(self) -> str:
        value, spread, unit = float(f"{self.median:.3g}"), (self.high - self.low) / 2, 0
        while value >= 1000 and unit + 1 < len(_UNITS):
            value, spread, unit = value / 1000, spread / 1000, unit + 1
        return f"{value:.3g} {_UNITS[unit]} ± {float(f'{spread:.2g}'):g}"


class Timed(Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    kind: _Text  # decode, prefill, sparse decode or sparse prefill
    shape: _Text  # in words
    case: Annotated[str, Meta(max_length=20_000)] = ""  # its id; empty where the kernel supports none of this shape
    called: Interval | None = None  # the call alone, without a graph; on a GPU what its kernels take
    graph: Interval | None = None  # the same as a CUDA graph; None where it is not declared that one can be captured
    planning: Interval | None = None  # what is handed over and planned before the call, by the clock
    # bytes that torch allocated for instance, plan and call beside the result; None where nobody counts
    workspace: _Count | None = None
    moved: _Count = 0  # bytes of operands and results that are read or written once
    operations: _Figure = 0.0  # useful ones
    share: _Figure = 0.0  # what the card would take at least, by bytes or by operations, of the shorter time
    why: _Text = ""  # why there is no time, or no graph

    @property
    def best(self) -> Interval | None:
        """The one with the faster slowest round: a graph leaves to the device what adapters may decide on the host."""
        return min(filter(None, (self.graph, self.called)), key=lambda each: each.high, default=None)

    @property
    def rate(self) -> str:
        if not self.best or not self.best.median:
            return ""
        bandwidth, operations = self.moved / self.best.median / 1e3, self.operations / self.best.median / 1e6
        return f"{_figure(bandwidth)} GB/s, {_figure(operations)} TFLOP/s"


def _figure(value: float) -> str:
    return f"{float(f'{value:.3g}'):,g}"


class Speed(Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    times: Annotated[tuple[Timed, ...], Meta(max_length=100)] = ()  # in the order of the shapes
    timer: _Text = ""  # what took them, in words
    copy: _Figure = 0.0  # GB/s, read and written, of a copy on the same device in the same process
    product: _Figure = 0.0  # TFLOP/s of a product of bf16 matrices there, on a CPU of float32 ones
    clocks: _Text = ""  # what was seen of clocks and throttling, in words
    why: _Text = ""  # why nothing was timed; empty where something was

    @property
    def comparable(self) -> tuple[Timed, ...]:
        """Without the plain calls of an earlier timer, whose events hold the waits for their launches as well."""
        if "do_bench" not in self.timer or "CUPTI" in self.timer:
            return self.times
        return tuple(told(each, called=None, why=each.why or _WITH_LAUNCHES) for each in self.times)

    def of(self, shape: str) -> Timed | None:
        return next((each for each in self.comparable if each.shape == shape and each.best), None)

    @property
    def has_times(self) -> bool:
        return any(each.best for each in self.comparable)

    @property
    def reason(self) -> str:
        return self.why or next((each.why for each in self.comparable if each.why), "none of its shapes is supported")


Kernels = Sequence[tuple[str, Speed]]


def columns_of(kernels: Kernels) -> list[str]:
    """Of each kind the shape that most kernels have; the first two kinds, and more until every kernel has one."""
    timed = [(each.kind, each.shape) for _, speed in kernels for each in speed.comparable if each.best]
    common: dict[str, str] = {}
    for (kind, shape), _ in Counter(timed).most_common():
        common.setdefault(kind, shape)
    having = {kind: [speed for _, speed in kernels if speed.of(shape)] for kind, shape in common.items()}
    columns, left = list[str](), [speed for _, speed in kernels if speed.has_times]
    for kind in sorted(common, key=lambda kind: (-len(having[kind]), list(KINDS.values()).index(kind))):
        if len(columns) < 2 or left:
            columns.append(common[kind])
            left = [speed for speed in left if not speed.of(common[kind])]
    return columns


def table_of(kernels: Kernels) -> list[tuple[str, ...]]:
    """Rows of kernels that have times, fastest first, with the head before them; empty without one."""
    columns = columns_of(kernels)

    def place(kernel: tuple[str, Speed]) -> list[tuple[bool, float]]:
        found = [kernel[1].of(shape) for shape in columns]
        return [(each is None, each.best.median if each and each.best else 0.0) for each in found]

    rows = [("right, fastest first", *columns, "of the card")] if columns else []
    for name, speed in sorted((each for each in kernels if any(map(each[1].of, columns))), key=place):
        found = [speed.of(shape) for shape in columns]
        share = next(each.share for each in found if each)
        rows.append((name, *(str(each.best) if each else "–" for each in found), f"{100 * share:.0f} %"))
    return rows


def remarks_of(kernels: Kernels) -> list[str]:
    timed = [speed for _, speed in kernels if speed.has_times]
    remarks = list(dict.fromkeys(speed.timer for speed in timed))
    if timed:
        copy, most = max(speed.copy for speed in timed), max(speed.product for speed in timed)
        reached = f"{_figure(copy)} GB/s by a device copy, {_figure(most)} TFLOP/s by a matrix product"
        remarks.append(f"the card reaches {reached}, in the same processes; times are what these report")
        remarks += dict.fromkeys(speed.clocks for speed in timed)
    return remarks + [f"no time for {name}: {speed.reason}" for name, speed in kernels if speed not in timed]


_TIMED = (Call.DECODE, Call.NEW_TOKENS, Call.CONTEXT_CHUNK, Call.SPARSE_DECODE, Call.SPARSE_PREFILL)
KINDS = dict(zip(_TIMED, ("decode", "prefill", "prefill", "sparse decode", "sparse prefill"), strict=True))


@dataclass(frozen=True)
class Shape:
    call: Call
    requests: int
    new: int  # tokens of each request
    context: int  # tokens of each before those

    def __str__(self) -> str:
        new, context, total = (
            f"{tokens // 1024}k" if tokens >= 1024 and tokens % 1024 == 0 else str(tokens)
            for tokens in (self.new, self.context, self.context + self.new)
        )
        if self.call in (Call.NEW_TOKENS, Call.CONTEXT_CHUNK, Call.SPARSE_PREFILL):
            return f"{KINDS[self.call]} {new}" + (f" after {context}" if self.context else "")
        several = f", {new} tokens" if self.new > 1 else ""
        return f"{KINDS[self.call]} {self.requests} × {total}{several}"


_K = 1024
_DECODES = (Call.DECODE, Call.SPARSE_DECODE)
SHAPES: dict[str, tuple[Shape, ...]] = {
    "cuda": (
        *(Shape(call, 64, 1, 8 * _K - 1) for call in _DECODES),
        *(Shape(Call.NEW_TOKENS, 1, new, 0) for new in (4 * _K, 512, 16 * _K)),
        Shape(Call.CONTEXT_CHUNK, 1, 4 * _K, 32 * _K),
        Shape(Call.SPARSE_PREFILL, 1, 4 * _K, 32 * _K),
        *(Shape(call, requests, 1, 8 * _K - 1) for call in _DECODES for requests in (1, 8, 256)),
        *(Shape(call, n, 1, total - 1) for call, total, n in product(_DECODES, (_K, 64 * _K), (1, 8, 64, 256))),
        *(Shape(call, 64, 2, 8 * _K - 2) for call in _DECODES),
    ),
    "cpu": (
        *(Shape(call, requests, 1, _K - 1) for call in _DECODES for requests in (8, 1)),
        *(Shape(Call.NEW_TOKENS, 1, new, 0) for new in (256, 64)),
        Shape(Call.CONTEXT_CHUNK, 1, 64, 512),
        Shape(Call.SPARSE_PREFILL, 1, 16, 512),
    ),
}
"""By type of device, the most telling first: a kernel that takes too long has those. The last decodes verify a draft
token, which any model may have of another one."""
HEADS = {"cuda": (128, 64, 32, 16), "cpu": (16, 64, 128)}
_V3: dict[str, Any] = {"dims": "r1", "scale": 187, "topk": 2048}
_FORM = ("dtype", "dims", "heads", "scale", "cache", "scales", "topk", "sink", "extra", "extra_topk", "extra_page")
"""Fields that say what is called, not with how much and how it is laid out."""
_MOST_FORMS = 12
_TRIED: dict[str, tuple[Any, ...]] = {"page": (64, 128, 32, 16, 1), "space": ("slot", "position")}


def forms_of(passed: Iterable[str], heads: int, device: str) -> tuple[str, ...]:
    """Ids of small cases whose forms a kernel may be timed in, best first, from ids of those that it passed.

    A deployed model has its number of ``heads``, and all else of it; without one, 0, DeepSeek-V3's dims come first, at
    the numbers of heads that kernels have.
    """
    cases = [case for case in map(Case.parse, passed) if case.call in KINDS]
    usual = sorted(cases, key=lambda case: (case.heads != heads, case.dtype != "bf16", case.heads))
    of_v3 = [{**_V3, "heads": number, "dtype": "bf16"} for number in (() if heads else HEADS[device])]
    found = dict[Case, None]()
    for case, otherwise in [*product(cases, of_v3), *product(usual, [{}])]:
        own = case.defaults()
        told = {name: getattr(case, name) for name in _FORM if name in own}
        told |= {name: value for name, value in otherwise.items() if name in own}
        kv = {} if case.call == Call.NEW_TOKENS else {"kv": (64,)}
        with suppress(CaseError):  # of fields that do not go together
            found[Case.of(capability=case.call, call=case.call, q=(1,), lse=False, **kv, **told)] = None
    return tuple(form for call in KINDS for form in [case.id for case in found if case.call == call][:_MOST_FORMS])


def sized(form: Case, shape: Shape) -> Iterator[Case]:
    """The cases that have a form and a shape: pages of several sizes, lists that count slots or positions."""
    own = form.defaults()
    tried = {name: values for name, values in _TRIED.items() if name in own and isinstance(form, CachedCase)}
    kv = (shape.context,) * shape.requests if form.kv else ()
    for values in product(*tried.values()):
        yield replace(form, q=(shape.new,) * shape.requests, kv=kv, **dict(zip(tried, values, strict=True)))

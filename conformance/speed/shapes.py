"""The shapes that kernels are timed at, as a table, and the cases that may have them. No torch."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from itertools import product
from typing import Any

from mla_conformance.cases.cached import CachedCase
from mla_conformance.cases.case import Call, Case, CaseError

KINDS = {
    Call.DECODE: "decode",
    Call.NEW_TOKENS: "prefill",
    Call.CONTEXT_CHUNK: "prefill",
    Call.SPARSE_DECODE: "sparse decode",
    Call.SPARSE_PREFILL: "sparse prefill",
}
"""What the calls are that are timed."""


@dataclass(frozen=True)
class Shape:
    call: Call
    requests: int
    new: int  # tokens of each request
    context: int  # tokens of each before those

    def __str__(self) -> str:
        kind, new = KINDS[self.call], short(self.new)
        if self.call in (Call.NEW_TOKENS, Call.CONTEXT_CHUNK, Call.SPARSE_PREFILL):
            return f"{kind} {new}" + (f" after {short(self.context)}" if self.context else "")
        return f"{kind} {self.requests} × {short(self.context + self.new)}" + (
            f", {new} tokens" if self.new > 1 else ""
        )


def short(tokens: int) -> str:
    return f"{tokens // 1024}k" if tokens >= 1024 and tokens % 1024 == 0 else str(tokens)


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
    found = dict[Case, None]()
    cases = [case for case in map(Case.parse, passed) if case.call in KINDS]
    for case in () if heads else cases:
        for number in HEADS[device]:
            found |= dict.fromkeys(_formed(case, {**_V3, "heads": number, "dtype": "bf16"}))
    usual = sorted(cases, key=lambda case: (case.heads != heads, case.dtype != "bf16", case.heads))
    for case in usual:
        found |= dict.fromkeys(_formed(case, {}))
    of_call = {call: [case.id for case in found if case.call == call][:_MOST_FORMS] for call in KINDS}
    return tuple(form for forms in of_call.values() for form in forms)


def _formed(case: Case, otherwise: dict[str, Any]) -> Iterator[Case]:
    """The case's form, with some fields otherwise; nothing where they do not go together."""
    own = case.defaults()
    told = {name: getattr(case, name) for name in _FORM if name in own}
    told |= {name: value for name, value in otherwise.items() if name in own}
    kv = {} if case.call == Call.NEW_TOKENS else {"kv": (64,)}
    try:
        yield Case.of(capability=case.call, call=case.call, q=(1,), lse=False, **kv, **told)
    except CaseError:
        return


def sized(form: Case, shape: Shape) -> Iterator[Case]:
    """The cases that have a form and a shape: pages of several sizes, lists that count slots or positions."""
    own = form.defaults()
    tried = {name: values for name, values in _TRIED.items() if name in own and isinstance(form, CachedCase)}
    kv = (shape.context,) * shape.requests if form.kv else ()
    for values in product(*tried.values()):
        chosen = dict(zip(tried, values, strict=True))
        yield replace(form, q=(shape.new,) * shape.requests, kv=kv, **chosen)

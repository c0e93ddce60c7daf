"""The capability vocabulary: what can be right or wrong about a backend, with definitions, clauses and cases.

Adding a capability is one entry here and one test in the suite. No torch: the plugin lists cases without it.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum

from mla_conformance.case import Call, Case, Layout


class Tier(StrEnum):
    """How many of the cases are run."""

    SMOKE = "smoke"
    FULL = "full"


_SMOKE_CASES = 3


class CapabilityError(ValueError):
    """An unknown capability or tier."""


@dataclass(frozen=True)
class Capability:
    """One entry of the vocabulary.

    Attributes:
        name: as in ids, markers and reports.
        clause: clause of SPEC.md that the definition rests on.
        definition: one sentence.
        cases: the cases that decide it, the most telling first.
        probes_refusals: also run what the backend declares unsupported, which it must refuse.
    """

    name: str
    clause: str
    definition: str
    cases: tuple[Case, ...]
    probes_refusals: bool = False

    def select(self, tier: Tier) -> tuple[Case, ...]:
        """The cases of a tier; smoke takes the first few."""
        return self.cases[:_SMOKE_CASES] if tier is Tier.SMOKE else self.cases


_MIXED = (5, 1, 33, 64)
_CONTEXT = (64, 0, 1000, 17)
_TILES = (1, 15, 16, 17, 31, 32, 33, 63, 64, 65, 127, 128, 129, 255, 256, 257)


def _new_tokens() -> Iterable[Case]:
    def case(**fields: object) -> Case:
        return Case(capability="new_tokens", lse=False, **fields)  # type: ignore[arg-type]

    yield case(q=(1, 7, 64, 129, 513), data="needle")
    yield case(q=(1, 7, 64, 129, 513))
    yield case(q=(257,), data="hot_tail")
    for length in _TILES:
        yield case(q=(length,), data="needle")
    yield case(q=(1,) * 48)
    yield case(q=(700, 1), data="needle")
    yield case(q=(1, 700), data="needle")
    yield case(q=(128, 128), data="large_logits")
    yield case(q=(300,), data="ones")
    for dtype in ("fp16", "fp32"):
        yield case(q=(1, 7, 64, 129), dtype=dtype, data="needle")


def _lse() -> Iterable[Case]:
    def case(**fields: object) -> Case:
        return Case(capability="lse", **fields)  # type: ignore[arg-type]

    yield case(q=(1, 7, 64, 129), data="needle")
    yield case(q=_MIXED, call=Call.CONTEXT_CHUNK, kv=_CONTEXT)
    yield case(q=(4,), heads=4)
    yield case(q=(257, 1, 2))
    yield case(q=(16,), heads=16, data="large_logits")
    yield case(q=(9, 300), data="hot_tail")
    yield case(q=(5, 9), call=Call.CONTEXT_CHUNK, kv=(2000, 3), data="hot_tail")
    yield case(q=(5, 9), call=Call.CONTEXT_CHUNK, kv=(129, 257), data="large_logits")
    yield case(q=(5,), call=Call.CONTEXT_CHUNK, kv=(1,))
    for dtype in ("fp16", "fp32"):
        yield case(q=_MIXED, call=Call.CONTEXT_CHUNK, kv=_CONTEXT, dtype=dtype)
    yield case(q=(64, 5), data="ones", scale=100)


def _context_chunk() -> Iterable[Case]:
    def case(**fields: object) -> Case:
        return Case(capability="context_chunk", **fields)  # type: ignore[arg-type]

    yield case(heads=16, q=(5, 9, 3, 33), kv=_CONTEXT)
    yield case(q=(5, 9, 3, 33), kv=_CONTEXT, data="needle")
    yield case(q=(1, 200), kv=(1500, 1), data="hot_tail")
    for length in _TILES:
        yield case(q=(2, 5), kv=(length, 40), data="needle")
    yield case(q=(3,) * 24, kv=tuple(range(1, 25)))
    yield case(q=(200, 1), kv=(1, 200), data="needle")
    yield case(q=(7, 7), kv=(300, 300), data="large_logits")
    yield case(q=(7,), kv=(500,), data="ones")
    for dtype in ("fp16", "fp32"):
        yield case(q=(5, 9, 3, 33), kv=_CONTEXT, dtype=dtype, data="needle")


def _chunked_context() -> Iterable[Case]:
    def case(**fields: object) -> Case:
        return Case(capability="chunked_context", **fields)  # type: ignore[arg-type]

    yield case(q=(5, 9, 3), kv=(64, 0, 700), data="needle")
    yield case(q=(5, 1), kv=(5, 900), workspace=128)
    yield case(q=(17,), kv=(600,), data="hot_tail")
    for context in (127, 128, 129, 255, 256, 257, 384):
        yield case(q=(4, 4), kv=(context, 100), data="needle", workspace=256)
    for page, workspace in ((1, 96), (16, 64), (32, 96), (64, 320), (128, 512)):
        yield case(q=(3, 6), kv=(200, 333), page=page, workspace=max(workspace, 2 * page), data="needle")
    yield case(q=(40, 40), kv=(0, 0))
    yield case(q=(1,) * 8, kv=(1, 0, 16, 17, 0, 0, 31, 160), workspace=128)
    yield case(q=(100,), kv=(100,), dims="glm", heads=2)
    yield case(q=(9, 30), kv=(350, 20), dtype="fp16")
    yield case(q=(9, 30), kv=(350, 20), dtype="fp32")
    yield case(q=(9, 30), kv=(350, 20), data="large_logits")
    yield case(q=(9, 30), kv=(350, 20), data="ones")


def _empty_rows() -> Iterable[Case]:
    def case(**fields: object) -> Case:
        return Case(capability="empty_rows", **fields)  # type: ignore[arg-type]

    lengths = {
        "mixed": ((3, 4, 5), (0, 64, 0)),
        "first": ((3, 4, 5), (0, 17, 33)),
        "all": ((3, 4), (0, 0)),
        "middle": ((3, 4, 5), (17, 0, 33)),
        "last": ((3, 4, 5), (17, 33, 0)),
        "consecutive": ((3, 4, 5, 2), (17, 0, 0, 33)),
        "no queries first": ((0, 4, 5), (17, 33, 9)),
        "no queries last": ((4, 5, 0), (33, 9, 17)),
        "neither": ((4, 0, 5), (33, 0, 9)),
        "long": ((130, 2), (0, 300)),
    }
    for q, kv in lengths.values():
        yield case(q=q, kv=kv, call=Call.CONTEXT_CHUNK)
    yield case(q=(0, 7, 0, 0, 33, 0))
    yield case(q=(3, 0, 5), kv=(0, 40, 300), call=Call.CHUNKED_CONTEXT, workspace=96)
    yield case(q=(3, 4, 5), kv=(0, 64, 0), call=Call.CONTEXT_CHUNK, dtype="fp16")


def _v_padding() -> Iterable[Case]:
    def case(**fields: object) -> Case:
        return Case(capability="v_padding", **fields)  # type: ignore[arg-type]

    for dims in ("r1", "small", "glm", "16-8-40-32", "64-64-128-256"):
        yield case(q=(5, 64), dims=dims, lse=False, data="needle")
        yield case(q=(5, 40), kv=(70, 9), dims=dims, call=Call.CONTEXT_CHUNK)
    yield case(q=(5, 40), out=True, lse=False)
    yield case(q=(5, 40), data="ones")


def _strided_inputs() -> Iterable[Case]:
    def case(**fields: object) -> Case:
        return Case(capability="strided_inputs", **fields)  # type: ignore[arg-type]

    for layout in (Layout.SLICED, Layout.HEADS_FIRST, Layout.KV_B_PROJ, Layout.PACKED):
        yield case(q=(5, 64, 130), layout=layout)
        yield case(q=(5, 64), kv=(130, 17), layout=layout, call=Call.CONTEXT_CHUNK, data="needle")
        yield case(q=(7, 33), layout=layout, dims="glm", heads=2)


def _out_tensor() -> Iterable[Case]:
    def case(**fields: object) -> Case:
        return Case(capability="out_tensor", out=True, **fields)  # type: ignore[arg-type]

    yield case(q=(5, 64, 130), lse=False)
    yield case(q=(5, 64, 130))
    yield case(q=(1, 17), dims="glm", heads=2)
    yield case(q=(9,), dims="16-8-40-32")
    yield case(q=(3, 0, 9), data="needle")
    for dtype in ("fp16", "fp32"):
        yield case(q=(5, 64), dtype=dtype)


def _quant_output() -> Iterable[Case]:
    def case(**fields: object) -> Case:
        return Case(capability="quant_output_fp8", quant="fp8", lse=False, **fields)  # type: ignore[arg-type]

    yield case(q=(5, 64, 130))
    yield case(q=(5, 64, 130), oscale=300)
    yield case(q=(5, 64), data="needle", oscale=2300)
    yield case(q=(33,), oscale=1000000)
    yield case(q=(9, 40), data="ones", oscale=30000)
    yield case(q=(9, 40), dtype="fp16")
    yield case(q=(9, 40), dims="glm", heads=2)
    yield case(q=(0, 9, 0))


def _softmax_scale() -> Iterable[Case]:
    def case(**fields: object) -> Case:
        return Case(capability="softmax_scale", **fields)  # type: ignore[arg-type]

    for scale in (50, 237, 100, 10, 400):
        yield case(q=(3, 130), scale=scale)
        yield case(q=(3, 40), kv=(200, 9), scale=scale, call=Call.CONTEXT_CHUNK)


def _mla_dims() -> Iterable[Case]:
    def case(**fields: object) -> Case:
        return Case(capability="mla_dims", heads=2, **fields)  # type: ignore[arg-type]

    for dims in ("r1", "glm", "64-64-128-256", "small", "128-0-128-512", "256-0-256-512", "32-16-64-64", "16-8-40-32"):
        yield case(q=(5, 130), dims=dims)
        yield case(q=(5, 30), kv=(130, 4), dims=dims, call=Call.CHUNKED_CONTEXT)


def _head_counts() -> Iterable[Case]:
    for heads in (1, 128, 12, 4, 8, 16, 20, 24, 32, 64, 96):
        yield Case(capability="head_counts", heads=heads, q=(5, 40))
        yield Case(capability="head_counts", heads=heads, q=(5,), kv=(40,), call=Call.CONTEXT_CHUNK)


def _dtypes() -> Iterable[Case]:
    for dtype in ("bf16", "fp16", "fp32"):
        for data in ("normal", "needle", "large_logits"):
            yield Case(capability="dtypes", dtype=dtype, q=(3, 140), data=data)
        yield Case(capability="dtypes", dtype=dtype, q=(3, 40), kv=(140, 5), call=Call.CONTEXT_CHUNK)


def _no_side_effects() -> Iterable[Case]:
    def case(**fields: object) -> Case:
        return Case(capability="no_side_effects", **fields)  # type: ignore[arg-type]

    yield case(q=(5, 64, 1), pad=3)
    yield case(q=(5, 9), kv=(64, 33), call=Call.CONTEXT_CHUNK, layout=Layout.SLICED)
    yield case(q=(5, 9), kv=(64, 333), call=Call.CHUNKED_CONTEXT, workspace=128)
    yield case(q=(33, 9), out=True, layout=Layout.SLICED)
    yield case(q=(5, 9), kv=(64, 33), call=Call.CONTEXT_CHUNK, pad=5)
    yield case(q=(40, 2), out=True, pad=2, lse=False)


def _refusals() -> Iterable[Case]:
    def case(**fields: object) -> Case:
        return Case(capability="refusals", heads=2, **fields)  # type: ignore[arg-type]

    yield case(q=(9,), quant="fp8", lse=False)
    yield case(q=(9,), dtype="fp64")
    yield case(q=(9,), dtype="e4m3")
    yield case(q=(9,), dtype="fp32")
    yield case(q=(9,), dtype="fp16")
    yield case(q=(9,), kv=(20,), dtype="fp64", call=Call.CONTEXT_CHUNK)
    yield case(q=(9,), dims="16-8-40-32")
    yield case(q=(9,), dims="24-8-24-16")
    yield case(q=(9,), kv=(20,), dims="256-64-320-512", call=Call.CONTEXT_CHUNK)


def _entry(name: str, clause: str, definition: str, cases: Iterable[Case], probes_refusals: bool = False) -> Capability:
    return Capability(name, clause, definition, tuple(cases), probes_refusals)


CAPABILITIES: dict[str, Capability] = {
    entry.name: entry
    for entry in (
        _entry("new_tokens", "3.1", "New tokens attend causally to each other within their request.", _new_tokens()),
        _entry("lse", "1.4", "The LSE is the natural logarithm, float32, [heads, tokens], by value.", _lse()),
        _entry(
            "context_chunk", "3.1", "New tokens attend, unmasked, to one chunk of cached context.", _context_chunk()
        ),
        _entry(
            "chunked_context",
            "1.7",
            "Chunks of a paged context and the new tokens, merged by LSE, equal unchunked attention.",
            _chunked_context(),
        ),
        _entry(
            "empty_rows", "1.6", "A row that sees no key is exactly 0 with LSE -inf, wherever it stands.", _empty_rows()
        ),
        _entry("v_padding", "3.3", "Padding of V never shows in the result's shape or values.", _v_padding()),
        _entry("strided_inputs", "3.2", "Strided views of q, k and v are read as what they are.", _strided_inputs()),
        _entry(
            "out_tensor", "3.4", "A given out tensor holds the result, and nothing around it is written.", _out_tensor()
        ),
        _entry(
            "quant_output_fp8",
            "3.5",
            "Fused e4m3 output stores the rounded, saturated code of value / output_scale.",
            _quant_output(),
        ),
        _entry(
            "softmax_scale",
            "1.3",
            "The softmax scale is the given one, never derived from a head dim.",
            _softmax_scale(),
        ),
        _entry("mla_dims", "2.1", "Every declared combination of head dims is computed right.", _mla_dims()),
        _entry("head_counts", "2.1", "Any number of heads on this rank is computed right.", _head_counts()),
        _entry("dtypes", "4.2", "Every declared dtype stays within its own error budget.", _dtypes()),
        _entry(
            "no_side_effects",
            "3.6",
            "Inputs and excluded bytes keep their values and have no influence; calls do not disturb each other.",
            _no_side_effects(),
        ),
        _entry(
            "refusals",
            "3.8",
            "What is declared unsupported is refused with an exception, what is declared supported runs.",
            _refusals(),
            probes_refusals=True,
        ),
    )
}


def find_capability(name: str) -> Capability:
    """The entry of this name.

    Raises:
        CapabilityError: there is none; the message lists the names.
    """
    if name not in CAPABILITIES:
        raise CapabilityError(f"unknown capability '{name}'; expected one of {', '.join(CAPABILITIES)}")
    return CAPABILITIES[name]


def find_tier(name: str) -> Tier:
    """The tier of this name.

    Raises:
        CapabilityError: there is none; the message lists the names.
    """
    if name not in list(Tier):
        raise CapabilityError(f"unknown tier '{name}'; expected one of {', '.join(Tier)}")
    return Tier(name)

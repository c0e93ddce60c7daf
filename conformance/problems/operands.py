"""What the inputs of every call are made from: a case's random numbers, data regimes, edges, memory layouts."""

import hashlib
import math
from bisect import bisect_right
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import accumulate
from typing import Any, Generic, TypeVar

import torch

from mla_conformance.cases.case import CASE_FORMAT, Case, Layout
from mla_conformance.cases.grammar import Data
from mla_conformance.problems.memory import poison
from mla_conformance.reference.attention import segments as segments
from mla_conformance.reference.quantization import E4M3_MAX

TORCH_DTYPES = {
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
    "fp32": torch.float32,
    "fp64": torch.float64,
    "e4m3": torch.float8_e4m3fn,
}
_SLICE_MARGIN = 16
AnyCase = TypeVar("AnyCase", bound=Case)


@dataclass(frozen=True)
class Site:
    q: torch.Tensor  # [T, N, D] standard normal queries, float32, on any device
    k: torch.Tensor  # [S, N, D] keys as the backend receives them, on any device
    scale: float  # softmax scale
    edges: Sequence[int]  # key positions next to a boundary: sequence ends, pages, chunks, tiles
    causal: bool = False  # whether the last row sees all keys, and each row before it one fewer


@dataclass(frozen=True)
class Regime:
    """A named way to make inputs that reveals what N(0,1) hides; keys and values are as the backend receives them."""

    sentence: str  # what it reveals
    queries: Callable[[Site], torch.Tensor] = lambda site: site.q  # new queries of a request
    keys: Callable[[torch.Tensor], torch.Tensor] = lambda k: k  # new keys [S, N, D]
    values: Callable[[torch.Tensor], torch.Tensor] = lambda v: v  # new values [S, N, V]
    by_element: bool = True  # whether a new query follows from the old one's elements alone


def _aligned(site: Site, above: float) -> torch.Tensor:
    """Queries to which one edge key has e^``above`` times the mass of all others, about."""
    if not site.edges:
        return site.q
    # [T, N] the key that each row spotlights for each head: another edge that it sees for the next row and head.
    rows, last = site.q.shape[0], site.k.shape[0] - 1
    ends = torch.full((rows,), last) if not site.causal else last + 1 - rows + torch.arange(rows)
    edges = torch.cat((ends.unsqueeze(1), torch.tensor(site.edges).expand(rows, -1)), dim=1)
    seen = edges <= ends.unsqueeze(1)
    turn = torch.arange(rows).unsqueeze(1) + torch.arange(site.q.shape[1])
    places = (~seen).int().argsort(dim=1, stable=True).gather(1, turn % seen.sum(dim=1, keepdim=True))
    heads, chosen = torch.arange(site.q.shape[1], device=site.k.device), edges.gather(1, places).to(site.k.device)
    keys = site.k[chosen, heads].float().to(site.q.device)
    direction = keys / keys.square().sum(-1, keepdim=True).clamp(min=1e-6)
    return site.q + direction * ((math.log(site.k.shape[0]) + above) / site.scale)


_CHANNEL = 400.0
"""Size of the constant channel of a shifted request; its square moves raw scores by 1.6e5, exact in bf16 and fp16."""


def _with_last(value: float, x: torch.Tensor) -> torch.Tensor:
    return torch.cat([x[..., :-1], torch.full_like(x[..., -1:], value)], dim=-1)


def _ramp(k: torch.Tensor) -> torch.Tensor:  # the last channel rises from -1 to 1 along the key axis
    slope = torch.linspace(-1.0, 1.0, k.shape[0]).view(-1, 1, 1).expand(-1, k.shape[1], 1) if k.shape[0] else k[..., :1]
    return torch.cat([k[..., :-1] * 0.25, slope.to(k)], dim=-1)


def _sparse_integers(x: torch.Tensor) -> torch.Tensor:
    """Values -2 ... 2, three of four of them 0: products and sums are exact in every dtype."""
    return torch.where(x.abs() > 1.15, x.round().clamp(-2, 2), torch.zeros_like(x))


def _outliers(x: torch.Tensor) -> torch.Tensor:
    channel = torch.arange(x.shape[-1], device=x.device) % 16 == 3
    return torch.where(channel, x * 10.0, x) + 0.5


def _low_rank(x: torch.Tensor) -> torch.Tensor:
    if not x.shape[0]:
        return x
    return x[:1] * x[..., :1].sign() + 0.05 * x


def _of_q(change: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[Site], torch.Tensor]:
    return lambda site: change(site.q)


def _along_ramp(site: Site) -> torch.Tensor:
    return _with_last(16.0 / site.scale, site.q)


_IN_CHANNEL, _OUT_OF_CHANNEL = partial(_with_last, _CHANNEL), partial(_with_last, -_CHANNEL)
REGIMES: dict[str, Regime] = {
    Data.NORMAL: Regime("N(0,1) queries, keys and values"),
    Data.NEEDLE: Regime(
        "one dominant key at an edge of a sequence, page, chunk or tile, another for each row and head, over a tail: "
        "a lost or leaked key changes everything",
        partial(_aligned, above=4.0),
        by_element=False,
    ),
    Data.HOT_TAIL: Regime(
        "one key holds more than half of the mass over a diffuse tail: mass lost in the tail",
        partial(_aligned, above=1.0),
        by_element=False,
    ),
    Data.HOT_ONES: Regime(
        "a hot key over a diffuse tail with V = 1: the weights must add up",
        partial(_aligned, above=1.0),
        values=torch.ones_like,
        by_element=False,
    ),
    Data.LARGE_LOGITS: Regime(
        "logits × 8: overflow, and a softmax scale applied in low precision", lambda site: site.q * 8.0
    ),
    Data.HUGE_LOGITS: Regime("logits × 64: rescaling between tiles", lambda site: site.q * 64.0),
    Data.EXTREME_LOGITS: Regime("logits × 100", lambda site: site.q * 100.0),
    Data.NEGATIVE: Regime(
        "all raw scores near -1.6e5: finite sentinels for masks and maxima", _of_q(_OUT_OF_CHANNEL), _IN_CHANNEL
    ),
    Data.SHIFTED: Regime("all raw scores near +1.6e5: softmax is shift invariant", _of_q(_IN_CHANNEL), _IN_CHANNEL),
    Data.RISING: Regime("logits rise along the key axis: the running maximum always lags", _along_ramp, _ramp),
    Data.RISING_ONES: Regime("logits rise along the key axis, V = 1", _along_ramp, _ramp, torch.ones_like),
    Data.ONES: Regime("V = 1, the output must be 1: normalisation", values=torch.ones_like),
    Data.INTEGERS: Regime(
        "sparse small integers, exact in every dtype", _of_q(_sparse_integers), _sparse_integers, _sparse_integers
    ),
    Data.OUTLIERS: Regime(
        "a mean offset and outlier channels", lambda site: _outliers(site.q) * 0.1, _outliers, _outliers
    ),
    Data.LOW_RANK: Regime(
        "rows that are nearly multiples of one another", _of_q(_low_rank), _low_rank, _low_rank, by_element=False
    ),
    Data.TINY_VALUES: Regime("values of size 1e-3: an absolute tolerance accepts zeros", values=lambda v: v * 1e-3),
    Data.ZERO_KEYS: Regime("all logits equal: the output is the mean of the visible values", keys=torch.zeros_like),
}
KEYS = {name: regime.keys for name, regime in REGIMES.items()}
VALUES = {name: regime.values for name, regime in REGIMES.items()}


class ProblemError(ValueError):
    """A case that no inputs can be built for."""


class Draw(Generic[AnyCase]):
    """The random numbers of a case and a salt: the same for every device, memory layout, chunking and dtype."""

    whole: Any = None  # attention to the keys of all calls at once, where it is known before they are divided

    def __init__(self, case: AnyCase, device: torch.device, salt: str = "") -> None:
        self.case, self.device, self.dtype, self.salt = case, device, TORCH_DTYPES[case.dtype], salt
        # What the numbers follow from: of the case's id the same for every memory layout, chunking and dtype.
        self.key = f"{case.id}|salt={salt}" if salt else case.id
        self.generator = self.drawing(CASE_FORMAT, case.dims, case.heads, case.q, case.kv, case.seed)

    def by_request(
        self, kinds: Mapping[str, Callable[[torch.Tensor], torch.Tensor]], x: torch.Tensor, starts: Sequence[int]
    ) -> torch.Tensor:
        """Rows [rows, ...] of the batch, standard normal ones, each request's as its kind makes them."""
        if len(self.case.regimes) == 1:
            return kinds[self.case.regimes[0]](x)
        numbered = enumerate(segments(starts))
        return torch.cat([kinds[self.case.data_of(request)](x[rows]) for request, rows in numbered])

    def queries_of(
        self, q: torch.Tensor, keys: Callable[[], Iterable[torch.Tensor]], *, causal: bool = True, each: bool = False
    ) -> torch.Tensor:
        """[T, N, D] queries, in place, as regimes make them over keys [S, N, D] of requests, or of ``each`` row."""
        first, *others = (REGIMES[name] for name in self.case.regimes)
        if first.by_element and not others:
            return first.queries(Site(q, q[:0], self.case.softmax_scale, ()))
        starts = start_loc(self.case.q)
        for rows, k in zip(segments(range(len(q) + 1) if each else starts), keys(), strict=False):
            site = Site(q[rows], k, self.case.softmax_scale, edges(len(k), self.case), causal)
            q[rows] = REGIMES[self.case.data_of(bisect_right(starts, rows.start) - 1)].queries(site)
        return q

    def padded(self, rows: torch.Tensor) -> torch.Tensor:
        if not self.case.pad:
            return rows.to(self.device)
        behind = poison((self.case.pad, *rows.shape[1:]), rows.dtype, rows.device, self.case.poison)
        # As bytes, since float8 cannot be joined everywhere.
        return torch.cat([x.view(torch.uint8) for x in (rows, behind)]).view(rows.dtype).to(self.device)

    def drawing(self, *drawn: object) -> torch.Generator:
        """A generator for what is the same in batches of other shapes: seeded by these and the salt."""
        drawn = (*drawn, self.salt) if self.salt else drawn
        digest = int.from_bytes(hashlib.sha256(repr(drawn).encode()).digest()[:7], "big")
        seed: Any = digest if len(drawn) > 1 else drawn[0]
        return torch.Generator().manual_seed(seed)


def stored(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Values in a dtype; what e4m3 has no number for becomes its largest, which not every version of torch does."""
    return (x.clamp(-E4M3_MAX, E4M3_MAX) if dtype == TORCH_DTYPES["e4m3"] else x).to(dtype)


def start_loc(lengths: Sequence[int]) -> tuple[int, ...]:
    return tuple(accumulate(lengths, initial=0))


def rows_of(locations: Sequence[int], requests: Sequence[int], most: int | None = None) -> torch.Tensor:
    """[n] int64 numbers of the rows of these requests, or of the first few of each, one request after another."""
    return torch.cat([torch.arange(locations[each], locations[each + 1])[:most] for each in requests])


def edges(keys: int, case: Case) -> list[int]:  # key positions next to a boundary, most telling first
    candidates = [keys - 1, 0, case.page - 1, case.page, case.workspace - 1, case.workspace]
    candidates += [(keys - 1) // size * size for size in (case.page, 64, 128)]
    candidates += [keys // 2, 127, 128, 63, 64, keys - 2, 255, 256, keys // 3]
    return [position for position in dict.fromkeys(candidates) if 0 <= position < keys]


def lay_out(name: str, x: torch.Tensor, k: torch.Tensor, case: Case) -> torch.Tensor:
    layout = Layout(case.layout)
    if layout is Layout.ODD or (layout is Layout.SLICED and name != "v"):
        return sliced((x,), case)[0]
    if name == "v" and layout is not Layout.PACKED:
        # The model's own case: v is the second half of each head's kv_b_proj output, behind k_nope.
        wide = torch.cat([k[..., : case.dimensions.qk_nope_head_dim], x], dim=-1)
        return wide[..., wide.shape[-1] - x.shape[-1] :]
    if layout is Layout.HEADS_FIRST and name == "q":
        return x.transpose(0, 1).contiguous().transpose(0, 1)
    return x.contiguous()


def sliced(parts: Sequence[torch.Tensor], case: Case) -> Sequence[torch.Tensor]:
    """The same values, side by side in one wider buffer as slices of a projection are, if the layout says so."""
    if case.layout not in (Layout.SLICED, Layout.ODD):
        return parts
    before, after = (1, 2) if case.layout == Layout.ODD else (_SLICE_MARGIN, _SLICE_MARGIN)
    widths, one = (before, *(x.shape[-1] for x in parts), after), parts[0]
    wide = poison((*one.shape[:-1], sum(widths)), one.dtype, one.device, case.poison)
    return [view.copy_(x) for view, x in zip(wide.split(widths, dim=-1)[1:-1], parts, strict=True)]


COUNTER_SEEDS = 2**23  # seeds from 0 on that there are; each has 2^40 numbers of its own
_CHUNK = {"cpu": 2**15, "cuda": 2**25}
"""Numbers that are made at a time: a CPU's caches hold them, and a GPU has enough to do."""
_LOW_BITS = 2**63 - 1
_DEVIATION = (8 * (256**2 - 1) / 12) ** 0.5
_MEAN = 8 * 255 // 2
_STEPS = ((30, -4658895280553007687), (27, -7723592293110705685))
"""Shift and multiplier of the two rounds of splitmix64 (Steele, Lea and Flood 2014); 64 bits, signed."""
_INCREMENT = -7046029254386353131


def fill_normal(out: torch.Tensor, seed: int) -> torch.Tensor:
    """Fill a contiguous tensor of any float dtype with numbers of mean 0 and variance 1; other seeds, other numbers."""
    flat = out.view(-1)
    size = _CHUNK[out.device.type]
    for start in range(0, flat.numel(), size):
        part = flat[start : start + size]
        index = torch.arange(start, start + part.numel(), dtype=torch.int64, device=out.device)
        index.add_(seed * 2**40).mul_(_INCREMENT)
        for shift, multiplier in _STEPS:
            index.bitwise_xor_(_shifted(index, shift)).mul_(multiplier)
        index.bitwise_xor_(_shifted(index, 31))  # 64 well-mixed bits
        total = index.view(torch.uint8).view(-1, 8).sum(dim=-1, dtype=torch.int32)
        part.copy_(total.sub_(_MEAN).float().mul_(1 / _DEVIATION))
    return out


def _shifted(x: torch.Tensor, bits: int) -> torch.Tensor:
    """Shift to the right that fills with zeros, which PyTorch's signed one does not."""
    return (x >> bits).bitwise_and_(_LOW_BITS >> (bits - 1))

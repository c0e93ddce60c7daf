"""What the inputs of every call are made from: the draw of a case's random numbers, edges, lengths, memory layouts."""

import hashlib
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import accumulate, pairwise
from typing import Any, Generic, TypeVar

import torch

from mla_conformance.cases.case import CASE_FORMAT, Case, Layout
from mla_conformance.problems.memory import poison
from mla_conformance.problems.regimes import REGIMES, Site
from mla_conformance.reference.quantization import E4M3_MAX

TORCH_DTYPES: dict[str, torch.dtype | None] = {
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
    "fp32": torch.float32,
    "fp64": torch.float64,
    "e4m3": getattr(torch, "float8_e4m3fn", None),
}
_SLICE_MARGIN = 16
AnyCase = TypeVar("AnyCase", bound=Case)


class ProblemError(ValueError):
    """A case that no inputs can be built for."""


class Draw(Generic[AnyCase]):
    """The random numbers of a case: the same for every device, memory layout, chunking and dtype of the same shapes.

    Attributes:
        salt: what they are drawn with beside the case, so that nobody who has the case can know them; empty for none.
        whole: attention to the keys of all calls at once, where it is known before they are divided.

    Raises:
        ProblemError: a regime or dtype that does not exist here.
    """

    whole: Any = None

    def __init__(self, case: AnyCase, device: torch.device, salt: str = "") -> None:
        dtype = TORCH_DTYPES[case.dtype]
        if dtype is None:
            raise ProblemError(f"dtype {case.dtype} needs a torch with float8, this is {torch.__version__}")
        self.case, self.device, self.dtype, self.salt = case, device, dtype, salt
        # The same numbers for every memory layout, chunking and dtype of the same shapes.
        drawn = (CASE_FORMAT, case.dims, case.heads, case.q, case.kv, case.seed)
        self.generator = torch.Generator().manual_seed(_digest((*drawn, salt) if salt else drawn))

    def by_request(
        self, kinds: Mapping[str, Callable[[torch.Tensor], torch.Tensor]], x: torch.Tensor, starts: Sequence[int]
    ) -> torch.Tensor:
        """Rows of the batch, each request's as its kind makes them.

        Args:
            kinds: by the name of a data regime, what it makes of standard normal numbers.
            x: [rows, ...] of all requests.
            starts: first row of each request, and the end.
        """
        if len(self.case.regimes) == 1:
            return kinds[self.case.regimes[0]](x)
        numbered = enumerate(segments(starts))
        return torch.cat([kinds[self.case.data_of(request)](x[rows]) for request, rows in numbered])

    def keys_of(self, k: torch.Tensor, starts: Sequence[int]) -> torch.Tensor:
        """[S, N, D] keys as each request's data regime makes them of standard normal ones."""
        return self.by_request({name: regime.keys for name, regime in REGIMES.items()}, k, starts)

    def values_of(self, v: torch.Tensor, starts: Sequence[int]) -> torch.Tensor:
        """[S, N, V] values."""
        return self.by_request({name: regime.values for name, regime in REGIMES.items()}, v, starts)

    def queries_of(self, q: torch.Tensor, sites: Callable[[], Iterable[tuple[slice, Site]]]) -> torch.Tensor:
        """[T, N, D] queries, which may be written over, as each request's data regime makes them over its keys.

        Args:
            q: standard normal ones.
            sites: of all rows, some of one request each; asked for where keys or other rows matter.
        """
        if len(self.case.regimes) == 1:
            return REGIMES[self.case.regimes[0]].new_queries(q, self.case.softmax_scale, sites)
        starts = start_loc(self.case.q)
        for rows, site in sites():
            q[rows] = REGIMES[self.case.data_of(bisect_right(starts, rows.start) - 1)].queries(site)
        return q

    @property
    def key(self) -> str:
        """What the numbers follow from: the case's id, and the salt if there is one."""
        return f"{self.case.id}|salt={self.salt}" if self.salt else self.case.id

    def padded(self, rows: torch.Tensor) -> torch.Tensor:
        """Rows on the device, and behind them those of padding, which are poison."""
        if not self.case.pad:
            return rows.to(self.device)
        behind = poison((self.case.pad, *rows.shape[1:]), rows.dtype, rows.device, self.case.poison)
        # As bytes, since float8 cannot be joined everywhere.
        return torch.cat([x.view(torch.uint8) for x in (rows, behind)]).view(rows.dtype).to(self.device)

    def drawing(self, seed: int) -> torch.Generator:
        """A generator beside that of the batch, for what is the same in batches of other shapes."""
        return torch.Generator().manual_seed(self.salted(seed))

    def salted(self, seed: int) -> int:
        """A seed of its own for every salt; without one it is itself."""
        return _digest((seed, self.salt)) if self.salt else seed


def stored(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Values in a dtype; what e4m3 has no number for becomes its largest, which not every version of torch does."""
    return (x.clamp(-E4M3_MAX, E4M3_MAX) if dtype == TORCH_DTYPES["e4m3"] else x).to(dtype)


def start_loc(lengths: Sequence[int]) -> tuple[int, ...]:
    """Cumulative lengths, 0 first."""
    return tuple(accumulate(lengths, initial=0))


def segments(locations: Sequence[int]) -> Iterator[slice]:
    """One slice per request."""
    return (slice(a, b) for a, b in pairwise(locations))


def rows_of(locations: Sequence[int], requests: Sequence[int]) -> torch.Tensor:
    """[n] int64 numbers of the rows of these requests, one request after another."""
    rows = list(segments(locations))
    return torch.cat([torch.arange(rows[request].start, rows[request].stop) for request in requests])


def edges(keys: int, case: Case) -> list[int]:
    """Key positions next to a boundary, most telling first."""
    candidates = [keys - 1, 0, case.page - 1, case.page, case.workspace - 1, case.workspace]
    candidates += [(keys - 1) // size * size for size in (case.page, 64, 128)]
    candidates += [keys // 2, 127, 128, 63, 64, keys - 2, 255, 256, keys // 3]
    return [position for position in dict.fromkeys(candidates) if 0 <= position < keys]


def lay_out(name: str, x: torch.Tensor, k: torch.Tensor, case: Case) -> torch.Tensor:
    """``x`` [tokens, N, width] with the same values in another memory layout."""
    layout = Layout(case.layout)
    if layout is Layout.ODD or (layout is Layout.SLICED and name != "v"):
        before, after = (1, 2) if layout is Layout.ODD else (_SLICE_MARGIN, _SLICE_MARGIN)
        wide = poison((*x.shape[:2], before + x.shape[2] + after), x.dtype, x.device, case.poison)
        view = wide[..., before : before + x.shape[2]]
        return view.copy_(x)
    if name == "v" and layout is not Layout.PACKED:
        # The model's own case: v is the second half of each head's kv_b_proj output, behind k_nope.
        wide = torch.cat([k[..., : case.dimensions.qk_nope_head_dim], x], dim=-1)
        return wide[..., wide.shape[-1] - x.shape[-1] :]
    if layout is Layout.HEADS_FIRST and name == "q":
        return x.transpose(0, 1).contiguous().transpose(0, 1)
    return x.contiguous()


def _digest(drawn: tuple[object, ...]) -> int:
    return int.from_bytes(hashlib.sha256(repr(drawn).encode()).digest()[:7], "big")


COUNTER_SEEDS = 2**23
"""Seeds from 0 on that there are; each has 2^40 numbers of its own."""
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

"""What wrong and honest kernels are made from: EAGER in a layer, a graph, splits or e4m3, and scales in e8m0."""

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial, reduce
from itertools import pairwise
from typing import Any, ClassVar

import torch

from mla_conformance.backends import eager_decode, graph_support
from mla_conformance.backends.declaration import Declaration, Precision, Rounding
from mla_conformance.backends.eager import EagerPrefillBackend, OnlineSoftmax, SoftmaxState
from mla_conformance.backends.layer.mla_layer import MLACommonBackend
from mla_conformance.judging.tolerance import SCALED_P
from mla_conformance.reference.selected import NO_KEY

ILLEGAL_ACCESS = "CUDA error: an illegal memory access was encountered"


class LayeredDecode(eager_decode.EagerDecodeBackend):
    prefill_backend: ClassVar[type[EagerPrefillBackend]] = EagerPrefillBackend


class EagerLayer(MLACommonBackend):
    """Prefill and decode as EAGER computes them; a subclass replaces a step of the layer around them."""

    prefill_backend = EagerPrefillBackend
    decode_backend = eager_decode.EagerDecodeBackend
    supported_dtypes = eager_decode.EagerDecodeBackend.supported_dtypes
    supported_kv_cache_dtypes = eager_decode.EagerDecodeBackend.supported_kv_cache_dtypes


class Capturable:
    cudagraph_support: ClassVar[graph_support.AttentionCGSupport] = graph_support.AttentionCGSupport.ALWAYS


def joined(a: SoftmaxState, b: SoftmaxState) -> SoftmaxState:
    maximum = torch.maximum(a.maximum, b.maximum)
    shift = maximum.masked_fill(maximum == -torch.inf, 0.0)
    wa, wb = (a.maximum - shift).exp(), (b.maximum - shift).exp()
    return SoftmaxState(maximum, a.total * wa + b.total * wb, a.weighted * wa + b.weighted * wb)


def joined_in_a_tree(parts: Sequence[Any], join: Callable[[Any, Any], Any] = joined) -> Any:
    """The state of all splits together, joined by twos."""
    waiting = list(parts)
    while len(waiting) > 1:
        pairs = [join(a, b) for a, b in zip(waiting[::2], waiting[1::2], strict=False)]
        waiting = pairs + waiting[len(pairs) * 2 :]
    return waiting[0]


def stored_in(state: SoftmaxState, dtype: torch.dtype) -> SoftmaxState:
    """A split's state whose output has waited for the others in ``dtype``."""
    total = state.total.masked_fill(state.total == 0, 1.0)
    return state._replace(weighted=(state.weighted / total).to(dtype).float() * state.total)


class Parts(OnlineSoftmax):
    """Every so many tiles together in a part with a softmax of its own, which wait for each other to be joined."""

    parts: int
    runs = False  # whether a part has tiles that are neighbours
    stored = False  # in the model's dtype while they wait

    def _attend(self, *operands: Any) -> SoftmaxState:
        states = []
        for part in range(self.parts):
            self._part = part
            state = super()._attend(*operands)  # type: ignore[misc]
            dtype = self._model_dtype if hasattr(self, "_model_dtype") else operands[2].dtype
            states.append(stored_in(state, dtype) if self.stored else state)
        return self.combined(states)

    @staticmethod
    def combined(states: Sequence[SoftmaxState]) -> SoftmaxState:
        return reduce(joined, states)

    def _tiles(self, keys: int) -> Iterator[slice]:
        tiles = list(super()._tiles(keys))
        share = max(1, -(-len(tiles) // self.parts))
        return iter(tiles[self._part * share :][:share] if self.runs else tiles[self._part :: self.parts])


class TwoPasses(OnlineSoftmax):
    """The maximum and the sum are found first, and weights are normalised before they are rounded."""

    def _attend(self, *operands: Any) -> SoftmaxState:
        self._known: SoftmaxState | None = None
        self._known = known = super()._attend(*operands)  # type: ignore[misc]
        return known._replace(weighted=super()._attend(*operands).weighted * known.total)  # type: ignore[misc]

    def _accumulate(self, state: SoftmaxState, scores: torch.Tensor, v: torch.Tensor) -> SoftmaxState:
        if self._known is None:
            return super()._accumulate(state, scores, v)
        shift = self._known.maximum.masked_fill(self._known.maximum == -torch.inf, 0.0)
        p = self._round_p((scores - shift).exp() / self._known.total.masked_fill(self._known.total == 0, 1.0), v.dtype)
        return state._replace(weighted=state.weighted + torch.einsum("nts,snv->ntv", p, v.float()))


def through(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    return x.to(dtype).to(x.dtype)


in_e4m3, in_e5m2 = partial(through, dtype=torch.float8_e4m3fn), partial(through, dtype=torch.float8_e5m2)


def rough_exp(x: torch.Tensor) -> torch.Tensor:
    """An exponential with relative errors up to 1e-4."""
    return x.exp() * (1 + 0.9e-4 * (x.clamp(min=-100.0) * 997.0).cos())


def places(x: torch.Tensor, dim: int = 0) -> torch.Tensor:
    """The numbers of what stands along a dimension."""
    return torch.arange(x.shape[dim], device=x.device)


def packed(x: torch.Tensor) -> torch.Tensor:
    """What would be read if nothing lay between the rows, or blocks, of ``x``."""
    return x.as_strided(x.shape, torch.empty(x.shape, device="meta").stride(), x.storage_offset())


def slots_of(cache: torch.Tensor) -> int:
    return cache.shape[0] * cache.shape[1]


def keyless(lse: torch.Tensor) -> torch.Tensor:
    """[T, N, 1] rows without a key, by an LSE [N, T]."""
    return (lse == -torch.inf).mT.unsqueeze(-1)


def nan_without_keys(output: torch.Tensor, lse: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return output.masked_fill(keyless(lse), torch.nan), lse


def without_keys(output: torch.Tensor, lse: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """What rows without keys have in place of these results."""
    return torch.zeros_like(output), torch.full_like(lse, -torch.inf)


def all_or_nothing(output: torch.Tensor, lse: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """All rows are without keys where a number of any is not finite."""
    return (output, lse) if output.isfinite().all() else without_keys(output, lse)


def chosen(condition: torch.Tensor, a: SoftmaxState, b: SoftmaxState) -> SoftmaxState:
    """The one state where the condition holds, else the other."""
    return SoftmaxState(*(torch.where(condition, *pair) for pair in zip(a, b, strict=True)))


def last_packed_tile_lost(output: torch.Tensor, lse: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Where rows and heads are packed into tiles of 64, a partial one behind the first is 0."""
    output, rows = output.contiguous(), output.shape[0] * output.shape[1]
    if len(output) > 1 and rows > 64:
        output.flatten(0, 1)[rows // 64 * 64 :] = 0.0
    return output, lse


def in_base_2(lse: torch.Tensor) -> torch.Tensor:
    return lse / math.log(2)


def mirrored(choose: Callable[[torch.Tensor, int], torch.Tensor], scores: torch.Tensor, count: int) -> torch.Tensor:
    """The columns that are chosen of scores read from behind, so that of equal ones the last are."""
    flipped = choose(scores.flip(1), count)
    return torch.where(flipped == NO_KEY, NO_KEY, scores.shape[1] - 1 - flipped)


def fill(x: torch.Tensor, value: float = 0.0) -> None:
    x.fill_(value)


def write(x: torch.Tensor, values: torch.Tensor) -> None:
    x.copy_(values)


def weighed_with_zero(state: SoftmaxState, values: torch.Tensor) -> SoftmaxState:
    """A state to which values [..., 1 or N, V] are added with a weight of 0, which leaves a NaN a NaN."""
    return state._replace(weighted=state.weighted + (0.0 * values).flatten(0, -2).sum(dim=0))


def several(self: Any) -> bool:
    """Whether a request of a decode's batch has several query tokens."""
    return int(self._decode_metadata.query_lens_cpu.max()) > 1


def gathered(self: Any) -> bool:
    """Whether keys lie one request behind the other, and no table leads to them."""
    return bool(self._sparse_metadata.block_table is None)


def on_ranks(self: Any) -> bool:
    return bool(self._decode_metadata.dcp_world_size > 1)


def in_layout(name: str) -> Callable[[Any], bool]:
    """Where a kernel's cache has a layout; a lambda, whose argument says what it is asked of."""
    return lambda self: self.kv_cache_dtype == name


codes, mixed_entries = in_layout("fp8"), in_layout("fp8_ds_mla")


def pages_of(tokens: int) -> Callable[[torch.Tensor], bool]:
    return lambda kv_cache: kv_cache.shape[1] == tokens


def half(q: torch.Tensor) -> bool:
    return q.dtype is torch.float16


def declares(**rounding: Any) -> Declaration:
    """What an emulation declares that rounds so."""
    return Declaration(rounding=Rounding(**rounding), emulated=True)


STORED = declares(partial_outputs=Precision.MODEL)


class NarrowP(OnlineSoftmax):
    """Of operands that are not float32, P is rounded as is declared."""

    declaration: ClassVar[Declaration]

    def _round_p(self, p: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        if getattr(self, "_model_dtype", dtype) is torch.float32:
            return p
        declared = self.declaration.rounding.p
        factor = SCALED_P if declared is Precision.SCALED_E4M3 else 1
        return through(p * factor, torch.float16 if declared is Precision.FLOAT16 else torch.float8_e4m3fn) / factor


LOG2_E = math.log2(math.e)


class LazyRescale(OnlineSoftmax):
    """The running state is rescaled only where its maximum grows by more than a factor 2^8 of the weights."""

    lag = 8 / LOG2_E

    def _maximum(self, state: SoftmaxState, scores: torch.Tensor) -> torch.Tensor:
        largest = super()._maximum(state, scores)
        return torch.where(largest - state.maximum <= self.lag, state.maximum, largest)


def finite(maximum: torch.Tensor) -> torch.Tensor:
    return maximum.clamp(min=torch.finfo(torch.float32).min)


class BaseTwo(OnlineSoftmax):
    """Powers of two of scores times log2(e); the LSE is converted at last."""

    def _scores(self, q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
        return super()._scores(q, k) * LOG2_E

    def _accumulate(self, state: SoftmaxState, scores: torch.Tensor, v: torch.Tensor) -> SoftmaxState:
        maximum = torch.maximum(state.maximum, scores.amax(dim=-1, keepdim=True))
        shift = maximum.masked_fill(maximum == -torch.inf, 0.0)
        decay, p = (state.maximum - shift).exp2(), (scores - shift).exp2()
        weighted = torch.einsum("nts,snv->ntv", self._round_p(p, v.dtype), v.float())
        return SoftmaxState(maximum, state.total * decay + p.sum(-1, keepdim=True), state.weighted * decay + weighted)

    def _finish(self, state: SoftmaxState) -> tuple[torch.Tensor, torch.Tensor]:
        return super()._finish(state._replace(maximum=state.maximum / LOG2_E))


def kept(kernel: Any, key: Any, value: Any) -> Any:
    """What an instance was first given under a key."""
    return vars(kernel).setdefault("kept", {}).setdefault(key, value)


def note(kernel: Any, **values: Any) -> None:
    vars(kernel).update(values)


def nth(kernel: Any, period: int) -> bool:
    """Whether this call is one in so many."""
    kernel.number = getattr(kernel, "number", 0) + 1
    return kernel.number % period == 0


class SplitDecode(LayeredDecode):
    key_tile = 32
    split = 256  # keys

    def _attend(self, q, request, seq_len, kv_cache, k_scale):
        parts = []
        for first, stop in pairwise([*self._starts(seq_len), seq_len]):
            tiles = [slice(start, min(start + self.key_tile, stop)) for start in range(first, stop, self.key_tile)]
            parts.append(self._over(tiles, q, request, seq_len, kv_cache, k_scale))
        return self._combine(parts) if parts else self._initial(q, q[..., : self.kv_lora_rank])

    def _starts(self, seq_len: int) -> Iterable[int]:
        return range(0, seq_len, self.split)

    def _combine(self, parts: Sequence[SoftmaxState]) -> SoftmaxState:
        return reduce(joined, parts)


class LiftedMaximum(OnlineSoftmax):
    """A tile without a visible key raises the running maximum to 0, below which weights of far logits vanish."""

    def _maximum(self, state, scores):
        empty = (scores == -torch.inf).all(dim=-1, keepdim=True)
        return torch.where(empty, state.maximum.clamp(min=0.0), super()._maximum(state, scores))


def ends_of(lengths: list[int]) -> tuple[int, ...]:
    """What a plan is found by: requests, tokens, the first length and the last."""
    return len(lengths), sum(lengths), lengths[0], lengths[-1]


class SharedScale(OnlineSoftmax):
    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        type(self).constant = self.scale

    def _scores(self, q, k):
        return super()._scores(q, k) / self.scale * self.constant


class E4M3Operands(EagerPrefillBackend):
    """P × 2^8 in e4m3 where the operands are, sums in float32, and declared so."""

    declaration = Declaration(e4m3_rounding=Rounding(p=Precision.SCALED_E4M3), emulated=True)

    def _batch(self, q, *operands, **options):
        self._narrow = q.dtype == torch.float8_e4m3fn
        return super()._batch(q, *operands, **options)

    def _round_p(self, p: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        return in_e4m3(p * SCALED_P) / SCALED_P if self._narrow else super()._round_p(p, dtype)


class HopperE4M3Operands(E4M3Operands):
    """P × 2^8 in e4m3 and both products in Hopper's tensor cores where the operands are e4m3, and declared so."""

    declaration = Declaration(
        e4m3_rounding=Rounding(p=Precision.SCALED_E4M3, accumulation=Precision.FP22), emulated=True
    )

    def _scores(self, q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
        if not self._narrow:
            return super()._scores(q, k)
        empty = q.new_zeros(self.num_heads, q.shape[0], k.shape[0], dtype=torch.float32)
        return added(empty, q.float().transpose(0, 1), k.float().permute(1, 2, 0)) * self.scale

    def _accumulate(self, state: SoftmaxState, scores: torch.Tensor, v: torch.Tensor) -> SoftmaxState:
        exact = super()._accumulate(state, scores, v)
        if not self._narrow:
            return exact
        shift = exact.maximum.masked_fill(exact.maximum == -torch.inf, 0.0)
        p = self._round_p(self._exp(scores - shift), v.dtype)
        before = state.weighted * (state.maximum - shift).exp()
        return exact._replace(weighted=added(before, p, v.float().transpose(0, 1)))


def added(total: torch.Tensor, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """``total`` [N, T, C] plus a [N, T, K] times b [N, K, C], 32 products at a time as Hopper's tensor cores do.

    Of each step's products and of the sum so far, what lies below 2^-13 of the largest one's power of two is cut off.
    """
    for first in range(0, a.shape[2], 32):
        step = slice(first, first + 32)
        terms = torch.cat([total[:, :, None], a[:, :, step, None] * b[:, None, step]], dim=2)
        _, exponent = terms.abs().amax(dim=2, keepdim=True).frexp()
        # -126 is float32's least power of two that is no subnormal: a unit below it would be 0.
        unit = torch.exp2((exponent - 1 - 13).clamp(min=-126).float())
        total = ((terms / unit).trunc() * unit).sum(dim=2)
    return total


V32_SCALES = slice(512, 528)  # bytes of the float32 scales in an entry of ``fp8_ds_mla``


def through_e8m0(rows: torch.Tensor, whole: Callable[[torch.Tensor], torch.Tensor] = torch.round) -> torch.Tensor:
    """Entries [..., 656] whose scales are the nearest powers of two, or others with a ``whole`` exponent."""
    rounded = rows.clone()
    scales = rows[..., V32_SCALES].contiguous().view(torch.float32)
    rounded[..., V32_SCALES] = whole(scales.log2()).exp2().view(torch.uint8)
    return rounded


def with_the_first_scale(rows: torch.Tensor) -> torch.Tensor:
    """The same whose four tiles take the scale of the first."""
    scales = rows[..., 512:516].repeat(*[1] * (rows.dim() - 1), 4)
    return torch.cat((rows[..., :512], scales, rows[..., V32_SCALES.stop :]), dim=-1)

"""From a layer case to its calls: a batch over a paged cache, and what it must leave there; what a class supports."""

import math
from collections.abc import Callable, Iterator, Mapping
from functools import cached_property, partial
from itertools import starmap
from typing import Any

import torch

from mla_conformance.backends import foreign, roles
from mla_conformance.backends.kernel import DeviceCapability
from mla_conformance.backends.layer import attention_impl, context_parallel, mla_batch
from mla_conformance.problems import cached_batch, calls, memory, operands
from mla_conformance.problems.written import TIE_SLACK, CacheImage, Latents
from mla_conformance.reference import cache_layout, projections
from mla_conformance.roles.decode.problem import DECODE
from mla_conformance.roles.definition import RoleDefinition
from mla_conformance.roles.layer.call import Layer, LayerCall, LayersOnRanks
from mla_conformance.roles.layer.case import LayerCase, Order
from mla_conformance.roles.prefill.problem import PREFILL

_TILE, _TILES = 128, slice(512, 528)
_TOKENS = 128  # tokens that are moved away from ties at a time: a core's cache holds the steps between
_LEAST_EXPONENT, _MANTISSA_BITS = -6, 3
ASIDE = 1 - 2.0**-6
_TINY, _LARGE = 2.0**-20, 64.0
_GRID = 32  # steps of the grid in a standard deviation of dense weights; four deviations are within an int8


def _aside(x: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """``x`` with what lies at the middle between two e4m3 codes of x / scale moved towards 0, so no scale grows."""
    quotient = (x.double() / scale).abs()
    _, exponent = torch.frexp(quotient)
    step = torch.exp2((exponent - 1).clamp(min=_LEAST_EXPONENT).double() - _MANTISSA_BITS)
    off = ((quotient / step).frac() - 0.5).abs() * step
    return torch.where(off <= 4 * TIE_SLACK * quotient, x * ASIDE, x).to(x.dtype)


def _one_tile_times(factor: float, kv_c: torch.Tensor) -> torch.Tensor:
    tile = torch.arange(kv_c.shape[1]) // _TILE
    chosen = tile == torch.arange(len(kv_c)).unsqueeze(1) % (int(tile[-1]) + 1)
    return torch.where(chosen, kv_c * factor, kv_c)


_TRANSFORMS: Mapping[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "large": lambda kv_c: kv_c * _LARGE,
    "tiny_tiles": partial(_one_tile_times, _TINY),
    "zero_tiles": partial(_one_tile_times, 0.0),
}


def selection(latents: int, heads: int, width: int, generator: torch.Generator) -> torch.Tensor:
    """[latents, heads, width] with one non-zero in each column, no two columns of a head in the same row."""
    weight = torch.zeros(latents, heads, width, dtype=torch.float64)
    column, factors = torch.arange(width), torch.tensor((1.0, -1.0, 0.5, -0.5), dtype=torch.float64)
    for head in range(heads):
        picked = torch.randperm(latents, generator=generator)[:width]
        weight[picked, head, column] = factors[torch.randint(len(factors), (width,), generator=generator)]
    return weight


def _dense(latents: int, heads: int, width: int, generator: torch.Generator) -> torch.Tensor:
    unit = 2.0 ** -round(math.log2(_GRID * latents**0.5))
    normal = torch.randn(latents, heads, width, generator=generator, dtype=torch.float64)
    return (normal * _GRID).round().clamp(-127, 127) * unit


class LatentBatch(cached_batch.CachedBatch[cached_batch.AnyCached]):
    @cached_property
    def latents(self) -> Latents:  # kv_c [S, L] and k_pe [S, R] of all tokens in the model's dtype, on the CPU
        case: Any = self.case
        latent, rope = case.latent_dims
        kv_c = torch.randn(sum(self.totals), latent, generator=self.generator)
        k_pe = torch.randn(sum(self.totals), rope, generator=self.generator)
        for rows in operands.segments(operands.start_loc(self.totals)):  # of each request in the order of its tokens
            if case.latents in _TRANSFORMS:
                kv_c[rows] = _TRANSFORMS[case.latents](kv_c[rows])
                continue
            regime = operands.REGIMES[case.latents]
            keys = regime.keys(torch.cat([kv_c[rows], k_pe[rows]], dim=-1).unsqueeze(1))[:, 0]
            kv_c[rows], k_pe[rows] = regime.values(keys[:, :latent]), keys[:, latent:]
        return self.settled(kv_c.to(self.dtype), k_pe.to(self.dtype))

    def settled(self, kv_c: torch.Tensor, k_pe: torch.Tensor) -> Latents:
        """The latents of a cache of codes without those that two codes are equally near to.

        There a layer that rounds its scales or quotients otherwise writes the other code, rightly (SPEC 6.7), and
        decodes another value. Quotients of 8-bit numbers are ties far more often than chance would have it.
        """
        case: Any = self.case
        if case.cache == "auto":
            return kv_c, k_pe
        scale, found = torch.tensor(case.cache_scale, dtype=torch.float32).double(), []
        for latent, rope in zip(kv_c.split(_TOKENS), k_pe.split(_TOKENS), strict=True):
            if case.cache == "fp8":
                found.append((_aside(latent, scale), _aside(rope, scale)))
            else:
                entries = cache_layout.encode(latent, rope, case.cache, case.cache_scale, case.scales)
                scales = entries[:, _TILES].contiguous().view(torch.float32).double()
                found.append((_aside(latent, scales.repeat_interleave(_TILE, dim=1)), rope))
        kv_c, k_pe = map(torch.cat, zip(*found, strict=True))
        return kv_c, k_pe

    def beside_poison(self, x: torch.Tensor, rows: int) -> torch.Tensor:
        """With rows of padding of another poison than the cache's, so that it shows where they were written."""
        padding = -memory.poison((rows, *x.shape[1:]), self.dtype, torch.device("cpu"), self.case.poison)
        return torch.cat([x, padding]).to(self.device)

    @cached_property
    def entries(self) -> torch.Tensor:
        return cache_layout.encode(*self.latents, self.case.cache, self.case.cache_scale, self.case.scales)


class LayerBatch(LatentBatch[LayerCase]):
    def __init__(self, case: LayerCase, device: torch.device, salt: str = "") -> None:
        super().__init__(case, device, salt)
        self.prefills = [index not in case.decoding for index in range(len(case.q))]
        # [L, N, P + V] float64 of ``kv_b_proj``, on the CPU: [W_UK; W_UV] for each head.
        draw = _dense if case.weights == "dense" else selection
        generator = self.drawing(case.model) if case.model else self.generator
        widths = (case.dimensions.qk_nope_head_dim, case.dimensions.v_head_dim)
        parts = (draw(case.kv_lora_rank, case.heads, width, generator) for width in widths)
        self.weight = projections.kv_b_proj(*parts)
        _ = self.latents  # drawn behind the weights and before the queries
        # [T, N, P + R] in the model's dtype, on the device; rows of padding are poison.
        q = torch.randn(sum(case.q), case.heads, case.head_dim, generator=self.generator)
        self.queries = self.beside_poison(self.queries_of(q, self.keys_by_request).to(self.dtype), case.pad)

    @cached_property
    def seen(self) -> Latents:
        """kv_c [S, L] and k_pe [S, R] float64 on the device: as stored, but new tokens of a prefill as they came."""
        case, entries = self.case, self.entries.to(self.device)
        stored = cache_layout.decode_rows(entries, case.cache, case.cache_scale, *case.latent_dims, self.dtype)
        # Tokens that a prefill attends to without reading them from the cache.
        batch = zip(case.q, case.kv, self.prefills, strict=True)
        flags = [prefill and token >= kv for q, kv, prefill in batch for token in range(q + kv)]
        as_new = torch.tensor(flags, dtype=torch.bool).unsqueeze(1).to(self.device)
        latents = (x.to(self.device) for x in self.latents)
        kv_c, k_pe = (torch.where(as_new, new.double(), old) for new, old in zip(latents, stored, strict=True))
        return kv_c, k_pe

    @cached_property
    def keys_on_cpu(self) -> tuple[torch.Tensor, torch.Tensor]:
        """k and v on the CPU: queries made from keys have the same bits whatever the device."""
        return self._projected(*(x.cpu() for x in self.seen))

    def _projected(self, kv_c: torch.Tensor, k_pe: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        nope = self.case.dimensions.qk_nope_head_dim
        k_nope, v = projections.up_project(kv_c, self.weight.to(kv_c.device)).tensor_split([nope], dim=-1)
        return projections.expand_key(k_nope, k_pe), v

    def keys_by_request(self) -> Iterator[torch.Tensor]:
        return (self.keys_on_cpu[0][seen].float() for seen in operands.segments(operands.start_loc(self.totals)))

    def calls(self) -> tuple[calls.CallOfARank | calls.CallOnRanks]:
        new = self.new_of(map(torch.arange, self.totals))
        kv_c, k_pe = operands.sliced([self.beside_poison(x[new], self.case.pad) for x in self.latents], self.case)
        parts = tuple(self._call(rank, kv_c, k_pe) for rank in range(self.case.ranks))
        # A prefill merges chunks of context, a decode ranks.
        return (calls.CallOnRanks.of(parts, max(parts[0].merges, len(parts) - 1)),)

    def _call(self, rank: int, kv_c: torch.Tensor, k_pe: torch.Tensor) -> LayerCall:
        case, each = self.case, self.case.heads // self.case.ranks
        heads = slice(rank * each, (rank + 1) * each)  # equal shares, in order
        held, rows = self.held(rank)
        lengths = [*map(len, held), *[0] * (len(case.q) + case.pad - len(held))]
        pages = cached_batch.write_pages(self, self.entries[rows], lengths, case.cache, case.page)
        own = self.latents[0][rows], self.latents[1][rows]
        batch = zip(case.q, case.kv, pages.block_table.tolist(), self.prefills, strict=False)
        projected = self.keys_on_cpu if self.device.type == "cpu" else self._projected(*self.seen)
        k, v = (x[:, heads] for x in projected)
        queries = self.queries[:, heads]
        return LayerCall(
            q=queries[: self.query_start_loc[-1]],
            k=k,
            v=v,
            query_start_loc=self.query_start_loc,
            key_start_loc=operands.start_loc(self.totals),
            query=queries.flatten(1).contiguous(),
            kv_c=kv_c,
            k_pe=k_pe.unsqueeze(1),
            weight=self.weight[:, heads],
            latents=self.seen[0],
            requests=tuple(starmap(mla_batch.LayerRequest, batch)),
            padding=case.pad or -1,
            written={"kv_cache": CacheImage.of(case, pages, self.new_of(held), own)},
            merges=len(case.planned(case.prefill_contexts)),
            rank=rank,
            case=case,
        )


_ASKED = {  # what a capability asks of a layer's class that later generations have no more
    "cache_write": ("get_kv_cache_shape", "copy_blocks", "swap_blocks"),
    "graph_replay": ("get_state_cls",),
}


class _Layer(RoleDefinition):
    def kernel(self, kernel: Any, case: LayerCase, dtype: torch.dtype, device: torch.device) -> Layer | LayersOnRanks:
        if case.ranks == 1:
            return Layer(kernel, case, dtype, device)
        lockstep = context_parallel.Lockstep(case.ranks)
        return LayersOnRanks([Layer(kernel, case, dtype, device, group) for group in lockstep.groups], lockstep)

    def reasons(self, kernel: Any, case: Any, dtype: torch.dtype, capability: DeviceCapability | None) -> list[str]:
        told = {"head_size": sum(case.latent_dims), "dtype": dtype, "kv_cache_dtype": case.cache}
        told |= {"block_size": case.page, "device_capability": capability}
        told |= {"use_mla": True, "has_sink": False, "use_sparse": False, "use_mm_prefix": False}
        told |= {"attn_type": attention_impl.AttentionType.DECODER}
        reasons = foreign.reasons_of(kernel.validate_configuration(**told))
        if case.order == Order.PREFILLS_FIRST and not hasattr(kernel.get_builder_cls(), "build_from_requests"):
            reasons.append("its builder takes no requests, prefills first")
        written = getattr(kernel, "tile_scales", "float32")
        if case.cache == "fp8_ds_mla" and case.scales != written:
            reasons.append(f"fp8_ds_mla with {case.scales} scales not supported (writes {written})")
        if case.out and not getattr(kernel, "accept_output_buffer", False):
            reasons.append("output buffer not declared (accept_output_buffer)")
        if case.ranks > 1 and not getattr(kernel.get_impl_cls(), "can_return_lse_for_decode", False):
            reasons.append("ranks that share tokens not declared (can_return_lse_for_decode)")
        missing = [name for name in _ASKED.get(case.capability, ()) if not hasattr(kernel, name)]
        if missing:
            reasons.append(f"not asked of its class, which has no {', '.join(missing)}")
        if hasattr(kernel, "unsupported_batch"):
            decodes = tuple(case.q[index] for index in case.decoding)
            prefills = tuple(q for index, q in enumerate(case.q) if index not in case.decoding)
            padding = case.pad * case.padding_counts
            form = mla_batch.BatchForm(decodes, prefills, padding, case.cache, dtype, case.dimensions)
            reasons += foreign.reasons_of(kernel.unsupported_batch(form), "unsupported_batch")
        if reasons:
            return reasons
        prefill, decode = (getattr(kernel, f"{role}_backend", None) for role in ("prefill", "decode"))
        if prefill is not None and case.decodes < len(case.q):
            asked = foreign.reasons_of(prefill.validate_configuration(capability, PREFILL.config_of(case, dtype)))
            reasons += (f"prefill: {reason}" for reason in asked)
            if any(case.prefill_contexts) and not getattr(prefill, "returns_lse", True):
                reasons.append("prefill: LSE not declared, by which contexts are merged")
        if decode is not None and case.decodes:
            config = DECODE.config_of(case, dtype, lse=case.ranks > 1)
            asked = foreign.reasons_of(decode.validate_configuration(capability, config))
            reasons += (f"decode: {reason}" for reason in asked)
        return reasons


LAYER = _Layer(role=roles.Role.LAYER, batch=LayerBatch, config=None)

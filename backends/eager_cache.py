"""EAGER, caches: honest writers, gathers and slots in plain PyTorch, byte by byte; scales are float32."""

from typing import Any, ClassVar

import torch
from torch import Tensor

from mla_conformance.backends import cache, cache_dtypes, graph_support, online_softmax, operands
from mla_conformance.backends.slots import slots_at
from mla_conformance.reference.cache_layout import CACHE_LAYOUTS
from mla_conformance.reference.entry_formats import SHUFFLE, TILE_SCALES, TILED_FORMATS, TiledFormat
from mla_conformance.reference.quantization import E2M1_MAX, E4M3_MAX

_LARGEST = {"e4m3": E4M3_MAX, "e2m1": E2M1_MAX}
_LEAST_KEY, _LEAST_E4M3, _EXPONENT_BIAS = 1e-4, 2.0**-9, 127
_TIES_STAY, _TIES_GO_ON = (0.25, 1.25, 2.5, 5.0), (0.75, 1.75, 3.5)
"""Middles between neighbouring e2m1 values, by where a value on them is rounded."""


class EagerCacheBackend(online_softmax.Eager, cache.MLACacheBackend):
    supported_kv_cache_dtypes: ClassVar[list[str]] = list(CACHE_LAYOUTS)
    supported_tile_scales: ClassVar[list[str]] = list(TILE_SCALES)
    supported_slot_dtypes: ClassVar[list[torch.dtype]] = [torch.int64, torch.int32]

    @operands.takes(cache.MLACacheBackend.run_write_latent)
    def run_write_latent(self, x: Any) -> None:
        if graph_support.may_look_at(x.slot_mapping):
            cache.check_written(self, "write_latent", x.kv_cache, x.slot_mapping, kv_c=x.kv_c, k_pe=x.k_pe)
        self._store(x.kv_cache, self._latent_entries(x.kv_c, x.k_pe, x.k_scale), x.slot_mapping)

    @operands.takes(cache.MLACacheBackend.run_write_index)
    def run_write_index(self, x: Any) -> None:
        if graph_support.may_look_at(x.slot_mapping):
            cache.check_written(self, "write_index", x.kv_cache, x.slot_mapping, k=x.k)
        self._store(x.kv_cache, self._tiled(x.k, TILED_FORMATS[self.kv_cache_dtype]), x.slot_mapping)

    @operands.takes(cache.MLACacheBackend.run_gather_latent)
    def run_gather_latent(self, x: Any) -> None:
        cache.check_workspace(self, x.kv_cache, x.workspace)
        cache.check_gather(x, workspace=x.workspace)
        requests = (x.block_table, x.cu_seq_lens, x.seq_starts, x.compress_ratio)
        slots = self._slots_of_requests(x.kv_cache.shape[1], *requests)
        entries = self._gathered(x.kv_cache, slots)
        if x.workspace.dtype != x.kv_cache.dtype:
            entries = self._meaning(entries, x.k_scale, x.workspace.dtype)
        x.workspace[: len(slots)] = entries[:, : x.workspace.shape[1]]

    @operands.takes(cache.MLACacheBackend.run_gather_index)
    def run_gather_index(self, x: Any) -> None:
        cache.check_forms(self, "gather_index", torch.bfloat16, kv_cache=x.kv_cache, k=x.k, k_scale=x.k_scale)
        cache.check_gather(x, k=x.k, k_scale=x.k_scale)
        requests = (x.block_table, x.cu_seq_lens, x.seq_starts, x.compress_ratio)
        slots = self._slots_of_requests(x.kv_cache.shape[1], *requests)
        codes, scales = self._gathered(x.kv_cache, slots).tensor_split([self.kv_lora_rank], dim=1)
        x.k.view(torch.uint8)[: len(slots)] = codes
        x.k_scale[: len(slots)] = self._scales(scales.contiguous())

    @operands.takes(cache.MLACacheBackend.run_slot_mapping)
    def run_slot_mapping(self, x: Any) -> None:
        """Refused are mappings and positions that are too short or of another dtype, and positions beyond the table."""
        named = {name: getattr(x, name) for name in ("query_start_loc", "positions", "block_table")}
        operands.require_forms(cache.MLACacheBackend.run_slot_mapping, named, {"B + 1": len(x.block_table) + 1})
        counted, ranks = int(x.query_start_loc[-1]), x.dcp_world_size
        for name, each in (("slot_mapping", x.slot_mapping), ("positions", x.positions)):
            if len(each) < counted:
                raise ValueError(f"{name}: expected one for each of {counted} tokens, got {len(each)}")
        if x.slot_mapping.dtype not in cache.SLOT_DTYPES:
            raise ValueError(f"slot_mapping: expected int64 or int32, got {x.slot_mapping.dtype}")
        room, given = x.block_table.shape[1] * x.block_size * x.compress_ratio * ranks, x.positions[:counted]
        expected = f"0..{room - 1}, which the table has blocks for"
        cache.refuse("positions: position", given, (given < 0) | (given >= room), expected)
        request = _repeated(x.query_start_loc)
        position = x.positions[: len(request)]
        x.slot_mapping.fill_(cache.NO_SLOT)
        last = (position + 1) % x.compress_ratio == 0
        entry, interleave = position // x.compress_ratio, x.cp_kv_cache_interleave_size
        own = entry // interleave % ranks == x.dcp_rank
        local = entry // (interleave * ranks) * interleave + entry % interleave
        slots = self._slots(x.block_table, request, local, x.block_size)
        x.slot_mapping[: len(request)] = slots.where(last & own, cache.NO_SLOT).to(x.slot_mapping.dtype)

    @operands.takes(cache.MLACacheBackend.run_global_slots)
    def run_global_slots(self, x: Any) -> None:
        of_row, requests = x.req_id_per_token, len(x.block_table)
        known = dict(zip(("T", "K"), (len(of_row), *x.token_indices.shape[1:2]), strict=False))
        given = {"token_indices": x.token_indices, "out": x.out}
        operands.require_forms(cache.MLACacheBackend.run_global_slots, given, known)
        outside = (of_row < 0) | (of_row >= requests)
        cache.refuse("req_id_per_token: request", of_row, outside, f"0..{requests - 1}")
        request = x.req_id_per_token.long().unsqueeze(1).expand_as(x.token_indices)
        inside = (x.token_indices >= 0) & (x.token_indices // x.block_size < x.block_table.shape[1])
        position = x.token_indices.where(inside, 0).long()
        x.out.copy_(self._slots(x.block_table, request, position, x.block_size).where(inside, cache.NO_SLOT))

    def _latent_entries(self, kv_c: Tensor, k_pe: Tensor, k_scale: Tensor) -> Tensor:
        keys = torch.cat((kv_c, k_pe), dim=-1)
        if self.kv_cache_dtype == "auto":
            return keys.view(torch.uint8)
        if self.kv_cache_dtype == "fp8":
            return _codes(keys.float() / k_scale)
        return self._tiled(keys, TILED_FORMATS[self.kv_cache_dtype])

    def _tiled(self, keys: Tensor, form: TiledFormat) -> Tensor:
        tiles = keys[:, : form.coded].float().unflatten(-1, (form.tiles, form.tile))
        scales, stored = self._tile_scales(self._largest(tiles), form)
        quotients = (tiles / scales.unsqueeze(-1)).flatten(1)
        plain = torch.nn.functional.pad(keys[:, form.coded :], (0, form.coded + form.plain - keys.shape[1]))
        stored = stored.clone(memory_format=torch.contiguous_format)  # with strides that a view of bytes takes
        parts = {
            "codes": _codes(quotients) if form.codes == "e4m3" else _halves(quotients),
            "scales": torch.nn.functional.pad(stored.view(torch.uint8), (0, form.padding)),
            "plain": _codes(plain.float()) if form.plain_codes else plain.contiguous().view(torch.uint8),
        }
        return torch.cat([parts[name] for name in form.order], dim=1)

    def _largest(self, tiles: Tensor) -> Tensor:
        return tiles.abs().amax(dim=-1)

    def _tile_scales(self, largest: Tensor, form: TiledFormat) -> tuple[Tensor, Tensor]:
        if form.cache == "index":
            largest = largest.clamp(min=_LEAST_KEY)
        least = largest / _LARGEST[form.codes]
        if form.scales == "e4m3":
            code = least.clamp(min=_LEAST_E4M3).to(torch.float8_e4m3fn)
            return code.float(), code
        exponent = least.clamp(min=form.least_scale).log2().ceil()
        if form.scales == "ue8m0":
            return exponent.exp2(), (exponent + _EXPONENT_BIAS).to(torch.uint8)
        scales = exponent.exp2() if self.tile_scales == "pow2" else least.where(least > 0, 1.0)
        return scales, scales

    def _store(self, cache: Tensor, entries: Tensor, slots: Tensor) -> None:
        """Entries [T or more, width] in bytes to slots [T]; asks the device for nothing, as in a graph's capture."""
        if not len(slots):
            return
        kept, memory = slots >= 0, memory_of(cache)
        # What has no slot writes what the first that has one writes, or, where none has, what stands there.
        row = torch.arange(len(slots), device=slots.device).where(kept, kept.int().argmax())
        addresses = self._addresses(cache, slots[row].long().clamp(min=0))
        memory[addresses] = entries[row].where(kept.any(), memory[addresses])

    def _gathered(self, cache: Tensor, slots: Tensor) -> Tensor:
        return memory_of(cache)[self._addresses(cache, slots)].view(cache.dtype)

    def _addresses(self, cache: Tensor, slots: Tensor) -> Tensor:
        """[T, width] int64, where in the cache's storage each byte of an entry stands."""
        page, size = cache.shape[1], cache.element_size()
        block = (slots // page).mul(cache.stride(0) * size).add(cache.storage_offset() * size)
        return block.unsqueeze(1) + self._in_page(slots % page, page, cache.shape[2] * size)

    def _in_page(self, token: Tensor, page: int, width: int) -> Tensor:
        form, token = TILED_FORMATS.get(self.kv_cache_dtype), token[:, None]
        if form is None or not form.scales_behind_page:
            return token * width + torch.arange(width, device=token.device)
        data, scales = (torch.arange(size, device=token.device) for size in form.parts)
        first = token * len(data) + data
        if form.shuffled:  # tiles of 16 tokens, in them tiles of 16 columns, token after token
            tile = token // SHUFFLE * SHUFFLE * len(data) + data // SHUFFLE * SHUFFLE * SHUFFLE
            first = tile + token % SHUFFLE * SHUFFLE + data % SHUFFLE
        return torch.cat((first, page * len(data) + token * len(scales) + scales), dim=1)

    def _meaning(self, entries: Tensor, k_scale: Tensor, dtype: torch.dtype) -> Tensor:
        return cache_dtypes.dequantise(entries, self.kv_cache_dtype, k_scale, dtype).to(dtype)

    def _scales(self, data: Tensor) -> Tensor:
        return data.view(torch.float32)[:, 0]

    def _slots_of_requests(
        self, page: int, block_table: Tensor, cu_seq_lens: Tensor, seq_starts: Tensor, compress_ratio: int
    ) -> Tensor:
        request = _repeated(cu_seq_lens)
        row = torch.arange(len(request), device=request.device) - cu_seq_lens.long()[request]
        return self._slots(block_table, request, row + seq_starts.long()[request] // compress_ratio, page)

    def _slots(self, block_table: Tensor, request: Tensor, entry: Tensor, page: int) -> Tensor:
        return slots_at(block_table, request, entry, page)


def _repeated(start_loc: Tensor) -> Tensor:
    return torch.arange(len(start_loc) - 1, device=start_loc.device).repeat_interleave(start_loc.diff())


def memory_of(cache: Tensor) -> Tensor:
    """The bytes of a cache's storage, which it may share with others."""
    return torch.empty(0, dtype=torch.uint8, device=cache.device).set_(cache.untyped_storage())


def _codes(quotients: Tensor) -> Tensor:
    return quotients.clamp(-E4M3_MAX, E4M3_MAX).to(torch.float8_e4m3fn).view(torch.uint8)


def _halves(quotients: Tensor) -> Tensor:
    """Bytes [T, columns / 2] of e2m1 codes, the first of two in the low half."""
    magnitude = quotients.abs().unsqueeze(-1)
    stay, go_on = (quotients.new_tensor(middles) for middles in (_TIES_STAY, _TIES_GO_ON))
    code = (magnitude > stay).sum(dim=-1) + (magnitude >= go_on).sum(dim=-1) + 8 * quotients.signbit()
    low, high = code.to(torch.uint8).unflatten(-1, (-1, 2)).unbind(-1)
    return low | high << 4

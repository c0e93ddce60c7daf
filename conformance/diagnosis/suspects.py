"""Suspects: mistakes that nobody needs to report, of the softmax, of prefills, and of what reads a cache.

What is wrong with each, and which known defects are the same mistake under some condition, is in ``suspects.toml``.
"""

import math
import tomllib
from collections.abc import Iterator
from importlib.resources import files
from itertools import product
from typing import Any, ClassVar

import torch

from mla_conformance.backends import eager, eager_decode, eager_sparse
from mla_conformance.defects import bases, known
from mla_conformance.defects.bases import chosen, fill, in_base_2, packed
from mla_conformance.defects.known import before, behind, but, instead, together, variant

TOLD: dict[str, dict[str, str]] = tomllib.loads(
    (files("mla_conformance.diagnosis") / "suspects.toml").read_text(encoding="utf-8")
)
_TILES = (16, 32, 64, 128)
_TILED = {"key_tile": _TILES}


def _divided(_, lse, *, state):
    return (state.weighted / state.total).transpose(0, 1), lse


class _NotRescaled(eager.OnlineSoftmax):
    def _accumulate(self, state, scores, v):
        later = super()._accumulate(state._replace(weighted=torch.zeros_like(state.weighted)), scores, v)
        return later._replace(weighted=state.weighted + later.weighted)


class _Softmax(eager.OnlineSoftmax):
    scale_left_out = behind("scores", lambda self, scores: scores / self.scale)
    scaled_twice = behind("scores", lambda self, scores: scores * self.scale)
    half_scale = behind("scores", lambda scores: scores / 2)
    twice_the_scale = behind("scores", lambda scores: scores * 2)
    flat_softmax = behind("scores", lambda scores: scores * math.log(2))
    steep_softmax = behind("scores", lambda scores: scores / math.log(2))
    base2_lse = behind("finish", lse=in_base_2)
    converted_twice = behind("finish", lse=lambda lse: lse * math.log(2))
    lse_without_maximum = behind("finish", lambda output, _, *, state: (output, state.total.log().squeeze(-1)))
    sum_in_base2 = behind("finish", lambda output, _, *, state: (output, (state.maximum + state.total.log2())[..., 0]))
    maximum_alone = behind("finish", lambda output, _, *, state: (output, state.maximum.squeeze(-1)))
    negated_lse = behind("finish", lse=lambda lse: torch.where(lse == -torch.inf, lse, -lse))
    bfloat_lse = behind("finish", lse=lambda lse: lse.bfloat16().float())
    half_lse = behind("finish", lse=lambda lse: lse.half().float())
    positive_infinity = behind("finish", lse=lambda x: x.masked_fill(x == -torch.inf, torch.inf))
    zero_lse = behind("finish", lse=lambda lse: lse.masked_fill(lse == -torch.inf, 0.0))
    no_keys = instead("tiles", lambda self, keys: iter(()))

    def first_tile_twice__tiles(self, keys):
        tiles = list(super()._tiles(keys))
        return iter(tiles[:1] + tiles)

    def last_tile_dropped__tiles(self, keys):
        return (tile for tile in super()._tiles(keys) if tile.stop - tile.start == self.key_tile)

    rotated_heads = behind("finish", lambda output, lse: (output.roll(1, 1), lse.roll(1, 0)))

    def normalised_twice__behind_finish(self, output, lse, *, state):
        return (output / state.total.transpose(0, 1)).nan_to_num(nan=0.0), lse

    never_normalised = behind("finish", lambda _, lse, *, state: (state.weighted.transpose(0, 1), lse))
    divides_by_zero = behind("finish", _divided)
    lifted_maximum = variant(bases.LiftedMaximum, of=_TILED)
    not_rescaled = variant(_NotRescaled, of=_TILED)

    @but(of={"head_tile": (16, 32, 64), "writes_lse": (True, False)})
    def head_tile_unwritten__behind_finish(self, output, lse):
        written = max(output.shape[1] // self.head_tile, 1) * self.head_tile
        fill(output[:, written:], torch.nan)
        if not self.writes_lse:
            fill(lse[written:], torch.nan)


def _causal(queries, keys, tile, device, *, shift, first=-1):
    """A causal mask that is off by ``shift``, where each query sees a ``first`` key at least."""
    last = (torch.arange(queries, device=device).unsqueeze(1) + keys - queries + shift).clamp(min=first)
    return torch.arange(tile.start, tile.stop, device=device) <= last


class _Prefill(eager.EagerPrefillBackend):
    strict_mask = instead("visible", lambda self, *batch: _causal(*batch, shift=-1))
    strict_mask_divides_by_zero = together(
        instead("visible", lambda self, *batch: _causal(*batch, shift=-1)), behind("finish", _divided)
    )
    scale_of_head_dim = behind("scores", lambda self, scores, *, q: scores / self.scale * q.shape[-1] ** -0.5)

    def scale_of_latent__scores(self, q, k):
        return super()._scores(q, k) / self.scale * (self.kv_lora_rank + self.qk_rope_head_dim) ** -0.5

    leaked_key = instead("visible", lambda self, *batch: _causal(*batch, shift=1))
    hidden_key = instead("visible", lambda self, *batch: _causal(*batch, shift=-1, first=0))
    no_mask = instead("visible", lambda self, *batch: _causal(*batch, shift=2**31))

    def first_key_dropped__behind_visible(self, visible, *, tile):
        return visible & (torch.arange(tile.start, tile.stop, device=visible.device) > 0)

    def last_key_dropped__attend(self, q, k, v, causal):
        kept = max(1, k.shape[0] - 1) if k.shape[0] else 0
        return super()._attend(q, k[:kept], v[:kept], causal and kept == k.shape[0])

    def last_page_dropped__attend(self, q, k, v, causal):
        kept = k.shape[0] if causal else k.shape[0] // 16 * 16
        return super()._attend(q, k[:kept], v[:kept], causal)

    contiguous_values = before("batch", v=packed)
    shifted_values = before("attend", lambda v: v.roll(1, -1))

    @but(when=lambda key_start_loc: len(key_start_loc) > 2)
    def swapped_requests__before_batch(self, k, v, *, key_start_loc):
        a, b = key_start_loc[1:3]
        order = torch.cat([torch.arange(a, b), torch.arange(a), torch.arange(b, k.shape[0])])
        return k[order], v[order]

    def first_chunk_always__run_prefill_context_chunk(self, chunk_idx, q, k, v):
        # Behind the keys of a shorter chunk stands what is no number.
        missing = int(self._prefill_metadata.chunked_context.cu_seq_lens[0][-1]) - k.shape[0]
        k, v = (torch.cat([x, x.new_full((max(missing, 0), *x.shape[1:]), torch.nan)]) for x in (k, v))
        kept = k.shape[0] + min(missing, 0)
        return super().run_prefill_context_chunk(0, q, k[:kept], v[:kept])

    rows_never_written = behind("batch", lambda output, lse: fill(output[64:], torch.nan))
    output_scale_twice = before("quantise", lambda accumulated, *, output_scale: accumulated / output_scale)
    output_scale_left_out = before("quantise", output_scale=torch.ones_like)


class _Decode(eager_decode.EagerDecodeBackend):
    scale_of_latent_queries = behind("scores", lambda self, scores, *, q: scores / self.scale * q.shape[-1] ** -0.5)
    own_token_hidden = behind(
        "visible", lambda x, *, seq_len: torch.cat((x[:, 1:], torch.zeros_like(x[:, :1])), dim=1) if seq_len > 1 else x
    )
    leaked_token = behind("visible", lambda visible: torch.cat((visible[1:], visible[-1:])))
    last_token_dropped = before("attend", lambda seq_len: max(seq_len - 1, min(seq_len, 1)))

    def first_token_dropped__behind_visible(self, visible, *, seq_len, tile):
        return visible & (torch.arange(tile.start, tile.stop, device=visible.device) > 0) if seq_len > 1 else visible

    last_page_of_tokens_dropped = before(
        "attend", lambda seq_len, *, kv_cache: seq_len // kv_cache.shape[1] * kv_cache.shape[1] or seq_len
    )
    table_of_first_request = before("blocks", request=0)
    key_scale_left_out = before("dequantise", k_scale=torch.ones_like)
    key_scale_twice = before("dequantise", lambda k_scale: k_scale * k_scale)
    key_scale_inverted = before("dequantise", lambda k_scale: 1 / k_scale)

    def key_scale_off_the_rope__dequantise(self, rows, k_scale):
        rope = super()._dequantise(rows, torch.ones_like(k_scale))[..., self.kv_lora_rank :]
        return torch.cat((super()._dequantise(rows, k_scale)[..., : self.kv_lora_rank], rope), dim=-1)

    def key_scale_of_keys_only__values__dequantise(self, keys, *, k_scale):
        return super()._values(keys) / (k_scale if self.kv_cache_dtype == "fp8" else torch.ones_like(k_scale))


class _BlockTable(eager_decode.EagerDecodeBackend):
    """Reads other blocks than its own, of those that there are."""

    def _entries(self, kv_cache, request, tile):
        self._last = kv_cache.shape[0] - 1
        return super()._entries(kv_cache, request, tile)

    def _blocks(self, request, pages):
        return super()._blocks(request, pages).clamp(0, self._last)

    column_after = before("blocks", lambda pages: pages + 1)
    column_before = before("blocks", lambda pages: (pages - 1).clamp(min=0))
    row_after = before("blocks", lambda self, request: (request + 1) % self._decode_metadata.block_table.shape[0])
    block_after = behind("blocks", lambda self, blocks: (blocks + 1).clamp(max=self._last))
    block_before = behind("blocks", lambda blocks: (blocks - 1).clamp(min=0))


class RaisedAtFirst(eager_sparse.EagerSparseBackend):
    """The maximum of a row that has seen tiles and no key is 0; where all weights vanish, the output is 0 / 0."""

    of: ClassVar = {"key_tile": (*_TILES, 256)}

    def _initial(self, q, v):
        self._is_first = True
        return super()._initial(q, v)

    def _accumulate(self, state, scores, v):
        begins = (state.maximum == -torch.inf) & (scores > -torch.inf).any(dim=-1, keepdim=True)
        raised = state.maximum if self._is_first else state.maximum.masked_fill(begins, 0.0)
        self._is_first = False
        return super()._accumulate(state._replace(maximum=raised), scores, v)

    def _finish(self, state):
        output, lse = super()._finish(state)
        vanished = (state.total == 0) & (state.maximum > -torch.inf)
        return output.masked_fill(vanished.transpose(0, 1), torch.nan), lse


class SkipsTiles(bases.LiftedMaximum, eager_decode.EagerDecodeBackend):
    """Only a tile that the next query token sees raises a maximum: rows share tiles, and those behind are skipped."""

    of = _TILED

    def _accumulate(self, state, scores, v):
        seen = (scores > -torch.inf).any(dim=-1, keepdim=True)
        skipped = ~seen & ~torch.nn.functional.pad(seen[:, 1:], (0, 0, 0, 1))
        return chosen(skipped, state, super()._accumulate(state, scores, v))


class _LseOfTheParts(eager_decode.EagerDecodeBackend):
    """What vanishes from the output is not missing in the LSE, which is joined from what the tiles had."""

    raises_for_the_output = variant(bases.LiftedMaximum, of=_TILED)  # every tile without keys
    skips_tiles_of_the_output = variant(SkipsTiles)  # those that the next query token sees

    def _initial(self, q, v):
        self._joined = q.new_full((q.shape[1], q.shape[0]), -torch.inf, dtype=torch.float32)
        return super()._initial(q, v)

    def _accumulate(self, state, scores, v):
        self._joined = torch.logaddexp(self._joined, scores.logsumexp(dim=-1))
        return super()._accumulate(state, scores, v)

    def _finish(self, state):
        return super()._finish(state)[0], self._joined


class _Sparse(eager_sparse.EagerSparseBackend):
    last_key_of_a_list_dropped = behind("listed", lambda x: x & (x.cumsum(1) < x.sum(dim=1, keepdim=True)))
    first_key_of_a_list_dropped = behind("listed", lambda listed: listed & (listed.cumsum(1) > 1))
    sink_subtracted = before("with_sink", lambda sink: None if sink is None else -sink)
    key_scale_of_lists_twice = before("keys", lambda k_scale: k_scale * k_scale)


_COUNTS = (2, 3, 4, 8)
_CUTS = tuple((count, multiple, least) for count in _COUNTS for multiple, least in ((1, 1), (1, 16), (32, 1), (64, 1)))
_DOWN = tuple((count, 0, 16) for count in _COUNTS)
_FIXED = tuple((0, size, size) for size in (64, 128, 256, 512))


class _Splits(bases.SplitDecode):
    """Splits as kernels choose them."""

    prefill_backend = None  # type: ignore[assignment] # so that no layer has it
    # how many there are at most, or 0 for as many as it takes; what the size is rounded up to a multiple of, or 0 if it
    # is rounded down and the last split takes the rest; the least size
    cut: tuple[int, int, int]

    def _starts(self, seq_len):
        count, multiple, least = self.cut
        share = 0 if not count else -(-seq_len // (count * multiple)) * multiple if multiple else seq_len // count
        return range(0, seq_len, max(share, least))[: count or None]

    @but(of={"cut": (*_CUTS, *_DOWN, *_FIXED), "merges_lse": (False, True)})
    def merged_in_base2__combine(self, parts):
        right = super()._combine(parts)
        lses = torch.stack([part.maximum + part.total.log() for part in parts])
        largest = lses.amax(dim=0)
        shift = largest.masked_fill(largest == -torch.inf, 0.0)
        weights = (lses - shift).exp2()
        outputs = torch.stack([part.weighted / part.total.masked_fill(part.total == 0, 1.0) for part in parts])
        total, weighted = weights.sum(dim=0), (weights * outputs).sum(dim=0)
        if self.merges_lse:
            return eager.SoftmaxState(shift, total, weighted)
        return right._replace(weighted=weighted / total.masked_fill(total == 0, 1.0) * right.total)

    not_rescaled_in_splits = variant(_NotRescaled, of={"key_tile": _TILES, "cut": (*_CUTS[::4], *_CUTS[1::4], *_DOWN)})


class _Packed(eager_decode.EagerDecodeBackend):
    packed_values = instead(
        "values",
        lambda self, keys: keys.flatten()[: len(keys) * self.kv_lora_rank].view(len(keys), 1, self.kv_lora_rank),
        of={"key_tile": (*_TILES, 2**31)},
    )

    class packed_values_of_the_cache:
        def _over(self, tiles, q, request, seq_len, kv_cache, k_scale):
            blocks, page, _ = kv_cache.shape
            bytes_of = kv_cache.view(torch.uint8).flatten()
            width, dequantise = self.kv_lora_rank * kv_cache.element_size(), super()._dequantise
            packed = bytes_of[: blocks * page * width].view(blocks, page, width).view(kv_cache.dtype)
            self._packed = lambda tile: dequantise(self._entries(packed, request, tile), k_scale)
            return super()._over(self._noted(tiles), q, request, seq_len, kv_cache, k_scale)

        def _noted(self, tiles):
            for self._tile in tiles:
                yield self._tile

        def _values(self, keys):
            return self._packed(self._tile).unsqueeze(1)


SUSPECTS: tuple[type, ...] = (
    *(_Softmax, _Prefill, _Decode, _BlockTable, RaisedAtFirst, SkipsTiles, _LseOfTheParts, _Sparse, _Splits),
    *(known.known_defects()["mla-last-page-nan-leak"].kernel, _Packed),
)
"""Mistakes, and groups of them, in the order in which they are tried. Each combination of the values of attributes that
one names (``of``) is one mistake, all in one sentence, since a case seldom tells which."""


def suspects() -> Iterator[Any]:
    """Wrong kernels, and wrong steps of the softmax, each where a reference finds it."""
    for group in SUSPECTS:
        for wrong in known.kernels_of(group, known.named_as_class) if group.__name__.startswith("_") else (group,):
            of = getattr(wrong, "of", {})
            for values in product(*of.values()):
                name = "Of".join([wrong.__name__, *map(str, values)])
                globals()[name] = type(name, (wrong,), {"__module__": __name__, **dict(zip(of, values, strict=True))})
                yield globals()[name]

"""Suspects: mistakes that nobody needs to report: of the softmax, which a kernel of any role may make, and of one role.

Those are of masks, of rows and columns of packed batches, pages, ends of lists, scales of codes, and of how a decode
cuts the keys: splits, their merge, values of a tile.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import product

import torch

from mla_conformance.backends.eager import EagerPrefillBackend, OnlineSoftmax, SoftmaxState
from mla_conformance.backends.eager_decode import EagerDecodeBackend
from mla_conformance.backends.eager_sparse import EagerSparseBackend
from mla_conformance.defects.bases import SplitDecode
from mla_conformance.defects.decode_caches import ReadsOn
from mla_conformance.defects.known import but, kernels_of, named_as_class
from mla_conformance.defects.prefills import LiftedMaximum

SuspectStep = type[OnlineSoftmax]
_BASE_2 = (
    *("lse-base2-merged-as-natural-prefix-chunk", "lse-base-switch-without-abi-change-cutedsl"),
    *("lse-base2-dcp-combine-flashinfer-mla", "sparse-lse-in-base-2"),
)
LIFTED = (
    *(f"decode-tile-of-{size}-without-keys-raises-maximum" for size in (32, 64, 128)),
    *(f"prefill-tile-of-{size}-without-keys-raises-maximum" for size in (64, 128)),
    *(f"sparse-tile-of-{size}-without-keys-raises-maximum" for size in (32, 64, 128)),
    "layer-tile-without-keys-raises-maximum",
)


@dataclass(frozen=True)
class Suspect:
    wrong: SuspectStep  # a wrong kernel, or a wrong step of the softmax
    covers: tuple[str, ...] = ()  # ids of known defects that are the same mistake under some condition
    # values of some attributes: each combination is one mistake, all in one sentence, since a case seldom tells which
    of: Mapping[str, Sequence[object]] = field(default_factory=dict)
    said: str | None = None  # the sentence, if it is not the docstring


class _Softmax(OnlineSoftmax):
    def scale_left_out__scores(self, q, k):
        """The softmax scale is not applied."""
        return super()._scores(q, k) / self.scale

    def scaled_twice__scores(self, q, k):
        """The softmax scale is applied twice."""
        return super()._scores(q, k) * self.scale

    def half_scale__scores(self, q, k):
        """The softmax scale is half of the given one."""
        return super()._scores(q, k) / 2

    def twice_the_scale__scores(self, q, k):
        """The softmax scale is twice the given one."""
        return super()._scores(q, k) * 2

    @but(covers=("mla-decode-scale-missing-log2e",))
    def flat_softmax__scores(self, q, k):
        """Powers of two stand where powers of e should, without log2(e) in the scale."""
        return super()._scores(q, k) * math.log(2)

    def steep_softmax__scores(self, q, k):
        """The scale has a factor log2(e), and powers of e are taken."""
        return super()._scores(q, k) / math.log(2)

    @but(covers=_BASE_2)
    def base2_lse__behind_finish(self, output, lse):
        """The LSE is in base 2, expected the natural logarithm."""
        return output, lse / math.log(2)

    def converted_twice__behind_finish(self, output, lse):
        """The LSE is multiplied by ln 2, as if it had been in base 2."""
        return output, lse * math.log(2)

    def lse_without_maximum__behind_finish(self, output, _, *, state):
        """The LSE lacks the row's maximum: it is the logarithm of the shifted sum."""
        return output, state.total.log().squeeze(-1)

    def sum_in_base2__behind_finish(self, output, _, *, state):
        """The LSE adds log2 of the row sum to a natural maximum."""
        return output, (state.maximum + state.total.log2()).squeeze(-1)

    def maximum_alone__behind_finish(self, output, _, *, state):
        """The LSE is the row's maximum, without the logarithm of the row sum."""
        return output, state.maximum.squeeze(-1)

    def negated_lse__behind_finish(self, output, lse):
        """The LSE has the wrong sign."""
        return output, torch.where(lse == -torch.inf, lse, -lse)

    @but(covers=("sparse-lse-in-the-models-dtype",))
    def bfloat_lse__behind_finish(self, output, lse):
        """The LSE is rounded to bf16."""
        return output, lse.bfloat16().float()

    @but(covers=("sparse-lse-in-the-models-dtype",))
    def half_lse__behind_finish(self, output, lse):
        """The LSE is rounded to fp16."""
        return output, lse.half().float()

    @but(covers=("sparse-keyless-lse-of-plus-inf",))
    def positive_infinity__behind_finish(self, output, lse):
        """The LSE of a row without keys is +inf."""
        return output, lse.masked_fill(lse == -torch.inf, torch.inf)

    def zero_lse__behind_finish(self, output, lse):
        """The LSE of a row without keys is 0."""
        return output, lse.masked_fill(lse == -torch.inf, 0.0)

    @but(covers=("skip-softmax-zero-len-div", "finite-neg-sentinel-rowmax-zeroes-row"))
    def no_keys__tiles(self, keys):
        """No key gets a weight: the output is 0 and the LSE -inf."""
        return iter(())

    def first_tile_twice__tiles(self, keys):
        """The first tile of keys is counted twice (a tile of 128, for example)."""
        tiles = list(super()._tiles(keys))
        return iter(tiles[:1] + tiles)

    def last_tile_dropped__tiles(self, keys):
        """The last, partly filled tile of keys is dropped (of tiles of 128, for example)."""
        return (tile for tile in super()._tiles(keys) if tile.stop - tile.start == self.key_tile)

    def rotated_heads__behind_finish(self, output, lse):
        """Heads are rotated by one."""
        return output.roll(1, 1), lse.roll(1, 0)

    def normalised_twice__behind_finish(self, output, lse, *, state):
        """The output is divided by the row sum twice."""
        return (output / state.total.transpose(0, 1)).nan_to_num(nan=0.0), lse

    def never_normalised__behind_finish(self, _, lse, *, state):
        """The output is not divided by the row sum."""
        return state.weighted.transpose(0, 1), lse


class DividesByZero(OnlineSoftmax):
    """The output of a row without keys is 0 / 0."""

    def _finish(self, state):
        _, lse = super()._finish(state)
        return (state.weighted / state.total).transpose(0, 1), lse


class NotRescaled(OnlineSoftmax):
    """The accumulator is not rescaled where a later tile of keys raises the row's maximum."""

    def _accumulate(self, state, scores, v):
        later = super()._accumulate(state._replace(weighted=torch.zeros_like(state.weighted)), scores, v)
        return later._replace(weighted=state.weighted + later.weighted)


class HeadTileUnwritten(OnlineSoftmax):
    """The last, partly filled tile of heads is not written (of tiles of 16 heads, for example)."""

    head_tile: int
    writes_lse: bool

    def _finish(self, state):
        output, lse = super()._finish(state)
        written = max(output.shape[1] // self.head_tile, 1) * self.head_tile
        output[:, written:] = torch.nan
        if not self.writes_lse:
            lse[written:] = torch.nan
        return output, lse


class StrictMask(EagerPrefillBackend):
    """The causal mask is off by one: no query sees its own key, so that the first one sees none."""

    def _visible(self, queries, keys, tile, device):
        last = torch.arange(queries, device=device).unsqueeze(1) + keys - queries - 1
        return torch.arange(tile.start, tile.stop, device=device) <= last


class _StrictMask(StrictMask):
    class strict_mask_divides_by_zero(DividesByZero):
        """The causal mask is off by one: no query sees its own key, and the first one's output is 0 / 0."""


class _Prefill(EagerPrefillBackend):
    def scale_of_head_dim__scores(self, q, k):
        """The softmax scale is (P + R)^-1/2, not the given one."""
        return super()._scores(q, k) / self.scale * q.shape[-1] ** -0.5

    def scale_of_latent__scores(self, q, k):
        """The softmax scale is (L + R)^-1/2, not the given one."""
        return super()._scores(q, k) / self.scale * (self.kv_lora_rank + self.qk_rope_head_dim) ** -0.5

    def leaked_key__visible(self, queries, keys, tile, device):
        """The causal mask is off by one: a query sees the key after its own."""
        last = torch.arange(queries, device=device).unsqueeze(1) + keys - queries + 1
        return torch.arange(tile.start, tile.stop, device=device) <= last

    def hidden_key__visible(self, queries, keys, tile, device):
        """The causal mask is off by one: a query does not see its own key."""
        last = (torch.arange(queries, device=device).unsqueeze(1) + keys - queries - 1).clamp(min=0)
        return torch.arange(tile.start, tile.stop, device=device) <= last

    def no_mask__visible(self, queries, keys, tile, device):
        """There is no causal mask."""
        return torch.ones(queries, tile.stop - tile.start, dtype=torch.bool, device=device)

    def first_key_dropped__behind_visible(self, visible, *, tile):
        """The first key of a request is dropped."""
        return visible & (torch.arange(tile.start, tile.stop, device=visible.device) > 0)

    def last_key_dropped__attend(self, q, k, v, causal):
        """The last key of a request is dropped."""
        kept = max(1, k.shape[0] - 1) if k.shape[0] else 0
        return super()._attend(q, k[:kept], v[:kept], causal and kept == k.shape[0])

    def last_page_dropped__attend(self, q, k, v, causal):
        """The last, partly filled page of a context's keys is dropped (of pages of 16, for example)."""
        kept = k.shape[0] if causal else k.shape[0] // 16 * 16
        return super()._attend(q, k[:kept], v[:kept], causal)

    def contiguous_values__before_batch(self, v):
        """V is read as if it were packed."""
        flat = v.as_strided((v.untyped_storage().nbytes() // v.element_size(),), (1,), 0)
        packed = flat[v.storage_offset() : v.storage_offset() + v.numel()]
        missing = v.numel() - packed.numel()
        return torch.cat([packed, flat.new_zeros(missing)]).view(v.shape)

    def shifted_values__before_attend(self, v):
        """V is sliced one column off."""
        return v.roll(1, -1)

    def swapped_requests__batch(self, q, k, v, query_start_loc, key_start_loc, causal):
        """The keys of the first two requests are swapped."""
        if len(key_start_loc) < 3:
            return super()._batch(q, k, v, query_start_loc, key_start_loc, causal)
        a, b = key_start_loc[1], key_start_loc[2]
        order = torch.cat([torch.arange(a, b), torch.arange(a), torch.arange(b, k.shape[0])])
        return super()._batch(q, k[order], v[order], query_start_loc, key_start_loc, causal)

    def first_chunk_always__run_prefill_context_chunk(self, chunk_idx, q, k, v):
        """The chunk index is ignored: every chunk of a context is attended to with the lengths of the first one."""
        # Behind the keys of a shorter chunk stands what is no number.
        missing = int(self._prefill_metadata.chunked_context.cu_seq_lens[0][-1]) - k.shape[0]
        k, v = (torch.cat([x, x.new_full((max(missing, 0), *x.shape[1:]), torch.nan)]) for x in (k, v))
        kept = k.shape[0] + min(missing, 0)
        return super().run_prefill_context_chunk(0, q, k[:kept], v[:kept])

    def rows_never_written__behind_batch(self, output, lse):
        """Only the first rows are ever written (the first 64, for example)."""
        output[64:] = torch.nan

    def output_scale_twice__before_quantise(self, accumulated, *, output_scale):
        """The quantised output is divided by its scale twice."""
        return accumulated / output_scale

    def output_scale_left_out__before_quantise(self, output_scale):
        """The quantised output is not divided by its scale."""
        return torch.ones_like(output_scale)


class _Decode(EagerDecodeBackend):
    def scale_of_latent_queries__scores(self, q, k):
        """The softmax scale is (L + R)^-1/2, not the given one."""
        return super()._scores(q, k) / self.scale * q.shape[-1] ** -0.5

    def own_token_hidden__behind_visible(self, visible, *, seq_len):
        """The causal mask is off by one: a query does not see its own token."""
        nothing = torch.zeros_like(visible[:, :1])
        return torch.cat((visible[:, 1:], nothing), dim=1) if seq_len > 1 else visible

    def leaked_token__behind_visible(self, visible):
        """The causal mask is off by one: a query sees the token after its own, if its request has one."""
        return torch.cat((visible[1:], visible[-1:]))

    def last_token_dropped__before_attend(self, seq_len):
        """The last token of a request's cache is dropped."""
        return max(seq_len - 1, min(seq_len, 1))

    def first_token_dropped__behind_visible(self, visible, *, seq_len, tile):
        """The first token of a request's cache is dropped."""
        return visible & (torch.arange(tile.start, tile.stop, device=visible.device) > 0) if seq_len > 1 else visible

    def last_page_of_tokens_dropped__before_attend(self, seq_len, *, kv_cache):
        """The last, partly filled page of a request's cache is dropped."""
        page = kv_cache.shape[1]
        return seq_len // page * page or seq_len

    @but(covers=("rocm-fp8-gluon-batch1-only",))
    def table_of_first_request__before_blocks(self, request):
        """Every request reads the pages of the first one."""
        return 0

    @but(covers=("cutlass-mla-claims-fp8-without-scales", "fp8-compile-cache-folds-unit-scale"))
    def key_scale_left_out__before_dequantise(self, k_scale):
        """The scale of the e4m3 cache is not applied."""
        return torch.ones_like(k_scale)

    def key_scale_twice__before_dequantise(self, k_scale):
        """The scale of the e4m3 cache is applied twice."""
        return k_scale * k_scale

    def key_scale_inverted__before_dequantise(self, k_scale):
        """Codes of the e4m3 cache are divided by their scale, expected multiplied."""
        return 1 / k_scale

    def key_scale_off_the_rope__dequantise(self, rows, k_scale):
        """The scale of the e4m3 cache is not applied to the rope part of the keys."""
        rope = super()._dequantise(rows, torch.ones_like(k_scale))[..., self.kv_lora_rank :]
        return torch.cat((super()._dequantise(rows, k_scale)[..., : self.kv_lora_rank], rope), dim=-1)

    @but(covers=("fp8-mla-k-scale-vs-v-scale-inconsistent",))
    def key_scale_of_keys_only__values__dequantise(self, keys, *, k_scale):
        """The scale of the e4m3 cache is applied to the keys and not to the values."""
        return super()._values(keys) / (k_scale if self.kv_cache_dtype == "fp8" else torch.ones_like(k_scale))


class _OffTheTable(EagerDecodeBackend):
    """Reads other blocks than its own, of those that there are."""

    def _entries(self, kv_cache, request, tile):
        self._last = kv_cache.shape[0] - 1
        return super()._entries(kv_cache, request, tile)

    def _blocks(self, request, pages):
        return super()._blocks(request, pages).clamp(0, self._last)


class _BlockTable(_OffTheTable):
    def column_after__before_blocks(self, pages):
        """The block table is read off by one: each page of a request from the column after its own."""
        return pages + 1

    def column_before__before_blocks(self, pages):
        """The block table is read off by one: each page of a request from the column before its own."""
        return (pages - 1).clamp(min=0)

    def row_after__before_blocks(self, request):
        """The block table is read off by one: each request takes the row of the next one."""
        return (request + 1) % self._decode_metadata.block_table.shape[0]

    def block_after__behind_blocks(self, blocks):
        """The block table is read off by one: each page from the block after the one that it names."""
        return (blocks + 1).clamp(max=self._last)

    def block_before__behind_blocks(self, blocks):
        """The block table is read off by one: each page from the block before the one that it names."""
        return (blocks - 1).clamp(min=0)


class RaisedAtFirst(EagerSparseBackend):
    """The maximum of a row that has seen tiles and no key is 0; where all weights vanish, the output is 0 / 0."""

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


class SkipsTiles(LiftedMaximum, EagerDecodeBackend):
    """Only a tile that the next query token sees raises a maximum: rows share tiles, and those behind are skipped."""

    def _accumulate(self, state, scores, v):
        seen = (scores > -torch.inf).any(dim=-1, keepdim=True)
        skipped = ~seen & ~torch.nn.functional.pad(seen[:, 1:], (0, 0, 0, 1))
        raised = super()._accumulate(state, scores, v)
        return SoftmaxState(*(torch.where(skipped, *pair) for pair in zip(state, raised, strict=True)))


class _LseOfTheParts(OnlineSoftmax):
    """What vanishes from the output is not missing in the LSE, which is joined from what the tiles had."""

    def _initial(self, q, v):
        self._joined = q.new_full((q.shape[1], q.shape[0]), -torch.inf, dtype=torch.float32)
        return super()._initial(q, v)

    def _accumulate(self, state, scores, v):
        self._joined = torch.logaddexp(self._joined, scores.logsumexp(dim=-1))
        return super()._accumulate(state, scores, v)

    def _finish(self, state):
        return super()._finish(state)[0], self._joined


class RaisesForTheOutput(_LseOfTheParts, LiftedMaximum, EagerDecodeBackend):
    """Every tile without keys."""


class SkipsTilesOfTheOutput(_LseOfTheParts, SkipsTiles):
    """Those that the next query token sees."""


class _Sparse(EagerSparseBackend):
    def last_key_of_a_list_dropped__behind_listed(self, listed):
        """The last key of each list is dropped."""
        return listed & (listed.cumsum(1) < listed.sum(dim=1, keepdim=True))

    def first_key_of_a_list_dropped__behind_listed(self, listed):
        """The first key of each list is dropped."""
        return listed & (listed.cumsum(1) > 1)

    def sink_subtracted__before_with_sink(self, sink):
        """A sink has the wrong sign."""
        return None if sink is None else -sink

    def key_scale_of_lists_twice__before_keys(self, k_scale):
        """The scale of the e4m3 cache is applied to selected keys twice."""
        return k_scale * k_scale


_COUNTS = (2, 3, 4, 8)
_CUTS = tuple((count, multiple, least) for count in _COUNTS for multiple, least in ((1, 1), (1, 16), (32, 1), (64, 1)))
_DOWN = tuple((count, 0, 16) for count in _COUNTS)
_FIXED = tuple((0, size, size) for size in (64, 128, 256, 512))


class _Splits(SplitDecode):
    """Splits as kernels choose them."""

    prefill_backend = None  # type: ignore[assignment] # so that no layer has it
    # how many there are at most, or 0 for as many as it takes; what the size is rounded up to a multiple of, or 0 if it
    # is rounded down and the last split takes the rest; the least size
    cut: tuple[int, int, int]

    def _starts(self, seq_len):
        count, multiple, least = self.cut
        share = 0 if not count else -(-seq_len // (count * multiple)) * multiple if multiple else seq_len // count
        return range(0, seq_len, max(share, least))[: count or None]


class MergedInBase2(_Splits):
    """Splits are weighted by powers of two of their natural LSE, expected powers of e."""

    merges_lse: bool

    def _combine(self, parts):
        right = super()._combine(parts)
        lses = [part.maximum + part.total.log() for part in parts]
        largest = torch.stack(lses).amax(dim=0)
        shift = largest.masked_fill(largest == -torch.inf, 0.0)
        weights = [(lse - shift).exp2() for lse in lses]
        total = torch.stack(weights).sum(dim=0)
        outputs = [part.weighted / part.total.masked_fill(part.total == 0, 1.0) for part in parts]
        weighted = torch.stack([weight * part for weight, part in zip(weights, outputs, strict=True)]).sum(dim=0)
        if self.merges_lse:
            return SoftmaxState(shift, total, weighted)
        return right._replace(weighted=weighted / total.masked_fill(total == 0, 1.0) * right.total)


class NotRescaledInSplits(NotRescaled, _Splits):
    """As in one pass over the keys."""


class RestTimesZero(ReadsOn):
    """What stands after a request's last key has weights of 0, and 0 times NaN is NaN."""

    def _tail(self, state, q, keys):
        return state._replace(weighted=state.weighted + (0.0 * self._values(keys)).sum(dim=(0, 1)))


class PackedValues(EagerDecodeBackend):
    """V is read as if it were packed: rows of L columns, expected the first L of each L + R."""

    def _values(self, keys):
        flat = keys.flatten()[: keys.shape[0] * self.kv_lora_rank]
        return flat.view(keys.shape[0], 1, self.kv_lora_rank)


class PackedValuesOfTheCache(EagerDecodeBackend):
    __doc__ = PackedValues.__doc__

    def _over(self, tiles, q, request, seq_len, kv_cache, k_scale):
        blocks, page, _ = kv_cache.shape
        bytes_of = kv_cache.view(torch.uint8).flatten()
        width = self.kv_lora_rank * kv_cache.element_size()
        packed = bytes_of[: blocks * page * width].view(blocks, page, width).view(kv_cache.dtype)
        self._packed = lambda tile: super(PackedValuesOfTheCache, self)._dequantise(
            self._entries(packed, request, tile), k_scale
        )
        return super()._over(self._noted(tiles), q, request, seq_len, kv_cache, k_scale)

    def _noted(self, tiles):
        for self._tile in tiles:
            yield self._tile

    def _values(self, keys):
        return self._packed(self._tile).unsqueeze(1)


SUSPECTS: list[Suspect | SuspectStep] = [
    _Softmax,
    Suspect(
        DividesByZero,
        covers=("fa4-zero-len-k-hang-nan", "dcp-empty-owner-zero-times-nan", "sparse-keyless-row-not-written"),
    ),
    Suspect(LiftedMaximum, LIFTED, {"key_tile": (16, 32, 64, 128)}),
    Suspect(NotRescaled, of={"key_tile": (16, 32, 64, 128)}),
    Suspect(HeadTileUnwritten, of={"head_tile": (16, 32, 64), "writes_lse": (True, False)}),
    Suspect(StrictMask),
    *(_StrictMask, _Prefill, _Decode, _BlockTable),
    Suspect(RaisedAtFirst, LIFTED, {"key_tile": (16, 32, 64, 128, 256)}, LiftedMaximum.__doc__),
    *(
        Suspect(kernel, LIFTED, {"key_tile": (16, 32, 64, 128)}, LiftedMaximum.__doc__)
        for kernel in (SkipsTiles, RaisesForTheOutput, SkipsTilesOfTheOutput)
    ),
    _Sparse,
    Suspect(MergedInBase2, of={"cut": (*_CUTS, *_DOWN, *_FIXED), "merges_lse": (False, True)}),
    Suspect(
        NotRescaledInSplits,
        of={"key_tile": (16, 32, 64, 128), "cut": (*_CUTS[::4], *_CUTS[1::4], *_DOWN)},
        said=NotRescaled.__doc__,
    ),
    Suspect(
        RestTimesZero,
        covers=("mla-last-page-nan-leak", "tma-overread-uninitialised-kv-tile", "aiter-oob-page-id-folds-to-slot0-nan"),
    ),
    Suspect(PackedValues, of={"key_tile": (16, 32, 64, 128, 2**31)}),
    Suspect(PackedValuesOfTheCache),
]
"""Mistakes, and groups of them, in the order in which they are tried."""


def each_of(entry: Suspect | SuspectStep) -> Iterator[tuple[SuspectStep, tuple[str, ...]]]:
    """The mistakes of an entry, each where a reference finds it, with what it covers."""
    if isinstance(entry, type):
        yield from ((wrong, about["covers"]) for wrong, about in kernels_of(entry, named_as_class, covers=()))
    elif not entry.of:
        yield entry.wrong, entry.covers
    else:
        for chosen in product(*entry.of.values()):
            name = "Of".join([entry.wrong.__name__, *map(str, chosen)])
            named = {"__doc__": entry.said or entry.wrong.__doc__, "__module__": __name__}
            globals()[name] = type(name, (entry.wrong,), {**named, **dict(zip(entry.of, chosen, strict=True))})
            yield globals()[name], entry.covers

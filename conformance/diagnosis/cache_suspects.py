"""Suspects that read caches: mistakes of masks, pages, block tables, lists, scales of codes, splits and tiles."""

import torch

from mla_conformance.backends.eager import OnlineSoftmax, SoftmaxState
from mla_conformance.backends.eager_decode import EagerDecodeBackend
from mla_conformance.backends.eager_sparse import EagerSparseBackend
from mla_conformance.defects.bases import SplitDecode, chosen
from mla_conformance.defects.known import before, behind, but, known_defects
from mla_conformance.defects.prefills import LiftedMaximum
from mla_conformance.diagnosis.suspects import LIFTED, TILES, NotRescaled, Suspect, SuspectStep


class _Decode(EagerDecodeBackend):
    scale_of_latent_queries = behind("scores", lambda self, scores, *, q: scores / self.scale * q.shape[-1] ** -0.5)
    """The softmax scale is (L + R)^-1/2, not the given one."""

    own_token_hidden = behind(
        "visible", lambda x, *, seq_len: torch.cat((x[:, 1:], torch.zeros_like(x[:, :1])), dim=1) if seq_len > 1 else x
    )
    """The causal mask is off by one: a query does not see its own token."""
    leaked_token = behind("visible", lambda visible: torch.cat((visible[1:], visible[-1:])))
    """The causal mask is off by one: a query sees the token after its own, if its request has one."""
    last_token_dropped = before("attend", lambda seq_len: max(seq_len - 1, min(seq_len, 1)))
    """Each query misses the last token that it sees: the mask, or the request's cache, ends a token early."""

    def first_token_dropped__behind_visible(self, visible, *, seq_len, tile):
        """The first token of a request's cache is dropped."""
        return visible & (torch.arange(tile.start, tile.stop, device=visible.device) > 0) if seq_len > 1 else visible

    last_page_of_tokens_dropped = before(
        "attend", lambda seq_len, *, kv_cache: seq_len // kv_cache.shape[1] * kv_cache.shape[1] or seq_len
    )
    """The last, partly filled page of a request's cache is dropped."""
    table_of_first_request = before("blocks", request=0, covers=("rocm-fp8-gluon-batch1-only",))
    """Every request reads the pages of the first one."""

    @but(covers=("cutlass-mla-claims-fp8-without-scales", "fp8-compile-cache-folds-unit-scale"))
    def key_scale_left_out__before_dequantise(self, k_scale):
        """The scale of the e4m3 cache is not applied."""
        return torch.ones_like(k_scale)

    key_scale_twice = before("dequantise", lambda k_scale: k_scale * k_scale)
    """The scale of the e4m3 cache is applied twice."""
    key_scale_inverted = before("dequantise", lambda k_scale: 1 / k_scale)
    """Codes of the e4m3 cache are divided by their scale, expected multiplied."""

    def key_scale_off_the_rope__dequantise(self, rows, k_scale):
        """The scale of the e4m3 cache is not applied to the rope part of the keys."""
        rope = super()._dequantise(rows, torch.ones_like(k_scale))[..., self.kv_lora_rank :]
        return torch.cat((super()._dequantise(rows, k_scale)[..., : self.kv_lora_rank], rope), dim=-1)

    @but(covers=("fp8-mla-k-scale-vs-v-scale-inconsistent",))
    def key_scale_of_keys_only__values__dequantise(self, keys, *, k_scale):
        """The scale of the e4m3 cache is applied to the keys and not to the values."""
        return super()._values(keys) / (k_scale if self.kv_cache_dtype == "fp8" else torch.ones_like(k_scale))


class _BlockTable(EagerDecodeBackend):
    """Reads other blocks than its own, of those that there are."""

    def _entries(self, kv_cache, request, tile):
        self._last = kv_cache.shape[0] - 1
        return super()._entries(kv_cache, request, tile)

    def _blocks(self, request, pages):
        return super()._blocks(request, pages).clamp(0, self._last)

    column_after = before("blocks", lambda pages: pages + 1)
    """The block table is read off by one: each page of a request from the column after its own."""
    column_before = before("blocks", lambda pages: (pages - 1).clamp(min=0))
    """The block table is read off by one: each page of a request from the column before its own."""
    row_after = before("blocks", lambda self, request: (request + 1) % self._decode_metadata.block_table.shape[0])
    """The block table is read off by one: each request takes the row of the next one."""
    block_after = behind("blocks", lambda self, blocks: (blocks + 1).clamp(max=self._last))
    """The block table is read off by one: each page from the block after the one that it names."""
    block_before = behind("blocks", lambda blocks: (blocks - 1).clamp(min=0))
    """The block table is read off by one: each page from the block before the one that it names."""


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
        return chosen(skipped, state, super()._accumulate(state, scores, v))


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
    last_key_of_a_list_dropped = behind("listed", lambda x: x & (x.cumsum(1) < x.sum(dim=1, keepdim=True)))
    """The last key of each list is dropped."""
    first_key_of_a_list_dropped = behind("listed", lambda listed: listed & (listed.cumsum(1) > 1))
    """The first key of each list is dropped."""
    sink_subtracted = before("with_sink", lambda sink: None if sink is None else -sink)
    """A sink has the wrong sign."""
    key_scale_of_lists_twice = before("keys", lambda k_scale: k_scale * k_scale)
    """The scale of the e4m3 cache is applied to selected keys twice."""


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

    def _combine(self, parts):
        right = super()._combine(parts)
        lses = torch.stack([part.maximum + part.total.log() for part in parts])
        largest = lses.amax(dim=0)
        shift = largest.masked_fill(largest == -torch.inf, 0.0)
        weights = (lses - shift).exp2()
        outputs = torch.stack([part.weighted / part.total.masked_fill(part.total == 0, 1.0) for part in parts])
        total, weighted = weights.sum(dim=0), (weights * outputs).sum(dim=0)
        if self.merges_lse:
            return SoftmaxState(shift, total, weighted)
        return right._replace(weighted=weighted / total.masked_fill(total == 0, 1.0) * right.total)


class NotRescaledInSplits(NotRescaled, _Splits):
    """As in one pass over the keys."""


class PackedValues(EagerDecodeBackend):
    """V is read as if it were packed: rows of L columns, expected the first L of each L + R."""

    def _values(self, keys):
        return keys.flatten()[: keys.shape[0] * self.kv_lora_rank].view(keys.shape[0], 1, self.kv_lora_rank)


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


_LIFTED_IN_PART = (SkipsTiles, RaisesForTheOutput, SkipsTilesOfTheOutput)
_FEW_CUTS = {"key_tile": TILES, "cut": (*_CUTS[::4], *_CUTS[1::4], *_DOWN)}
_REST_TIMES_ZERO = "What stands after a request's last key has weights of 0, and 0 times NaN is NaN."
_READ_ON = ("mla-last-page-nan-leak", "tma-overread-uninitialised-kv-tile", "aiter-oob-page-id-folds-to-slot0-nan")
CACHE_SUSPECTS: list[Suspect | SuspectStep] = [
    *(_Decode, _BlockTable),
    Suspect(RaisedAtFirst, LIFTED, {"key_tile": (*TILES, 256)}, LiftedMaximum.__doc__),
    *(Suspect(kernel, LIFTED, {"key_tile": TILES}, LiftedMaximum.__doc__) for kernel in _LIFTED_IN_PART),
    _Sparse,
    Suspect(MergedInBase2, of={"cut": (*_CUTS, *_DOWN, *_FIXED), "merges_lse": (False, True)}),
    Suspect(NotRescaledInSplits, of=_FEW_CUTS, said=NotRescaled.__doc__),
    Suspect(known_defects()[_READ_ON[0]].kernel, _READ_ON, said=_REST_TIMES_ZERO),
    Suspect(PackedValues, of={"key_tile": (*TILES, 2**31)}),
    Suspect(PackedValuesOfTheCache),
]
"""Mistakes, and groups of them, in the order in which they are tried, behind those of ``suspects``."""

"""Wrong compressors: groups, states between calls, places, rotations, pages of entries and of states."""

import torch

from mla_conformance.backends.eager_compress import EagerCompressBackend
from mla_conformance.defects.bases import packed
from mla_conformance.defects.known import known_defect


@known_defect("compress-length-3-modulo-4", killed_by="compress_continued", related=("compress_keys",))
class DropsTheLastState(EagerCompressBackend):
    """Where one token is missing to a whole group, the state of the last one is not kept."""

    def _state_slots(self):
        metadata, slots = self._compress_metadata, super()._state_slots().clone()
        lengths = metadata.seq_lens.long()
        lost = metadata.query_start_loc[1:].long()[(lengths + 1) % self.compression.ratio == 0] - 1
        slots[lost] = -1
        return slots


@known_defect("compress-lengths-not-handed-over", killed_by="compress_keys")
class NoLengths(EagerCompressBackend):
    """Without the lengths of its requests it takes all tokens for missing ones, and entries are no numbers."""

    def _missing(self, positions):
        return torch.ones_like(positions, dtype=torch.bool)


@known_defect("compress-begins-with-every-call", killed_by="compress_continued")
class BeginsEveryCall(EagerCompressBackend):
    """Groups are counted from the first token of a call, as if nothing had been there before."""

    def _missing(self, positions):
        metadata = self._compress_metadata
        begun = metadata.seq_lens.long() - metadata.query_start_loc.long().diff()
        ends = self._ends().nonzero()[:, 0]
        return positions < begun[metadata.req_id_per_token[ends].long()].unsqueeze(1)


@known_defect("compress-state-not-cleared", killed_by="compress_keys")
class TakesTheStateBefore(EagerCompressBackend):
    """Before the first group stands what another request has left in the page of states."""

    def _missing(self, positions):
        return torch.zeros_like(positions, dtype=torch.bool)


@known_defect("compress-overlap-halves-swapped", killed_by="compress_keys")
class SwapsHalves(EagerCompressBackend):
    """The group before gives the columns for its own entry, and the own group those for the next one."""

    def _halves(self, x):
        swapped = torch.cat(x.chunk(2, dim=-1)[::-1], dim=-1) if self.compression.overlap else x
        return super()._halves(swapped)


@known_defect("compress-places-from-the-start-of-a-call", killed_by="compress_continued")
class PlacesFromTheCall(EagerCompressBackend):
    """What belongs to a place in a group is counted from the first token of a call."""

    def _places(self, positions):
        metadata = self._compress_metadata
        begun = (metadata.seq_lens.long() - metadata.query_start_loc.long().diff())[metadata.req_id_per_token.long()]
        return super()._places((positions - begun).clamp(min=0))


@known_defect("compress-nobody-is-weighted", killed_by="compress_keys")
class WeighsNobody(EagerCompressBackend):
    """Tokens before the first one take part in the softmax, with a score of 0."""

    def _gathered(self, state_cache, ends):
        k, logits = super()._gathered(state_cache, ends)
        return k, logits.masked_fill(logits == -torch.inf, 0.0)


@known_defect("compress-softmax-without-maximum", killed_by="compress_keys", related=("compress_continued",))
class NoMaximum(EagerCompressBackend):
    """Exponentials are taken of the scores as they are, and overflow."""

    def _pooled(self, k, logits):
        p = logits.exp()
        return (p * k).sum(dim=1) / p.sum(dim=1)


class _OtherEnds(EagerCompressBackend):
    """Entries are written where other tokens than the last of a group stand."""

    def _slots(self, page):
        metadata, number = self._compress_metadata, self._numbers()
        column = (number // page).clamp(0, metadata.block_table.shape[1] - 1)
        block = metadata.block_table.long()[metadata.req_id_per_token.long(), column]
        return torch.where(self._ends() & (block >= 0), block * page + number % page, -1)

    def _numbers(self):
        """[T] entries that tokens belong to."""
        return self._compress_metadata.positions // self.compression.ratio


@known_defect("compress-written-a-token-early", killed_by="compress_keys", related=("compress_continued",))
class WritesEarly(_OtherEnds):
    """An entry is written as soon as all but one of its tokens are there, without that one."""

    def _ends(self):
        place = (self._compress_metadata.positions + 2) % self.compression.ratio
        return (self._compress_metadata.state_slot_mapping >= 0) & (place == 0)


@known_defect("compress-written-a-token-late", killed_by="compress_keys", related=("compress_continued",))
class WritesLate(_OtherEnds):
    """An entry is written when the first token behind it comes, if one does."""

    def _ends(self):
        metadata = self._compress_metadata
        behind = (metadata.positions > 0) & (metadata.positions % self.compression.ratio == 0)
        return (metadata.state_slot_mapping >= 0) & behind

    def _window(self, ends):
        return super()._window(ends) - 1

    def _numbers(self):
        return super()._numbers() - 1

    def _angles(self, ends):
        return super()._angles(ends - 1)


@known_defect("compress-table-of-the-manager", killed_by="compress_keys", related=("compress_continued",))
class TableOfTokens(_OtherEnds):
    """Pages of entries are addressed as if the columns of the table counted tokens."""

    def _numbers(self):
        page = self._page
        return self._compress_metadata.positions // page * page + super()._numbers() % page

    def _slots(self, page):
        self._page = page
        return super()._slots(page)


@known_defect("compress-pools-overlap", killed_by="compress_keys", related=("compress_continued",))
class PacksThePool(EagerCompressBackend):
    """Blocks are addressed as if no other layer's stood between them."""

    def _store(self, cache, rows, slots):
        super()._store(packed(cache), rows, slots)


@known_defect("compress-rotated-by-the-last-position", killed_by="compress_keys", related=("compress_continued",))
class RotatesByTheLast(EagerCompressBackend):
    """Entries are rotated by the position of their last token."""

    def _angles(self, ends):
        return ends


@known_defect("compress-never-rotated", killed_by="compress_keys", related=("compress_continued",))
class NeverRotates(EagerCompressBackend):
    """Entries stay as they came out of the norm."""

    def _rotated(self, entries, turns):
        return entries


@known_defect("compress-norm-without-epsilon", killed_by="compress_keys")
class NoEpsilon(EagerCompressBackend):
    """Nothing is added to the mean square, and an entry of zeros is no number."""

    def _normed(self, entries, weight):
        return entries * entries.square().mean(dim=-1, keepdim=True).rsqrt() * weight


@known_defect("compress-states-in-16-bits", killed_by="compress_keys", related=("compress_continued",))
class CoarseStates(EagerCompressBackend):
    """States are kept in bfloat16."""

    def _store(self, cache, rows, slots):
        super()._store(cache, rows.bfloat16().float() if cache.dtype == torch.float32 else rows, slots)


@known_defect("compress-padding-written", killed_by="compress_keys", related=("compress_continued",))
class WritesPadding(EagerCompressBackend):
    """The states of rows that pad a batch are stored in the last slot, which -1 counts from behind."""

    def _state_slots(self):
        return super()._state_slots() % self._count

    def run_compress(self, kv, score, ape, norm_weight, cos_sin_cache, state_cache, kv_cache):
        self._count = state_cache.shape[0] * state_cache.shape[1]
        super().run_compress(kv, score, ape, norm_weight, cos_sin_cache, state_cache, kv_cache)


@known_defect("compress-table-of-an-earlier-call", killed_by="compress_continued")
class KeepsTheFirstTable(EagerCompressBackend):
    """States are found by the first batch's table, whatever requests stand in its rows by now."""

    def prepare_metadata(self, compress_metadata):
        super().prepare_metadata(compress_metadata)
        self._first = getattr(self, "_first", compress_metadata.state_block_table)

    def _state_blocks(self, requests, columns):
        table, usual = self._first, super()._state_blocks(requests, columns)
        known = (requests < len(table)) & (columns < table.shape[1])
        found = table.long()[requests.clamp(max=len(table) - 1), columns.clamp(max=table.shape[1] - 1)]
        return torch.where(known & (found >= 0) & (found <= usual.max()), found, usual)

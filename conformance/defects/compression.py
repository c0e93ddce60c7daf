"""Wrong compressors: groups, states between calls, places, rotations, pages of entries and of states."""

import torch

from mla_conformance.backends.eager_compress import EagerCompressBackend
from mla_conformance.defects.bases import packed, slots_of
from mla_conformance.defects.known import Defects, before, behind, but, instead, together


def _ends_of(self, positions):
    """[T] bool, tokens whose entries are written if a group ends before these positions."""
    ends = (positions > 0) & (positions % self.compression.ratio == 0)
    return (self._compress_metadata.state_slot_mapping >= 0) & ends


class _OtherEnds(EagerCompressBackend, Defects, killed_by="compress_keys", related=("compress_continued",)):
    """Entries are written where other tokens than the last of a group stand."""

    compress_written_a_token_early = instead("ends", lambda self: _ends_of(self, self._compress_metadata.positions + 2))
    """An entry is written as soon as all but one of its tokens are there, without that one."""
    compress_written_a_token_late = together(
        instead("ends", lambda self: _ends_of(self, self._compress_metadata.positions)),
        behind("window", lambda window: window - 1),
        behind("numbers", lambda numbers: numbers - 1),
        before("angles", lambda ends: ends - 1),
    )
    """An entry is written when the first token behind it comes, if one does."""

    def _slots(self, page):
        metadata, number = self._compress_metadata, self._numbers()
        column = (number // page).clamp(0, metadata.block_table.shape[1] - 1)
        block = metadata.block_table.long()[metadata.req_id_per_token.long(), column]
        return torch.where(self._ends() & (block >= 0), block * page + number % page, -1)

    def _numbers(self):
        """[T] entries that tokens belong to."""
        return self._compress_metadata.positions // self.compression.ratio

    def compress_table_of_the_manager__numbers__slots(self, *, page):
        """Pages of entries are addressed as if the columns of the table counted tokens."""
        positions = self._compress_metadata.positions
        return positions // page * page + positions // self.compression.ratio % page


class _CompressKeysAlone(EagerCompressBackend, Defects, killed_by="compress_keys"):
    compress_lengths_not_handed_over = behind("missing", lambda missing: torch.ones_like(missing))
    """Without the lengths of its requests it takes all tokens for missing ones, and entries are no numbers."""
    compress_state_not_cleared = behind("missing", lambda missing: torch.zeros_like(missing))
    """Before the first group stands what another request has left in the page of states."""

    def compress_overlap_halves_swapped__before_halves(self, x):
        """The group before gives the columns for its own entry, and the own group those for the next one."""
        return torch.cat(x.chunk(2, dim=-1)[::-1], dim=-1) if self.compression.overlap else x

    def compress_nobody_is_weighted__behind_gathered(self, k, logits):
        """Tokens before the first one take part in the softmax, with a score of 0."""
        return k, logits.masked_fill(logits == -torch.inf, 0.0)

    def compress_norm_without_epsilon__normed(self, entries, weight):
        """Nothing is added to the mean square, and an entry of zeros is no number."""
        return entries * entries.square().mean(dim=-1, keepdim=True).rsqrt() * weight


class _CompressKeys(EagerCompressBackend, Defects, killed_by="compress_keys", related=("compress_continued",)):
    compress_pools_overlap = before("store", cache=packed)
    """Blocks are addressed as if no other layer's stood between them."""
    compress_rotated_by_the_last_position = instead("angles", lambda self, ends: ends)
    """Entries are rotated by the position of their last token."""
    compress_never_rotated = instead("rotated", lambda self, entries, turns: entries)
    """Entries stay as they came out of the norm."""
    compress_softmax_without_maximum = instead(
        "pooled", lambda self, k, logits: (logits.exp() * k).sum(dim=1) / logits.exp().sum(dim=1)
    )
    """Exponentials are taken of the scores as they are, and overflow."""

    def compress_maximum_from_zero__pooled(self, k, logits):
        """The maximum of the scores begins at 0, and far below it all exponentials are 0."""
        weights = (logits - logits.amax(dim=1, keepdim=True).clamp(min=0.0)).exp()
        return ((weights * k).sum(dim=1) / weights.sum(dim=1)).nan_to_num(0.0)

    def compress_states_in_16_bits__before_store(self, rows, *, cache):
        """States are kept in bfloat16."""
        return rows.bfloat16().float() if cache.dtype == torch.float32 else rows

    def compress_padding_written__state_slots__run_compress(self, *, state_cache):
        """The states of rows that pad a batch are stored in the last slot, which -1 counts from behind."""
        return super()._state_slots() % slots_of(state_cache)


class _OtherCompress(EagerCompressBackend, Defects, killed_by="compress_continued"):
    @but(related=("compress_keys",))
    def compress_length_3_modulo_4__state_slots(self):
        """Where one token is missing to a whole group, the state of the last one is not kept."""
        metadata, slots = self._compress_metadata, super()._state_slots().clone()
        lost = metadata.query_start_loc[1:].long()[(metadata.seq_lens + 1) % self.compression.ratio == 0] - 1
        slots[lost] = -1
        return slots

    def compress_begins_with_every_call__missing(self, positions):
        """Groups are counted from the first token of a call, as if nothing had been there before."""
        metadata = self._compress_metadata
        begun = metadata.seq_lens.long() - metadata.query_start_loc.long().diff()
        ends = self._ends().nonzero()[:, 0]
        return positions < begun[metadata.req_id_per_token[ends].long()].unsqueeze(1)

    def compress_places_from_the_start_of_a_call__before_places(self, positions):
        """What belongs to a place in a group is counted from the first token of a call."""
        metadata = self._compress_metadata
        begun = (metadata.seq_lens.long() - metadata.query_start_loc.long().diff())[metadata.req_id_per_token.long()]
        return (positions - begun).clamp(min=0)

    def compress_table_of_an_earlier_call__state_blocks(self, requests, columns):
        """States are found by the first batch's table, whatever requests stand in its rows by now."""
        table = self.__dict__.setdefault("_first", self._compress_metadata.state_block_table)
        usual, known = super()._state_blocks(requests, columns), (requests < len(table)) & (columns < table.shape[1])
        found = table.long()[requests.clamp(max=len(table) - 1), columns.clamp(max=table.shape[1] - 1)]
        return torch.where(known & (found >= 0) & (found <= usual.max()), found, usual)

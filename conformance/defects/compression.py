"""Wrong compressors: groups, states between calls, places, rotations, pages of entries and of states."""

import torch

from mla_conformance.backends.eager_compress import EagerCompressBackend
from mla_conformance.backends.slots import slots_at
from mla_conformance.defects.bases import kept, packed, slots_of
from mla_conformance.defects.known import Defects, before, behind, instead, together


def _ends_of(self, positions):
    """[T] bool, tokens whose entries are written if a group ends before these positions."""
    ends = (positions > 0) & (positions % self.compression.ratio == 0)
    return (self._compress_metadata.state_slot_mapping >= 0) & ends


class _OtherEnds(EagerCompressBackend, Defects):
    """Entries are written where other tokens than the last of a group stand."""

    compress_written_a_token_early = instead("ends", lambda self: _ends_of(self, self._compress_metadata.positions + 2))
    compress_written_a_token_late = together(
        instead("ends", lambda self: _ends_of(self, self._compress_metadata.positions)),
        behind("window", lambda window: window - 1),
        behind("numbers", lambda numbers: numbers - 1),
        before("angles", lambda ends: ends - 1),
    )

    def _slots(self, page):
        metadata = self._compress_metadata
        slots = slots_at(metadata.block_table, metadata.req_id_per_token.long(), self._numbers(), page)
        return slots.where(self._ends() & (slots >= 0), -1)

    def _numbers(self):
        """[T] entries that tokens belong to."""
        return self._compress_metadata.positions // self.compression.ratio

    def compress_table_of_the_manager__numbers__slots(self, *, page):
        positions = self._compress_metadata.positions
        return positions // page * page + positions // self.compression.ratio % page


class _Compress(EagerCompressBackend, Defects):
    compress_lengths_not_handed_over = behind("missing", lambda missing: torch.ones_like(missing))
    compress_state_not_cleared = behind("missing", lambda missing: torch.zeros_like(missing))

    def compress_overlap_halves_swapped__before_halves(self, x):
        return torch.cat(x.chunk(2, dim=-1)[::-1], dim=-1) if self.compression.overlap else x

    compress_nobody_is_weighted = behind("gathered", lambda k, x: (k, x.masked_fill(x == -torch.inf, 0.0)))

    def compress_norm_without_epsilon__normed(self, entries, weight):
        return entries * entries.square().mean(dim=-1, keepdim=True).rsqrt() * weight

    compress_pools_overlap = before("store", cache=packed)
    compress_rotated_by_the_last_position = instead("angles", lambda self, ends: ends)
    compress_never_rotated = instead("rotated", lambda self, entries, turns: entries)
    compress_softmax_without_maximum = instead("pooled", lambda self, k, x: (x.exp() * k).sum(1) / x.exp().sum(1))

    def compress_maximum_from_zero__pooled(self, k, logits):
        weights = (logits - logits.amax(dim=1, keepdim=True).clamp(min=0.0)).exp()
        return ((weights * k).sum(dim=1) / weights.sum(dim=1)).nan_to_num(0.0)

    def compress_states_in_16_bits__before_store(self, rows, *, cache):
        return rows.bfloat16().float() if cache.dtype == torch.float32 else rows

    compress_padding_written = behind("state_slots__run_compress", lambda x, *, state_cache: x % slots_of(state_cache))

    def compress_length_3_modulo_4__state_slots(self):
        metadata, slots = self._compress_metadata, super()._state_slots().clone()
        lost = metadata.query_start_loc[1:].long()[(metadata.seq_lens + 1) % self.compression.ratio == 0] - 1
        slots[lost] = -1
        return slots

    @property
    def _begun(self):
        """[T] the first position of the call that a token is of."""
        metadata = self._compress_metadata
        return (metadata.seq_lens.long() - metadata.query_start_loc.long().diff())[metadata.req_id_per_token.long()]

    compress_begins_with_every_call = instead("missing", lambda self, x: x < self._begun[self._ends().nonzero()])

    def compress_places_from_the_start_of_a_call__before_places(self, positions):
        return (positions - self._begun).clamp(min=0)

    def compress_table_of_an_earlier_call__state_blocks(self, requests, columns):
        table = kept(self, "table", self._compress_metadata.state_block_table)
        usual, known = super()._state_blocks(requests, columns), (requests < len(table)) & (columns < table.shape[1])
        found = table.long()[requests.clamp(max=len(table) - 1), columns.clamp(max=table.shape[1] - 1)]
        return torch.where(known & (found >= 0) & (found <= usual.max()), found, usual)

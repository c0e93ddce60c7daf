"""Wrong kernels of trees of drafts: whose row of a mask is read, where it begins, how it is packed, what it covers."""

import torch

from mla_conformance.backends.eager_tree import EagerTreeBackend
from mla_conformance.defects.bases import places
from mla_conformance.defects.known import Defects, before, behind, but, instead


class _Trees(EagerTreeBackend, Defects):
    tree_mask_transposed = behind("mask", lambda mask: mask.mT)
    tree_mask_ignored_for_causal = behind("mask", lambda mask: torch.ones_like(mask).tril())
    tree_drafts_see_each_other = behind("mask", lambda mask: torch.ones_like(mask))
    tree_row_of_the_parent = behind("mask", lambda mask: mask & (places(mask) != places(mask).unsqueeze(1)))
    tree_bound_by_depth = behind("mask", lambda mask: mask | (mask.sum(dim=1) < mask.sum(dim=1, keepdim=True)))
    tree_last_token_sees_everything = behind("mask", lambda mask: torch.cat((mask[:-1], torch.ones_like(mask[-1:]))))
    tree_mask_of_a_byte = behind("mask", lambda mask: _causal_from(mask, 8))
    tree_mask_of_a_word = behind("mask", lambda mask: _causal_from(mask, 32))
    tree_mask_bits_repeat_after_a_word = behind("mask", lambda mask: mask[:, places(mask) % 32])
    tree_root_left_out = behind("mask", lambda mask: mask & ((places(mask) > 0) | (places(mask).unsqueeze(1) == 0)))
    tree_siblings_see_each_other = behind("mask", lambda mask: mask | (_parents(mask).unsqueeze(1) == _parents(mask)))

    def tree_sees_its_parent_alone__behind_mask(self, mask):
        number = places(mask)
        return mask & ((number == _parents(mask).unsqueeze(1)) | (number == number.unsqueeze(1)))

    def tree_mask_bits_from_the_highest__behind_mask(self, mask):
        bits = torch.nn.functional.pad(mask.flatten(), (0, -mask.numel() % 8))
        return bits.view(-1, 8).flip(1).flatten()[: mask.numel()].view_as(mask)

    tree_mask_rows_of_whole_bytes = behind("mask", lambda x: _strided(x.flatten(), 0, -(-len(x) // 8) * 8, len(x)))

    def _mask(self, request, queries):
        begin, stride = int(self._decode_metadata.tree_mask_start_loc[request]), self._stride(request, queries)
        return _strided(self._decode_metadata.tree_mask, self._start(begin, request), stride, queries)

    def _start(self, begin, request):
        return begin

    def _stride(self, request, queries):
        return queries

    tree_mask_of_the_request_before = before("mask", lambda request: max(0, request - 1))
    tree_mask_of_the_first_request = instead("start", lambda self, begin, request: 0)
    tree_mask_behind_whole_bytes = instead("start", lambda self, begin, request: begin // 8 * 8)
    tree_mask_place_in_bits_read_as_bytes = instead("start", lambda self, begin, request: begin * 8)

    def tree_mask_behind_longest_ones__start(self, begin, request):
        return request * int(self._decode_metadata.query_lens_cpu.max()) ** 2

    def tree_mask_read_by_rows_of_keys__stride(self, request, queries):
        return max(queries, int(self._decode_metadata.seq_lens_cpu[request]))

    def tree_context_masked_too__behind_visible(self, visible, *, queries, seq_len, tile):
        return visible & (torch.arange(tile.start, tile.stop) >= seq_len - queries)

    def tree_mask_over_the_first_keys__visible(self, queries, request, seq_len, tile):
        number = torch.arange(tile.start, tile.stop)
        return (number >= queries) | self._mask(request, queries)[:, number.clamp(max=queries - 1)]

    def tree_mask_a_token_early__visible(self, queries, request, seq_len, tile):
        number = torch.arange(tile.start, tile.stop) - (seq_len - 1 - queries)
        return (number < 0) | (self._mask(request, queries)[:, number.clamp(0, queries - 1)] & (number < queries))

    @but(key_tile=16)
    def tree_tiles_below_the_diagonal_unmasked__behind_visible(self, visible, *, queries, seq_len, tile):
        return visible | (torch.arange(queries).unsqueeze(1) >= tile.stop - (seq_len - queries))

    class tree_lse_counts_masked_keys:
        def _attend(self, q, request, seq_len, kv_cache, k_scale):
            self._all = True
            self._counted = super()._attend(q, request, seq_len, kv_cache, k_scale)
            self._all = False
            return super()._attend(q, request, seq_len, kv_cache, k_scale)

        def _mask(self, request, queries):
            mask = super()._mask(request, queries)
            return torch.ones_like(mask) if self._all else mask

        def _finish(self, state):
            return super()._finish(state)[0], super()._finish(self._counted)[1]


def _parents(mask: torch.Tensor) -> torch.Tensor:
    """[q] the last ancestor of each query token; -1 of the root."""
    number = places(mask)
    return number.where(mask & (number < number.unsqueeze(1)), -1).amax(dim=1)


def _causal_from(mask: torch.Tensor, column: int) -> torch.Tensor:
    """A mask whose columns from one on are causal."""
    return torch.cat((mask[:, :column], torch.ones_like(mask).tril()[:, column:]), dim=1)


def _strided(bits: torch.Tensor, start: int, stride: int, queries: int) -> torch.Tensor:
    """[q, q] bits of rows so far apart; those behind the last one are 0."""
    number = torch.arange(queries, device=bits.device)
    place = start + number.unsqueeze(1) * stride + number
    return bits[place.clamp(max=len(bits) - 1)] & (place < len(bits))

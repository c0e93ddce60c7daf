"""Wrong indexers: scores, bounds, what is selected of them, how it is told; heads, rows and pages of certain sizes."""

import torch

from mla_conformance.backends.eager_indexer import EagerIndexerBackend
from mla_conformance.backends.roles import IndexSpace
from mla_conformance.defects.bases import gathered, half, mirrored, nth
from mla_conformance.defects.known import Defects, before, but, instead
from mla_conformance.reference.selected import NO_KEY


class _Indexer(EagerIndexerBackend, Defects):
    indexer_relu_dropped = instead("activated", lambda self, dots: dots)
    indexer_weights_of_another_head = before("scores", lambda weights: weights.roll(1, dims=1))
    indexer_tables_of_64_requests = before("keys", lambda request: request % 64)

    def indexer_activation_behind_the_sum__scores(self, q, weights, keys):
        return (weights.unsqueeze(1) @ (q @ keys.mT)).squeeze(1).relu()

    @but(token_tile=16)
    def indexer_tail_of_a_tile_forgotten__tiles(self, tokens):
        return (tile for tile in super()._tiles(tokens) if tile.stop - tile.start == self.token_tile)

    @but(token_tile=64)
    def indexer_lone_token_of_a_tile_unscored_with_several__before_tiles(self, tokens):
        several = int(self._sparse_metadata.query_lens_cpu.max()) > 1
        return tokens - 1 if several and tokens > 1 and tokens % self.token_tile == 1 else tokens

    def indexer_weights_advance_by_64_heads__before_logits(self, weights):
        rows, heads = weights.shape
        stored = torch.nn.functional.pad(weights.flatten(), (0, rows * 64))
        return stored.as_strided((rows, heads), (64, 1))

    indexer_positions_of_17_bits = before("choose", lambda logits: logits[:, : 2**17])

    def indexer_token_twice__behind_choose(self, chosen, *, topk_tokens):
        full = (chosen != NO_KEY).all(dim=1, keepdim=True)
        column = torch.arange(topk_tokens, device=chosen.device)
        return torch.where(full & (column == topk_tokens - 1) & (column > 0), chosen[:, :1], chosen)

    def indexer_tail_not_selected__before_choose(self, logits):
        whole = logits.isfinite().sum(dim=1, keepdim=True) // 16 * 16
        return logits.masked_fill(torch.arange(logits.shape[1], device=logits.device) >= whole, -torch.inf)

    def indexer_ties_with_the_last_dropped__behind_choose(self, chosen, *, logits):
        scores = logits.gather(1, chosen.clamp(min=0))
        tied = (scores[:, 1:] == scores[:, -1:]) & (scores[:, :-1] == scores[:, -1:])
        chosen[:, 1:].masked_fill_(tied, NO_KEY)

    def indexer_row_offset_in_two_bytes__behind_logits(self, logits):
        logits.flatten()[65536:] = -torch.inf

    indexer_key_scale_ignored = instead("scales", lambda self, scales: torch.ones_like(scales))
    indexer_one_key_scale = instead("scales", lambda self, scales: scales[:1].expand_as(scales))
    indexer_positions_for_slots = instead("numbers", lambda self, k, positions: positions)
    indexer_products_in_half = before("activated__logits", dots=lambda dots: dots.clamp(max=65504), when=half)

    def indexer_bound_off_by_one__behind_bounds(self, bounds):
        return (bounds + 1).minimum(self._sparse_metadata.seq_lens[self._sparse_metadata.req_id_per_token.long()])

    def indexer_pages_of_another_size__before_numbers(self, k):
        pages = self._sparse_metadata.block_table is not None
        return k.new_empty(k.shape[0], 64, 0) if pages else k

    @but(when=lambda self: nth(self, 7))
    def indexer_ties_broken_by_who_comes_first__choose(self, logits, topk_tokens):
        return mirrored(super()._choose, logits, topk_tokens)

    indexer_gathered_start_of_request_in_six_bits = before("slots", lambda request: request % 64, when=gathered)

    @but(when=lambda self: not gathered(self) and self._sparse_metadata.query_lens_cpu.max() > 1)
    def indexer_scales_of_64_tokens_with_several__stored(self, k, k_scale, slots):
        repeated = slots - slots % k.shape[1] + slots % k.shape[1] % 64
        return super()._stored(k, k_scale, slots)[0], super()._stored(k, k_scale, repeated)[1]

    def indexer_padding_of_slots_repeats_the_best__behind_run_index_topk(self, chosen):
        missing = (chosen == NO_KEY) & (self._sparse_metadata.index_space is not IndexSpace.POSITION)
        return torch.where(missing, chosen[:, :1], chosen)

    def indexer_partial_lists_of_the_first_1024__before_choose(self, logits, *, topk_tokens):
        behind = torch.arange(logits.shape[1], device=logits.device) >= 1024
        return logits.masked_fill(behind & (topk_tokens % 64 > 0), -torch.inf)

    @but(when=gathered)
    def indexer_gathered_bound_of_the_longest_query__behind_bounds(self, bounds):
        lengths = self._sparse_metadata.query_lens_cpu
        missing = (lengths.max() - lengths).to(bounds)
        return (bounds - missing[self._sparse_metadata.req_id_per_token.long()]).clamp(min=1)

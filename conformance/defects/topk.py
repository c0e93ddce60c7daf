"""Wrong selections of given logits: windows, keys that order otherwise, ties, places that are filled wrongly, pools."""

import torch

from mla_conformance.backends.eager_topk import LEAST, EagerTopKBackend
from mla_conformance.defects.bases import mirrored, nth, packed
from mla_conformance.defects.known import Defects, before, behind, but, instead
from mla_conformance.reference.selected import NO_KEY


def _few(keys, topk_tokens, kept, shift):
    """Keys of which so many of a threshold's coarse bin are left, whichever come first."""
    bins = keys >> shift
    threshold = bins.topk(min(topk_tokens, keys.shape[1]), dim=1).values[:, -1:]
    tied = (bins == threshold) & (keys != LEAST)
    return keys.masked_fill(tied & (tied.cumsum(dim=1) > kept), LEAST)


class _TopK(EagerTopKBackend, Defects):
    topk_start_ignored = behind("windows", lambda starts, lengths: (torch.zeros_like(starts), lengths))
    topk_start_rounded_to_vectors = behind("windows", lambda starts, lengths: (starts // 4 * 4, lengths))
    topk_columns_of_the_logits_named = instead("numbered", lambda self, chosen, starts: chosen)
    topk_row_stride_ignored = before("keys", logits=packed)
    topk_tail_of_vectors_unread = behind("windows", lambda starts, lengths: (starts, lengths // 4 * 4))
    topk_first_2048_columns = behind("windows", lambda starts, lengths: (starts, lengths.clamp(max=2048)))
    topk_column_in_two_bytes = behind("choose", lambda chosen: torch.where(chosen == NO_KEY, NO_KEY, chosen & 0xFFFF))
    topk_stale_places = behind("numbered", lambda told: torch.where(told == NO_KEY, told.roll(1, dims=0), told))
    topk_padding_in_front = behind("choose", lambda chosen: chosen.gather(1, (chosen != NO_KEY).argsort(stable=True)))

    def topk_length_of_the_next_row__behind_windows(self, starts, lengths, *, logits):
        return starts, lengths.roll(-1, dims=0).minimum(logits.shape[1] - starts)

    def topk_short_rows_copied_whole__numbered(self, chosen, starts):
        told, places = super()._numbered(chosen, starts), torch.arange(chosen.shape[1], device=chosen.device)
        return torch.where((chosen == NO_KEY).any(dim=1, keepdim=True), places, told)

    def topk_one_column_more_than_places__choose(self, keys, topk_tokens):
        chosen, places = super()._choose(keys, topk_tokens), torch.arange(topk_tokens, device=keys.device)
        first = (keys != LEAST).int().argmax(dim=1, keepdim=True)
        one_more = (keys != LEAST).sum(dim=1, keepdim=True) == topk_tokens + 1
        return torch.where(one_more, first + places, chosen)

    def topk_places_beyond_1024_unfilled__behind_choose(self, chosen):
        chosen[:, 1024:] = NO_KEY

    topk_threshold_bin_of_4096 = before("choose", lambda keys, *, topk_tokens: _few(keys, topk_tokens, 4096, 20))
    topk_ties_of_1024 = before("choose", lambda keys, *, topk_tokens: _few(keys, topk_tokens, 1024, 0))
    topk_bits_of_negatives_unflipped = instead("keys", lambda self, logits: logits.float().view(torch.int32).long())
    topk_coarse_bins_alone = behind("keys", lambda keys: keys >> 20)
    topk_keys_of_halves = before("keys", lambda logits: logits.half().float())

    def topk_ties_found_by_their_value__behind_choose(self, chosen, *, keys, topk_tokens):
        found = keys.gather(1, chosen.clamp(min=0))
        same = torch.nn.functional.pad(found[:, 1:] == found[:, :-1], (1, 0)) & (chosen != NO_KEY)
        for column in range(1, topk_tokens):
            chosen[:, column] = torch.where(same[:, column], chosen[:, column - 1], chosen[:, column])

    def topk_lanes_behind_the_row__choose(self, keys, topk_tokens):
        columns = torch.arange(keys.shape[1], device=keys.device)
        seen = keys != LEAST
        end = (columns * seen).amax(dim=1, keepdim=True) + 1
        masked = keys.masked_fill(~seen, torch.iinfo(torch.int64).max).amin(dim=1, keepdim=True)
        lanes = (columns >= end) & (columns < -(-end // 8) * 8)
        low = (masked <= -0x7F800000) & (masked > LEAST)
        return mirrored(super()._choose, keys.masked_fill(lanes & low, -0x7F800000), topk_tokens)

    topk_infinities_left_out = behind("keys", lambda keys, *, logits: keys.masked_fill(logits == -torch.inf, LEAST))
    topk_infinity_overflows_the_bins = behind(
        "keys", lambda keys, *, logits: keys.masked_fill(logits.isposinf(), LEAST)
    )

    def topk_negative_zero_least__keys(self, logits):
        return super()._keys(logits).masked_fill((logits == 0) & logits.signbit(), LEAST + 1)

    def topk_bits_of_nan_named__behind_numbered__keys(self, told, *, chosen, logits):
        nan = logits.isnan().gather(1, chosen.clamp(min=0)) & (chosen != NO_KEY)
        return told.masked_fill(nan, 0x7FC00000)

    def topk_reads_to_the_end_of_a_tile__behind_windows(self, starts, lengths, *, logits):
        return starts, (-(-lengths // 64) * 64).minimum(logits.shape[1] - starts)

    @but(when=lambda self: nth(self, 7))
    def topk_ties_by_who_comes_first__choose(self, keys, topk_tokens):
        return mirrored(super()._choose, keys, topk_tokens)

    pools_tail_forgotten = behind("tails", lambda tails: torch.full_like(tails, NO_KEY))
    pools_history_of_the_first_row = behind("expanded", lambda expanded, *, pools: expanded[:1].expand(len(pools), -1))

    def pools_garbage_ids_expanded__before_expanded(self, pools):
        return pools.where(pools != NO_KEY, torch.arange(pools.shape[1], device=pools.device))

    def pools_lengths_in_tokens__behind_windows(self, starts, lengths, *, logits):
        seen = self._topk_metadata.token_lengths
        return starts, lengths if seen is None else seen.long().unsqueeze(1).minimum(logits.shape[1] - starts)

    def pools_begun_pool_visible__behind_windows__run_pool_top_k_per_row(self, starts, lengths, *, logits, pool):
        seen = self._topk_metadata.token_lengths
        begun = lengths if seen is None else (-(-seen.long() // pool)).unsqueeze(1)
        return starts, begun.minimum(logits.shape[1] - starts)

    def pools_as_many_as_tokens__before_expanded(self, pools, *, pool):
        behind = torch.arange(pools.shape[1], device=pools.device) >= max(1, pools.shape[1] // pool)
        return pools.masked_fill(behind, NO_KEY)

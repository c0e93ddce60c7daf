"""Wrong selections of given logits: windows, keys that order otherwise, ties, places that are filled wrongly, pools."""

import torch

from mla_conformance.backends.eager_topk import LEAST, EagerTopKBackend
from mla_conformance.defects.bases import nth, packed_rows
from mla_conformance.defects.known import Defects, before, behind, but, instead, variant
from mla_conformance.reference.selected import NO_KEY


class _SelectWindows(EagerTopKBackend, Defects, killed_by="select_windows"):
    topk_start_ignored = behind("windows", lambda starts, lengths: (torch.zeros_like(starts), lengths))
    """Every row is read from column 0 on, wherever its window starts."""
    topk_start_rounded_to_vectors = behind("windows", lambda starts, lengths: (starts // 4 * 4, lengths))
    """Windows start at the last whole vector of four columns before them."""
    topk_columns_of_the_logits_named = instead("numbered", lambda self, chosen, starts: chosen)
    """Columns of the logits are named where those of the row's window are declared."""
    topk_row_stride_ignored = before("keys", logits=packed_rows)
    """Rows are read as if none but their columns lay between them."""


class _Select(EagerTopKBackend, Defects, killed_by="select"):
    topk_tail_of_vectors_unread = behind("windows", lambda starts, lengths: (starts, lengths // 4 * 4))
    """Columns behind a row's last whole vector of four are not read."""
    topk_first_2048_columns = behind("windows", lambda starts, lengths: (starts, lengths.clamp(max=2048)))
    """Only the first 2,048 columns of a row are candidates."""
    topk_column_in_two_bytes = behind("choose", lambda chosen: torch.where(chosen == NO_KEY, NO_KEY, chosen & 0xFFFF))
    """A column is carried in 16 bits, and beyond 65,535 another one is named."""
    topk_stale_places = behind("numbered", lambda told: torch.where(told == NO_KEY, told.roll(1, dims=0), told))
    """Places that a row does not fill hold what the row before it left in shared memory."""
    topk_padding_in_front = behind("choose", lambda chosen: chosen.gather(1, (chosen != NO_KEY).argsort(stable=True)))
    """-1 stands before the columns, where whoever reads as many as a row has finds it."""

    def topk_length_of_the_next_row__behind_windows(self, starts, lengths, *, logits):
        """Each row is read as far as the next one should be."""
        return starts, lengths.roll(-1, dims=0).minimum(logits.shape[1] - starts)

    def topk_short_rows_copied_whole__numbered(self, chosen, starts):
        """A row that is no longer than the list gets the numbers from 0 on, -1 never."""
        told, places = super()._numbered(chosen, starts), torch.arange(chosen.shape[1], device=chosen.device)
        return torch.where((chosen == NO_KEY).any(dim=1, keepdim=True), places, told)

    def topk_one_column_more_than_places__choose(self, keys, topk_tokens):
        """The search for a threshold does not settle where a row has one column too many, and its first ones are
        taken."""
        chosen, places = super()._choose(keys, topk_tokens), torch.arange(topk_tokens, device=keys.device)
        first = (keys != LEAST).int().argmax(dim=1, keepdim=True)
        one_more = (keys != LEAST).sum(dim=1, keepdim=True) == topk_tokens + 1
        return torch.where(one_more, first + places, chosen)

    def topk_places_beyond_1024_unfilled__behind_choose(self, chosen):
        """A block sorts 1,024 candidates, and the places behind them stay empty."""
        chosen[:, 1024:] = NO_KEY


class _FewCandidates(EagerTopKBackend, Defects, killed_by="select_ties", related=("select",)):
    """Of a threshold's coarse bin so many candidates are kept, whichever come first."""

    kept = 4096
    shift = 20

    def _choose(self, keys, topk_tokens):
        bins = keys >> self.shift
        threshold = bins.topk(min(topk_tokens, keys.shape[1]), dim=1).values[:, -1:]
        tied = (bins == threshold) & (keys != LEAST)
        return super()._choose(keys.masked_fill(tied & (tied.cumsum(dim=1) > self.kept), LEAST), topk_tokens)

    topk_threshold_bin_of_4096 = variant()
    """Of the coarse bin that holds the threshold 4,096 candidates are kept, though others are larger."""
    topk_ties_of_1024 = variant(kept=1024, shift=0)
    """Of the logits that tie with the last one selected 1,024 are kept, and places beyond them hold -1."""


class _SelectTies(EagerTopKBackend, Defects, killed_by="select_ties", related=("select", "select_windows")):
    topk_bits_of_negatives_unflipped = instead("keys", lambda self, logits: logits.float().view(torch.int32).long())
    """Keys are the bits as integers, by which the least of all negative logits is the largest."""
    topk_coarse_bins_alone = behind("keys", lambda keys: keys >> 20)
    """Logits are told apart by the first 12 bits of their keys, as the first pass of a radix selection does."""
    topk_keys_of_halves = before("keys", lambda logits: logits.half().float())
    """The coarse bin is that of the logit in fp16, beyond whose range all logits fall into one."""

    def topk_ties_found_by_their_value__behind_choose(self, chosen, *, keys, topk_tokens):
        """The largest logits are found first and then looked up, so that equal ones are one and the same column."""
        found = keys.gather(1, chosen.clamp(min=0))
        same = torch.nn.functional.pad(found[:, 1:] == found[:, :-1], (1, 0)) & (chosen != NO_KEY)
        for column in range(1, topk_tokens):
            chosen[:, column] = torch.where(same[:, column], chosen[:, column - 1], chosen[:, column])

    def topk_lanes_behind_the_row__choose(self, keys, topk_tokens):
        """Lanes of the last vector behind a row are filled with -inf and counted, as good as a logit of -inf is."""
        columns = torch.arange(keys.shape[1], device=keys.device)
        seen = keys != LEAST
        end = (columns * seen).amax(dim=1, keepdim=True) + 1
        masked = keys.masked_fill(~seen, torch.iinfo(torch.int64).max).amin(dim=1, keepdim=True)
        lanes = (columns >= end) & (columns < -(-end // 8) * 8)
        low = (masked <= -0x7F800000) & (masked > LEAST)
        flipped = super()._choose(keys.masked_fill(lanes & low, -0x7F800000).flip(1), topk_tokens)
        return torch.where(flipped == NO_KEY, NO_KEY, keys.shape[1] - 1 - flipped)


class _SelectTiesAlone(EagerTopKBackend, Defects, killed_by="select_ties"):
    topk_infinities_left_out = behind("keys", lambda keys, *, logits: keys.masked_fill(logits == -torch.inf, LEAST))
    """A logit of -inf is taken for what is behind a mask, and -1 is told for it."""
    topk_infinity_overflows_the_bins = behind(
        "keys", lambda keys, *, logits: keys.masked_fill(logits.isposinf(), LEAST)
    )
    """The bin of +inf is beyond the last one that is counted, and its logits are lost."""

    def topk_negative_zero_least__keys(self, logits):
        """-0 has the key of the least negative integer, below every logit."""
        return super()._keys(logits).masked_fill((logits == 0) & logits.signbit(), LEAST + 1)

    def topk_bits_of_nan_named__behind_numbered__keys(self, told, *, chosen, logits):
        """In a row that holds NaN what is sorted is the logit, and its bits are told in the place of its column."""
        nan = logits.isnan().gather(1, chosen.clamp(min=0)) & (chosen != NO_KEY)
        return told.masked_fill(nan, 0x7FC00000)

    @but(killed_by="select", related=("select_windows",))
    def topk_reads_to_the_end_of_a_tile__behind_windows(self, starts, lengths, *, logits):
        """The last tile of 64 columns is read to its end, whatever stands behind the row."""
        return starts, (-(-lengths // 64) * 64).minimum(logits.shape[1] - starts)

    @but(killed_by="determinism", when=lambda self: nth(self, 7))
    def topk_ties_by_who_comes_first__choose(self, keys, topk_tokens):
        """Now and then another block comes first to where the last of several equal logits is taken."""
        mirrored = super()._choose(keys.flip(1), topk_tokens)
        return torch.where(mirrored == NO_KEY, NO_KEY, keys.shape[1] - 1 - mirrored)


class _PooledTopk(EagerTopKBackend, Defects, killed_by="pooled_topk"):
    pools_tail_forgotten = behind("tails", lambda tails: torch.full_like(tails, NO_KEY))
    """The tokens of the last pool, which is not whole, are left out."""
    pools_history_of_the_first_row = behind("expanded", lambda expanded, *, pools: expanded[:1].expand(len(pools), -1))
    """A tail is appended to the pools of the batch's first row, whichever row it is of."""

    def pools_garbage_ids_expanded__before_expanded(self, pools):
        """Places that no pool of the row fills hold what a buffer held before, and are expanded like the others."""
        return pools.where(pools != NO_KEY, torch.arange(pools.shape[1], device=pools.device))

    def pools_lengths_in_tokens__behind_windows(self, starts, lengths, *, logits):
        """As many pools are looked at as a row sees tokens."""
        seen = self._topk_metadata.token_lengths
        return starts, lengths if seen is None else seen.long().unsqueeze(1).minimum(logits.shape[1] - starts)

    def pools_begun_pool_visible__behind_windows__run_pool_top_k_per_row(self, starts, lengths, *, logits, pool):
        """A pool is visible as soon as its first token is."""
        seen = self._topk_metadata.token_lengths
        begun = lengths if seen is None else (-(-seen.long() // pool)).unsqueeze(1)
        return starts, begun.minimum(logits.shape[1] - starts)

    def pools_as_many_as_tokens__before_expanded(self, pools, *, pool):
        """As many tokens are selected as there is room for pools: one pool of so many."""
        behind = torch.arange(pools.shape[1], device=pools.device) >= max(1, pools.shape[1] // pool)
        return pools.masked_fill(behind, NO_KEY)

"""Wrong indexers, selections of given logits, and preparations of index queries and keys."""

import torch

from mla_conformance.backends import eager_indexer, eager_prepare, prepare, roles
from mla_conformance.backends.eager_topk import LEAST, EagerTopKBackend
from mla_conformance.defects.bases import fill, gathered, half, mirrored, note, nth, packed, places
from mla_conformance.defects.known import Defects, before, behind, but, instead, together
from mla_conformance.reference.quantization import E4M3_MAX
from mla_conformance.reference.selected import NO_KEY


class _Indexer(eager_indexer.EagerIndexerBackend, Defects):
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
        return torch.nn.functional.pad(weights.flatten(), (0, rows * 64)).as_strided((rows, heads), (64, 1))

    indexer_positions_of_17_bits = before("choose", lambda logits: logits[:, : 2**17])

    def indexer_token_twice__behind_choose(self, chosen, *, topk_tokens):
        full = (chosen != NO_KEY).all(dim=1, keepdim=True)
        column = torch.arange(topk_tokens, device=chosen.device)
        return torch.where(full & (column == topk_tokens - 1) & (column > 0), chosen[:, :1], chosen)

    def indexer_tail_not_selected__before_choose(self, logits):
        whole = logits.isfinite().sum(dim=1, keepdim=True) // 16 * 16
        return logits.masked_fill(places(logits, 1) >= whole, -torch.inf)

    def indexer_ties_with_the_last_dropped__behind_choose(self, chosen, *, logits):
        scores = logits.gather(1, chosen.clamp(min=0))
        tied = (scores[:, 1:] == scores[:, -1:]) & (scores[:, :-1] == scores[:, -1:])
        chosen[:, 1:].masked_fill_(tied, NO_KEY)

    indexer_row_offset_in_two_bytes = behind("logits", lambda logits: fill(logits.flatten()[65536:], -torch.inf))
    indexer_key_scale_ignored = instead("scales", lambda self, scales: torch.ones_like(scales))
    indexer_one_key_scale = instead("scales", lambda self, scales: scales[:1].expand_as(scales))
    indexer_positions_for_slots = instead("numbers", lambda self, k, positions: positions)
    indexer_products_in_half = before("activated__logits", dots=lambda dots: dots.clamp(max=65504), when=half)

    def indexer_bound_off_by_one__behind_bounds(self, bounds):
        return (bounds + 1).minimum(self._sparse_metadata.seq_lens[self._sparse_metadata.req_id_per_token.long()])

    def indexer_pages_of_another_size__before_numbers(self, k):
        return k if gathered(self) else k.new_empty(k.shape[0], 64, 0)

    @but(when=lambda self: nth(self, 7))
    def indexer_ties_broken_by_who_comes_first__choose(self, logits, topk_tokens):
        return mirrored(super()._choose, logits, topk_tokens)

    indexer_gathered_start_of_request_in_six_bits = before("slots", lambda request: request % 64, when=gathered)

    @but(when=lambda self: not gathered(self) and self._sparse_metadata.query_lens_cpu.max() > 1)
    def indexer_scales_of_64_tokens_with_several__stored(self, k, k_scale, slots):
        repeated = slots - slots % k.shape[1] + slots % k.shape[1] % 64
        return super()._stored(k, k_scale, slots)[0], super()._stored(k, k_scale, repeated)[1]

    def indexer_padding_of_slots_repeats_the_best__behind_run_index_topk(self, chosen):
        missing = (chosen == NO_KEY) & (self._sparse_metadata.index_space is not roles.IndexSpace.POSITION)
        return torch.where(missing, chosen[:, :1], chosen)

    def indexer_partial_lists_of_the_first_1024__before_choose(self, logits, *, topk_tokens):
        return logits.masked_fill((places(logits, 1) >= 1024) & (topk_tokens % 64 > 0), -torch.inf)

    @but(when=gathered)
    def indexer_gathered_bound_of_the_longest_query__behind_bounds(self, bounds):
        lengths = self._sparse_metadata.query_lens_cpu
        missing = (lengths.max() - lengths).to(bounds)
        return (bounds - missing[self._sparse_metadata.req_id_per_token.long()]).clamp(min=1)


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
        told = super()._numbered(chosen, starts)
        return torch.where((chosen == NO_KEY).any(dim=1, keepdim=True), places(chosen, 1), told)

    def topk_one_column_more_than_places__choose(self, keys, topk_tokens):
        chosen, first = super()._choose(keys, topk_tokens), (keys != LEAST).int().argmax(dim=1, keepdim=True)
        one_more = (keys != LEAST).sum(dim=1, keepdim=True) == topk_tokens + 1
        return torch.where(one_more, first + places(chosen, 1), chosen)

    topk_places_beyond_1024_unfilled = behind("choose", lambda chosen: fill(chosen[:, 1024:], NO_KEY))
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
        columns = places(keys, 1)
        seen = keys != LEAST
        end = (columns * seen).amax(dim=1, keepdim=True) + 1
        masked = keys.masked_fill(~seen, torch.iinfo(torch.int64).max).amin(dim=1, keepdim=True)
        lanes = (columns >= end) & (columns < -(-end // 8) * 8)
        low = (masked <= -0x7F800000) & (masked > LEAST)
        return mirrored(super()._choose, keys.masked_fill(lanes & low, -0x7F800000), topk_tokens)

    topk_infinities_left_out = behind("keys", lambda keys, *, logits: keys.masked_fill(logits == -torch.inf, LEAST))
    topk_infinity_overflows_the_bins = behind("keys", lambda x, *, logits: x.masked_fill(logits.isposinf(), LEAST))

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

    pools_garbage_ids_expanded = before("expanded", lambda pools: pools.where(pools != NO_KEY, places(pools, 1)))

    def pools_lengths_in_tokens__behind_windows(self, starts, lengths, *, logits):
        seen = self._topk_metadata.token_lengths
        return starts, lengths if seen is None else seen.long().unsqueeze(1).minimum(logits.shape[1] - starts)

    def pools_begun_pool_visible__behind_windows__run_pool_top_k_per_row(self, starts, lengths, *, logits, pool):
        seen = self._topk_metadata.token_lengths
        begun = lengths if seen is None else (-(-seen.long() // pool)).unsqueeze(1)
        return starts, begun.minimum(logits.shape[1] - starts)

    def pools_as_many_as_tokens__before_expanded(self, pools, *, pool):
        return pools.masked_fill(places(pools, 1) >= max(1, pools.shape[1] // pool), NO_KEY)


def _of_keys(self, x):
    """Whether they are keys, which have one head."""
    return x.shape[1] == 1 and self.num_heads > 1


def _in_half(x):
    return x.bfloat16().float()


def _rope_in(self, x, is_neox_style):
    return eager_prepare.rotated_pairs(x, *self._turns(x), is_neox_style)


class _Prepare(eager_prepare.EagerPrepareBackend, Defects):
    prepare_hadamard_missing = instead("transformed", lambda self, x: x)
    prepare_hadamard_missing_on_keys = instead("transformed", lambda self, x: x, when=_of_keys)
    prepare_hadamard_unnormalised = behind("transformed", lambda transformed, *, x: transformed * x.shape[-1] ** 0.5)
    prepare_largest_before_hadamard = together(
        before("transformed", lambda self, x: note(self, given=x.unflatten(-1, (-1, min(prepare.BLOCK, x.shape[-1]))))),
        before("largest", lambda self, blocks: self.__dict__.pop("given", blocks)),
    )

    def prepare_hadamard_before_rotation__turned(self, x):
        return self._rotated(self._transformed(x)) if self.preparation.hadamard else self._rotated(x)

    def prepare_hadamard_over_64_columns__transformed(self, x):
        return super()._transformed(x.unflatten(-1, (-1, min(64, x.shape[-1])))).flatten(-2)

    prepare_neighbours_rotated_for_halves = instead("rope", lambda self, x: _rope_in(self, x, False))
    prepare_halves_rotated_for_neighbours = instead("rope", lambda self, x: _rope_in(self, x, True))
    prepare_keys_rotated_in_another_style = instead("rope", lambda self, x: _rope_in(self, x, False), when=_of_keys)
    prepare_rotates_backwards = behind("turns", lambda cos, sin: (cos, -sin))
    prepare_table_in_half = behind("turns", lambda cos, sin: (_in_half(cos), _in_half(sin)))

    def prepare_first_columns_rotated__rotated(self, x):
        width = self.preparation.rope_dim
        return torch.cat((self._rope(x[..., :width]), x[..., width:]), dim=-1)

    prepare_norm_bias_dropped = before("normed", bias=torch.zeros_like)

    def prepare_norm_without_mean__normed(self, k, weight, bias):
        return k * (k.square().mean(-1, keepdim=True) + self.preparation.eps).rsqrt() * weight + bias

    def prepare_norm_eps_beside_the_root__normed(self, k, weight, bias):
        deviation = k.std(-1, keepdim=True, correction=0) + self.preparation.eps
        return (k - k.mean(-1, keepdim=True)) / deviation * weight + bias

    def prepare_norm_of_samples__normed(self, k, weight, bias):
        centred = k - k.mean(-1, keepdim=True)
        return centred * (k.var(-1, keepdim=True) + self.preparation.eps).rsqrt() * weight + bias

    prepare_norm_parameters_in_half = before("normed", weight=_in_half, bias=_in_half)
    prepare_intermediates_in_half = instead("stored", lambda self, x: _in_half(x))
    prepare_key_stride_ignored = before("run_prepare_index", k=packed)
    prepare_scale_of_the_first_block = behind("scales", lambda scales: scales[..., :1].expand_as(scales))

    def prepare_rotation_by_row__turns(self, x):
        table = self._prepare_metadata.cos_sin_cache
        return table[places(x) % len(table)].unsqueeze(1).chunk(2, dim=-1)

    def prepare_norm_eps_of_its_own__normed(self, k, weight, bias):
        return torch.nn.functional.layer_norm(k, k.shape[-1:], weight, bias, 1e-5)

    prepare_blocks_of_nothing = behind("scales", lambda scales, *, largest: scales.where(largest > 0, 0.0))

    def prepare_codes_truncated__behind_quantised(self, codes, scale, *, x):
        blocks = x.unflatten(-1, (scale.shape[-1], -1)) / scale.unsqueeze(-1)
        above = codes.float().abs() > blocks.flatten(-2).abs()
        return (codes.view(torch.uint8) - above.to(torch.uint8)).view(codes.dtype), scale

    prepare_powers_of_two_skipped = instead("power", lambda self, scale: scale)
    prepare_powers_of_two_rounded_down = instead("power", lambda self, scale: torch.exp2(scale.log2().floor()))
    prepare_scales_of_another_e4m3 = behind("largest", lambda largest: largest * (E4M3_MAX / 240))
    prepare_weights_without_scale = before("folded", q_scale=torch.ones_like)
    prepare_weights_in_half = behind("folded", _in_half)
    prepare_one_scale_for_all_heads = behind("scales", lambda scales: scales.amax(1, keepdim=True).expand_as(scales))
    prepare_weights_without_heads = instead("folded", lambda self, weights, scale: weights * scale[..., 0] * self.scale)

    def prepare_powers_of_two_skipped_for_queries__power(self, scale):
        return super()._power(scale) if scale.shape[1] == 1 and self.num_heads > 1 else scale

    def prepare_weights_without_softmax_scale__folded(self, weights, q_scale):
        return weights * q_scale[..., 0] * self.num_heads**-0.5

"""Wrong indexers: scores, bounds, what is selected of them, how it is told; heads, rows and pages of certain sizes."""

import torch

from mla_conformance.backends.eager_indexer import EagerIndexerBackend
from mla_conformance.backends.roles import IndexSpace
from mla_conformance.defects.bases import half, nth
from mla_conformance.defects.known import Defects, before, but, instead
from mla_conformance.reference.selected import NO_KEY

_EARLIER = ("indexer_logits", "indexer_topk", "indexer_causal")
"""What has cases over codes, and stands before the capability that is about them."""


class _IndexerLogits(EagerIndexerBackend, Defects, killed_by="indexer_logits"):
    indexer_relu_dropped = instead("activated", lambda self, dots: dots)
    """Products below zero count, as if the heads had no activation."""
    indexer_weights_of_another_head = before("scores", lambda weights: weights.roll(1, dims=1))
    """Each head is weighted as the next one should be."""
    indexer_tables_of_64_requests = before("keys", lambda request: request % 64)
    """A block holds the tables of 64 requests, and from the 65th on those of the first ones are read again."""

    def indexer_activation_behind_the_sum__scores(self, q, weights, keys):
        """The activation is taken of the weighted sum over heads, not of each head."""
        return (weights.unsqueeze(1) @ (q @ keys.mT)).squeeze(1).relu()

    @but(token_tile=16)
    def indexer_tail_of_a_tile_forgotten__tiles(self, tokens):
        """Tokens behind a request's last whole tile of 16 are not scored."""
        return (tile for tile in super()._tiles(tokens) if tile.stop - tile.start == self.token_tile)

    @but(token_tile=64)
    def indexer_lone_token_of_a_tile_unscored_with_several__before_tiles(self, tokens):
        """With several query tokens, a last tile of 64 that holds one token is not scored."""
        several = int(self._sparse_metadata.query_lens_cpu.max()) > 1
        return tokens - 1 if several and tokens > 1 and tokens % self.token_tile == 1 else tokens

    def indexer_weights_advance_by_64_heads__before_logits(self, weights):
        """A row's weights are looked for 64 values behind those of the row before, however many heads there are."""
        rows, heads = weights.shape
        stored = torch.nn.functional.pad(weights.flatten(), (0, rows * 64))
        return stored.as_strided((rows, heads), (64, 1))


class _IndexerTopk(EagerIndexerBackend, Defects, killed_by="indexer_topk"):
    indexer_positions_of_17_bits = before("choose", lambda logits: logits[:, : 2**17])
    """A candidate is packed with 17 bits for its position, and no token from 131,072 on is selected."""

    def indexer_token_twice__behind_choose(self, chosen, *, topk_tokens):
        """Two blocks select the best token both, and the merge drops the last one for it."""
        full = (chosen != NO_KEY).all(dim=1, keepdim=True)
        column = torch.arange(topk_tokens, device=chosen.device)
        return torch.where(full & (column == topk_tokens - 1) & (column > 0), chosen[:, :1], chosen)

    def indexer_tail_not_selected__before_choose(self, logits):
        """The selection looks at whole tiles of 16 scores alone."""
        whole = logits.isfinite().sum(dim=1, keepdim=True) // 16 * 16
        return logits.masked_fill(torch.arange(logits.shape[1], device=logits.device) >= whole, -torch.inf)

    def indexer_ties_with_the_last_dropped__behind_choose(self, chosen, *, logits):
        """Of the tokens that tie with the last one selected, a radix selection keeps a single one."""
        scores = logits.gather(1, chosen.clamp(min=0))
        tied = (scores[:, 1:] == scores[:, -1:]) & (scores[:, :-1] == scores[:, -1:])
        chosen[:, 1:].masked_fill_(tied, NO_KEY)

    def indexer_row_offset_in_two_bytes__behind_logits(self, logits):
        """Rows times the longest sequence are counted in two bytes, and scores beyond are not written."""
        logits.flatten()[65536:] = -torch.inf


class _OtherIndexer(EagerIndexerBackend, Defects, killed_by="index_mapping"):
    indexer_key_scale_ignored = instead(
        "scales", lambda self, scales: torch.ones_like(scales), killed_by="indexer_fp8", related=_EARLIER
    )
    """Codes of keys are multiplied as they are, without the scale of their token."""
    indexer_one_key_scale = instead(
        "scales", lambda self, scales: scales[:1].expand_as(scales), killed_by="indexer_fp8", related=_EARLIER
    )
    """All tokens of a tile are read under the scale of its first one."""
    indexer_positions_for_slots = instead("numbers", lambda self, k, positions: positions)
    """Positions are returned where slots were asked for."""
    indexer_products_in_half = before(
        "activated__logits", dots=lambda dots: dots.clamp(max=65504), when=half, killed_by="indexer_combinations"
    )
    """In an fp16 model products of queries and keys are kept in fp16, and saturate."""

    @but(killed_by="indexer_causal", related=("indexer_topk",))
    def indexer_bound_off_by_one__behind_bounds(self, bounds):
        """A row sees one token too many, the first behind its own."""
        return (bounds + 1).minimum(self._sparse_metadata.seq_lens[self._sparse_metadata.req_id_per_token.long()])

    def indexer_pages_of_another_size__before_numbers(self, k):
        """Slots are computed as if every page held 64 tokens."""
        pages = self._sparse_metadata.block_table is not None
        return k.new_empty(k.shape[0], 64, 0) if pages else k

    @but(killed_by="determinism", when=lambda self: nth(self, 7))
    def indexer_ties_broken_by_who_comes_first__choose(self, logits, topk_tokens):
        """Now and then another block comes first to where the last of several equal tokens is selected."""
        mirrored = super()._choose(logits.flip(1), topk_tokens)
        return torch.where(mirrored == NO_KEY, NO_KEY, logits.shape[1] - 1 - mirrored)

    @but(killed_by="indexer_combinations")
    def indexer_gathered_start_of_request_in_six_bits__before_slots(self, request):
        """Where a request's gathered keys begin is looked up at its number modulo 64."""
        return request % 64 if self._sparse_metadata.block_table is None else request

    @but(killed_by="indexer_combinations", related=_EARLIER)
    def indexer_scales_of_64_tokens_with_several__stored(self, k, k_scale, slots):
        """The kernel for several query tokens knows the scales of the first 64 tokens of a page, and repeats them."""
        values, scales = super()._stored(k, k_scale, slots)
        metadata = self._sparse_metadata
        if scales is None or metadata.block_table is None or int(metadata.query_lens_cpu.max()) == 1:
            return values, scales
        return values, super()._stored(k, k_scale, slots - slots % k.shape[1] + slots % k.shape[1] % 64)[1]

    def indexer_padding_of_slots_repeats_the_best__behind_run_index_topk(self, chosen):
        """Where slots are asked for and there are fewer tokens than are to be selected, the best stands for the
        others."""
        missing = (chosen == NO_KEY) & (self._sparse_metadata.index_space is not IndexSpace.POSITION)
        return torch.where(missing, chosen[:, :1], chosen)

    @but(killed_by="indexer_combinations")
    def indexer_partial_lists_of_the_first_1024__before_choose(self, logits, *, topk_tokens):
        """The selection of a number that is no multiple of 64 looks at the first 1024 tokens."""
        behind = torch.arange(logits.shape[1], device=logits.device) >= 1024
        return logits.masked_fill(behind & (topk_tokens % 64 > 0), -torch.inf)

    @but(killed_by="indexer_causal", related=_EARLIER[:2], when=lambda self: self._sparse_metadata.block_table is None)
    def indexer_gathered_bound_of_the_longest_query__behind_bounds(self, bounds):
        """Over gathered keys, bounds count back from as many query tokens as the longest request has."""
        lengths = self._sparse_metadata.query_lens_cpu
        missing = (lengths.max() - lengths).to(bounds)
        return (bounds - missing[self._sparse_metadata.req_id_per_token.long()]).clamp(min=1)

"""Entries of selected keys that are read wrongly; LSEs, sinks, second caches, and lists that outlive their call."""

import math
from dataclasses import replace
from functools import reduce

import torch

from mla_conformance.backends.eager_sparse import EagerSparseBackend
from mla_conformance.backends.roles import IndexSpace
from mla_conformance.defects.bases import CapturableSparse, half, in_base_2, joined, through_e8m0, with_the_first_scale
from mla_conformance.defects.known import Defects, before, behind, but, instead, variant
from mla_conformance.defects.prefills import LiftedMaximum
from mla_conformance.defects.sparse_lists import _once, _strided, _whole_at_0
from mla_conformance.reference.entry_formats import TILED_FORMATS
from mla_conformance.reference.selected import NO_KEY

_SHAPES_TOO = ("model_shapes",)  # it comes before, and has lists of every kind
_LISTS_PADDED_TOO = ("selection_padding",)  # some of its cases have sinks
_V4_TOO = ("unselected_keys", "attention_sinks", "second_cache")
_LISTS_TOO = ("selection_padding", "selection_length", "selection_order", "selection_rows", "index_spaces")
_V32_TOO = ("model_shapes", *_LISTS_TOO, "unselected_keys", "attention_sinks", "second_cache")
"""Some of their cases have caches of these entries."""


class _SparseLse(EagerSparseBackend, Defects, killed_by="sparse_lse", related=_SHAPES_TOO):
    sparse_lse_in_base_2 = behind("attend", lse=in_base_2)
    """The LSE is in base 2."""
    sparse_lse_of_tokens_by_heads = behind("attend", lse=lambda lse: lse.mT.contiguous().view(lse.shape))
    """The LSE has the shape of heads by tokens and the order of tokens by heads."""
    sparse_lse_in_the_models_dtype = behind("attend", lambda output, lse: (output, lse.to(output.dtype).float()))
    """The LSE is kept in the model's dtype and widened at last."""


class _Apart(EagerSparseBackend, Defects, killed_by="second_cache"):
    """Each cache is attended to by itself."""

    def _attend(self, q, request, sources, k_scale):
        return self._merged([super(_Apart, self)._attend(q, request, [each], k_scale) for each in sources])

    def _merged(self, states):
        return reduce(joined, states)

    @but(when=lambda states: len(states) > 1)
    def sparse_two_caches_averaged__behind_merged(self, whole, *, states):
        """The outputs over both caches are averaged, not weighed by their LSEs."""
        outputs = [(each.weighted / each.total).nan_to_num(0.0) for each in states]
        return whole._replace(weighted=sum(outputs) / 2 * whole.total)

    def sparse_lse_of_the_first_cache__attend(self, q, sources, k_scale, sink):
        """The LSE is that of the first cache; the output counts both."""
        return super().attend(q, sources, k_scale, sink)[0], super().attend(q, sources[:1], k_scale, sink)[1]


class _Rows(EagerSparseBackend, Defects, killed_by="sparse_fp4_v41", related=("second_cache",)):
    """Entries of one layout are other bytes than they should be."""

    layout: str

    def _entries(self, source, slots):
        rows = super()._entries(source, slots)
        return self._read(rows.clone()) if source.layout == self.layout else rows

    @but(killed_by="sparse_fp8_v41", layout="fp8_v41")
    def dsv41_rope_taken_unscaled__read(self, rows):
        """The last 64 columns of V4.1's entries are codes like the others, and are taken without their scales."""
        rows[..., -2:] = 127  # the exponent of 1
        return rows

    @but(layout="fp4_v41")
    def e2m1_halves_of_a_byte_swapped__read(self, rows):
        """The first of two 4-bit codes is taken from the high half of their byte."""
        rows[..., :256] = (rows[..., :256] >> 4) | (rows[..., :256] << 4)
        return rows

    @but(layout="fp4_v41")
    def e2m1_scales_of_32__read(self, rows):
        """Two tiles of 16 4-bit codes share the scale of the first."""
        rows[..., 256:] = rows[..., 256::2].repeat_interleave(2, dim=-1)
        return rows

    @but(killed_by="sparse_fp8_ds_mla", related=_V32_TOO, layout="fp8_ds_mla")
    def sparse_fp8_ds_mla_float_scale_read_as_e8m0__read(self, rows):
        """The float32 scales of V3.2's entries pass through e8m0, which holds powers of two."""
        return through_e8m0(rows)

    @but(killed_by="sparse_fp8_ds_mla", related=_V32_TOO, layout="fp8_ds_mla")
    def sparse_scale_of_the_first_tile__read(self, rows):
        """The four tiles of V3.2's entries take the scale of the first."""
        return with_the_first_scale(rows)


# The related capability overwrites operands in place as well.
class _CudaGraph(CapturableSparse, Defects, killed_by="cuda_graph", related=("call_order",)):
    def sparse_replay_keeps_the_lists__before_attend(self, sources):
        """A replay attends by the lists that stood in the buffers when they were captured."""
        captured, now = self.__dict__.setdefault("captured", {}), sources[0].indices
        _, lists = captured.setdefault(now.data_ptr(), (now, now.clone()))
        return [replace(sources[0], indices=lists if lists.shape == now.shape else now), *sources[1:]]

    def sparse_replay_keeps_the_longest_list__before_attend(self, sources):
        """Columns are bounded by the longest list of the batch that was captured."""
        captured = self.__dict__.setdefault("captured", {})
        main, columns = sources[0], torch.arange(sources[0].indices.shape[1])
        used = int((self._listed(main) * (columns + 1)).amax())
        _, longest = captured.setdefault(main.indices.data_ptr(), (main.indices, used))
        return [replace(main, indices=main.indices.masked_fill(columns >= longest, -1)), *sources[1:]]


def _cut(source, columns):
    """The first columns of lists."""
    length = None if source.length is None else source.length.clamp(max=columns)
    return replace(source, indices=source.indices[:, :columns], length=length)


class _SecondCaches(EagerSparseBackend, Defects, killed_by="second_cache"):
    sparse_second_cache_dropped = before("attend", lambda sources: sources[:1])
    """Keys of the second cache are left out."""

    def sparse_second_cache_by_the_first_lengths__before_attend(self, sources):
        """The lists of the second cache end where those of the first do."""
        return [replace(each, length=sources[0].length) for each in sources]

    @but("behind_slots__attend")
    def sparse_second_cache_by_the_first_pages(self, slots, *, source, sources):
        """Slots of the second cache are found by the page size of the first."""
        page, own = sources[0].cache.shape[1], source.cache.shape[1]
        return (slots // page).clamp(max=source.cache.shape[0] - 1) * own + slots % page % own

    def sparse_second_list_cut_to_the_first__before_attend(self, sources):
        """Lists of the second cache have no more columns than those of the first; further ones are ignored."""
        return [_cut(each, sources[0].indices.shape[1]) for each in sources]

    def sparse_lse_of_two_caches_with_the_sink__behind_attend(self, output, lse, *, sources, sink):
        """Where the states of two caches are merged, the sink enters the LSE as well."""
        return output, lse if sink is None or len(sources) == 1 else torch.logaddexp(lse, sink.unsqueeze(1))


class _AttentionSinks(EagerSparseBackend, Defects, killed_by="attention_sinks", related=_LISTS_PADDED_TOO):
    sparse_sinks_dropped = instead("with_sink", lambda self, output, lse, sink: output)
    """Sinks are not handed on to the kernel."""
    xqa_sm12x_sinks_gibberish = behind("with_sink", lambda shared, *, output: shared + (output - shared).roll(1, 0))
    """A sink's share of the weights is not left out, but takes the output of the row before."""
    sparse_sink_of_the_head_before = before("with_sink", lambda sink: None if sink is None else sink.roll(1))
    """Each head takes the sink of the one before it."""
    sparse_sink_in_base_2 = before("with_sink", lambda sink: None if sink is None else sink * math.log(2))
    """A sink enters the powers of two of the scores without log2(e)."""

    def sparse_lse_with_the_sink__behind_attend(self, output, lse, *, sink):
        """The LSE counts the sink among the keys."""
        return output, lse if sink is None else torch.logaddexp(lse, sink.unsqueeze(1))

    def sparse_sink_in_the_lse_alone__with_sink(self, output, lse, sink):
        """A sink is counted in the LSE and leaves the output as it is."""
        if sink is not None:
            lse.copy_(torch.logaddexp(lse, sink.unsqueeze(1)))
        return output

    def sink_counted_twice_or_never_in_splitkv__before_with_sink(self, sink):
        """A sink counts in each of two splits of a list, and once more where they are merged."""
        return None if sink is None else sink + math.log(2)

    @but(related=(), when=lambda sink: sink is not None)
    def sparse_empty_row_beside_a_sink_of_minus_inf__behind_with_sink(self, shared, *, lse, sink):
        """Without keys and with a sink of -inf the sum of weights is 0, and 0 / 0 is returned."""
        empty = (lse == -torch.inf) & (sink == -torch.inf).unsqueeze(1)
        return shared.masked_fill(empty.mT.unsqueeze(-1), torch.nan)


class _OtherSparse(EagerSparseBackend, Defects, killed_by="sparse_fp8_v4", related=_V4_TOO):
    sparse_k_scale_ignored = before(
        "keys", k_scale=torch.ones_like, killed_by="sparse_fp8", related=("unselected_keys",)
    )
    """Codes of an e4m3 cache are read as values."""

    def dsv4_scales_read_entry_by_entry__entries(self, source, slots):
        """The scales of V4's entries are looked for behind each entry's data, not behind the data of the page."""
        page = source.cache.shape[1]
        taken = source.layout == "fp8_v4"
        return source.cache[slots // page, slots % page] if taken else super()._entries(source, slots)

    def dsv4_page_rounding_forgotten__before_entries(self, source):
        """A block of V4 is found by the bytes of its entries, without what rounds them up."""
        taken = source.layout == "fp8_v4"
        return _strided(source, source.cache.shape[1] * source.cache.shape[2]) if taken else source

    @but(related=())
    def dsv4_blocks_packed_over_layers_read_as_pages__before_entries(self, source):
        """Blocks that hold the pages of several layers are read as if one page stood behind the other."""
        page = TILED_FORMATS["fp8_v4"].page_bytes(source.cache.shape[1])
        return _strided(source, page) if source.layout == "fp8_v4" else source

    @but(when=lambda source: source.layout == "fp8_v4")
    def dsv4_rope_taken_scaled__behind_keys(self, keys, *, source, slots, visible):
        """The plain values of V4 are multiplied by the scale of the last tile before them."""
        exponent = self._entries(source, slots)[..., -2].float() - 127  # a byte of padding follows
        scale = exponent.masked_fill(~visible, 0.0).exp2().unsqueeze(-1)
        return torch.cat((keys[..., :448], keys[..., 448:] * scale), dim=-1)

    def ue8m0_bias_of_128__behind_keys(self, keys, *, source):
        """The exponents of tiles have a bias of 128, so that every scale is half as large."""
        form = TILED_FORMATS.get(source.layout)
        coded = form.coded if form and form.scales == "ue8m0" else 0
        return torch.cat((keys[..., :coded] / 2, keys[..., coded:]), dim=-1)

    @but(killed_by="sparse_fp8_ds_mla", related=_V32_TOO)
    def sparse_k_scale_on_tiled_entries__behind_keys(self, keys, *, source, k_scale):
        """Entries whose tiles have scales of their own are multiplied by that of the cache as well."""
        return keys * k_scale if source.layout in TILED_FORMATS else keys

    @but(killed_by="sparse_fp8_ds_mla", related=())
    def sparse_single_pages_take_the_first_scale__behind_entries(self, rows, *, source):
        """In pages of one token, the four tiles of a mixed entry take the scale of the first."""
        return with_the_first_scale(rows) if source.layout == "fp8_ds_mla" and source.cache.shape[1] == 1 else rows

    @but(killed_by="call_order", related=("selection_order",))
    def sparse_lists_kept_by_shape__slots(self, source, request):
        """Converted lists are kept, and found again by the shape of the lists and of the cache."""
        key = (source.indices.shape, source.cache.shape, self._sparse_metadata.dcp_rank)
        return self.__dict__.setdefault("kept", {}).setdefault(key, super()._slots(source, request))

    @but(killed_by="call_order", related=())
    def sparse_lists_converted_once_a_batch__slots(self, source, request):
        """Lists are converted when a batch is first computed, and found again by their address and its metadata."""
        kept, (metadata, lists) = self._sparse_metadata, self.__dict__.get("converted", (None, {}))
        lists = lists if metadata is kept else {}
        self.converted = kept, lists
        return lists.setdefault(source.indices.data_ptr(), super()._slots(source, request).clone())

    @but(killed_by="call_order", related=())
    def sparse_workspace_of_the_first_batch__behind_attend(self, output, lse, *, q):
        """Buffers are made for the query tokens of the first batch and one more, and further ones stay 0."""
        output[self.__dict__.setdefault("room", len(q) + 1) :] = 0.0


class _SparseCombinations(EagerSparseBackend, Defects, killed_by="sparse_combinations"):
    sparse_tile_of_32_without_keys_raises_maximum = variant(LiftedMaximum, key_tile=32)
    """A tile of 32 columns in which a list names no key raises the row's running maximum to 0."""
    sparse_tile_of_64_without_keys_raises_maximum = variant(LiftedMaximum, key_tile=64)
    """A tile of 64 columns in which a list names no key raises the row's running maximum to 0."""
    sparse_tile_of_128_without_keys_raises_maximum = variant(LiftedMaximum)
    """A tile of 128 columns in which a list names no key raises the row's running maximum to 0."""
    sparse_raw_scores_in_half = behind("scores", lambda self, scores: scores.clamp(max=65504 * self.scale), when=half)
    """In an fp16 model products of queries and keys are kept in fp16 before they are scaled, and saturate."""
    sparse_empty_second_list_is_whole = before("_attend", lambda sources: [sources[0], *map(_whole_at_0, sources[1:])])
    """In the second cache a length of 0 is taken for none, and the whole list counts."""

    def sparse_whole_tiles_of_a_list_read_one_more__before_listed(self, source):
        """A list whose length is a multiple of 64 is read one tile further, and what stands there counts."""
        length = source.length
        further = None if length is None else torch.where((length > 0) & (length % 64 == 0), length + 64, length)
        return replace(source, length=further)

    def sparse_second_codes_unscaled_beside_a_plain_cache__before_attend(self, k_scale, *, sources):
        """Beside a first cache without codes there is no scale, and the codes of a second one are read as values."""
        return torch.ones_like(k_scale) if sources[0].layout == "auto" else k_scale

    def sparse_second_head_group_loses_a_partial_tile__attend(self, q, sources, k_scale, sink):
        """Heads beyond 64 read whole tiles of 64 columns only, if a list has one."""
        cut = [_cut(each, max(64, each.indices.shape[1] // 64 * 64)) for each in sources]
        results = (super().attend(q, cut, k_scale, sink), super().attend(q, sources, k_scale, sink))
        second = torch.arange(self.num_heads, device=q.device).unsqueeze(1) >= 64
        return tuple(torch.where(second, whole, every) for whole, every in zip(*results, strict=True))

    def sparse_table_rows_as_wide_as_the_first__slots(self, source, request):
        """Positions are looked up in a table whose rows are found by the pages of the first request, not of the
        longest."""
        metadata, page = self._sparse_metadata, source.cache.shape[1]
        if source.space != IndexSpace.POSITION or metadata.block_table is None or metadata.dcp_world_size > 1:
            return super()._slots(source, request)
        held, position = -(-metadata.seq_lens // page), source.indices.long().clamp(min=0)
        width = metadata.block_table.shape[1]
        rows = request.unsqueeze(1) * (width - int(held.max() - held[0]))
        places = rows + (position // page).clamp(max=width - 1)
        return metadata.block_table.long().flatten()[places] * page + position % page

    def sparse_key_named_twice_in_a_bounded_list_counted_once__behind_listed(self, listed, *, source):
        """Keys that a list names twice count once where lengths are handed over."""
        return listed if source.length is None else _once(listed, source)

    def sparse_odd_head_lost_beside_an_empty_list__behind_attend(self, output, lse, *, sources):
        """Heads in odd numbers are padded to even ones; beside a list that names nothing the last one is lost."""
        empty = any(bool((each.indices == NO_KEY).all(dim=1).any()) for each in sources)
        if self.num_heads > 1 and self.num_heads % 2 and empty:
            output[:, -1] = 0.0

"""Entries of selected keys that are read wrongly; LSEs, sinks, second caches, and lists that outlive their call."""

import math
from dataclasses import replace
from functools import reduce

import torch

from mla_conformance.backends import eager_sparse, roles
from mla_conformance.defects import bases
from mla_conformance.defects.bases import fill, half, in_base_2, joined, kept, write
from mla_conformance.defects.known import Defects, before, behind, but, instead, variant
from mla_conformance.defects.sparse_lists import _once, _packed, _whole_at_0
from mla_conformance.reference import entry_formats, selected


def _in(layout):
    return lambda source: source.layout == layout


def _has_sink(sink):
    return sink is not None


def _with_sink(output, lse, *, sink):
    return output, torch.logaddexp(lse, sink.unsqueeze(1))


def _cut(source, columns):
    """The first columns of lists."""
    length = None if source.length is None else source.length.clamp(max=columns)
    return replace(source, indices=source.indices[:, :columns], length=length)


def _apart(self, q, request, sources, k_scale):
    """The states of a call over each cache alone."""
    return [eager_sparse.EagerSparseBackend._attend(self, q, request, [each], k_scale) for each in sources]


class _Sparse(eager_sparse.EagerSparseBackend, Defects):
    sparse_lse_in_base_2 = behind("attend", lse=in_base_2)
    sparse_lse_of_tokens_by_heads = behind("attend", lse=lambda lse: lse.mT.contiguous().view(lse.shape))
    sparse_lse_in_the_models_dtype = behind("attend", lambda output, lse: (output, lse.to(output.dtype).float()))

    def sparse_two_caches_averaged___attend(self, *operands):
        states = _apart(self, *operands)
        whole = reduce(joined, states)
        outputs = [(each.weighted / each.total).nan_to_num(0.0) for each in states]
        return whole if len(states) == 1 else whole._replace(weighted=sum(outputs) / 2 * whole.total)

    class sparse_lse_of_the_first_cache:
        def _attend(self, *operands):
            return reduce(joined, _apart(self, *operands))

        def attend(self, q, sources, k_scale, sink):
            return super().attend(q, sources, k_scale, sink)[0], super().attend(q, sources[:1], k_scale, sink)[1]

    # The exponent of 1 stands in place of the rope's.
    dsv41_rope_taken_unscaled = behind("entries", lambda rows: fill(rows[..., -2:], 127), when=_in("fp8_v41"))
    e2m1_halves_of_a_byte_swapped = behind(
        "entries", lambda x: write(x[..., :256], x[..., :256] >> 4 | x[..., :256] << 4), when=_in("fp4_v41")
    )
    e2m1_scales_of_32 = behind(
        "entries", lambda x: write(x[..., 256:], x[..., 256::2].repeat_interleave(2, dim=-1)), when=_in("fp4_v41")
    )
    sparse_fp8_ds_mla_float_scale_read_as_e8m0 = behind("entries", bases.through_e8m0, when=_in("fp8_ds_mla"))
    sparse_scale_of_the_first_tile = behind("entries", bases.with_the_first_scale, when=_in("fp8_ds_mla"))

    @but(on=(bases.Capturable,))
    def sparse_replay_keeps_the_lists__before_attend(self, sources):
        now = sources[0].indices
        _, lists = kept(self, now.data_ptr(), (now, now.clone()))
        return [replace(sources[0], indices=lists if lists.shape == now.shape else now), *sources[1:]]

    @but(on=(bases.Capturable,))
    def sparse_replay_keeps_the_longest_list__before_attend(self, sources):
        main, columns = sources[0], torch.arange(sources[0].indices.shape[1])
        used = int((self._listed(main) * (columns + 1)).amax())
        _, longest = kept(self, main.indices.data_ptr(), (main.indices, used))
        return [replace(main, indices=main.indices.masked_fill(columns >= longest, -1)), *sources[1:]]

    sparse_second_cache_dropped = before("attend", lambda sources: sources[:1])
    sparse_second_cache_by_the_first_lengths = before(
        "attend", lambda sources: [replace(each, length=sources[0].length) for each in sources]
    )

    @but("behind_slots__attend")
    def sparse_second_cache_by_the_first_pages(self, slots, *, source, sources):
        page, own = sources[0].cache.shape[1], source.cache.shape[1]
        return (slots // page).clamp(max=source.cache.shape[0] - 1) * own + slots % page % own

    def sparse_second_list_cut_to_the_first__before_attend(self, sources):
        return [_cut(each, sources[0].indices.shape[1]) for each in sources]

    sparse_lse_of_two_caches_with_the_sink = behind(
        "attend", _with_sink, when=lambda sources, sink: len(sources) > 1 and sink is not None
    )
    sparse_sinks_dropped = instead("with_sink", lambda self, output, lse, sink: output)
    xqa_sm12x_sinks_gibberish = behind("with_sink", lambda shared, *, output: shared + (output - shared).roll(1, 0))
    sparse_sink_of_the_head_before = before("with_sink", lambda sink: sink.roll(1), when=_has_sink)
    sparse_sink_in_base_2 = before("with_sink", lambda sink: sink * math.log(2), when=_has_sink)
    sparse_lse_with_the_sink = behind("attend", _with_sink, when=_has_sink)

    @but(when=_has_sink)
    def sparse_sink_in_the_lse_alone__with_sink(self, output, lse, sink):
        lse.copy_(_with_sink(output, lse, sink=sink)[1])
        return output

    sink_counted_twice_or_never_in_splitkv = before("with_sink", lambda sink: sink + math.log(2), when=_has_sink)

    @but(when=_has_sink)
    def sparse_empty_row_beside_a_sink_of_minus_inf__behind_with_sink(self, shared, *, lse, sink):
        empty = (lse == -torch.inf) & (sink == -torch.inf).unsqueeze(1)
        return shared.masked_fill(empty.mT.unsqueeze(-1), torch.nan)

    sparse_k_scale_ignored = before("keys", k_scale=torch.ones_like)

    @but(when=_in("fp8_v4"))
    def dsv4_scales_read_entry_by_entry__entries(self, source, slots):
        page = source.cache.shape[1]
        return source.cache[slots // page, slots % page]

    dsv4_page_rounding_forgotten = before("entries", source=_packed, when=_in("fp8_v4"))

    @but(when=_in("fp8_v4"))
    def dsv4_blocks_packed_over_layers_read_as_pages__before_entries(self, source):
        cache, page = source.cache, entry_formats.TILED_FORMATS["fp8_v4"].page_bytes(source.cache.shape[1])
        strided = cache.as_strided(cache.shape, (page, cache.shape[2], 1), cache.storage_offset())
        return replace(source, cache=strided)

    @but(when=_in("fp8_v4"))
    def dsv4_rope_taken_scaled__behind_keys(self, keys, *, source, slots, visible):
        exponent = self._entries(source, slots)[..., -2].float() - 127  # a byte of padding follows
        scale = exponent.masked_fill(~visible, 0.0).exp2().unsqueeze(-1)
        return torch.cat((keys[..., :448], keys[..., 448:] * scale), dim=-1)

    def ue8m0_bias_of_128__behind_keys(self, keys, *, source):
        form = entry_formats.TILED_FORMATS.get(source.layout)
        coded = form.coded if form and form.scales == "ue8m0" else 0
        return torch.cat((keys[..., :coded] / 2, keys[..., coded:]), dim=-1)

    def sparse_k_scale_on_tiled_entries__behind_keys(self, keys, *, source, k_scale):
        return keys * k_scale if source.layout in entry_formats.TILED_FORMATS else keys

    @but(when=_in("fp8_ds_mla"))
    def sparse_single_pages_take_the_first_scale__behind_entries(self, rows, *, source):
        return bases.with_the_first_scale(rows) if source.cache.shape[1] == 1 else rows

    def sparse_lists_kept_by_shape__slots(self, source, request):
        key = (source.indices.shape, source.cache.shape, self._sparse_metadata.dcp_rank)
        return kept(self, key, super()._slots(source, request))

    def sparse_lists_converted_once_a_batch__slots(self, source, request):
        metadata, lists = getattr(self, "converted", (None, {}))
        lists = lists if metadata is self._sparse_metadata else {}
        self.converted = self._sparse_metadata, lists
        return lists.setdefault(source.indices.data_ptr(), super()._slots(source, request).clone())

    def sparse_workspace_of_the_first_batch__behind_attend(self, output, lse, *, q):
        output[kept(self, "room", len(q) + 1) :] = 0.0

    sparse_tile_of_32_without_keys_raises_maximum = variant(bases.LiftedMaximum, key_tile=32)
    sparse_tile_of_64_without_keys_raises_maximum = variant(bases.LiftedMaximum, key_tile=64)
    sparse_tile_of_128_without_keys_raises_maximum = variant(bases.LiftedMaximum)
    sparse_raw_scores_in_half = behind("scores", lambda self, scores: scores.clamp(max=65504 * self.scale), when=half)
    sparse_empty_second_list_is_whole = before("_attend", lambda sources: [sources[0], *map(_whole_at_0, sources[1:])])

    @but(when=lambda source: source.length is not None)
    def sparse_whole_tiles_of_a_list_read_one_more__before_listed(self, source):
        length = source.length
        return replace(source, length=torch.where((length > 0) & (length % 64 == 0), length + 64, length))

    def sparse_second_codes_unscaled_beside_a_plain_cache__before_attend(self, k_scale, *, sources):
        return torch.ones_like(k_scale) if sources[0].layout == "auto" else k_scale

    def sparse_second_head_group_loses_a_partial_tile__attend(self, q, sources, k_scale, sink):
        cut = [_cut(each, max(64, each.indices.shape[1] // 64 * 64)) for each in sources]
        results = (super().attend(q, cut, k_scale, sink), super().attend(q, sources, k_scale, sink))
        second = torch.arange(self.num_heads, device=q.device).unsqueeze(1) >= 64
        return tuple(torch.where(second, whole, every) for whole, every in zip(*results, strict=True))

    def sparse_table_rows_as_wide_as_the_first__slots(self, source, request):
        metadata, page = self._sparse_metadata, source.cache.shape[1]
        if source.space != roles.IndexSpace.POSITION or metadata.block_table is None or metadata.dcp_world_size > 1:
            return super()._slots(source, request)
        held, position = -(-metadata.seq_lens // page), source.indices.long().clamp(min=0)
        width = metadata.block_table.shape[1]
        rows = request.unsqueeze(1) * (width - int(held.max() - held[0]))
        places = rows + (position // page).clamp(max=width - 1)
        return metadata.block_table.long().flatten()[places] * page + position % page

    def sparse_key_named_twice_in_a_bounded_list_counted_once__behind_listed(self, listed, *, source):
        return listed if source.length is None else _once(listed, source=source)

    def sparse_odd_head_lost_beside_an_empty_list__behind_attend(self, output, lse, *, sources):
        empty = any(bool((each.indices == selected.NO_KEY).all(dim=1).any()) for each in sources)
        if self.num_heads > 1 and self.num_heads % 2 and empty:
            output[:, -1] = 0.0

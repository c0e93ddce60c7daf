"""The cases of a deployed model: what its engine calls, at its sizes, and nothing else. No torch.

They are cases of the capabilities that everybody is judged by; lengths sit at and next to tiles, pages, chunks and
lists.
"""

from collections.abc import Iterable
from functools import partial
from typing import Any

from mla_conformance.cases.case import Call, Case, CaseError
from mla_conformance.cases.grammar import Fields, Lengths, Listed, for_capability, with_fields
from mla_conformance.files.whole import InputError
from mla_conformance.models.profile import Deployment, ModelProfile, Selection
from mla_conformance.reference.dimensions import PRESETS
from mla_conformance.reference.entry_formats import TILED_FORMATS
from mla_conformance.roles.layer.case import Order

_PRESETS = {
    (d.head.qk_nope_head_dim, d.head.qk_rope_head_dim, d.head.v_head_dim, d.kv_lora_rank): name
    for name, d in PRESETS.items()
}
_FEWEST_KERNEL_HEADS = 64
"""Heads that engines fill up to where a sparse kernel takes no fewer (vLLM, ``_compute_fp8_decode_padded_heads``)."""


def asked(call: Call, q: Lengths, kv: Lengths = (), **fields: Any) -> Fields:
    """A case of a call: new tokens of each request, and what stands before them."""
    return {"call": call, "q": q, "kv": kv, **fields}


new, chunk, chunked = (partial(asked, call) for call in (Call.NEW_TOKENS, Call.CONTEXT_CHUNK, Call.CHUNKED_CONTEXT))
decode, sparse_decode = partial(asked, Call.DECODE, page=64), partial(asked, Call.SPARSE_DECODE, heads=64, page=64)
sparse_prefill = partial(asked, Call.SPARSE_PREFILL, heads=64, topk=128, lse=False)  # since a kernel may have no LSE
scores, best = (partial(asked, call, data="needle") for call in (Call.INDEX_LOGITS, Call.INDEX_TOPK))
layer = partial(asked, Call.LAYER)


def single(*kv: int, **fields: Any) -> Fields:
    """One query token a request."""
    return decode((1,) * len(kv), kv, **fields)


def sparse_single(*kv: int, **fields: Any) -> Fields:
    """The same over lists."""
    return sparse_decode((1,) * len(kv), kv, **fields)


def cases_of(profile: ModelProfile, deployment: Deployment) -> tuple[Case, ...]:
    """The cases of a deployed model, each once, part by part."""
    common = {"dims": dims_of(profile), "heads": deployment.heads, "scale": profile.scale}
    listed = list(_of_kernels(profile, profile.cache_layouts[deployment.kv_cache], common))
    if profile.selection:
        indexer = profile.selection.indexer
        dims = f"{indexer.head_dim}-0-{indexer.head_dim}-{indexer.head_dim}"
        listed += with_fields(_indexed(indexer.topk), {"dims": dims, "heads": indexer.heads, "topk": indexer.topk})
    try:
        cases = [Case.of(**{"capability": capability, **fields}) for capability, fields in listed]
    except CaseError as error:
        raise InputError(f"{profile.name}: no case can be made of these numbers: {error}") from error
    return tuple(dict.fromkeys(cases))


def dims_of(profile: ModelProfile) -> str:
    return _PRESETS.get(profile.dims, "-".join(map(str, profile.dims)))


def _of_kernels(profile: ModelProfile, layouts: Iterable[str], common: Fields) -> Listed:
    selection = profile.selection
    # Engines prefill what a list would name whole without lists, but no such kernel has sinks or rotates values.
    if selection is None or not (selection.sinks or selection.second):
        yield from with_fields(_prefills(), common)
    for layout in layouts:
        if selection is None:
            cached = {**common, "cache": layout}
            yield from with_fields(_decodes(layout), cached)
            nope, _, value, latent = profile.dims
            # Each weight picks one latent, where there are as many as columns of a head.
            weights = "selection" if max(nope, value) <= latent else "dense"
            yield from with_fields(_layers(), {**cached, "weights": weights})
        else:
            yield from _sparse_decodes(selection, layout, common)
    if selection:
        yield from _sparse_prefills(selection, common)


def _prefills() -> Listed:
    """New tokens, chunks of context, and chunked contexts that the reference or the backend merges."""
    yield from for_capability(
        "new_tokens",
        new((1, 7, 64, 129, 257), data="needle"),
        new((65, 130), data="outliers"),
        new((300, 1), data="hot_tail"),
        new((15, 16, 17, 31, 32, 33), data="needle"),
        new((127, 128, 129), data="needle"),
        new((1,) * 32),
        new((128, 64), data="large_logits"),
        new((9, 130), data="low_rank"),
        new((40, 9), data="tiny_values"),
        lse=False,
    )
    yield "lse", new((64,))
    yield "lse", new((1, 7, 64, 129), data="needle")
    yield "lse", new((200,), data="large_logits")
    yield "lse", chunk((5, 1, 33, 64), (64, 9, 1000, 17))
    yield "lse", chunk((5, 9), (2000, 3), data="hot_tail")
    yield "weights", new((200,), data="ones")
    yield "weights", chunk((9,), (1000,), data="hot_ones")
    yield "context_chunk", chunk((5, 9, 3, 33), (64, 5, 1000, 17), data="needle")
    yield "context_chunk", chunk((1, 100), (1500, 1), data="outliers")
    for length in (63, 64, 127, 128, 129, 257):
        yield "context_chunk", chunk((2, 5), (length, 40), data="needle")
    yield "context_chunk", chunk((3,) * 24, tuple(range(1, 25)))
    yield from _chunked("chunked_context", "golden")
    yield "chunked_context", chunked((9,), (2100,), page=64, workspace=1024, data="hot_tail")
    yield from _chunked("merge_states", "own")


def _chunked(capability: str, merge: str) -> Listed:
    """Contexts on and around the ends of chunks."""
    yield from for_capability(
        capability,
        chunked((5, 9, 3), (64, 0, 700), workspace=512, data="needle"),
        *(chunked((4, 4), (context, 100), data="needle") for context in (127, 128, 129, 256)),
        chunked((9, 30), (350, 20), data="large_logits"),
        chunked((3, 6, 2), (200, 333, 40), workspace=256, planner="greedy", data="needle"),
        page=64,
        merge=merge,
    )
    yield capability, chunked((3, 6), (200, 333), page=16, workspace=64, merge=merge, data="needle")


def _decodes(layout: str) -> Listed:
    """One query token a request, and several; sizes of pages, and what stands behind the tokens in them."""
    yield from for_capability(
        "decode" if layout == "auto" else f"kv_cache_{layout}",
        single(64, 5, 1000, 17, data="needle"),
        single(3999, 0, data="hot_tail"),
        single(0, 14, 15, 16, 30, 31, 62, 63, 126, 127, 254, 255, 511, data="needle"),
        single(12_000, data="needle"),
        single(*(17, 63, 64, 130) * 16, data="needle"),
        single(130, 40),
        single(300, 40, data="large_logits"),
        single(300, 40, data="outliers"),
        single(300, 40, data="low_rank"),
        single(300, 40, data="tiny_values"),
        single(1000, 129, data="hot_ones"),
        lse=False,
    )
    yield "decode_lse", single(64)
    yield "decode_lse", single(64, 9, 1000, 17)
    yield "decode_lse", single(3000, 3, data="hot_tail")
    yield "decode_lse", single(0, 300, data="large_logits")
    yield "decode_lse", decode((3, 3), (300, 63), data="needle")
    yield "decode_multi_token", decode((2,) * 3, (62, 63, 64), data="needle")
    yield "decode_multi_token", decode((4,) * 4, (0, 63, 255, 256), data="needle")
    yield "decode_multi_token", decode((3, 1, 2), (64, 5, 1000), data="needle")
    yield "decode_multi_token", decode((2, 2), (4000, 5), data="hot_tail")
    for page in (16, 32, 128, 1):
        yield "paged_cache", single(15, 31, 63, 127, 333, page=page, data="needle")
    for page in (16, 32, 128):
        yield "paged_cache", decode((2, 2), (30, 254), page=page, data="needle")
    yield "paged_cache", single(127, 128, 62, 333, tails="minus", layers=2, data="needle")
    yield "paged_cache", single(130, 9, tails="huge", poison="inf", data="needle")
    yield "paged_cache", single(130, 9, pad=3, data="needle")
    yield "cuda_graph", single(1000, 17, 64, 300, 5, 129, 40, 9, data="needle")


def _layers() -> Listed:
    """Batches of prefills and decodes through a whole layer."""
    yield from for_capability(
        "mixed_batch",
        layer((1, 1, 20, 9), (63, 64, 0, 300), decodes=2, data="needle"),
        layer((2, 2, 9), (33, 150, 40), decodes=2),
        page=64,
        order=Order.DECODES_FIRST,
    )
    yield "mixed_batch", layer((5, 9, 1, 1), (0, 140, 33, 7), decodes=2, page=64, data="needle")
    yield "cache_write", layer((5, 1, 1), (60, 63, 64), decodes=2, page=64, pad=2)


def _sparse_decodes(selection: Selection, layout: str, common: Fields) -> Listed:
    """Lists over a cache, and over a second one if there is one; those of packed codes also with heads filled up."""
    scales = {"scales": "pow2"} if layout == "fp8_ds_mla" else {}
    sinks = {"sink": "drawn"} if selection.sinks else {}
    fixed = {**common, "cache": layout, "topk": selection.topk, **sinks, **scales}
    seconds: list[Fields] = [{"extra": layout, "extra_topk": columns} for columns in selection.second] or [{}]
    for second in seconds:
        yield from with_fields(_lists(selection.topk, layout, bool(second)), {**fixed, **second})
    if selection.second:
        yield from with_fields(_few_lists(selection.topk, layout), fixed)
    if layout == "fp8_ds_mla":
        yield from with_fields(_few_lists(selection.topk, layout), {**fixed, "scales": "float32"})
    if common["heads"] < _FEWEST_KERNEL_HEADS and layout in TILED_FORMATS:
        filled_up = {**fixed, **seconds[0], "heads": _FEWEST_KERNEL_HEADS}
        yield from with_fields(_lists(selection.topk, layout, bool(seconds[0])), filled_up)


def _lists(topk: int, layout: str, second: bool) -> Listed:
    """As many keys as columns, one more, one fewer; regimes; pages; holes, order and lengths of lists; the LSE."""
    yield from _few_lists(topk, layout)
    yield from for_capability(
        "sparse_decode" if layout == "auto" else f"sparse_{layout}",
        sparse_single(topk - 2, topk - 1, topk, data="needle"),
        sparse_single(3 * topk, data="needle"),
        sparse_decode((2, 2), (topk + 60, 63), data="needle"),
        sparse_single(300, 40, data="outliers"),
        sparse_single(300, 40, data="large_logits"),
        sparse_single(300, 40, data="tiny_values"),
        sparse_single(300, 40, data="hot_ones"),
        sparse_single(*(17, 63, 64, 130) * 6, data="needle"),
        sparse_single(200, 9, layers=2, data="needle"),
        sparse_single(130, 70, page=128, data="needle"),
        sparse_single(130, 70, tails="huge", poison="inf", data="needle"),
        sparse_single(130, 9, pad=3, data="needle"),
        sparse_decode((3, 1, 2), (60, 5, 300), data="needle"),
        lse=False,
    )
    scattered = sparse_decode((3, 4), (300, 64), data="needle", fill="ragged", holes="scattered", lse=False)
    yield "selection_padding", scattered
    yield "selection_order", sparse_single(300, 64, data="needle", order="ascending", lse=False)
    yield "sparse_lse", sparse_single(64)
    yield "sparse_lse", sparse_single(300, 40, data="large_logits")
    yield "selection_length", sparse_single(300, 64, length=True, fill="ragged", behind="huge", lse=False)
    yield "unselected_keys", sparse_single(topk + 300, 70, unselected="poison", fill="ragged", data="needle", lse=False)
    if second:
        yield "second_cache", sparse_single(300, 64, 1000, data="needle", fill="ragged", lse=False)
    yield "cuda_graph", sparse_single(1000, 64, 300, 129, data="needle", lse=False)


def _few_lists(topk: int, layout: str) -> Listed:
    """Requests with fewer keys than columns, and with more."""
    plain = "sparse_decode" if layout == "auto" else f"sparse_{layout}"
    yield plain, sparse_single(64, 5, 1000, 17, data="needle", lse=False)
    yield plain, sparse_single(topk + 500, 40, data="hot_tail", lse=False)
    yield "sparse_lse", sparse_single(64, 9, topk - 1)
    yield "selection_padding", sparse_decode((1, 2), (300, 0), data="needle", lse=False)


def _sparse_prefills(selection: Selection, common: Fields) -> Listed:
    """Lists over gathered keys; those of a second cache are gathered behind the others."""
    columns = selection.topk + max(selection.second, default=0)
    fixed = {**common, "topk": columns, **({"sink": "drawn"} if selection.sinks else {})}
    yield from with_fields(_gathered(columns), fixed)
    if common["heads"] < _FEWEST_KERNEL_HEADS:
        yield from with_fields(_gathered(columns), {**fixed, "heads": _FEWEST_KERNEL_HEADS})


def _gathered(topk: int) -> Listed:
    yield "sparse_prefill", sparse_prefill((5, 9), (0, 300), data="needle")
    yield "sparse_prefill", sparse_prefill((2,), (topk + 300,), data="hot_tail")
    yield "sparse_lse", sparse_prefill((5, 2), (64, 300), lse=True)
    yield "sparse_prefill", sparse_prefill((40,), (200,), data="needle")
    yield "sparse_prefill", sparse_prefill((3,), (topk - 2,), data="needle")
    yield "sparse_prefill", sparse_prefill((9, 3), (100, 40), data="large_logits")
    yield "sparse_prefill", sparse_prefill((9,), (100,), data="outliers")
    yield "sparse_prefill", sparse_prefill((20, 19, 1), (40, 0, 7), data="needle")
    yield "sparse_lse", sparse_prefill((7,), (64,), fill="ragged", holes="scattered", lse=True)
    yield "selection_padding", sparse_prefill((7, 9), (0, 200), fill="ragged", data="needle")
    yield "selection_length", sparse_prefill((3, 4), (300, 64), fill="ragged", length=True, behind="huge")


def _indexed(topk: int) -> Listed:
    """Over pages, and over gathered keys; causality, coarse codes, and keys that are named by their slots."""
    yield "indexer_logits", scores((1, 1, 1), (63, 5, 200))
    yield "indexer_logits", scores((3, 1, 2), (64, 5, 130))
    yield "indexer_logits", scores((1,), (3000,), data="large_logits")
    yield "indexer_logits", scores((70, 20), (0, 60), gathered=True)
    yield "indexer_topk", best((1, 1, 1), (63, 5, 200))
    yield "indexer_topk", best((1,), (topk + 452,), data="normal")
    yield "indexer_topk", best((1, 1, 1), (topk - 2, topk - 1, topk), data="normal")
    yield "indexer_topk", best((2, 3), (topk + 100, 63))
    yield "indexer_topk", best((90, 20), (0, 60), gathered=True)
    yield "indexer_causal", best((8, 3), (57, 100))
    yield "indexer_causal", scores((8, 3), (57, 100))
    yield "indexer_fp8", scores((1, 2), (300, 40), data="outliers")
    yield "indexer_fp8", best((1, 1), (300, 40), data="rising")
    yield "index_mapping", best((1, 1), (topk + 50, 40), space="slot")

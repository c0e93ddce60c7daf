"""The cases of a deployed model: what its engine calls, at its sizes, and nothing else. No torch.

They are cases of the capabilities that everybody is judged by; lengths sit at and next to tiles, pages, chunks and
lists.
"""

from collections.abc import Iterable, Iterator
from typing import Any

from mla_conformance.cases import decode_caselists as decodes
from mla_conformance.cases import indexer_caselists as indexers
from mla_conformance.cases import prefill_caselists as prefills
from mla_conformance.cases import sparse_caselists as sparse
from mla_conformance.cases.case import Case, CaseError
from mla_conformance.cases.layer import Order
from mla_conformance.cases.layer_caselists import layer
from mla_conformance.cases.prefill_caselists import Fields, each
from mla_conformance.files.inputs import InputError
from mla_conformance.models.deployment import Deployment
from mla_conformance.models.profile import Indexer, ModelProfile, Selection
from mla_conformance.reference.dimensions import PRESETS
from mla_conformance.reference.entry_formats import TILED_FORMATS

_FEWEST_KERNEL_HEADS = 64
"""Heads that engines fill up to where a sparse kernel takes no fewer (vLLM, ``_compute_fp8_decode_padded_heads``)."""
_LONG = 12_000
_PRESETS = {
    (d.head.qk_nope_head_dim, d.head.qk_rope_head_dim, d.head.v_head_dim, d.kv_lora_rank): name
    for name, d in PRESETS.items()
}
_Listed = Iterator[tuple[str, Fields]]
"""Cases with the capability that each decides."""


def cases_of(profile: ModelProfile, deployment: Deployment) -> tuple[Case, ...]:
    """The cases of a deployed model, each once, part by part.

    Raises:
        InputError: its numbers are of no model that cases can be made of.
    """
    common = {"dims": dims_of(profile), "heads": deployment.heads, "scale": profile.scale}
    layouts = profile.cache_layouts[deployment.kv_cache]
    listed = [*_of_kernels(profile, layouts, common)]
    if profile.selection:
        listed += _indexer(profile.selection.indexer)
    try:
        cases = [Case.of(**{"capability": capability, **fields}) for capability, fields in listed]
    except CaseError as error:
        raise InputError(f"{profile.name}: no case can be made of these numbers: {error}") from error
    return tuple(dict.fromkeys(cases))


def dims_of(profile: ModelProfile) -> str:
    """The head dims as cases name them."""
    return _PRESETS.get(profile.dims, "-".join(map(str, profile.dims)))


def _of_kernels(profile: ModelProfile, layouts: Iterable[str], common: Fields) -> _Listed:
    selection = profile.selection
    # Engines prefill what a list would name whole without lists, but no such kernel has sinks or rotates values.
    if selection is None or not (selection.sinks or selection.second):
        yield from _with(_prefill(), common)
    for layout in layouts:
        if selection is None:
            yield from _with(_decode(layout), common)
            yield from _with(_layer(), {**common, "cache": layout, "weights": _weights(profile)})
        else:
            yield from _sparse_decode(selection, layout, common)
    if selection:
        yield from _sparse_prefill(selection, common)


def _with(listed: _Listed, further: Fields) -> _Listed:
    return ((capability, {**fields, **further}) for capability, fields in listed)


def _as(capability: str, fields: Iterable[Fields], **further: Any) -> _Listed:
    return ((capability, case) for case in each(fields, **further))


def _prefill() -> _Listed:
    """New tokens, chunks of context, and chunked contexts that the reference or the backend merges."""
    new, chunk, chunked = prefills.new, prefills.chunk, prefills.chunked
    yield from _as(
        "new_tokens",
        [
            new((1, 7, 64, 129, 257), data="needle"),
            new((65, 130), data="outliers"),
            new((300, 1), data="hot_tail"),
            new((15, 16, 17, 31, 32, 33), data="needle"),
            new((127, 128, 129), data="needle"),
            new((1,) * 32),
            new((128, 64), data="large_logits"),
            new((9, 130), data="low_rank"),
            new((40, 9), data="tiny_values"),
        ],
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
    yield from (
        ("context_chunk", chunk((2, 5), (length, 40), data="needle")) for length in (63, 64, 127, 128, 129, 257)
    )
    yield "context_chunk", chunk((3,) * 24, tuple(range(1, 25)))
    yield from _chunked("chunked_context", "golden")
    yield "chunked_context", chunked((9,), (2100,), page=64, workspace=1024, data="hot_tail")
    yield from _chunked("merge_states", "own")


def _chunked(capability: str, merge: str) -> _Listed:
    """Contexts on and around the ends of chunks."""
    chunked = prefills.chunked
    yield from _as(
        capability,
        [
            chunked((5, 9, 3), (64, 0, 700), workspace=512, data="needle"),
            *(chunked((4, 4), (context, 100), data="needle") for context in (127, 128, 129, 256)),
            chunked((9, 30), (350, 20), data="large_logits"),
            chunked((3, 6, 2), (200, 333, 40), workspace=256, planner="greedy", data="needle"),
        ],
        page=64,
        merge=merge,
    )
    yield capability, chunked((3, 6), (200, 333), page=16, workspace=64, merge=merge, data="needle")


def _decode(layout: str) -> _Listed:
    """One query token a request and several, over pages as kernels have them."""
    single, decode = decodes.single, decodes.decode
    plain = "decode" if layout == "auto" else f"kv_cache_{layout}"
    graph = single(1000, 17, 64, 300, 5, 129, 40, 9, data="needle")
    listed: list[tuple[str, Fields]] = [
        *_as(
            plain,
            [
                single(64, 5, 1000, 17, data="needle"),
                single(3999, 0, data="hot_tail"),
                single(0, 14, 15, 16, 30, 31, 62, 63, 126, 127, 254, 255, 511, data="needle"),
                single(_LONG, data="needle"),
                single(*(17, 63, 64, 130) * 16, data="needle"),
                single(130, 40),
                single(300, 40, data="large_logits"),
                single(300, 40, data="outliers"),
                single(300, 40, data="low_rank"),
                single(300, 40, data="tiny_values"),
                single(1000, 129, data="hot_ones"),
            ],
            lse=False,
        ),
        ("decode_lse", single(64)),
        ("decode_lse", single(64, 9, 1000, 17)),
        ("decode_lse", single(3000, 3, data="hot_tail")),
        ("decode_lse", single(0, 300, data="large_logits")),
        ("decode_lse", decode((3, 3), (300, 63), data="needle")),
        ("decode_multi_token", decode((2,) * 3, (62, 63, 64), data="needle")),
        ("decode_multi_token", decode((4,) * 4, (0, 63, 255, 256), data="needle")),
        ("decode_multi_token", decode((3, 1, 2), (64, 5, 1000), data="needle")),
        ("decode_multi_token", decode((2, 2), (4000, 5), data="hot_tail")),
        *(("paged_cache", single(15, 31, 63, 127, 333, page=page, data="needle")) for page in (16, 32, 128, 1)),
        *(("paged_cache", decode((2, 2), (30, 254), page=page, data="needle")) for page in (16, 32, 128)),
        ("paged_cache", single(127, 128, 62, 333, tails="minus", layers=2, data="needle")),
        ("paged_cache", single(130, 9, tails="huge", poison="inf", data="needle")),
        ("paged_cache", single(130, 9, pad=3, data="needle")),
        ("cuda_graph", graph),
    ]
    yield from ((capability, {**fields, "cache": layout}) for capability, fields in listed)


def _layer() -> _Listed:
    """Batches of prefills and decodes through a whole layer."""
    batches = [
        layer((1, 1, 20, 9), (63, 64, 0, 300), 2, data="needle"),
        layer((2, 2, 9), (33, 150, 40), 2),
    ]
    yield from _as("mixed_batch", batches, page=64, order=Order.DECODES_FIRST)
    yield "mixed_batch", layer((5, 9, 1, 1), (0, 140, 33, 7), 2, page=64, data="needle")
    yield "cache_write", layer((5, 1, 1), (60, 63, 64), 2, page=64, pad=2)


def _weights(profile: ModelProfile) -> str:
    """What a layer's weights are like: each picks one latent, where there are as many as columns of a head."""
    nope, _, value, latent = profile.dims
    return "selection" if max(nope, value) <= latent else "dense"


def _sparse_decode(selection: Selection, layout: str, common: Fields) -> _Listed:
    """Lists over a cache, and over a second one if there is one; those of packed codes also with heads filled up."""
    scales = {"scales": "pow2"} if layout == "fp8_ds_mla" else {}
    fixed = {**common, "cache": layout, "topk": selection.topk, **_sinks(selection), **scales}
    seconds: list[Fields] = [{"extra": layout, "extra_topk": columns} for columns in selection.second] or [{}]
    for second in seconds:
        yield from _with(_lists(selection.topk, layout, bool(second)), {**fixed, **second})
    if selection.second:
        yield from _with(_few_lists(selection.topk, layout), fixed)
    if layout == "fp8_ds_mla":
        yield from _with(_few_lists(selection.topk, layout), {**fixed, "scales": "float32"})
    if common["heads"] < _FEWEST_KERNEL_HEADS and layout in TILED_FORMATS:
        filled_up = {**fixed, **seconds[0], "heads": _FEWEST_KERNEL_HEADS}
        yield from _with(_lists(selection.topk, layout, bool(seconds[0])), filled_up)


def _sinks(selection: Selection) -> Fields:
    return {"sink": "drawn"} if selection.sinks else {}


def _plain(layout: str) -> str:
    """The capability that lists over a layout decide."""
    return "sparse_decode" if layout == "auto" else f"sparse_{layout}"


def _few_lists(topk: int, layout: str) -> _Listed:
    """Requests with fewer keys than columns, and with more."""
    single = sparse.single
    yield _plain(layout), single(64, 5, 1000, 17, data="needle", lse=False)
    yield _plain(layout), single(topk + 500, 40, data="hot_tail", lse=False)
    yield "sparse_lse", single(64, 9, topk - 1)
    yield "selection_padding", sparse.decode((1, 2), (300, 0), data="needle", lse=False)


def _lists(topk: int, layout: str, second: bool) -> _Listed:
    """As many keys as columns, one more, one fewer; several query tokens; regimes; pages; lengths."""
    single, decode = sparse.single, sparse.decode
    yield from _few_lists(topk, layout)
    yield from _as(
        _plain(layout),
        [
            single(topk - 2, topk - 1, topk, data="needle"),
            single(3 * topk, data="needle"),
            decode((2, 2), (topk + 60, 63), data="needle"),
            single(300, 40, data="outliers"),
            single(300, 40, data="large_logits"),
            single(300, 40, data="tiny_values"),
            single(300, 40, data="hot_ones"),
            single(*(17, 63, 64, 130) * 6, data="needle"),
            single(200, 9, layers=2, data="needle"),
            single(130, 70, page=128, data="needle"),
            single(130, 70, tails="huge", poison="inf", data="needle"),
            single(130, 9, pad=3, data="needle"),
            decode((3, 1, 2), (60, 5, 300), data="needle"),
        ],
        lse=False,
    )
    scattered = decode((3, 4), (300, 64), data="needle", fill="ragged", holes="scattered", lse=False)
    yield "selection_padding", scattered
    yield "selection_order", single(300, 64, data="needle", order="ascending", lse=False)
    yield "sparse_lse", single(64)
    yield "sparse_lse", single(300, 40, data="large_logits")
    yield "selection_length", single(300, 64, length=True, fill="ragged", behind="huge", lse=False)
    yield "unselected_keys", single(topk + 300, 70, unselected="poison", fill="ragged", data="needle", lse=False)
    if second:
        yield "second_cache", single(300, 64, 1000, data="needle", fill="ragged", lse=False)
    yield "cuda_graph", single(1000, 64, 300, 129, data="needle", lse=False)


def _sparse_prefill(selection: Selection, common: Fields) -> _Listed:
    """Lists over gathered keys; those of a second cache are gathered behind the others."""
    columns = selection.topk + max(selection.second, default=0)
    fixed = {**common, "topk": columns, **_sinks(selection)}
    yield from _with(_gathered(columns), fixed)
    if common["heads"] < _FEWEST_KERNEL_HEADS:
        yield from _with(_gathered(columns), {**fixed, "heads": _FEWEST_KERNEL_HEADS})


def _few_gathered(topk: int) -> _Listed:
    yield "sparse_prefill", sparse.prefill((5, 9), (0, 300), data="needle")
    yield "sparse_prefill", sparse.prefill((2,), (topk + 300,), data="hot_tail")
    yield "sparse_lse", sparse.prefill((5, 2), (64, 300), lse=True)


def _gathered(topk: int) -> _Listed:
    prefill = sparse.prefill
    yield from _few_gathered(topk)
    yield "sparse_prefill", prefill((40,), (200,), data="needle")
    yield "sparse_prefill", prefill((3,), (topk - 2,), data="needle")
    yield "sparse_prefill", prefill((9, 3), (100, 40), data="large_logits")
    yield "sparse_prefill", prefill((9,), (100,), data="outliers")
    yield "sparse_prefill", prefill((20, 19, 1), (40, 0, 7), data="needle")
    yield "sparse_lse", prefill((7,), (64,), fill="ragged", holes="scattered", lse=True)
    yield "selection_padding", prefill((7, 9), (0, 200), fill="ragged", data="needle")
    yield "selection_length", prefill((3, 4), (300, 64), fill="ragged", length=True, behind="huge")


def _indexer(indexer: Indexer) -> _Listed:
    """Scores, and the best of them, over pages and over gathered keys; all in codes."""
    scores, best, topk = indexers.scores, indexers.best, indexer.topk
    listed: list[tuple[str, Fields]] = [
        ("indexer_logits", scores((1, 1, 1), (63, 5, 200))),
        ("indexer_logits", scores((3, 1, 2), (64, 5, 130))),
        ("indexer_logits", scores((1,), (3000,), data="large_logits")),
        ("indexer_logits", scores((70, 20), (0, 60), gathered=True)),
        ("indexer_topk", best((1, 1, 1), (63, 5, 200))),
        ("indexer_topk", best((1,), (topk + 452,), data="normal")),
        ("indexer_topk", best((1, 1, 1), (topk - 2, topk - 1, topk), data="normal")),
        ("indexer_topk", best((2, 3), (topk + 100, 63))),
        ("indexer_topk", best((90, 20), (0, 60), gathered=True)),
        ("indexer_causal", best((8, 3), (57, 100))),
        ("indexer_causal", scores((8, 3), (57, 100))),
        ("indexer_fp8", scores((1, 2), (300, 40), data="outliers")),
        ("indexer_fp8", best((1, 1), (300, 40), data="rising")),
        ("index_mapping", best((1, 1), (topk + 50, 40), space="slot")),
    ]
    dims = f"{indexer.head_dim}-0-{indexer.head_dim}-{indexer.head_dim}"
    yield from _with(iter(listed), {"dims": dims, "heads": indexer.heads, "topk": topk})

"""The cases of the capabilities of a whole MLA layer: batches of prefills and decodes over a paged cache."""

from collections.abc import Iterator

from mla_conformance.cases.case import Call, Layout
from mla_conformance.cases.grammar import Fields, Lengths, each
from mla_conformance.roles.layer.case import Order

_LATENT = {"dims": "32-16-32-64", "heads": 2}


def layer(q: Lengths, kv: Lengths, decodes: int, **fields: object) -> Fields:
    """A batch whose last ``decodes`` requests decode, or its first ones if ``order`` says so."""
    return {"call": Call.LAYER, "q": q, "kv": kv, "decodes": decodes, **fields}


def mixed_batch() -> Iterator[Fields]:
    """Prefills with and without context beside decodes of one and of several tokens, in both orders."""
    first = {"order": Order.DECODES_FIRST}
    yield layer((5, 9, 1, 1), (0, 40, 33, 7), 2, data="needle")
    yield layer((1, 1, 20, 9), (33, 7, 0, 300), 2, data="needle", **first)
    yield layer((20, 3, 1), (17, 30, 8), 2, data="needle")
    yield layer((3, 3, 20, 9), (30, 4, 0, 64), 2, data="needle", **first)
    yield layer((4, 6, 3), (200, 333, 0), 0, workspace=64, data="needle")
    yield layer((1,) * 6, (0, 15, 16, 17, 130, 63), 6, data="needle", **_LATENT)
    yield from each(
        [
            layer((5, 1, 1), (40, 33, 7), 2, cache="fp8", kscale=31000),
            layer((4, 2), (150, 40), 1, cache="fp8", workspace=64, data="needle"),
            layer((1, 30), (33, 40), 1, cache="fp8", kscale=700000, **first),
            layer((5, 1), (140, 63), 1, cache="fp8_ds_mla"),
            layer((5, 1), (140, 63), 1, cache="fp8_ds_mla", scales="pow2"),
            layer((5, 1), (40, 33), 1, cache="fp8_ds_mla", dims="128-0-128-512"),
            layer((5, 1), (40, 33), 1, dims="glm", heads=2),
            layer((5, 9, 1), (40, 0, 130), 1, page=64, **_LATENT),
            layer((5, 9, 1), (40, 0, 130), 1, page=1, data="needle", **_LATENT),
            layer((5, 1), (40, 33), 1, dtype="fp16", data="needle"),
            layer((5, 1), (40, 33), 1, dtype="fp32", **_LATENT),
        ]
    )
    yield layer((2, 1, 9, 5, 7), (30, 4, 40, 64, 20), 2, data="needle", **first, **_LATENT)
    yield from _latents()
    yield from _dense()
    yield from _large()
    yield layer((5, 9, 1), (40, 0, 130), 1, out=True, **_LATENT)


def _latents() -> Iterator[Fields]:
    """Latents as models have them, and such as only some precision holds."""
    yield from each(
        [
            layer((5, 1), (40, 33), 1, latents="outliers", data="needle"),
            layer((5, 1), (40, 33), 1, latents="low_rank", cache="fp8", heads=2),
            layer((5, 1), (40, 33), 1, latents="tiny_values", cache="fp8", kscale=70, heads=2),
            layer((5, 1), (40, 33), 1, latents="large", cache="fp8_ds_mla", heads=2),
            layer((5, 1), (40, 130), 1, latents="rising", data="rising", **_LATENT),
            layer((5, 1), (40, 130), 1, latents="integers", data="integers", dtype="fp16", **_LATENT),
        ]
    )


def _dense() -> Iterator[Fields]:
    """Weights that each weigh all latents, so that absorbing and multiplying out round."""
    yield layer((5, 9, 1, 1), (0, 140, 33, 7), 2, data="needle", weights="dense", workspace=64)
    yield layer((3, 2, 1), (40, 33, 130), 2, weights="dense", heads=16, data="needle")
    yield layer((2, 2, 9), (33, 150, 40), 2, weights="dense", heads=2, order=Order.DECODES_FIRST)
    yield layer((5, 1), (40, 33), 1, weights="dense", heads=2, dtype="fp16")
    yield layer((5, 1), (40, 33), 1, weights="dense", dtype="fp32", **_LATENT)
    yield layer((5, 1), (40, 33), 1, weights="dense", heads=2, cache="fp8", kscale=31000)
    yield layer((5, 1), (140, 33), 1, weights="dense", heads=2, cache="fp8_ds_mla", workspace=64)
    yield layer((5, 1), (40, 33), 1, weights="dense", heads=2, latents="outliers")
    yield layer((5, 1), (40, 33), 1, weights="dense", dims="64-16-96-64", heads=16)


def _large() -> Iterator[Fields]:
    """Hundreds of new tokens, dozens of requests, the heads of whole models, and contexts of many chunks."""
    contexts = tuple(7 * index % 131 for index in range(70))
    first = {"order": Order.DECODES_FIRST}
    yield layer((300, 33, *(1,) * 70), (70, 200, *contexts), 70, data="needle", page=64, **_LATENT)
    yield layer((*(2,) * 64, 200, 70), (*contexts[:64], 0, 300), 64, cache="fp8", **first, **_LATENT)
    yield layer((200, 1, 1), (300, 500, 9), 2, page=128, workspace=512, data="needle", dims="32-16-32-64", heads=16)
    yield layer((9, 1), (300, 200), 1, page=1, heads=32, dims="32-16-32-64", data="needle")
    yield layer((5, 1, 1), (60, 40, 0), 2, heads=128, dims="16-8-16-32", data="needle")
    yield layer((5, 9, 1), (300, 130, 63), 1, cache="fp8_ds_mla", heads=2, workspace=128, data="needle")
    yield layer((1, 1, 9, 5), (33, 63, 300, 0), 2, cache="fp8_ds_mla", heads=2, workspace=64, page=64, **first)
    yield layer((65, 65, 1, 1), (0, 0, 65, 5), 2, page=64, data="huge_logits", **{**_LATENT, "heads": 16})


def cache_write() -> Iterator[Fields]:
    """New tokens on both sides of pages, rows of padding, shared buffers; poison everywhere else."""
    yield layer((5, 1, 1), (12, 15, 16), 2, pad=3, **_LATENT)
    yield layer((17, 33, 1), (0, 31, 63), 1, layers=3, **_LATENT)
    yield layer((5, 1), (12, 15), 1, cache="fp8", kscale=2000, pad=2, **_LATENT)
    yield layer((5, 1), (12, 15), 1, cache="fp8", kscale=9000000, layers=2, poison="large", **_LATENT)
    yield layer((5, 1), (12, 15), 1, cache="fp8_ds_mla", heads=2, pad=1)
    yield layer((70, 2), (1, 62), 1, page=64, poison="inf", **_LATENT)
    yield layer((1, 5), (15, 12), 1, pad=4, order=Order.DECODES_FIRST, **_LATENT)
    yield layer((1, 2, 9), (31, 0, 20), 2, pad=5, cache="fp8", order=Order.DECODES_FIRST, **_LATENT)
    yield from each(
        [
            layer((5, 1), (12, 15), 1, latents="tiny_tiles", cache="fp8_ds_mla", heads=1),
            layer((5, 1), (12, 15), 1, latents="tiny_tiles", cache="fp8_ds_mla", heads=1, scales="pow2"),
            layer((5, 1), (12, 15), 1, latents="zero_tiles", cache="fp8_ds_mla", heads=1, scales="pow2", pad=1),
            layer((5, 1), (12, 15), 1, latents="outliers", cache="fp8_ds_mla", heads=1, scales="pow2"),
            layer((5, 1), (12, 15), 1, latents="zero_tiles", cache="fp8_ds_mla", heads=1, dtype="fp16", pad=1),
            layer((5, 1), (12, 15), 1, latents="outliers", cache="fp8_ds_mla", heads=1, layout=Layout.SLICED),
            layer((5, 1), (12, 15), 1, latents="tiny_values", pad=1, **_LATENT),
            layer((5, 1), (12, 15), 1, latents="large", cache="fp8", kscale=130_000, **_LATENT),
            layer((5, 1, 1), (12, 15, 16), 2, layout=Layout.SLICED, pad=3, **_LATENT),
            layer((5, 1), (12, 15), 1, layout=Layout.ODD, cache="fp8", layers=2, **_LATENT),
            layer((1, 5), (15, 12), 1, layout=Layout.SLICED, out=True, pad=4, order=Order.DECODES_FIRST, **_LATENT),
            layer((300, 65, 1), (1, 100, 255), 1, page=128, layers=2, **_LATENT),
            layer((200,), (0,), 0, page=64, spare=600, dims="4-4-4-4", heads=1),
        ]
    )


def weight_absorption() -> Iterator[Fields]:
    """Weights that pick other latents for every head; the test replaces them."""
    yield layer((5, 1, 1), (0, 33, 7), 2)
    yield layer((3, 1), (20, 9), 1, dims="glm", heads=3)
    yield layer((1, 2), (12, 40), 2, dims="16-8-40-64", heads=5, data="needle")
    yield layer((5, 1), (20, 33), 1, weights="dense", heads=2)
    yield layer((5, 1), (20, 33), 1, weights="dense", dtype="fp16", dims="64-16-96-64", heads=16)


def prefill_decode_agreement() -> Iterator[Fields]:
    """The same tokens, once as prefills and once as decodes."""
    yield layer((1, 4, 8), (20, 0, 130), 3, data="needle")
    yield layer((2, 7), (0, 300), 2, workspace=64, **_LATENT)
    yield layer((3, 5), (63, 16), 2, dtype="fp16", data="hot_tail", **_LATENT)
    yield layer((3, 8), (140, 16), 2, weights="dense", heads=2, workspace=64)


def graph_padding() -> Iterator[Fields]:
    """Decodes and rows of padding behind them: no token, slot -1, block -1."""
    yield layer((1,) * 5, (33, 7, 0, 64, 130), 5, pad=3, data="needle")
    yield layer((1,), (40,), 1, pad=7, **_LATENT)
    yield layer((1,) * 3, (16, 300, 15), 3, pad=1, poison="inf", **_LATENT)
    yield layer((1,) * 3, (16, 63, 15), 3, pad=5, cache="fp8", **_LATENT)
    yield layer((1,) * 2, (16, 63), 2, pad=2, cache="fp8_ds_mla", heads=2)
    yield layer((5, 1), (20, 33), 1, pad=2, poison="large", **_LATENT)


def graph_replay() -> Iterator[Fields]:
    """The batch whose size is captured; the test replays it with others."""
    yield layer((1,) * 8, (33, 7, 1, 64, 130, 15, 16, 300), 8, data="needle", **_LATENT)
    yield layer((1,) * 4, (33, 70, 1, 64), 4, cache="fp8", **_LATENT)
    yield layer((1,) * 20, tuple(range(3, 63, 3)), 20, page=64, heads=16, dims="32-16-32-64", data="needle")
    yield layer((1,) * 4, (33, 70, 1, 64), 4, cache="fp8_ds_mla", heads=2)


def dcp() -> Iterator[Fields]:
    """Decodes, prefills and both on ranks that share the tokens; some hold none of a request."""
    small = {**_LATENT, "heads": 4}
    yield layer((1,) * 4, (64, 5, 130, 0), 4, ranks=2, data="needle", heads=2)
    yield layer((1,) * 4, (0, 1, 2, 70), 4, ranks=4, interleave=16, pad=2, **small)
    yield layer((4, 4), (130, 62), 2, ranks=2, interleave=64, data="needle", **_LATENT)
    yield layer((4, 2, 8), (64, 0, 150), 3, ranks=3, cache="fp8", **{**_LATENT, "heads": 3})
    yield layer((1,) * 2, (63, 140), 2, ranks=2, cache="fp8_ds_mla", heads=2, data="needle")
    yield layer((1,) * 3, (63, 140, 5), 3, ranks=2, order=Order.DECODES_FIRST, layers=2, **_LATENT)
    yield layer((5, 9, 3), (40, 0, 131), 0, ranks=2, data="needle", **_LATENT)
    yield layer((5, 9, 20), (333, 5, 130), 0, ranks=4, interleave=16, workspace=128, data="needle", **small)
    yield layer((5, 9, 1), (150, 17, 63), 1, ranks=2, interleave=64, page=64, cache="fp8", data="needle", **_LATENT)
    yield layer((1, 1, 9), (63, 7, 140), 2, ranks=2, order=Order.DECODES_FIRST, cache="fp8_ds_mla", heads=2, pad=2)
    yield layer((4, 4), (130, 62), 2, ranks=16, data="needle", **{**_LATENT, "heads": 16})


def call_order() -> Iterator[Fields]:
    """Batches of one model, the next of which has other lengths and another scale of the cache."""
    yield layer((5, 9, 1), (40, 0, 130), 1, cache="fp8", model=1, layout=Layout.PACKED, workspace=64, **_LATENT)
    yield layer((1, 1, 20), (33, 7, 40), 2, model=1, layout=Layout.SLICED, order=Order.DECODES_FIRST, **_LATENT)
    yield layer((5, 1), (40, 33), 1, cache="fp8_ds_mla", model=1, heads=2, layout=Layout.PACKED)


def no_side_effects() -> Iterator[Fields]:
    """A buffer of several layers, and results that must outlive later calls."""
    yield layer((5, 1, 1), (40, 33, 0), 2, layers=3, model=1, poison="inf", layout=Layout.SLICED, **_LATENT)
    yield layer((1, 9), (33, 40), 1, cache="fp8", model=1, pad=2, out=True, order=Order.DECODES_FIRST, **_LATENT)


def determinism() -> Iterator[Fields]:
    """Prefills with context beside decodes."""
    yield layer((5, 9, 1), (40, 0, 130), 1, workspace=64, **_LATENT)


def fenced() -> Iterator[Fields]:
    """Prefills with context beside decodes, over plain pages and codes, on one rank and on two."""
    yield layer((5, 9, 1), (40, 0, 130), 1, workspace=64, out=True, **_LATENT)
    yield layer((1, 3, 2, 1), (63, 0, 40, 15), 4, cache="fp8", **_LATENT)
    yield layer((5, 1), (140, 63), 1, cache="fp8_ds_mla")


def batches() -> Iterator[Fields]:
    """Prefills whose chunks depend on the others, and decodes; each alone, and in another order."""
    yield layer((5, 20, 1), (130, 0, 40), 0, workspace=128, layers=2, data="needle", **_LATENT)
    yield layer((1, 3, 2, 1), (130, 0, 40, 16), 4, cache="fp8", **_LATENT)

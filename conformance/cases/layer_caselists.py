"""The cases of the capabilities of a whole MLA layer: batches of prefills and decodes over a paged cache."""

from collections.abc import Iterator

from mla_conformance.cases.case import Call
from mla_conformance.cases.layer import Order
from mla_conformance.cases.prefill_caselists import Fields, Lengths, each

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
            layer((5, 1), (40, 33), 1, dims="glm", heads=2),
            layer((5, 9, 1), (40, 0, 130), 1, page=64, **_LATENT),
            layer((5, 9, 1), (40, 0, 130), 1, page=1, data="needle", **_LATENT),
            layer((5, 1), (40, 33), 1, dtype="fp16", data="needle"),
            layer((5, 1), (40, 33), 1, dtype="fp32", **_LATENT),
        ]
    )
    yield layer((2, 1, 9, 5, 7), (30, 4, 40, 64, 20), 2, data="needle", **first, **_LATENT)


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


def weight_absorption() -> Iterator[Fields]:
    """Weights that pick other latents for every head; the test replaces them."""
    yield layer((5, 1, 1), (0, 33, 7), 2)
    yield layer((3, 1), (20, 9), 1, dims="glm", heads=3)
    yield layer((1, 2), (12, 40), 2, dims="16-8-40-64", heads=5, data="needle")


def prefill_decode_agreement() -> Iterator[Fields]:
    """The same tokens, once as prefills and once as decodes."""
    yield layer((1, 4, 8), (20, 0, 130), 3, data="needle")
    yield layer((2, 7), (0, 300), 2, workspace=64, **_LATENT)
    yield layer((3, 5), (63, 16), 2, dtype="fp16", data="hot_tail", **_LATENT)


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

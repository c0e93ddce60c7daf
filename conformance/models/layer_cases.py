"""What an engine calls of a whole layer: batches of prefills and decodes. No torch."""

from mla_conformance.cases.layer import Order
from mla_conformance.cases.layer_caselists import layer
from mla_conformance.models.listed import Listed, deciding
from mla_conformance.models.profile import ModelProfile


def layers() -> Listed:
    """Batches of prefills and decodes through a whole layer."""
    yield from deciding(
        "mixed_batch",
        layer((1, 1, 20, 9), (63, 64, 0, 300), 2, data="needle"),
        layer((2, 2, 9), (33, 150, 40), 2),
        page=64,
        order=Order.DECODES_FIRST,
    )
    yield "mixed_batch", layer((5, 9, 1, 1), (0, 140, 33, 7), 2, page=64, data="needle")
    yield "cache_write", layer((5, 1, 1), (60, 63, 64), 2, page=64, pad=2)


def weights(profile: ModelProfile) -> str:
    """What a layer's weights are like: each picks one latent, where there are as many as columns of a head."""
    nope, _, value, latent = profile.dims
    return "selection" if max(nope, value) <= latent else "dense"

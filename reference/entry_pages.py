"""Entries of a paged cache by slot, where a format may lay the parts of a page's entries apart from one another."""

from collections.abc import Iterator

import torch
from torch import Tensor

from mla_conformance.reference.entry_formats import TILED_FORMATS
from mla_conformance.reference.kv_cache import write_rows


def write_entries(cache: Tensor, rows: Tensor, slots: Tensor, layout: str) -> None:
    """Write T entries into their slots, in place.

    cache: [blocks, page, width], each block packed. rows: [T, width] of its dtype. slots: [T] integers, block · page +
    offset; -1 writes nothing. Raises ValueError as `write_rows` does.
    """
    start = 0
    for part in page_parts(cache, layout):
        write_rows(part, rows[:, start : start + part.shape[2]], slots)
        start += part.shape[2]


def read_entries(cache: Tensor, slots: Tensor, layout: str) -> Tensor:
    """The entries [..., width] of slots [...], of the cache's dtype."""
    page = cache.shape[1]
    parts = [part.view(torch.uint8)[slots // page, slots % page] for part in page_parts(cache, layout)]
    return torch.cat(parts, dim=-1).view(cache.dtype)


def page_parts(cache: Tensor, layout: str) -> Iterator[Tensor]:
    """Views [blocks, page, width of a part] of a cache; side by side they are its entries."""
    form = TILED_FORMATS.get(layout)
    if form is None or len(form.parts) == 1:
        yield cache
        return
    page, start, blocks = cache.shape[1], 0, cache.flatten(1)
    for width in form.parts:
        yield blocks[:, start : start + page * width].unflatten(1, (page, width))
        start += page * width

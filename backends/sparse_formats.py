"""The caches of selected keys: which layouts there are, and how wide an entry of each is."""

import torch

from mla_conformance.backends.cache_dtypes import layout_of
from mla_conformance.reference.entry_formats import TILED_FORMATS

_PLAIN = ("auto", "fp8")
LAYOUTS = (*_PLAIN, *TILED_FORMATS)


def require_layout(kv_cache_dtype: str) -> str:
    """The layout that a name stands for.

    Raises:
        ValueError: there is none.
    """
    layout = layout_of(kv_cache_dtype)
    if layout not in LAYOUTS:
        raise ValueError(f"expected a cache dtype of {', '.join(LAYOUTS)}, got {kv_cache_dtype!r}")
    return layout


def entry_of(layout: str, dims: tuple[int, int], model_dtype: torch.dtype) -> tuple[int, torch.dtype]:
    """Width of an entry, in elements, and dtype of the cache.

    Args:
        layout: as :func:`require_layout` gives it.
        dims: L and R.
        model_dtype: of the queries.

    Raises:
        ValueError: the layout has no room for such keys, or holds values of another dtype.
    """
    if layout in _PLAIN:
        return sum(dims), model_dtype if layout == "auto" else torch.float8_e4m3fn
    form = TILED_FORMATS[layout]
    if dims not in form.dims:
        raise ValueError(f"an entry of {layout} holds (L, R) = {' or '.join(map(str, form.dims))}, got {dims}")
    if form.plain and model_dtype.itemsize != 2:
        raise ValueError(f"an entry of {layout} holds values of a model of 16 bits, got {model_dtype}")
    return form.width, torch.uint8


def fitting(width: int, dims: tuple[int, int]) -> list[str]:
    """The layouts whose entries are so wide."""
    plain = list(_PLAIN) if width == sum(dims) else []
    return plain + [name for name, form in TILED_FORMATS.items() if form.width == width and dims in form.dims]

"""What a layer may be asked of a batch before there is one."""

from typing import NamedTuple

import torch

from mla_conformance.reference.dimensions import MLADimensions


class BatchForm(NamedTuple):
    """A batch by its lengths.

    Attributes:
        decodes: new tokens of each request that decodes.
        prefills: new tokens of each request that prefills.
        padding: rows of padding that count as requests.
        kv_cache_dtype: layout of the cache.
        dtype: of the model.
        dimensions: head dims.
    """

    decodes: tuple[int, ...]
    prefills: tuple[int, ...]
    padding: int
    kv_cache_dtype: str
    dtype: torch.dtype
    dimensions: MLADimensions

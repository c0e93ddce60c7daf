"""A layer whose backend moves blocks of the cache by the wrong strides, or not all of them."""

import torch

from mla_conformance.defects.eager_layer import EagerLayer
from mla_conformance.defects.known import known_defect


def _with_stride_of(cache, other):
    """As many blocks as fit, with the stride between blocks that another cache has."""
    stride = other.stride(0)
    room = cache.untyped_storage().nbytes() // cache.element_size() - cache.storage_offset()
    blocks = min(len(cache), (room - cache[0].numel()) // stride + 1)
    return cache.as_strided((blocks, *cache.shape[1:]), (stride, *cache.stride()[1:]))


def _move(source, target, pairs):
    """Copy the pairs whose blocks are within both."""
    for origin, place in pairs.tolist():
        if origin < len(source) and place < len(target):
            target.view(torch.uint8)[place] = source.view(torch.uint8)[origin]


@known_defect("copy-blocks-stride-of-the-first-cache", killed_by="cache_write")
class StrideOfTheFirstCache(EagerLayer):
    """Blocks of every cache are copied with the stride of the first one of the list."""

    @staticmethod
    def copy_blocks(kv_caches, src_to_dists):
        for cache in kv_caches:
            strided = _with_stride_of(cache, kv_caches[0])
            _move(strided, strided, src_to_dists)


@known_defect("copy-blocks-first-cache-only", killed_by="cache_write")
class FirstCacheOnly(EagerLayer):
    """Blocks are copied in the first cache of the list alone."""

    @staticmethod
    def copy_blocks(kv_caches, src_to_dists):
        EagerLayer.copy_blocks(kv_caches[:1], src_to_dists)


@known_defect("copy-blocks-one-destination-for-a-source", killed_by="cache_write")
class OneDestination(EagerLayer):
    """The copies are kept by source, so that a block which two requests share reaches the last of them only."""

    @staticmethod
    def copy_blocks(kv_caches, src_to_dists):
        by_source = dict(src_to_dists.tolist())
        EagerLayer.copy_blocks(kv_caches, torch.tensor(list(by_source.items()), device=src_to_dists.device))


@known_defect("swap-blocks-stride-of-the-source", killed_by="cache_write")
class StrideOfTheSource(EagerLayer):
    """Swapped blocks are written with the stride between blocks that their source has."""

    @staticmethod
    def swap_blocks(src_kv_cache, dst_kv_cache, src_to_dst):
        _move(src_kv_cache, _with_stride_of(dst_kv_cache, src_kv_cache), src_to_dst)

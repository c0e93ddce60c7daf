"""EAGER, trees: the decode with the masks of trees of drafts."""

import torch
from torch import Tensor

from mla_conformance.backends import eager_decode, tree


class EagerTreeBackend(eager_decode.EagerLatentDecode, tree.MLATreeBackend):
    run_tree_decode = eager_decode.EagerLatentDecode._run

    def _visible(self, queries: int, request: int, seq_len: int, tile: slice) -> Tensor:
        """[T, tile] mask: all tokens before the query tokens, and of these those that the request's mask names."""
        mask = self._mask(request, queries)
        number = torch.arange(tile.start, tile.stop, device=mask.device) - (seq_len - queries)
        return (number < 0) | mask[:, number.clamp(min=0)]

    def _mask(self, request: int, queries: int) -> Tensor:
        start = int(self._decode_metadata.tree_mask_start_loc[request])
        return self._decode_metadata.tree_mask[start : start + queries**2].view(queries, queries)

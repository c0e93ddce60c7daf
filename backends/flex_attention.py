"""FLEX_ATTENTION: PyTorch's flex attention, compiled to one fused kernel on a GPU, eager on a CPU."""

from functools import cache, lru_cache
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import AuxRequest, create_block_mask, flex_attention

from mla_conformance.backends import library_roles, packaged
from mla_conformance.backends.conversions import RaggedBatch

_COMPILED_SHAPES = 512
_SMALL_TILES = {"BLOCK_M": 32, "BLOCK_N": 32, "num_stages": 1, "FORCE_USE_FLEX_ATTENTION": True}


class FlexAttentionPrefillBackend(library_roles.RaggedPrefillBackend):
    name = "FLEX_ATTENTION"
    supported_dtypes = [torch.float16, torch.bfloat16, torch.float32]
    devices = packaged.Devices("", (8, 0), cpu=True)  # that Triton compiles for, and a CPU
    of_torch = {"torch": torch.__version__}
    declaration = packaged.declared(
        "torch triton",
        ("no ragged batches", "a mask over request and position, aligned bottom-right"),
        ("raises IndexError without keys", "such a call is not launched"),
        packaged.NO_OUT,
        ("float32 tiles that exceed a GPU's shared memory", "float32 is computed in tiles of 32"),
    )

    def attend(self, q: Tensor, k: Tensor, v: Tensor, batch: RaggedBatch, out: Tensor | None) -> tuple[Tensor, Tensor]:
        self._served = {"mode": "compiled" if q.is_cuda else "eager"}
        if q.is_cuda:
            return self._call(q, k, v, _mask(batch))
        output = q.new_zeros(*q.shape[:2], v.shape[-1])
        lse = q.new_full((q.shape[1], q.shape[0]), -torch.inf, dtype=torch.float32)
        for rows, keys in batch.requests():  # apart, since the eager form materialises the scores
            mask = _causal_mask(rows.stop - rows.start) if batch.causal else None
            output[rows], lse[:, rows] = self._call(q[rows], k[keys], v[keys], mask)
        return output, lse

    def _call(self, q: Tensor, k: Tensor, v: Tensor, mask: Any) -> tuple[Tensor, Tensor]:
        operands = [x.transpose(0, 1).unsqueeze(0) for x in (q, k, v)]
        tiles = _SMALL_TILES if q.is_cuda and q.dtype is torch.float32 else None
        options = {"block_mask": mask, "scale": self.scale, "kernel_options": tiles}
        if not q.is_cuda:
            output, lse = _with_lse(*operands, **options)
        else:
            with torch._dynamo.config.patch(recompile_limit=_COMPILED_SHAPES):
                output, lse = _compiled()(*operands, **options)
        return output[0].transpose(0, 1), lse[0]


@lru_cache(maxsize=256)
def _causal_mask(tokens: int) -> Any:
    """The mask of one request's new tokens on a CPU; making one takes longer than a short request's attention."""
    return create_block_mask(lambda _batch, _head, query, key: key <= query, None, None, tokens, tokens, device="cpu")


def _mask(batch: RaggedBatch) -> Any:
    """A key is visible if it belongs to the query's request and, causally, is not behind its last one."""

    def places(start_loc: Tensor, tokens: int) -> tuple[Tensor, Tensor]:
        token = torch.arange(tokens, device=start_loc.device)
        request = torch.searchsorted(start_loc[1:].contiguous(), token, right=True)
        return request, token - start_loc[request]

    query_request, query_position = places(batch.query_start_loc, batch.query_tokens)
    key_request, key_position = places(batch.key_start_loc, batch.key_tokens)
    # As far as a query sees: keys - queries + position when causal, else everything.
    reach = query_position + (0 if batch.causal else batch.key_tokens)

    def visible(_batch: Any, _head: Any, query: Tensor, key: Tensor) -> Tensor:
        return (query_request[query] == key_request[key]) & (key_position[key] <= reach[query])

    return create_block_mask(visible, None, None, batch.query_tokens, batch.key_tokens, device=reach.device.type)


def _with_lse(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> tuple[Tensor, Tensor]:
    output, auxiliary = flex_attention(q, k, v, return_aux=AuxRequest(lse=True), **options)
    return output, auxiliary.lse


_compiled = cache(lambda: torch.compile(_with_lse, dynamic=True, fullgraph=True))  # without a fallback

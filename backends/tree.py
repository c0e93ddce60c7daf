"""The abstract MLA tree backend: a decode of trees of drafts, whose masks say which query token sees which."""

from dataclasses import dataclass
from typing import Annotated, ClassVar, NamedTuple

import torch
from torch import Tensor

from mla_conformance.backends import conversions, decode, kernel, operands
from mla_conformance.backends.slots import slots_at


@operands.table
@dataclass(kw_only=True)
class MLATreeMetadata(decode.MLACommonDecodeMetadata):
    """What a tree backend may know of the batch, beside what a decode may; a row of padding has a mask of one element.

    Each query token of a request has a row of the request's mask, and in it a column for each of its query tokens.
    """

    # on the device; which query tokens each one sees, row after row, request after request
    tree_mask: Annotated[Tensor, operands.Form("Σ q²", torch.bool)]
    # on the device; where the mask of each request begins, and the end
    tree_mask_start_loc: Annotated[Tensor, operands.Form("B + 1", torch.int32)]


def check_tree_operands(
    backend: decode.LatentDecode, metadata: MLATreeMetadata, ql_nope: Tensor, q_pe: Tensor, kv_cache: Tensor
) -> None:
    """As ``check_decode_operands``; refuses masks of another width, too."""
    decode.check_decode_operands(backend, metadata, ql_nope, q_pe, kv_cache)
    pairs, says = int(metadata.query_lens_cpu.square().sum()), "the squares of the requests' query tokens, added"
    kernel.expect("tree_mask", metadata.tree_mask, (pairs,), torch.bool, says)


class MLATreeBackend(decode.LatentDecode):
    """Attention of trees of query tokens to the paged latents of their requests; symbols as of ``MLADecodeBackend``."""

    supported_query_len: ClassVar[int | None] = None
    supports_nonuniform_queries: ClassVar[bool] = True
    _decode_metadata: MLATreeMetadata
    _check = staticmethod(check_tree_operands)

    # of each query token to the tokens before those of its request, and to those that its mask names
    run_tree_decode = decode.MLADecodeBackend.run_decode


class TreeBatch(NamedTuple):
    """A batch as libraries take it: masks have a column for each token of a request; one of padding has a token."""

    lengths: Tensor  # [B] tokens of each request, on the CPU
    contexts: Tensor  # [B] those of them before its query tokens, on the CPU
    slots: list[Tensor]  # of the tokens of each request [n] int64; any of padding
    mask: Tensor  # [Σ q · n] bool, which of its tokens each query token sees
    mask_starts: Tensor  # [B + 1] int32, where the mask of each request begins, and the end

    @staticmethod
    def of(metadata: MLATreeMetadata, page: int) -> "TreeBatch":
        new, device = metadata.query_lens_cpu, metadata.block_table.device
        lengths = torch.maximum(new, metadata.seq_lens_cpu)
        contexts, squares = lengths - new, metadata.tree_mask.split(new.square().tolist())
        slots, masks = list[Tensor](), list[Tensor]()
        for request, (length, context) in enumerate(zip(lengths.tolist(), contexts.tolist(), strict=True)):
            token, rows = torch.arange(length, device=device), length - context
            slots.append(slots_at(metadata.block_table, slice(request, request + 1), token, page)[0].clamp(min=0))
            masks.append(torch.ones(rows, length, dtype=torch.bool, device=device))
            masks[-1][:, context:] = squares[request].view(rows, rows)
        return TreeBatch(
            lengths, contexts, slots, torch.cat([x.flatten() for x in masks]), conversions.starts_of(new * lengths)
        )

"""From a case of trees to its call: a decode's, with the masks of the trees, and what these mean."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Self

import torch

from mla_conformance.backends import roles, tree
from mla_conformance.problems import cached_batch, calls
from mla_conformance.problems.operands import segments, start_loc
from mla_conformance.reference.selected import NO_KEY
from mla_conformance.roles.decode.problem import DECODE, DecodeBatch, DecodeCall
from mla_conformance.roles.tree.case import TreeCase


@dataclass(frozen=True, kw_only=True)
class TreeCall(DecodeCall):  # ``run_tree_decode``; each query attends to the keys of a list
    metadata: tree.MLATreeMetadata

    interface: ClassVar[Any] = tree.MLATreeBackend

    @property
    def masks(self) -> list[torch.Tensor]:
        lengths = self.metadata.query_lens_cpu.tolist()
        parts = self.metadata.tree_mask.split([new**2 for new in lengths])
        return [part.view(new, new) for part, new in zip(parts, lengths, strict=True)]

    def operands(self) -> calls.AttentionOperands:
        starts = (self.query_start_loc, self.key_start_loc)
        selected = torch.full((len(self.q), max(self.key_lens)), NO_KEY, device=self.q.device)
        for rows, keys, mask in zip(*map(segments, starts), self.masks, strict=True):
            if length := keys.stop - keys.start:  # none of a row of padding
                seen = mask.new_ones(len(mask), length)
                seen[:, length - len(mask) :] = mask
                number = torch.arange(keys.start, keys.stop, device=selected.device)
                selected[rows, :length] = number.where(seen, NO_KEY)
        return self.attended(causal=False, selected=selected)

    def regrouped(self, case: Any, requests: Sequence[int], queries: int | None) -> Self:
        call = super().regrouped(case, requests, queries)
        metadata = replace(call.metadata, **_packed([self.masks[request] for request in requests]))
        return replace(call, metadata=metadata)


def _packed(masks: Sequence[torch.Tensor]) -> dict[str, Any]:
    starts = cached_batch.int32(start_loc([mask.numel() for mask in masks]), masks[0].device)
    return {"tree_mask": torch.cat([mask.flatten() for mask in masks]), "tree_mask_start_loc": starts}


class TreeBatch(DecodeBatch):
    case: TreeCase

    def parents(self) -> list[list[int]]:
        """The parent of each query token by request, counted within it; the first token's is 0."""
        case = self.case
        if case.parents:
            return [list(case.parents[rows]) for rows in segments(start_loc(case.q))] + [[0]] * case.pad
        drawing = self.drawing("trees", case.q, case.seed)
        return [
            _PARENTS[case.tree_of(request)](torch.arange(new), drawing).clamp(min=0).tolist()
            for request, new in enumerate(self.query_lens)
        ]

    def calls(self) -> tuple[TreeCall, ...]:
        (call,), masks = super().calls(), list[torch.Tensor]()
        for parents in self.parents():
            mask = torch.eye(len(parents), dtype=torch.bool)
            for token, parent in enumerate(parents):
                mask[token] |= mask[parent]
            masks.append(mask.to(self.device))
        metadata = tree.MLATreeMetadata(**vars(call.metadata), **_packed(masks))
        return (TreeCall(**vars(call) | {"metadata": metadata}),)


_PARENTS: Mapping[str, Callable[[torch.Tensor, torch.Generator], torch.Tensor]] = {
    "random": lambda number, drawing: (torch.rand(len(number), generator=drawing) * number).long(),
    "chain": lambda number, drawing: number - 1,
    "binary": lambda number, drawing: (number - 1) // 2,
    "star": lambda number, drawing: torch.zeros_like(number),
    "deep": lambda number, drawing: number - 1 - number % 2,  # a chain with a leaf beside each token
}
"""Of query tokens by number, their parents by the name of a tree; a random one has siblings and early ends."""

TREE = replace(DECODE, role=roles.Role.TREE, batch=TreeBatch)

"""EAGER, top-k: the columns with the largest logits, by keys that order as the logits do."""

from typing import ClassVar

import torch
from torch import Tensor

from mla_conformance.backends import online_softmax, topk
from mla_conformance.backends.declaration import Declaration, SelectionForm, SelectionOrder
from mla_conformance.reference.selected import NO_KEY

LEAST = -(2**40)  # below the key of every logit
_MAGNITUDE = 0x7FFFFFFF


class EagerTopKBackend(online_softmax.Eager, topk.MLATopKBackend):
    supported_dtypes: ClassVar[list[torch.dtype]] = [torch.float32, torch.bfloat16, torch.float16]
    supports_pools: ClassVar[bool] = True
    declaration: ClassVar[Declaration] = Declaration(
        distributions=("torch",), emulated=True, selection=SelectionForm(order=SelectionOrder.DESCENDING)
    )

    def run_top_k_per_row(self, logits: Tensor, topk_tokens: int) -> Tensor:
        topk.check_topk_call(self, self._topk_metadata, logits, topk_tokens)
        return self._selected(logits, topk_tokens).int()

    def run_pool_top_k_per_row(self, logits: Tensor, topk_tokens: int, pool: int, tail: bool) -> Tensor:
        topk.check_topk_call(self, self._topk_metadata, logits, topk_tokens, pool)
        tokens = self._expanded(self._selected(logits, topk_tokens // pool), pool)
        return (torch.cat((tokens, self._tails(pool)), dim=1) if tail else tokens).int()

    def _expanded(self, pools: Tensor, pool: int) -> Tensor:
        tokens = pools.unsqueeze(-1) * pool + torch.arange(pool, device=pools.device)
        return tokens.masked_fill(pools.unsqueeze(-1) == NO_KEY, NO_KEY).flatten(1)

    def _tails(self, pool: int) -> Tensor:
        assert self._topk_metadata.token_lengths is not None
        seen = self._topk_metadata.token_lengths.long().unsqueeze(1)
        tokens = seen // pool * pool + torch.arange(pool - 1, device=seen.device)
        return tokens.masked_fill(tokens >= seen, NO_KEY)

    def _selected(self, logits: Tensor, topk_tokens: int) -> Tensor:
        starts, lengths = self._windows(logits)
        columns = torch.arange(logits.shape[1], device=logits.device)
        visible = (columns >= starts) & (columns < starts + lengths)
        keys = self._keys(logits).masked_fill(~visible, LEAST)
        return self._numbered(self._choose(keys, topk_tokens), starts)

    def _windows(self, logits: Tensor) -> tuple[Tensor, Tensor]:
        metadata = self._topk_metadata
        lengths = metadata.lengths.long().unsqueeze(1)
        starts = torch.zeros_like(lengths) if metadata.row_starts is None else metadata.row_starts.long().unsqueeze(1)
        return starts, lengths

    def _keys(self, logits: Tensor) -> Tensor:
        """[T, C] int64 that order as the logits do, zeros of both signs alike; NaN stands beyond the infinities."""
        bits = logits.float().view(torch.int32).long()
        return torch.where(bits >= 0, bits, -(bits & _MAGNITUDE))

    def _choose(self, keys: Tensor, topk_tokens: int) -> Tensor:
        best = keys.topk(min(topk_tokens, keys.shape[1]), dim=1)
        chosen = best.indices.masked_fill(best.values == LEAST, NO_KEY)
        return torch.nn.functional.pad(chosen, (0, topk_tokens - chosen.shape[1]), value=NO_KEY)

    def _numbered(self, chosen: Tensor, starts: Tensor) -> Tensor:
        return (chosen - starts).masked_fill(chosen == NO_KEY, NO_KEY)

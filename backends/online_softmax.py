"""EAGER, all roles: what its kernels say of themselves, and the online softmax of those that attend, tile by tile."""

from collections.abc import Iterator
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor

from mla_conformance.backends.declaration import Declaration
from mla_conformance.backends.kernel import NamedKernel


class SoftmaxState(NamedTuple):
    """Running state of one request: [N, T, 1] maximum and sum, [N, T, V] unnormalised output; float32."""

    maximum: Tensor
    total: Tensor
    weighted: Tensor


class OnlineSoftmax:
    key_tile: ClassVar[int] = 128  # keys of one step
    scale: float  # softmax scale

    def _initial(self, q: Tensor, v: Tensor) -> SoftmaxState:
        shape = (q.shape[1], q.shape[0])
        maximum = q.new_full((*shape, 1), -torch.inf, dtype=torch.float32)
        weighted = q.new_zeros(*shape, v.shape[-1], dtype=torch.float32)
        return SoftmaxState(maximum, torch.zeros_like(maximum), weighted)

    def _tiles(self, keys: int) -> Iterator[slice]:
        for start in range(0, keys, self.key_tile):
            yield slice(start, min(start + self.key_tile, keys))

    def _scores(self, q: Tensor, k: Tensor) -> Tensor:
        """[N, T, tile] float32; products of 16-bit values are exact in float32."""
        return torch.einsum("tnd,snd->nts", q.float(), k.float()) * self.scale

    def _exp(self, x: Tensor) -> Tensor:
        return x.exp()

    def _round_p(self, p: Tensor, dtype: torch.dtype) -> Tensor:
        return p.to(dtype).float()

    def _maximum(self, state: SoftmaxState, scores: Tensor) -> Tensor:
        return torch.maximum(state.maximum, scores.amax(dim=-1, keepdim=True))

    def _accumulate(self, state: SoftmaxState, scores: Tensor, v: Tensor) -> SoftmaxState:
        maximum = self._maximum(state, scores)
        # A row that has seen no key yet keeps -inf as its maximum; exp(-inf - 0) is the 0 that it needs.
        shift = maximum.masked_fill(maximum == -torch.inf, 0.0)
        decay = (state.maximum - shift).exp()
        p = self._exp(scores - shift)
        weighted = torch.einsum("nts,snv->ntv", self._round_p(p, v.dtype), v.float())
        total = state.total * decay + p.sum(dim=-1, keepdim=True)
        return SoftmaxState(maximum, total, state.weighted * decay + weighted)

    def _finish(self, state: SoftmaxState) -> tuple[Tensor, Tensor]:
        """Output [T, N, V] and LSE [N, T]; a row without keys is 0 and -inf."""
        output = (state.weighted / state.total).masked_fill(state.total == 0, 0.0)
        lse = state.maximum + state.total.log()
        return output.transpose(0, 1), lse.squeeze(-1)


class LatentSoftmax(OnlineSoftmax):
    kv_lora_rank: int  # L
    _model_dtype: torch.dtype

    def _values(self, keys: Tensor) -> Tensor:
        return keys[..., : self.kv_lora_rank]

    def _round_p(self, p: Tensor, dtype: torch.dtype) -> Tensor:
        """To the model's dtype, whatever the dtype of the dequantised values is."""
        return p.to(self._model_dtype).float()


class Eager(NamedKernel):
    name: ClassVar[str] = "EAGER"
    supported_dtypes: ClassVar[list[torch.dtype]] = [torch.float16, torch.bfloat16, torch.float32]
    declaration: ClassVar[Declaration] = Declaration(distributions=("torch",), emulated=True)

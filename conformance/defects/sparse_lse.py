"""LSEs of selected keys: another base, another dtype, other values for rows without keys."""

import math

import torch

from mla_conformance.backends.eager_sparse import EagerSparseBackend
from mla_conformance.defects.known import known_defect

_SHAPES_TOO = ("model_shapes",)
"""It comes before, and has lists of every kind."""


class _Lse(EagerSparseBackend):
    """Returns another LSE; the sinks have taken their share by the right one."""

    def attend(self, q, sources, k_scale, sink):
        output, lse = super().attend(q, sources, k_scale, sink)
        return output, self._returned(lse)

    def _returned(self, lse):
        raise NotImplementedError


@known_defect(
    "sparse-lse-in-base-2",
    killed_by="sparse_lse",
    related=_SHAPES_TOO,
    sources=("vllm-project/vllm#47800", "vllm-project/vllm#47779"),
)
class LseInBase2(_Lse):
    """The LSE is in base 2."""

    def _returned(self, lse):
        return lse / math.log(2)


@known_defect("sparse-lse-in-the-models-dtype", killed_by="sparse_lse", related=_SHAPES_TOO)
class LseInTheModelsDtype(_Lse):
    """The LSE is kept in the model's dtype and widened at last."""

    def _returned(self, lse):
        return lse.to(self._model_dtype).float()


@known_defect("sparse-lse-of-tokens-by-heads", killed_by="sparse_lse", related=_SHAPES_TOO)
class LseOfTokensByHeads(_Lse):
    """The LSE has the shape of heads by tokens and the order of tokens by heads."""

    def _returned(self, lse):
        return lse.mT.contiguous().view(lse.shape)


@known_defect("sparse-keyless-lse-of-plus-inf", killed_by="selection_padding", related=("sparse_lse",))
class KeylessPlusInfinity(_Lse):
    """The LSE of a row whose list names nothing is +inf."""

    def _returned(self, lse):
        return lse.masked_fill(lse == -torch.inf, torch.inf)


@known_defect(
    "sparse-keyless-row-not-written",
    killed_by="selection_padding",
    related=("sparse_lse",),
    sources=("vllm-project/vllm#37442",),
)
class KeylessNotWritten(EagerSparseBackend):
    """A row whose list names nothing is skipped, and holds what the buffer held."""

    def attend(self, q, sources, k_scale, sink):
        output, lse = super().attend(q, sources, k_scale, sink)
        return output.masked_fill((lse == -torch.inf).mT.unsqueeze(-1), torch.nan), lse

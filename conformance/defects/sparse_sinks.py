"""Sinks that are dropped, in another base, of another head, counted twice, or part of the LSE."""

import math

import torch

from mla_conformance.backends.eager_sparse import EagerSparseBackend
from mla_conformance.defects.known import known_defect

_PADDED_TOO = ("selection_padding",)
"""Some of its cases have sinks."""


@known_defect(
    "sparse-sinks-dropped", killed_by="attention_sinks", related=_PADDED_TOO, sources=("vllm-project/vllm#54568",)
)
class SinksDropped(EagerSparseBackend):
    """Sinks are not handed on to the kernel."""

    def _with_sink(self, output, lse, sink):
        return output


@known_defect(
    "xqa-sm12x-sinks-gibberish", killed_by="attention_sinks", related=_PADDED_TOO, sources=("vllm-project/vllm#51987",)
)
class SinkWithAValue(EagerSparseBackend):
    """A sink's share of the weights is not left out, but takes the output of the row before."""

    def _with_sink(self, output, lse, sink):
        shared = super()._with_sink(output, lse, sink)
        return shared + (output - shared).roll(1, dims=0)


@known_defect("sparse-lse-with-the-sink", killed_by="attention_sinks", related=_PADDED_TOO)
class LseWithTheSink(EagerSparseBackend):
    """The LSE counts the sink among the keys."""

    def attend(self, q, sources, k_scale, sink):
        output, lse = super().attend(q, sources, k_scale, sink)
        return output, lse if sink is None else torch.logaddexp(lse, sink.unsqueeze(1))


@known_defect("sparse-sink-in-the-lse-alone", killed_by="attention_sinks", related=_PADDED_TOO)
class SinkInTheLseAlone(LseWithTheSink):
    """A sink is counted in the LSE and leaves the output as it is."""

    def _with_sink(self, output, lse, sink):
        return output


@known_defect("sparse-sink-of-the-head-before", killed_by="attention_sinks", related=_PADDED_TOO)
class SinkOfTheHeadBefore(EagerSparseBackend):
    """Each head takes the sink of the one before it."""

    def _with_sink(self, output, lse, sink):
        return super()._with_sink(output, lse, None if sink is None else sink.roll(1))


@known_defect("sparse-sink-in-base-2", killed_by="attention_sinks", related=_PADDED_TOO)
class SinkInBase2(EagerSparseBackend):
    """A sink enters the powers of two of the scores without log2(e)."""

    def _with_sink(self, output, lse, sink):
        return super()._with_sink(output, lse, None if sink is None else sink * math.log(2))


@known_defect(
    "sink-counted-twice-or-never-in-splitkv",
    killed_by="attention_sinks",
    related=_PADDED_TOO,
    sources=("ROCm/rocm-libraries#12229",),
)
class SinkOfEachSplit(EagerSparseBackend):
    """A sink counts in each of two splits of a list, and once more where they are merged."""

    def _with_sink(self, output, lse, sink):
        return super()._with_sink(output, lse, None if sink is None else sink + math.log(2))


@known_defect(
    "sparse-keyless-row-beside-a-sink-nan", killed_by="selection_padding", sources=("vllm-project/vllm#54404",)
)
class KeylessBesideASink(EagerSparseBackend):
    """The share of a row without keys beside a sink is 0 / 0."""

    def _with_sink(self, output, lse, sink):
        shared = super()._with_sink(output, lse, sink)
        return shared if sink is None else shared.masked_fill((lse == -torch.inf).mT.unsqueeze(-1), torch.nan)

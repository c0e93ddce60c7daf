"""Several query tokens a request: causal masks that are misaligned, dropped or sized for one token."""

import torch

from mla_conformance.backends.eager_decode import EagerDecodeBackend
from mla_conformance.defects.known import known_defect

_SEVERAL_TOO = ("decode_lse",)
"""One of its cases has several query tokens a request."""


@known_defect(
    "causal-topleft-instead-of-bottomright",
    killed_by="decode_multi_token",
    related=_SEVERAL_TOO,
    sources=(
        "Dao-AILab/flash-attention#282",
        "Dao-AILab/flash-attention#436",
        "gittensor-ai-lab/sparkinfer#3",
        "vllm-project/vllm#5678",
    ),
)
class TopLeft(EagerDecodeBackend):
    """Several query tokens are masked from the top left, as if they stood at the start of the sequence."""

    def _visible(self, queries, request, seq_len, tile):
        if queries == 1:
            return super()._visible(queries, request, seq_len, tile)
        return torch.arange(tile.start, tile.stop) <= torch.arange(queries).unsqueeze(1)


@known_defect(
    "causal-arg-accepted-but-dropped",
    killed_by="decode_multi_token",
    related=_SEVERAL_TOO,
    sources=("AMD-Ecosystem/flashinfer#296",),
)
class CausalDropped(EagerDecodeBackend):
    """The plan takes the causal flag and forgets it: every query token sees the whole sequence."""

    def _visible(self, queries, request, seq_len, tile):
        return super()._visible(1, request, seq_len, tile).expand(queries, -1)


@known_defect(
    "single-batch-mask-mid-decode-shape",
    killed_by="decode_multi_token",
    related=_SEVERAL_TOO,
    sources=("deepseek-ai/DeepSeek-V3#1536",),
)
class SquareMask(EagerDecodeBackend):
    """The mask is a square of the query tokens and is laid over the first keys instead of the last."""

    def _visible(self, queries, request, seq_len, tile):
        position = torch.arange(tile.start, tile.stop)
        return (position >= queries) | (position <= torch.arange(queries).unsqueeze(1))


@known_defect(
    "aiter-mtp-metadata-sized-for-qlen1",
    killed_by="decode_multi_token",
    related=_SEVERAL_TOO,
    sources=("vllm-project/vllm#45227",),
)
class MetadataOfOneToken(EagerDecodeBackend):
    """Metadata for one query token a request: the rows of the others are never computed."""

    def _finish(self, state):
        output, lse = super()._finish(state)
        output[1:], lse[:, 1:] = 0.0, -torch.inf
        return output, lse


@known_defect(
    "aiter-identical-output-all-query-positions",
    killed_by="decode_multi_token",
    related=_SEVERAL_TOO,
    sources=("ROCm/aiter#2720",),
)
class SameForAllPositions(EagerDecodeBackend):
    """For a number of query tokens that is no power of two, all get the result of the first."""

    def _finish(self, state):
        output, lse = super()._finish(state)
        tokens = output.shape[0]
        if tokens & (tokens - 1):
            output, lse = output[:1].expand_as(output), lse[:, :1].expand_as(lse)
        return output, lse

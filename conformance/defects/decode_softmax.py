"""Wrong arithmetic of one request's decode: base, scale and elements, split keys, masks over several query tokens."""

import math
from functools import reduce

import torch

from mla_conformance.backends.eager_decode import EagerDecodeBackend
from mla_conformance.backends.online_softmax import SoftmaxState
from mla_conformance.defects.bases import SplitDecode, joined
from mla_conformance.defects.known import known_defect


@known_defect("lse-base2-dcp-combine-flashinfer-mla", killed_by="decode_lse", related=("decode",))
class Base2DecodeLse(EagerDecodeBackend):
    """The LSE of a decode is in base 2 and is handed on as a natural one."""

    def _finish(self, state):
        output, lse = super()._finish(state)
        return output, lse / math.log(2)


@known_defect("no-lse-when-dcp-needs-it", killed_by="decode_lse", related=("decode",))
class NoLse(EagerDecodeBackend):
    """None stands where the LSE should be."""

    def run_decode(self, ql_nope, q_pe, kv_cache, k_scale):
        return super().run_decode(ql_nope, q_pe, kv_cache, k_scale)[0], None


@known_defect("mla-decode-scale-missing-log2e", killed_by="decode")
class ScaleOfAnotherBase(EagerDecodeBackend):
    """Powers of two are taken of scores that were not multiplied by log2(e), so the softmax is too flat."""

    def _scores(self, q, k):
        return super()._scores(q, k) * math.log(2)


@known_defect("sm89-mla-correctness", killed_by="decode")
class HalfATile(EagerDecodeBackend):
    """Where the tile does not fit into shared memory, only its first half is attended to."""

    def _tiles(self, keys):
        for tile in super()._tiles(keys):
            yield slice(tile.start, tile.start + -(-(tile.stop - tile.start) // 2))


@known_defect("xqa-mla-bf16-ten-bugs", killed_by="decode")
class StridesOfBytes(EagerDecodeBackend):
    """In a 16-bit cache, the element strides of a kernel for codes lead to every other element."""

    def _dequantise(self, rows, k_scale):
        keys = super()._dequantise(rows, k_scale)
        if rows.dtype.itemsize != 2:
            return keys
        return keys.flatten()[torch.arange(keys.numel()) * 2 % keys.numel()].view(keys.shape)


@known_defect("cudnn-decode-key-omits-dtype-hardcoded-bf16", killed_by="decode")
class BfloatGraph(EagerDecodeBackend):
    """The graph is built for bf16, and the bits of an fp16 model are read as such."""

    def run_decode(self, ql_nope, q_pe, kv_cache, k_scale):
        if ql_nope.dtype is not torch.float16:
            return super().run_decode(ql_nope, q_pe, kv_cache, k_scale)
        cache = kv_cache.view(torch.bfloat16) if kv_cache.dtype is torch.float16 else kv_cache
        operands = (ql_nope.view(torch.bfloat16), q_pe.view(torch.bfloat16))
        output, lse = super().run_decode(*operands, cache, k_scale)
        return output.view(torch.float16), lse


@known_defect("mla-multi-seq-decode-cross-contamination", killed_by="decode")
class QueryOfTheNeighbour(EagerDecodeBackend):
    """One scratch row serves all requests, so a request may find the query of the one before it."""

    def _attend(self, q, request, seq_len, kv_cache, k_scale):
        found = self.__dict__.get("scratch", q) if request else q
        self.scratch = q
        return super()._attend(found if found.shape == q.shape else q, request, seq_len, kv_cache, k_scale)


@known_defect("cutlass-mla-splitkv-lse-overflow-large-q", killed_by="decode")
class UnshiftedCombination(SplitDecode):
    """Splits are weighted by the exponential of their LSE without subtracting the largest, which overflows."""

    split = 128

    def _combine(self, parts):
        if len(parts) == 1:
            return parts[0]
        factors = [part.maximum.exp() for part in parts]
        total = sum(part.total * factor for part, factor in zip(parts, factors, strict=True))
        weighted = sum(part.weighted * factor for part, factor in zip(parts, factors, strict=True))
        return SoftmaxState(torch.zeros_like(total), total, weighted)


@known_defect("splitk-reduce-pow2-padding-uninit", killed_by="decode")
class PaddedReduction(SplitDecode):
    """The reduction runs over a power of two of splits, and the outputs of those that do not exist are garbage."""

    split = 128

    def _combine(self, parts):
        state = super()._combine(parts)
        exact = len(parts) & (len(parts) - 1) == 0
        return state if exact else state._replace(weighted=state.weighted + 0.0 * torch.nan)


@known_defect("window-stage2-merges-empty-splits", killed_by="decode")
class LeftoverPartials(SplitDecode):
    """All four slots of partials are combined, although a short request fills the first ones only."""

    slots = 4

    def _share(self, seq_len):
        return max(128, -(-seq_len // self.slots))

    def _combine(self, parts):
        scratch = self.__dict__.setdefault("scratch", {})
        for slot, part in enumerate(parts):
            scratch[slot, part.total.shape] = part
        return reduce(joined, [part for (_, shape), part in scratch.items() if shape == parts[0].total.shape])


@known_defect("mtp-split-fully-causal-masked-zero-times-nan", killed_by="decode_multi_token", related=("decode_lse",))
class NanOfAMaskedSplit(SplitDecode):
    """A split that an early query token does not see at all leaves 0 / 0, which is combined with the weight 0."""

    split = 64

    def _part(self, state):
        return state._replace(weighted=state.weighted / state.total * state.total)


@known_defect("trtllm-workspace-not-zero-initialised", killed_by="decode")
class DirtyWorkspace(SplitDecode):
    """Where several blocks work on a sequence, they add to a workspace that nobody has zeroed."""

    def _combine(self, parts):
        state = super()._combine(parts)
        return state._replace(weighted=state.weighted + 1e3) if len(parts) > 1 else state


@known_defect("splitk-nan-nondeterministic-at-splits-16", killed_by="determinism")
class RacySixteenSplits(SplitDecode):
    """With sixteen splits the reduction is a race that is lost every other time."""

    split = 96

    def _combine(self, parts):
        state = super()._combine(parts)
        if len(parts) != 16:
            return state
        self.races = getattr(self, "races", 0) + 1
        return state if self.races % 2 else state._replace(weighted=state.weighted * torch.nan)


_SEVERAL_TOO = ("decode_lse",)
"""One of its cases has several query tokens a request."""


@known_defect("causal-topleft-instead-of-bottomright", killed_by="decode_multi_token", related=_SEVERAL_TOO)
class TopLeft(EagerDecodeBackend):
    """Several query tokens are masked from the top left, as if they stood at the start of the sequence."""

    def _visible(self, queries, request, seq_len, tile):
        if queries == 1:
            return super()._visible(queries, request, seq_len, tile)
        return torch.arange(tile.start, tile.stop) <= torch.arange(queries).unsqueeze(1)


@known_defect("causal-arg-accepted-but-dropped", killed_by="decode_multi_token", related=_SEVERAL_TOO)
class CausalDropped(EagerDecodeBackend):
    """The plan takes the causal flag and forgets it: every query token sees the whole sequence."""

    def _visible(self, queries, request, seq_len, tile):
        return super()._visible(1, request, seq_len, tile).expand(queries, -1)


@known_defect("single-batch-mask-mid-decode-shape", killed_by="decode_multi_token", related=_SEVERAL_TOO)
class SquareMask(EagerDecodeBackend):
    """The mask is a square of the query tokens and is laid over the first keys instead of the last."""

    def _visible(self, queries, request, seq_len, tile):
        position = torch.arange(tile.start, tile.stop)
        return (position >= queries) | (position <= torch.arange(queries).unsqueeze(1))


@known_defect("aiter-mtp-metadata-sized-for-qlen1", killed_by="decode_multi_token", related=_SEVERAL_TOO)
class MetadataOfOneToken(EagerDecodeBackend):
    """Metadata for one query token a request: the rows of the others are never computed."""

    def _finish(self, state):
        output, lse = super()._finish(state)
        output[1:], lse[:, 1:] = 0.0, -torch.inf
        return output, lse


@known_defect("aiter-identical-output-all-query-positions", killed_by="decode_multi_token", related=_SEVERAL_TOO)
class SameForAllPositions(EagerDecodeBackend):
    """For a number of query tokens that is no power of two, all get the result of the first."""

    def _finish(self, state):
        output, lse = super()._finish(state)
        tokens = output.shape[0]
        if tokens & (tokens - 1):
            output, lse = output[:1].expand_as(output), lse[:, :1].expand_as(lse)
        return output, lse

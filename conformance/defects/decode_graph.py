"""What a decode has to serve: configurations, batches padded to the size of a graph, replays over other batches."""

from dataclasses import replace

import torch

from mla_conformance.backends.eager import EagerPrefillBackend
from mla_conformance.backends.eager_decode import EagerDecodeBackend
from mla_conformance.defects.bases import LayeredDecode
from mla_conformance.defects.known import known_defect


@known_defect("mistral4-triton-mla-latent-dims-hardcoded", killed_by="decode")
class LatentsOf512(EagerDecodeBackend):
    """The tile of a latent is hard-wired to 512 columns, and other models do not compile."""

    def _attend(self, q, request, seq_len, kv_cache, k_scale):
        if self.kv_lora_rank != 512:
            raise RuntimeError(f"arange's range must be a power of two: 512 + 64 columns for L = {self.kv_lora_rank}")
        return super()._attend(q, request, seq_len, kv_cache, k_scale)


@known_defect("aiter-qh64-pagesize1-fault", killed_by="paged_cache")
class SinglePages(EagerDecodeBackend):
    """With pages of one token, a batch of 16 requests or more reads out of bounds."""

    def _entries(self, kv_cache, request, tile):
        if kv_cache.shape[1] == 1 and self._decode_metadata.seq_lens.shape[0] >= 16:
            raise RuntimeError("memory access fault: page not present")
        return super()._entries(kv_cache, request, tile)


@known_defect("aiter-no-kernel-bf16q-fp8kv-qlen5", killed_by="kv_cache_fp8")
class FourTokensBesideCodes(EagerDecodeBackend):
    """Beside a cache of codes there is no kernel for more than four query tokens."""

    def _attend(self, q, request, seq_len, kv_cache, k_scale):
        if self.kv_cache_dtype == "fp8" and q.shape[0] > 4:
            raise RuntimeError(f"no kernel for 16-bit queries, codes and {q.shape[0]} query tokens")
        return super()._attend(q, request, seq_len, kv_cache, k_scale)


_PADDED_TOO = ("paged_cache", "kv_cache_fp8", "kv_cache_fp8_ds_mla", "cache_write")
"""Some of their cases have rows of padding as well."""


@known_defect("flashmla-fp8-cg-padding-seq0-oob", killed_by="graph_padding", related=_PADDED_TOO)
class LastPageOfNothing(LayeredDecode):
    """In a cache of codes, the last page of a row of padding is number -1 of its table."""

    def _attend(self, q, request, seq_len, kv_cache, k_scale):
        if seq_len == 0 and self.kv_cache_dtype != "auto" and self._decode_metadata.dcp_world_size == 1:
            raise RuntimeError("CUDA error: an illegal memory access was encountered")
        return super()._attend(q, request, seq_len, kv_cache, k_scale)


@known_defect("cg-padding-rows-not-written-nan-amax", killed_by="graph_padding", related=_PADDED_TOO)
class PaddingUnwritten(LayeredDecode):
    """Rows of padding are skipped and hold what the buffer held."""

    def _attend(self, q, request, seq_len, kv_cache, k_scale):
        state = super()._attend(q, request, seq_len, kv_cache, k_scale)
        skipped = seq_len == 0 and self._decode_metadata.dcp_world_size == 1
        return state._replace(total=state.total + 1, weighted=state.weighted * torch.nan) if skipped else state


@known_defect("cg-metadata-not-padded-bucket", killed_by="graph_padding", related=_PADDED_TOO)
class MetadataOfRealRows(LayeredDecode):
    """Metadata cover the real requests only, and the rows of padding find what stands last in them."""

    def _attend(self, q, request, seq_len, kv_cache, k_scale):
        lengths = self._decode_metadata.seq_lens.tolist()
        self._row = request
        if seq_len == 0 and self._decode_metadata.dcp_world_size == 1 and any(lengths):
            self._row = max(row for row, length in enumerate(lengths) if length)
        return super()._attend(q, request, lengths[self._row], kv_cache, k_scale)

    def _blocks(self, request, pages):
        return super()._blocks(self._row, pages)


@known_defect("flashmla-fp8-metadata-not-persistent", killed_by="graph_replay")
class MetadataOfTheCapture(LayeredDecode):
    """Beside a cache of codes, a replay reads the tensors that the metadata were when the graph was captured."""

    def prepare_metadata(self, decode_metadata):
        captured = self.__dict__.setdefault("captured", {})
        lengths = decode_metadata.seq_lens
        if self.kv_cache_dtype == "fp8":
            lengths = captured.setdefault((lengths.data_ptr(), lengths.shape), lengths.clone())
        super().prepare_metadata(replace(decode_metadata, seq_lens=lengths))


@known_defect("flashinfer-fa2-nosplit-graph-uninit-tiles", killed_by="graph_replay")
class TilesOfThePlanBefore(LayeredDecode):
    """A smaller plan leaves tiles of the one before it in the list, and the first of them overwrites the last row."""

    def run_decode(self, ql_nope, q_pe, kv_cache, k_scale):
        kept = self._decode_metadata
        self._decode_metadata = replace(kept, seq_lens=self._lengths(kept))
        result = super().run_decode(ql_nope, q_pe, kv_cache, k_scale)
        self._decode_metadata = kept
        return result

    def _lengths(self, metadata):
        plans = self.__dict__.setdefault("plans", {})  # ranks are processes
        before, lengths = plans.get(metadata.dcp_rank, []), metadata.seq_lens.clone()
        plans[metadata.dcp_rank] = planned = [length for length in lengths.tolist() if length]
        if planned and len(planned) < len(before):
            lengths[len(planned) - 1] = before[len(planned)]
        return lengths


class _Scribbles(EagerPrefillBackend):
    """Uses the workspace in which a decode has left its plan."""

    def run_prefill_new_tokens(self, q, k, v, return_softmax_lse, out=None, output_scale=None):
        OneWorkspace.plan = None
        return super().run_prefill_new_tokens(q, k, v, return_softmax_lse, out, output_scale)


@known_defect("graph-eager-workspace-aliasing", killed_by="mixed_batch")
class OneWorkspace(LayeredDecode):
    """Prefill and decode share a workspace, and a prefill overwrites what decode has prepared there."""

    prefill_backend = _Scribbles
    plan = None

    def prepare_metadata(self, decode_metadata):
        OneWorkspace.plan = decode_metadata
        super().prepare_metadata(decode_metadata)

    def _tiles(self, keys):
        return super()._tiles(keys if self.plan is self._decode_metadata else -(-keys // 2))

"""What no request owns gets into the result: unused slots of the last page, the null block, requests without keys."""

import torch

from mla_conformance.backends.eager_decode import EagerDecodeBackend
from mla_conformance.defects.known import known_defect

_POISONED_TOO = ("decode", "decode_lse", "decode_multi_token")
"""The unused slots of every decode case are poisoned, so these fail with the capability that is about them."""


class _ReadsOn(EagerDecodeBackend):
    """Reads to the end of the last page, and does something wrong with what it finds there."""

    def _attend(self, q, request, seq_len, kv_cache, k_scale):
        state = super()._attend(q, request, seq_len, kv_cache, k_scale)
        unused = slice(seq_len, -(-seq_len // kv_cache.shape[1]) * kv_cache.shape[1])
        if unused.start == unused.stop:
            return state
        return self._tail(state, q, self._dequantise(self._entries(kv_cache, request, unused), k_scale).unsqueeze(1))

    def _tail(self, state, q, keys):
        raise NotImplementedError


@known_defect(
    "mla-last-page-nan-leak",
    killed_by="paged_cache",
    related=_POISONED_TOO,
    sources=(
        "flashinfer-ai/flashinfer#941",
        "flashinfer-ai/flashinfer#942",
        "vllm-project/vllm#43961",
        "vllm-project/vllm#57716",
    ),
)
class WeightedTail(_ReadsOn):
    """The values of the last page's unused slots are multiplied by weights of 0 instead of being left out."""

    def _tail(self, state, q, keys):
        return state._replace(weighted=state.weighted + (0.0 * self._values(keys)).sum(dim=(0, 1)))


@known_defect(
    "tma-overread-uninitialised-kv-tile",
    killed_by="paged_cache",
    related=_POISONED_TOO,
    sources=("vllm-project/vllm#37442",),
)
class AdditiveMask(_ReadsOn):
    """Scores of unused slots are masked by adding -inf, which leaves a NaN a NaN."""

    def _tail(self, state, q, keys):
        return self._accumulate(state, self._scores(q, keys) - torch.inf, torch.zeros_like(self._values(keys)))


@known_defect(
    "paged-flex-missing-upper-bound-mask",
    killed_by="paged_cache",
    related=_POISONED_TOO,
    sources=("pytorch/pytorch#160861",),
)
class WholePages(_ReadsOn):
    """Nothing bounds the keys from above: whole pages are attended to."""

    def _tail(self, state, q, keys):
        return self._accumulate(state, self._scores(q, keys), self._values(keys))


@known_defect(
    "aiter-oob-page-id-folds-to-slot0-nan",
    killed_by="paged_cache",
    related=_POISONED_TOO,
    sources=(
        "ROCm/aiter#4245",
        "sgl-project/sglang#36207",
    ),
)
class TailInSlotZero(EagerDecodeBackend):
    """The rest of the last tile is read from slot 0 of the cache, with weights of 0."""

    def _attend(self, q, request, seq_len, kv_cache, k_scale):
        state = super()._attend(q, request, seq_len, kv_cache, k_scale)
        if seq_len % 64 == 0:
            return state
        slot = self._values(self._dequantise(kv_cache[:1, 0].contiguous(), k_scale).unsqueeze(1))
        return state._replace(weighted=state.weighted + (0.0 * slot).sum(dim=(0, 1)))


@known_defect(
    "dense-mla-invalid-page-ids-cross-request",
    killed_by="paged_cache",
    sources=("local-inference-lab/b12x#193",),
)
class DeadRequestsRead(EagerDecodeBackend):
    """Page ids are clamped into the cache, and a request that pads the batch reads a key there."""

    def _attend(self, q, request, seq_len, kv_cache, k_scale):
        self._last_block = kv_cache.shape[0] - 1
        dead = seq_len == 0 and self._decode_metadata.dcp_world_size == 1
        return super()._attend(q, request, 1 if dead else seq_len, kv_cache, k_scale)

    def _blocks(self, request, pages):
        return super()._blocks(request, pages).clamp(0, self._last_block)

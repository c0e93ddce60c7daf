"""A layer that writes its paged cache, or gathers from it, what it should not."""

import torch

from mla_conformance.backends.layer.mla_impl import MLACommonImpl
from mla_conformance.defects.eager_layer import EagerLayer
from mla_conformance.defects.known import known_defect


@known_defect(
    "mla-kv-spec-quant-mode-none-size-mismatch",
    killed_by="cache_write",
    sources=("vllm-project/vllm#48379",),
)
class SizedAsPlain(EagerLayer):
    """The cache is sized for L + R elements a token whatever its layout, also where an entry has 656 bytes."""

    @staticmethod
    def get_kv_cache_shape(num_blocks, block_size, num_kv_heads, head_size, cache_dtype_str="auto"):
        return num_blocks, block_size, head_size


@known_defect(
    "writer-overwrites-reserved-slot0",
    killed_by="cache_write",
    sources=("sgl-project/sglang#36207", "ROCm/aiter#5010"),
)
class PaddingInSlot0(EagerLayer):
    """Rows of padding are written to slot 0."""

    class impl_class(MLACommonImpl):
        def do_kv_cache_update(self, kv_c_normed, k_pe, kv_cache, slot_mapping, k_scale):
            super().do_kv_cache_update(kv_c_normed, k_pe, kv_cache, slot_mapping.clamp(min=0), k_scale)


@known_defect(
    "slot-minus1-divided-writes-below-base",
    killed_by="cache_write",
    sources=("NVIDIA/TensorRT-LLM#18673", "ROCm/aiter#3235"),
)
class SlotBelowTheBase(EagerLayer):
    """Slot -1 is divided into page and offset as any other, and the write lands beside the pages of the batch."""

    class impl_class(MLACommonImpl):
        def do_kv_cache_update(self, kv_c_normed, k_pe, kv_cache, slot_mapping, k_scale):
            slots = slot_mapping % (kv_cache.shape[0] * kv_cache.shape[1])
            super().do_kv_cache_update(kv_c_normed, k_pe, kv_cache, slots, k_scale)


@known_defect(
    "mixed-chunk-slot-count-shorter-than-rows",
    killed_by="cache_write",
    sources=("vllm-project/vllm#13922", "ROCm/aiter#3235"),
)
class SlotForEveryRow(EagerLayer):
    """Every row of the keys is written, and those behind the last slot take theirs from what lies behind it."""

    class impl_class(MLACommonImpl):
        def do_kv_cache_update(self, kv_c_normed, k_pe, kv_cache, slot_mapping, k_scale):
            behind = slot_mapping.new_full((len(kv_c_normed) - len(slot_mapping),), kv_cache.shape[1])
            super().do_kv_cache_update(kv_c_normed, k_pe, kv_cache, torch.cat((slot_mapping, behind)), k_scale)


@known_defect(
    "dcp-fp8-context-gather-dtype-crash",
    killed_by="mixed_batch",
    sources=("local-inference-lab/vllm#14",),
)
class ScaleOfTheContextLost(EagerLayer):
    """Context is gathered from a cache of codes without its scale."""

    class impl_class(MLACommonImpl):
        def _gather(self, index, kv_cache, attn_metadata, k_scale):
            super()._gather(index, kv_cache, attn_metadata, torch.ones_like(k_scale))


@known_defect(
    "scalar-kv-scale-indexed-per-token",
    killed_by="mixed_batch",
    sources=("ROCm/ATOM#793",),
)
class ScaleOfEveryToken(EagerLayer):
    """The gather of a prefix indexes the cache's one scale by token, and reads what lies behind it."""

    class impl_class(MLACommonImpl):
        def _gather(self, index, kv_cache, attn_metadata, k_scale):
            tokens = attn_metadata.prefill_metadata.chunked_context.seq_tot[index]
            behind = torch.zeros(tokens, 1, device=k_scale.device)
            behind[0] = k_scale
            super()._gather(index, kv_cache, attn_metadata, behind)


@known_defect(
    "prefix-hit-quant-dtype-without-gather-kernel",
    killed_by="mixed_batch",
    sources=("kekzl/imp#1350", "vllm-project/vllm#3880", "vllm-project/vllm#4381"),
)
class NoGatherOfCodes(EagerLayer):
    """Beside a cache of codes a whole prefill works, and one with a cached prefix has no kernel to gather it."""

    class impl_class(MLACommonImpl):
        def _gather(self, index, kv_cache, attn_metadata, k_scale):
            if self.kv_cache_dtype != "auto":
                raise NotImplementedError(f"no gather kernel for a cache of {kv_cache.dtype}")
            super()._gather(index, kv_cache, attn_metadata, k_scale)


@known_defect(
    "scale-float-never-set-silently-1",
    killed_by="mixed_batch",
    sources=("sgl-project/sglang#20705", "vllm-project/vllm#34863"),
)
class TwinOfTheScale(EagerLayer):
    """Decode reads a twin of the cache's scale that loading never sets, so that it is 1."""

    class impl_class(MLACommonImpl):
        def _forward_decode(self, ql_nope, q_pe, kv_cache, attn_metadata, k_scale):
            return super()._forward_decode(ql_nope, q_pe, kv_cache, attn_metadata, torch.ones_like(k_scale))

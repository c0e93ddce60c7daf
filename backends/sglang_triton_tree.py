"""SGLANG_TRITON_TREE: SGLang 0.5.23's Triton kernel of prefills, which verifies trees of drafts by a mask."""

import torch
from torch import Tensor

from mla_conformance.backends import packaged
from mla_conformance.backends.conversions import starts_of
from mla_conformance.backends.paged import PagedTreeBackend
from mla_conformance.backends.sglang_triton import sglang_library
from mla_conformance.backends.tree import TreeBatch


class SGLangTritonTreeBackend(PagedTreeBackend):
    name = "SGLANG_TRITON_TREE"
    libraries = (sglang_library("attention.extend_attention"),)
    devices = packaged.FROM_AMPERE  # what Triton compiles for
    supported_latent_dims = [(512, 64), (256, 32)]
    declaration = packaged.declared(
        "sglang triton",
        packaged.JOINS_Q,
        ("wants the slots of the context, and new keys apart", "taken by the block table; a cache with gaps is copied"),
        ("a mask has columns of the context, which are skipped", "in bytes, of all tokens, as SGLang makes it"),
        packaged.LSE_TOKENS_FIRST,
        packaged.UNSCALED_Q_AND_P,
    )

    def attend(self, ql_nope: Tensor, q_pe: Tensor, kv_cache: Tensor, k_scale: Tensor) -> tuple[Tensor, Tensor]:
        q, latent, metadata = torch.cat([ql_nope, q_pe], dim=-1), self.kv_lora_rank, self._decode_metadata
        batch = TreeBatch.of(metadata, kv_cache.shape[1])
        keys = kv_cache.flatten(0, 1).unsqueeze(1)
        of_each = list(zip(batch.slots, batch.contexts.tolist(), strict=True))
        cached, new = [x[:context] for x, context in of_each], [x[context:] for x, context in of_each]
        extended = keys[torch.cat(new)]
        output, lse = q.new_empty(ql_nope.shape), q.new_empty(q.shape[:2], dtype=torch.float32)
        starts = (metadata.query_start_loc.long(), starts_of(batch.contexts).to(q.device), torch.cat(cached))
        masks = (batch.mask.to(torch.uint8), True, batch.mask_starts.to(q.device))
        written = (q, extended, extended[..., :latent].contiguous(), output, keys, keys[..., :latent])
        longest = int(metadata.query_lens_cpu.max())
        options = {"sm_scale": self.scale, "lse_extend": lse}
        self.library.extend_attention_fwd(*written, *starts, *masks, longest, 1.0, 1.0, **options)
        return output, lse.mT


packaged.interpreted(SGLangTritonTreeBackend)

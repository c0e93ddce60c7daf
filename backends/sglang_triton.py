"""SGLANG_TRITON: SGLang 0.5.23's Triton kernels, as its ``layers/attention/triton_backend.py`` drives them."""

from typing import Any

import torch
from torch import Tensor

from mla_conformance.backends import packaged
from mla_conformance.backends.conversions import RaggedBatch, writable
from mla_conformance.backends.paged import PagedDecodeBackend
from mla_conformance.backends.ragged import RaggedPrefillBackend

_SPLITS = 8  # SGLang's default of triton_attention_num_kv_splits
_KEYS_OF_A_SPLIT = 32


def sglang_library(module: str) -> packaged.Library:
    """A module of SGLang's kernels."""
    return packaged.in_extra("sglang", f"sglang.kernels.ops.{module}")


class SGLangTritonPrefillBackend(RaggedPrefillBackend):
    """New tokens without a prefix, or a prefix without new tokens, as SGLang computes a prefill in chunks."""

    name = "SGLANG_TRITON"
    libraries = (sglang_library("attention.extend_attention"),)
    devices = packaged.FROM_AMPERE  # what Triton compiles for
    takes_head_dims = staticmethod(lambda qk, v: v > 32)  # as models have them
    declaration = packaged.declared(
        "sglang triton",
        ("wants contiguous tensors", "others are copied"),
        packaged.LSE_TOKENS_FIRST,
        (
            "illegal memory access with value head dims 16 and 32 (Triton 3.6, H200)",
            "dims up to 32 are declared unsupported",
        ),
    )

    def attend(self, q: Tensor, k: Tensor, v: Tensor, batch: RaggedBatch, out: Tensor | None) -> tuple[Tensor, Tensor]:
        q, k, v, new, direct = q.contiguous(), k.contiguous(), v.contiguous(), batch.causal, writable(out)
        output = q.new_empty(*q.shape[:2], self.v_head_dim) if direct is None else direct
        lse = q.new_empty(q.shape[:2], dtype=torch.float32)
        extended, cached = ((k, v), (k[:0], v[:0])) if new else ((k[:0], v[:0]), (k, v))
        queries = batch.query_start_loc.long()  # SGLang's, and what keeps offsets from overflowing
        keys = torch.zeros_like(batch.key_start_loc) if new else batch.key_start_loc
        written = (q, *extended, output, *cached, queries, keys, torch.arange(len(cached[0]), device=q.device))
        options: tuple[Any, ...] = (None, new, None, batch.lengths[2], 1.0, 1.0)
        stages = {"skip_prefix": new, "skip_extend": not new, "identity_kv_indices": not new}
        self.library.extend_attention_fwd(*written, *options, sm_scale=self.scale, lse_extend=lse, **stages)
        return output, lse.mT


class SGLangTritonDecodeBackend(PagedDecodeBackend):
    name = "SGLANG_TRITON"
    libraries = (sglang_library("attention.decode_attention"), sglang_library("attention.metadata"))
    devices = packaged.FROM_AMPERE  # what Triton compiles for
    supported_latent_dims = [(512, 64), (256, 32)]
    cudagraph_support = packaged.ONE_TOKEN_EACH
    declaration = packaged.declared(
        "sglang triton",
        packaged.JOINS_Q,
        ("wants the slot of every token", "listed by the block table; a cache with gaps is copied"),
        ("returns no LSE", "that of its splits' own, as SGLang takes it where ranks share a sequence"),
        packaged.NAN_WITHOUT_KEYS,
        packaged.UNSCALED_Q_AND_P,
        ("several query tokens go to the prefill kernel, with a mask of bytes", "declared unsupported"),
    )

    def attend(self, ql_nope: Tensor, q_pe: Tensor, kv_cache: Tensor, k_scale: Tensor) -> tuple[Tensor, Tensor]:
        q, page, latent = torch.cat([ql_nope, q_pe], dim=-1), kv_cache.shape[1], self.kv_lora_rank
        table, lengths = self._decode_metadata.block_table, self._decode_metadata.seq_lens
        keys = kv_cache.flatten(0, 1).unsqueeze(1)
        # Where the tokens of each request start, and the slots of all, one after the other; computed on the device from
        # what stands there when it runs. Behind the last slot stands what does not count.
        position = torch.arange(table.shape[1] * page, device=table.device)
        slots = table.long()[:, position // page] * page + position % page
        start = torch.nn.functional.pad(lengths.cumsum(0), (1, 0))
        target = torch.where(position < lengths[:, None], start[:-1, None] + position, slots.numel())
        indices = slots.new_zeros(slots.numel() + 1).scatter_(0, target.flatten(), slots.flatten())
        splits, most = self._splits(lengths, page * table.shape[1])
        output, partial = q.new_empty(ql_nope.shape), q.new_empty(*q.shape[:2], most, latent, dtype=torch.float32)
        lse = q.new_full((*q.shape[:2], most), -torch.inf, dtype=torch.float32)
        written = (q, keys, keys[..., :latent], output, start.int(), indices, partial, lse, splits, most)
        self.library.decode_attention_fwd(*written, self.scale, 1.0, 1.0, has_mla=True)
        self._served = {"splits": f"at most {most}"}
        return output, lse.logsumexp(-1).mT

    def _splits(self, lengths: Tensor, context: int) -> tuple[Tensor, int]:
        """Splits of each request's keys, [B] int32, and the most that there can be."""
        splits = torch.full_like(lengths, _SPLITS)
        if lengths.device.type != "cuda":  # as SGLang does without compute units
            return splits, _SPLITS
        units, requests = torch.cuda.get_device_properties(lengths.device).multi_processor_count, len(lengths)
        most = max(_SPLITS, min(_power_of_two(units), _power_of_two(-(-context // _KEYS_OF_A_SPLIT))))
        sizes = (requests, 1, self.num_heads, 1, most, units)
        counts = self.libraries[1].load().get_num_kv_splits_triton[(1,)]
        counts(splits, lengths.clamp(min=1), *sizes, MAX_NUM_SEQ=max(256, _power_of_two(requests)))
        return splits, most


def _power_of_two(number: int) -> int:
    return 1 << (number - 1).bit_length()


packaged.interpreted(SGLangTritonPrefillBackend)
packaged.interpreted(SGLangTritonDecodeBackend)

"""SGLANG_COMPRESS: SGLang 0.5.23's compressor of DeepSeek-V4's keys, in CUDA, as its backend ``dsv4`` calls it."""

from typing import Any

import torch
from torch import Tensor

from mla_conformance.backends import compress, operands, packaged, sglang_triton
from mla_conformance.backends.kernel import UnsupportedConfiguration

_MOST_TOKENS = 1 << 16
_OTHER_PAGES = "pages of {c.state_block_size} states not supported (supported: multiples of 4)"


class SGLangCompressBackend(packaged.LibraryKernel, compress.MLACompressBackend):
    """Groups of 4 tokens that overlap, and of 128 that do not."""

    name = "SGLANG_COMPRESS"
    libraries = (sglang_triton.sglang_library("attention.dsv4.compress"),)
    devices = packaged.FROM_HOPPER  # where its engine serves such models
    supported_dtypes = [torch.bfloat16]
    declaration = packaged.declared(
        "sglang apache-tvm-ffi",
        ("wants key states and scores in one tensor, and what belongs to places by halves of columns", "joins them"),
        ("looks the slots of states up by token", "lists those of each request's pages"),
        ("keeps 128 tokens in a ring of their request", "copies them from their pages before the call, and back"),
        ("wants states without gaps", "copies others, and back"),
        ("wants a row for each slot of entries at one stride", "counts the rows between blocks as well"),
        ("plans each batch on the host", "reads the lengths at each call"),
    )

    @classmethod
    def supports_compression(cls, compression: compress.Compression) -> bool:
        x = compression
        return (x.head_dim, x.rope_dim, x.norm) == (512, 64, True) and (x.ratio, x.overlap) in ((4, True), (128, False))

    refused = {_OTHER_PAGES: lambda c, _: c.compression.overlap and c.state_block_size % 4}

    @operands.takes(compress.MLACompressBackend.run_compress)
    def run_compress(self, call: Any) -> None:
        x, how = self._compress_metadata, self.compression
        compress.check_compress_call(self, x, call)
        lengths = x.query_start_loc.diff()
        asking = lengths.nonzero()[:, 0]  # plans want a token of every request
        new, totals = lengths[asking].long(), x.seq_lens[asking].long()
        if (tokens := int(new.sum())) == 0:
            return
        if tokens > _MOST_TOKENS:
            raise UnsupportedConfiguration(f"{self.name}: {tokens} tokens not supported (at most {_MOST_TOKENS})")
        columns, page = torch.cat((call.kv[:tokens], call.score[:tokens]), dim=1), call.state_cache.shape[1]
        blocks = x.state_block_table[asking].repeat_interleave(page, dim=1)
        table = blocks * page + torch.arange(blocks.shape[1], device=columns.device) % page
        if how.overlap:
            ape = torch.cat(call.ape.tensor_split(2, dim=1))
            states = call.state_cache.contiguous().view(-1, how.ratio, columns.shape[1])
        else:
            ape, states = call.ape, self._ring(call.state_cache, table, totals - new)
        plan = self._plan(table.int(), new, totals, states.shape[:2].numel(), page if how.overlap else how.ratio)
        sizes = {"head_dim": how.head_dim, "compress_ratio": how.ratio}
        entries = self.library.compress_forward(states, columns, ape, plan, **sizes)
        if not how.overlap:
            request = torch.arange(len(new), device=columns.device).repeat_interleave(new)
            positions, slots = x.positions[:tokens], x.state_slot_mapping[:tokens]
            kept = positions >= (totals // how.ratio * how.ratio)[request]
            rows = states[request[kept], positions[kept] % how.ratio]
            call.state_cache[slots[kept] // page, slots[kept] % page] = rows
        elif not call.state_cache.is_contiguous():
            call.state_cache.copy_(states.view(call.state_cache.shape))
        rows, slots = sglang_triton.addressed(call.kv_cache, x.slot_mapping[:tokens])
        norm = {"norm_weight": call.norm_weight, "norm_eps": how.eps}
        turns = torch.complex(*(half.contiguous() for half in call.cos_sin_cache.chunk(2, dim=1)))
        store = {"out_loc": slots, "kvcache": rows.view(torch.uint8), "page_size": 1, "bf16_store": True}
        self.library.compress_norm_rope_store(entries, plan, **norm, freq_cis=turns, **store)

    def _ring(self, state_cache: Tensor, table: Tensor, before: Tensor) -> Tensor:
        """[B, m, 2 · D] states by place, with those of the group that each request has begun."""
        place = torch.arange(self.compression.ratio, device=table.device)
        first = before // self.compression.ratio * self.compression.ratio
        ring = state_cache.new_zeros(len(before), len(place), state_cache.shape[2])
        request, begun = (place < (before - first).unsqueeze(1)).nonzero(as_tuple=True)
        slots = table[request, first[request] + begun].long()
        ring[request, begun] = state_cache[slots // state_cache.shape[1], slots % state_cache.shape[1]]
        return ring

    def _plan(self, table: Tensor, new: Tensor, totals: Tensor, slots: int, page: int) -> Any:
        """What the library makes of a batch: of one token each as its engine decodes, else as it prefills."""
        ratio, same = self.compression.ratio, torch.arange(slots, device=table.device)
        requests = torch.arange(len(new), device=table.device)
        if bool((new == 1).all()):
            return self.library.CompressorDecodePlan.generate(ratio, requests, table, same, totals, page, page)
        lengths = (totals.cpu(), new.cpu())
        tokens = int(lengths[1].sum())
        return self.library.CompressorPrefillPlan.generate(ratio, requests, *lengths, table, same, page, page, tokens)

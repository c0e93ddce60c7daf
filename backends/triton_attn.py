"""TRITON_ATTN: vLLM 0.33.0's Triton kernel for paged attention, on new tokens; its e4m3 output is fused.

It returns no LSE, so that it can serve neither a context chunk nor new tokens behind a context.
"""

import torch
from torch import Tensor

from mla_conformance.backends import packaged
from mla_conformance.backends.conversions import RaggedBatch, pad_head_dim
from mla_conformance.backends.ragged import RaggedPrefillBackend

_PAGE = 16


class TritonAttnPrefillBackend(RaggedPrefillBackend):
    name = "TRITON_ATTN"
    libraries = (packaged.in_extra("vllm", "vllm.v1.attention.ops.triton_unified_attention"),)
    devices = packaged.FROM_ADA  # where Triton converts to e4m3
    takes_head_dims = staticmethod(lambda qk, v: v <= qk and qk >= 32)  # as vLLM's backend; V is padded and not cut
    writes_e4m3 = True
    returns_lse = False
    declaration = packaged.declared(
        "vllm triton",
        ("reads keys and values of pages", "copies them into pages of 16 tokens"),
        ("wants V as wide as K", "V is padded with zeros, and the result cut"),
        packaged.RETURNS_NO_LSE_OF_CHUNKS,
        ("e4m3 output: times the reciprocal of the scale, clamped at ±448, rounded to nearest even", "as it is"),
    )

    def attend(self, q: Tensor, k: Tensor, v: Tensor, batch: RaggedBatch, out: Tensor | None) -> Tensor:
        lengths, pages = batch.query_lens, -(-max(batch.query_lens) // _PAGE)
        table = torch.arange(len(lengths) * pages, dtype=torch.int32).view(len(lengths), pages)
        slots = [torch.arange(length) + request * pages * _PAGE for request, length in enumerate(lengths)]
        place = torch.cat(slots).to(q.device)
        stored = []
        for x in (k, pad_head_dim(v, q.shape[-1])):
            rows = x.new_zeros(table.numel() * _PAGE, *x.shape[1:])
            rows[place] = x
            stored.append(rows.view(table.numel(), _PAGE, *x.shape[1:]))
        starts, _, longest_query, longest_key = batch.lengths
        wide = q.new_empty(q.shape, dtype=q.dtype if out is None else out.dtype)
        operands = {"q": q.contiguous(), "k": stored[0], "v": stored[1], "out": wide}
        queries = {"cu_seqlens_q": starts, "max_seqlen_q": longest_query}
        keys = {"seqused_k": starts.diff(), "max_seqlen_k": longest_key, "block_table": table.to(q.device)}
        scales = dict.fromkeys(("q_descale", "k_descale", "v_descale")) | {"output_scale": self._output_scale}
        options = {"softmax_scale": self.scale, "causal": True, "window_size": (-1, -1), "softcap": 0, **scales}
        self.library.unified_attention(**operands, **queries, **keys, **options)
        return wide[..., : self.v_head_dim]

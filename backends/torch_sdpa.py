"""TORCH_SDPA: PyTorch's own kernels that return the LSE, natural, [B, N, T]; deviations as measured of torch 2.13."""

from collections.abc import Callable
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.nn.functional import pad

from mla_conformance.backends import decode, library_roles, packaged, tree
from mla_conformance.backends.cache_dtypes import dequantise, gather
from mla_conformance.backends.conversions import ALIGNMENT, RaggedBatch, aligned, pad_head_dim
from mla_conformance.backends.kernel import NamedKernel
from mla_conformance.backends.selected import Selected, SelectedKeysBackend, listed
from mla_conformance.reference import cache_layout

MASK_ALIGNMENT = 16  # keys of a row are a multiple of this, for kernels that load masks in vectors
_GATHERED_ELEMENTS = 2**28  # elements of keys that are gathered at once: half a GiB of 16 bits
APPROXIMATE = packaged.Rounding(lse=packaged.LseClass.APPROXIMATE_EXP, dequantised_keys=packaged.Precision.MODEL)
APPROXIMATE_EXP = ("16-bit operands: a vectorised exp with errors to 6e-5, LSE included", "declared approximate-exp")
EFFICIENT = (
    ("the LSE is padded to a multiple of 32 rows", "cut off"),
    ("a row without keys holds anything", "such a row is blanked: output 0, LSE -inf"),
)


class TorchRows(NamedKernel):
    """``aten::_scaled_dot_product_flash_attention_for_cpu``; on a GPU another kernel serves the calls."""

    name = "TORCH_SDPA"
    supported_dtypes = [torch.float16, torch.bfloat16, torch.float32]
    kernel: ClassVar[str] = "CPU flash attention"  # which of PyTorch's it is, for the evidence
    on_gpu: ClassVar[Any] = None  # what serves calls there, if another class does
    num_heads: int
    scale: float
    kv_lora_rank: int

    @classmethod
    def resolve(cls, device_capability: packaged.DeviceCapability | None) -> Any:
        return cls if device_capability is None else cls.on_gpu or cls

    def kernel_evidence(self) -> dict[str, str]:
        return {"torch": torch.__version__, "kernel": self.kernel}

    def attend_in_parts(
        self, q: Tensor, columns: int, keys_of: Callable[[slice], tuple[Tensor, Tensor]]
    ) -> tuple[Tensor, Tensor]:
        """Output [T, N, L] and lse [N, T] float32 of each row of q [T, N, D] and those of its own keys that it sees.

        ``keys_of`` some rows are ``columns`` of each, [T, S, D] of the query's dtype, and which it sees, [T, S].
        """
        step = max(1, _GATHERED_ELEMENTS // (columns * q.shape[2]))
        outputs, lses = [], []
        for start in range(0, max(1, len(q)), step):
            rows = slice(start, start + step)
            keys, visible = keys_of(rows)
            # What no row may see must not be multiplied by a weight of 0: it may be NaN.
            keys = keys.masked_fill(~visible.unsqueeze(-1), 0.0).unsqueeze(1)
            mask = torch.zeros_like(visible, dtype=q.dtype).masked_fill(~visible, -torch.inf)
            mask = mask[:, None, None].expand(-1, 1, self.num_heads, -1)
            output, lse = self._attend(q[rows].unsqueeze(1), keys, mask)
            empty = ~visible.any(dim=1)
            outputs.append(output[:, 0, :, : self.kv_lora_rank].masked_fill(empty[:, None, None], 0.0))
            lses.append(lse[:, 0, : self.num_heads].mT.masked_fill(empty, -torch.inf))
        return torch.cat(outputs), torch.cat(lses, dim=1)

    def _attend(self, q: Tensor, keys: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
        """Output [T, 1, N, D] and LSE [T, 1, at least N] of q [T, 1, N, D] and keys [T, 1, S, D]."""
        call = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
        output, lse = call(q, keys, keys, 0.0, False, attn_mask=mask, scale=self.scale)
        return output, lse


class TorchEfficientRows(TorchRows):
    variant: ClassVar[str] = "efficient"
    kernel = "efficient attention"

    @classmethod
    def supports_compute_capability(cls, device_capability: packaged.DeviceCapability | None) -> bool:
        return device_capability is not None

    def _attend(self, q: Tensor, keys: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
        call = torch.ops.aten._scaled_dot_product_efficient_attention
        output, lse, *_ = call(aligned(q), keys, keys, mask, True, 0.0, False, scale=self.scale)
        return output, lse


_OF_PAGES = packaged.declared(
    "torch",
    ("no paged cache", "gathers the pages of every query token's request; ids past the last page are clamped"),
    ("no cache of codes", "dequantises with the float32 scale and rounds to the model's dtype"),
    ("causal mask aligned top-left", "an additive mask from the positions in the sequence"),
)


class TorchSDPADecodeBackend(TorchRows, decode.MLADecodeBackend):
    supported_kv_cache_dtypes = ["auto", "fp8", "fp8_ds_mla"]
    supported_query_len = None
    supports_nonuniform_queries = True
    supports_causal_dcp = True
    cudagraph_support = packaged.UNIFORM_BATCH
    declaration = packaged.further(
        _OF_PAGES,
        (
            "a row without keys is NaN, and a batch without any ends the process",
            "a call has masked keys at least; such a row is blanked: output 0, LSE -inf",
        ),
        APPROXIMATE_EXP,
        rounding=APPROXIMATE,
    )

    def run_decode(self, ql_nope: Tensor, q_pe: Tensor, kv_cache: Tensor, k_scale: Tensor) -> tuple[Tensor, Tensor]:
        metadata, page, token = self._decode_metadata, kv_cache.shape[1], torch.arange(len(ql_nope), device=q_pe.device)
        decode.check_decode_operands(self, metadata, ql_nope, q_pe, kv_cache)
        # The request of each query token, and the last position in the whole sequence that it sees; -1 for none.
        starts, table = metadata.query_start_loc, metadata.block_table
        request = torch.searchsorted(starts[1:], token.to(starts.dtype), right=True).clamp(max=starts.shape[0] - 2)
        totals = metadata.seq_lens if metadata.dcp_tot_seq_lens is None else metadata.dcp_tot_seq_lens
        last = (totals[request] - starts[1:][request] + token).masked_fill(token >= starts[-1], -1)
        tokens = max(1, min(metadata.max_seq_len, table.shape[1] * page))
        position = torch.arange(tokens + -tokens % MASK_ALIGNMENT, device=kv_cache.device)
        positions, columns = decode.positions_of(metadata, position), (position // page).clamp(max=table.shape[1] - 1)
        # Float8 as bytes, since it cannot be indexed everywhere.
        entries = kv_cache.view(torch.uint8) if kv_cache.element_size() == 1 else kv_cache

        def keys_of(rows: slice) -> tuple[Tensor, Tensor]:
            """Entries of each row; past its last token, whatever the clamped ids lead to."""
            blocks = table[request[rows]][:, columns].long().clamp(0, kv_cache.shape[0] - 1)
            found = entries[blocks, position % page].view(kv_cache.dtype)
            keys = dequantise(found, self.kv_cache_dtype, k_scale, ql_nope.dtype).to(ql_nope.dtype)
            return keys[..., : self.kv_lora_rank + self.qk_rope_head_dim], positions <= last[rows].unsqueeze(1)

        return self.attend_in_parts(torch.cat((ql_nope, q_pe), dim=-1), len(position), keys_of)


class TorchEfficientDecodeBackend(TorchEfficientRows, TorchSDPADecodeBackend):
    declaration = packaged.further(_OF_PAGES, *EFFICIENT, rounding=packaged.DEQUANTISES)


TorchSDPADecodeBackend.on_gpu = TorchEfficientDecodeBackend


_OF_LISTS = packaged.declared(
    "torch",
    ("no lists", "gathers the named entries of every query token; a column that names none is masked"),
    ("no cache of codes", "dequantises with the scales in float32 and rounds to the model's dtype"),
    ("no second cache", "its keys stand behind those of the first"),
)


class TorchSDPASparseBackend(TorchRows, SelectedKeysBackend):
    supported_kv_cache_dtypes = list(cache_layout.CACHE_LAYOUTS)
    supported_extra_kv_cache_dtypes = list(cache_layout.CACHE_LAYOUTS)
    supports_topk_length = True
    cudagraph_support = packaged.UNIFORM_BATCH
    declaration = packaged.further(
        _OF_LISTS,
        ("a row without keys is NaN", "such a row is blanked: output 0, LSE -inf"),
        APPROXIMATE_EXP,
        rounding=APPROXIMATE,
    )

    def attend(self, q: Tensor, sources: list[Selected], k_scale: Tensor, sink: Tensor | None) -> tuple[Tensor, Tensor]:

        def keys_of(rows: slice) -> tuple[Tensor, Tensor]:
            keys, named = list[Tensor](), list[Tensor]()
            for x in (source.rows(rows) for source in sources):
                named.append(listed(x.indices, x.length))
                found = gather(x.cache, x.indices.masked_fill(~named[-1], 0).long(), x.layout)
                keys.append(dequantise(found, x.layout, k_scale, q.dtype)[..., : q.shape[2]].to(q.dtype))
            return torch.cat(keys, dim=1), torch.cat(named, dim=1)

        return self.attend_in_parts(q, sum(source.indices.shape[1] for source in sources), keys_of)


class TorchEfficientSparseBackend(TorchEfficientRows, TorchSDPASparseBackend):
    supported_topk = [packaged.MultipleOf(MASK_ALIGNMENT)]
    declaration = packaged.further(
        _OF_LISTS,
        ("wants rows that start at multiples of 16 bytes", "other queries are copied"),
        *EFFICIENT,
        rounding=packaged.DEQUANTISES,
    )


TorchSDPASparseBackend.on_gpu = TorchEfficientSparseBackend


class TorchSDPATreeBackend(TorchRows, tree.MLATreeBackend):
    name = "TORCH_SDPA_TREE"
    supported_kv_cache_dtypes = ["auto", "fp8", "fp8_ds_mla"]
    declaration = packaged.declared(
        "torch",
        ("no paged cache", "gathers the tokens of every query token's request"),
        ("no cache of codes", "dequantises with the float32 scale and rounds to the model's dtype"),
        ("a mask for each row", "an additive one, 0 and -inf, of the tree's"),
        ("a row without keys is NaN", "such a row is blanked: output 0, LSE -inf"),
        APPROXIMATE_EXP,
        rounding=APPROXIMATE,
    )

    @classmethod
    def supports_compute_capability(cls, device_capability: packaged.DeviceCapability | None) -> bool:
        return device_capability is None

    def run_tree_decode(
        self, ql_nope: Tensor, q_pe: Tensor, kv_cache: Tensor, k_scale: Tensor
    ) -> tuple[Tensor, Tensor]:
        metadata, layout, columns = self._decode_metadata, self.kv_cache_dtype, self.kv_lora_rank + q_pe.shape[-1]
        tree.check_tree_operands(self, metadata, ql_nope, q_pe, kv_cache)
        batch, starts = tree.TreeBatch.of(metadata, kv_cache.shape[1]), metadata.query_start_loc.tolist()
        longest = int(batch.lengths.max())
        shape = (len(ql_nope), longest + -longest % MASK_ALIGNMENT)
        slots, visible = torch.zeros(shape, dtype=torch.int64), torch.zeros(shape, dtype=torch.bool)
        for request, (own, first) in enumerate(zip(batch.slots, batch.mask_starts.tolist(), strict=False)):
            rows, length = slice(*starts[request : request + 2]), len(own)
            if metadata.seq_lens_cpu[request]:  # none of a row of padding
                slots[rows, :length] = own
                seen = batch.mask[first : first + (rows.stop - rows.start) * length]
                visible[rows, :length] = seen.view(-1, length)

        def keys_of(rows: slice) -> tuple[Tensor, Tensor]:
            keys = dequantise(gather(kv_cache, slots[rows], layout), layout, k_scale, ql_nope.dtype)
            return keys[..., :columns].to(ql_nope.dtype), visible[rows]

        return self.attend_in_parts(torch.cat((ql_nope, q_pe), dim=-1), shape[1], keys_of)


class TorchSDPAPrefillBackend(library_roles.RaggedPrefillBackend):
    name = "TORCH_SDPA"
    supported_dtypes = [torch.float16, torch.bfloat16, torch.float32]
    devices = packaged.CPU_ALONE
    of_torch = {"torch": torch.__version__}
    declaration = packaged.declared(
        "torch",
        ("needs equal head dims of q, k and v", "pads the narrower ones with zeros, slices the output"),
        ("dies with SIGFPE on an empty sequence", "such a request is not launched: output 0, LSE -inf"),
        ("causal mask aligned top-left", "an additive bottom-right mask where the lengths differ"),
        packaged.NO_OUT,
        APPROXIMATE_EXP,
        rounding=packaged.Rounding(lse=packaged.LseClass.APPROXIMATE_EXP),
    )

    def attend(self, q: Tensor, k: Tensor, v: Tensor, batch: RaggedBatch, out: Tensor | None) -> tuple[Tensor, Tensor]:
        output = q.new_zeros(q.shape[0], self.num_heads, self.v_head_dim)
        lse = q.new_full((self.num_heads, q.shape[0]), -torch.inf, dtype=torch.float32)
        for rows, keys in batch.requests():
            queries, seen, mask = rows.stop - rows.start, keys.stop - keys.start, None
            if batch.causal and queries > seen:
                # Queries before the first key see nothing; the kernel would give them the LSE of an unmasked row.
                rows, queries = slice(rows.stop - seen, rows.stop), seen
            parts = (q[rows], k[keys], v[keys])
            width = max(x.shape[-1] for x in parts)
            operands = [pad(x, (0, width - x.shape[-1])).transpose(0, 1).unsqueeze(0) for x in parts]
            if batch.causal and queries != seen:  # aligned bottom-right: query i sees keys 0 ... S - T + i
                visible = torch.ones(queries, seen, dtype=torch.bool).tril(seen - queries)
                mask = torch.zeros(queries, seen).masked_fill(~visible, -torch.inf)
            call, masks = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu, batch.causal and mask is None
            result, logsumexp = call(*operands, 0.0, masks, attn_mask=mask, scale=self.scale)
            output[rows], lse[:, rows] = result[0].transpose(0, 1)[..., : v.shape[-1]], logsumexp[0]
        return output, lse


_NO_MASK, _BOTTOM_RIGHT = 0, 2


class TorchEfficientPrefillBackend(library_roles.RaggedPrefillBackend):
    name = "TORCH_SDPA"
    variant = "efficient"
    supported_dtypes = [torch.float16, torch.bfloat16, torch.float32]
    devices = packaged.FROM_AMPERE  # where bfloat16 is
    blanks = ("output", "lse")
    of_torch = {"torch": torch.__version__, "operator": "aten::_efficient_attention_forward"}
    declaration = packaged.declared(
        "torch",
        ("a row without keys is never written, output and LSE", "0 and -inf where the lengths say so"),
        ("LSE [B, N, longest query], padded to a multiple of 32", "the rows that count are gathered"),
        ("rows that do not fill multiples of 16 bytes", "are padded with zeros, the output is sliced"),
        ("refuses rows that do not start at multiples of 16 bytes", "such operands are copied"),
        packaged.NO_OUT,
    )

    @classmethod
    def missing_dependencies(cls) -> list[str]:
        return [] if torch.backends.cuda.is_built() else [f"torch {torch.__version__} is built without CUDA"]

    def attend(self, q: Tensor, k: Tensor, v: Tensor, batch: RaggedBatch, out: Tensor | None) -> tuple[Tensor, Tensor]:
        unit, mask = ALIGNMENT // q.element_size(), _BOTTOM_RIGHT if batch.causal else _NO_MASK
        operands = [aligned(pad_head_dim(x, -(-x.shape[-1] // unit) * unit)).unsqueeze(0) for x in (q, k, v)]
        call = torch.ops.aten._efficient_attention_forward
        output, lse, *_ = call(*operands, None, *batch.lengths, 0.0, mask, True, scale=self.scale)
        return output[0, ..., : self.v_head_dim], batch.rows_that_count(lse.mT)

"""SGLang 0.5.23's Triton kernels: SGLANG_TRITON and those of trees, lists and caches, as its engine drives them."""

from typing import Any, ClassVar

import torch
from torch import Tensor

from mla_conformance.backends import kernel, library_roles, packaged, tree
from mla_conformance.backends.conversions import RaggedBatch, starts_of, writable
from mla_conformance.backends.selected import Selected, SelectedKeysBackend

_SPLITS = 8  # SGLang's default of triton_attention_num_kv_splits
_KEYS_OF_A_SPLIT = 32


def sglang_library(module: str) -> packaged.Library:
    """A module of SGLang's kernels."""
    return packaged.in_extra("sglang", f"sglang.kernels.ops.{module}")


class SGLangTritonPrefillBackend(library_roles.RaggedPrefillBackend):
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


class SGLangTritonDecodeBackend(library_roles.PagedDecodeBackend):
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
        # Splits of each request's keys, and the most that there can be; without compute units SGLang's default.
        splits, most = torch.full_like(lengths, _SPLITS), _SPLITS
        if lengths.is_cuda:
            units = torch.cuda.get_device_properties(lengths.device).multi_processor_count
            context, requests = page * table.shape[1], len(lengths)
            most = max(_SPLITS, min(_power_of_two(units), _power_of_two(-(-context // _KEYS_OF_A_SPLIT))))
            sizes = (requests, 1, self.num_heads, 1, most, units)
            counts = self.libraries[1].load().get_num_kv_splits_triton[(1,)]
            counts(splits, lengths.clamp(min=1), *sizes, MAX_NUM_SEQ=max(256, _power_of_two(requests)))
        output, partial = q.new_empty(ql_nope.shape), q.new_empty(*q.shape[:2], most, latent, dtype=torch.float32)
        lse = q.new_full((*q.shape[:2], most), -torch.inf, dtype=torch.float32)
        written = (q, keys, keys[..., :latent], output, start.int(), indices, partial, lse, splits, most)
        self.library.decode_attention_fwd(*written, self.scale, 1.0, 1.0, has_mla=True)
        self._served = {"splits": f"at most {most}"}
        return output, lse.logsumexp(-1).mT


def _power_of_two(number: int) -> int:
    return 1 << (number - 1).bit_length()


packaged.interpreted(SGLangTritonPrefillBackend)
packaged.interpreted(SGLangTritonDecodeBackend)


class SGLangTritonSparseBackend(packaged.LibraryKernel, SelectedKeysBackend):
    name = "SGLANG_TRITON_SPARSE"
    libraries = (sglang_library("attention.dsa.triton_sparse_mla_prefill"),)
    devices = packaged.FROM_HOPPER  # as its description says
    union: ClassVar[int] = 0
    supported_calls = ["prefill"]
    supported_dtypes = [torch.bfloat16]
    supported_latent_dims = [(512, 64)]
    supports_topk_length = True
    returns_lse = False
    cudagraph_support = packaged.UNIFORM_BATCH
    declaration = packaged.declared(
        "sglang triton", packaged.COMPUTES_NO_LSE, ("wants contiguous tensors", "the library itself copies others")
    )

    def attend(self, q: Tensor, sources: list[Selected], k_scale: Tensor, sink: Tensor | None) -> tuple[Tensor, None]:
        operands = (q, sources[0].cache, sources[0].indices, self.scale, self.kv_lora_rank)
        return self.library.sparse_mla_prefill(*operands, topk_length=sources[0].length, union=self.union), None


# Rows share their keys; what that path does not take the launcher would serve without it, and say nothing.
_UNION2 = SGLangTritonSparseBackend.also(
    "union2",
    ("counts a key that a list names twice once", "declared unsupported"),
    ("does not look at lengths beside the lists", "declared unsupported"),
    ("serves other numbers of heads and columns without sharing", "declared unsupported"),
    ("serves the rows left over of a batch without sharing", "left to the library"),
    union=2,
    supported_heads=[8, 16],
    supported_topk=[1 << exponent for exponent in range(12)],
    supports_topk_length=False,
    supports_duplicates=False,
)
_UNION2.also("union4", union=4, supported_heads=[4, 8])


def _launch(self: Any, q: Tensor, sources: list[Selected], k_scale: Tensor, sink: Tensor | None) -> tuple[Tensor, None]:
    (gathered,), library, heads = sources, self.library, self.num_heads
    indices, columns = gathered.indices.contiguous(), gathered.indices.shape[1]
    output = q.new_empty(*q.shape[:2], self.kv_lora_rank)
    length = library._topk_length(indices, columns) if gathered.length is None else gathered.length
    sizes = {"H": heads, "BLOCK_H": max(16, 1 << (heads - 1).bit_length()), "BLOCK_N": 64, "IDX64": False}
    sizes |= {"D_QK": q.shape[2], "D_V": self.kv_lora_rank}
    operands = (q.contiguous(), gathered.cache.contiguous(), indices, length, output, self.scale, columns)
    library._sparse_mla_prefill_kernel[(len(q),)](*operands, **sizes)
    return output, None


packaged.interpreted(
    SGLangTritonSparseBackend,
    attend=_launch,
    declaration=packaged.declared(
        "sglang triton",
        ("the launcher takes bfloat16 alone, the interpreter all else", "launches the kernel itself"),
        *SGLangTritonSparseBackend.declaration.deviations,
    ),
)


class SGLangTritonTreeBackend(library_roles.PagedTreeBackend):
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
        batch = tree.TreeBatch.of(metadata, kv_cache.shape[1])
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


_TILED, _NONE, _OTHER_ROPES = "fp8_ds_mla", -1, "{c.qk_rope_head_dim} columns of rope not supported"


def _gathers(config: Any) -> bool:
    return config.kv_cache_dtype == _TILED and config.call == "gather_latent"


class SGLangTritonCacheBackend(library_roles.CacheKernel):
    name = "SGLANG_TRITON_CACHE"
    libraries = (
        sglang_library("kvcache.mla_buffer"),
        sglang_library("quantization.dsa_quant_k_cache"),
        sglang_library("attention.dsa.dequant_k_cache"),
    )
    devices = packaged.FROM_ADA  # where Triton converts to e4m3
    supported_dtypes = [torch.bfloat16]
    supported_calls = ["write_latent", "gather_latent"]
    supported_kv_cache_dtypes = ["auto", _TILED]
    supported_slot_dtypes = [torch.int64, torch.int32]
    supports_compression = False
    declaration = packaged.declared(
        "sglang triton",
        ("wants a row for each slot at one stride", "counts the rows between blocks as well"),
        ("gathers rows that are listed", "lists them by the block table"),
        ("on Hopper the launcher takes a kernel in CUDA for rows that it can", "launches the Triton one"),
        ("gathers tiles of codes as values alone", "as codes declared unsupported"),
        ("gathers 64 columns of rope behind tiles of codes, always", "entries without are unsupported"),
    )
    refused = {
        f"gathering {_TILED} as it is not supported": lambda c, _: _gathers(c) and not c.dequantise,
        _OTHER_ROPES: lambda c, _: c.kv_cache_dtype == _TILED and c.qk_rope_head_dim not in (0, 64),
        f"gathering {_TILED} without a rope part not supported": lambda c, _: _gathers(c) and not c.qk_rope_head_dim,
    }

    def write_latent(self, x: Any) -> None:
        rows, numbers, tokens = *addressed(x.kv_cache, x.slot_mapping), len(x.slot_mapping)
        parts = [x.kv_c[:tokens], x.k_pe[:tokens]]
        if self.kv_cache_dtype == _TILED:
            parts = [part.squeeze(1) for part in self.libraries[1].load().quantize_k_cache_separate(*parts)]
        strides, (latent, rope) = (each.stride(0) for each in (rows, *parts)), (part.shape[1] for part in parts)
        options = {"BLOCK": 1 << (latent + rope - 1).bit_length(), "DCP_RANK": 0, "DCP_WORLD_SIZE": 1}
        launch = self.library.set_mla_kv_buffer_kernel[(tokens, 1)]
        launch(rows, *parts, numbers, _NONE, *strides, latent, rope, **options)

    def gather_latent(self, x: Any) -> None:
        page, request = x.kv_cache.shape[1], x.request
        token = torch.arange(len(request), device=request.device) - (x.cu_seq_lens[:-1] - x.starts).long()[request]
        rows, numbers = addressed(x.kv_cache, x.block_table[request, token // page].long() * page + token % page)
        gathered = x.workspace[: len(numbers)]
        if self.kv_cache_dtype == _TILED:
            values = self.libraries[2].load().dequantize_k_cache_paged_dsa(rows.view(torch.float8_e4m3fn), numbers)
            gathered.copy_(values.squeeze(1))
        else:
            self.library.get_mla_kv_buffer_triton(rows, numbers, *gathered.tensor_split([self.kv_lora_rank], dim=1))


# Without the codes, which are made of bfloat16 alone.
packaged.interpreted(SGLangTritonCacheBackend, supported_kv_cache_dtypes=["auto"])


def addressed(cache: Tensor, slots: Tensor) -> tuple[Tensor, Tensor]:
    """[rows, width], other layers' among them, and the rows of slots in int64, -1 of none."""
    blocks, page, width = cache.shape
    apart, rest = divmod(cache.stride(0), width)
    if rest:
        said = f"blocks that are {cache.stride(0)} elements apart, no whole number of entries of {width}, not supported"
        raise kernel.UnsupportedConfiguration(f"SGLANG_TRITON_CACHE: {said}")
    rows = cache.as_strided(((blocks - 1) * apart + page, width), (width, 1))
    return rows, torch.where(slots < 0, _NONE, slots // page * apart + slots % page).long()

"""FlashInfer's kernels over paged latents, of 0.6.13 and 0.7.2, dense and by lists."""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from mla_conformance.backends import decode, library_roles, packaged
from mla_conformance.backends.conversions import aligned, starts_of
from mla_conformance.backends.flashinfer import DISTRIBUTIONS, TVM_FFI, WORKSPACE_BYTES
from mla_conformance.backends.selected import Selected, SelectedKeysBackend, listed, packed

_LAYOUTS = {"query_layout": "split", "kv_cache_layout": "split", "lse_mode": "basee"}  # of a plan of 0.7.2
_OTHER_QUERIES = "kv_cache_dtype fp8 with queries of {c.dtype} not supported"
_LIBRARY = packaged.in_extra("flashinfer", "flashinfer.mla", "flashinfer-python")


class _Form(NamedTuple):  # what a plan depends on besides the lengths
    page: int
    dtype: torch.dtype
    cache_dtype: torch.dtype


class FlashInferMLADecodeBackend(library_roles.PagedDecodeBackend):
    """The family: fa3 on Hopper, fa2 elsewhere."""

    name = "FLASHINFER_MLA"
    libraries = (_LIBRARY, TVM_FFI)
    devices = packaged.FROM_AMPERE
    by_device = {9: ("fa3", "fa2"), 0: ("fa2",)}
    supported_kv_cache_dtypes = ["auto", "fp8"]
    supported_query_len = None
    supports_nonuniform_queries = True
    cudagraph_support = packaged.UNIFORM_BATCH
    declaration = packaged.declared(
        DISTRIBUTIONS,
        packaged.LSE_TO_BASE_2,
        packaged.PARTS_CACHE,
        ("wants a list of pages without gaps", "taken from the block table, its tails never read"),
        ("plan() before run(), on the host", "plans in prepare_metadata, or at the first call of a new shape"),
        ("a captured graph needs fixed addresses", "one wrapper with its own buffers for each shape of a batch"),
        packaged.COPIES,
        ("0.7.2: the scale of an e4m3 cache is a number on the host", "read at each call; a captured graph keeps it"),
        packaged.PARTIAL_OUTPUTS,
    )

    @classmethod
    def validate_configuration(cls, device_capability: Any, selector_config: Any) -> list[str]:
        reasons = super().validate_configuration(device_capability, selector_config)
        if selector_config.kv_cache_dtype != "fp8" or reasons:
            return reasons
        if selector_config.dtype != torch.bfloat16:
            reasons.append(_OTHER_QUERIES.format(c=selector_config))
        if device_capability is None or device_capability.major != 9:
            reasons.append(f"kv_cache_dtype fp8 needs compute capability 9.0, this device has {device_capability}")
        if not packaged.has_parameter(_LIBRARY.load().BatchMLAPagedAttentionWrapper.run, "ckv_scale"):
            reasons.append(f"kv_cache_dtype fp8 needs flashinfer-python 0.7 or newer, not {_LIBRARY.version()}")
        return reasons

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        # Never dropped: a captured graph reads the buffers of the wrapper that it was captured with.
        self._wrappers: dict[tuple[torch.Size, _Form], Any] = {}
        self._planned: tuple[_Form, Any] | None = None
        self._host_scale = 1.0

    def prepare_metadata(self, decode_metadata: decode.MLACommonDecodeMetadata) -> None:
        super().prepare_metadata(decode_metadata)
        if self._planned is not None:
            form, _ = self._planned
            self._planned = form, self.plan(form)

    def attend(self, ql_nope: Tensor, q_pe: Tensor, kv_cache: Tensor, k_scale: Tensor) -> tuple[Tensor, Tensor]:
        form = _Form(kv_cache.shape[1], ql_nope.dtype, kv_cache.dtype)
        if self._planned is None or self._planned[0] != form:
            self._planned = form, self.plan(form)
        query, whole = (aligned(ql_nope), aligned(q_pe)), aligned(kv_cache)
        cache = (whole[..., : self.kv_lora_rank], whole[..., self.kv_lora_rank :])
        options: dict[str, Any] = {"return_lse": True, "return_lse_base_on_e": True}
        if self.kv_cache_dtype == "fp8":
            if not (k_scale.is_cuda and torch.cuda.is_current_stream_capturing()):
                self._host_scale = float(k_scale)
            options |= {"ckv_scale": self._host_scale, "kpe_scale": self._host_scale}
        run = self._planned[1].run
        operands = {"query": query, "kv_cache": cache}
        new = hasattr(_LIBRARY.load(), "MLAPlanMetadata")
        output, lse = run(**operands, **options) if new else run(*query, *cache, **options)
        return output, lse.mT

    def plan(self, form: _Form) -> Any:
        metadata, library = self._decode_metadata, _LIBRARY.load()
        table, lengths = metadata.block_table, metadata.seq_lens_cpu
        key = (table.shape, form)
        if key not in self._wrappers:  # with buffers for as many requests and pages as the table can name
            if not hasattr(self, "_workspace"):
                self._workspace = torch.empty(WORKSPACE_BYTES, dtype=torch.uint8, device=table.device)
            sizes = {"qo_indptr": len(table) + 1, "kv_indptr": len(table) + 1, "kv_indices": max(1, table.numel())}
            sizes["kv_len_arr"] = len(table)
            buffers = {name: torch.zeros(size, dtype=torch.int32, device=table.device) for name, size in sizes.items()}
            make = library.BatchMLAPagedAttentionWrapper
            self._wrappers[key] = make(self._workspace, use_cuda_graph=True, **buffers, backend=self.variant)
        # Offsets and lengths on the host, the pages of all requests one after the other on the device.
        pages = (lengths + (form.page - 1)) // form.page
        used = torch.arange(table.shape[1]) < pages[:, None]
        batch: dict[str, Any] = {"qo_indptr": starts_of(metadata.query_lens_cpu), "kv_indptr": starts_of(pages)}
        batch |= {"kv_indices": table[used.to(table.device)], "kv_len_arr": lengths}
        if hasattr(library, "MLAPlanMetadata"):
            batch = {"metadata": library.MLAPlanMetadata.csr(**batch), **_LAYOUTS}
            if form.cache_dtype == torch.float8_e4m3fn:
                batch["scale_mode"] = "kv-per-tensor"
        wrapper = self._wrappers[key]
        dtypes = {"q_data_type": form.dtype, "kv_data_type": form.cache_dtype}
        batch |= {"page_size": form.page, "causal": int(metadata.query_lens_cpu.max()) > 1, "sm_scale": self.scale}
        dims = {"head_dim_ckv": self.kv_lora_rank, "head_dim_kpe": self.qk_rope_head_dim}
        wrapper.plan(**batch, num_heads=self.num_heads, **dims, **dtypes)
        self._served = {"backend": str(getattr(wrapper, "_backend", self.variant))}
        return wrapper


FlashInferMLADecodeBackend.also("fa2", packaged.LSE_OF_ROUNDED_P, rounding=packaged.ROUNDED_P_IN_PARTS)
FlashInferMLADecodeBackend.also("fa3", rounding=packaged.IN_PARTS, devices=packaged.HOPPER)


_STATISTICS_BYTES = 8 * 256  # of the workspace, for each head of each query token, where the LSE is asked for


class FlashInferMLASparseBackend(packaged.LibraryKernel, SelectedKeysBackend):
    name = "FLASHINFER_MLA_SPARSE"
    libraries = FlashInferMLADecodeBackend.libraries
    devices = packaged.BLACKWELL
    supported_block_sizes = [32, 64]  # as vLLM has them
    supported_calls = ["decode"]
    supported_dtypes = [torch.bfloat16]
    supported_latent_dims = [(512, 64)]
    supports_topk_length = True
    cudagraph_support = packaged.UNIFORM_BATCH
    declaration = packaged.declared(
        DISTRIBUTIONS,
        ("reads as many entries of a list as lengths say, -1 among them", "packed on the device, counted"),
        packaged.LSE_TO_BASE_2,
        ("a cache with gaps between its blocks was not tried", "such a cache is copied"),
        ("writes its output in bfloat16 alone", "other models declared unsupported"),
        ("the workspace must be zero", "a new one at each call"),
        ("reads an e4m3 cache under queries in e4m3 alone", "declared unsupported"),
        ("takes sinks, and does not say whether the LSE holds them", "declared unsupported"),
    )

    def attend(self, q: Tensor, sources: list[Selected], k_scale: Tensor, sink: Tensor | None) -> tuple[Tensor, Tensor]:
        (source,), columns = sources, sources[0].indices.shape[1]
        slots, lengths = packed(source.indices, listed(source.indices, source.length))
        workspace = q.new_zeros(WORKSPACE_BYTES + _STATISTICS_BYTES * len(q) * self.num_heads, dtype=torch.int8)
        operands = {"query": q.contiguous().unsqueeze(1), "kv_cache": source.cache.contiguous().unsqueeze(1)}
        dims = {name: getattr(self, name) for name in ("qk_nope_head_dim", "kv_lora_rank", "qk_rope_head_dim")}
        lists = {"block_tables": slots.unsqueeze(1), "seq_lens": lengths, "workspace_buffer": workspace}
        sizes = {"max_seq_len": columns, "sparse_mla_top_k": columns, "bmm1_scale": self.scale, "bmm2_scale": 1.0}
        options = {"backend": "trtllm-gen", "return_lse": True, "return_lse_base": "basee"}
        call = self.library.trtllm_batch_decode_with_kv_cache_mla
        output, lse = call(**operands, **dims, **lists, **sizes, **options)
        return output.squeeze(1), lse.mT


class FlashInferMLASparseSM90Backend(packaged.LibraryKernel, SelectedKeysBackend):
    name = "FLASHINFER_MLA_SPARSE_SM90"
    libraries = FlashInferMLADecodeBackend.libraries
    devices = packaged.HOPPER
    supported_kv_cache_dtypes = ["auto", "fp8"]
    supported_latent_dims = [(512, 64), (512, 0)]
    supports_topk_length = True
    declaration = packaged.declared(
        DISTRIBUTIONS,
        ("wants a list of pages without gaps", "what the lists name, packed on the device"),
        ("plan() before run(), on the host", "plans at each call, which no graph captures"),
        ("pages of one token follow each other", "a cache with gaps between its blocks is copied"),
        packaged.PARTS_BOTH,
        packaged.LSE_TO_BASE_2,
        packaged.COPIES,
        ("the scale of an e4m3 cache is a number on the host", "read at each call"),
        packaged.PARTIAL_OUTPUTS,
        rounding=packaged.IN_PARTS,
    )
    _wrapper: Any = None

    @classmethod
    def lacks(cls) -> str:
        library = cls.libraries[0]
        old = not hasattr(library.load(), "MLAPlanMetadata")  # planned otherwise, and never tried with lists
        return f"needs flashinfer-python 0.7 or newer, not {library.version()} ({library.command})" if old else ""

    refused = {_OTHER_QUERIES: lambda c, _: c.kv_cache_dtype == "fp8" and c.dtype != torch.bfloat16}

    def attend(self, q: Tensor, sources: list[Selected], k_scale: Tensor, sink: Tensor | None) -> tuple[Tensor, Tensor]:
        (source,), latent, library, coded = sources, self.kv_lora_rank, self.library, sources[0].layout == "fp8"
        scales = dict.fromkeys(("ckv_scale", "kpe_scale"), float(k_scale)) if coded else {}
        named = listed(source.indices, source.length)
        lengths = named.sum(dim=1, dtype=torch.int32).cpu()
        if self._wrapper is None:
            workspace = torch.empty(WORKSPACE_BYTES, dtype=torch.uint8, device=q.device)
            self._wrapper = library.BatchMLAPagedAttentionWrapper(workspace, backend="fa3")
        starts = {"qo_indptr": torch.arange(len(q) + 1, dtype=torch.int32), "kv_indptr": starts_of(lengths)}
        lists = library.MLAPlanMetadata.csr(**starts, kv_indices=source.indices[named], kv_len_arr=lengths)
        sizes = {"num_heads": self.num_heads, "head_dim_ckv": latent, "head_dim_kpe": self.qk_rope_head_dim}
        dtypes = {"q_data_type": q.dtype, "kv_data_type": source.cache.dtype}
        options = {"scale_mode": "kv-per-tensor" if coded else "default", "sm_scale": self.scale}
        self._wrapper.plan(metadata=lists, page_size=1, causal=False, **sizes, **options, **dtypes, **_LAYOUTS)
        operands = {"query": aligned(q), "kv_cache": aligned(source.cache.flatten(0, 1).unsqueeze(1))}
        parts = {name: (x[..., :latent], x[..., latent:]) for name, x in operands.items()}
        output, lse = self._wrapper.run(**parts, return_lse=True, return_lse_base_on_e=True, **scales)
        return output, lse.mT

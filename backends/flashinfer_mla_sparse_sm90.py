"""FLASHINFER_MLA_SPARSE_SM90: FlashInfer's paged MLA wrapper over pages of one token, which lists name.

Each query token is a request; the lists are counted on the host, since that is where the wrapper plans.
"""

from typing import Any

import torch
from torch import Tensor

from mla_conformance.backends import packaged
from mla_conformance.backends.conversions import aligned, starts_of
from mla_conformance.backends.flashinfer import DISTRIBUTIONS, WORKSPACE_BYTES
from mla_conformance.backends.flashinfer_mla import FlashInferMLADecodeBackend
from mla_conformance.backends.selected import Selected, SelectedKeysBackend, listed


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

    refused = (
        (
            lambda c, device: c.kv_cache_dtype == "fp8" and c.dtype != torch.bfloat16,
            "kv_cache_dtype fp8 with queries of {c.dtype} not supported",
        ),
    )

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
        layouts = {"query_layout": "split", "kv_cache_layout": "split", "lse_mode": "basee"}
        layouts["scale_mode"] = "kv-per-tensor" if coded else "default"
        options = {"page_size": 1, "causal": False, "sm_scale": self.scale}
        self._wrapper.plan(metadata=lists, **sizes, **options, **dtypes, **layouts)
        operands = {"query": aligned(q), "kv_cache": aligned(source.cache.flatten(0, 1).unsqueeze(1))}
        parts = {name: (x[..., :latent], x[..., latent:]) for name, x in operands.items()}
        output, lse = self._wrapper.run(**parts, return_lse=True, return_lse_base_on_e=True, **scales)
        return output, lse.mT

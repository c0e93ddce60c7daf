"""DEEPGEMM_INDEXER: DeepGEMM's scores of an indexer in e4m3 on Hopper, compiled at the first call by CUDA's nvcc."""

from collections.abc import Mapping
from typing import ClassVar

import torch
from torch import Tensor

from mla_conformance.backends import library_roles, packaged
from mla_conformance.backends.indexer import bounds_of

_PAGE, _NOTE = 64, "it compiles at the first call and needs nvcc"


def _declared(package: str, together: str) -> packaged.Declaration:
    return packaged.declared(
        f"{package} torch",
        (f"a paged call takes {together} query tokens of every request", "others become requests of one each"),
        ("wants the number of tokens that each row sees", "derived from the lengths, on the device"),
        packaged.NEW_SCHEDULE,
        ("wants queries without gaps", "copies them"),
        rounding=packaged.FP22,
    )


class DeepGemmIndexerBackend(library_roles.IndexerKernel):
    name = "DEEPGEMM_INDEXER"
    libraries = (packaged.in_extra("deepgemm", "deep_gemm", "sgl-deep-gemm", _NOTE),)
    devices = packaged.HOPPER
    # query tokens of a request that a paged call takes together, and how many processors then share a piece of work
    clusters: ClassVar[Mapping[int, int]] = {1: 1, 2: 1}
    supported_block_sizes = [_PAGE]
    supported_dtypes = [torch.bfloat16]
    supported_calls = ["logits"]
    supported_heads = [32, 64]
    supported_head_dims = [128]
    declaration = _declared("sgl-deep-gemm", "1 or 2")

    def score(self, q: Tensor, weights: Tensor, k: Tensor, k_scale: Tensor | None) -> Tensor:
        x, library, bounds, q = self._sparse_metadata, self.library, bounds_of(self._sparse_metadata), q.contiguous()
        if k_scale is not None:
            assert x.workspace_starts is not None
            first = x.workspace_starts[x.req_id_per_token.long()]
            return library.fp8_fp4_mqa_logits((q, None), (k, k_scale), weights, first, first + bounds, x.max_seq_len)
        assert x.block_table is not None
        queries = set(x.query_lens_cpu.tolist())
        together = next(iter(queries)) if len(queries) == 1 and queries <= {*self.clusters} else 1
        table = x.block_table if queries == {together} else x.block_table[x.req_id_per_token]
        lengths, processors = bounds.view(-1, together), library.get_num_sms() // self.clusters[together]
        schedule = library.get_paged_mqa_logits_metadata(lengths, _PAGE, processors)
        batch = (k.unsqueeze(2), weights, lengths, table, schedule, x.max_seq_len)
        # Queries stand beside their scales, of which those in e4m3 have none.
        return library.fp8_fp4_paged_mqa_logits((q.unflatten(0, (-1, together)), None), *batch)


# DeepGEMM 2.8.1 in vLLM 0.33.0, as ``vllm/utils/deep_gemm.py`` calls it.
DeepGemmIndexerVllm = DeepGemmIndexerBackend.also(
    "vllm",
    libraries=(packaged.in_extra("vllm", "vllm.third_party.deep_gemm", note=_NOTE),),
    clusters={1: 1, 2: 1, 4: 2},
    declaration=_declared("vllm", "1, 2 or 4"),
)

"""The adapters of SGLang's sparse prefill against stand-ins that follow its source."""

from typing import Any

import pytest
import torch

from mla_conformance.backends.sglang_triton_sparse import (
    SGLangTritonSparseBackend,
    SGLangTritonSparseInterpreted,
    SGLangTritonSparseUnion2,
    SGLangTritonSparseUnion4,
)

_MODULE = "sglang.kernels.ops.attention.dsa.triton_sparse_mla_prefill"
_FUNCTION = "sglang/kernels/ops/attention/dsa/triton_sparse_mla_prefill.py:sparse_mla_prefill"
_HEADS = {0: 3, 2: 16, 4: 8}


@pytest.fixture
def library(recorded: Any, installed: Any, sparse_kernel: Any) -> None:
    """The launcher, which shares keys where its shapes allow it; the kernel, which takes any dtype, and its lengths."""

    def launch(a: Any) -> Any:
        q, kv, lists = a["q"], a["kv"], a["indices"].long()
        assert kv.dtype == torch.bfloat16 and kv.shape[1] == 1 and a["d_v"] == 512
        assert q.shape[1] == _HEADS[a["union"]]
        if not a["union"]:
            lists = cut(lists, a["topk_length"])
        return sparse_kernel(q, kv[:, 0], lists, a["sm_scale"])[0]

    def cut(lists: Any, length: Any) -> Any:
        return lists if length is None else lists.masked_fill(torch.arange(lists.shape[1]) >= length[:, None], -1)

    class Kernel:
        def __getitem__(self, grid: Any) -> Any:
            def run(q: Any, kv: Any, indices: Any, length: Any, out: Any, scale: Any, topk: Any, **sizes: Any) -> None:
                assert grid == (len(q),) and topk == indices.shape[1] and all(x.is_contiguous() for x in (q, kv, out))
                assert sizes == {"H": 3, "BLOCK_H": 16, "D_QK": 576, "D_V": 512, "BLOCK_N": 64, "IDX64": False}
                out.copy_(sparse_kernel(q, kv[:, 0], cut(indices.long(), length), scale)[0])

            return run

    def last(indices: Any, topk: int) -> Any:
        return (torch.arange(1, topk + 1) * (indices >= 0)).amax(dim=1).int()

    launcher = recorded("sglang 0.5.23", _FUNCTION, launch)
    kernels = {"_sparse_mla_prefill_kernel": Kernel(), "_topk_length": last}
    installed(_MODULE, sparse_mla_prefill=launcher, **kernels)


@pytest.mark.usefixtures("library")
@pytest.mark.parametrize(
    ("backend", "heads", "length"),
    [
        (SGLangTritonSparseBackend, 3, True),
        (SGLangTritonSparseBackend, 3, False),
        (SGLangTritonSparseUnion2, 16, False),
        (SGLangTritonSparseUnion4, 8, False),
    ],
)
def test_conventions(backend: Any, heads: int, length: bool, selects: Any) -> None:
    selects(backend, None, heads=heads, length=length, lse=False)


@pytest.mark.usefixtures("library")
@pytest.mark.parametrize("length", [False, True])
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_the_interpreted_kernel_is_launched_as_the_launcher_does(dtype: Any, length: bool, selects: Any) -> None:
    selects(SGLangTritonSparseInterpreted, None, heads=3, length=length, lse=False, dtype=dtype)

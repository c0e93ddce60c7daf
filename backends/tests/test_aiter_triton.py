"""The adapters of AITER's Triton kernels against stand-ins that follow their source, and how AITER is imported."""

import os
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from mla_conformance.backends.aiter_triton import (
    AiterTritonDecodeBackend,
    AiterTritonPrefill,
    aiter_library,
)

_LABEL, _FILE = "amd-aiter 0.1.21.dev46+ge4048607a", "aiter/ops/triton/attention/mla.py"
_MODULE = "aiter.ops.triton.attention.mla"
_LAUNCHER = """
import os
built = os.environ.get("AITER_TRITON_ONLY") != "1"
launched = []
class Kernel:
    def __getitem__(self, grid):
        return lambda **arguments: launched.append((grid, arguments))
triton_mla_prefill_fwd_kernel = triton_mla_decode_fwd_reduce_kernel = Kernel()
triton_mla_decode_fwd_kernel = Kernel()
"""


@pytest.fixture
def library(recorded: Any, installed: Any, mla_kernel: Any) -> None:
    """Both kernels: causal, over pages of one head; without a key, whatever stood in the output."""

    def call(a: Any) -> None:
        cache, out, queries = a["kv_buffer"], a["out"], a["cu_seqlens_q"]
        assert cache.shape[1:] == (64, 1, 576) and a["causal"] and a["q_descale"] is a["kv_descale"] is None
        assert (a["kv_lora_rank"], a["qk_rope_head_dim"]) == (512, 64)
        lengths = a["seqused_k"].tolist()
        assert a["max_seqlen_kv"] == max(lengths)
        found, lse = mla_kernel(a["q"], cache[:, :, 0], lengths, queries.diff(), a["block_tables"], a["softmax_scale"])
        out.copy_(found.masked_fill(lse.mT.unsqueeze(-1).isneginf(), torch.nan))

    names = ("mla_decode_fwd", "mla_prefill_fwd")
    installed(_MODULE, **{name: recorded(_LABEL, f"{_FILE}:{name}", call) for name in names})


@pytest.mark.usefixtures("library")
@pytest.mark.parametrize("lengths", [(65, 0, 130), (1, 64, 63)])
def test_decode_conventions(lengths: Any, decodes: Any) -> None:
    decodes(AiterTritonDecodeBackend, 64, (1, 1, 1), lengths)


@pytest.mark.usefixtures("library")
def test_several_query_tokens(decodes: Any) -> None:
    decodes(AiterTritonDecodeBackend, 64, (3, 3), (65, 130))
    decodes(AiterTritonPrefill, 64, (3, 1, 2), (65, 1, 130))


def test_aiter_is_imported_without_building_and_launches_without_amds_option(tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.delenv("AITER_TRITON_ONLY", raising=False)
    folder = tmp_path / "aiter" / "ops" / "triton" / "attention"
    folder.mkdir(parents=True)
    for parent in (folder, *folder.parents[:3]):
        (parent / "__init__.py").touch()
    (folder / "mla.py").write_text(_LAUNCHER)
    monkeypatch.syspath_prepend(tmp_path)
    module = [aiter_library("mla").load() for _ in range(2)][1]
    for name in [name for name in sys.modules if name.partition(".")[0] == "aiter"]:
        monkeypatch.delitem(sys.modules, name)
    assert not module.built and "AITER_TRITON_ONLY" not in os.environ
    for name in ("decode_fwd", "prefill_fwd", "decode_fwd_reduce"):
        getattr(module, f"triton_mla_{name}_kernel")[1, 2](output_ptr=3, waves_per_eu=1)
    assert module.launched == [((1, 2), {"output_ptr": 3, "waves_per_eu": 1}), *[((1, 2), {"output_ptr": 3})] * 2]

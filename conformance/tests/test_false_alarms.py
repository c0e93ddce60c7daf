"""Cases on which right kernels were once called wrong: what the error budget left out, each at its smallest."""

from typing import ClassVar

import numpy as np
import pytest
import torch
from torch import Tensor

from mla_conformance.backends.eager import EagerPrefillBackend
from mla_conformance.judging.verdict import Status
from mla_conformance.tests.drawn import judged

LAYER = "mixed_batch:call=layer;dtype=fp16;heads=16"
ALARMS = {
    "logits closer than P is rounded": "decode:dims=small;heads=16;q=[2,2];kv=[128,33];scale=1;"
    "data=low_rank;layout=packed;seed=471152",
    "such logits on two ranks": "decode:dims=32-16-64-64;heads=16;q=[3];kv=[2000];scale=37;data=low_rank;cache=fp8;"
    "kscale=3;ranks=4;interleave=64",
    "subnormal parts that a layer merges": f"{LAYER};dims=256-0-256-512;q=[35];kv=[3];page=128;workspace=384;scale=20;"
    "data=needle;seed=785391;latents=zero_tiles",
    "subnormal values of dense weights": f"{LAYER};dims=16-0-16-16;q=[37,47];kv=[474,3];page=64;workspace=1024;"
    "scale=1000;seed=276417;latents=tiny_tiles;weights=dense",
    "subnormal values of selecting weights": f"{LAYER};dims=32-16-32-64;q=[46,42,2];kv=[17,63,7];page=64;"
    "workspace=1152;scale=36;data=hot_ones;seed=99822;decodes=1;latents=tiny_tiles",
    "a heavy key whose value is near 0": "mixed_batch:call=layer;dtype=fp32;dims=small;heads=8;q=[2];kv=[51];page=32;"
    "workspace=384;scale=56;data=needle;layout=sliced;seed=276622;cache=fp8;kscale=5;layers=3;decodes=1;"
    "order=decodes_first;latents=integers",
}
MERGED = (
    "chunked_context:dtype=fp16;dims=glm;heads=8;q=[17,200,33];kv=[64,16,5];page=32;workspace=192;scale=400;data=integers;"
    "pad=1;poison=inf;merge=own;seed=411039"
)


@pytest.mark.parametrize("backend", ["EAGER", "TORCH_SDPA"])
@pytest.mark.parametrize("case", ALARMS.values(), ids=list(ALARMS))
def test_right_kernels_pass(case: str, backend: str) -> None:
    record = judged(backend, case)
    assert record.status is Status.PASS, record.message


def test_a_merge_of_subnormal_parts_passes() -> None:
    record = judged("EAGER", MERGED)
    assert record.status is Status.PASS, record.message


class AddsWeightsOneByOne(EagerPrefillBackend):
    """Four threads add the weights of a row in float32, each a pair of every eight, as in FlashAttention 2."""

    factor: ClassVar[float] = 1.0

    def run_prefill_context_chunk(self, chunk_idx: int, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        output, _ = super().run_prefill_context_chunk(chunk_idx, q, k, v)
        scores = torch.einsum("tnd,snd->nts", q.float(), k.float()) * self.scale
        largest = scores.amax(dim=-1, keepdim=True)
        threads = (scores - largest).exp().unflatten(-1, (-1, 4, 2)).transpose(-2, -3).flatten(-2)
        sums = torch.from_numpy(np.add.accumulate(threads.numpy(), axis=-1)[..., -1]).sum(dim=-1)
        return output, sums.mul(self.factor).log() + largest.squeeze(-1)


class LosesOneInTwoThousand(AddsWeightsOneByOne):
    """What is beyond the roundings of any data."""

    factor = 1 - 2.0**-11


class LosesOneInSixteenThousand(AddsWeightsOneByOne):
    """What is beyond the roundings of weights that differ."""

    factor = 1 - 2.0**-14


@pytest.mark.parametrize(
    ("kernel", "data", "status"),
    [
        (AddsWeightsOneByOne, "integers", Status.PASS),
        (AddsWeightsOneByOne, "normal", Status.PASS),
        (LosesOneInTwoThousand, "integers", Status.FAIL),
        (LosesOneInSixteenThousand, "normal", Status.FAIL),
    ],
)
def test_weights_that_are_added_one_by_one(kernel: type[AddsWeightsOneByOne], data: str, status: Status) -> None:
    case = f"context_chunk:dims=small;heads=1;q=[5];kv=[16384];data={data}"
    record = judged(kernel, case)
    assert record.status is status, record.message

"""Cases on which right kernels were once called wrong: what the error budget left out, each at its smallest."""

import pytest
import torch

from mla_conformance.cases.case import Case
from mla_conformance.judging.verdict import Status
from mla_conformance.trials.context import Context
from mla_conformance.trials.judge_one import judge_one
from mla_conformance.trials.subject import Subject

CONTEXT = Context()
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
    record = judge_one(Subject.of(backend, torch.device("cpu")), Case.parse(case), CONTEXT)
    assert record.status is Status.PASS, record.message


def test_a_merge_of_subnormal_parts_passes() -> None:
    record = judge_one(Subject.of("EAGER", torch.device("cpu")), Case.parse(MERGED), CONTEXT)
    assert record.status is Status.PASS, record.message

"""The error budget, cases on which right kernels were once called wrong, and the rows that are judged of large ones."""

from dataclasses import replace
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from torch import Tensor

from mla_conformance.backends.declaration import Declaration, Precision, Rounding
from mla_conformance.backends.eager import EagerPrefillBackend
from mla_conformance.cases.case import Case
from mla_conformance.defects.bases import E4M3Operands, HopperE4M3Operands
from mla_conformance.files.whole import InputError
from mla_conformance.judging import golden
from mla_conformance.judging.golden import choose_rows
from mla_conformance.judging.record import Check, Status, detection
from mla_conformance.judging.tolerance import Tolerance, read_tolerance, roundoffs, tolerance
from mla_conformance.roles.definition import build_problem
from mla_conformance.tests.drawn import CPU, changed, judged
from mla_conformance.trials.trial import Context
from mla_conformance.vocabulary.capabilities import CAPABILITIES

NEW = Case.parse("fp8_operands:dtype=e4m3;dims=small;q=[5,9]")
TAIL = CAPABILITIES["fp8_operands"].cases[1]

CODES = torch.float8_e4m3fn
UNSCALED = {"_round_p": lambda self, p, dtype: p.to(CODES).float()}
DECLARED = UNSCALED | {"declaration": Declaration(e4m3_rounding=Rounding(p=Precision.E4M3), emulated=True)}

UNDECLARED = {"declaration": Declaration(emulated=True)}
RIGHT: list[Any] = [(E4M3Operands, NEW, {}, ""), (E4M3Operands, TAIL, {}, ""), (E4M3Operands, TAIL, DECLARED, "")]
WRONG: list[Any] = [(E4M3Operands, NEW, UNDECLARED, Check.OUTPUT), (E4M3Operands, TAIL, UNSCALED, Check.OUTPUT)]
WRONG += [(EagerPrefillBackend, NEW, {"_store": lambda self, x, *_: x.to(CODES)}, Check.DTYPE)]


@pytest.mark.parametrize(("backend", "case", "attributes", "check"), [*RIGHT, *WRONG])
def test_p_in_e4m3_must_be_declared_and_scaled(backend: type, case: Case, attributes: Any, check: str) -> None:
    record = judged(type(backend.__name__, (backend,), attributes), case)
    assert (record.status, record.check) == (Status.FAIL if check else Status.PASS, check)


@pytest.mark.parametrize(("keys", "steps", "columns"), [(1, 16, 64), (256, 16, 192), (4000, 250, 384)])
def test_fp22_sums_widen_the_budget_by_their_steps(keys: int, steps: int, columns: int) -> None:
    narrow = roundoffs(torch.bfloat16, Rounding(accumulation=Precision.FP22), tolerance(), 0, keys, columns)
    exact = roundoffs(torch.bfloat16, Rounding(), tolerance(), 0, keys, columns)
    assert (narrow.scores, narrow.values) == ({64: 16, 192: 32, 384: 64}[columns] * 2**-13, steps * 2**-13)
    assert replace(narrow, scores=0.0, values=0.0) == exact


def test_a_number_of_the_table_needs_a_reason_and_detection_counts_drawn_rows_only() -> None:
    names = Tolerance.__dataclass_fields__
    assert all(getattr(tolerance(), name) > 0 for name in names)
    with pytest.raises(InputError, match=r"here: .*reason"):
        read_tolerance("".join(f"[{name}]\nvalue = 1\nreason = '  '\n" for name in names), "here")
    assert detection(384, 0.01) == pytest.approx(0.979, abs=1e-3)
    assert detection(0, 0.5) == 0.0 and detection(10, 1.0) == 1.0


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
TWO_PASSES = "mla_conformance.defects.honest:TwoPasses"
OF_EAGER = [
    "chunked_context:dtype=fp16;dims=glm;heads=8;q=[17,200,33];kv=[64,16,5];page=32;workspace=192;scale=400;"
    "data=integers;pad=1;poison=inf;merge=own;seed=411039",
    "chunked_context:q=[31];kv=[0];page=64;workspace=64;merge=own",  # nothing to merge
    "index_write:call=write_index;dims=128-0-128-128;q=[0,0];kv=[1,3];page=16;cache=fp8_index",  # nothing to write
    # A weight of 0, which tells no scale.
    "prepare_index:call=prepare_index;dtype=fp16;dims=96-32-128-128;heads=40;q=[2x64];kv=[40000x13,513,40000x20,1100,"
    "40000x13,32767x16];scale=99;data=integers;poison=large;rope_last=1;scales=pow2;eps=32",
    # Keys that are alike by chance are drawn again, else what codes round would decide.
    "sparse_layer_combinations:call=sparse_layer;dtype=fp16;dims=64-126-64-128;heads=5;q=[1,1,1];kv=[32,127,47];"
    "page=128;data=integers;decodes=3;index_scales=pow2;index_heads=2;topk=2",
    "call_order:call=sparse_layer;dtype=fp16;q=[1];kv=[3];data=integers;decodes=1;index_heads=2;topk=2",
    "call_order:call=sparse_decode;dims=small;heads=2;q=[1];kv=[9];cache=fp8;topk=8;extra=auto;extra_topk=8",
    "call_order:call=layer;dims=32-16-32-64;heads=1;q=[3,2];kv=[3,1];page=1;workspace=12;order=decodes_first",
    "call_order:call=compress;dims=8-8-16-16;q=[1];kv=[0];spare=1;ratio=128;overlap=1",
]


@pytest.mark.parametrize(
    ("case", "kernel"),
    [
        *((case, backend) for case in ALARMS.values() for backend in ("EAGER", "TORCH_SDPA")),
        *((case, "EAGER") for case in OF_EAGER),
        ("context_chunk:dtype=e4m3;dims=glm;heads=64;q=[1];kv=[17];scale=1;data=hot_ones", HopperE4M3Operands),
        # Rows that are alike.
        ("context_chunk:dims=small;heads=64;q=[128];kv=[26];data=zero_keys;scale=123", TWO_PASSES),
        # A sum over keys one after another, as PyTorch's kernel has it in float32.
        ("decode:dtype=fp32;dims=small;heads=1;q=[1];kv=[8999];page=64;scale=1;data=outliers", "TORCH_SDPA"),
    ],
)
def test_right_kernels_pass(case: str, kernel: str | type) -> None:
    record = judged(kernel, case)
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


@pytest.mark.parametrize(
    ("factor", "data", "status"),
    [
        *((1.0, data, Status.PASS) for data in ("integers", "normal")),
        (1 - 2.0**-11, "integers", Status.FAIL),  # beyond the roundings of any data
        (1 - 2.0**-14, "normal", Status.FAIL),  # beyond the roundings of weights that differ
    ],
)
def test_weights_that_are_added_one_by_one(factor: float, data: str, status: Status) -> None:
    kernel = type("Adds", (AddsWeightsOneByOne,), {"factor": factor})
    record = judged(kernel, f"context_chunk:dims=small;heads=1;q=[5];kv=[16384];data={data}")
    assert record.status is status, record.message


LARGE_CASES = [
    "new_tokens:dims=small;heads=2;q=[400,0,300]",
    "context_chunk:dims=small;heads=2;q=[400,300];kv=[65,9]",
    "chunked_context:dims=small;heads=2;q=[400,300];kv=[65,0]",
]


@pytest.fixture
def few(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every problem is too large to be judged whole."""
    monkeypatch.setattr(golden, "FULL_OPERATIONS", {"cpu": 0.0})
    monkeypatch.setattr(golden, "TELLING_ROWS", 40)
    monkeypatch.setattr(golden, "DRAWN_ROWS", 60)


@pytest.mark.usefixtures("few")
@pytest.mark.parametrize("case", LARGE_CASES)
def test_ends_and_edges_are_judged_and_the_choice_is_the_same_every_time(case: str) -> None:
    rows = choose_rows(build_problem(Case.parse(case), CPU))
    assert rows == choose_rows(build_problem(Case.parse(case), CPU))
    assert rows.numbers and len(rows.numbers) == 96 and list(rows.numbers) == sorted(set(rows.numbers))
    last = 699
    assert {0, 399, 400, last, 15, 16, 31, 32, 400 + 15, 400 + 16} <= set(rows.numbers)
    assert rows.query_start_loc[-1] == 700 and rows.drawn == 60
    assert choose_rows(build_problem(Case.parse(f"{case};seed=1"), CPU)).numbers != rows.numbers
    record = judged("EAGER", case, Context())
    assert record.status is Status.PASS and record.sampled == {"rows": 96, "of": 700, "drawn": 60}


def with_row(number: int, value: float) -> type:
    def step(run: Any, *operands: Any) -> Any:
        output, lse = run(*operands)
        output[number] += value
        return output, lse

    return changed(EagerPrefillBackend, run_prefill_context_chunk=step)


@pytest.mark.usefixtures("few")
def test_a_wrong_row_is_named_by_its_place_in_the_batch_and_none_may_hold_nan() -> None:
    found = judged(with_row(415, 1.0), LARGE_CASES[1], Context())
    assert found.status is Status.FAIL and "request 1, query 15" in found.message
    assert "wrong in 1 of 2 requests, 1 of 96 rows" in found.message
    found = judged(with_row(200, torch.nan), LARGE_CASES[1], Context())  # in a row that is not judged
    assert found.status is Status.FAIL and "output is nan at request 0, query 200" in found.message

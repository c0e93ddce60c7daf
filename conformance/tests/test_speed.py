"""Times of right kernels: calls of large shapes that mean what they say, the table, and the way into the report."""

import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from mla_conformance.backends.eager_decode import EagerDecodeBackend
from mla_conformance.cases.case import Call, Case
from mla_conformance.defects.known import known_defects
from mla_conformance.driving.driver import parts_of
from mla_conformance.report.html import html
from mla_conformance.report.json_report import load_report
from mla_conformance.speed import measure
from mla_conformance.speed.measure import call_of, time_kernel
from mla_conformance.speed.times import Interval, Shape, Speed, Timed, forms_of, remarks_of, sized, table_of
from mla_conformance.trials.subject import Subject

CPU = torch.device("cpu")
DECODE = "decode:dims=small;heads=2;q=[1];kv=[64]"

CLOCK = {"now": 0.0}  # seconds, of which each look takes 1/1024


class Slow(EagerDecodeBackend):
    def run_decode(self, *operands: Tensor, **named: Tensor) -> Any:
        CLOCK["now"] += 0.03
        return super().run_decode(*operands, **named)


class Failing(EagerDecodeBackend):
    def run_decode(self, *operands: Tensor, **named: Tensor) -> Any:
        raise ValueError("not at this length")


def result(reference: str, case: Case, call: Any) -> Tensor:
    kernel = Subject.of(reference, CPU).create(case)
    call.prepare(kernel)
    output: Tensor = parts_of(call.invoke(kernel, None))[0]
    return output.float()


@pytest.mark.parametrize(
    ("id", "moved"),
    [
        ("decode:heads=4;q=[2x3];kv=[500x3];page=64;lse=0", 2 * 576 * (6 * 4 + 3 * 502) + 2 * 512 * 6 * 4),
        ("decode:heads=4;q=[1x3];kv=[500x3];page=16;lse=0;cache=fp8", 2 * 576 * 12 + 576 * 3 * 501 + 2 * 512 * 12),
        ("decode:heads=4;q=[1x70];kv=[99x70];page=1;lse=0;cache=fp8_ds_mla", 0),
        ("new_tokens:heads=4;q=[300];lse=0", 2 * 300 * 4 * (192 + 192 + 128 + 128)),
        ("context_chunk:heads=4;q=[100];kv=[500]", 2 * 4 * (100 * 192 + 500 * 320 + 100 * 128) + 4 * 4 * 100),
        ("sparse_decode:heads=4;q=[2x3];kv=[500x3];page=64;lse=0;topk=128", 0),
        ("sparse_prefill:heads=4;q=[100];kv=[300];lse=0;topk=128", 0),
    ],
)
def test_two_kernels_agree_on_a_call_that_is_made_by_repeating(id: str, moved: int) -> None:
    case = Case.parse(id)
    torch.manual_seed(0)
    call, read = call_of(case, CPU)
    first, other = (result(reference, case, call) for reference in ("EAGER", "TORCH_SDPA"))
    assert len(first) == sum(case.q) and first.isfinite().all() and first.abs().max() > 0.5
    assert (first - other).abs().max() < 0.03
    lse = 4 * case.heads * sum(case.q) if case.call == Call.CONTEXT_CHUNK else 0
    assert not moved or read + 2 * first.numel() + lse == moved


def test_forms_are_the_models_or_those_of_deepseek_v3() -> None:
    passed = [f"sparse_decode:heads={heads};q=[1];kv=[9];topk=512" for heads in (64, 16)]
    passed += ["layer:call=layer;q=[1];kv=[9]"]
    of_model = [Case.parse(form) for form in forms_of(passed, 16, "cuda")]
    assert [(case.heads, case.topk) for case in of_model] == [(16, 512), (64, 512)]  # type: ignore[attr-defined]
    first = Case.parse(forms_of([DECODE], 0, "cuda")[0])
    assert (first.dims, first.heads, first.dtype) == ("r1", 128, "bf16")
    tried = list(sized(first, Shape(Call.DECODE, 8, 2, 1022)))
    assert [case.page for case in tried] == [64, 128, 32, 16, 1] and tried[0].q == (2,) * 8


@pytest.fixture
def shapes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measure, "SHAPES", {"cpu": (Shape(Call.DECODE, 2, 1, 99),)})
    monkeypatch.setattr(measure, "_SIDE", {"cpu": 64})

    def look() -> float:
        CLOCK["now"] += 2**-10
        return CLOCK["now"]

    monkeypatch.setattr(time, "perf_counter", look)


@pytest.mark.usefixtures("shapes")
def test_a_slower_copy_of_a_kernel_stands_behind_it() -> None:
    kernels = [(name, time_kernel(Subject.of(name, CPU), [DECODE])) for name in (f"{__name__}:Slow", "EAGER")]
    (_, slow), (_, quick) = kernels
    medians = [speed.times[0].called and speed.times[0].called.median for speed in (quick, slow)]
    assert medians == pytest.approx([1e6 * 2**-13, 1e6 * (0.03 + 2**-10)], rel=1e-3)
    head, first, second = table_of(kernels)
    assert head == ("right, fastest first", "decode 2 × 100", "of the card")
    assert (first[0], second[0]) == ("EAGER", f"{__name__}:Slow") and "ms ±" in second[1]
    assert quick.times[0].planning and quick.times[0].operations and quick.copy > 0


@pytest.mark.usefixtures("shapes")
def test_a_shape_without_a_time_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    speed = time_kernel(Subject.of(f"{__name__}:Failing", CPU), [DECODE])
    assert not table_of([("MINE", speed)])
    assert remarks_of([("MINE", speed)]) == ["no time for MINE: ValueError: not at this length"]
    monkeypatch.setitem(measure.SLOWEST, "cpu", 0.0)
    assert "up to 0 s are timed" in time_kernel(Subject.of("EAGER", CPU), [DECODE]).reason
    monkeypatch.setattr(measure, "SHAPES", {"cpu": (Shape(Call.DECODE, 2, 1, 99), Shape(Call.DECODE, 2, 1, 199))})
    assert "no more work" in time_kernel(Subject.of("EAGER", CPU), [DECODE]).times[1].why
    monkeypatch.setattr(measure, "PATIENCE", {"cpu": -1.0})
    assert "skipped" in time_kernel(Subject.of("EAGER", CPU), [DECODE]).reason
    assert "not supported" in time_kernel(Subject.of("TORCH_SDPA", CPU), [f"{DECODE};dtype=fp64"]).reason
    monkeypatch.setattr(measure, "_card", lambda *_: 1 / 0)
    assert time_kernel(Subject.of("EAGER", CPU), [DECODE]).reason.startswith("the device itself cannot be timed")


@pytest.mark.filterwarnings("ignore:CUDA is not available")
def test_the_profiler_tells_when_calls_and_kernels_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a CPU, whose operations stand for kernels here."""
    monkeypatch.setattr(measure, "DeviceType", SimpleNamespace(CUDA=measure.DeviceType.CPU))
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
    matrix, none = torch.ones(64, 64), torch.empty(0)
    found = measure.kernel_times(lambda: matrix @ matrix, CPU)
    assert len(found) % 3 == 0 and 9 <= len(found) <= 60 and all(found)
    with pytest.raises(RuntimeError, match="saw kernels of 0 calls"):
        measure.kernel_times(none.numel, CPU)


def test_a_plain_call_is_as_long_as_its_kernels_run_and_left_out_where_launches_were_counted() -> None:
    kernels = [(0.0, 9.0), (10.0, 14.0), (12.0, 16.0), (20.0, 30.0), (40.0, 99.0), (100.0, 130.0), (110.0, 115.0)]
    assert measure.busy_in([(10.0, 30.0), (100.0, 130.0)], kernels) == [16.0, 30.0]
    plain = Timed("prefill", "prefill 4k", "x:q=[1]", called=Interval(9.0, 8.0, 9.5))
    both = Speed((timed("decode", "decode 1 × 1k", 9.0), plain), timer="do_bench; L2 flushed")
    assert [each.called for each in both.comparable] == [None, None]
    assert both.of("decode 1 × 1k") and not both.of("prefill 4k")
    alone = Speed((plain,), timer="do_bench; L2 flushed")
    assert not alone.has_times and "with the waits for their launches" in alone.reason
    assert Speed((plain,), timer="CUPTI, of graphs do_bench").has_times


def timed(kind: str, shape: str, median: float, share: float = 0.5) -> Timed:
    called, graph = Interval(0.9 * median, 0.8 * median, 9 * median), Interval(median, median - 2, median + 2)
    return Timed(kind, shape, "x:q=[1]", called, graph, share=share)


def test_the_table_has_the_columns_that_most_kernels_have() -> None:
    kernels = [
        ("A", Speed((timed("decode", "decode 64 × 8k", 260.0), timed("decode", "decode 1 × 1k", 9.0)))),
        ("B", Speed((timed("decode", "decode 64 × 8k", 212.0, 0.81), timed("prefill", "prefill 4k", 1234.0)))),
        ("C", Speed((timed("prefill", "prefill 4k", 999.7),))),
        ("D", Speed(why="its process ended")),
    ]
    assert table_of(kernels) == [
        ("right, fastest first", "decode 64 × 8k", "prefill 4k", "of the card"),
        ("B", "212 µs ± 2", "1.23 ms ± 0.002", "81 %"),
        ("A", "260 µs ± 2", "–", "50 %"),
        ("C", "–", "1 ms ± 0.002", "50 %"),
    ]
    assert remarks_of(kernels)[-1] == "no time for D: its process ended"
    reached = Timed("decode", "x", called=Interval(10.0, 9.0, 11.0), moved=29_512_345, operations=3.56e6).rate
    assert reached == "2,950 GB/s, 0.356 TFLOP/s"
    lists = ("E", Speed((timed("sparse decode", "sparse decode 64 × 8k", 50.0),)))
    assert "sparse decode 64 × 8k" in table_of([*kernels, lists])[0]


def test_a_run_times_what_is_right_and_keeps_it(here: Path, ours: Any) -> None:
    wrong = known_defects()["fa4-sm120-wrong-smem-store-atom"]
    asked = "--capability=new_tokens --tier=smoke --device=cpu --out=run --no-explain --speed --backend=EAGER"
    status, printed, _ = ours("certify", *asked.split(), f"--backend={wrong.reference}")
    lines = printed.splitlines()
    head = next(number for number, line in enumerate(lines) if line.startswith("right, fastest first"))
    assert status == 1 and lines[head + 1].split()[0] == "EAGER"
    assert "on a CPU, at small shapes" in lines[head + 2]
    assert not any(wrong.kernel.__name__ in line for line in lines[head : head + 5])
    run = load_report(here / "run")
    speeds: dict[str, Any] = {each.name: each.speed for each in run.backends}
    assert not speeds[wrong.kernel.__name__] and {each.kind for each in speeds["EAGER"].times} >= {"prefill"}
    assert "<h3>EAGER</h3>" in html(run)


@pytest.mark.parametrize("option", [["--shard", "1/2"], ["--sanitize", "memcheck"]])
def test_times_are_of_whole_runs(option: list[str], refused: Any) -> None:
    said = refused("certify", "--backend", "EAGER", "--speed", *option)
    assert f"{option[0]}: cannot be combined with --speed" in said

"""The Python API: a plain function is judged by the cases and the judge of ``certify``, and told what it said."""

import json
import re
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import mla_conformance as mla
from mla_conformance.api import verdicts
from mla_conformance.api.function_case import AT_DEFAULT, why_no_function
from mla_conformance.backends.declaration import Declaration, LseClass, Rounding, declaration_of
from mla_conformance.backends.roles import Role
from mla_conformance.cases.case import Case
from mla_conformance.cases.work import CPU_WORK, work_of
from mla_conformance.defects.known import known_defects
from mla_conformance.defects.report import stored
from mla_conformance.diagnosis import explain
from mla_conformance.diagnosis.explain import Failure, candidates
from mla_conformance.engine import explainer
from mla_conformance.files.whole import InputError
from mla_conformance.judging.record import UNLIKE, Status
from mla_conformance.report.terminal import columns
from mla_conformance.roles.indexer.problem import GoldenScores
from mla_conformance.tests.own_functions import as_function, decode_with, lightest
from mla_conformance.tests.test_plugin import pytest_in
from mla_conformance.trials.subject import Subject
from mla_conformance.trials.trial import Context, judge_one
from mla_conformance.vocabulary.capabilities import CONFORMS, find_capability

CPU = torch.device("cpu")
LSE = "decode_lse:call=decode;q=[1x4];kv=[64,9,1000,17];page=64"
FEW = "decode_lse:call=decode;heads=2;q=[1x4];kv=[64,9,1000,17];page=64"
SEVERAL = "decode_multi_token:call=decode;q=[3,1,2];kv=[64,5,1000];page=64;data=needle"
CODES = "kv_cache_fp8:call=decode;heads=2;q=[1x4];kv=[64,5,1000,17];page=64;data=needle;cache=fp8"
ORDER = "call_order:call=decode;heads=2;q=[1,1];kv=[130,40];page=64"
TILES = "decode_combinations:call=decode;heads=17;q=[1x4];kv=[17,5,127,64];page=128;data=large_logits"
MISTAKES = {
    "base-2 LSE": (LSE, "lse", "looks like: the LSE is in base 2, expected the natural logarithm"),
    "no causal mask": (SEVERAL, "lse", "wrong in 2 of 3 requests, 3 of 6 rows"),
    "V read as packed": (FEW, "output", "512 of 512 columns, first at request 0, query 0, head 0; the LSE is right"),
    "wrong scale": (LSE, "lse", "the output is wrong as well"),
    "last head tile": (TILES, "mask", "output is nan at request 0, query 0, head 16, column 0"),
    "stale plan": (ORDER, "mask", "other lengths: decode: output is nan"),
    "exp2 in the merge": (FEW, "output", "wrong in 3 of 4 requests"),
    "accumulator not rescaled": (FEW, "output", "the LSE is right"),
    "k_scale off the rope part": (CODES, "lse", "wrong in 4 of 4 requests"),
}


def flat(said: object) -> str:
    return " ".join(str(said).split())


def refused(case: mla.FunctionCase, *results: Any) -> str:
    with pytest.raises(AssertionError) as failure:
        mla.assert_conforms(case, *results)
    return str(failure.value)


@pytest.fixture(autouse=True)
def unexplained(monkeypatch: pytest.MonkeyPatch) -> None:
    """Failures are not compared with everything that is known, but where that is what a test is about."""
    monkeypatch.setenv("MLA_CONFORMANCE_ALONE", "1")


@pytest.fixture
def explained(monkeypatch: pytest.MonkeyPatch, unexplained: None) -> None:
    monkeypatch.delenv("MLA_CONFORMANCE_ALONE")
    found = defaultdict[explainer.Function, explainer.Explained](explainer.Explained)
    beside = SimpleNamespace(explain=lambda function, failure: found[function].explain(failure))
    monkeypatch.setattr(verdicts, "EXPLAINER", beside)  # in this process, where a test can look at it
    monkeypatch.setattr(verdicts, "_FINDINGS", defaultdict(set))


FREQUENT = {
    "V read as packed": ("PackedValuesOf2147483648", "V is read as if it were packed: rows of L columns"),
    "exp2 in the merge": ("MergedInBase2Of(2, 0, 16)OfFalse", "Splits are weighted by powers of two"),
    "accumulator not rescaled": ("NotRescaledInSplitsOf16Of(2, 0, 16)", "The accumulator is not rescaled where"),
    "k_scale off the rope part": ("KeyScaleOffTheRope", "The scale of the e4m3 cache is not applied to the rope part"),
}


@pytest.fixture
def compared(monkeypatch: pytest.MonkeyPatch, explained: None) -> str:
    """Failures are compared with a few, and not nearby, for how causes are told apart is not the API's; one of them."""
    known, kernels = "causal-arg-accepted-but-dropped", {kernel for kernel, _ in FREQUENT.values()}
    everyone = candidates(Role.DECODE)
    few = tuple(each for each in everyone if each.id == known or each.reference.rpartition(":")[2] in kernels)
    monkeypatch.setattr(explain, "candidates", lambda role: few)
    monkeypatch.setattr("mla_conformance.diagnosis.explain.neighbours", lambda case: [])
    return f"what the known defect {known}"


@pytest.mark.parametrize("case", [mla.case(id) for id in (LSE, SEVERAL, CODES, ORDER, TILES)], ids=str)
def test_a_right_function_passes(case: mla.FunctionCase) -> None:
    verdict = mla.judge(case, decode_with(""), device="cpu")
    assert (verdict.status, verdict.check, verdict.message) == (Status.PASS, "", "")
    assert verdict.passed and 0.1 < verdict.used.worst <= 1


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_fails_with_what_is_wrong(mistake: str) -> None:
    id, check, said = MISTAKES[mistake]
    verdict = mla.judge(mla.case(id), decode_with(mistake), device="cpu")
    assert (verdict.status, verdict.check, verdict.case, verdict.call) == (Status.FAIL, check, id, "decode")
    assert verdict.message.startswith("FAIL ") and said in flat(verdict.message)
    assert max(map(len, f"AssertionError: {verdict.message}".splitlines()[:-1])) <= columns() - len("E       ")
    assert f"{verdict}" == verdict.message
    assert "head" in verdict.where
    if id != ORDER:  # results that are there are judged as the function is
        told = refused(mla.case(id), *decode_with(mistake)(**mla.case(id).inputs("cpu")))
        assert told.splitlines()[:-1] == verdict.message.splitlines()[:-1]


def spread() -> Iterator[Any]:
    """Known defects with the cases that kill them, one for each call and operand of a prefill or a decode."""
    seen: set[tuple[str, str]] = set()
    for id, text in sorted(stored().killing_cases.items()):
        case = Case.parse(text)
        unusual = [name for name in AT_DEFAULT[2:] if getattr(case, name, None) != case.defaults().get(name)]
        handed = {(case.call, name) for name in ("", *unusual)}
        decided = find_capability(case.capability).procedure == CONFORMS and not why_no_function(case)
        decided = decided and case.role in (Role.PREFILL, Role.DECODE)
        if decided and work_of(case) < CPU_WORK and not handed <= seen:
            seen |= handed
            yield pytest.param(known_defects()[id].kernel, case, id=id)


@pytest.mark.parametrize(("kernel", "case"), list(spread()))
def test_a_function_gets_the_verdict_of_the_class_that_it_wraps(kernel: Any, case: Case) -> None:
    subject = Subject.of(f"{kernel.__module__}:{kernel.__name__}", CPU)
    suite = judge_one(subject, case, Context())
    function = as_function(kernel, case)
    own = mla.judge(mla.case(case.id), function, device="cpu", declaration=declaration_of(kernel))
    assert suite.status is Status.FAIL
    assert (own.check, dict(own.where), vars(own.used)) == (suite.check, suite.where, suite.shares)


def test_what_a_kernel_declares_decides_its_budget_and_an_input_that_was_written_is_told() -> None:
    case = mla.case(LSE)
    output, lse = decode_with("")(**case.inputs("cpu"))
    rounded = (output, lse * (1 + 1e-4))
    assert "LSE" in refused(case, *rounded)
    mla.assert_conforms(case, *rounded, declaration=Declaration(rounding=Rounding(lse=LseClass.ROUNDED_P)))

    def writes(**x: Any) -> Any:
        results = decode_with("")(**x)
        x["q"][0, 0, 0] += 1
        x["seq_lens"][0] = 1
        return results

    assert "the call changed seq_lens of decode, q " in flat(refused(case, *writes(**case.inputs("cpu"))))
    assert "changed ql_nope of decode, seq_lens of decode" in flat(mla.judge(case, writes, device="cpu"))


def test_results_belong_to_the_last_inputs_and_an_exception_is_the_functions_own() -> None:
    first, second = mla.case(LSE), mla.case(CODES)
    results = decode_with("")(**first.inputs("cpu"))
    mla.assert_conforms(first, *results)
    mla.assert_conforms(first, results)  # once more, and without the star
    second.inputs("cpu")
    with pytest.raises(InputError, match=r"those of kv_cache_fp8.* last; call x = case.inputs\(device\)"):
        mla.assert_conforms(first, *results)

    def raises(**_: Any) -> tuple[()]:
        raise ZeroDivisionError("mine")

    with pytest.raises(ZeroDivisionError, match="mine"):
        mla.assert_conforms(mla.case(LSE), raises(**mla.case(LSE).inputs("cpu")))
    verdict = mla.judge(mla.case(LSE), raises, device="cpu")
    assert verdict.check == "call" and "raised ZeroDivisionError: mine" in verdict.message
    assert "in raises" in verdict.detail


def test_a_known_defect_is_named_and_others_are_compared_with_it_alone(compared: str, monkeypatch: Any) -> None:
    wrong = decode_with("no causal mask")
    assert f"looks like: {compared}" in flat(mla.judge(mla.case(SEVERAL), wrong, device="cpu"))
    monkeypatch.delattr(explainer, "explain")
    others = [case for case in mla.cases("decode", capability="decode_multi_token") if case.id != SEVERAL][:2]
    assert others and all(compared in flat(mla.judge(case, wrong, device="cpu")) for case in others)


@pytest.mark.usefixtures("explained")
def test_the_first_failure_of_each_kind_is_compared_with_every_known_defect(monkeypatch: pytest.MonkeyPatch) -> None:
    compared, given = list[str](), list[float]()

    def unlike(failure: Failure, patience: float) -> str:
        compared.append(f"{failure.record.check} {failure.record.case}")
        given.append(patience)
        return UNLIKE

    monkeypatch.setattr(explainer, "explain", unlike)
    first, _, second = mla.cases("decode", capability="decode_lse", q=1)
    mla.judge(first, decode_with("base-2 LSE"), device="cpu")  # its numbers say what it is
    mistakes = [decode_with(mistake) for mistake in ("accumulator not rescaled", "wrong scale")]
    messages = [mla.judge(case, wrong, device="cpu").message for wrong in mistakes for case in (first, second)]
    assert [UNLIKE in message for message in messages] == [True, False, True, False]
    assert compared == [f"output {first.id}", f"lse {first.id}"]
    assert given[0] >= 60 > given[1], "the first failure has the time that comparing takes"


def test_where_to_look_is_told_of_a_wrong_output_beside_a_right_lse_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("MLA_CONFORMANCE_ALONE")
    monkeypatch.setattr(verdicts, "_with_explanation", lambda trial, record: record.with_fields(explanation=UNLIKE))
    for mistake, told in (("accumulator not rescaled", True), ("wrong scale", False)):
        said = flat(mla.judge(mla.case(LSE), decode_with(mistake), device="cpu"))
        assert ("the LSE is right, so scores, mask and scale are: look at V" in said) is told


@pytest.mark.parametrize("mistake", FREQUENT)
@pytest.mark.usefixtures("compared")
def test_frequent_mistakes_are_named(mistake: str) -> None:
    said = mla.judge(mla.case(MISTAKES[mistake][0]), decode_with(mistake), device="cpu")
    assert f"looks like: {FREQUENT[mistake][1]}" in flat(said)


def test_cases_have_the_values_that_are_asked_for() -> None:
    def lists(role: str, capability: str, **wanted: Any) -> Any:
        return mla.cases(role, capability=capability, **wanted)  # which refuses what has no case

    found = mla.cases("decode", heads=[16, 128], cache="fp8")  # with cases fitted to that; others are of lists
    assert {case.suite_case.heads for case in found} == {16, 128}
    assert {getattr(case.suite_case, "cache") for case in found} == {"fp8"}  # noqa: B009 - of a decode's case
    left_out = mla.cases("decode", capability=["call_order", "decode"]).left_out  # what a run tells nobody was asked
    assert left_out["cache=fp8"] and "cache=fp8" not in found.left_out and "heads=16" not in left_out
    several = lists("decode", "decode_multi_token", q=[4, 5])
    assert {length for case in several for length in case.suite_case.q} == {4, 5}
    assert all(len(set(case.suite_case.q)) > 1 for case in lists("decode", "decode_multi_token", queries="mixed"))
    assert {case.suite_case.dtype for case in lists("prefill", "lse", tier="full")} == {"bf16"}
    assert mla.case(found[0].id) == found[0] and str(found[0]) == found[0].id


@pytest.mark.parametrize(
    ("role", "wanted", "said"),
    [
        ("layer", {}, "no function does; judge its kernels as functions, by role prefill and decode"),
        ("decoder", {}, "unknown role 'decoder'; expected one of prefill, decode, sparse, indexer"),
        ("decode", {"tier": "smok"}, "unknown tier 'smok'; did you mean smoke?"),
        ("decode", {"head": 16}, "unknown field 'head' of a decode case; did you mean heads?"),
        ("decode", {"cache": ["fp8", "fp9"]}, "has cache=fp9; expected one of auto, fp8, fp8_ds_mla"),
        ("decode", {"capability": "dcp"}, "=dcp and defaults otherwise; expected more values, such as ranks=2"),
        ("decode", {"cache": "fp8", "capability": "decode_lse"}, "capability=decode_lse at once; expected fewer"),
    ],
)
def test_a_selection_without_a_case_says_what_there_is(role: str, wanted: dict[str, Any], said: str) -> None:
    with pytest.raises(InputError, match=re.escape(said)):
        mla.cases(role, **wanted)


@pytest.mark.parametrize(
    ("id", "said", "device"),
    [
        ("nothing:q=[1]", "unknown capability 'nothing'", ""),
        ("refusals:q=[40];dtype=fp64", "judges what a class declares", ""),
        ("mixed_batch:call=layer;q=[1];kv=[1]", "a layer keeps weights", ""),
        ("prepare_index:q=[1];kv=[63]", "judge a class", ""),
        ("slot_mapping:q=[1];kv=[63]", "a cache operation is judged by what it writes", ""),
        (ORDER, "decided by several calls; expected mla.judge(case, function)", "cpu"),
        ("dcp:call=decode;heads=1;q=[1];kv=[9];ranks=2;lse=0", "decided by several calls", "cpu"),
        (LSE, "device: expected cpu, cuda or a GPU such as cuda:1, got 'tpu'", "tpu"),
    ],
)
def test_what_no_function_can_be_asked_or_handed_is_told_why(id: str, said: str, device: str) -> None:
    case = mla.case(id) if device else None
    with pytest.raises(InputError, match=re.escape(said)):
        case.inputs(device) if case else mla.case(id)


def golden_of(case: mla.FunctionCase) -> Any:
    context = Context()
    found: Any = context.expect(context.problem(case.suite_case, CPU))
    return found.scores if isinstance(found, GoldenScores) else found.calls[0]


DECODE = "decode:call=decode;heads=2;q=[3,1];kv=[64,5];page=64;cache"
READ = "q kv_cache block_table seq_lens scale kv_lora_rank cu_seqlens_q kv_cache_dtype k_scale"
CHUNK = "lse:call=context_chunk;heads=2;q=[5,2];kv=[64,9]"
SELECTED = "sparse_lse:call=sparse_decode;heads=2;q=[1,1];kv=[40,64];page=64;topk=64;sink=drawn"


@pytest.mark.parametrize(
    ("text", "golden", "names"),
    [
        *((f"{DECODE}={cache}", mla.golden.decode, READ) for cache in ("auto", "fp8", "fp8_ds_mla")),
        (CHUNK, mla.golden.prefill, "q k v scale causal cu_seqlens_q cu_seqlens_k"),
        (SELECTED, mla.golden.sparse, "q kv=kv_cache topk_indices scale attn_sink"),
    ],
)
def test_golden_results_are_those_of_the_suite(text: str, golden: Any, names: str) -> None:
    case = mla.case(text)
    x, named = case.inputs("cpu"), [name.split("=") for name in names.split()]
    own, expected = golden(**{name[0]: x[name[-1]] for name in named}), golden_of(case)
    assert torch.equal(own.output, expected.output) and torch.equal(own.lse, expected.lse)
    assert own.budget.shape == own.output.shape


def test_the_golden_budget_holds_a_right_kernel_alone_and_scores_are_those_of_the_suite() -> None:
    case = mla.case(LSE)
    x = case.inputs("cpu")
    own = mla.golden.decode(x["q"], x["kv_cache"], x["block_table"], x["seq_lens"], scale=x["scale"])
    for mistake, held in (("", True), ("accumulator not rescaled", False)):
        output, lse = decode_with(mistake)(**x)
        assert bool(((output.double() - own.output).abs() <= own.budget).all()) is held
        assert bool(((lse.double() - own.lse).abs() <= own.lse_budget).all())
    case = mla.case("indexer_logits:call=index_logits;q=[7,2];kv=[0,60];gathered=1;cache=auto")
    x = case.inputs("cpu")
    starts, lengths = x["workspace_starts"].tolist(), x["seq_lens"].tolist()
    k = torch.cat([x["k"][start : start + length] for start, length in zip(starts, lengths, strict=True)])
    ends = [0, *torch.tensor(lengths).cumsum(0).tolist()]
    scores = mla.golden.index_scores(x["q"], x["weights"], k, cu_seqlens_q=x["cu_seqlens_q"], cu_seqlens_k=ends)
    assert torch.equal(scores.scores, golden_of(case).scores)


PAGE = Path(__file__).parents[2] / "docs" / "python-api.md"
ASKED: dict[str, list[dict[str, Any]]] = {
    "prefill": [{}, {"call": "context_chunk"}, {"out": True}, {"quant": "fp8"}],
    "decode": [{}, {"cache": "fp8"}, {"ranks": 2}],
    "sparse": [{}, {"call": "sparse_prefill"}, {"length": True}, {"sink": "drawn"}, {"extra": "auto"}, {"ranks": 2}],
    "indexer": [{}, {"gathered": True}, {"call": "index_topk"}],
}
ASKED["sparse"] += [{"extra": "fp8_ds_mla", "length": True}]


@pytest.mark.parametrize("role", ASKED)
def test_the_page_lists_what_is_handed_out_and_when(role: str) -> None:
    section = PAGE.read_text("utf-8").split(f"\n### {role.capitalize()}\n")[1].split("\n### ")[0]
    rows = re.findall(r"^\| (`.*?) \| (.*?) \| (.*?) ?\|$", section, flags=re.MULTILINE)
    listed = {name: when for names, _, when in rows for name in re.findall(r"`(\w+)`", names)}
    handed = [handed_out(role, wanted) for wanted in ASKED[role]]
    assert set.union(*handed) == set(listed)
    assert set.intersection(*handed) == {name for name, when in listed.items() if not when}
    for wanted, names in zip(ASKED[role], handed, strict=True):
        text = ", ".join(f"{name}={json.dumps(value).replace('true', 'True')}" for name, value in wanted.items())
        assert {name for name, when in listed.items() if text and f"`{text}`" in when} <= names


def handed_out(role: str, wanted: dict[str, Any]) -> set[str]:
    seen: dict[str, Any] = {}
    (smallest,) = lightest(role, wanted)
    assert mla.judge(smallest, lambda **inputs: seen.update(inputs), device="cpu").check == "shape"
    return {*seen}


def test_the_page_names_all_of_the_api() -> None:
    assert set(mla.__all__) - {"__version__", "roles"} <= set(re.findall(r"\w+", PAGE.read_text("utf-8")))
    default = PAGE.read_text("utf-8").split("keep their default unless you name them")[1].partition(". Cases of")[0]
    assert re.findall(r"`(\w+)`", default) == ["call", *AT_DEFAULT]
    assert len(mla.__all__) <= 9 + len({"__version__"})
    with pytest.raises(AttributeError, match="has no attribute 'judges'"):
        mla.judges  # noqa: B018 # type: ignore[attr-defined]


TESTS = """
import os
import mla_conformance as mla
from mla_conformance.tests.own_functions import decode_with
cases = mla.cases("decode", capability="decode_lse", q=1)
@cases
def test_right(case): mla.assert_conforms(case, *decode_with("")(**case.inputs("cpu")))
@cases
def test_wrong(case): mla.assert_conforms(case, *decode_with("base-2 LSE")(**case.inputs("cpu")))
@cases
def test_raises(case): decode_with("")(**case.inputs("cpu"))["mine"]
calls = []
if "MLA_CONFORMANCE_ALONE" in os.environ:
    open("alone", "a").write(".")
@cases
def test_keeps(case):
    calls.append(case)
    mla.assert_conforms(case, *decode_with("")(**case.inputs("cpu"))[: 3 - len(calls)])
"""


@pytest.mark.usefixtures("explained")
def test_a_run_of_right_cases_tells_what_was_left_out_wherever_it_is_started(tmp_path: Path, python: Path) -> None:
    (tmp_path / "pytest.ini").write_text("[pytest]\n")
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "test_mine.py").write_text(TESTS.replace('"decode_lse", q=1', '"decode"'))
    status, printed = pytest_in(tmp_path / "mine", "-k", "test_right", "test_mine.py", python=python)
    assert status == 0 and "test_mine.py::test_right: right on " in flat(printed), printed
    assert re.search(r"Left out, unless named in mla\.cases: .*dtype=fp16 \(\d+\)", flat(printed))


@pytest.mark.usefixtures("explained")
def test_under_xdist_ids_are_cases_and_the_end_says_what_fails(tmp_path: Path, monkeypatch: Any, python: Path) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    (tmp_path / "test_mine.py").write_text(TESTS)
    _, printed = pytest_in(tmp_path, "-n1", "-q", "--color=no", python=python)
    count = len(mla.cases("decode", capability="decode_lse", q=1))
    assert f"{3 * count - 1} failed, {count + 1} passed" in printed
    assert "TypeError: tuple indices must be integers" in printed and "= tensor(" not in printed
    messages = [line for line in printed.splitlines() if line.startswith("E ") and " replay: " not in line]
    assert "AssertionError: FAIL " in messages[0] and max(map(len, messages)) <= 80
    said = [line.removeprefix("E").strip() for line in printed.splitlines()]
    assert "looks like: the LSE is in base 2, expected the natural logarithm" in said
    replay = next(line for line in said if line.startswith("replay: "))
    assert replay == f"replay: pytest 'test_mine.py::test_wrong[{LSE}]'"
    assert f"FAILED test_mine.py::test_wrong[{LSE}]" in printed
    end = [line.strip() for line in printed.rpartition("= mla-conformance =")[2].splitlines()]
    first = end.index(f"test_mine.py::test_wrong: {count} of {count} cases fail, 1 likely cause")
    assert end[first + 1] == f"1. {count} cases: the LSE is in base 2, expected the natural logarithm"
    assert replay in end and not any("test_right" in line for line in end)
    assert f"1. {count} cases: TypeError: tuple indices must be integers or slices, not str" in end
    assert any(line.startswith("raised at") and "in test_raises" in line for line in end)
    kept = end.index(f"test_mine.py::test_keeps: {count - 1} of {count} cases fail")
    assert end[kept + 1].startswith("passes when run alone: the function keeps something from earlier calls")
    assert "replay: pytest test_mine.py::test_keeps" in end[kept:]
    assert not any("alone" in line for line in end[:kept])
    assert (tmp_path / "alone").read_text() == "...", "each function that fails runs once more, whoever ran it"

"""``mla.assert_close``: an author's own tensors are judged as the same tensors of a case are, and bad ones refused."""

import importlib.util
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import mla_conformance as mla
from mla_conformance.api import verdicts
from mla_conformance.api.own_tensors import INPUTS
from mla_conformance.files.whole import InputError
from mla_conformance.roles.indexer.problem import GoldenScores
from mla_conformance.tests.own_functions import decode_with, lightest
from mla_conformance.trials.trial import Context

LSE = "decode_lse:call=decode;heads=2;q=[1x4];kv=[64,9,100,17];page=64"
SEVERAL = "decode_multi_token:call=decode;q=[3,1,2];kv=[64,5,100];page=64;data=needle"
CODES = "kv_cache_fp8:call=decode;heads=2;q=[1x4];kv=[64,5,100,17];page=64;data=needle;cache=fp8"
FAR, FAR_SLOTS = torch.full((4, 1), 9999), "topk_indices: expected -1 or slots in 0..639, got 9999..9999"
OTHER_WIDTH = (
    "kv_cache: expected [blocks, page, 576] of torch.bfloat16 by kv_cache_dtype 'auto', kv_lora_rank 512 and 576 "
    "columns of q, got [10, 64, 512] of torch.bfloat16"
)
EXAMPLES = Path(__file__).parents[2] / "docs" / "examples" / "functions.py"
SHOWN = [
    ("prefill", "prefill", {}), ("prefill", "prefill", {"call": "context_chunk"}), ("decode", "decode", {}),
    ("decode", "decode", {"cache": "fp8"}), ("sparse", "sparse", {}), ("top_k", "indexer", {"call": "index_topk"}),
]  # fmt: skip
HANDED = [
    ("sparse", {"length": True}), ("sparse", {"sink": "extreme"}), ("sparse", {"extra": "fp8_ds_mla", "length": True}),
    ("sparse", {"call": "sparse_prefill"}), ("sparse", {"space": "position"}),
    ("sparse", {"space": "position", "call": "sparse_prefill"}), ("decode", {"cache": "fp8_ds_mla"}),
    ("indexer", {}), ("indexer", {"gathered": True}),
]  # fmt: skip


@pytest.fixture(autouse=True)
def unexplained(monkeypatch: pytest.MonkeyPatch) -> None:
    """Failures of cases are not compared with known ones, which own tensors are not; nor is it told where to look."""
    monkeypatch.setenv("MLA_CONFORMANCE_ALONE", "1")
    monkeypatch.setattr(verdicts, "advice", lambda record: "")


def said(check: Callable[[], None]) -> str:
    try:
        check()
    except AssertionError as failure:
        return str(failure).partition("\n     replay: ")[0]
    return ""


def both(case: mla.FunctionCase, x: dict[str, Any], *results: Any) -> str:
    own = said(lambda: mla.assert_close(*results, **x))
    assert own == said(lambda: mla.assert_conforms(case, *results))
    return own


@pytest.mark.parametrize(("name", "role", "wanted"), SHOWN)
def test_the_functions_on_the_page_are_right(name: str, role: str, wanted: dict[str, Any]) -> None:
    spec = importlib.util.spec_from_file_location("functions", EXAMPLES)
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    for case in lightest(role, wanted, 3):
        x = case.inputs("cpu")
        results = getattr(module, name)(**x)
        assert both(case, x, *(results if isinstance(results, tuple) else (results,))) == ""


@pytest.mark.parametrize("id", [LSE, SEVERAL, CODES])
def test_wrong_results_fail_as_those_of_a_case_do(id: str) -> None:
    case = mla.case(id)
    x = case.inputs("cpu")
    for mistake, text in (("base-2 LSE", "looks like: the LSE is in base 2"), ("wrong scale", "its error budget")):
        assert text in " ".join(both(case, x, *decode_with(mistake)(**x)).split())
    output, lse = decode_with("")(**x)
    assert both(case, x, output, lse) == "" == said(lambda: mla.assert_close(output, **x))
    assert "the LSE is transposed, expected [heads, tokens]" in both(case, x, output, lse.mT) or id == SEVERAL
    lse[1, 2:] += 1
    errors = "\n     LSE of decode by row   ··▄▄\n     LSE of decode by head  ·▄"
    assert both(case, x, output, lse).endswith(errors) or id != LSE


@pytest.mark.parametrize(("role", "wanted"), HANDED)
def test_every_operand_means_what_it_means_in_a_case(role: str, wanted: dict[str, Any]) -> None:
    (case,) = lightest(role, wanted)
    x, context = case.inputs("cpu"), Context()
    problem = context.problem(case.suite_case, torch.device("cpu"))
    found: Any = context.expect(problem)
    if isinstance(found, GoldenScores):
        scores = torch.zeros(problem.calls[0].result_shape)
        scores[:, : found.scores.scores.shape[1]] = found.scores.scores
        assert both(case, x, scores) == "" and "score is" in both(case, x, scores + 1)
        return
    golden = found.calls[0]
    output, rows = torch.zeros(problem.calls[0].result_shape, dtype=problem.output_dtype), len(golden.output)
    output[:rows] = golden.output
    lse = torch.full((output.shape[1], len(output)), -torch.inf)
    lse[:, :rows] = golden.lse
    results = (output, lse) if problem.attention[0].returns_lse else (output,)
    assert both(case, x, *results) == ""
    assert "output is" in both(case, x, output + 1, *results[1:])


def test_a_top_k_of_logits_is_judged_column_by_column() -> None:
    logits, lengths = torch.randn(5, 100, generator=torch.Generator().manual_seed(1)), torch.tensor([100, 3, 0, 50, 99])
    starts = torch.tensor([0, 7, 0, 50, 1])
    right = torch.full((5, 8), -1, dtype=torch.int32)
    for row, (start, length) in enumerate(zip(starts.tolist(), lengths.tolist(), strict=True)):
        best = logits[row, start : start + length].topk(min(8, length)).indices
        right[row, : len(best)] = best
    own: dict[str, Any] = {"logits": logits, "topk_tokens": 8, "lengths": lengths, "row_starts": starts}
    mla.assert_close(right, **own)
    for wrong, text in (
        (right.index_copy(1, torch.tensor([1]), right[:, :1]), "is selected twice"),
        (right[:, :7], "expected topk_indices of shape [5, 8], got [5, 7]"),
    ):
        assert text in " ".join(said(lambda wrong=wrong: mla.assert_close(wrong, **own)).split())  # type: ignore[misc]


@pytest.mark.parametrize(
    ("spoil", "text"),
    [
        (lambda x: {"q": x["q"]}, "expected the inputs of a kernel, q, k, v (prefill); q, kv_cache (decode)"),
        (lambda x: {**x, "seqlens": 1}, "got an unexpected keyword argument 'seqlens'; the inputs of a decode are q, "),
        (lambda x: {name: x[name] for name in x if name != "scale"}, "missing a required argument: 'scale'; the in"),
        (lambda x: {**x, "q": x["q"][0]}, "q: expected a tensor [T or more, N, L + R], got shape [2, 576]"),
        (lambda x: {**x, "q": x["q"].tolist()}, "q: expected a tensor [T or more, N, L + R], got a list"),
        (lambda x: {**x, "kv_cache": x["kv_cache"][..., :512]}, OTHER_WIDTH),
        (lambda x: {**x, "kv_cache": x["kv_cache"][0]}, "kv_cache: expected a tensor [blocks, page, width], got shape"),
        (lambda x: {**x, "kv_cache_dtype": "fp9"}, "kv_cache_dtype: unknown cache layout 'fp9'; expected one of auto"),
        (lambda x: {**x, "kv_lora_rank": 600}, "kv_lora_rank: expected at most the 576 columns of q, got 600"),
        (lambda x: {**x, "block_table": x["block_table"][:, :1]}, "block_table: expected room for 101 tokens in pages"),
        (lambda x: {**x, "block_table": x["block_table"] + 99}, "block_table: expected blocks in 0..9 up to each"),
        (lambda x: {**x, "block_table": x["block_table"][0]}, "block_table: expected a tensor [B, max blocks], here ["),
        (lambda x: {**x, "seq_lens": x["seq_lens"][:2]}, "cu_seqlens_q: expected 3 numbers for 2 requests, got 5"),
        (lambda x: {**x, "cu_seqlens_q": [0, 9]}, "cu_seqlens_q: expected cumulative lengths from 0 to at most the 4"),
        (lambda x: {**x, "causal": False}, "causal: a decode is causal, expected True, got False"),
        (lambda x: {"q": x["q"], "topk_indices": x["q"], "scale": 1.0}, "kv: expected gathered keys in kv or a cache"),
        (lambda x: {**{name: x[name] for name in ("q", "kv_cache", "scale")}, "topk_indices": FAR}, FAR_SLOTS),
    ],
)
def test_inputs_that_do_not_fit_are_refused_by_name(spoil: Callable[[Any], dict[str, Any]], text: str) -> None:
    x = mla.case(LSE).inputs("cpu")
    output = torch.zeros(4, 2, 512, dtype=torch.bfloat16)
    with pytest.raises(InputError) as refused:
        mla.assert_close(output, torch.zeros(2, 4), **spoil(x))
    assert text in str(refused.value) and "\n" not in str(refused.value)
    with pytest.raises(InputError, match="expected an output, or an output and its LSE, got 3 results"):
        mla.assert_close(output, output, output, **x)


def test_the_tables_list_what_is_asked_for() -> None:
    tables = tomllib.loads((EXAMPLES.parents[2] / "ci" / "functions.toml").read_text(encoding="utf-8"))
    assert INPUTS.keys() == tables.keys()
    assert all(set(inputs.parameters) <= set(tables[role]["inputs"]) for role, inputs in INPUTS.items())

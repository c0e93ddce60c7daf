"""A case is its id: every case reads back from it, and every malformed id is refused by name."""

import json
import re
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mla_conformance.backends.roles import ROLES
from mla_conformance.cases.case import Case, CaseError
from mla_conformance.roles.decode.case import DecodeCase
from mla_conformance.roles.layer.case import LayerCase
from mla_conformance.roles.prefill.case import PrefillCase
from mla_conformance.tests.drawn import any_case
from mla_conformance.vocabulary.capabilities import CAPABILITIES, _parsed, lists_of

ALL_CASES = [case for capability in CAPABILITIES.values() for case in capability.cases]


@st.composite
def drawn(draw: st.DrawFn) -> Case:
    capability, seed = draw(st.sampled_from(list(CAPABILITIES))), draw(st.integers(0, 2**31))
    return replace(draw(any_case()), capability=capability, seed=seed, scale=draw(st.integers(1, 5000)))


@settings(max_examples=50, deadline=None, derandomize=True, database=None)
@given(case=drawn(), other=drawn())
def test_a_case_reads_back_from_its_id_and_from_json_and_is_told_from_others(case: Case, other: Case) -> None:
    assert Case.parse(case.id) == case == Case.from_json(json.loads(json.dumps(case.to_json())))
    assert Case.parse(f"  {case.id} ".replace(";", " ; ")).id == case.id and len(case.digest) == 12
    assert (case == other) == (case.id == other.id) == (case.digest == other.digest)


def test_every_listed_case_is_itself_once_and_the_version_that_adds_it_is_written_in_full() -> None:
    assert [Case.parse(case.id) for case in ALL_CASES] == ALL_CASES
    assert len({case.id for case in ALL_CASES}) == len(ALL_CASES)
    assert {name for name, capability in CAPABILITIES.items() if not capability.cases} == set()
    assert all(case.capability == name for name, entry in CAPABILITIES.items() for case in entry.cases)
    used = {name for entry in CAPABILITIES.values() for name in entry.lists}
    listed = {f"{role}.{name}".removeprefix(".") for role in ("", *ROLES) for name in lists_of(role)}
    assert used == listed - {"long_contexts"}
    assert _parsed("q=[3] +2026.11.1") == ({"q": (3,)}, (2026, 11, 1), ()) and _parsed("q=[3]") == ({"q": (3,)}, (), ())
    assert _parsed("q=[3] +2026.11.1 -2026.11.3")[2] == (2026, 11, 3)
    with pytest.raises(CaseError, match=r"expected \+YEAR.N.PATCH, the version that adds .*, got \+2026.11"):
        _parsed("q=[3] +2026.11")


WRITE = "latent_write:call=write_latent;q=[5,1];kv=[60,0]"
KEYS = "index_write:call=write_index;dims=128-0-128-128;q=[5,1];kv=[60,0];cache"
LAYER = "cache_write:call=layer;heads=2;decodes=1;q=[5,1];kv=[12,15]"
SPARSE = "sparse_decode:dims=small;heads=2;q=[2,1,3];kv=[20,0,5];page=4;topk=8"
SPARSE_LAYER = "sparse_layer:q=[1];kv=[3]"
CONTRADICTIONS = [
    (f"{WRITE};cache=fp8_index;dims=128-0-128-128", "field cache: write_latent expects one of auto, fp8"),
    (f"{KEYS}=auto", "field cache: write_index expects one of fp8_index"),
    (f"{WRITE};dequantise=1", "only gather_latent does so"),
    (f"{WRITE};ratio=4", "field ratio: expected 1 of write_latent"),
    ("latent_gather:call=gather_latent;q=[5];kv=[60];ranks=2", "field ranks: expected 1 of gather_latent"),
    (f"{WRITE};ranks=2;interleave=24", "field interleave: expected a divisor of page 64, got 24"),
    (f"{KEYS}=fp8_index_shuffled;page=8", "expects a multiple of 16, got 8"),
    (f"slot_mapping:q=[5,1];kv=[60,0];slots=int32;spare={2**26}", "slots beyond int32"),
    (f"{WRITE};cache=fp8_v41;dims=128-0-128-512;latents=tiny_values", "differ in the scales of tiny_values"),
    (f"{WRITE};cache=fp8;scales=pow2", "have no float32 scales"),
    ("compress_keys:call=compress;q=[0];kv=[0]", "expects a token"),
    ("compress_keys:call=compress;q=[4];kv=[0];cache=fp8", "expects cache=auto on one rank"),
    (f"{LAYER};dims=32-16-32-64".replace("decodes=1", "decodes=3"), "at most the 2 requests of a layer, got 3"),
    (f"{LAYER};dims=128-16-32-64", "a layer's weights pick latents, P and V may not exceed L, got 128-16-32-64"),
    (f"{LAYER};dims=32-16-96-64", "P and V may not exceed L, got 32-16-96-64"),
    (LAYER.replace("q=[5,1]", "q=[5,0]"), "layer expects at least one query token a request, got q=[5, 0]"),
    (f"{LAYER};order=decodes_first", "expected more than 5, got q=[5, 1] with 1 decodes"),
    (LAYER.replace("decodes=1", "order=decodes_first"), "expected more than 1, got q=[5, 1] with 0 decodes"),
    (f"{LAYER};dims=32-16-32-64;cache=fp8_ds_mla", "holds 512 + 64 or 512 + 0 values of a 16-bit model, got (64, 16)"),
    (f"{LAYER};ranks=3", "field heads: expected a multiple of the 3 ranks, got 2"),
    (f"{LAYER};ranks=2;out=1", "no out where 2 ranks share the tokens, got weights=selection, out=True"),
    (f"{SPARSE};call=sparse_prefill;cache=fp8", "expected cache=auto, extra=none and ranks=1"),
    (f"{SPARSE};ranks=2;sink=drawn", "expected sink=none, extra=none and lse=1 where 2 ranks share the tokens"),
    (f"{SPARSE};call=sparse_prefill;space=rank_local", "gathered keys are on one rank"),
    (f"{SPARSE};behind=huge", "without lengths every entry counts, expected minus, got huge"),
    (f"{SPARSE};cache=fp4_v41", "expected one of auto, fp8, fp8_ds_mla, fp8_v4, fp8_v41, got 'fp4_v41'"),
    (f"{SPARSE};extra=fp4_v41", "fp4_v41 holds 512 + 0 values of a 16-bit model, got (32, 8)"),
    (f"{SPARSE_LAYER};topk=9", "field topk: expected an even number from 6 to 12, or a multiple of one of 4 beyond"),
    (f"{SPARSE_LAYER};topk=4", "since 4 index heads tell so many groups of keys apart, got 4"),
    (f"{SPARSE_LAYER};dims=32-32-32-96;data=integers", "integers has latents of whole 64 columns"),
    (f"{SPARSE_LAYER};decodes=2", "field decodes: expected at most the 1 requests, got 2"),
    (f"{SPARSE_LAYER};dims=32-32-256-128", "field dims: expected pairs to rotate"),
    (f"{SPARSE_LAYER};ranks=2", "field ranks: a sparse layer's ranks share heads, tp, and no tokens, got 2"),
    (f"{SPARSE_LAYER};tp=3", "field heads: expected a multiple of the 3 ranks, got 4"),
    (f"{SPARSE_LAYER};index_cache=auto;index_scales=pow2", "field index_scales: an index cache of auto has no scales"),
    ("tree_decode:q=[4];kv=[0];parents=[0,0,3,1]", "parents: expected 0 to 1 of token 2 of request 0, got 3"),
    ("tree_decode:q=[2,2];kv=[0,0];parents=[0,0,1,0]", "parents: expected 0 of token 0 of request 1, got 1"),
    ("tree_decode:q=[2,2];kv=[0,0];parents=[0,0,0]", "parents: expected one for each of 4 query tokens, got 3"),
    ("tree_decode:q=[4];kv=[0];tree=bush", "field tree: expected one of random, chain, binary, star"),
    ("tree_decode:q=[4];kv=[0];ranks=2", "tree_decode expects one rank, got 2"),
    ("tree_decode:q=[4097];kv=[0]", "tree_decode expects at most 4,096 query tokens a request, got 4,097"),
    ("pooled_topk:call=select;q=[1];kv=[40];topk=10;pool=4", "expected whole pools"),
    ("pooled_topk:call=select;q=[1];kv=[40];topk=8;tail=1", "expected whole pools"),
]


@pytest.mark.parametrize(
    ("given_as", "said"),
    [
        *CONTRADICTIONS,
        ("", "expected 'capability:field=value;…'"),
        ("lse", "malformed case id 'lse'"),
        ("lse:", "one non-negative length per request, got q=[]"),
        ("lse:q", "field q: expected a list such as [64,0,17], [1x48,7] or, alone, [(5,9)x24], got ''"),
        ("lse:q=5", "field q: expected a list"),
        ("lse:q=[1];q=[2]", "each field once"),
        ("lse:q=[1];capability=lse", "capability before the colon"),
        ("lse:q=[1];colour=red", "unknown case field colour; known fields: capability, call, dtype"),
        ("lse:q=[1];heads=x", "field heads: expected an integer, got 'x'"),
        ("lse:q=[1];heads=0", "field heads: expected a positive number, got 0"),
        ("lse:q=[1];pad=-1", "field pad: expected a non-negative number, got -1"),
        ("lse:q=[1];lse=yes", "field lse: expected 0 or 1, got 'yes'"),
        ("lse:q=[1];dtype=int8", "field dtype: expected one of bf16, fp16, fp32, fp64, e4m3, got 'int8'"),
        ("lse:q=[1];call=verify", "field call: expected one of new_tokens, context_chunk, chunked_context"),
        ("lse:q=[1];dims=gpt", "unknown dims 'gpt'; expected one of v2, v3, r1, glm, small, or P-R-V-L"),
        ("lse:q=[1];dims=16-7-16-32", "qk_rope_head_dim must be an even int"),
        ("lse:q=[1];dims=16-8-16-0", "expected a positive latent dim L, got 0"),
        ("context_chunk:q=[1,2];kv=[5]", "expects one context length per request, got q=[1, 2] kv=[5]"),
        ("decode:q=[1,0];kv=[5,5]", "at least one query token a request, got q=[1, 0]"),
        ("decode:q=[1];kv=[5];out=1", "field out: a decode case has none, only layer and prefill cases; got True"),
        ("lse:q=[1];cache=fp8", "cases have one, and an id without call= is a prefill case; write such as call=decode"),
        ("sparse_layer_ranks:q=[1];kv=[5];decodes=1", "is a prefill case; write such as call=sparse_layer; got 1"),
        ("compress_keys:q=[1];data=warm", "got 'warm'; an id without call= is a prefill case, write call=compress"),
        ("sparse_layer:q=[1];kv=[5];index_heads=1", "field index_heads: expected at least 2, got 1"),
        ("chunked_context:q=[1];kv=[5];workspace=15", "field workspace: workspace_tokens must be at least 16"),
        ("lse:q=[1x65537]", "field q: expected at most 65,536 requests, got 65,537"),
        ("lse:q=[2000000000,2000000000]", "expected at most 2,147,483,648 tokens, got 4,000,000,000 new ones and 0"),
        ("lse:q=[1];seed=-9999999999", "field seed: expected at most 2,147,483,648, got -9999999999"),
        ("chunked_context:q=[1];kv=[2000000000];workspace=1;page=1", "contexts in at most 262,144 slices, got 2,000,0"),
        ("lse:q=[1];dims=" + "9" * 5000 + "-1-1-1", "unknown dims '999"),
        ({"format": 99}, "expected case format 1, got 99"),
        ({"heads": "4"}, "field heads: expected an integer, got '4'"),
        ({"heads": True}, "field heads: expected an integer, got True"),
        ({"lse": 1}, "field lse: expected true or false, got 1"),
        ({"q": "123"}, "field q: expected a list of integers, got '123'"),
        ({"q": [1.5]}, "field q: expected a list of integers"),
        ({"dims": 5}, "field dims: expected a string, got 5"),
    ],
)
def test_a_malformed_id_or_file_says_what_was_expected(given_as: str | dict[str, Any], said: str) -> None:
    with pytest.raises(CaseError, match=re.escape(said)):
        if isinstance(given_as, str):
            Case.parse(given_as)
        else:
            Case.from_json({**Case.of(capability="lse", q=(3,)).to_json(), **given_as})


def test_json_of_every_role_is_read_and_a_case_is_of_the_role_of_its_call() -> None:
    reported = {**Case.of(capability="lse", q=(3,)).to_json(), "cache": "auto", "ranks": 1, "decodes": 0}
    assert Case.from_json(reported).id == "lse:q=[3]"
    with pytest.raises(CaseError, match="indexer, layer, sparse, sparse_layer and tree cases; got 2"):
        Case.from_json({**reported, "ranks": 2})
    with pytest.raises(CaseError, match="expected a field 'capability'"):
        Case.from_json({name: value for name, value in reported.items() if name != "capability"})
    texts = ("lse:q=[1]", "lse:call=decode;q=[1];kv=[5]", "mixed_batch:call=layer;q=[1];kv=[5]")
    assert [type(Case.parse(text)) for text in texts] == [PrefillCase, DecodeCase, LayerCase]
    assert len(Case.parse("lse:q=[1x65536]").q) == 65536
    with pytest.raises(CaseError, match="field call: expected one of decode, got 'layer'"):
        replace(Case.parse(texts[1]), call="layer")

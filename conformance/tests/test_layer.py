"""Judging a whole layer: the honest one passes, and each kind of wrong byte, weight and configuration is found."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings

from mla_conformance.backends.layer.mla_context import workspace_tokens
from mla_conformance.cases.case import Case, CaseError
from mla_conformance.cases.shrink import simpler
from mla_conformance.judging.record import Record
from mla_conformance.judging.verdict import Check, Status
from mla_conformance.problems.cache_bytes import CacheImage
from mla_conformance.problems.memory import storage_bytes
from mla_conformance.problems.operands import ProblemError
from mla_conformance.reference.cache_layout import encode
from mla_conformance.roles.layer.call import LayerCall, RankedCall
from mla_conformance.roles.layer.case import LayerCase, Order
from mla_conformance.roles.layer.driver import Layer, configuration_of
from mla_conformance.roles.layer.weights import PackedLinear, as_linear
from mla_conformance.roles.table import build_problem
from mla_conformance.tests.drawn import little_work
from mla_conformance.trials.context import Context
from mla_conformance.trials.judge_one import judge_one
from mla_conformance.trials.subject import Subject
from mla_conformance.trials.transform import regroup

CPU = torch.device("cpu")
CONTEXT = Context()
EAGER = "mla_conformance.defects.bases:EagerLayer"
WRITES = "cache_write:call=layer;dims=32-16-32-64;heads=2;q=[5,1];kv=[12,15];decodes=1"


def judged(case: Case, reference: str = EAGER) -> Record:
    return judge_one(Subject.of(reference, CPU), case, CONTEXT)


def writes() -> LayerCase:
    case = Case.parse(WRITES)
    assert isinstance(case, LayerCase)
    return case


def layer_call(text: str) -> LayerCall:
    (call,) = build_problem(Case.parse(text), CPU).calls
    assert isinstance(call, LayerCall)
    return call


@settings(max_examples=15, deadline=None, derandomize=True, database=None)
@given(little_work("layer_combinations", heads=("1", "odd", "8"), dims=("32-16-32-64", "64-16-96-64", "r1")))
def test_the_common_layer_passes_whatever_is_drawn(case: Case) -> None:
    assert Case.parse(case.id) == case
    found = judged(case)
    assert found.status is Status.PASS, found.message


def written(text: str) -> CacheImage:
    """A cache into which all that belongs there was written, and nothing else."""
    image = layer_call(text).image
    storage_bytes(image.cache).copy_(image.after)
    assert image.difference() == ""
    return image


@pytest.mark.parametrize("fields", ["", ";cache=fp8;kscale=31000", ";layers=3;pad=2", ";page=1", ";poison=large"])
def test_a_cache_as_it_was_lacks_the_new_tokens(fields: str) -> None:
    image = written(WRITES + fields)
    image.reset()
    assert "of the cache is not the" in image.difference()


@pytest.mark.parametrize("fields", ["", ";cache=fp8", ";layers=3"])
def test_a_byte_in_a_slot_of_no_new_token_is_found(fields: str) -> None:
    image = written(WRITES + fields)
    image.cache.view(torch.uint8)[0, 3, -1] ^= 1
    assert image.difference() == "slot 3 of the cache was written, no new token belongs there"


def test_a_byte_of_another_layer_is_found() -> None:
    image = written(f"{WRITES};layers=3")
    storage_bytes(image.cache)[0] ^= 1
    assert image.difference() == "bytes of the cache's buffer were written that are not this layer's"


def test_a_value_that_is_not_the_token_s_is_found_in_its_slot() -> None:
    image = written(WRITES)
    slot = int(image.slots[-1])
    image.cache[slot // 16, slot % 16, 7] += 1
    assert image.difference() == f"the entry of slot {slot} of the cache is not the new token's"


@pytest.mark.parametrize("factor", [2.0, 0.5, 1.01])
def test_codes_of_another_scale_are_found(factor: float) -> None:
    image = written(f"{WRITES};cache=fp8;kscale=31000")
    codes = encode(*image.latents, "fp8", 0.031 * factor)
    image.cache[image.slots // 16, image.slots % 16] = codes
    assert "is not the code nearest to the new token's" in image.difference()


@pytest.mark.parametrize(("column", "what"), [(3, "latent"), (-1, "rope key")])
def test_a_neighbouring_code_is_found_and_named(column: int, what: str) -> None:
    image = written(f"{WRITES};cache=fp8;kscale=31000")
    slot = int(image.slots[0])
    image.cache.view(torch.uint8)[slot // 16, slot % 16, column] ^= 1
    assert image.difference().startswith(f"the {what} in slot {slot} of the cache is not the code nearest")


def test_either_code_of_a_tie_is_right() -> None:
    image = layer_call(f"{WRITES};cache=fp8;kscale=1000000").image
    kv_c, k_pe = (torch.full_like(x, 1.0625) for x in image.latents)
    image = replace(image, latents=(kv_c, k_pe))
    codes = encode(kv_c, k_pe, "fp8", 1.0)
    image.cache[image.slots // 16, image.slots % 16] = codes
    image.after.copy_(storage_bytes(image.cache))
    image.cache.view(torch.uint8)[image.slots // 16, image.slots % 16] = codes.view(torch.uint8) + 1
    assert codes.float().unique().tolist() == [1.0] and image.difference() == ""


def test_padding_is_not_what_the_unused_cache_holds() -> None:
    for kind in ("nan", "inf", "large"):
        call = layer_call(f"{WRITES};pad=2;poison={kind}")
        before = call.image.cache.view(torch.uint8)[0, 0]
        assert not torch.equal(call.kv_c[-1].view(torch.uint8), before[: 2 * call.kv_c.shape[1]])


def test_rows_of_padding_count_unless_they_stand_behind_prefills() -> None:
    counted = layer_call(f"{WRITES};pad=2")
    assert counted.padding_counts and counted.q.shape[0] == counted.query.shape[0] == 8
    behind = layer_call(
        "cache_write:call=layer;dims=32-16-32-64;q=[1,5];kv=[15,12];decodes=1;pad=2;order=decodes_first"
    )
    assert not behind.padding_counts and (behind.q.shape[0], behind.query.shape[0]) == (6, 8)


def test_special_tiles_stand_in_another_place_of_each_entry() -> None:
    text = "cache_write:call=layer;heads=1;q=[5];kv=[12];cache=fp8_ds_mla;latents="
    for kind, low, high in (("zero_tiles", 0.0, 0.0), ("tiny_tiles", 1e-7, 1e-5)):
        tiles = layer_call(f"{text}{kind}").image.latents[0].float().unflatten(1, (4, 128)).abs().amax(2)
        place = tiles.argmin(1)
        assert place.tolist() == [0, 1, 2, 3, 0] and bool((tiles.amax(1) > 1).all())
        smallest = tiles.amin(1)
        assert low <= float(smallest.min()) and float(smallest.max()) <= high


@pytest.mark.parametrize("latents", ["outliers", "low_rank", "integers", "rising", "tiny_values", "large"])
def test_latents_are_those_of_the_name_and_queries_and_weights_stay(latents: str) -> None:
    text = "mixed_batch:call=layer;dims=32-16-32-64;heads=2;q=[5,1];kv=[40,33];decodes=1"
    normal, shaped = layer_call(text), layer_call(f"{text};latents={latents}")
    assert torch.equal(shaped.query, normal.query) and torch.equal(shaped.weight, normal.weight)
    assert not torch.equal(shaped.kv_c, normal.kv_c)
    size = float(shaped.latents.std() / normal.latents.std())
    assert {"large": 60, "outliers": 2}.get(latents, 0) < size < {"tiny_values": 0.01}.get(latents, 70)


def test_latents_of_a_sliced_layout_lie_beside_poison_with_the_same_values() -> None:
    packed, sliced = (layer_call(f"{WRITES}{layout}") for layout in ("", ";layout=sliced"))
    assert torch.equal(packed.kv_c, sliced.kv_c) and torch.equal(packed.k_pe, sliced.k_pe)
    assert sliced.kv_c.stride(0) == sliced.k_pe.stride(0) > 64 + 16
    assert sliced.kv_c.untyped_storage().data_ptr() == sliced.k_pe.untyped_storage().data_ptr()
    beside = storage_bytes(sliced.kv_c).view(torch.bfloat16).view(-1, sliced.kv_c.stride(0))
    assert int(beside.isnan().sum()) == len(beside) * (sliced.kv_c.stride(0) - 64 - 16)


def test_batches_of_a_model_have_its_weights() -> None:
    text = "call_order:call=layer;dims=32-16-32-64;heads=2;q=[5,1];kv=[40,33];decodes=1;weights=dense"
    case = Case.parse(f"{text};model=1")
    one, other = layer_call(case.id), layer_call(case.varied().id)
    assert torch.equal(one.weight, other.weight) and not torch.equal(one.weight, layer_call(text).weight)
    assert other.image.case.cache_scale == pytest.approx(3 * one.image.case.cache_scale)


@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
def test_dense_weights_weigh_every_latent_and_are_exact_in_the_model_s_dtype_and_in_codes(dtype: str) -> None:
    call = layer_call(f"weight_absorption:call=layer;dtype={dtype};dims=32-16-48-64;heads=3;q=[2];kv=[3];weights=dense")
    assert float((call.weight != 0).double().mean()) > 0.9
    assert float(call.weight.square().sum(0).mean()) == pytest.approx(1.0, rel=0.1)
    dense = as_linear(call.weight, call.query.dtype, CPU)
    assert torch.equal(dense.weight.double(), call.weight.flatten(1).mT)
    packed = PackedLinear(dense)
    assert torch.equal(packed.qweight.double() * packed.unit, dense.weight.double())


def test_ranks_write_each_new_token_once_and_divide_the_heads() -> None:
    text = "layer_dcp:call=layer;dims=32-16-32-64;heads=6;q=[3,1];kv=[40,7];decodes=1"
    alone, (call,) = layer_call(text), build_problem(Case.parse(f"{text};ranks=3"), CPU).calls
    assert isinstance(call, RankedCall) and call.name == "layer on 3 ranks"
    assert sum(len(part.image.slots) for part in call.parts) == 4
    assert [part.q.shape[1] for part in call.parts] == [2, 2, 2]
    assert torch.equal(call.q, alone.q) and torch.equal(call.operands().k, alone.operands().k)
    with pytest.raises(ProblemError, match="a batch on ranks cannot be regrouped; expected ranks=1"):
        call.regrouped(call.parts[0].case, [1, 0], None)


def test_what_one_rank_returns_or_writes_wrongly_is_told(source: str) -> None:
    case = Case.parse("layer_dcp:call=layer;dims=32-16-32-64;heads=2;q=[5];kv=[12];ranks=2")
    shaped, written = (judged(case, f"{source}:{name}") for name in ("Flat", "SilentSecond"))
    assert shaped.message.startswith("layer on 2 ranks: expected output of shape [5, 2, 32], got [160]")
    assert written.message.startswith("layer on 2 ranks: on rank 1, the entry of slot ")


SOURCE = """
from types import SimpleNamespace

from mla_conformance.backends.eager import EagerPrefillBackend
from mla_conformance.backends.eager_decode import EagerDecodeBackend
from mla_conformance.backends.layer.mla_impl import MLACommonImpl
from mla_conformance.backends.layer.mla_state import MLACommonState
from mla_conformance.defects.bases import EagerLayer


class LooksAway(EagerLayer):
    class state_class(MLACommonState):
        def prepare_graph_input_buffers(self, *operands, **options):
            try:
                super().prepare_graph_input_buffers(*operands, **options)
            except ValueError:
                pass

    @classmethod
    def get_state_cls(cls):
        return cls.state_class


class Asserts(LooksAway):
    class state_class(MLACommonState):
        def prepare_graph_input_buffers(self, *operands, **options):
            try:
                super().prepare_graph_input_buffers(*operands, **options)
            except ValueError as error:
                raise AssertionError from error


class Mine(EagerLayer):
    pass


class Silent(EagerLayer):
    class impl_class(MLACommonImpl):
        def do_kv_cache_update(self, *operands):
            pass


class SilentSecond(EagerLayer):
    class impl_class(MLACommonImpl):
        def do_kv_cache_update(self, *operands):
            if self.dcp_rank != 1:
                super().do_kv_cache_update(*operands)


class Flat(EagerLayer):
    class impl_class(MLACommonImpl):
        def forward(self, *operands, **options):
            return super().forward(*operands, **options).flatten()


class Uniform(EagerDecodeBackend):
    supports_nonuniform_queries = False
    returns_lse = False

    def run_decode(self, *operands):
        return super().run_decode(*operands)[0]


class WithoutLse(EagerPrefillBackend):
    returns_lse = False

    def run_prefill_new_tokens(self, q, k, v, return_softmax_lse, *rest):
        assert not return_softmax_lse
        return super().run_prefill_new_tokens(q, k, v, False, *rest)


class Composed(EagerLayer):
    prefill_backend, decode_backend = WithoutLse, Uniform


class Builder:
    def __init__(self, *settings):
        self.build = EagerLayer.get_builder_cls()(*settings).build


class Present(EagerLayer):
    @classmethod
    def get_builder_cls(cls):
        return Builder


class NoBuffer(EagerLayer):
    accept_output_buffer = False


class Collective(EagerLayer):
    class impl:
        pass

    @classmethod
    def get_impl_cls(cls):
        return cls.impl


class Unprepared(EagerLayer):
    @classmethod
    def validate_configuration(cls, **settings):
        return [] if settings["kv_cache_dtype"] == "auto" else ["codes not supported"]
"""


@pytest.fixture
def source(tmp_path: Path) -> str:
    (tmp_path / "layers.py").write_text(SOURCE)
    return str(tmp_path / "layers.py")


def test_a_layer_given_by_a_file_passes(source: str) -> None:
    assert judged(writes(), f"{source}:Mine").status is Status.PASS


def test_a_layer_that_writes_nothing_fails(source: str) -> None:
    found = judged(Case.parse("cache_write:call=layer;dims=32-16-32-64;heads=2;q=[5];kv=[12]"), f"{source}:Silent")
    assert found.status is Status.FAIL and found.message.startswith("layer: the entry of slot ")


REPLAYS = "graph_replay:call=layer;dims=32-16-32-64;heads=2;q=[1x4];kv=[33,70,1,64];cache=fp8;decodes=4"


def test_a_batch_larger_than_captured_must_be_refused_in_whatever_way(source: str) -> None:
    taken, refused = (judged(Case.parse(REPLAYS), f"{source}:{name}") for name in ("LooksAway", "Asserts"))
    assert (taken.status, taken.check) == (Status.FAIL, Check.UNSAFE_REFUSAL)
    assert taken.message.startswith("one request more than captured: it was loaded into the graph's buffers")
    assert refused.status is Status.PASS, refused.message


def test_a_builder_that_takes_no_requests_is_judged_with_decodes_first(source: str) -> None:
    first = judged(Case.parse(WRITES), f"{source}:Present")
    assert (first.status, first.message) == (Status.UNSUPPORTED, "its builder takes no requests, prefills first")
    other = replace(writes(), q=(1, 5), kv=(15, 12), order=Order.DECODES_FIRST)
    found = judged(other, f"{source}:Present")
    assert found.status is Status.PASS, found.message


def test_what_a_layer_declares_unsupported_is_not_asked(source: str) -> None:
    found = judged(Case.parse(f"{WRITES};cache=fp8"), f"{source}:Unprepared")
    assert (found.status, found.message) == (Status.UNSUPPORTED, "codes not supported")


@pytest.mark.parametrize(
    ("fields", "name", "said"),
    [
        ("q=[5,1];kv=[12,15];decodes=1;out=1", "NoBuffer", "output buffer not declared (accept_output_buffer)"),
        (
            "heads=2;q=[1];kv=[15];decodes=1;ranks=2",
            "Collective",
            "ranks that share tokens not declared (can_return_lse_for_decode)",
        ),
        ("q=[5,9];kv=[40,0]", "Composed", "prefill: LSE not declared, by which contexts are merged"),
        ("heads=2;q=[1];kv=[15];decodes=1;ranks=2", "Composed", "decode: LSE not declared"),
        (
            "q=[5,2];kv=[0,9];decodes=2;pad=3",
            "Composed",
            "decode: requests with different numbers of query tokens not supported",
        ),
    ],
)
def test_what_a_layer_cannot_be_driven_with_is_unsupported(fields: str, name: str, said: str, source: str) -> None:
    found = judged(Case.parse(f"cache_write:call=layer;dims=32-16-32-64;{fields}"), f"{source}:{name}")
    assert found.status is Status.UNSUPPORTED and found.message.endswith(said)


def test_a_layer_needs_no_lse_where_nothing_is_merged(source: str) -> None:
    case = "cache_write:call=layer;dims=32-16-32-64;heads=2;q=[5,1];kv=[0,15];decodes=1;pad=2"
    found = judged(Case.parse(case), f"{source}:Composed")
    assert found.status is Status.PASS, found.message


def test_weights_that_stay_are_processed_once_and_others_anew() -> None:
    layer = Subject.of(EAGER, CPU).create(writes())
    call = layer_call(WRITES)
    call.prepare(layer)
    absorbed = layer.impl.W_UV = layer.impl.W_UV.clone()
    call.prepare(layer)
    assert layer.impl.W_UV is absorbed
    replace(call, weight=call.weight * 2).prepare(layer)
    assert torch.equal(layer.impl.W_UV, absorbed * 2)


def test_a_layer_class_has_the_roles_that_it_names_kernels_for() -> None:
    assert {str(role) for role in Subject.of(EAGER, CPU).roles} == {"prefill", "decode", "layer"}


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ("decodes=3", "field decodes: expected at most the 2 requests of a layer, got 3"),
        ("decodes=-1", "field decodes: expected a non-negative number, got -1"),
        ("dims=128-16-32-64", "a layer's weights pick latents, P and V may not exceed L, got 128-16-32-64"),
        ("dims=32-16-96-64", "P and V may not exceed L, got 32-16-96-64"),
        ("order=first", "field order: expected one of prefills_first, decodes_first, got 'first'"),
        ("q=[5,0]", "layer expects at least one query token a request, got q=[5, 0]"),
        ("order=decodes_first", "expected more than 5, got q=[5, 1] with 1 decodes"),
        ("order=decodes_first;decodes=0", "expected more than 1, got q=[5, 1] with 0 decodes"),
        ("cache=fp8_ds_mla", "fp8_ds_mla holds 512 + 64 or 512 + 0 values of a 16-bit model, got (64, 16) of bf16"),
        ("quant=fp8", "field quant: a layer case has none, only prefill cases; got 'fp8'"),
        ("ranks=3", "field heads: expected a multiple of the 3 ranks, got 2"),
        ("ranks=2;out=1", "no out where 2 ranks share the tokens, got weights=selection, out=True"),
        ("latents=tiny", "field latents: expected one of normal, outliers, low_rank"),
    ],
)
def test_a_batch_that_no_layer_has_is_refused(changes: str, said: str) -> None:
    changed = {pair.partition("=")[0] for pair in changes.split(";")}
    kept = [pair for pair in WRITES.partition(":")[2].split(";") if pair.partition("=")[0] not in changed]
    with pytest.raises(CaseError) as caught:
        Case.parse(f"cache_write:{';'.join([*kept, changes])}")
    assert said in str(caught.value)


@pytest.mark.parametrize(
    ("batch", "expected"),
    [
        ("q=[9,7,1,2];kv=[4,5,6,7];decodes=2", {((9, 7), 0), ((1, 2), 2), ((9, 1, 2), 2), ((9, 7, 1), 1)}),
        ("q=[1,2,9];kv=[6,7,4];decodes=2;order=decodes_first", {((2, 9), 1), ((1, 9), 1), ((1, 2), 2)}),
    ],
)
def test_a_simpler_batch_decodes_what_decoded(batch: str, expected: set[tuple[tuple[int, ...], int]]) -> None:
    case = Case.parse(f"mixed_batch:call=layer;dims=32-16-32-64;{batch}")
    found = [simple for simple in simpler(case) if isinstance(simple, LayerCase)]
    fewer = {(simple.q, simple.decodes) for simple in found if len(simple.q) < len(case.q)}
    assert expected <= fewer


def test_decodes_belong_to_layers() -> None:
    with pytest.raises(CaseError, match="field decodes"):
        Case.parse("decode:q=[1,1];kv=[3,4];decodes=1")


@pytest.mark.parametrize("dtype", ["bf16", "fp16", "fp32"])
def test_weights_pick_latents_and_round_nothing(dtype: str) -> None:
    call = layer_call(f"weight_absorption:call=layer;dtype={dtype};dims=32-16-48-64;heads=3;q=[2];kv=[3]")
    assert (call.weight != 0).sum(dim=0).eq(1).all()
    assert set(call.weight.abs().unique().tolist()) == {0.0, 0.5, 1.0}
    for head in call.weight.unbind(1):
        for half in head.split((32, 48), dim=1):
            assert (half != 0).sum(dim=1).le(1).all(), "two columns of a head pick the same latent"
    assert not torch.equal(call.weight[:, 0], call.weight[:, 1])
    latents = torch.randn(7, 64, generator=torch.Generator().manual_seed(0)).to(call.query.dtype)
    dense = as_linear(call.weight, call.query.dtype, CPU)
    exact = torch.einsum("tl,lnc->tnc", latents.double(), call.weight).flatten(1)
    assert torch.equal(dense(latents)[0].double(), exact)
    assert torch.equal(PackedLinear(dense)(latents)[0].double(), exact)


def test_a_captured_layer_has_its_scales_from_before(monkeypatch: pytest.MonkeyPatch) -> None:
    """They come from the host, from where a GPU copies nothing during a capture."""

    def capturing(device: torch.device, call: Callable[[], Any]) -> tuple[Callable[[], Any], Any]:
        def replay() -> Any:
            with monkeypatch.context() as during:
                during.setattr(Layer, "attention_layer", None)
                return call()

        return replay, replay()

    monkeypatch.setattr("mla_conformance.trials.layer_graph.captured", capturing)
    assert judged(Case.parse(REPLAYS)).status is Status.PASS


def test_some_requests_of_a_layer_write_their_own_tokens_alone() -> None:
    problem = build_problem(Case.parse(f"{WRITES};layers=2"), CPU)
    (whole,), (alone,) = problem.calls, regroup(problem, [1]).calls
    assert isinstance(whole, LayerCall) and isinstance(alone, LayerCall)
    assert torch.equal(alone.image.slots, whole.image.slots[-1:]) and torch.equal(alone.kv_c, whole.kv_c[-1:])
    storage_bytes(alone.image.cache).copy_(whole.image.after)
    stray = int(whole.image.slots[:-1].min())
    assert alone.image.difference() == f"slot {stray} of the cache was written, no new token belongs there"


@pytest.mark.parametrize("workspace", [64, 131072, 585600, 9806400])
def test_a_layer_is_configured_for_any_workspace_and_has_128_ki_tokens_at_most(workspace: int) -> None:
    case = Case.parse(f"layer_combinations:call=layer;q=[17,1];kv=[40,17];page=16;workspace={workspace};decodes=1")
    assert isinstance(case, LayerCase)
    assert workspace_tokens(configuration_of(case, torch.bfloat16)) == case.workspace_tokens == min(workspace, 2**17)

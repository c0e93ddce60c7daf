"""The other generations of the interface: what their adapters hand over, and what they make of the answers."""

import inspect
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from mla_conformance.backends import eager, interface, kernel
from mla_conformance.backends.generations import earlier, present
from mla_conformance.backends.loading import as_backend
from mla_conformance.backends.metadata import MLACommonPrefillMetadata, chunked_context_metadata, prefill_metadata
from mla_conformance.reference.chunking import PLANNERS, ContextChunk
from mla_conformance.reference.dimensions import PRESETS

SMALL = PRESETS["small"].head
SIZES: dict[str, Any] = {"num_heads": 2, "scale": 0.2, "kv_lora_rank": 32, "vllm_config": None, **vars(SMALL)}
CPU = torch.device("cpu")


def metadata(queries: list[int], chunks: tuple[ContextChunk, ...]) -> MLACommonPrefillMetadata:
    context = chunked_context_metadata(chunks, torch.zeros(999, 40), CPU) if chunks else None
    table = torch.zeros(len(queries), 1, dtype=torch.int32)
    return prefill_metadata(queries, block_table=table, dtype=torch.bfloat16, device=CPU, chunked_context=context)


def operands(tokens: int, keys: int) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(tokens)
    shapes = (tokens, SMALL.qk_head_dim), (keys, SMALL.qk_head_dim), (keys, SMALL.v_head_dim)
    q, k, v = (torch.randn(n, 2, d, generator=generator).bfloat16() for n, d in shapes)
    return q, k, v


@pytest.mark.parametrize("planner", PLANNERS)
@settings(max_examples=40, deadline=None)
@given(contexts=st.lists(st.integers(0, 90), min_size=1, max_size=5), data=st.data())
def test_every_row_with_keys_is_in_one_run(planner: str, contexts: list[int], data: st.DataObject) -> None:
    chunks = PLANNERS[planner](contexts, workspace_tokens=len(contexts) * 16, page_size=16)
    queries = data.draw(st.lists(st.integers(0, 4), min_size=len(contexts), max_size=len(contexts)))
    starts = list(accumulate(queries, initial=0))
    plan = present.planned_runs(metadata(queries, chunks))
    assert [chunk.index for runs in plan for chunk in runs] == list(range(sum(map(len, plan))))
    for planned, runs in zip(chunks, plan, strict=True):
        assert planner == "equal" or len(runs) == 1
        seen, end = [], 0
        for chunk in runs:
            requests = range(chunk.request_slice.start, chunk.request_slice.stop)
            seen += list(requests)
            assert chunk.num_requests == len(requests)
            assert chunk.token_slice == slice(starts[requests[0]], starts[requests[-1] + 1])
            assert chunk.continuation_token_end == starts[requests[0] + 1]
            assert chunk.seq_lens.tolist() == [planned.seq_lens[request] for request in requests]
            assert chunk.starts.tolist() == [planned.starts[request] for request in requests]
            assert chunk.is_continuation == (chunk.starts[0] > 0)
            assert not chunk.starts[1:].any()
            assert planned.key_start_loc[requests[0]] == end
            end += chunk.num_context_tokens
            assert planned.key_start_loc[requests[-1] + 1] == end
            assert chunk.num_context_tokens == len(chunk.token_to_seq)
            assert chunk.all_rows_active == all(queries[request] for request in requests)
        assert seen == [request for request, length in enumerate(planned.seq_lens) if length]
        # A run ends at a request without keys and before a continuation, and nowhere else.
        joints = [(a.request_slice.stop, b.request_slice.start, b.is_continuation) for a, b in pairwise(runs)]
        assert all(stop < start or continues for stop, start, continues in joints)


class Spy(present.PresentEagerPrefillBackend):
    writes = True

    def supports_out(self) -> bool:
        return self.writes

    def prepare_metadata(self, prefill_metadata: Any) -> None:
        super().prepare_metadata(prefill_metadata)
        self.calls: list[tuple[Any, bool]] = []

    def run_prefill_context_chunk(self, chunk: Any, q: Any, k: Any, v: Any, out: Any = None) -> Any:
        self.calls.append((chunk, out is not None))
        assert chunk in self._prefill_metadata.chunked_context.chunks
        return super().run_prefill_context_chunk(chunk, q, k, v, out)


def driven(cls: type, queries: list[int], chunks: tuple[ContextChunk, ...]) -> tuple[Any, list[Any]]:
    backend = as_backend(cls)(**SIZES)
    backend.prepare_metadata(metadata(queries, chunks))
    results = []
    for index, chunk in enumerate(chunks):
        results.append(backend.run_prefill_context_chunk(index, *operands(sum(queries), chunk.num_tokens)))
    return backend, results


def test_out_is_handed_in_as_the_layer_does_it_and_what_a_class_must_keep() -> None:
    whole = (ContextChunk((0, 0), (5, 9)),)
    split = (ContextChunk((0, 0), (5, 16)), ContextChunk((0, 16), (0, 3)))
    with_gap = (ContextChunk((0, 0), (5, 0)),)
    for plan, given_out in ((whole, [False]), (split, [True, False]), (with_gap, [True])):
        backend, results = driven(Spy, [3, 4], plan)
        assert [out for _, out in backend._target.calls] == given_out
        _, expected = driven(eager.EagerPrefillBackend, [3, 4], plan)
        for (output, lse), (want, want_lse) in zip(results, expected, strict=True):
            assert torch.equal(output, want)
            assert torch.equal(lse, want_lse)
    backend, _ = driven(type("NoOut", (Spy,), {"writes": False}), [3, 4], split)
    assert [out for _, out in backend._target.calls] == [False, False]

    class Forgetful(Spy):
        def run_prefill_context_chunk(self, chunk: Any, q: Any, k: Any, v: Any, out: Any = None) -> Any:
            return super().run_prefill_context_chunk(chunk, q, k, v)

    with pytest.raises(ValueError, match="supports out and returned another tensor"):
        driven(Forgetful, [3, 4], (ContextChunk((0, 0), (5, 0)),))
    with pytest.raises(TypeError, match="clone"):
        as_backend(type("Same", (Spy,), {"clone": lambda self: self}))(**SIZES)
    assert as_backend(eager.EagerPrefillBackend) is eager.EagerPrefillBackend and as_backend(3) == 3
    assert as_backend(Spy) is as_backend(Spy)


def test_new_tokens_get_the_rows_that_count_and_columns_of_padding_are_left_out() -> None:
    class Kernel(Spy):
        given_out: list[bool]

        def run_prefill_new_tokens(self, *args: Any, **given: Any) -> Any:
            assert {len(x) for x in (*args, *given.values()) if isinstance(x, Tensor)} == {7}
            self.given_out.append("out" in given)
            return super().run_prefill_new_tokens(*args, **given)

    q, k, v = (torch.cat([x, torch.full_like(x[:2], torch.nan)]) for x in operands(7, 7))
    for writes in (True, False):
        Kernel.writes, Kernel.given_out = writes, []
        backend = as_backend(Kernel)(**SIZES)
        backend.prepare_metadata(metadata([3, 4], ()))
        out = torch.full((9, 2, SMALL.v_head_dim), torch.nan, dtype=torch.bfloat16)
        output, lse = backend.run_prefill_new_tokens(q, k, v, return_softmax_lse=True)
        assert (output.shape, lse.shape) == (out.shape, (2, 9))
        assert lse[:, 7:].isneginf().all()
        written, _ = backend.run_prefill_new_tokens(q, k, v, return_softmax_lse=True, out=out)
        assert (written is out or not writes) and torch.equal(written, output)
        alone = backend.run_prefill_new_tokens(q[:7], k[:7], v[:7], return_softmax_lse=False, out=out[:7])
        assert torch.equal(alone, output[:7]) and Kernel.given_out == [False, writes, writes]

    def wider(o: Tensor, lse: Tensor) -> tuple[Tensor, Tensor]:
        return torch.nn.functional.pad(o, (0, 8), value=torch.nan), lse

    def padded(kind: Any) -> dict[str, Any]:
        return {"run_prefill_context_chunk": answering(kind.run_prefill_context_chunk, wider)}

    impl = type("Impl", (earlier.EagerPrefillImpl,), {"requires_v_padding": True, **padded(earlier.EagerPrefillImpl)})
    made = {"get_prefill_impl_cls": staticmethod(lambda: impl)}
    earlier_one = type("Earlier", (earlier.EarlierEagerPrefillBackend,), made)
    for cls in (earlier_one, type("Present", (Spy,), {"writes": False, **padded(Spy)})):
        _, [(output, _)] = driven(cls, [3, 4], (ContextChunk((0, 0), (5, 9)),))
        assert output.shape == (7, 2, SMALL.v_head_dim)
        assert output.isfinite().all()


def answering(method: Any, change: Any) -> Any:
    def run(self: Any, *args: Any, **given: Any) -> Any:
        return change(*method(self, *args, **given))

    run.__signature__ = inspect.signature(method)  # type: ignore[attr-defined]
    return run


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        (lambda o, lse: (o.float(), lse), r"expected output .*bfloat16, got .*float32"),
        (lambda o, lse: (o[:1], lse), r"expected output \[3, 2, 16\]"),
        (lambda o, lse: (o, lse.T), r"expected lse \[2, 3\]"),
        (lambda o, lse: (o, lse.bfloat16()), r"expected lse .*float32, got .*bfloat16"),
    ],
)
def test_a_partial_result_of_another_form_is_not_copied_into_shape(wrong: Any, said: str) -> None:
    methods = {"writes": False, "run_prefill_context_chunk": answering(Spy.run_prefill_context_chunk, wrong)}
    with pytest.raises(ValueError, match=said):
        driven(type("Kernel", (Spy,), methods), [3, 4], (ContextChunk((0, 0), (5, 0)),))


@dataclass
class OwnMetadata(MLACommonPrefillMetadata):
    steps: str = ""


class Builder(earlier.EarlierEagerPrefillBackend):
    log: list[str]
    get_prefill_metadata_cls = staticmethod(lambda: OwnMetadata)

    @classmethod
    def create_builder_state(cls, vllm_config: Any, kv_cache_spec: Any, layer_names: Any, device: Any) -> Any:
        cls.log.append("state")
        assert (kv_cache_spec.num_kv_heads, kv_cache_spec.head_size, device) == (1, 40, CPU)
        return earlier.MLAPrefillBuilderState(backend_state={"batches": 0})

    @classmethod
    def post_process_prefill_metadata(cls, prefill_metadata: Any, builder_state: Any, *starts: Tensor) -> None:
        cls.log.append("post")
        builder_state.backend_state["batches"] += 1
        prefill_metadata.steps = f"batch {builder_state.backend_state['batches']} of {starts[0][-1]}"

    @classmethod
    def finalize_attention_metadata(cls, attn_metadata: Any, builder_state: Any, *asked: Any, **named: Any) -> None:
        cls.log.append("finalize")
        names = ("num_prefills", "num_heads", "kv_cache_spec", "mla_dims", "model_config")
        told = dict(zip(names, asked, strict=False)) | named
        attn_metadata.prefill.steps += f", {told['num_prefills']} prefills of {told['num_heads']} heads"
        assert told["mla_dims"].v_head_dim == 16 and told["model_config"].dtype is torch.bfloat16


def test_a_builder_of_the_earlier_generation_makes_its_state_once_and_r1_dims_are_told() -> None:
    Builder.log = []
    backend = as_backend(Builder)(**SIZES)
    for queries in ([3, 4], [5]):
        backend.prepare_metadata(metadata(queries, ()))
    assert Builder.log == ["state", "post", "finalize", "post", "finalize"]
    assert backend._prefill_metadata.steps == "batch 2 of 5, 1 prefills of 2 heads"
    backend = as_backend(type("Only", (earlier.EarlierEagerPrefillBackend,), {"requires_r1_mla_dimensions": True}))
    r1 = interface.MLAPrefillSelectorConfig(torch.bfloat16, PRESETS["r1"].head)
    assert backend.validate_configuration(None, r1) == []
    (reason,) = backend.validate_configuration(None, interface.MLAPrefillSelectorConfig(torch.bfloat16, SMALL))
    assert reason.startswith("MLA dimensions not supported")
    assert not backend.supports_mla_dimensions(SMALL)


def test_a_class_of_vllm_is_asked_in_vllms_own_types(installed: Any) -> None:
    @dataclass(frozen=True, kw_only=True)
    class TheirDimensions:
        qk_nope_head_dim: int
        qk_rope_head_dim: int
        v_head_dim: int

    base = "vllm.v1.attention.backends.mla.prefill.base"
    keys = "vllm.model_executor.layers.quantization.utils.quant_utils"
    for name in (base, keys):
        for parents in accumulate(name.split(".")[:-1], "{}.{}".format):
            installed(parents)
    installed(base, MLADimensions=TheirDimensions)
    installed(keys, kFp8StaticTensorSym="their key")
    members = {
        "__module__": base,
        "supported_mla_dimensions": [TheirDimensions(**vars(SMALL))],
        "supports_quant_output": lambda self, key: key == "their key",
    }
    for kind in (present.PresentEagerPrefillBackend, eager.EagerPrefillBackend):
        backend = as_backend(type("Theirs", (kind,), members))
        assert backend.supports_mla_dimensions(SMALL)
        assert not backend.supports_mla_dimensions(PRESETS["r1"].head)
        config = interface.MLAPrefillSelectorConfig(torch.bfloat16, PRESETS["r1"].head)
        assert len(backend.validate_configuration(kernel.DeviceCapability(9, 0), config)) == 1
        instance = backend(**SIZES)
        assert instance.supports_quant_output(None)
        assert instance._target.vllm_config.model_config.hf_text_config.v_head_dim == SMALL.v_head_dim

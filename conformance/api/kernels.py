"""A kernel of each role around a plain function: the interface on one side, named inputs on the other."""

import threading
from collections.abc import Callable
from dataclasses import dataclass
from inspect import signature
from typing import Any, ClassVar

import torch

from mla_conformance.backends import decode, indexer, interface, roles, sparse
from mla_conformance.backends.declaration import Declaration
from mla_conformance.cases.case import Case
from mla_conformance.engine.machine import find_device
from mla_conformance.files.whole import InputError
from mla_conformance.problems import calls, memory
from mla_conformance.roles.definition import DEFINITIONS
from mla_conformance.trials.trial import Context
from mla_conformance.vocabulary.capabilities import CONFORMS, find_capability

Function = Callable[..., Any]
_QUERIES = {"cu_seqlens_q": "query_start_loc", "max_seqlen_q": "max_query_len"}
_KEYS = {"max_seqlen_k": "max_seq_len", **{name: name for name in ("seq_lens", "block_table", "workspace_starts")}}
_RANKS = ("dcp_world_size", "dcp_rank", "cp_kv_cache_interleave_size", "dcp_tot_seq_lens")


class _AsksAnything:
    """A function declares nothing, so it is asked whatever the case asks."""

    function: ClassVar[Function]  # takes the named inputs, gives the results
    told: ClassVar[dict[str, str]] = {**_QUERIES, **_KEYS}  # inputs that are fields of the metadata, with their names
    own: ClassVar[tuple[str, ...]] = ()  # inputs that an instance is constructed with

    @staticmethod
    def get_name() -> str:
        return "function"

    @classmethod
    def validate_configuration(cls, device_capability: Any, selector_config: Any) -> list[str]:
        return []

    def ask(self, metadata: Any, lse: bool = True, **inputs: Any) -> Any:
        """What the function returns, without the LSE if nobody asked for it; it is given the inputs that there are."""
        inputs |= {name: getattr(metadata, field, None) for name, field in self.told.items()}
        inputs |= {name: getattr(self, name) for name in self.own}
        if getattr(metadata, "dcp_world_size", 1) > 1:
            inputs |= {name: getattr(metadata, name, None) for name in _RANKS}
        result = self.function(**{name: value for name, value in inputs.items() if value is not None})
        return result if lse else decode.output_of(result)


class _Prefill(_AsksAnything, interface.MLAPrefillBackend):
    told = _QUERIES
    own = ("scale",)

    def supports_quant_output(self, quant_key: Any) -> bool:
        return True

    # A call hands over by keyword what is optional.
    def run_prefill_new_tokens(  # type: ignore[override]
        self, q: Any, k: Any, v: Any, return_softmax_lse: bool, **further: Any
    ) -> Any:
        metadata = self._prefill_metadata
        keys = {"cu_seqlens_k": metadata.query_start_loc, "max_seqlen_k": metadata.max_query_len, "causal": True}
        return self.ask(metadata, return_softmax_lse, q=q, k=k, v=v, **keys, **further)

    def run_prefill_context_chunk(self, chunk_idx: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> Any:
        context = self._prefill_metadata.chunked_context
        assert context is not None, "a chunk is of a context"
        starts, longest = context.cu_seq_lens[chunk_idx], context.max_seq_lens[chunk_idx]
        return self.ask(self._prefill_metadata, q=q, k=k, v=v, cu_seqlens_k=starts, max_seqlen_k=longest, causal=False)


class _Decode(_AsksAnything, decode.MLADecodeBackend):
    own = ("scale", "kv_lora_rank", "kv_cache_dtype")

    def run_decode(self, ql_nope: Any, q_pe: Any, kv_cache: torch.Tensor, k_scale: torch.Tensor) -> Any:
        q = torch.cat((ql_nope, q_pe), dim=-1)
        result = self.ask(self._decode_metadata, q=q, kv_cache=kv_cache, k_scale=k_scale, causal=True)
        # What was written into q was written into an input, which the caller watches in its two parts.
        ql_nope.copy_(q[..., : self.kv_lora_rank])
        q_pe.copy_(q[..., self.kv_lora_rank :])
        return result


def _asks(entry: Callable[..., Any], *layouts: str, lists: bool = True) -> Any:
    """The method of an entry whose operands are inputs by the names that the interface has for them."""

    def run(self: Any, *operands: Any, **further: Any) -> Any:
        inputs = signature(entry).bind(self, *operands, **further).arguments
        del inputs["self"]
        metadata, lse = self._sparse_metadata, inputs.pop("return_softmax_lse", True)
        inputs |= {"index_space": metadata.index_space.value} if lists else {}
        return self.ask(metadata, lse, **inputs, **{name: getattr(self, name) for name in layouts})

    return run


class _Sparse(_AsksAnything, sparse.MLASparseBackend):
    own = ("scale", "kv_lora_rank")
    run_sparse_decode = _asks(sparse.MLASparseBackend.run_sparse_decode, "kv_cache_dtype", "extra_kv_cache_dtype")
    run_sparse_prefill = _asks(sparse.MLASparseBackend.run_sparse_prefill)


class _Indexer(_AsksAnything, indexer.MLAIndexerBackend):
    own = ("kv_cache_dtype",)
    run_index_logits = _asks(indexer.MLAIndexerBackend.run_index_logits, lists=False)
    run_index_topk = _asks(indexer.MLAIndexerBackend.run_index_topk)


_KERNELS: dict[roles.Role, type] = {
    roles.Role.PREFILL: _Prefill, roles.Role.DECODE: _Decode, roles.Role.SPARSE: _Sparse, roles.Role.INDEXER: _Indexer,
}  # fmt: skip


def kernel_around(function: Function, role: roles.Role, declaration: Declaration) -> Any:
    """A class of the role's interface whose calls go to ``function``; results of a top-k are there without a call."""
    parts = {"function": staticmethod(function), "declaration": declaration}
    return type(name_of(function), (_KERNELS.get(role, _AsksAnything),), parts)


def name_of(function: Function) -> str:
    """What messages call a function."""
    return str(getattr(function, "__name__", type(function).__name__))


@dataclass(frozen=True)
class HandedInputs:
    """What was handed out last, with its bytes; the context makes it again as it was, and what is expected."""

    problem: calls.Problem
    context: Context
    out: memory.Guarded | None
    before: memory.Snapshot


LAST = threading.local()  # what each thread was handed; nothing earlier, since it may hold most of a GPU's memory


def find_torch_device(wanted: str | torch.device) -> torch.device:
    """The device of this name, an InputError if it is not there; by default CUDA where there is a GPU."""
    kind, _, number = str(wanted).partition(":")
    if kind not in ("", "cpu", "cuda") or (number and not (kind == "cuda" and number.isdecimal())):
        raise InputError(f"device: expected cpu, cuda or a GPU such as cuda:1, got {str(wanted)!r}")
    device, count = find_device(kind), torch.cuda.device_count()
    if device is None or int(number or 0) >= max(1, count):
        raise InputError(f"device {wanted!s}: expected cpu, or one of the CUDA devices that torch sees: {count}")
    return torch.device(kind, int(number)) if number else device


def hand_out(case: Case, device: str | torch.device) -> dict[str, Any]:
    """The named inputs of a case's only call, in memory of their own; an InputError of one that takes several."""
    where, context = find_torch_device(device), Context()
    problem = context.problem(case, where) if find_capability(case.capability).procedure == CONFORMS else None
    if problem is None or len(problem.calls) > 1:
        raise InputError(f"{case.id}: decided by several calls; expected mla.judge(case, function), which makes them")
    call = problem.calls[0]
    out = call.output_buffer()
    inputs: dict[str, Any] = {}
    kernel = kernel_around(lambda **named: inputs.update(named), case.role, Declaration())
    instance = DEFINITIONS[case.role].kernel(kernel, case, problem.dtype, where)
    call.prepare(instance)
    call.invoke(instance, out)
    # Every tensor that must not be written, and once: what is owned, and what was joined from it.
    watched = problem.caller_owned
    known = {x.untyped_storage().data_ptr() for x in watched.values()}
    tensors = {name: x for name, x in inputs.items() if isinstance(x, torch.Tensor) and name != "out"}
    watched |= {name: x for name, x in tensors.items() if x.untyped_storage().data_ptr() not in known}
    before = memory.Snapshot(watched)
    before.keep()
    LAST.handed = HandedInputs(problem, context, out, before)
    memory.poison_allocator(call.result_shape, problem.output_dtype, where, case.poison)
    return inputs

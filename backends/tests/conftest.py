"""Stand-ins for GPU libraries: kernels that follow a library's documented conventions, behind its recorded signature.

``signatures.json`` holds the parameters of every function that an adapter calls, for every version that is claimed,
recorded from the packages by ci/signatures.py: most of them do not install where CI runs, and none runs there.
"""

import inspect
import json
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

from mla_conformance.backends import loading, references
from mla_conformance.backends.kernel import output_dtype
from mla_conformance.backends.roles import Role
from mla_conformance.cases.case import Case
from mla_conformance.judging import record
from mla_conformance.reference.attention import attention
from mla_conformance.roles import definition
from mla_conformance.trials import trial
from mla_conformance.trials.subject import Subject

CONTEXT = trial.Context()
_RECORDED = json.loads((Path(__file__).parent / "signatures.json").read_text(encoding="utf-8"))


def _signature(label: str, function: str) -> inspect.Signature:
    parameters = []
    for name, kind, optional in _RECORDED[label][function]:
        default = None if optional and kind != "VAR_POSITIONAL" else inspect._empty
        parameters.append(inspect.Parameter(name, inspect._ParameterKind[kind], default=default))
    return inspect.Signature(parameters)


@pytest.fixture
def recorded() -> Callable[[str, str, Callable[..., Any]], Callable[..., Any]]:
    """``recorded(label, function, kernel)``: the kernel behind the library's signature, with its arguments by name."""

    def bind(label: str, function: str, kernel: Callable[..., Any]) -> Callable[..., Any]:
        signature = _signature(label, function)

        def stand_in(*args: Any, **kwargs: Any) -> Any:
            bound = signature.bind(*args, **kwargs)
            bound.apply_defaults()
            return kernel(bound.arguments)

        stand_in.__signature__ = signature  # type: ignore[attr-defined]
        return stand_in

    return bind


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> Callable[..., ModuleType]:
    def install(name: str, **attributes: Any) -> ModuleType:
        module = ModuleType(name)
        vars(module).update(attributes)
        monkeypatch.setitem(sys.modules, name, module)
        return module

    return install


@pytest.fixture
def provided(recorded: Callable[..., Any], installed: Callable[..., ModuleType]) -> Callable[..., ModuleType]:
    """``provided(label, module, {function: kernel}, name=value, ...)``: a library of kernels behind their signatures.

    A function that another file than the module's defines is named with it: ``FILE:FUNCTION``.
    """

    def provide(label: str, module: str, kernels: dict[str, Any], **others: Any) -> ModuleType:
        for where, kernel in kernels.items():
            file, _, name = where.rpartition(":")
            found = recorded(label, f"{file or module.replace('.', '/') + '.py'}:{name}", kernel)
            others[name.rpartition(".")[2]] = found
        return installed(module, **others)

    return provide


@pytest.fixture
def planned(recorded: Callable[..., Any]) -> Callable[..., Any]:
    """``planned(label, name, run, begin)``: FlashInfer's class, whose plan ``run`` finds under ``planned``.

    ``begin`` sees what a wrapper is made with, and ``keep`` each plan.
    """

    def make(label: str, name: str, run: Any, begin: Any, keep: Any = lambda wrapper, a: None) -> Any:
        class Wrapper:
            planned: dict[str, Any]

            def __init__(self, *args: Any, **kwargs: Any) -> None:
                recorded(label, f"{name}.__init__", lambda a: begin(self, a))(self, *args, **kwargs)
                self.run = recorded(label, f"{name}.run", lambda a: run(self, a)).__get__(self)
                self.plan = recorded(label, f"{name}.plan", self._keep).__get__(self)

            def _keep(self, a: Any) -> None:
                self.planned = dict(a)
                keep(self, a)

        Wrapper.run = recorded(label, f"{name}.run", run)
        return Wrapper

    return make


def exact(q: Tensor, k: Tensor, v: Tensor, queries: Tensor, keys: Tensor, scale: float, causal: bool) -> Any:
    """Output [T, N, V] of the dtype that q's gives and natural LSE [N, T] float32; a row without keys is 0 and -inf."""
    starts: Any = {"query_start_loc": queries.tolist(), "key_start_loc": keys.tolist()}
    state = attention(q, k, v, **starts, scale=scale, causal=causal)
    return state.output.to(output_dtype(q.dtype)), state.lse.float()


def absorbed(q: Tensor, pages: Tensor, lengths: Any, query_lens: Any, tables: Any, scale: float) -> Any:
    """What a paged MLA kernel computes of q [T, N, L + R] and pages [blocks, page, L + R], in float64.

    ``tables``: the pages of each request, and anything behind them. Returns output [T, N, L] of q's dtype and natural
    LSE [N, T].
    """
    page = pages.shape[1]
    used = [[int(block) for block in row[: -(-n // page)]] for row, n in zip(tables, lengths, strict=True)]
    rows = [pages[blocks].flatten(0, 1)[:length] for blocks, length in zip(used, lengths, strict=True)]
    keys = torch.cat(rows)[:, None, :]
    queries, ends = (torch.tensor([0, *x]).cumsum(0) for x in (query_lens, lengths))
    return exact(q, keys, keys[..., :512], queries, ends, scale, True)


kernel = pytest.fixture(name="kernel")(lambda: exact)
mla_kernel = pytest.fixture(name="mla_kernel")(lambda: absorbed)


@pytest.fixture
def passes(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Subject]:
    def check(name: str, role: Role, *cases: str) -> Subject:
        adapter = loading.load_role(references.parse_reference(name), role)
        for needed in ("missing_dependencies", "broken_dependencies"):
            monkeypatch.setattr(adapter, needed, list)
        monkeypatch.setattr(adapter, "supports_compute_capability", lambda device_capability: True)
        subject = Subject.of(name, torch.device("cpu"))
        for case in cases:
            found = trial.judge_one(subject, Case.parse(case), CONTEXT)
            assert found.status is record.Status.PASS, f"{case}: {found.message}"
        return subject

    return check


@pytest.fixture
def conforms(passes: Callable[..., Subject]) -> Callable[..., Subject]:
    def check(name: str, dtype: str = "bf16") -> Subject:
        new, context = "q=[3,0,9]", "call=context_chunk;q=[3,4,2];kv=[7,0,17]"
        batches = (f"call=new_tokens;{new}", f"call=new_tokens;{new};lse=0;out=1", context)
        capability = "fp8_operands" if dtype == "e4m3" else "lse"
        return passes(name, Role.PREFILL, *(f"{capability}:dtype={dtype};heads=2;pad=1;{batch}" for batch in batches))

    return check


@pytest.fixture
def prepared() -> Callable[[Subject, str], tuple[Any, Any]]:
    """``prepared(subject, case)``: a kernel that has the metadata of a case's only call, and the call."""

    def make(subject: Subject, text: str) -> tuple[Any, Any]:
        case = Case.parse(text)
        kernel, (call,) = subject.create(case), definition.build_problem(case, torch.device("cpu")).calls
        call.prepare(kernel)
        return kernel, call

    return make

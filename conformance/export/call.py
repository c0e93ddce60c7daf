"""The call as source text: recorded while a new instance makes it."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from mla_conformance.export.failing import Reproduced
from mla_conformance.export.inputs import named_tensors
from mla_conformance.export.own import OwnClass
from mla_conformance.export.program import Program, written
from mla_conformance.export.recording import Handle, Recorder
from mla_conformance.roles.decode.call import DecodeCall
from mla_conformance.roles.decode.role import decode_kernel
from mla_conformance.roles.prefill.role import prefill_kernel


@dataclass(frozen=True)
class WrittenCall:
    """A call, written down.

    Attributes:
        program: what was called.
        tensors: what the backend was handed, by the names that the program gives it.
    """

    program: Program
    tensors: Mapping[str, torch.Tensor]


def written_call(found: Reproduced, own: OwnClass | None) -> WrittenCall:
    """Make the call on a new instance, and write down what was seen.

    Raises:
        NotWritable: something of it cannot be written down.
    """
    case, call = found.problem.case, found.call
    create: Callable[..., Any] = decode_kernel if isinstance(call, DecodeCall) else prefill_kernel
    out = call.output_buffer()
    tensors = named_tensors(call) | ({"out": out.view} if out else {})
    with Recorder() as recorder:
        loaded: Any = found.subject.class_of(case.role)
        if own is not None:
            loaded = Handle(loaded, recorder, own.module, f".{loaded.__name__}")
        instance = create(loaded, case)
        call.prepare(instance)
        value = call.invoke(instance, out)
    results = list(value) if isinstance(value, tuple | list) else [value]
    return WrittenCall(written(recorder.steps, tensors, results), tensors)

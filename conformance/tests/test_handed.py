"""What a call was handed is afterwards what it was, in form and bytes."""

from collections import namedtuple
from collections.abc import Callable
from typing import Any

import pytest
import torch

from mla_conformance.backends.eager import EagerPrefillBackend
from mla_conformance.backends.references import BackendReference
from mla_conformance.backends.roles import Role
from mla_conformance.cases.case import Case
from mla_conformance.judging.record import Record
from mla_conformance.judging.verdict import Check, Status
from mla_conformance.trials.judge_one import judge_one
from mla_conformance.trials.subject import Subject
from mla_conformance.trials.trial import Context

PLAIN, CONTEXT = "new_tokens:dims=small;q=[5,3]", "chunked_context:dims=small;q=[5,3];kv=[40,3];workspace=32"
OUT, SLICED = "out_tensor:dims=small;q=[5,3];out=1", "strided_inputs:dims=small;q=[5,3];layout=sliced"
HALF = "strided_inputs:dims=small;q=[5,3];layout=kv_b_proj"
Operands = namedtuple("Operands", "q k v out metadata")


class Touches(EagerPrefillBackend):
    """Right; does something to what it was handed."""

    touch: Callable[[Operands], object] = staticmethod(lambda operands: None)

    def run_prefill_new_tokens(self, q: Any, k: Any, v: Any, *arguments: Any, **options: Any) -> Any:
        found = super().run_prefill_new_tokens(q, k, v, *arguments, **options)
        type(self).touch(Operands(q, k, v, options.get("out"), self._prefill_metadata))
        return found


def judged(text: str, **attributes: Callable[..., Any]) -> Record:
    """The record of a kernel with these functions on a case."""
    case = Case.parse(text)
    kernel = type("Mine", (Touches,), {name: staticmethod(function) for name, function in attributes.items()})
    subject = Subject(BackendReference("Mine", f"{__name__}:Mine"), torch.device("cpu"))
    vars(subject).update(_classes={Role.PREFILL: kernel}, unavailable=[], roles=(case.role,), _missing={case.role: []})
    return judge_one(subject, case, Context())


def replaces(name: str, value: Callable[[Any], Any]) -> Callable[[Operands], object]:
    """Puts another object into a field of the metadata."""

    def replace(operands: Operands) -> None:
        owner, *rest = name.split(".")
        part = operands.metadata if not rest else getattr(operands.metadata, owner)
        setattr(part, name.rpartition(".")[2], value(getattr(part, name.rpartition(".")[2])))

    return replace


FORMS = {
    "resized": (PLAIN, lambda o: o.q.resize_(2, 4, 16), "shape of q of new tokens was "),
    "emptied": (PLAIN, lambda o: o.k.untyped_storage().resize_(0), "k of new tokens"),
    "grown": (PLAIN, lambda o: o.v.untyped_storage().resize_(2**16), "bytes of v of new tokens was "),
    "transposed": (PLAIN, lambda o: o.v.transpose_(0, 1), "shape of v of new tokens was "),
    "unsqueezed": (PLAIN, lambda o: o.v.unsqueeze_(0), "shape of v of new tokens was "),
    "restrided": (PLAIN, lambda o: o.q.as_strided_(o.q.shape, (0, 0, 1)), "strides of q of new tokens was "),
    "learning": (PLAIN, lambda o: o.q.requires_grad_(), "requires_grad of q of new tokens was False, is True"),
    "another": (PLAIN, lambda o: o.k.set_(o.k.clone()), "address of k of new tokens was "),
    "data": (PLAIN, lambda o: setattr(o.v, "data", o.v.double()), "dtype of v of new tokens was "),
    "out resized": (OUT, lambda o: o.out.unsqueeze_(0), "shape of out was "),
    "out learning": (OUT, lambda o: o.out.requires_grad_(), "requires_grad of out was False"),
    "metadata tensor": (PLAIN, replaces("query_start_loc", torch.clone), "metadata.query_start_loc was replaced"),
    "metadata length": (PLAIN, replaces("max_query_len", lambda old: old + 1), "metadata.max_query_len was replaced"),
    "metadata gone": (PLAIN, replaces("block_table", lambda old: None), "metadata.block_table was replaced"),
    "plan tensor": (CONTEXT, replaces("chunked_context.starts", torch.clone), "chunked_context.starts was replaced"),
    "plan list": (
        CONTEXT,
        lambda o: o.metadata.chunked_context.seq_tot.append(1),
        "metadata.chunked_context.seq_tot was replaced",
    ),
}


@pytest.mark.parametrize("name", FORMS)
def test_a_form_that_a_call_changes_is_its_failure(name: str) -> None:
    case, touch, said = FORMS[name]
    record = judged(case, touch=touch)
    assert record.status is Status.FAIL and record.check in (Check.PROCESS_STATE, Check.MUTATED_INPUT), record.detail
    assert said in record.message


def zeroes(name: str, places: Callable[[torch.Tensor], int]) -> Callable[[Operands], object]:
    """Clears the element that stands so far from the first one of an operand."""

    def clear(operands: Operands) -> None:
        tensor = getattr(operands, name)
        tensor.as_strided((1,), (1,), tensor.storage_offset() + places(tensor)).zero_()

    return clear


BESIDE = {
    "columns before v": (HALF, zeroes("v", lambda v: -1)),
    "columns behind q": (SLICED, zeroes("q", lambda q: q.shape[-1])),
    "columns behind k": (SLICED, zeroes("k", lambda k: k.shape[-1])),
}


@pytest.mark.parametrize("name", BESIDE)
def test_what_is_written_beside_a_tensor_is_a_failure(name: str) -> None:
    case, touch = BESIDE[name]
    record = judged(case, touch=touch)
    assert (record.status, record.check) == (Status.FAIL, Check.MUTATED_INPUT), record.message


def test_what_a_library_hangs_on_metadata_is_no_change() -> None:
    assert judged(PLAIN, touch=lambda o: setattr(o.metadata, "wrapper", object())).status is Status.PASS

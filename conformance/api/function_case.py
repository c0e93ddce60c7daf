"""A case as a function is asked it, and which cases no function can be asked. No torch until tensors are wanted."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from mla_conformance.backends.roles import Role
from mla_conformance.cases.case import Case, CaseError
from mla_conformance.files.whole import InputError
from mla_conformance.vocabulary.capabilities import CapabilityError, find_capability

if TYPE_CHECKING:
    import torch

NO_LAYER = (
    "a layer keeps weights and a cache from call to call, which no function does; judge its kernels as functions, by "
    "role prefill and decode, or the class: mla-conformance certify --backend file.py:Class"
)
NO_CACHE = (
    "a cache operation is judged by what it writes into memory around its operands, which no result shows; judge a "
    "class: mla-conformance certify --backend file.py:Class"
)
NO_STEP = (
    "a top-k over logits, and the preparation of index queries and keys, are judged by the conventions that a class "
    "declares; judge a class: mla-conformance certify --backend file.py:Class"
)
NO_TREE = (
    "a tree's masks are in the metadata that a class is prepared with, so judge a class: mla-conformance certify "
    "--backend file.py:Class"
)
NO_FUNCTION = {
    Role.LAYER: NO_LAYER,
    Role.SPARSE_LAYER: NO_LAYER,
    Role.TOPK: NO_STEP,
    Role.PREPARE: NO_STEP,
    Role.COMPRESS: NO_CACHE,
    Role.CACHE: NO_CACHE,
    Role.TREE: NO_TREE,
}
"""Why functions cannot be judged in some roles."""


@dataclass(frozen=True, repr=False)
class FunctionCase:
    """A case of the suite that a plain function can be asked.

    Attributes:
        suite_case: the case; its attributes are the fields of the id, such as ``suite_case.heads``.
    """

    suite_case: Case

    @property
    def id(self) -> str:
        """The case id, which names the same inputs on every machine."""
        return self.suite_case.id

    def __str__(self) -> str:
        return self.id

    def __repr__(self) -> str:
        return f"mla.case({self.id!r})"

    def inputs(self, device: "str | torch.device" = "") -> dict[str, Any]:
        """Named tensors and numbers for one call; docs/python-api.md has the table of each role.

        :func:`assert_conforms` judges what was made of the inputs that this thread was handed last. They are new
        tensors each time, with the same values.

        Args:
            device: ``cpu`` or ``cuda``, or one GPU as ``cuda:1``; by default CUDA where there is a GPU.

        Raises:
            InputError: no such device, or a case that takes several calls, which ``judge`` makes.
        """
        from mla_conformance.api.kernels import hand_out

        return hand_out(self.suite_case, device)


def find_case(id: str) -> FunctionCase:
    """The case of an id, as reports and failure messages print it.

    Raises:
        InputError: no case id, or a case that no function can be asked; says what to do.
    """
    try:
        found = Case.parse(id)
        reason = why_no_function(found)
    except (CaseError, CapabilityError) as error:
        raise InputError(str(error)) from error
    if reason:
        raise InputError(f"{id}: {reason}")
    return FunctionCase(found)


def why_no_function(case: Case) -> str:
    """Why a function cannot be asked a case; empty if it can."""
    capability = find_capability(case.capability)
    if case.role in NO_FUNCTION:
        return NO_FUNCTION[case.role]
    if capability.probes_refusals or capability.captures:
        return f"{capability.name} judges what a class declares; expected a function's case, or certify a class"
    return "it asks for merge_attn_states, which a class has; certify one" if case.own_merge else ""

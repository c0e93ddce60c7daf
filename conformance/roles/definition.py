"""What a role is: one value, from which everything that differs between roles is taken; and all of them."""

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib import import_module
from typing import Any

import torch

from mla_conformance.backends import foreign, operands, roles
from mla_conformance.backends.declaration import Declaration
from mla_conformance.backends.kernel import DeviceCapability
from mla_conformance.cases.case import Case
from mla_conformance.cases.space import Space
from mla_conformance.driving.driver import Observation
from mla_conformance.judging import record, steps
from mla_conformance.judging.golden import Golden, golden_attention
from mla_conformance.judging.judge import AttentionJudge
from mla_conformance.judging.tolerance import tolerance
from mla_conformance.problems.calls import KernelCall, Problem
from mla_conformance.problems.operands import TORCH_DTYPES

KERNEL_SIZES = ("num_heads", "scale", "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
"""The arguments that the constructors of attention kernels have in common."""


_CALLED = {  # what configurations and constructors call otherwise than cases do
    **{"num_heads": "heads", "scale": "softmax_scale", "mla_dimensions": "dimensions", "block_size": "page"},
    **{"kv_cache_dtype": "cache", "tile_scales": "scales", "scale_format": "scales", "dcp_world_size": "ranks"},
    **{"index_space": "space", "topk_tokens": "topk", "topk_length": "length", "duplicates": "repeats"},
    **{"row_starts": "packed", "compress_ratio": "ratio", "state_block_size": "state_page", "paged": "is_paged"},
    **{"fold_scales": "fold", "index_n_heads": "index_heads", "skip_topk": "shared", "tp_size": "tp"},
    **{"index_kv_cache_dtype": "index_cache"},
}


def facts_of(case: Case, dtype: torch.dtype) -> dict[str, Any]:
    """What is told of a case of any role, by the names that configurations and constructors have for it."""
    dims = {name: getattr(case.dimensions, name) for name in ("qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")}
    found = {name: getattr(case, own) for name, own in _CALLED.items() if hasattr(case, own)}
    return {"call": case.call, "dtype": dtype, "kv_lora_rank": case.kv_lora_rank, **dims, **found}


def filled(table: Any, case: Case, told: Mapping[str, Any]) -> Any:
    """A table, each field of which is a fact that is told, or else what the case has by that name."""
    fields = table.__annotations__
    if missing := [name for name in fields if name not in told and not hasattr(case, name)]:
        raise TypeError(f"role {case.role}: expected a fact for {table.__name__}.{missing[0]}, got none")
    return table(**{name: told[name] if name in told else getattr(case, name) for name in fields})


@dataclass(frozen=True, kw_only=True)
class RoleDefinition:
    role: roles.Role  # its name
    # makes the calls of a case, given the case, a device and a salt that is drawn with beside the case
    batch: Callable[[Any, torch.device, str], Any]
    config: Any  # what its classes are validated against, a named tuple
    # the arguments that its classes are constructed with, beside ``vllm_config``
    constructed: tuple[str, ...] = KERNEL_SIZES
    # what configurations and constructors are told beside :func:`facts_of`, or otherwise
    facts: Callable[[Any, torch.dtype], dict[str, Any]] = lambda case, dtype: {}
    golden: Callable[[Problem], Golden] = golden_attention  # the result that is expected of a problem
    judge: Callable[..., steps.Steps] = AttentionJudge  # the steps of its verdicts
    # what files hold of the roles of this project: what varies in its cases, as `case.py`, its lists, as `cases.txt`,
    # and its entries, as `capabilities.toml`
    space: Space | None = None
    lists: str = ""
    capabilities: str = ""

    def require_whole(self, case: Case) -> None:
        dtype = TORCH_DTYPES[case.dtype]
        if self.config is not None:  # of a layer that its kernels make these are asked
            self.config_of(case, dtype)
        told = self.told(case, dtype)
        if unknown := [name for name in self.constructed if name not in told]:
            raise TypeError(f"role {self.role}: expected a fact for the constructor's {unknown[0]}, got none")
        for call in self.batch(case, torch.device("cpu"), "").calls():
            if call.interface is not None:
                _require_operands(call)
                if missing := [name for name in self.role.required if not hasattr(call.interface, name)]:
                    raise TypeError(f"{call.interface.__name__}: expected a method {missing[0]}, got none")

    def told(self, case: Case, dtype: torch.dtype) -> dict[str, Any]:
        return facts_of(case, dtype) | self.facts(case, dtype)

    def config_of(self, case: Case, dtype: torch.dtype, **otherwise: Any) -> Any:
        return filled(self.config, case, self.told(case, dtype) | otherwise)

    def kernel(self, kernel: Any, case: Any, dtype: torch.dtype, device: torch.device) -> Any:
        told = self.told(case, dtype)
        given = {name: told[name] for name in self.constructed if told[name] is not None}
        return kernel(**given, vllm_config=None)

    def reasons(self, kernel: Any, case: Any, dtype: torch.dtype, capability: DeviceCapability | None) -> list[str]:
        return foreign.reasons_of(kernel.validate_configuration(capability, self.config_of(case, dtype)))


def _require_operands(call: KernelCall) -> None:
    where = f"{call.interface.__name__}.{call.entry}"
    entry = getattr(call.interface, call.entry, None)
    if entry is None:
        raise TypeError(f"{where}: expected the entry that the role's calls drive, got none")
    named = {name: x for name, x in call.named.items() if x is not None}
    taken, forms = inspect.signature(entry).parameters, operands.forms_of(entry)
    for name, x in {**call.given, **call.written, **named}.items():
        if name not in taken:
            raise TypeError(f"{where}: expected an operand {name}, which the role's calls hand over, got none")
        if isinstance(x, torch.Tensor) and name not in forms:
            raise TypeError(f"{where}.{name}: expected a form of it, Annotated[Tensor, Form(...)], got none")
        if name in forms and forms[name].written != (name in call.written):
            raise TypeError(f"{where}.{name}: expected written={name in call.written}, as calls hand it over")


class _Definitions(dict[str, RoleDefinition]):
    def __missing__(self, role: str) -> RoleDefinition:
        if role not in roles.ROLES or roles.ROLES[role].file:
            raise KeyError(role)
        self[role] = getattr(import_module(f"mla_conformance.roles.{role}.problem"), role.upper())
        return self[role]


DEFINITIONS = _Definitions()  # one from outside joins them (``trials/role_file.py``)


def build_problem(case: Case, device: torch.device, salt: str = "") -> Problem:
    """The inputs that a case stands for; the same bytes on every device, in tensors that nothing else refers to.

    ProblemError of a regime or dtype that does not exist here, ValueError where the reference refuses the case.
    """
    batch = DEFINITIONS[case.role].batch(case, device, salt)
    return Problem(case, batch.key, device, batch.calls(), batch.whole)


def golden_of(problem: Problem) -> Golden:
    return DEFINITIONS[problem.case.role].golden(problem)


def judge(problem: Problem, expectation: Golden, observation: Observation, declaration: Declaration) -> record.Verdict:
    judging = DEFINITIONS[problem.case.role].judge
    return judging(problem, expectation, declaration, tolerance()).verdict(observation)


def measure(
    problem: Problem, expectation: Golden, observation: Observation, declaration: Declaration
) -> list[steps.Measured]:
    """The numbers that were returned, part by part; none if what was returned has not the form that it must have."""
    examined = DEFINITIONS[problem.case.role].judge(problem, expectation, declaration, tolerance())
    if observation.merge_error or any(map(examined.form, observation.returned)):
        return []
    return list(examined.measured(observation))

"""The generations of the interface: the same kernel gets the same verdicts in each, and the same defects die."""

from pathlib import Path

import pytest
import torch

from mla_conformance.backends.eager import EagerPrefillBackend
from mla_conformance.backends.roles import Role
from mla_conformance.cases.case import Case
from mla_conformance.cases.work import work_of
from mla_conformance.defects.known import KnownDefect, known_defects
from mla_conformance.defects.report import stored
from mla_conformance.judging.verdict import Status
from mla_conformance.roles.prefill.case import PrefillCase
from mla_conformance.trials.context import Context
from mla_conformance.trials.judge_one import judge_one
from mla_conformance.trials.subject import Subject
from mla_conformance.vocabulary.capabilities import CAPABILITIES, Tier

KILLING_CASES = stored().killing_cases
CPU = torch.device("cpu")
CONTEXT = Context()
INEXPRESSIBLE = {
    "earlier": ("out_tensor", "merge_states", "quant_output_fp8", "cuda_graph"),
    "present": ("empty_rows", "cuda_graph"),
}
"""Faults that a generation's interface has no room for: the earlier one has no output tensor, no output scale and no
merge of its own; the present one is never given a row without keys; neither lets a prefill declare graphs."""
OUT_OF_REACH = {
    "earlier": ("refusal-after-the-output-was-cleared",),
    "present": ("nan-spreads-across-rows-in-output-quant", "prefill-empty-context-advances-odd-strides"),
}
"""Defects in what a generation does not hand over: an output tensor, rows that the metadata does not count, and rows of
contexts without keys."""
PREFILLING = [name for name, entry in CAPABILITIES.items() if {case.role for case in entry.cases} == {Role.PREFILL}]
DEFECT = {
    "present": "class Wrong(PresentEagerPrefillBackend, {kernel}): ...\n",
    "earlier": (
        "class Impl(EagerPrefillImpl):\n    kernel = {kernel}\n"
        "class Wrong(EarlierEagerPrefillBackend):\n    get_prefill_impl_cls = staticmethod(lambda: Impl)\n"
    ),
}


@pytest.mark.parametrize("capability", PREFILLING)
def test_eager_has_the_same_verdict_in_every_generation(capability: str) -> None:
    case = min(CAPABILITIES[capability].select(Tier.SMOKE), key=work_of)
    names = ("EAGER", "EAGER[present]", "EAGER[earlier]")
    plain, present, earlier = (judge_one(Subject.of(name, CPU), case, CONTEXT).status for name in names)
    assert present is plain
    assert isinstance(case, PrefillCase)
    lacking = case.own_merge or case.quant != "none"
    assert earlier is (Status.UNSUPPORTED if lacking else plain)


def expressible(entry: KnownDefect, generation: str) -> bool:
    """Whether the generation has room for the fault, and calls the method that it stands in."""
    lineage = entry.kernel.__mro__[: entry.kernel.__mro__.index(EagerPrefillBackend)]
    # The present generation's chunks are other calls; the earlier one hands the metadata over with every call.
    absent = {"present": "run_prefill_context_chunk", "earlier": "prepare_metadata"}[generation]
    if entry.id in OUT_OF_REACH[generation] or any(absent in vars(cls) for cls in lineage):
        return False
    case = Case.parse(KILLING_CASES[entry.id])
    # What the earlier generation has no argument for.
    needs = isinstance(case, PrefillCase) and (case.out or case.own_merge or case.quant != "none")
    if generation == "earlier" and needs:
        return False
    return entry.killed_by not in INEXPRESSIBLE[generation]


# The last of a kind stays, whose case takes least.
ONE_OF_EACH = {
    (generation, entry.killed_by): entry
    for generation in DEFECT
    for entry in sorted(known_defects().values(), key=lambda each: -work_of(Case.parse(KILLING_CASES[each.id])))
    if Role.PREFILL in entry.roles and expressible(entry, generation)
}


@pytest.mark.parametrize(
    ("generation", "entry"),
    [pytest.param(generation, entry, id=f"{generation}-{entry.id}") for (generation, _), entry in ONE_OF_EACH.items()],
)
def test_a_known_defect_of_each_capability_dies_in_every_generation(
    generation: str, entry: KnownDefect, tmp_path: Path
) -> None:
    kernel = entry.kernel
    source = (
        "from mla_conformance.backends.eager_generations import *\n"
        f"from {kernel.__module__} import {kernel.__name__}\n" + DEFECT[generation].format(kernel=kernel.__name__)
    )
    path = tmp_path / f"{generation}_{kernel.__name__}.py"
    path.write_text(source, encoding="utf-8")
    subject = Subject.of(f"{path}:Wrong", CPU)
    assert judge_one(subject, Case.parse(KILLING_CASES[entry.id]), CONTEXT).failed

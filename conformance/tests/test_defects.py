"""Known defects die where they should, in every generation, and honest bases live; the stored figures are of it."""

from pathlib import Path

import msgspec
import pytest

from mla_conformance.backends.eager import EagerPrefillBackend
from mla_conformance.backends.eager_decode import EagerDecodeBackend
from mla_conformance.backends.roles import Role
from mla_conformance.cases.case import Case
from mla_conformance.cases.work import work_of
from mla_conformance.cli import main
from mla_conformance.defects.honest import HONEST
from mla_conformance.defects.known import KnownDefect, known_defects
from mla_conformance.defects.report import (
    DefectReport,
    as_expected,
    deciding_digest,
    markdown,
    stored,
    summarise,
    terminal_lines,
)
from mla_conformance.files.whole import Section
from mla_conformance.judging.record import Record
from mla_conformance.judging.verdict import Status
from mla_conformance.roles.prefill.case import PrefillCase
from mla_conformance.tests.drawn import judged
from mla_conformance.vocabulary.capabilities import CAPABILITIES, Tier

ROOT = Path(__file__).parents[2]
DEFECTS = known_defects()
REGENERATE = "run `mla-conformance defects --tier smoke --out fixtures/defects.json --page docs/known-defects.md`"


ONE_OF_EACH = {
    (CAPABILITIES[entry.killed_by].procedure, entry.roles): entry
    for entry in sorted(DEFECTS.values(), key=lambda each: -work_of(Case.parse(stored().killing_cases[each.id])))
}
"""The one whose case takes least."""


def honest_base(kernel: type) -> type:
    """The kernel that a defect overrides one step of."""
    return next(cls for cls in kernel.__mro__ if cls in (*HONEST, EagerDecodeBackend))


@pytest.mark.parametrize("entry", ONE_OF_EACH.values(), ids=lambda entry: entry.id)
def test_a_known_defect_of_each_procedure_and_role_is_killed_by_its_case_which_its_honest_base_passes(
    entry: KnownDefect,
) -> None:
    """One of each: the digest of the stored report says that `defects` saw all of them die by this very code."""
    case = stored().killing_cases[entry.id]
    assert Case.parse(case).capability == entry.killed_by
    assert judged(entry.kernel, case).failed, f"{case} does not kill it; {REGENERATE}"
    assert judged(honest_base(entry.kernel), case).status is Status.PASS


def test_the_stored_report_is_that_of_this_code() -> None:
    assert deciding_digest() in stored().digests, f"the stored report is stale; {REGENERATE}"


def test_the_stored_report_is_clean() -> None:
    report = stored()
    assert (report.survivors, report.false_alarms) == ([], [])
    assert all(as_expected(entry, report.kills[entry.id]) for entry in DEFECTS.values())
    assert report.honest_pairs >= 2000 and report.kills.keys() == report.killing_cases.keys() == DEFECTS.keys()
    assert msgspec.convert(msgspec.to_builtins(report), DefectReport) == report


def test_the_smoke_tier_takes_every_case_that_killed_a_defect() -> None:
    taken = {case.id for capability in CAPABILITIES.values() for case in capability.select(Tier.SMOKE)}
    assert set(stored().killing_cases.values()) <= taken


def test_the_page_holds_the_stored_section() -> None:
    written = Section.of(ROOT / "docs" / "known-defects.md", "defects").content.strip()
    assert written == markdown(stored()), f"the page's section is stale; {REGENERATE}"


def test_the_command_rewrites_the_section_and_nothing_else(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("mla_conformance.commands.defects.run_matrix", lambda tier, cores: outcomes({}))
    path = tmp_path / "page.md"
    path.write_text("before\n<!-- defects:begin -->stale<!-- defects:end -->\nafter\n")
    assert main(["defects", "--tier", "smoke", "--page", str(path)]) == 1
    assert f"0 of {len(DEFECTS)} known defects killed · " in capsys.readouterr().out
    written = path.read_text(encoding="utf-8")
    assert written.startswith("before\n<!-- defects:begin -->\n0 of ") and "stale" not in written
    assert written.endswith("<!-- defects:end -->\nafter\n")


def outcomes(killed: dict[str, set[str]]) -> list[Record]:
    """Two outcomes of each capability for the honest kernel and the first known defect, ``killed`` by kernel."""
    return [
        Record(
            kernel,
            kernel,
            name,
            f"{name}:q=[{tokens}]",
            Status.FAIL if name in killed.get(kernel, ()) else Status.PASS,
            message="wrong",
        )
        for kernel in ("EagerPrefillBackend", next(iter(DEFECTS)))
        for name in CAPABILITIES
        for tokens in (1, 2)
    ]


def test_an_unrelated_kill_makes_a_survivor_and_an_honest_one_a_false_alarm() -> None:
    (entry, *_) = DEFECTS.values()
    unrelated = next(name for name in CAPABILITIES if name not in (entry.killed_by, *entry.related))
    assert list(CAPABILITIES).index(unrelated) < list(CAPABILITIES).index(entry.killed_by)
    report = summarise(
        outcomes({entry.id: {unrelated, entry.killed_by}, "EagerPrefillBackend": {unrelated}}), "full", "0"
    )
    assert entry.id in report.survivors and len(report.false_alarms) == 2
    assert any(line.startswith("FALSE ALARM EagerPrefillBackend on new_tokens") for line in terminal_lines(report))


KILLING_CASES = stored().killing_cases
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
PREFILLING = {
    entry.procedure: name
    for name, entry in CAPABILITIES.items()
    if {case.role for case in entry.cases} == {Role.PREFILL}
}
"""A capability of each procedure."""
DEFECT = {
    "present": "class Wrong(PresentEagerPrefillBackend, {kernel}): ...\n",
    "earlier": (
        "class Impl(EagerPrefillImpl):\n    kernel = {kernel}\n"
        "class Wrong(EarlierEagerPrefillBackend):\n    get_prefill_impl_cls = staticmethod(lambda: Impl)\n"
    ),
}


@pytest.mark.parametrize("capability", PREFILLING.values())
def test_eager_has_the_same_verdict_in_every_generation(capability: str) -> None:
    case = min(CAPABILITIES[capability].select(Tier.SMOKE), key=work_of)
    names = ("EAGER", "EAGER[present]", "EAGER[earlier]")
    plain, present, earlier = (judged(name, case).status for name in names)
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
IN_EACH_GENERATION = {
    (generation, CAPABILITIES[entry.killed_by].procedure): entry
    for generation in DEFECT
    for entry in sorted(known_defects().values(), key=lambda each: -work_of(Case.parse(KILLING_CASES[each.id])))
    if Role.PREFILL in entry.roles and expressible(entry, generation)
}


@pytest.mark.parametrize(
    ("generation", "entry"),
    [
        pytest.param(generation, entry, id=f"{generation}-{entry.id}")
        for (generation, _), entry in IN_EACH_GENERATION.items()
    ],
)
def test_a_known_defect_of_each_procedure_dies_in_every_generation(
    generation: str, entry: KnownDefect, tmp_path: Path
) -> None:
    kernel = entry.kernel
    source = (
        "from mla_conformance.backends.eager_generations import *\n"
        f"from {kernel.__module__} import {kernel.__name__}\n" + DEFECT[generation].format(kernel=kernel.__name__)
    )
    path = tmp_path / f"{generation}_{kernel.__name__}.py"
    path.write_text(source, encoding="utf-8")
    assert judged(f"{path}:Wrong", KILLING_CASES[entry.id]).failed

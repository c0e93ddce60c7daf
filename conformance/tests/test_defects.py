"""Known defects die where they should, in every generation, and honest bases live; the stored figures are of it."""

from collections.abc import Iterator
from itertools import product
from pathlib import Path
from typing import Any

import pytest

from mla_conformance.backends.eager_decode import EagerDecodeBackend
from mla_conformance.backends.roles import Role
from mla_conformance.cases.case import Case
from mla_conformance.cases.work import work_of
from mla_conformance.defects import known
from mla_conformance.defects.honest import HONEST
from mla_conformance.defects.known import known_defects
from mla_conformance.defects.report import as_expected, deciding_digest, markdown, stored
from mla_conformance.files.whole import Section
from mla_conformance.judging.record import Record
from mla_conformance.judging.verdict import Status
from mla_conformance.roles.prefill.case import PrefillCase
from mla_conformance.tests.drawn import judged
from mla_conformance.trials.trial import Context
from mla_conformance.vocabulary.capabilities import CAPABILITIES, Tier

DEFECTS = known_defects()
REGENERATE = "run `mla-conformance defects --tier smoke --out fixtures/defects.json --page docs/known-defects.md`"


def test_each_known_defect_has_an_id_of_its_own_a_sentence_and_capabilities_that_exist() -> None:
    assert len(DEFECTS) == len(known._KERNELS)
    for entry in DEFECTS.values():
        assert entry.sentence and {entry.killed_by, *entry.related} <= {*CAPABILITIES}, entry.id


@pytest.mark.parametrize("capability", sorted({entry.killed_by for entry in DEFECTS.values()}))
def test_every_known_defect_is_killed_by_its_case_which_its_honest_base_passes(capability: str) -> None:
    """All of them: one that nothing kills any more is a hole in the judge, whichever step it stands in."""
    context, passed = Context(), set[tuple[type, str]]()
    for entry in (each for each in DEFECTS.values() if each.killed_by == capability):
        case = stored().killing_cases[entry.id]
        base = next(cls for cls in entry.kernel.__mro__ if cls in (*HONEST, EagerDecodeBackend))
        assert Case.parse(case).capability == capability
        record = judged(entry.kernel, case, context)
        assert record.failed, f"{case} does not kill {entry.id}; {REGENERATE}"
        if capability == "memory_bounds":
            verb = "writes" if "-writes-" in entry.id else "reads"
            side = "before the beginning of" if "before" in entry.id else "behind the end of"
            assert f"{verb} byte " in record.message and side in record.message, entry.id
        if (base, case) not in passed:
            assert judged(base, case, context).status is Status.PASS
            passed.add((base, case))


def test_the_stored_report_is_of_this_code_clean_and_on_its_page() -> None:
    report = stored()
    assert deciding_digest() in report.digests, f"the stored report is stale; {REGENERATE}"
    assert (report.survivors, report.false_alarms) == ([], [])
    assert all(as_expected(entry, report.kills[entry.id]) for entry in DEFECTS.values())
    assert report.honest_pairs >= 2000 and report.kills.keys() == report.killing_cases.keys() == DEFECTS.keys()
    taken = {case.id for capability in CAPABILITIES.values() for case in capability.select(Tier.SMOKE)}
    assert set(report.killing_cases.values()) <= taken
    written = Section.of(Path(__file__).parents[2] / "docs" / "known-defects.md", "defects").content.strip()
    assert written == markdown(report), f"the page's section is stale; {REGENERATE}"


def test_the_command_rewrites_the_section_and_nothing_else(tmp_path: Path, told: Any, monkeypatch: Any) -> None:
    """A kill of an honest kernel is a false alarm, and one by an unrelated capability leaves a survivor."""
    (entry, *_) = DEFECTS.values()
    unrelated = next(name for name in CAPABILITIES if name not in (entry.killed_by, *entry.related))
    killed = {entry.id: {unrelated, entry.killed_by}, "EagerPrefillBackend": {unrelated}}
    monkeypatch.setattr("mla_conformance.defects.report.run_matrix", lambda tier, cores: outcomes(killed))
    path = tmp_path / "page.md"
    path.write_text("before\n<!-- defects:begin -->stale<!-- defects:end -->\nafter\n")
    out = told(1, "defects", "--tier", "full", "--page", path)
    assert f"0 of {len(DEFECTS)} known defects killed as expected · " in out
    assert "FALSE ALARM EagerPrefillBackend on new_tokens" in out and f"ALIVE {entry.id}" in out
    written = path.read_text(encoding="utf-8")
    assert written.startswith("before\n<!-- defects:begin -->\n0 of ") and "stale" not in written
    assert written.endswith("<!-- defects:end -->\nafter\n")


def outcomes(killed: dict[str, set[str]]) -> Iterator[Record]:
    """Two outcomes of each capability for the honest kernel and the first known defect, ``killed`` by kernel."""
    for kernel, name, tokens in product(("EagerPrefillBackend", next(iter(DEFECTS))), CAPABILITIES, (1, 2)):
        status = Status.FAIL if name in killed.get(kernel, ()) else Status.PASS
        yield Record(kernel, kernel, name, f"{name}:q=[{tokens}]", status, message="wrong")


ROLES = {name: {case.role for case in entry.cases} for name, entry in CAPABILITIES.items()}
PREFILLING = {CAPABILITIES[name].procedure: name for name, roles in ROLES.items() if roles == {Role.PREFILL}}
"""A capability of each procedure."""
DIES = ("lse-layout-tokens-heads-vs-heads-tokens", "prefill-plan-key-has-ends-only", "refusal-leaves-the-default-dtype")
"""A wrong result, a plan that is kept too long, and what a refusal leaves behind."""
IMPORTS = "from mla_conformance.backends.generations.{generation} import *\nfrom {module} import {kernel}\n"
DEFECT = {
    "present": IMPORTS + "class Wrong(PresentEagerPrefillBackend, {kernel}): ...\n",
    "earlier": IMPORTS + "class Impl(EagerPrefillImpl):\n    kernel = {kernel}\n"
    "class Wrong(EarlierEagerPrefillBackend):\n    get_prefill_impl_cls = staticmethod(lambda: Impl)\n",
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


@pytest.mark.parametrize("id", DIES)
@pytest.mark.parametrize("generation", DEFECT)
def test_a_known_defect_dies_in_every_generation(generation: str, id: str, tmp_path: Path) -> None:
    kernel = DEFECTS[id].kernel
    path = tmp_path / f"{generation}_{kernel.__name__}.py"
    names = {"generation": generation, "module": kernel.__module__, "kernel": kernel.__name__}
    path.write_text(DEFECT[generation].format(**names), encoding="utf-8")
    assert judged(f"{path}:Wrong", stored().killing_cases[id]).failed

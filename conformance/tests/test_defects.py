"""Known defects die where they should, their honest bases live, and the published figures are of this very code."""

import re
from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

from mla_conformance.backends.eager import EagerPrefillBackend
from mla_conformance.backends.eager_decode import EagerDecodeBackend
from mla_conformance.backends.roles import Role
from mla_conformance.cases.case import Case
from mla_conformance.cli import main
from mla_conformance.defects.bases import LayeredDecode
from mla_conformance.defects.honest import HONEST
from mla_conformance.defects.known import (
    FAMILIES,
    DefectError,
    KnownDefect,
    judged_roles,
    known_defect,
    known_defects,
    reported_bugs,
)
from mla_conformance.defects.matrix import MatrixKernel, MatrixTask, first_tasks, further_tasks, kernels, run_task
from mla_conformance.defects.report import (
    DefectReport,
    as_expected,
    deciding_digest,
    markdown,
    stored,
    summarise,
    terminal_lines,
)
from mla_conformance.driving.sources import judging_sources
from mla_conformance.files.outputs import Section
from mla_conformance.judging.record import Record
from mla_conformance.judging.verdict import Status
from mla_conformance.trials.context import Context
from mla_conformance.trials.judge_one import judge_one
from mla_conformance.trials.subject import Subject
from mla_conformance.vocabulary.capabilities import CAPABILITIES, Tier

ROOT = Path(__file__).parents[2]
DEFECTS = known_defects()
CONTEXT = Context()
REGENERATE = "run `mla-conformance defects --out fixtures/defects.json --page docs/known-defects.md`"
ENTRIES_OF_THESE_LAYERS = 227
"""Reported bugs of everything that has a role, merging, quantised output, selectors and ranks among them."""


def honest_base(kernel: type) -> type:
    """The kernel that a defect overrides one step of."""
    return next(cls for cls in kernel.__mro__ if cls in (*HONEST, EagerDecodeBackend))


@cache
def judged(kernel: type, case: str) -> Record:
    """A kernel's record of a case; many defects share their base and their case."""
    subject = Subject.of(f"{kernel.__module__}:{kernel.__name__}", torch.device("cpu"))
    return judge_one(subject, Case.parse(case), CONTEXT)


@pytest.mark.parametrize("entry", {entry.killed_by: entry for entry in DEFECTS.values()}.values(), ids=lambda e: e.id)
def test_a_known_defect_of_each_capability_is_killed_by_its_case_which_its_honest_base_passes(
    entry: KnownDefect,
) -> None:
    """One of each: the digest of the stored report says that `defects` saw all of them die by this very code."""
    case = stored().killing_cases[entry.id]
    assert Case.parse(case).capability == entry.killed_by
    assert judged(entry.kernel, case).failed, f"{case} does not kill it; {REGENERATE}"
    assert judged(honest_base(entry.kernel), case).status is Status.PASS


def test_a_kernel_is_run_on_cases_of_its_roles_only() -> None:
    roles = {name: judged_roles(cls) for name, cls in (("own", EagerDecodeBackend), ("layered", LayeredDecode))}
    assert roles == {"own": (Role.DECODE,), "layered": (Role.DECODE, Role.LAYER)}
    prefill, decode, layer = (
        Case.parse(text) for text in ("lse:q=[3]", "decode:q=[1];kv=[5]", "graph_padding:call=layer;q=[1];kv=[5]")
    )
    kernel = MatrixKernel("own", "", roles=roles["own"])
    assert [kernel.serves(case) for case in (prefill, decode, layer)] == [False, True, False]
    assert replace(kernel, roles=roles["layered"]).serves(layer) and MatrixKernel("EAGER", "EAGER").serves(prefill)
    case = Case.parse("decode:dims=small;q=[1];kv=[5]")
    ran = {record.backend for record in run_task(MatrixTask([case], [kernel for kernel in kernels() if kernel.honest]))}
    assert "LayeredDecode" in ran and "EagerPrefillBackend" not in ran and "TORCH_SDPA" in ran


def test_a_defect_runs_until_it_is_dead_and_an_honest_kernel_on_everything() -> None:
    wrong = next(kernel for kernel in kernels() if kernel.name == "lse-base2-merged-as-natural-prefix-chunk")
    honest = MatrixKernel("EAGER", "EAGER")
    cases = [Case.parse(f"lse:call=context_chunk;dims=small;q=[{tokens}];kv=[5]") for tokens in (3, 5)]
    ran = [(record.backend, record.failed) for record in run_task(MatrixTask(cases, [honest, wrong]))]
    assert ran == [("EAGER", False), (wrong.name, True), ("EAGER", False)]


def asked(tasks: Iterable[MatrixTask]) -> dict[str, set[str]]:
    """The capabilities that each kernel of some tasks is asked about."""
    found: dict[str, set[str]] = {}
    for task in tasks:
        for kernel in task.kernels:
            found.setdefault(kernel.name, set()).update(case.capability for case in task.cases)
    return found


def test_a_defect_is_asked_what_its_expected_killer_and_all_before_it_say() -> None:
    entry = next(entry for entry in DEFECTS.values() if entry.killed_by == "head_counts")
    order = list(CAPABILITIES)
    before = set(order[: order.index("head_counts")])
    first = asked(first_tasks(Tier.FULL))
    assert first["EagerPrefillBackend"] == set(order) and first[entry.id] == {"head_counts"}
    assert asked(further_tasks(Tier.FULL, [entry.id]))[entry.id] == before
    assert asked(further_tasks(Tier.FULL, []))[entry.id] == set(order) - {"head_counts"}
    assert entry.id not in asked(further_tasks(Tier.SMOKE, [entry.id]))
    assert asked(further_tasks(Tier.SMOKE, []))[entry.id] == set(order) - {"head_counts"}


def declared(**changes: Any) -> Callable[[], object]:
    """Declares a defect with something wrong about it."""
    kernel = type("Wrong", (EagerPrefillBackend,), {"__doc__": changes.pop("doc", "It is wrong.")})
    fields = {"id": "brand-new", "killed_by": "lse", **changes}
    return lambda: known_defect(fields.pop("id"), **fields)(kernel)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"killed_by": "nope"}, "no capability 'nope'; expected one of new_tokens, lse"),
        ({"related": ("lse", "nope")}, "no capability 'nope'"),
        ({"id": next(iter(DEFECTS))}, "the id is taken by mla_conformance.defects."),
        ({"doc": ""}, "expected a docstring that says what is wrong"),
    ],
)
def test_a_wrong_declaration_names_the_entry(changes: dict[str, Any], said: str) -> None:
    with pytest.raises(DefectError) as caught:
        declared(**changes)()
    assert said in str(caught.value)
    assert f"known defect '{changes.get('id', 'brand-new')}'" in str(caught.value) and "Wrong)" in str(caught.value)
    assert known_defects() == DEFECTS


def test_families_are_the_modules_that_declare_defects() -> None:
    room = ROOT / "conformance" / "defects"
    declaring = {path.stem for path in room.glob("*.py") if "\n@known_defect(" in path.read_text(encoding="utf-8")}
    assert sorted(FAMILIES) == sorted(declaring)


def test_every_honest_kernel_is_judged() -> None:
    names = ("honest", "honest_decode", "honest_sparse", "honest_tiles")
    rooms = [import_module(f"mla_conformance.defects.{name}") for name in names]
    own = {each for room in rooms for each in vars(room).values() if getattr(each, "__module__", "") == room.__name__}
    assert {each for each in own if isinstance(each, type) and not each.__name__.startswith("_")} <= set(HONEST)


def test_what_is_not_emulated_has_a_reason() -> None:
    left_out = reported_bugs().not_emulated
    assert all(len(reason) > 20 for reason in left_out.values())
    assert not left_out.keys() & DEFECTS.keys()
    reported = [entry for entry in DEFECTS.values() if entry.sources]
    assert len(left_out) + len(reported) == ENTRIES_OF_THESE_LAYERS


def test_every_source_is_a_public_thread() -> None:
    assert reported_bugs().sources.keys() <= DEFECTS.keys()
    for entry in DEFECTS.values():
        assert all(source.count("/") == 1 and source.partition("#")[2].isdigit() for source in entry.sources), entry.id


def test_each_thread_of_the_pipeline_has_a_known_defect_or_a_reason() -> None:
    threads = reported_bugs().pipeline
    emulated = {source for entry in DEFECTS.values() for source in entry.sources}
    assert [thread for thread, reason in threads.items() if bool(reason) == (thread in emulated)] == []
    assert sum(not reason for reason in threads.values()) >= 30
    shown = [span for reason in threads.values() for span in re.findall("`(.*?)`", reason)]
    assert shown and all(Case.parse(id).id == id for id in shown)


def test_the_stored_report_is_that_of_this_code() -> None:
    assert deciding_digest() in stored().digests, f"the stored report is stale; {REGENERATE}"


def test_the_stored_report_is_clean() -> None:
    report = stored()
    assert (report.tier, report.survivors, report.false_alarms) == ("full", [], [])
    assert report.honest_pairs >= 2000 and report.kills.keys() == report.killing_cases.keys() == DEFECTS.keys()
    assert msgspec.convert(msgspec.to_builtins(report), DefectReport) == report


def test_the_smoke_tier_takes_every_case_that_killed_a_defect() -> None:
    taken = {case.id for capability in CAPABILITIES.values() for case in capability.select(Tier.SMOKE)}
    assert set(stored().killing_cases.values()) <= taken


def test_the_page_holds_the_stored_section() -> None:
    written = Section.of(ROOT / "docs" / "known-defects.md", "defects").content.strip()
    assert written == markdown(stored()), f"the page's section is stale; {REGENERATE}"


@pytest.mark.parametrize(
    "text", ["", "<!-- defects:end --><!-- defects:begin -->", 2 * "<!-- defects:begin -->x<!-- defects:end -->"]
)
def test_a_page_without_a_place_for_the_section(text: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "page.md").write_text(text)
    assert main(["defects", "--page", str(tmp_path / "page.md")]) == 2
    assert "expected <!-- defects:begin --> and <!-- defects:end -->, once each" in capsys.readouterr().err
    assert (tmp_path / "page.md").read_text() == text


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


def test_survivors_and_false_alarms_are_counted() -> None:
    (entry, *_) = DEFECTS.values()
    report = summarise(outcomes({entry.id: {entry.killed_by, "refusals"}}), "full", "0")
    assert entry.id not in report.survivors and report.kills[entry.id] == [entry.killed_by, "refusals"]
    assert report.killing_cases == {entry.id: f"{entry.killed_by}:q=[1]"}
    assert report.false_alarms == [] and report.honest_pairs == 2 * len(CAPABILITIES)
    assert any(line.startswith(f"✔ {entry.family}") for line in terminal_lines(report))


def test_the_smoke_tier_promises_most_kills_by_any_capability_and_no_false_alarm() -> None:
    ids = list(DEFECTS)
    spared = len(ids) // 20
    kills = {id: [] if number < spared else ["refusals"] for number, id in enumerate(ids)}
    smoke = DefectReport(["0"], "smoke", kills, {}, [], 9)
    assert smoke.holds and smoke.survivors == ids[:spared]
    assert f"ALIVE {ids[0]}" in list(terminal_lines(smoke)) and "which promises 95%" in list(terminal_lines(smoke))[-1]
    assert not msgspec.structs.replace(smoke, kills={**kills, ids[spared]: []}).holds
    assert not msgspec.structs.replace(smoke, false_alarms=["EAGER on lse:q=[3]: wrong"]).holds
    assert not msgspec.structs.replace(smoke, tier="full").holds


def test_an_unrelated_kill_makes_a_survivor_and_an_honest_one_a_false_alarm() -> None:
    (entry, *_) = DEFECTS.values()
    unrelated = next(name for name in CAPABILITIES if name not in (entry.killed_by, *entry.related))
    assert list(CAPABILITIES).index(unrelated) < list(CAPABILITIES).index(entry.killed_by)
    report = summarise(
        outcomes({entry.id: {unrelated, entry.killed_by}, "EagerPrefillBackend": {unrelated}}), "full", "0"
    )
    assert entry.id in report.survivors and len(report.false_alarms) == 2
    assert any(line.startswith("FALSE ALARM EagerPrefillBackend on new_tokens") for line in terminal_lines(report))


def test_what_needs_two_facts_together_may_die_before_the_combinations() -> None:
    combined = next(entry for entry in DEFECTS.values() if entry.killed_by == "decode_combinations")
    assert as_expected(combined, ["decode", "decode_combinations"]) and not as_expected(combined, ["decode"])
    assert asked(further_tasks(Tier.FULL, [combined.id])).get(combined.id) is None


def test_what_decides_a_verdict_is_digested() -> None:
    decide = {f"{path.parent.name}/{path.name}" for path in judging_sources()}
    assert "sparse/problem.py" in decide
    assert {
        "vocabulary/capabilities.py",
        "trials/procedures.py",
        "judging/judge.py",
        "judging/tolerance.toml",
    } <= decide

"""Known defects die where they should, their honest bases live, and the published figures are of this very code."""

from functools import cache
from importlib import import_module
from pathlib import Path

import msgspec
import pytest
import torch

from mla_conformance.backends.eager import EagerPrefillBackend
from mla_conformance.backends.eager_decode import EagerDecodeBackend
from mla_conformance.cases.case import Case
from mla_conformance.cli import main
from mla_conformance.defects.honest import HONEST
from mla_conformance.defects.known import DefectError, KnownDefect, defects, known_defects, reported_bugs
from mla_conformance.defects.report import (
    DefectReport,
    deciding_digest,
    markdown,
    stored,
    summarise,
    terminal_lines,
)
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


def test_every_honest_kernel_is_judged() -> None:
    names = ("honest", "honest_decode", "honest_sparse", "honest_tiles")
    rooms = [import_module(f"mla_conformance.defects.{name}") for name in names]
    own = {each for room in rooms for each in vars(room).values() if getattr(each, "__module__", "") == room.__name__}
    assert {each for each in own if isinstance(each, type) and not each.__name__.startswith("_")} <= set(HONEST)


@pytest.mark.parametrize(
    ("name", "step", "killed_by", "said"),
    [
        ("odd__behind_finish", lambda self, output, lse, *, colour: None, "lse", "arguments of _finish, got colour"),
        ("odd", lambda self: None, "lse", "expected the site behind a kernel's name"),
        ("odd__finish", lambda self, state: None, "colours", "no capability 'colours'"),
        ("odd__finish", lambda self, state: None, "lse", "expected a docstring"),
        ("fa4_zero_len_k_hang_nan", type("odd", (), {"__module__": __name__}), "lse", "the id is taken by"),
    ],
)
def test_a_defect_that_is_declared_wrongly_is_refused(name: str, step: object, killed_by: str, said: str) -> None:
    with pytest.raises((DefectError, TypeError), match=said):
        defects(killed_by)(type("_Group", (EagerPrefillBackend,), {name: step}))


def test_what_is_not_emulated_has_a_reason() -> None:
    left_out = reported_bugs().not_emulated
    assert all(len(reason) > 20 for reason in left_out.values())
    assert not left_out.keys() & DEFECTS.keys()
    reported = [entry for entry in DEFECTS.values() if entry.sources]
    assert len(left_out) + len(reported) == ENTRIES_OF_THESE_LAYERS


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

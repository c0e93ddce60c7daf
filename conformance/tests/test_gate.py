"""The gate: what closes it, what it only shows, what it refuses, what it was not shown, named or counted."""

import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from mla_conformance.cases.case import Case
from mla_conformance.cases.sharding import Shard
from mla_conformance.cli import main
from mla_conformance.expectations.apply import Expectation, to_toml
from mla_conformance.files.whole import InputError
from mla_conformance.gating.mustpass import CORE, MustPass
from mla_conformance.judging.record import BackendFacts, Record
from mla_conformance.judging.verdict import Status
from mla_conformance.tests.reports import write_run
from mla_conformance.trials.subject import Subject
from mla_conformance.version import SUITE_VERSION
from mla_conformance.vocabulary.capabilities import CAPABILITIES, Tier, is_due_on_gpu

Capture = pytest.CaptureFixture[str]
Write = Callable[..., Path]
CASES = [case.id for case in CAPABILITIES["lse"].cases]
PASSED = [Record("MINE", "MINE", "lse", case, Status.PASS, used={"lse": 0.3}) for case in CASES[:4]]
FAILED = PASSED[1].with_fields(status=Status.FAIL, check="lse")


def gate(capsys: Capture, *arguments: Path | str, tier: str = "none") -> tuple[int, str, str]:
    status = main(["gate", *map(str, arguments), "--require-tier", tier])
    captured = capsys.readouterr()
    return status, captured.out, captured.err


def test_a_failure_closes_the_gate_unless_it_is_expected(write_report: Write, tmp_path: Path, capsys: Capture) -> None:
    report = write_report("a.json", [PASSED[0], FAILED])
    status, out, _ = gate(capsys, report)
    assert status == 1 and out.splitlines()[0].split() == ["failing", "MINE", FAILED.case, "·", "fail", "lse"]
    (cause,) = (line for line in out.splitlines() if line.startswith("cause "))
    assert cause.split()[1] == "MINE" and "the LSE is wrong" in cause and cause.endswith(" · 1 case")
    (tmp_path / "mine.toml").write_text(to_toml(Expectation(backend="*", case=FAILED.case, reason="known")))
    status, out, _ = gate(capsys, report, "--expectations", tmp_path)
    assert status == 0 and out.endswith(" · 2 verdicts · 1 expected failure\n")


@pytest.mark.parametrize(
    ("entry", "said"),
    [
        (Expectation(backend="MINE", case="lse", reason="r"), "unexpected pass  MINE"),
        (Expectation(backend="MINE", case="gone", reason="r"), "mine.toml entry 1 (gone) · stale"),
        (Expectation(backend="MINE", case="lse", reason="r", until="2020-01-01"), "entry 1 (lse) · expired"),
    ],
)
def test_expectations_that_are_wrong_close_the_gate(
    write_report: Write, tmp_path: Path, capsys: Capture, entry: Expectation, said: str
) -> None:
    (tmp_path / "mine.toml").write_text(to_toml(entry))
    status, out, _ = gate(capsys, write_report("a.json", PASSED), "--expectations", tmp_path)
    assert status == 1 and said in out


def test_the_baseline_tells_what_is_new(write_report: Write, capsys: Capture) -> None:
    before = write_report("before.json", [FAILED, PASSED[0], PASSED[2], PASSED[3]])
    drifted = PASSED[2].with_fields(used={"lse": 0.55})
    now = write_report("now.json", [PASSED[1], PASSED[0].with_fields(status=Status.FAIL), drifted, PASSED[3]])
    status, out, _ = gate(capsys, now, "--baseline", before)
    found = [line.partition("  ")[0] for line in out.splitlines()]
    assert status == 1 and found[:3] == ["newly failing", "newly passing", "drifted"]
    assert "lse: 0.30 → 0.55 of the error budget" in out and " · 4 verdicts · 1 newly failing" in out


@pytest.mark.parametrize(("limit", "expected"), [((), 0), (("--max-drift", "0.2"), 1), (("--max-drift", "0.5"), 0)])
def test_drift_closes_the_gate_if_it_is_limited(
    write_report: Write, capsys: Capture, limit: tuple[str, ...], expected: int
) -> None:
    before = write_report("before.json", PASSED)
    now = write_report("now.json", [record.with_fields(used={"lse": 0.6}) for record in PASSED])
    status, out, err = gate(capsys, now, "--baseline", before, *limit)
    said = f"gate {'CLOSED' if expected else 'open'} · suite {SUITE_VERSION} · any selection accepted · "
    assert status == expected and said in out and " · 4 verdicts" in out and not err


@pytest.mark.parametrize("now", [PASSED[:3], [*PASSED[:3], PASSED[3].with_fields(status=Status.UNSUPPORTED)]])
def test_what_is_no_longer_judged_closes_the_gate(write_report: Write, capsys: Capture, now: list[Record]) -> None:
    before = write_report("before.json", PASSED)
    status, out, _ = gate(capsys, write_report("now.json", now), "--baseline", before)
    assert status == 1 and f"no longer judged MINE {CASES[3]} · was pass" in out


def test_an_incomplete_run_and_an_empty_one_do_not_pass(write_report: Write, capsys: Capture) -> None:
    status, out, _ = gate(capsys, write_report("a.json", PASSED, CASES[:6]))
    assert status == 1 and "not run          MINE lse · 2 cases of the list without a verdict" in out
    status, out, _ = gate(capsys, write_report("b.json", []))
    assert status == 1 and "nothing was judged" in out


def test_must_pass_cases_have_to_be_passed(write_report: Write, tmp_path: Path, capsys: Capture) -> None:
    listed = tmp_path / "must.txt"
    listed.write_text("# mine\n" + "".join(f"core {case}\n" for case in CASES[:4]) + f"extra {CASES[5]}\n")
    unsupported = PASSED[0].with_fields(case=CASES[5], status=Status.UNSUPPORTED)
    assert gate(capsys, write_report("a.json", [*PASSED, unsupported]), "--must-pass", listed)[0] == 0
    lacking = [*PASSED[:2], PASSED[2].with_fields(status=Status.UNSUPPORTED)]
    status, out, _ = gate(capsys, write_report("b.json", lacking), "--must-pass", listed)
    assert status == 1
    for case, why in ((CASES[2], "core: unsupported"), (CASES[3], "core: not in the report"), (CASES[5], "extra: not")):
        assert f"must pass        MINE {case} · {why}" in out
    listed.write_text("".join(f"core lse:q=[{number}]\n" for number in range(1, 301)))
    _, out, _ = gate(capsys, write_report("c.json", PASSED), "--must-pass", listed)
    *_, further, _ = out.splitlines()
    assert re.fullmatch(r"must pass +… lse:q=\[\d+\], lse:.* and \d+ more", further) and len(further) <= 400


def test_the_must_pass_list_of_this_version_is_what_the_vocabulary_gives(tmp_path: Path, capsys: Capture) -> None:
    assert main(["mustpass"]) == 0
    (tmp_path / "printed.txt").write_text(capsys.readouterr().out, encoding="utf-8")
    listed = MustPass.read(tmp_path / "printed.txt")
    assert listed == MustPass.of_suite() and len(listed.profiles[CORE]) > 100
    assert {"decode+graph", "cuda"} <= {part for part in listed.profiles}


def test_a_changed_vocabulary_is_not_the_list_of_this_version(monkeypatch: pytest.MonkeyPatch) -> None:
    fewer = replace(CAPABILITIES["lse"])
    vars(fewer)["cases"] = fewer.cases[1:]
    monkeypatch.setitem(CAPABILITIES, "lse", fewer)
    monkeypatch.setattr(MustPass, "of_vocabulary", MustPass.of_vocabulary.__wrapped__)
    with pytest.raises(InputError, match=r"mustpass\.json: expected digest .* a changed list needs a new version"):
        MustPass.of_suite()


def test_a_backend_is_bound_by_its_roles_and_by_one_at_least() -> None:
    listed = MustPass.of([(CORE, CASES[0]), ("decode", CASES[1]), ("decode+dcp", CASES[2])])

    def missing(*unsupported: int) -> list[str]:
        statuses = [Status.UNSUPPORTED if index in unsupported else Status.FAIL for index in range(3)]
        found = zip(PASSED, statuses, strict=False)
        records = {record.case: record.with_fields(status=status) for record, status in found}
        return [why.partition(":")[0] for _, why in listed.missing(records)]

    assert missing() == [CORE, "decode", "decode+dcp"]
    assert (missing(0), missing(1, 2), missing(0, 1, 2)) == (["decode", "decode+dcp"], [CORE], [CORE])


@pytest.mark.parametrize("text", ["# nothing\n", "core lse:nope=1\n"])
def test_a_malformed_must_pass_list(write_report: Write, tmp_path: Path, capsys: Capture, text: str) -> None:
    (tmp_path / "must.txt").write_text(text)
    status, _, err = gate(capsys, write_report("a.json", PASSED), "--must-pass", tmp_path / "must.txt")
    assert status == 2 and "expected 'PROFILE CASE_ID'" in err.replace("lines ", "") and "must.txt" in err


def test_reports_that_do_not_belong_together(write_report: Write, capsys: Capture) -> None:
    report = write_report("a.json", PASSED)
    assert "is in another report as well" in gate(capsys, report, report)[2]
    for other in ({"suite": "2025.1"}, {"tier": "smoke"}):
        status, _, err = gate(capsys, report, "--baseline", write_report("b.json", PASSED, **other))
        assert status == 2 and f"b.json: expected {next(iter(other))} " in err
    assert gate(capsys, report, "--expectations", report)[0] == 2


SMOKE = [case.id for entry in CAPABILITIES.values() for case in entry.select(Tier.SMOKE)]
FULL = sum(len(entry.cases) for entry in CAPABILITIES.values())
TWO = [case.id for name in ("new_tokens", "lse") for case in CAPABILITIES[name].cases]


def all_passed(cases: list[str], backend: str = "MINE") -> list[Record]:
    return [Record(backend, backend, case.partition(":")[0], case, Status.PASS) for case in cases]


def test_two_capabilities_of_all_do_not_open_the_gate(write_report: Write, capsys: Capture) -> None:
    file = write_report("a.json", all_passed(TWO))
    status, out, _ = gate(capsys, file, tier="full")
    extent = f"{FULL - len(TWO)} of {FULL} cases, {len(CAPABILITIES) - 2} of {len(CAPABILITIES)} capabilities"
    assert status == 1 and f"not run          MINE {extent} · of the full tier\n" in out
    assert out.endswith(f" · {len(TWO)} verdicts · {FULL - len(TWO)} not run\n")
    reported = {line.split()[3] for line in out.splitlines() if "without a verdict" in line}
    further, counted = re.findall(r"^not run +… (.*) and (\d+) more$", out, re.MULTILINE)[0]
    reported |= set(further.split(", "))
    assert reported < CAPABILITIES.keys() - {"new_tokens", "lse"}
    assert len(reported) + int(counted) == len(CAPABILITIES) - 2
    assert gate(capsys, file)[0] == 0
    # The tier is what the report says of itself; the gate asks the suite.
    assert gate(capsys, write_report("b.json", all_passed(TWO), tier="nightly"), tier="full")[0] == 1


def test_a_tier_is_asked_for_by_what_it_holds_and_of_each_backend(write_report: Write, capsys: Capture) -> None:
    file = write_report("a.json", all_passed(SMOKE))
    assert gate(capsys, file, tier="smoke")[0] == 0
    status, out, _ = gate(capsys, write_report("b.json", all_passed(SMOKE), tier="smoke"), tier="full")
    said = "the report is of tier smoke; expected tier full, or pass --require-tier smoke"
    first, last = out.splitlines()
    assert status == 1 and f"{FULL - len(SMOKE)} of {FULL} cases" in first and first.endswith(said) and "CLOSED" in last
    file = write_report("a.json", [*all_passed(SMOKE), *all_passed(SMOKE[1:], "OTHER")])
    status, out, _ = gate(capsys, file, tier="smoke")
    assert status == 1 and f"OTHER 1 of {len(SMOKE)} cases" in out and "MINE" not in out


@pytest.mark.parametrize(
    ("required", "said"),
    [
        (["MINE"], ""),
        (["MINE", "DIED"], "missing          DIED * · in no report"),
        (["MIEN"], "missing          MIEN * · in no report; did you mean MINE?"),
        (["GONE"], "missing          GONE * · unavailable: no such GPU"),
        (["REFUSES"], "missing          REFUSES * · nothing of it was judged"),
        (["MINE", "package.module:DIED"], "missing          DIED * · in no report"),
    ],
)
def test_a_backend_that_has_to_be_judged(tmp_path: Path, capsys: Capture, required: list[str], said: str) -> None:
    refuses = [record.with_fields(status=Status.UNSUPPORTED) for record in all_passed(TWO[:2], "REFUSES")]
    gone = BackendFacts("GONE", "GONE", ("no such GPU",))
    file = write_run(tmp_path / "a.json", [*all_passed(TWO[:2]), *refuses], facts=[gone])
    status, out, _ = gate(capsys, file, "--require", *required)
    assert (status, [line for line in out.splitlines() if "missing  " in line]) == (bool(said), [said] if said else [])


def test_a_report_that_no_job_left_is_named_and_the_others_are_judged(write_report: Write, capsys: Capture) -> None:
    file = write_report("a.json", [all_passed(TWO)[0].with_fields(status=Status.FAIL, check="lse")])
    status, out, _ = gate(capsys, file, file.with_name("b.json"))
    assert status == 1 and f"missing          *    {file.with_name('b.json')} · no such report" in out
    assert f"failing          MINE {TWO[0]}" in out
    status, out, _ = gate(capsys, file.with_name("*.jsn"), tier="full")
    assert status == 1 and "*.jsn · no such report" in out and "nothing was judged" in out


def test_a_shard_that_is_not_there_is_named(tmp_path: Path, capsys: Capture) -> None:
    shards = [Shard.of(f"{index}/3", TWO) for index in (1, 2, 3)]
    files = [write_run(tmp_path / f"{s.index}.json", all_passed(list(s.cases)), TWO, shard=s) for s in shards]
    assert gate(capsys, *files)[0] == 0
    status, out, _ = gate(capsys, files[0], files[2])
    assert status == 1 and "missing          MINE shard 2/3 · in no report" in out
    assert f"MINE {len(shards[1].cases)} of {len(TWO)} cases, 2 of 2 capabilities · of its list" in out


def test_the_must_pass_list_is_asked_for_by_name_and_version(write_report: Write, capsys: Capture) -> None:
    file, old = write_report("a.json", all_passed(TWO)), write_report("old.json", all_passed(TWO), suite="2025.1")
    for name in ("shipped", "decode"):
        status, out, _ = gate(capsys, file, "--must-pass", f"{name}@{SUITE_VERSION}")
        assert status == 1 and f" · must-pass {name}@{SUITE_VERSION} · " in out
    status, _, err = gate(capsys, file, "--must-pass", "core@2025.1", tier="full")
    assert status == 2 and f"--must-pass core@2025.1: the list that is installed here is core@{SUITE_VERSION}" in err
    status, _, err = gate(capsys, old, "--must-pass", "core")
    said = f"core@{SUITE_VERSION} is of suite {SUITE_VERSION} here, but the report is of suite 2025.1"
    assert status == 2 and said in err
    assert gate(capsys, old, tier="full")[0] == 2
    status, out, err = gate(capsys, old)
    assert (status, out) == (2, "") and "accept its verdicts with --allow-suite 2025.1" in err
    assert gate(capsys, old, "--allow-suite", "2025.2")[0] == 2 and gate(capsys, old, "--allow-suite", "2025.1")[0] == 0
    status, _, err = gate(capsys, file, "--must-pass", "nope", tier="full")
    assert status == 2 and "--must-pass nope: expected a file, shipped, or profiles that" in err


def test_what_only_a_gpu_is_asked_for_binds_no_kernel_of_a_cpu() -> None:
    """A copy of EAGER could be certified on a CPU: what it is not asked for there has profiles of its own."""
    subject, records = Subject.of("EAGER", torch.device("cpu")), {}
    for case in (case for entry in CAPABILITIES.values() for case in entry.cases):
        passes = CAPABILITIES[case.capability].probes_refusals or not subject.unsupported(case)
        status = Status.PASS if passes else Status.UNSUPPORTED
        records[case.id] = Record("B", "B", case.capability, case.id, status)
    listed = MustPass.of_vocabulary()
    assert list(listed.missing(records)) == []
    heavy = {case for profile, cases in listed.profiles.items() if "gpu" in profile.split("+") for case in cases}
    assert heavy and all(is_due_on_gpu(Case.parse(case)) for case in heavy)
    assert listed.profiles["decode+gpu"]


def test_a_profile_that_is_named_binds_whatever_is_declared() -> None:
    decodes = MustPass.of_suite().profiles["decode"]
    refused = {case: Record("B", "B", "decode", case, Status.UNSUPPORTED) for case in decodes}
    asked = MustPass.asked(["decode"])
    assert [case for case, _ in asked.missing(refused)] == list(decodes)
    assert {why.partition(":")[0] for _, why in asked.missing({})} == {"decode"}
    both = MustPass.asked(["shipped", "decode"])
    assert dict(both.missing(refused)).keys() > set(decodes)
    with pytest.raises(InputError):
        MustPass.asked(["decode", "absent.txt"])

"""The gate: what closes it, what it only shows, what it refuses, what it was not shown, and what opens none."""

import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from mla_conformance.cases.case import Case
from mla_conformance.cases.sharding import Shard
from mla_conformance.expectations import Expectation, to_toml
from mla_conformance.files.whole import InputError
from mla_conformance.gating import mustpass
from mla_conformance.gating.mustpass import CORE, MustPass
from mla_conformance.judging.record import BackendFacts, Record, Status
from mla_conformance.tests.reports import write_run
from mla_conformance.trials import trial as judging
from mla_conformance.trials.facts import describe
from mla_conformance.trials.subject import Subject
from mla_conformance.trials.trial import Context, judge_one
from mla_conformance.version import SUITE_VERSION
from mla_conformance.vocabulary.capabilities import CAPABILITIES, Tier, first_cases, is_due_on_gpu

Gate = Callable[..., tuple[int, str, str]]
CASES = [case.id for case in CAPABILITIES["lse"].cases]
PASSED = [Record("MINE", "MINE", "lse", case, Status.PASS, used={"lse": 0.3}) for case in CASES[:4]]
FAILED = PASSED[1].with_fields(status=Status.FAIL, check="lse")


def report(records: Sequence[Record], name: str = "a.json", cases: Sequence[str] = (), **told: Any) -> Path:
    return write_run(Path(name), records, cases, **told)


@pytest.fixture
def gate(ours: Gate, here: Path) -> Gate:
    return lambda *arguments, tier="none": ours("gate", *arguments, "--require-tier", tier)


def test_what_fails_unexpectedly_is_incomplete_or_empty_closes_the_gate(gate: Gate) -> None:
    status, out, _ = gate(report(PASSED, cases=CASES[:6]))
    assert status == 1 and "not run          MINE lse · 2 cases of the list without a verdict" in out
    status, out, _ = gate(report([]))
    assert status == 1 and "nothing was judged" in out
    file = report([PASSED[0], FAILED])
    status, out, _ = gate(file)
    assert status == 1 and out.splitlines()[0].split() == ["failing", "MINE", FAILED.case, "·", "fail", "lse"]
    (cause,) = (line for line in out.splitlines() if line.startswith("cause "))
    assert cause.split()[1] == "MINE" and "the LSE is wrong" in cause and cause.endswith(" · 1 case")
    Path("mine.toml").write_text(to_toml(Expectation(backend="*", case=FAILED.case, reason="known")))
    status, out, _ = gate(file, "--expectations", ".")
    assert status == 0 and out.endswith(" · 2 verdicts · 1 expected failure\n")


UNSEEN = "mine.toml: entry 1: expected a reason in words, got "


@pytest.mark.parametrize(
    ("changes", "status", "said"),
    [
        ({}, 1, "unexpected pass  MINE"),
        ({"case": "gone"}, 1, "mine.toml entry 1 (gone) · stale"),
        ({"until": "2020-01-01"}, 1, "entry 1 (lse) · expired"),
        *(({"backend": "*", "reason": reason}, 2, UNSEEN) for reason in ("", "\u200b", "\u3164\uffa0", "- 1 -")),
    ],
)
def test_expectations_that_are_wrong_close_the_gate(gate: Gate, changes: Any, status: int, said: str) -> None:
    entry = Expectation(**{"backend": "MINE", "case": "lse", "reason": "r", **changes})
    Path("mine.toml").write_text(to_toml(entry), encoding="utf-8")
    found = gate(report(PASSED), "--expectations", ".")
    assert found[0] == status and said in found[1] + found[2]


DRIFTED = [record.with_fields(used={"lse": 0.6}) for record in PASSED]
OTHERS = [PASSED[1], PASSED[0].with_fields(status=Status.FAIL), DRIFTED[2], PASSED[3]]
SAYS = f" · suite {SUITE_VERSION} · any selection accepted · (.* · )?4 verdicts"
GONE = f"no longer judged MINE {re.escape(CASES[3])} · was pass"


@pytest.mark.parametrize(
    ("before", "now", "limit", "status", "said"),
    [
        ([FAILED, PASSED[0], *PASSED[2:]], OTHERS, (), 1, "newly failing .*newly passing .*drifted .*1 newly failing"),
        (PASSED, DRIFTED, (), 0, f"lse: 0.30 → 0.60 of the error budget.*gate open{SAYS}"),
        (PASSED, DRIFTED, ("--max-drift", "0.2"), 1, f"gate CLOSED{SAYS}"),
        (PASSED, DRIFTED, ("--max-drift", "0.5"), 0, f"gate open{SAYS}"),
        (PASSED, PASSED[:3], (), 1, GONE),
        (PASSED, [*PASSED[:3], PASSED[3].with_fields(status=Status.UNSUPPORTED)], (), 1, GONE),
    ],
)
def test_a_baseline_tells_what_is_new_gone_and_drifted(
    gate: Gate, before: list[Record], now: list[Record], limit: Any, status: int, said: str
) -> None:
    found, out, err = gate(report(now, "now.json"), "--baseline", report(before, "before.json"), *limit)
    assert (found, err) == (status, "") and re.search(said, out, re.DOTALL), out


def test_must_pass_cases_have_to_be_passed(gate: Gate) -> None:
    listed = Path("must.txt")
    listed.write_text("# mine\n" + "".join(f"core {case}\n" for case in CASES[:4]) + f"extra {CASES[5]}\n")
    unsupported = PASSED[0].with_fields(case=CASES[5], status=Status.UNSUPPORTED)
    assert gate(report([*PASSED, unsupported]), "--must-pass", listed)[0] == 0
    lacking = [*PASSED[:2], PASSED[2].with_fields(status=Status.UNSUPPORTED)]
    status, out, _ = gate(report(lacking, "b.json"), "--must-pass", listed)
    assert status == 1
    for case, why in ((CASES[2], "core: unsupported"), (CASES[3], "core: not in the report"), (CASES[5], "extra: not")):
        assert f"must pass        MINE {case} · {why}" in out
    listed.write_text("".join(f"core lse:q=[{number}]\n" for number in range(1, 301)))
    _, out, _ = gate(report(PASSED, "c.json"), "--must-pass", listed)
    *_, further, _ = out.splitlines()
    assert re.fullmatch(r"must pass +… lse:q=\[\d+\], lse:.* and \d+ more", further) and len(further) <= 400


def test_the_must_pass_list_is_what_the_vocabulary_gives(here: Any, ours: Gate, monkeypatch: Any) -> None:
    Path("printed.txt").write_text(ours("mustpass")[1], encoding="utf-8")
    listed = MustPass.read(Path("printed.txt"))
    assert listed == MustPass.of_suite() and len(listed.profiles[CORE]) > 100
    assert {"decode+graph", "cuda"} <= {*listed.profiles}
    monkeypatch.setattr(mustpass, "first_cases", lambda: first_cases()[1:])
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
def test_a_malformed_must_pass_list(gate: Gate, text: str) -> None:
    Path("must.txt").write_text(text)
    status, _, err = gate(report(PASSED), "--must-pass", "must.txt")
    assert status == 2 and "expected 'PROFILE CASE_ID'" in err.replace("lines ", "") and "must.txt" in err


def test_reports_that_do_not_belong_together(gate: Gate) -> None:
    file = report(PASSED)
    assert "is in another report as well" in gate(file, file)[2]
    for other in ({"suite": "2025.1"}, {"tier": "smoke"}):
        status, _, err = gate(file, "--baseline", report(PASSED, "b.json", environment=other))
        assert status == 2 and f"b.json: expected {next(iter(other))} " in err
    assert gate(file, "--expectations", file)[0] == 2


SMOKE = [case.id for entry in CAPABILITIES.values() for case in entry.select(Tier.SMOKE)]
FULL = sum(len(entry.cases) for entry in CAPABILITIES.values())
CASES_OF_NEW = CAPABILITIES["new_tokens"].cases
TWO = [case.id for name in ("new_tokens", "lse") for case in CAPABILITIES[name].cases]


def all_passed(cases: list[str], backend: str = "MINE") -> list[Record]:
    return [Record(backend, backend, case.partition(":")[0], case, Status.PASS) for case in cases]


def test_two_capabilities_of_all_do_not_open_the_gate(gate: Gate) -> None:
    file = report(all_passed(TWO))
    status, out, _ = gate(file, tier="full")
    extent = f"{FULL - len(TWO)} of {FULL} cases, {len(CAPABILITIES) - 2} of {len(CAPABILITIES)} capabilities"
    assert status == 1 and f"not run          MINE {extent} · of the full tier\n" in out
    assert out.endswith(f" · {len(TWO)} verdicts · {FULL - len(TWO)} not run\n")
    reported = {line.split()[3] for line in out.splitlines() if "without a verdict" in line}
    further, counted = re.findall(r"^not run +… (.*) and (\d+) more$", out, re.MULTILINE)[0]
    reported |= set(further.split(", "))
    assert reported < CAPABILITIES.keys() - {"new_tokens", "lse"}
    assert len(reported) + int(counted) == len(CAPABILITIES) - 2
    assert gate(file)[0] == 0
    # The tier is what the report says of itself; the gate asks the suite.
    assert gate(report(all_passed(TWO), "b.json", environment={"tier": "nightly"}), tier="full")[0] == 1


def test_a_tier_is_asked_for_by_what_it_holds_and_of_each_backend(gate: Gate) -> None:
    file = report(all_passed(SMOKE))
    assert gate(file, tier="smoke")[0] == 0
    status, out, _ = gate(report(all_passed(SMOKE), "b.json", environment={"tier": "smoke"}), tier="full")
    said = "the report is of tier smoke; expected tier full, or pass --require-tier smoke"
    first, last = out.splitlines()
    assert status == 1 and f"{FULL - len(SMOKE)} of {FULL} cases" in first and first.endswith(said) and "CLOSED" in last
    file = report([*all_passed(SMOKE), *all_passed(SMOKE[1:], "OTHER")])
    status, out, _ = gate(file, tier="smoke")
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
def test_a_backend_that_has_to_be_judged(gate: Gate, required: list[str], said: str) -> None:
    refuses = [record.with_fields(status=Status.UNSUPPORTED) for record in all_passed(TWO[:2], "REFUSES")]
    gone = BackendFacts("GONE", "GONE", ("no such GPU",))
    file = report([*all_passed(TWO[:2]), *refuses], facts=[gone])
    status, out, _ = gate(file, "--require", *required)
    assert (status, [line for line in out.splitlines() if "missing  " in line]) == (bool(said), [said] if said else [])


def test_a_report_and_a_shard_that_are_not_there_are_named_and_the_others_judged(gate: Gate) -> None:
    file = report([all_passed(TWO)[0].with_fields(status=Status.FAIL, check="lse")])
    status, out, _ = gate(file, file.with_name("b.json"))
    assert status == 1 and f"missing          *    {file.with_name('b.json')} · no such report" in out
    assert f"failing          MINE {TWO[0]}" in out
    status, out, _ = gate(file.with_name("*.jsn"), tier="full")
    assert status == 1 and "*.jsn · no such report" in out and "nothing was judged" in out
    shards = [Shard.of(f"{index}/3", TWO) for index in (1, 2, 3)]
    files = [report(all_passed(list(s.cases)), f"{s.index}.json", TWO, shard=s) for s in shards]
    assert gate(*files)[0] == 0
    status, out, _ = gate(files[0], files[2])
    assert status == 1 and "missing          MINE shard 2/3 · in no report" in out
    assert f"MINE {len(shards[1].cases)} of {len(TWO)} cases, 2 of 2 capabilities · of its list" in out


def test_the_must_pass_list_is_asked_for_by_name_and_version(gate: Gate) -> None:
    file, old = report(all_passed(TWO)), report(all_passed(TWO), "old.json", environment={"suite": "2025.1"})
    for name in ("shipped", "decode"):
        status, out, _ = gate(file, "--must-pass", f"{name}@{SUITE_VERSION}")
        assert status == 1 and f" · must-pass {name}@{SUITE_VERSION} · " in out
    status, _, err = gate(file, "--must-pass", "core@2025.1", tier="full")
    assert status == 2 and f"--must-pass core@2025.1: the list that is installed here is core@{SUITE_VERSION}" in err
    status, _, err = gate(old, "--must-pass", "core")
    said = f"core@{SUITE_VERSION} is of suite {SUITE_VERSION} here, but the report is of suite 2025.1"
    assert status == 2 and said in err
    assert gate(old, tier="full")[0] == 2
    status, out, err = gate(old)
    assert (status, out) == (2, "") and "accept its verdicts with --allow-suite 2025.1" in err
    assert gate(old, "--allow-suite", "2025.2")[0] == 2 and gate(old, "--allow-suite", "2025.1")[0] == 0
    status, _, err = gate(file, "--must-pass", "nope", tier="full")
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


CPU = torch.device("cpu")
EAGER = "from mla_conformance.backends.eager import EagerPrefillBackend\n"
OUT_OF_MEMORY = f"""{EAGER}
class OomWhenHard(EagerPrefillBackend):
    def run_prefill_new_tokens(self, q, *a, **k):
        if q.shape[0] > 4: raise MemoryError("out of memory, too large for a CPU")
        return super().run_prefill_new_tokens(q, *a, **k)
    def run_prefill_context_chunk(self, chunk_idx, q, k, v): raise MemoryError("out of memory")
"""


def of(facts: BackendFacts, records: Sequence[Record], name: str = "o.json", **code: str) -> Path:
    return report(records, name, facts=[facts], code=code)


def passed(facts: BackendFacts, first: int = 0, **fields: object) -> list[Record]:
    records = [Record(facts.name, facts.reference, "lse", case, Status.PASS) for case in CASES[first : first + 3]]
    return [records[0].with_fields(**fields), *records[1:]]


def file_of(path: str, name: str = "Mine") -> BackendFacts:
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    Path(path).write_text(f"{EAGER}class {name}(EagerPrefillBackend): pass\n")
    return describe(Subject.of(f"{path}:{name}", CPU))


def test_a_kernel_that_lacks_memory_where_it_is_hard_closes_the_gate(gate: Gate) -> None:
    Path("oom.py").write_text(OUT_OF_MEMORY)
    subject, context = Subject.of("oom.py:OomWhenHard", CPU), Context()
    cases = [case for name in ("lse", "new_tokens") for case in CAPABILITIES[name].select(Tier.SMOKE)]
    records = [judge_one(subject, case, context) for case in cases]
    dodged = sum(record.status is Status.UNAVAILABLE for record in records)
    assert 0 < dodged < sum(record.status is not Status.UNSUPPORTED for record in records)
    status, out, _ = gate(of(describe(subject), records), "--require", "oom.py:OomWhenHard")
    assert status == 1 and out.count("unavailable      OomWhenHard ") == dodged
    assert "out of memory: MemoryError: out of memory" in out and out.endswith(f" · {dodged} unavailable\n")


@pytest.mark.parametrize(
    ("kernel", "case", "limit", "finding"),
    [
        ("oom.py:OomWhenHard", CASES_OF_NEW[0], 2**20, "too large here"),
        ("oom.py:OomWhenHard", CASES_OF_NEW[0], 2**40, "unavailable"),
        ("EAGER", Case.parse("new_tokens:heads=128;q=[100000]"), 2**60, "too large here"),  # it takes hours
    ],
)
def test_what_is_too_large_is_not_told_by_the_kernel(
    gate: Gate, monkeypatch: pytest.MonkeyPatch, kernel: str, case: Case, limit: int, finding: str
) -> None:
    Path("oom.py").write_text(OUT_OF_MEMORY)
    monkeypatch.setattr(judging.memory, "whole_memory", lambda device: limit)
    subject = Subject.of(kernel, CPU)
    record, facts = judge_one(subject, case, Context()), describe(subject)
    status, out, _ = gate(of(facts, [record, *passed(facts)]))
    assert status == (finding == "unavailable") and record.case in out
    assert out.split("  ")[0].rstrip() == finding and out.endswith(f" · 1 {finding}\n")
    assert "pass, yet too large to be judged" in gate(of(facts, passed(facts, too_large=True)))[2]


MINE = "kernels/mine.py:Mine"
ELSEWHERE = "in no report, where its name stands for /"


@pytest.mark.parametrize(
    ("path", "required", "edit", "status", "said"),
    [
        ("kernels/mine.py", MINE, "", 0, ""),
        ("elsewhere/kernels/mine.py", MINE, "", 0, ""),
        ("other.py", MINE, "", 1, ELSEWHERE),
        ("kernels/mine.py", "package.mine:Mine", "", 1, ELSEWHERE),
        ("kernels/mine.py", "kernels/mine.py:Other", "", 1, "in no report\n"),
        ("kernels/mine.py", MINE, "# changed\n", 1, "Mine * · the judged file differs from the one here"),
        ("kernels/mine.py", "gone.py:EAGER", "", 2, "gone.py: cannot be read: No such file or directory\n"),
    ],
)
def test_a_file_is_its_path_and_bytes(gate: Gate, path: str, required: str, edit: str, status: int, said: str) -> None:
    facts = file_of(path)
    file_of("kernels/mine.py")
    Path("kernels/mine.py").write_text(Path("kernels/mine.py").read_text() + edit)
    found = gate(of(facts, passed(facts)), "--require", required)
    assert found[0] == status and said in found[1] + found[2]
    for fingerprint in ("", "file a", "no distribution"):  # without the file's digest a report is not of it
        file = of(replace(facts, fingerprint=fingerprint), passed(facts))
        assert gate(file, "--require", required)[0] == (status or 1)


CHANGES = (("fingerprint", "fingerprint "), ("helper", "/help.py "))


@pytest.mark.parametrize(
    ("path", "change", "said"),
    [("mine.py", "", ""), *(("mine.py", *change) for change in CHANGES), ("other.py", "", "reference ")],
)
def test_two_codes_of_one_name_are_not_one_backend(gate: Gate, path: str, change: str, said: str) -> None:
    """Half of the cases of one, and half of the other."""
    first, second = file_of("mine.py"), file_of(path)
    second = replace(second, fingerprint="file 0") if change == "fingerprint" else second
    halves = [
        of(first, passed(first), "a.json", **{"/help.py": "0"}),
        of(second, passed(second, 3), "b.json", **{"/help.py": str(int(change == "helper"))}),
    ]
    status, _, err = gate(*halves, "--require", "mine.py:Mine")
    assert status == (2 if said else 0)
    assert not said or f"b.json: Mine is other code than in a.json: {said}" in err


@pytest.mark.parametrize("required", ["TORCH_SDPA", "kernels/mine.py:TORCH_SDPA"])
def test_a_class_of_a_registered_name_is_not_the_registered_backend(gate: Gate, required: str) -> None:
    file_of("kernels/mine.py", "TORCH_SDPA")
    evil, genuine = file_of("a/evil.py", "TORCH_SDPA"), BackendFacts("TORCH_SDPA", "TORCH_SDPA")
    status, out, _ = gate(of(evil, passed(evil)), "--require", required)
    assert status == 1 and f"missing          TORCH_SDPA * · {ELSEWHERE}" in out
    assert gate(of(genuine, passed(genuine)), "--require", required)[0] == (":" in required)


@pytest.mark.parametrize(("file", "waived"), [("evil.py", False), ("", True)])
def test_expectations_of_a_registered_name_are_of_the_registered_backend(gate: Gate, file: str, waived: bool) -> None:
    facts = file_of(file, "FLASHMLA") if file else BackendFacts("FLASHMLA", "FLASHMLA")
    Path("known").mkdir()
    Path("known/FLASHMLA.toml").write_text(to_toml(Expectation(backend="FLASHMLA", case="lse", reason="known")))
    records = [each.with_fields(status=Status.FAIL, check="lse") for each in passed(facts)]
    assert gate(of(facts, records), "--expectations", "known")[0] == (0 if waived else 1)

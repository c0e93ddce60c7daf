"""What opens no gate: cases that lacked memory, names of others, reasons without words."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType

import pytest
import torch

from mla_conformance.cases.case import Case
from mla_conformance.cli import main
from mla_conformance.expectations.apply import Expectation, to_toml
from mla_conformance.judging.record import BackendFacts, Record
from mla_conformance.judging.verdict import Status
from mla_conformance.tests.reports import write_run
from mla_conformance.trials import judge_one as judging
from mla_conformance.trials.facts import describe
from mla_conformance.trials.judge_one import judge_one
from mla_conformance.trials.subject import Subject
from mla_conformance.trials.trial import Context
from mla_conformance.version import SUITE_VERSION
from mla_conformance.vocabulary.capabilities import CAPABILITIES, Tier

CPU = torch.device("cpu")
CASES = [case.id for case in CAPABILITIES["lse"].cases]
EAGER = "from mla_conformance.backends.eager import EagerPrefillBackend\n"
OUT_OF_MEMORY = f"""{EAGER}
class OomWhenHard(EagerPrefillBackend):
    def run_prefill_new_tokens(self, q, *a, **k):
        if q.shape[0] > 4: raise MemoryError("out of memory, too large for a CPU")
        return super().run_prefill_new_tokens(q, *a, **k)
    def run_prefill_context_chunk(self, chunk_idx, q, k, v): raise MemoryError("out of memory")
"""
Gate = Callable[..., tuple[int, str, str]]


@pytest.fixture
def gate(capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Gate:
    """The gate in a folder of its own, over any selection."""
    monkeypatch.chdir(tmp_path)

    def run(*arguments: Path | str) -> tuple[int, str, str]:
        status = main(["gate", *map(str, arguments), "--require-tier", "none"])
        return status, *capsys.readouterr()

    return run


def report(
    name: str,
    facts: BackendFacts,
    records: Sequence[Record],
    code: Mapping[str, str] = MappingProxyType({}),
) -> str:
    write_run(Path(name), records, facts=[facts], code=code, environment={"suite": SUITE_VERSION, "tier": "smoke"})
    return name


def passed(facts: BackendFacts, first: int = 0, **fields: object) -> list[Record]:
    records = [Record(facts.name, facts.reference, "lse", case, Status.PASS) for case in CASES[first : first + 3]]
    return [records[0].with_fields(**fields), *records[1:]]


def file_of(path: str, name: str = "Mine") -> BackendFacts:
    """A backend in a file of its own, as a worker describes it."""
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
    status, out, _ = gate(report("o.json", describe(subject), records), "--require", "oom.py:OomWhenHard")
    assert status == 1 and out.count("unavailable      OomWhenHard ") == dodged
    assert "out of memory: MemoryError: out of memory" in out and out.endswith(f" · {dodged} unavailable\n")


@pytest.mark.parametrize(("limit", "finding"), [(2**20, "too large here"), (2**40, "unavailable")])
def test_what_is_too_large_is_told_by_the_suites_estimate_and_not_by_the_kernel(
    gate: Gate, monkeypatch: pytest.MonkeyPatch, limit: int, finding: str
) -> None:
    Path("oom.py").write_text(OUT_OF_MEMORY)
    monkeypatch.setattr(judging, "whole_memory", lambda device: limit)
    subject = Subject.of("oom.py:OomWhenHard", CPU)
    record = judge_one(subject, CAPABILITIES["new_tokens"].cases[0], Context())
    facts = describe(subject)
    status, out, _ = gate(report("o.json", facts, [record, *passed(facts)]))
    assert (status, out.split("  ")[0].rstrip()) == (int(finding == "unavailable"), finding) and record.case in out


def test_a_case_that_takes_hours_is_named_and_opens_the_gate(gate: Gate) -> None:
    large = "new_tokens:heads=128;q=[100000]"
    record = judge_one(Subject.of("EAGER", CPU), Case.parse(large), Context())
    facts = BackendFacts("EAGER", "EAGER")
    status, out, _ = gate(report("o.json", facts, [record, *passed(facts)]))
    assert status == 0 and out.startswith("too large here   EAGER ") and out.endswith(" · 1 too large here\n")


def test_no_verdict_is_too_large(gate: Gate) -> None:
    facts = BackendFacts("EAGER", "EAGER")
    _, _, err = gate(report("o.json", facts, passed(facts, too_large=True)))
    assert "pass, yet too large to be judged" in err


@pytest.mark.parametrize(
    ("path", "required", "said"),
    [
        ("kernels/mine.py", "kernels/mine.py:Mine", ""),
        ("elsewhere/kernels/mine.py", "kernels/mine.py:Mine", ""),
        ("other.py", "kernels/mine.py:Mine", "in no report, where its name stands for /"),
        ("kernels/mine.py", "package.mine:Mine", "in no report, where its name stands for /"),
        ("kernels/mine.py", "kernels/mine.py:Other", "in no report\n"),
    ],
)
def test_a_required_file_is_its_path(gate: Gate, path: str, required: str, said: str) -> None:
    facts = file_of(path)
    file_of("kernels/mine.py")
    status, out, _ = gate(report("o.json", facts, passed(facts)), "--require", required)
    assert status == bool(said) and said in out


@pytest.mark.parametrize("edit", ["# changed\n", ""])
def test_a_required_file_is_its_bytes(gate: Gate, edit: str) -> None:
    facts = file_of("kernels/mine.py")
    Path("kernels/mine.py").write_text(Path("kernels/mine.py").read_text() + edit)
    status, out, _ = gate(report("o.json", facts, passed(facts)), "--require", "kernels/mine.py:Mine")
    assert status == bool(edit) and ("Mine * · the judged file differs from the one here" in out) == bool(edit)


@pytest.mark.parametrize(
    ("path", "change", "said"),
    [
        ("mine.py", "", ""),
        ("mine.py", "fingerprint", "fingerprint "),
        ("mine.py", "helper", "/help.py "),
        ("other.py", "", "reference "),
    ],
)
def test_two_codes_of_one_name_are_not_one_backend(gate: Gate, path: str, change: str, said: str) -> None:
    """Half of the cases of one, and half of the other."""
    first, second = file_of("mine.py"), file_of(path)
    second = replace(second, fingerprint="file 0") if change == "fingerprint" else second
    halves = [
        report("a.json", first, passed(first), code={"/help.py": "0"}),
        report("b.json", second, passed(second, 3), code={"/help.py": str(int(change == "helper"))}),
    ]
    status, _, err = gate(*halves, "--require", "mine.py:Mine")
    assert status == (2 if said else 0)
    assert not said or f"b.json: Mine is other code than in a.json: {said}" in err


@pytest.mark.parametrize("fingerprint", ["", "file a", "no distribution"])
def test_a_report_without_the_files_digest_is_not_of_it(gate: Gate, fingerprint: str) -> None:
    facts = BackendFacts("Mine", file_of("mine.py").reference, fingerprint=fingerprint)
    assert gate(report("o.json", facts, passed(facts)), "--require", "mine.py:Mine")[0] == 1


def test_a_required_file_that_is_not_there_is_refused(gate: Gate) -> None:
    facts = BackendFacts("EAGER", "EAGER")
    status, _, err = gate(report("o.json", facts, passed(facts)), "--require", "gone.py:EAGER")
    assert (status, err) == (2, "mla-conformance: gone.py: cannot be read: No such file or directory\n")


@pytest.mark.parametrize("required", ["TORCH_SDPA", "kernels/mine.py:TORCH_SDPA"])
def test_a_class_of_a_registered_name_is_not_the_registered_backend(gate: Gate, required: str) -> None:
    file_of("kernels/mine.py", "TORCH_SDPA")
    evil = file_of("a/evil.py", "TORCH_SDPA")
    status, out, _ = gate(report("o.json", evil, passed(evil)), "--require", required)
    assert status == 1 and "missing          TORCH_SDPA * · in no report, where its name stands for /" in out
    genuine = BackendFacts("TORCH_SDPA", "TORCH_SDPA")
    assert gate(report("o.json", genuine, passed(genuine)), "--require", required)[0] == (":" in required)


@pytest.mark.parametrize(("file", "waived"), [("evil.py", False), ("", True)])
def test_expectations_of_a_registered_name_are_of_the_registered_backend(gate: Gate, file: str, waived: bool) -> None:
    facts = file_of(file, "FLASHMLA") if file else BackendFacts("FLASHMLA", "FLASHMLA")
    Path("known").mkdir()
    Path("known/FLASHMLA.toml").write_text(to_toml(Expectation(backend="FLASHMLA", case="lse", reason="known")))
    records = [each.with_fields(status=Status.FAIL, check="lse") for each in passed(facts)]
    assert gate(report("o.json", facts, records), "--expectations", "known")[0] == (0 if waived else 1)


@pytest.mark.parametrize("reason", ["", "\u200b", "\u3164\uffa0", "- 1 -"])
def test_a_reason_has_letters_that_can_be_seen(gate: Gate, reason: str) -> None:
    facts = BackendFacts("EAGER", "EAGER")
    Path("known").mkdir()
    Path("known/all.toml").write_text(to_toml(Expectation(backend="*", case="lse", reason=reason)), encoding="utf-8")
    status, _, err = gate(report("o.json", facts, passed(facts)), "--expectations", "known")
    assert status == 2 and "known/all.toml: entry 1: expected a reason in words, got " in err

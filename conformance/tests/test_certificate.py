"""Certificates: issued for a whole run of a real kernel only, and rejected after any kind of tampering."""

import datetime
import json
import random
import re
from collections.abc import Callable
from dataclasses import replace
from functools import cache, partial, reduce
from operator import getitem
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

from mla_conformance.backends.references import parse_reference
from mla_conformance.certificate.certificate import Certificate, read_certificate, records_of
from mla_conformance.certificate.pins import Pins, Weight
from mla_conformance.certificate.records import kept_records, write_record
from mla_conformance.certificate.verify import Refused, committed, problems, require_real, require_whole, seal
from mla_conformance.certificate.verify import record as record_of
from mla_conformance.commands.certify import Issuing
from mla_conformance.commands.verify import rerun
from mla_conformance.driving.loaded import judging_sources
from mla_conformance.engine.journal import JOURNAL_NAME, Journal, Judgement, Planned
from mla_conformance.engine.machine import device_facts
from mla_conformance.engine.request import Plan, RunRequest
from mla_conformance.files.installed import Installed
from mla_conformance.files.whole import InputError
from mla_conformance.judging.record import BackendFacts, Record, Status, Traced
from mla_conformance.report.json_report import to_text
from mla_conformance.report.summary import Counts, RunSummary
from mla_conformance.speed.times import Interval, Speed, Timed
from mla_conformance.tests.reports import run_of
from mla_conformance.tests.test_handed_in import key_in, needs_keys
from mla_conformance.trials.facts import describe, region_of
from mla_conformance.trials.subject import Subject
from mla_conformance.version import SUITE_VERSION
from mla_conformance.vocabulary.arrays import SPACES, digest_of
from mla_conformance.vocabulary.capabilities import CAPABILITIES, FITTED, Tier

Json = dict[str, Any]
issue = partial(record_of, certifies=True)
TODAY = datetime.date(2026, 6, 1)
PINS = Pins(sources={"mla_conformance.backends.torch_sdpa": "ab" * 32}, versions={"torch": "2.13.0"})
CASES = [case for capability in CAPABILITIES.values() for case in capability.cases]
LISTED = [case.id for case in CASES]
OPTIONAL = next(case.id for case in CASES if case.own_merge)
WAIVED = "lse:" + CAPABILITIES["lse"].cases[0].id.partition(":")[2]


@cache
def here() -> Pins:
    return Pins.of(parse_reference("TORCH_SDPA"), {"msgspec": "0.20"})


def record(case: str, status: Status = Status.PASS) -> Record:
    return Record("TORCH_SDPA", "TORCH_SDPA", case.partition(":")[0], case, status)


KNOWN = {"judged": Status.FAIL, "check": "lse", "expectation": "known", "explanation": "the LSE is in base 2"}


def outcome(case: Any) -> Record:
    if case.capability != "refusals" and (case.own_merge or "quant_output" in case.asks):
        return record(case.id, Status.UNSUPPORTED)
    return record(case.id, Status.EXPECTED_FAILURE).with_fields(**KNOWN) if case.id == WAIVED else record(case.id)


RECORDS = [outcome(case) for case in CASES]


def run(records: list[Record]) -> RunSummary:
    environment = {"suite": SUITE_VERSION, "version": "2026.1.0", "tier": "full", "device": "NVIDIA H200"}
    facts = BackendFacts("TORCH_SDPA", "TORCH_SDPA", versions={"msgspec": "0.20"})
    return run_of(records, LISTED, [facts], environment=environment)


@pytest.fixture(scope="module")
def issued() -> str:
    return to_text(issue(run(RECORDS), TODAY, PINS))


@pytest.fixture
def certificate(issued: str) -> Json:
    data: Json = json.loads(issued)
    return data


def read(certificate: Json) -> Certificate:
    return msgspec.convert(certificate, Certificate)


def test_what_is_issued_verifies(certificate: Json) -> None:
    assert problems(read(certificate), TODAY) == []
    unsupported = sum(entry.status is Status.UNSUPPORTED for entry in RECORDS)
    assert certificate["counts"] == {
        "listed": len(CASES), "not_run": 0, "passed": len(CASES) - unsupported - 1, "failed": 0,
        "unsupported": unsupported, "unavailable": 0, "waived": 1,
    }  # fmt: skip
    assert [(entry["case"], entry["expectation"]) for entry in certificate["findings"]] == [(WAIVED, "known")]


def changed(case: str, status: Status) -> list[Record]:
    return [record(case, status) if entry.case == case else entry for entry in RECORDS]


LARGE = [case.id for case in CASES if case.capability == "large_offsets"]


def test_a_kernel_that_lacks_cases_has_a_record_that_says_so_and_one_that_has_no_room_its_reason() -> None:
    large = record(LARGE[0], Status.UNAVAILABLE).with_fields(message="may need 294912 MiB")
    issued = issue(run([large if entry.case == LARGE[0] else entry for entry in RECORDS]), TODAY, PINS)
    assert [(entry.case, entry.reason) for entry in issued.unjudged] == [(LARGE[0], "may need 294912 MiB")]
    assert problems(issued, TODAY) == []
    untold = msgspec.structs.replace(issued, unjudged=(), seal="")
    assert f"case {LARGE[0]} could not be judged, and nothing says why" in problems(untold, TODAY)
    lacking = changed(CASES[5].id, Status.UNSUPPORTED)
    found = record_of(run(lacking), TODAY, PINS)
    assert found.lacking == {CASES[5].id: "core: unsupported"} and problems(found, TODAY) == []
    for changes, said in (
        ({"lacking": {}}, f"1 must-pass cases did not pass, for example {CASES[5].id} (core: unsupported)"),
        ({"lacking": {**found.lacking, CORE: "core"}}, f"must-pass case {CORE} is listed as missing, but passed"),
    ):
        tampered = msgspec.structs.replace(found, **changes)
        assert problems(msgspec.structs.replace(tampered, seal=seal(tampered)), TODAY) == [said]


def test_a_certificate_tells_what_the_adapter_does_what_was_seen_to_run_and_how_fast(tmp_path: Path) -> None:
    interval = Interval(212.5, 210.0, 214.0)
    speed = Speed((Timed("decode", "decode 64 × 8k", "decode:q=[1]", interval, share=0.81),), copy=2e3)
    summary = run([RECORDS[0].with_fields(used={"element": 0.4}, seconds=0.25), *RECORDS[1:]])
    facts = replace(summary.backends[0].facts, deviations=(("LSE in base 2", "times ln 2"),))
    traced = Traced({"lse": ("flash::fwd",)}, {"x.so": "ab"})
    backend = replace(summary.backends[0], facts=facts, traced=traced, speed=speed)
    issued = issue(replace(summary, backends=(backend,)), TODAY, PINS)
    assert (issued.deviations[0].library, issued.deviations[0].adapter) == ("LSE in base 2", "times ln 2")
    assert issued.traced.kernels == {"lse": ("flash::fwd",)} and issued.traced.libraries == {"x.so": "ab"}
    assert (issued.worst["element"].share, issued.worst["element"].case) == (0.4, RECORDS[0].case)
    assert (issued.reference, issued.seconds, issued.speed) == ("TORCH_SDPA", 0.2, speed)
    assert problems(issued, TODAY) == []
    write_record(tmp_path / "records.jsonl", issued)
    assert [each.certificate for each in kept_records(tmp_path / "records.jsonl")] == [issued]


def set_to(*path: str, to: Any) -> Callable[[Json], None]:
    def tamper(certificate: Json) -> None:
        reduce(getitem, path[:-1], certificate)[path[-1]] = to

    return tamper


def judged_as(case: str, status: str | None) -> Callable[[Json], None]:
    def tamper(certificate: Json) -> None:
        del certificate["cases"][case]
        certificate["cases"] |= {case: status} if status else {}
        found = records_of("B", "B", read(certificate).cases)
        certificate["counts"] = msgspec.to_builtins(Counts.of(found))

    return tamper


CORE = "refusals:" + CAPABILITIES["refusals"].cases[0].id.partition(":")[2]

FINDING = {"case": WAIVED, "status": "fail", "check": "lse", "message": "m"}

TAMPERED: list[tuple[Callable[[Json], None], str]] = [
    (set_to("digests", "cases", to="0" * 64), "digest 'cases': expected "),
    (set_to("digests", "judging", to="0" * 64), "digest 'judging': expected "),
    (set_to("tier", to="smoke"), "tier smoke: only the full tier is certified"),
    (set_to("counts", "passed", to=len(CASES)), f"the certificate says {len(CASES)}"),
    (set_to("cases", OPTIONAL, to="pass"), "count 'passed': the cases give "),
    (set_to("cases", "lse:q=[77]", to="pass"), "1 cases are not in the suite's list, for example lse:q=[77]"),
    (judged_as(CORE, None), f"1 cases are missing, for example {CORE}"),
    (judged_as(CORE, "unsupported"), f"1 must-pass cases did not pass, for example {CORE} (core: unsupp"),
    (judged_as(CORE, "crash"), f"1 cases failed, which no certificate is issued for, for example {CORE}"),
    (judged_as(WAIVED, "pass"), f"a finding waives {WAIVED}, which is not waived among the cases"),
    (set_to("findings", to=[]), f"case {WAIVED} is waived, but no finding says why"),
    (set_to("findings", to=[{**FINDING, "expectation": ""}]), f"the finding on {WAIVED} gives no reason"),
    (set_to("findings", to=[{**FINDING, "expectation": "k", "explanation": ""}]), f"{WAIVED} is a wrong number, and"),
    (set_to("backend", to="EAGER"), "backend EAGER is an emulated kernel, which is never certified"),
    (set_to("device", to="NVIDIA B200"), "the certificate of NVIDIA B200"),
    (set_to("date", to="2027-01-01"), "date 2027-01-01 lies in the future"),
    (set_to("date", to="yesterday"), "date 'yesterday': expected YYYY-MM-DD"),
]


@pytest.mark.parametrize(("tamper", "said"), TAMPERED, ids=[f"{i}-{said}" for i, (_, said) in enumerate(TAMPERED)])
def test_tampering_is_rejected_under_a_new_seal(certificate: Json, tamper: Callable[[Json], None], said: str) -> None:
    tamper(certificate)
    tampered = read(certificate)
    found = problems(msgspec.structs.replace(tampered, seal=seal(tampered)), TODAY)
    assert any(said in problem for problem in found), found


@pytest.mark.parametrize(
    ("tamper", "said"),
    [
        (lambda c: c.pop("pins"), "object missing required field `pins`"),
        (set_to("note", to="trust me"), "object contains unknown field `note`"),
        (set_to("cases", CORE, to="splendid"), "cases[...]: expected one of the values of this field, got 'splendid'"),
        (set_to("counts", "passed", to=-1), "counts.passed: expected `int` >= 0"),
        (set_to("pins", "harness", to={"clean": "yes"}), "pins.harness.clean: expected `bool | null`, got `str`"),
    ],
)
def test_a_malformed_one_is_refused_with_the_place(certificate: Json, tamper: Any, said: str, tmp_path: Path) -> None:
    tamper(certificate)
    (tmp_path / "c.json").write_text(json.dumps(certificate))
    with pytest.raises(InputError) as refused:
        read_certificate(tmp_path / "c.json")
    assert str(refused.value) == f"{tmp_path / 'c.json'}: {said}"


REAL = BackendFacts("TORCH_SDPA", "TORCH_SDPA")
TOPK = replace(REAL, declared={"topk": ""})
NO_LARGE = [record(entry.case, Status.UNAVAILABLE) if entry.case in LARGE else entry for entry in RECORDS]
CLEAN, CHANGED = (
    msgspec.structs.replace(PINS, installed={"mine": Installed(commit="ab", clean=clean)}) for clean in (True, False)
)
REFUSED = [record(case.id).with_fields(message="refused: x") for case in CASES if case.capability == "refusals"]
ONLY_REFUSES = REFUSED + [record(case.id, Status.UNSUPPORTED) for case in CASES if case.capability != "refusals"]
NEVER: list[tuple[Callable[[], object], str]] = [
    (lambda: issue(run(RECORDS[1:]), TODAY, PINS), "incomplete: 1 cases of new_tokens were not run"),
    (lambda: issue(run(changed(CASES[5].id, Status.HARNESS_ERROR)), TODAY, PINS), "1 failures of new_tokens, first"),
    (lambda: issue(run(changed(CASES[5].id, Status.UNAVAILABLE)), TODAY, PINS), "did not pass: core: unavailable"),
    (lambda: issue(run(NO_LARGE), TODAY, PINS), "no case of large_offsets could be judged here"),
    (lambda: record_of(run(changed(CASES[5].id, Status.FAIL)), TODAY, PINS), "1 failures of new_tokens"),
    (lambda: record_of(run(ONLY_REFUSES), TODAY, PINS), "TORCH_SDPA is not judged: refuses "),
    (lambda: require_whole(1, LISTED[1:]), "1 cases are left out, for example"),
    (lambda: require_whole(1, [*LISTED, "lse:q=[77]"]), "1 cases are not of the full tier, for example lse:q=[77]"),
    (lambda: require_whole(1, LISTED, True), "drawn cases are in no list; certify without --explore"),
    (lambda: require_whole(2, LISTED), "expected one --backend, got 2"),
    (lambda: require_real(replace(REAL, emulated=True)), "is an emulated kernel, which is judged but never certified"),
    (lambda: require_real(replace(REAL, reasons=("no GPU",))), "TORCH_SDPA is unavailable: no GPU"),
    (lambda: require_real(TOPK, certifies=True), "is topk, a certificate needs prefill or decode or s"),
    (lambda: committed(CHANGED), "package mine is a checkout with changes"),
]


@pytest.mark.parametrize(("asked", "reason"), NEVER, ids=[reason for _, reason in NEVER])
def test_what_can_never_be_certified_is_refused_with_a_reason(asked: Callable[[], object], reason: str) -> None:
    with pytest.raises(Refused, match=re.escape(reason)):
        asked()


def test_a_run_that_cannot_be_certified_is_refused_before_it_starts_and_digests_cover_what_decides(
    tmp_path: Path, told: Any
) -> None:
    chosen = ["--backend=TORCH_SDPA", "--tier=smoke", "--device=cpu", "-n1"]
    said = told(3, "certify", *chosen, f"--out={tmp_path / 'out'}", f"--certificate={tmp_path / 'file'}")
    assert "no certificate: " in said and list(tmp_path.iterdir()) == []
    require_whole(1, LISTED)
    require_real(REAL)
    require_real(replace(REAL, declared={"decode": "", "topk": ""}), True)
    assert committed(CLEAN) == CLEAN
    names = {"operands.py", "remote.py", "driver.py", "judge.py", "tolerance.toml", "trial.py", "procedures.py"}
    assert names <= {path.name for path in judging_sources()}


@pytest.mark.parametrize(
    ("case", "now", "salt", "weights"),
    [
        (CORE, Status.FAIL, "", [Weight.AGAINST]),
        (CORE, Status.FAIL, "new", [Weight.AGAINST]),
        (CORE, Status.UNSUPPORTED, "new", [Weight.AGAINST]),
        (CORE, Status.UNAVAILABLE, "new", [Weight.REPORTED]),
        (WAIVED, Status.PASS, "", [Weight.AGAINST]),
        (WAIVED, Status.PASS, "new", [Weight.REPORTED]),
        (WAIVED, Status.FAIL, "", []),
    ],
)
def test_a_rerun_is_compared(certificate: Json, monkeypatch: Any, case: str, now: Any, salt: str, weights: Any) -> None:
    """A known failure may need its own inputs to show; a pass that fails is one on any."""
    monkeypatch.setattr("mla_conformance.commands.verify._run", lambda request: run(changed(case, now)))
    found = list(rerun(read(certificate), len(CASES), "TORCH_SDPA", "cpu", salt))
    was = "pass" if case == CORE else "expected_failure"
    assert [remark.weight for remark in found] == weights
    assert all(each.sentence.startswith(f"case {case}: the certificate says {was}, run again") for each in found)


def test_what_changed_or_failed_gets_nothing_and_what_lacks_cases_a_record(tmp_path: Path, capsys: Any) -> None:
    before, lacking = msgspec.structs.replace(here(), sources={}), run(changed(CASES[5].id, Status.UNSUPPORTED))
    for kind, pins, judged, ended, status, said in (
        ("record", before, run(RECORDS), 0, 1, "the backend, one of its packages or the harness changed"),
        ("certificate", before, run(RECORDS), 3, 3, "the run failed or is incomplete"),
        ("certificate", here(), lacking, 0, 1, f"must-pass case {CASES[5].id} did not pass"),
    ):
        assert Issuing(kind, tmp_path / "c.json", None, pins).write(judged, ended) == status
        assert f"no {kind}: {said}" in capsys.readouterr().err and list(tmp_path.iterdir()) == []
    assert Issuing("record", tmp_path / "r.json", None, here()).write(lacking, 0) == 0
    assert read_certificate(tmp_path / "r.json").pins == here()


@needs_keys
def test_what_is_issued_is_signed_if_a_key_is_given(tmp_path: Path) -> None:
    assert Issuing("certificate", tmp_path / "c.json", key_in(tmp_path), here()).write(run(RECORDS), 0) == 0
    assert "BEGIN SSH SIGNATURE" in (tmp_path / "c.json.sig").read_text()


def all_but_two(folder: Path) -> None:
    """What a full run leaves behind that was killed before its last two verdicts."""
    device = torch.device("cpu")
    request, subject = RunRequest.of(["TORCH_SDPA"], device="cpu"), Subject.of("TORCH_SDPA", device)
    regions = (region_of(subject, SPACES[name], FITTED[Tier.FULL]) for name in request.arrays)
    fitted = tuple(case.id for region in regions for case in region.cases)
    facts = [replace(describe(subject), fitted=fitted, region=digest_of(fitted))]
    journal = Journal(folder / JOURNAL_NAME)
    journal.append(Planned(msgspec.to_builtins(Plan.of(request, "cpu", device_facts(device), facts))))
    for entry in (*RECORDS[2:], *map(record, fitted)):
        journal.append(Judgement(record(entry.case) if entry.case == WAIVED else entry))


def test_a_run_is_certified_verified_and_run_again(tmp_path: Path, told: Any, monkeypatch: Any) -> None:
    records = tmp_path / "records.jsonl"
    # One case is fitted to one role, which is done twice and takes long of many.
    monkeypatch.setattr(RunRequest, "drawn", property(lambda run: ("decode_combinations",)))
    monkeypatch.setitem(FITTED, Tier.FULL, 1)
    all_but_two(tmp_path)
    told(0, "certify", "--resume", tmp_path, "-n1", "--submission", records)
    told(0, "gate", tmp_path, "--must-pass", "--require", "TORCH_SDPA")
    monkeypatch.setattr(random.SystemRandom, "sample", lambda self, cases, number: LISTED[:number])
    said = told(0, "verify", records, "--rerun", "2", "--device", "cpu", "--salt", "s1")
    assert "TORCH_SDPA on cpu" in said and "holds · 2 run again with salt s1" in said
    file = tmp_path / "record.json"
    file.write_bytes(msgspec.json.encode(kept_records(records)[0].certificate))
    said = told(2, "verify", file, "--rerun", "1", "--backend", "EAGER", "--device", "cpu")
    assert "expected the certificate's backend, TORCH_SDPA, got EAGER" in said

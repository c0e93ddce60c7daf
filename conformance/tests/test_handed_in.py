"""Records handed in: a file that one command writes and one command checks, line by line, signed or not."""

import json
import shutil
import subprocess
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from importlib.metadata import version
from importlib.resources import files
from pathlib import Path
from typing import Any

import msgspec
import pytest

from mla_conformance.backends.references import parse_reference
from mla_conformance.cases.case import Case
from mla_conformance.certificate import verify
from mla_conformance.certificate.certificate import Certificate, Finding, read_certificate, sign
from mla_conformance.certificate.pins import Pins
from mla_conformance.certificate.records import change_records, kept_records, write_record
from mla_conformance.certificate.verify import record_digests, seal
from mla_conformance.files.whole import InputError
from mla_conformance.gating.mustpass import MustPass
from mla_conformance.judging.record import NOTHING_TRACED, Status
from mla_conformance.report.summary import Counts
from mla_conformance.tests.reports import script
from mla_conformance.version import SUITE_VERSION, __version__, numbers_of
from mla_conformance.vocabulary import capabilities
from mla_conformance.vocabulary.arrays import digest_of
from mla_conformance.vocabulary.capabilities import CAPABILITIES, added_cases, first_cases, lists_of

CASES = [case.id for capability in CAPABILITIES.values() for case in capability.cases]
COUNTS = msgspec.structs.replace(Counts(), listed=len(CASES), passed=len(CASES))
PINS = Pins.of(parse_reference("TORCH_SDPA"), {"msgspec": version("msgspec")})
GPU = {"device": "some GPU", "environment": {"device": "some GPU", "suite": SUITE_VERSION}}
needs_keys = pytest.mark.skipif(shutil.which("ssh-keygen") is None, reason="ssh-keygen is not installed here")


def certificate(**changes: Any) -> Certificate:
    made = Certificate(
        suite=SUITE_VERSION, version="1", tier="full", date="2026-01-01", backend="TORCH_SDPA", reference="TORCH_SDPA",
        device="cpu", environment={"device": "cpu", "suite": SUITE_VERSION}, pins=PINS, rounding={}, deviations=(),
        evidence=(), traced=NOTHING_TRACED, digests=record_digests(()), counts=COUNTS, worst={}, seconds=1.0,
        findings=(), unjudged=(), lacking={}, cases=dict.fromkeys(CASES, Status.PASS),
    )  # fmt: skip
    made = msgspec.structs.replace(made, **changes)
    return msgspec.structs.replace(made, seal=seal(made))


@pytest.fixture
def records(tmp_path: Path) -> Path:
    write_record(tmp_path / "records.jsonl", certificate())
    write_record(tmp_path / "records.jsonl", certificate(**GPU))
    return tmp_path / "records.jsonl"


@pytest.fixture
def record(tmp_path: Path) -> Path:
    (tmp_path / "record.json").write_bytes(msgspec.json.encode(certificate()))
    return tmp_path / "record.json"


def test_what_is_written_holds_line_by_line(records: Path, ours: Any, refused: Any) -> None:
    status, said, _ = ours("verify", records)
    assert status == 0
    assert f"{records}: line 2: TORCH_SDPA on cpu" in said and f"{records}: line 3: TORCH_SDPA on some GPU" in said
    assert "expected a record of EAGER, got none" in refused("verify", records, "--backend", "EAGER")
    records.write_text(records.read_text().replace('"backend":"TORCH_SDPA"', '"backend":"OTHER"', 1))
    status, out, err = ours("verify", records)
    assert status == 2 and f"{records}: line 2: expected the certificate's backend, OTHER, got TORCH_SDPA" in err
    assert f"{records}: line 3: TORCH_SDPA on some GPU" in out


def edited(line: str, record: bool = True, **changes: Any) -> str:
    plain = json.loads(line)
    (plain["record"] if record else plain).update(changes)
    return json.dumps(plain)


@pytest.mark.parametrize(
    ("spoil", "status", "said"),
    [
        (lambda line: line[:900], 2, "line 2: not JSON (cut off?)"),
        (lambda line: edited(line, statuses="p7", record=False), 2, "its statuses are not those of"),
        (lambda line: edited(line, tier=json.loads("[" * 480 + "]" * 480)), 2, ": expected "),
        (lambda line: edited(line, fitted=[f"{2**30} {'x' * 90}"] * 999, record=False), 2, "its texts have more than"),
        (lambda line: edited(line, schema="other/1"), 2, "line 2: expected a record of schema"),
        (lambda line: edited(line, suite="2026.1"), 2, f"expected a record of suite {SUITE_VERSION}, got"),
        (lambda line: edited(line, seconds=2.0), 1, "the seal does not fit the content"),
        (lambda line: edited(line, statuses=f"u1p{len(CASES) - 1}", record=False), 1, "the seal does not fit"),
        (lambda line: f"{line}\n{line}", 2, "line 3: expected another kernel, version or device than line 2"),
    ],
)  # fmt: skip
def test_a_line_that_is_torn_or_edited_is_refused(records: Path, ours: Any, spoil: Any, status: int, said: str) -> None:
    head, first, second, _ = records.read_text().split("\n")
    records.write_text("\n".join([head, spoil(first), second, ""]))
    found, out, err = ours("verify", records)
    assert found == status and said in err and "TORCH_SDPA on some GPU" in out
    write_record(records, certificate(**GPU, seconds=3.0))
    assert {*spoil(first).split("\n")} - {first} <= {*records.read_text().split("\n")}


HEAD = '{"schema": "%s/1", "suite": "%s", "cases": [%s]}'
KEPT = "mla-conformance-records"
VERIFY = "verify {}"
CERTIFY = "certify --backend TORCH_SDPA --submission {}"


@pytest.mark.parametrize(
    ("command", "name", "text", "said"),
    [
        (VERIFY, "r.jsonl", HEAD % ("other", 1, ""), "line 1: expected schema mla-conformance-records/1"),
        (VERIFY, "r.jsonl", HEAD % (KEPT, 1, '"x"'), "expected ids as `certify --sub"),
        (VERIFY, "r.jsonl", HEAD % (KEPT, 1, "") + "\n", "expected a line for each record"),
        (CERTIFY, "submissions", "", "expected a file of records, such as fixtures/records/"),
        (CERTIFY, "old.jsonl", HEAD % (KEPT, "2026.1", ""), "got those of 2026.1"),
        (CERTIFY, "torn.jsonl", "{", "torn.jsonl: line 1: not JSON"),
    ],
)
def test_a_file_of_no_records_is_refused(
    here: Any, refused: Any, command: str, name: str, text: str, said: str
) -> None:
    if text:
        Path(name).write_text(text)
    assert said in refused(*command.format(name).split())


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ({"schema": "mla-conformance-certificate/5"}, "whose form mla-conformance-certificate/5 pins too little"),
        ({"suite": "2026.1"}, f"of suite 2026.1, outdated by {SUITE_VERSION}, which is installed here"),
    ],
)
def test_an_old_record_is_told_how_to_be_renewed(record: Path, told: Any, content: dict[str, str], said: str) -> None:
    record.write_bytes(msgspec.json.encode({**msgspec.to_builtins(certificate()), **content}))
    found = told(1, "verify", record)
    assert said in found and "renew it: mla-conformance certify --backend TORCH_SDPA --device cpu --subm" in found


def test_a_record_replaces_one_of_its_kernel_alone(records: Path, tmp_path: Path) -> None:
    before = records.read_text().split("\n")
    pins = msgspec.structs.replace(PINS, versions={"msgspec": "0.1"})
    for made in (certificate(seconds=2.0), certificate(pins=pins), certificate(device="another GPU")):
        write_record(records, made, signature="somebody's")
    kept = [each for each in kept_records(records) if each.certificate.backend == "TORCH_SDPA"]
    assert [each.signature for each in kept].count("somebody's") == 3 and len(kept) == 4
    assert {each.certificate.seconds for each in kept if each.certificate.device == "cpu"} == {1.0, 2.0}
    after = records.read_text().split("\n")
    assert before[2] in after and before[1] not in after and len(after) == len(before) + 2
    path = tmp_path / "at_once.jsonl"
    many = [certificate(backend=f"K{number}") for number in range(8)]
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda each: write_record(path, each), many))
    assert [each.certificate for each in kept_records(path)] == many


NEXT = f"{SUITE_VERSION}.{numbers_of(__version__)[2] + 1}"
NEW = Case.parse("lse:call=context_chunk;q=[3,1,4];kv=[1,5,9];seed=26").id


@pytest.fixture
def grow(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[], None]]:
    """One line more in a role's list, with the version that adds it."""
    known = (lists_of, first_cases, added_cases, verify.listed_ids, verify.installed_digests, MustPass.of_vocabulary)

    def add() -> None:
        text = (files("mla_conformance.roles.prefill") / "cases.txt").read_text("utf-8")
        line = f"{NEW.partition(':')[2]} +{NEXT}  # why it is there"
        monkeypatch.setitem(capabilities._OUTSIDE, "prefill", text.replace("\n[lse]\n", f"\n[lse]\n{line}\n"))
        monkeypatch.setitem(CAPABILITIES, "lse", replace(CAPABILITIES["lse"]))
        for each in known:
            each.cache_clear()

    yield add
    monkeypatch.undo()
    for each in known:
        each.cache_clear()


def test_a_case_that_is_added_is_not_yet_judged(records: Path, tmp_path: Path, told: Any, grow: Any) -> None:
    """Records from before hold for what they judged, under their own lines, and are shown as of this suite."""
    version_digests = script("suite_version").version_digests
    before, stored = records.read_text().split("\n"), version_digests()
    grow()
    counts = msgspec.structs.replace(COUNTS, listed=len(CASES) + 1, passed=len(CASES) + 1)
    of_all = {"digests": record_digests(()), "counts": counts, "cases": dict.fromkeys(verify.listed_ids(), Status.PASS)}
    assert version_digests() == stored and MustPass.of_suite() == MustPass.of_vocabulary()
    write_record(records, certificate(**GPU, **of_all))
    assert before[1] in records.read_text().split("\n") and before[2] not in records.read_text().split("\n")
    said = told(0, "verify", records)
    assert said.count("not yet judged") == 1
    assert f"1 cases of the suite's list are not yet judged, for example {NEW}" in said
    told(0, "scoreboard", records, "--out", tmp_path / "site")
    assert f"suite {SUITE_VERSION}, 1 cases not yet judged" in (tmp_path / "site" / "index.html").read_text("utf-8")
    for since, error in (("1", "digest 'cases': expected"), (NEXT, f"1 cases are missing, for example {NEW}")):
        lacking = certificate(version=since, digests=record_digests(()))
        records.with_suffix(".json").write_bytes(msgspec.json.encode(lacking))
        assert error in told(1, "verify", records.with_suffix(".json"))


def test_a_record_of_an_earlier_suite_holds_with_its_own_list(record: Path, monkeypatch: Any, ours: Any) -> None:
    here, stored = record_digests(()), verify._stored
    *added, third = sorted(CAPABILITIES["lse"].cases, key=lambda case: case.id)[:3]
    listed = tuple(id for id in verify.listed_ids() if id not in {each.id for each in (*added, third)})
    grown = (*listed, *(each.id for each in added))  # by two cases that were added
    own = {"must_pass": "c" * 64, "fitted": digest_of((), listed)}
    earlier = {"cases": verify.cases_digest(listed), verify.NUMBER: len(listed)}
    earlier |= {"judging": ["a" * 64], "reference": [here["reference"]]}
    monkeypatch.setattr(verify, "_stored", lambda suite=SUITE_VERSION: earlier if suite == "2026.1" else stored(suite))
    began, known = (here | own | {"judging": "a" * 64, "cases": verify.cases_digest(ids)} for ids in (listed, grown))

    def made(stated: dict[str, str], cases: Sequence[str]) -> Certificate:
        return certificate(
            suite="2026.1",
            environment={"device": "cpu", "suite": "2026.1"},
            digests=stated,
            cases=dict.fromkeys(cases, Status.PASS),
            counts=msgspec.structs.replace(COUNTS, listed=len(cases), passed=len(cases)),
        )

    unlisted = "which suite 2026.1 does not list"
    for stated, cases, said in (
        (began, listed, ""),
        (known, grown, ""),
        (known, grown[1:], f"of suite 2026.1, outdated by {SUITE_VERSION}"),
        (known, grown[:-1], f"got {known['cases']}, {unlisted}"),
        (known | {"judging": "b" * 64}, grown, f"got {'b' * 64}, {unlisted}"),
        (known | {"cases": "b" * 64}, grown, f"got {'b' * 64}, {unlisted}"),
    ):
        record.write_bytes(msgspec.json.encode(made(stated, cases)))
        status, _, err = ours("verify", record)
        assert status == bool(said) and said in err
    record.write_bytes(msgspec.json.encode(made(known, grown)))
    status, _, err = ours("verify", record, "--rerun", "1")
    said = f"expected a record of suite {SUITE_VERSION}, which is installed here, to run again"
    assert status == 1 and said in err


FAILED = "new_tokens:q=[1];data=needle;lse=0"
ENTRY = f"""[[expectation]]
backend = "TORCH_SDPA"
case = "{FAILED}"
check = "lse"
reason = "its rows are added in bf16"
"""


@pytest.fixture
def failing(record: Path, tmp_path: Path) -> Path:
    (tmp_path / "known.toml").write_text(ENTRY)
    finding = Finding(FAILED, Status.FAIL, "lse", "LSE is 1.5, expected 1", "old.toml entry 1: bug: not looked into")
    cases = {**certificate().cases, FAILED: Status.EXPECTED_FAILURE}
    counts = msgspec.structs.replace(COUNTS, passed=COUNTS.passed - 1, waived=1)
    record.write_bytes(msgspec.json.encode(certificate(cases=cases, counts=counts, findings=(finding,))))
    return record


def explained(path: Path) -> list[object]:
    return ["expectations", "explain", path, "--expectations", path.parent]


def test_a_record_with_another_reason_must_be_signed_again(failing: Path, records: Path, told: Any) -> None:
    before = read_certificate(failing)
    (beside := failing.with_name("record.json.sig")).touch()
    told(0, *explained(failing))
    told(0, "verify", failing)
    assert not beside.exists()
    write_record(records, before, "a signature")
    untouched = records.read_text().split("\n")[2]
    assert "TORCH_SDPA on cpu: 1 of 1 failures have another" in told(0, *explained(records))
    kept, _ = kept_records(records)
    after = kept.certificate
    assert after.findings[0].expectation.endswith("its rows are added in bf16") and not kept.signature
    assert msgspec.structs.replace(after, findings=before.findings, seal=before.seal) == before
    assert untouched in records.read_text().split("\n")
    told(0, "verify", records)


@pytest.mark.parametrize(
    ("shown", "entry", "said"),
    [
        ("1.5", "output", f"expected an entry for fail of {FAILED}, got none"),
        ("1.6", "lse", "expected a record that verifies; the seal does not fit the content"),
    ],
)
def test_what_does_not_fit_is_not_explained(failing: Path, refused: Any, shown: str, entry: str, said: str) -> None:
    failing.with_name("known.toml").write_text(ENTRY.replace('check = "lse"', f'check = "{entry}"'))
    failing.write_text(failing.read_text().replace("LSE is 1.5", f"LSE is {shown}"))
    written = failing.read_bytes()
    assert said in refused(*explained(failing)) and failing.read_bytes() == written


def key_in(folder: Path) -> Path:
    subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", folder / "key"], check=True)
    return folder / "key"


@pytest.fixture
def keys(tmp_path: Path) -> tuple[Path, Path]:
    key, signers = key_in(tmp_path), tmp_path / "signers"
    signers.write_text(f'me@example.org namespaces="mla-conformance" {key.with_suffix(".pub").read_text()}')
    return key, signers


@needs_keys
def test_a_signature_holds_for_content_and_signer(record: Path, keys: Any, tmp_path: Path, told: Any) -> None:
    key, signers = keys
    asked = ("verify", record, "--signature", "--signers", signers)
    assert "it is not signed: there is no record.json.sig" in told(1, *asked)
    record.with_name("record.json.sig").write_text(sign(record.read_text(), key))
    assert "signed by me@example.org" in told(0, *asked)
    assert "record.json.sig was not checked" in told(0, *asked[:2])
    record.write_bytes(record.read_bytes() + b"\n")
    assert "is no signature of me@example.org under this content" in told(1, *asked)
    signers.write_text("")
    assert f"is of none of the signers of {signers}" in told(1, *asked)
    assert "expected a file of allowed" in told(2, *asked[:-1], tmp_path / "none")


@needs_keys
def test_a_line_is_signed_by_its_seal(records: Path, keys: tuple[Path, Path], told: Any) -> None:
    key, signers = keys
    for each in kept_records(records):
        write_record(records, each.certificate, sign(each.certificate.seal, key))
    asked = ["verify", records, "--signature", "--signers", signers]
    assert told(0, *asked).count("signed by me@example.org") == 2
    changed = certificate(seconds=2.0)
    change_records(records, lambda kept: [replace(each, certificate=changed) for each in kept[:1]] + kept[1:])
    assert "line 2: signature is no signature of me@example.org" in told(1, *asked)


@needs_keys
def test_a_key_that_cannot_sign_is_refused(tmp_path: Path, refused: Any) -> None:
    (tmp_path / "text").write_text("no key")
    with pytest.raises(InputError, match="ssh-keygen refuses it"):
        sign("content", tmp_path / "text")
    certify, signed = ["certify", "--backend=TORCH_SDPA", "--device=cpu"], ["--sign", tmp_path / "none"]
    assert "expected the file of an SSH key" in refused(*certify, "--record=r.json", *signed)
    assert "with --certificate or --submission or --record" in refused(*certify, *signed)


def test_a_signature_is_said_to_need_ssh_keygen(record: Path, tmp_path: Path, monkeypatch: Any, refused: Any) -> None:
    monkeypatch.setenv("PATH", str(tmp_path / "empty"))
    for name in ("record.json.sig", "signers"):
        record.with_name(name).touch()
    assert "ssh-keygen, which is not here" in refused("verify", record, "--signers", record.with_name("signers"))
    assert "expected together with --signers" in refused("verify", record, "--signature")

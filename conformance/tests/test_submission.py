"""Submissions: a folder that one command writes and one command checks, signed or not."""

import shutil
import subprocess
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path

import msgspec
import pytest

from mla_conformance.backends.references import parse_reference
from mla_conformance.certificate.certificate import Certificate, Finding, read_certificate
from mla_conformance.certificate.digests import record_digests, seal
from mla_conformance.certificate.pins import Pins
from mla_conformance.certificate.signature import sign
from mla_conformance.certificate.submission import folder_of, folder_problems, write_submission
from mla_conformance.cli import main
from mla_conformance.files.inputs import InputError
from mla_conformance.judging.record import NOTHING_TRACED
from mla_conformance.judging.verdict import Status
from mla_conformance.report.summary import Counts
from mla_conformance.version import SUITE_VERSION
from mla_conformance.vocabulary.capabilities import CAPABILITIES

CASES = [case.id for capability in CAPABILITIES.values() for case in capability.cases]
COUNTS = msgspec.structs.replace(Counts(), listed=len(CASES), passed=len(CASES))
PINS = Pins.of(parse_reference("TORCH_SDPA"), {"msgspec": version("msgspec")})
needs_keys = pytest.mark.skipif(shutil.which("ssh-keygen") is None, reason="ssh-keygen is not installed here")


def certificate() -> Certificate:
    made = Certificate(
        suite=SUITE_VERSION, version="1", tier="full", date="2026-01-01", backend="TORCH_SDPA", reference="TORCH_SDPA",
        device="cpu", environment={"device": "cpu", "suite": SUITE_VERSION}, pins=PINS, rounding={}, deviations=(),
        evidence=(), traced=NOTHING_TRACED, digests=record_digests(()), counts=COUNTS, worst={}, seconds=1.0,
        findings=(), unjudged=(), lacking={}, cases=dict.fromkeys(CASES, Status.PASS),
    )  # fmt: skip
    return msgspec.structs.replace(made, seal=seal(made))


@pytest.fixture
def submissions(tmp_path: Path) -> Path:
    """A folder with one submission."""
    write_submission(tmp_path / "submissions", certificate())
    return tmp_path / "submissions"


@pytest.fixture
def record(submissions: Path) -> Path:
    return submissions / SUITE_VERSION / "TORCH_SDPA" / "record.json"


def test_what_is_written_is_accepted_by_any_of_its_names(submissions: Path, record: Path) -> None:
    for path in (submissions, record.parent.parent, record.parent, record):
        assert main(["verify", str(path)]) == 0
    assert f"msgspec=={version('msgspec')}" in record.with_name("environment.txt").read_text().splitlines()


@pytest.mark.parametrize(
    ("backend", "name"),
    [("FLASHINFER_MLA[fa3]", "FLASHINFER_MLA-fa3"), ("TORCH_SDPA", "TORCH_SDPA"), ("my kernel/2", "my-kernel-2")],
)
def test_a_kernel_has_a_folder_of_its_name(backend: str, name: str) -> None:
    assert folder_of("2026.4", backend) == Path("2026.4") / name


@pytest.mark.parametrize(
    ("spoil", "said"),
    [
        (lambda kernel: kernel.rename(kernel.with_name("FLASHMLA")), "it lies in"),
        (lambda kernel: (kernel / "notes.txt").touch(), "notes.txt lies beside it; expected environment.txt, record"),
        (lambda kernel: (kernel.parent / "README").touch(), "README belongs to no submission"),
        (lambda kernel: (kernel.parent / "link").symlink_to("/etc"), "link belongs to no submission"),
        (lambda kernel: (kernel / "environment.txt").unlink(), "there is no environment.txt beside it"),
        (lambda kernel: (kernel / "environment.txt").write_text("msgspec==0\n"), "says msgspec 0, the record "),
        (lambda kernel: (kernel / "environment.txt").write_text(""), "says msgspec is not installed, the record "),
    ],
)
def test_a_folder_that_is_not_in_order_is_refused(
    submissions: Path, record: Path, capsys: pytest.CaptureFixture[str], spoil: Callable[[Path], None], said: str
) -> None:
    spoil(record.parent)
    assert main(["verify", str(submissions)]) == 1
    assert said in capsys.readouterr().err


def test_what_is_no_submission_is_bad_input(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["verify", str(tmp_path)]) == 2
    assert "expected submissions, <suite>/<kernel>/record.json" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ({"schema": "mla-conformance-certificate/5"}, "whose form mla-conformance-certificate/5 pins too little"),
        ({"suite": "2026.1"}, f"of suite 2026.1, outdated by {SUITE_VERSION}, which is installed here"),
    ],
)
def test_an_old_record_is_told_to_be_old_with_how_to_renew_it(
    record: Path, capsys: pytest.CaptureFixture[str], content: dict[str, str], said: str
) -> None:
    old = {**certificate().to_json(), **content}
    record.write_bytes(msgspec.json.encode(old))
    assert main(["verify", str(record)]) == 1
    printed = capsys.readouterr().err
    assert said in printed and "renew it: mla-conformance certify --backend TORCH_SDPA --device cpu --subm" in printed


def test_a_submission_replaces_an_earlier_one_and_its_signature(submissions: Path, record: Path) -> None:
    record.with_name("record.json.sig").touch()
    assert write_submission(submissions, certificate()) == record
    assert not record.with_name("record.json.sig").exists()


def test_a_record_of_other_versions_is_kept_beside_the_new_one(submissions: Path, record: Path) -> None:
    older = msgspec.structs.replace(certificate(), pins=msgspec.structs.replace(PINS, versions={"msgspec": "0.1"}))
    for one in (older, certificate(), older, certificate()):
        write_submission(submissions, msgspec.structs.replace(one, seal=seal(one)))
    kept = record.parent.with_name("TORCH_SDPA@0.1") / record.name
    assert [read_certificate(path).pins.versions for path in (record, kept)] == [PINS.versions, {"msgspec": "0.1"}]
    own = f"TORCH_SDPA@{'-'.join(PINS.versions.values())}"
    assert {path.name for path in record.parent.parent.iterdir()} == {"TORCH_SDPA", "TORCH_SDPA@0.1", own}
    assert not any(folder_problems(record, certificate()))
    kept.with_name("environment.txt").write_text("msgspec==0.1\n")
    assert not any(folder_problems(kept, older))


FAILED = "new_tokens:q=[1];data=needle;lse=0"
ENTRY = f"""[[expectation]]
backend = "TORCH_SDPA"
case = "{FAILED}"
check = "lse"
reason = "its rows are added in bf16"
"""


@pytest.fixture
def failing(record: Path) -> Path:
    """A record of a kernel with one known failure, whose cause nobody knew when it was run."""
    finding = Finding(FAILED, Status.FAIL, "lse", "LSE is 1.5, expected 1", "old.toml entry 1: bug: not looked into")
    known = msgspec.structs.replace(
        certificate(),
        cases={**certificate().cases, FAILED: Status.EXPECTED_FAILURE},
        counts=msgspec.structs.replace(COUNTS, passed=COUNTS.passed - 1, waived=1),
        findings=(finding,),
    )
    record.write_bytes(msgspec.json.encode(msgspec.structs.replace(known, seal=seal(known)).to_json()))
    return record


def test_a_reason_that_is_found_after_a_run_stands_in_its_record_which_must_be_signed_again(
    failing: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "known.toml").write_text(ENTRY)
    failing.with_name("record.json.sig").touch()
    before = read_certificate(failing)
    assert main(["expectations", "explain", str(failing), "--expectations", str(tmp_path)]) == 0
    assert "1 of 1 failures have another reason than before" in capsys.readouterr().out
    after = read_certificate(failing)
    assert after.findings[0].expectation.endswith("its rows are added in bf16")
    assert msgspec.structs.replace(after, findings=before.findings, seal=before.seal) == before
    assert main(["verify", str(failing.parent)]) == 0 and not failing.with_name("record.json.sig").exists()


@pytest.mark.parametrize(
    ("record_says", "entry_says", "said"),
    [
        ("1.5", "output", f"expected an entry for fail of {FAILED}, got none"),
        ("1.6", "lse", "expected a record that verifies; the seal does not fit the content"),
    ],
)
def test_what_no_entry_foresees_and_what_does_not_verify_is_not_explained(
    failing: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], record_says: str, entry_says: str, said: str
) -> None:
    (tmp_path / "known.toml").write_text(ENTRY.replace('check = "lse"', f'check = "{entry_says}"'))
    failing.write_text(failing.read_text().replace("LSE is 1.5", f"LSE is {record_says}"))
    written = failing.read_bytes()
    assert main(["expectations", "explain", str(failing), "--expectations", str(tmp_path)]) == 2
    assert said in capsys.readouterr().err and failing.read_bytes() == written


@pytest.fixture
def keys(tmp_path: Path) -> tuple[Path, Path]:
    """An SSH key, and the file that allows what it signs."""
    key = tmp_path / "key"
    subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", key], check=True)
    signers = tmp_path / "signers"
    signers.write_text(f'me@example.org namespaces="mla-conformance" {key.with_suffix(".pub").read_text()}')
    return key, signers


@needs_keys
def test_a_signature_holds_for_its_content_and_its_signer(
    record: Path, keys: tuple[Path, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    key, signers = keys
    asked = ["verify", str(record.parent), "--signature", "--signers", str(signers)]
    assert main(asked) == 1 and "it is not signed: there is no record.json.sig" in capsys.readouterr().err
    sign(record, key)
    assert main(asked) == 0 and "signed by me@example.org" in capsys.readouterr().out
    assert main(["verify", str(record)]) == 0 and "record.json.sig was not checked" in capsys.readouterr().out
    record.write_bytes(record.read_bytes() + b"\n")
    assert main(asked) == 1 and "is no signature of me@example.org under this content" in capsys.readouterr().err
    signers.write_text("")
    assert main(asked) == 1 and f"is of none of the signers of {signers}" in capsys.readouterr().err
    assert main([*asked[:-1], str(tmp_path / "none")]) == 2 and "expected a file of allowed" in capsys.readouterr().err


@needs_keys
def test_a_key_that_cannot_sign_is_refused(record: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "text").write_text("no key")
    with pytest.raises(InputError, match="ssh-keygen refuses it"):
        sign(record, tmp_path / "text")
    certify = ["certify", "--backend=TORCH_SDPA", "--device=cpu", "--record=r.json", "--sign", str(tmp_path / "none")]
    assert main(certify) == 2 and "expected the file of an SSH key" in capsys.readouterr().err


def test_without_ssh_keygen_a_signature_is_said_to_need_it(
    record: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path / "empty"))
    for name in ("record.json.sig", "signers"):
        record.with_name(name).touch()
    assert main(["verify", str(record), "--signers", str(record.with_name("signers"))]) == 2
    assert "ssh-keygen, which is not here" in capsys.readouterr().err

"""What a sanitizer reported, as a file beside a record: which cases it is of, written, checked and shown."""

from pathlib import Path
from typing import Any

import msgspec
import pytest

from mla_conformance.certificate.certificate import Certificate, SanitizedKernel, SanitizerFinding
from mla_conformance.certificate.records import KeptRecord, kept_records, pack, write_record, write_sanitized
from mla_conformance.cli import main
from mla_conformance.commands import sanitize
from mla_conformance.commands.sanitize import choose
from mla_conformance.engine.request import RunRequest
from mla_conformance.judging.record import Traced
from mla_conformance.tests.test_handed_in import PINS, certificate
from mla_conformance.traits.called import CallsBegin
from mla_conformance.traits.sanitizer import Sanitized, Tool, Watch, Watched
from mla_conformance.traits.sanitizer_output import SanitizerError
from mla_conformance.version import SUITE_VERSION
from mla_conformance.vocabulary.capabilities import CAPABILITIES

CASES = [case.id for capability in CAPABILITIES.values() for case in capability.cases]
KERNELS = {
    "new_tokens": ("flash::fwd", "void at::native::fill"),
    "lse": ("flash::fwd",),
    "context_chunk": ("flash::fwd", "flash::split"),
    "decode": ("mla::decode",),
    "refusals": ("none::such",),
}
ERROR = SanitizerError("oob<T>", "Invalid read", 2, "/src/mla.cu:40", "/src/mine.py:7")


def record(**changes: Any) -> Certificate:
    return certificate(**{"traced": Traced(KERNELS), **changes})


def reported(**changes: Any) -> SanitizedKernel:
    made = SanitizedKernel(
        suite=SUITE_VERSION, version="1", date="2026-01-01", backend="TORCH_SDPA", reference="TORCH_SDPA",
        device="NVIDIA H200", environment={"driver": "580.1"}, versions=PINS.versions, tool="memcheck",
        tool_version="2025.3.1.0", checked={"lse:q=[4]": 1.5, "lse:q=[9]": 1.0}, unchecked={"lse:q=[8]": "too slow"},
        errors=(SanitizerFinding(kernel="oob<T>", cause="Invalid read", count=2, place="mla.cu:40", case="lse:q=[4]"),),
    )  # fmt: skip
    return msgspec.structs.replace(made, **changes)


@pytest.fixture
def records(tmp_path: Path) -> Path:
    write_record(tmp_path / "records.jsonl", record())
    return tmp_path / "records.jsonl"


def test_each_set_of_kernels_that_a_record_tells_has_its_smallest_case(records: Path) -> None:
    request = RunRequest.of(["TORCH_SDPA"], device="cuda")
    chosen = choose(request, False, records, "TORCH_SDPA")
    assert [case.capability for case in chosen.cases].count("context_chunk") == 1 and len(chosen.cases) == 3
    assert {case.capability for case in chosen.cases} <= {"new_tokens", "lse", "context_chunk", "decode"}
    assert chosen.most == 0 and f"3 of 3 sets of kernels that a profiler saw for suite {SUITE_VERSION}" in chosen.what


def test_without_a_record_a_few_cases_of_each_role_are_offered(records: Path) -> None:
    chosen = choose(RunRequest.of(["EAGER"], device="cuda"), False, records, "EAGER")
    assert chosen.most == 2 and {case.capability for case in chosen.cases} == {"memory_bounds"}
    named = choose(RunRequest.of(["EAGER"], ["lse"]), True, records, "TORCH_SDPA")
    assert named.most == 2 and {case.capability for case in named.cases} == {"lse"}


@pytest.fixture
def found(monkeypatch: pytest.MonkeyPatch) -> None:
    """The command finds one error, in the second case that it is asked for."""

    def calls(_: Watch, cases: list[str], most: int) -> Watched:
        told = Sanitized(cases[0], seconds=1.25), Sanitized(cases[1], (ERROR,)), Sanitized(cases[2], (), "too slow")
        return Watched(CallsBegin({"device": "NVIDIA H200", "cuda": "13.0"}, {"torch": "2.11"}), told)

    monkeypatch.setattr(Tool, "found", lambda: Tool("/cuda/compute-sanitizer", "2025.3.1.0", "13.0.1"))
    monkeypatch.setattr(sanitize.Watch, "calls", calls)


@pytest.mark.usefixtures("found")
def test_the_command_writes_what_was_found_into_the_record(records: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["certify", "--backend", "TORCH_SDPA", "--sanitize", "memcheck", "--submission", str(records)]) == 1
    assert f"wrote {records}" in capsys.readouterr().err
    (kept,) = kept_records(records)
    (written,) = kept.sanitized
    assert (written.tool, written.tool_version, written.tool_cuda) == ("memcheck", "2025.3.1.0", "13.0.1")
    assert (written.device, written.versions) == ("NVIDIA H200", {"torch": "2.11"})
    assert len(written.checked) == 2 and list(written.unchecked.values()) == ["too slow"]
    (error,) = written.errors
    assert (error.kernel, error.count, error.launch) == ("oob<T>", 2, "/src/mine.py:7")
    assert "driver" in written.environment and kept.certificate == record()


@pytest.mark.usefixtures("found")
def test_what_was_found_wants_a_record_of_the_kernel(records: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["certify", "--backend", "EAGER", "--sanitize", "memcheck", "--submission", str(records)]) == 2
    assert "expected a record of EAGER in these versions; certify it first" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("changes", "status", "said"),
    [
        ({"versions": {"msgspec": "0"}}, 1, "the report of memcheck is of msgspec 0, the record of"),
        ({"backend": "FLASHMLA"}, 1, "the report of memcheck is of backend FLASHMLA, the record of TORCH_SDPA"),
        ({"tool": "nocheck"}, 1, "one of memcheck, racecheck, initcheck, synccheck, got"),
        ({"schema": "mla-conformance-sanitized/9"}, 1, "expected mla-conformance-sanitized/1 of one of"),
        ({"checked": {}}, 2, "checked: expected `object` of length >= 1"),
    ],
)
def test_what_is_of_another_kernel_or_form_is_refused_and_not_shown(
    records: Path, tmp_path: Path, changes: dict[str, Any], status: int, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    head = records.read_text("utf-8").partition("\n")[0]
    records.write_text(f"{head}\n{pack(KeptRecord(record(), (reported(**changes),)), CASES)}\n", "utf-8")
    assert main(["verify", str(records)]) == status
    assert said in capsys.readouterr().err
    assert main(["scoreboard", str(records), "--out", str(tmp_path / "site")]) == 1
    assert said in capsys.readouterr().err


def test_a_record_with_it_holds_and_the_scoreboard_shows_it(records: Path, tmp_path: Path) -> None:
    write_sanitized(records, reported(environment={}))
    write_sanitized(records, reported(tool="racecheck", errors=(), unchecked={}))
    assert main(["verify", str(records)]) == main(["scoreboard", str(records), "--out", str(tmp_path / "site")]) == 0
    page = (tmp_path / "site" / "index.html").read_text("utf-8")
    rows = page.partition('<h2 id="sanitizers">')[2].partition("</section>")[0].split("<tr")[2:]
    assert "✘ 1 error of 2 cases" in rows[0] and "oob&lt;T&gt;: Invalid read, 2 times, mla.cu:40" in rows[0]
    assert "replay &#39;lse:q=[4]&#39; --backend TORCH_SDPA" in rows[0] and "not watched: 1 case" in rows[0]
    assert "✔ nothing of 2 cases" in rows[1] and "driver 580.1" in rows[1] and "not stated" in rows[0]

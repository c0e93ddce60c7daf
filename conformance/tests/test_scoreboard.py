"""The scoreboard: what each record is worth, as a page, badges and SARIF; and what a sanitizer reported beside one."""

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import msgspec
import pytest

from mla_conformance.certificate.certificate import Certificate, Finding, SanitizedKernel, SanitizerFinding
from mla_conformance.certificate.records import KeptRecord, kept_records, pack, write_record, write_sanitized
from mla_conformance.certificate.verify import seal
from mla_conformance.cli import main
from mla_conformance.commands import certify
from mla_conformance.commands.certify import choose
from mla_conformance.engine.request import RunRequest
from mla_conformance.gating.mustpass import MustPass
from mla_conformance.judging.record import Record, Status, Traced
from mla_conformance.report.json_report import to_text
from mla_conformance.report.summary import Counts
from mla_conformance.scoreboard.board import Board, read_entries
from mla_conformance.speed.times import Interval, Speed, Timed
from mla_conformance.tests.test_handed_in import PINS
from mla_conformance.tests.test_handed_in import certificate as complete
from mla_conformance.traits.sanitizer import CallsBegin, Sanitized, SanitizerError, Tool, Watch, Watched
from mla_conformance.version import SUITE_VERSION
from mla_conformance.vocabulary.capabilities import CAPABILITIES

CASES = [case.id for capability in CAPABILITIES.values() for case in capability.cases]
WRONG = [case.id for case in CAPABILITIES["decode_lse"].cases[:2]]
Ours = Callable[..., tuple[int, str, str]]
REASON = "the LSE is kept in 16 bits, see https://github.com/vllm-project/vllm/issues/47800."
SPEED = Speed((Timed("decode", "decode 64 × 8k", "decode:q=[1]", Interval(212.0, 210.0, 214.0), share=0.81),), copy=2e3)
NASTY = "</td><script>alert(1)</script>\x1b[31m"


def certificate(backend: str, wrong: list[str] = [], **changes: Any) -> Certificate:  # noqa: B006
    cases = dict.fromkeys(CASES, Status.PASS) | dict.fromkeys(wrong, Status.EXPECTED_FAILURE)
    records = [Record(backend, backend, case.partition(":")[0], case, status) for case, status in cases.items()]
    known = f"K.toml entry 1 (decode_lse): bug: {REASON}"
    found = tuple(Finding(case, Status.FAIL, "lse", f"LSE of {case} is off", known) for case in wrong)
    lacking = dict(MustPass.of_suite().missing({record.case: record for record in records}, waivable=True))
    environment = {"device": "NVIDIA H200", "suite": SUITE_VERSION, "torch": "2.11.0", "compute_capability": "9.0"}
    told: dict[str, Any] = {"date": "2026-01-02", "backend": backend, "reference": backend, "device": "NVIDIA H200"}
    told |= {"environment": {**environment, "salt": "x y"}, "counts": Counts.of(records, len(cases)), "cases": cases}
    return complete(**{**told, "findings": found, "lacking": lacking, **changes})


def earlier(made: Certificate, **changes: Any) -> dict[str, Any]:
    """The same as a record of an earlier suite that says nothing of the list it was judged on."""
    pins = msgspec.structs.replace(PINS, versions={"vllm": "0.33.0"})
    old = msgspec.structs.replace(made, **{"suite": "2026.3", "pins": pins, **changes})
    return msgspec.to_builtins(msgspec.structs.replace(old, seal=seal(old)))


RECORDS: dict[str, Callable[[], dict[str, Any]]] = {
    "wrong": lambda: msgspec.to_builtins(certificate("TRITON_MLA", WRONG)),
    "right": lambda: msgspec.to_builtins(certificate("FLASHMLA", speed=SPEED)),
    "old": lambda: earlier(certificate("TRITON_MLA", WRONG[:1]), date="2025-12-01"),
    "vllm": lambda: earlier(certificate("FLASH_ATTN_MLA[vllm]")),
    "changed": lambda: {**msgspec.to_builtins(certificate("CUDNN")), "date": "2020-01-01"},
    "nasty": lambda: earlier(certificate(NASTY, WRONG[:1]), device=NASTY),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("scoreboard")
    for name, make in RECORDS.items():
        (folder / f"{name}.json").write_text(json.dumps(make()))
    assert main(["scoreboard", *(str(folder / f"{name}.json") for name in RECORDS), "--out", f"{folder}/site"]) == 1
    return folder


@pytest.fixture(scope="module")
def page(folder: Path) -> str:
    return (folder / "site" / "index.html").read_text(encoding="utf-8")


def words(markup: str) -> str:
    return " ".join(re.sub(r"<[^>]*>", " ", markup).split())


def row(page: str, kernel: str, section: str) -> str:
    part = page.partition(f'<h2 id="{section}">')[2].partition("</section>")[0]
    return next(words(each) for each in part.split("<tr") if kernel in each)


def test_each_kernel_has_its_verdict_in_words_and_its_pairs_of_classes(page: str) -> None:
    assert f"✘ wrong on 2 of {len(CASES):,} judged cases" in row(page, "TRITON_MLA", "kernels")
    assert re.search(r"✔ right all [\d,]+ prefill cases, all [\d,]+ decode cases", row(page, "FLASHMLA", "kernels"))
    assert "of suite 2026.3: outdated" in row(page, "FLASH_ATTN_MLA[vllm]", "kernels")
    asked = len(CAPABILITIES["decode_lse"].cases)
    assert f"✘ {asked - 2}/{asked} 2 known to fail" in row(page, "TRITON_MLA", "role-decode")
    said = re.search(r"pairs of classes claimed ([\d,]+), judged ([\d,]+)", row(page, "TRITON_MLA", "kernels"))
    assert said is not None and said[1] == said[2] and int(said[1].replace(",", "")) > 10_000
    old = row(page, "FLASH_ATTN_MLA[vllm]", "kernels")
    assert "pairs of classes not counted: its suite had others" in old and "claimed" not in old
    assert "pairs not judged" not in page
    assert re.search(r"FLASHMLA, .* NVIDIA H200 212 µs ± 2 81 % ", row(page, "FLASHMLA", "speed"))


def test_a_failure_is_told_with_its_reason_and_how_to_see_it_and_the_history_goes_back(page: str) -> None:
    failures = page.partition('<h2 id="failures">')[2]
    assert REASON in words(failures) and 'href="https://github.com/vllm-project/vllm/issues/47800"' in failures
    assert f"replay &#39;{WRONG[0]}&#39; --backend TRITON_MLA --salt &#39;x y&#39;" in failures
    history = words(page.partition('<h2 id="history">')[2])
    new, old = history.find("2026-01-02"), history.find("2025-12-01")
    assert "TRITON_MLA 2026.3" in history and "certify --backend TRITON_MLA --device cuda" in history
    assert history.find(f"TRITON_MLA {SUITE_VERSION}") < history.find("TRITON_MLA 2026.3") and -1 < new < old


def test_a_later_record_of_an_older_library_is_not_the_newest(tmp_path: Path) -> None:
    for release, date in (("0.7.2.post1", "2026-01-02"), ("0.6.13", "2026-01-03")):
        pins = msgspec.structs.replace(PINS, versions={"flashinfer-python": release})
        made = certificate("FLASHINFER_MLA[fa2]", pins=pins, date=date)
        (tmp_path / f"{release}.json").write_text(to_text(made))
    entries, refused = read_entries(sorted(tmp_path.iterdir()))
    board = Board(tuple(entries), tuple(refused), ())
    assert board.by_kernel["FLASHINFER_MLA[fa2]"][0].versions.startswith("flashinfer-python 0.7.2.post1")
    assert len(board.newest) == 2


def test_engines_are_told_whether_what_they_pick_is_right(page: str) -> None:
    first = row(page, "1. FLASH_ATTN_MLA<", "engines")
    assert "of suite 2026.3: outdated" in first
    assert "the engine's own build (vllm 0.33.0)" in first.replace("&#39;", "'")
    assert "torch 2.11.0; the engine asks for 2.14.0" in first
    assert "another build (msgspec" in row(page, "2. FLASHMLA<", "engines")
    assert "? not known no record of FLASH_ATTN[fa3]" in row(page, "1. FLASH_ATTN (", "engines")


def test_nothing_of_a_record_is_markup_and_what_does_not_verify_is_not_shown_as_one(page: str) -> None:
    shown, _, not_shown = page.partition('<h2 id="refused">')
    assert "CUDNN" not in shown and "changed.json the seal does not fit the content" in words(not_shown)
    assert page.count("<script") == 3 and "\x1b" not in page and "&lt;script&gt;" in page
    assert not re.search(r"<(link|img|iframe)|\ssrc=|@import|url\(", page)
    targets = re.findall(r'href="([^"]*)"', page)
    assert {target[1:] for target in targets if target[0] == "#"} <= set(re.findall(r'\sid="([^"]*)"', page))
    assert {target for target in targets if target[0] != "#"} == {REASON[REASON.index("https") : -1]}


def test_a_badge_says_the_verdict_and_sarif_has_a_result_for_each_failure(folder: Path) -> None:
    badges = {path.stem: path.read_text(encoding="utf-8") for path in (folder / "site" / "badges").iterdir()}
    said = {name: ElementTree.fromstring(text)[0].text or "" for name, text in badges.items()}
    assert said["TRITON_MLA"].startswith("TRITON_MLA: wrong on 2 of ") and SUITE_VERSION in said["TRITON_MLA"]
    assert said["FLASH_ATTN_MLA-vllm"].endswith("NVIDIA H200 · of suite 2026.3: outdated") and len(said) == 4
    log = json.loads((folder / "site" / "scoreboard.sarif").read_text(encoding="utf-8"))
    (run,) = log["runs"]
    rules = [rule["id"] for rule in run["tool"]["driver"]["rules"]]
    assert log["version"] == "2.1.0" and log["$schema"].endswith("sarif-2.1.0.json") and len(set(rules)) == len(rules)
    assert all(rule["shortDescription"]["text"] for rule in run["tool"]["driver"]["rules"])
    names = [each["locations"][0]["logicalLocations"][0]["fullyQualifiedName"] for each in run["results"]]
    assert sorted(names) == sorted([*(f"TRITON_MLA/{case}" for case in [*WRONG, WRONG[0]]), f"{NASTY}/{WRONG[0]}"])
    assert {each["ruleId"] for each in run["results"]} == {"lse"} and "lse" in rules
    assert sorted(each["level"] for each in run["results"]) == ["error", "error", "note", "note"]
    assert all(REASON in each["message"]["text"] for each in run["results"])
    assert all("Replay: mla-conformance replay" in each["message"]["text"] for each in run["results"])
    assert len({each["partialFingerprints"]["kernelAndCase/v1"] for each in run["results"]}) == len(names)


def test_two_kernels_share_no_badge(tmp_path: Path, refused: Any, ours: Any) -> None:
    for number, name in enumerate(("A[b]", "A-b")):
        (tmp_path / f"{number}.json").write_text(json.dumps(earlier(certificate(name))))
    said = refused("scoreboard", tmp_path / "0.json", tmp_path / "1.json", "--out", tmp_path / "site")
    assert "expected another name, a second kernel has the badge A-b.svg" in said
    record = {**msgspec.to_builtins(certificate("FLASHMLA")), "schema": "mla-conformance-certificate/5"}
    (tmp_path / "record.json").write_text(json.dumps(record))
    status, _, said = ours("scoreboard", tmp_path / "record.json", "--out", tmp_path / "site")
    assert status == 1 and "renew it: mla-conformance certify --backend FLASHMLA" in said


KERNELS = {"new_tokens": ("flash::fwd", "void at::native::fill"), "lse": ("flash::fwd",), "decode": ("mla::decode",)}
KERNELS |= {"context_chunk": ("flash::fwd", "flash::split"), "refusals": ("none::such",)}
ERROR = SanitizerError("oob<T>", "Invalid read", 2, "/src/mla.cu:40", "/src/mine.py:7")


def record(**changes: Any) -> Certificate:
    return complete(**{"traced": Traced(KERNELS), **changes})


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


def test_each_set_of_kernels_of_a_record_has_its_smallest_case(records: Path) -> None:
    request = RunRequest.of(["TORCH_SDPA"], device="cuda")
    cases, most, what = choose(request, False, records, "TORCH_SDPA")
    assert [case.capability for case in cases].count("context_chunk") == 1 and len(cases) == 3
    assert {case.capability for case in cases} <= {"new_tokens", "lse", "context_chunk", "decode"}
    assert most == 0 and f"3 of 3 sets of kernels that a profiler saw for suite {SUITE_VERSION}" in what
    cases, most, _ = choose(RunRequest.of(["EAGER"], device="cuda"), False, records, "EAGER")
    assert most == 2 and {case.capability for case in cases} == {"memory_bounds"}
    cases, most, _ = choose(RunRequest.of(["EAGER"], ["lse"]), True, records, "TORCH_SDPA")
    assert most == 2 and {case.capability for case in cases} == {"lse"}


@pytest.fixture
def found(monkeypatch: pytest.MonkeyPatch) -> None:
    def calls(_: Watch, cases: list[str], most: int) -> Watched:
        told = Sanitized(cases[0], seconds=1.25), Sanitized(cases[1], (ERROR,)), Sanitized(cases[2], (), "too slow")
        return Watched(CallsBegin({"device": "NVIDIA H200", "cuda": "13.0"}, {"torch": "2.11"}), told)

    monkeypatch.setattr(Tool, "found", lambda: Tool("/cuda/compute-sanitizer", "2025.3.1.0", "13.0.1"))
    monkeypatch.setattr(certify.Watch, "calls", calls)


SANITIZE = ("certify", "--sanitize", "memcheck", "--backend")


@pytest.mark.usefixtures("found")
def test_the_command_writes_what_was_found_into_the_record(records: Path, ours: Ours) -> None:
    status, _, said = ours(*SANITIZE, "TORCH_SDPA", "--submission", records)
    assert status == 1 and f"wrote {records}" in said
    (kept,) = kept_records(records)
    (written,) = kept.sanitized
    assert (written.tool, written.tool_version, written.tool_cuda) == ("memcheck", "2025.3.1.0", "13.0.1")
    assert (written.device, written.versions) == ("NVIDIA H200", {"torch": "2.11"})
    assert len(written.checked) == 2 and list(written.unchecked.values()) == ["too slow"]
    (error,) = written.errors
    assert (error.kernel, error.count, error.launch) == ("oob<T>", 2, "/src/mine.py:7")
    assert "driver" in written.environment and kept.certificate == record()
    status, _, said = ours(*SANITIZE, "EAGER", "--submission", records)
    assert status == 2 and "expected a record of EAGER in these versions; certify it first" in said


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
    records: Path, tmp_path: Path, changes: dict[str, Any], status: int, said: str, ours: Ours
) -> None:
    head = records.read_text("utf-8").partition("\n")[0]
    records.write_text(f"{head}\n{pack(KeptRecord(record(), (reported(**changes),)), CASES)}\n", "utf-8")
    for command, expected in ((("verify", records), status), (("scoreboard", records, "--out", tmp_path / "site"), 1)):
        found = ours(*command)
        assert found[0] == expected and said in found[2]


def test_a_record_with_it_holds_and_the_scoreboard_shows_it(records: Path, tmp_path: Path) -> None:
    write_sanitized(records, reported(environment={}))
    write_sanitized(records, reported(tool="racecheck", errors=(), unchecked={}))
    assert main(["verify", str(records)]) == main(["scoreboard", str(records), "--out", str(tmp_path / "site")]) == 0
    page = (tmp_path / "site" / "index.html").read_text("utf-8")
    rows = page.partition('<h2 id="sanitizers">')[2].partition("</section>")[0].split("<tr")[2:]
    assert "✘ 1 error of 2 cases" in rows[0] and "oob&lt;T&gt;: Invalid read, 2 times, mla.cu:40" in rows[0]
    assert "replay &#39;lse:q=[4]&#39; --backend TORCH_SDPA" in rows[0] and "not watched: 1 case" in rows[0]
    assert "✔ nothing of 2 cases" in rows[1] and "driver 580.1" in rows[1] and "not stated" in rows[0]

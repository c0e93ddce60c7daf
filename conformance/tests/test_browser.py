"""The pages in a real browser without a window, and the scoreboard's two questions: who is right, what changed.

Chromium alone is enough: it runs a script of ours in a copy of the page and prints the document that comes out of it.
"""

import base64
import gzip
import json
import os
import re
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import replace
from html import unescape
from itertools import product
from pathlib import Path
from typing import Any

import pytest

from mla_conformance.certificate.certificate import Finding, Worst
from mla_conformance.certificate.pins import Pins
from mla_conformance.certificate.records import RecordLine
from mla_conformance.cli import main
from mla_conformance.diagnosis.heat_map import HeatMap
from mla_conformance.judging.record import BackendFacts, Record, Status
from mla_conformance.models.config import find_model
from mla_conformance.models.profile import Deployment, cases_of
from mla_conformance.report.html import html
from mla_conformance.report.json_report import report_form, to_text
from mla_conformance.report.summary import BackendSummary, RunSummary, summarise
from mla_conformance.scoreboard.board import Board, Entry, profiles
from mla_conformance.scoreboard.site import kind_of, models, page, served
from mla_conformance.tests.reports import run_of
from mla_conformance.tests.test_handed_in import certificate
from mla_conformance.version import SUITE_VERSION
from mla_conformance.vocabulary.capabilities import CAPABILITIES

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
BROWSER = next(filter(None, map(shutil.which, NAMES)), None)
in_a_browser = pytest.mark.skipif(BROWSER is None, reason=f"none of {', '.join(NAMES)} is installed here")

LONG = "a_name_without_any_place_to_break_" * 8
WATCH = """<script>
const complaints = [];
addEventListener("error", (event) => complaints.push(event.message));
addEventListener("unhandledrejection", (event) => complaints.push(String(event.reason)));
console.error = console.warn = (...said) => complaints.push(said.join(" "));
</script>"""
STEPS = f"<script>{Path(__file__).with_suffix('.js').read_text(encoding='utf-8')}</script>"
FRAMES = """<!doctype html><title>frames</title>{frames}<pre id="told"></pre><script>
const told = {{}};
addEventListener("message", (event) => {{
  told[event.data.frame] = event.data;
  document.getElementById("told").textContent = JSON.stringify(told);
}});
</script>"""

FRAME = '<iframe name="{}" src="{}" width={} height=800 frameborder=0 style="color-scheme: {}"></iframe>'


def report() -> str:
    cases = [case.id for name in ("lse", "decode") for case in CAPABILITIES[name].cases]
    outcomes = [Status.FAIL, Status.CRASH, Status.UNSUPPORTED, Status.EXPECTED_FAILURE]
    backends = [BackendSummary(BackendFacts("ABSENT", reasons=(f"package {LONG} is missing",)))]
    for name in ("wanted", LONG):
        records = [_record(name, case, outcomes[i] if i < 4 else Status.PASS) for i, case in enumerate(cases)]
        records += [_record(name, cases[-1].replace("decode:", "decode_lse:"), Status.FAIL)]
        heat = {records[0].case: HeatMap(f"LSE of {LONG}", 128, 200, ("0123456789" * 6 + "0000",) * 64)}
        backends.append(BackendSummary(BackendFacts(name, name), summarise(records), heat=heat))
    reported = {"suite": "1", "tier": "full", "device": "cpu", "torch": "2"}
    return html(RunSummary(reported, tuple(backends), tuple(cases), date="2026-11-22"))


def _record(backend: str, case: str, status: Status) -> Record:
    said: dict[str, Any] = {"message": f"LSE is off by {LONG}", "check": "lse", "detail": f"Traceback {LONG}"}
    return Record(
        backend, backend, case.partition(":")[0], case, status, used={"lse": 0.5},
        judged=Status.FAIL if status is Status.EXPECTED_FAILURE else None,
        expectation="known" if status is Status.EXPECTED_FAILURE else "", **({} if status is Status.PASS else said),
    )  # fmt: skip


def scoreboard() -> str:
    cases = [case.id for capability in CAPABILITIES.values() for case in capability.cases]
    judged = {"wanted": cases[::100], "TRITON_MLA": [], LONG: cases[::200]}
    entries = [entry(kernel, wrong, cases, said=LONG, torch=LONG) for kernel, wrong in judged.items()]
    old = Entry(entries[0].record, "of suite 1; renew it: mla-conformance certify")
    return page(Board((*entries, old), (RecordLine(LONG, "", None, LONG),), profiles()))


def entry(
    kernel: str, wrong: Sequence[str] = (), cases: Sequence[str] = (), old: str = "", device: str = "NVIDIA H200",
    suite: str = SUITE_VERSION, said: str = "LSE is off", **versions: str,
) -> Entry:  # fmt: skip
    listed = cases or CASES
    found = tuple(Finding(case, Status.FAIL, "lse", said, f"file: bug: {case[:12]} {said}") for case in wrong)
    record = certificate(
        suite=suite, date="2026-11-22", backend=kernel, reference=kernel, device=device, findings=found,
        environment={"compute_capability": "" if device == NASTY else "9.0"}, worst={"lse": Worst(0.5, listed[0])},
        cases=dict.fromkeys(listed, Status.PASS) | dict.fromkeys(wrong, Status.EXPECTED_FAILURE),
        pins=Pins(versions={name.replace("_", "-"): version for name, version in versions.items()}),
    )  # fmt: skip
    return Entry(record, old)


PAGES = {"report": report, "scoreboard": scoreboard}

TRIES = 4
"""The browser's own clock runs on while a page is read, and it ends by that clock."""
WIDTHS = (1200, 400)
"""Pixels; no window of a browser is as narrow as a phone, but a frame in it is."""
SHOWN = tuple(product(PAGES, WIDTHS, ("light", "dark")))


@pytest.fixture(scope="module")
def seen(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    folder = tmp_path_factory.mktemp("browser")
    for kind, make in PAGES.items():
        text = make().replace("<head>", f"<head>{WATCH}").replace("</body>", f"{STEPS}</body>")
        (folder / f"{kind}.html").write_text(text, encoding="utf-8")
    names = {f"{kind}-{width}-{scheme}": (kind, width, scheme) for kind, width, scheme in SHOWN}
    return seen_in(folder, {name: FRAME.format(name, f"{each[0]}.html", *each[1:]) for name, each in names.items()})


def seen_in(folder: Path, frames: Mapping[str, str]) -> dict[str, dict[str, Any]]:
    """What scripts in frames report, by the frame's name; those that a busy machine has not loaded are opened again."""
    reported: dict[str, dict[str, Any]] = {}
    for _ in range(TRIES):
        if left := [frame for name, frame in frames.items() if name not in reported]:
            (folder / "frames.html").write_text(FRAMES.format(frames="".join(left)), encoding="utf-8")
            reported |= _opened(folder)
    return reported


def _opened(folder: Path) -> dict[str, dict[str, Any]]:
    done = subprocess.run(
        [
            str(BROWSER), "--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--no-first-run",
            "--hide-scrollbars", f"--user-data-dir={folder}/profile", "--window-size=1400,7200",
            "--virtual-time-budget=60000", "--dump-dom", (folder / "frames.html").as_uri(),
        ],
        capture_output=True, text=True, timeout=120, env={**os.environ, "HOME": str(folder)},
    )  # fmt: skip
    found = re.search(r'<pre id="told">(.*?)</pre>', done.stdout, re.DOTALL)
    assert found, f"no page was opened: {done.stderr[-2000:]}"
    reported: dict[str, dict[str, Any]] = json.loads(unescape(found[1]) or "{}")
    return reported


@in_a_browser
@pytest.mark.parametrize(("kind", "width", "scheme"), SHOWN)
def test_a_page_works_by_keys_and_fits(seen: dict[str, dict[str, Any]], kind: str, width: int, scheme: str) -> None:
    reported = seen[f"{kind}-{width}-{scheme}"]
    assert reported["dark"] is (scheme == "dark") and reported["faint"] == []
    assert reported["complaints"] == []
    assert reported["sticksOut"] == [] and reported["width"] == reported["widthWhenOpen"] == [width, width]
    assert reported["maps"] == [[f"LSE of {LONG}, by head and row", True, True]] * (4 if kind == "report" else 0)
    assert reported["filterHasFocus"] and reported["keysAreTextInTheFilter"]
    assert 0 < reported["filtered"] < reported["all"] and reported["strangers"] == 0
    assert reported["says"] == f"{reported['filtered']} of {reported['all']} shown"
    assert reported["none"] == [0, 0] and reported["escaped"] == [reported["all"], ""]
    assert 0 < reported["failing"] < reported["all"] and reported["innocent"] == 0
    assert reported["failures"] > 2 and reported["places"] == [0, 1, 0, reported["failures"] - 1]
    assert reported["outline"] == "solid" and reported["inSight"] and reported["byButton"]
    assert reported["nameless"] == reported["unreachable"] == 0 and reported["twice"] == []
    assert reported["held"]


OWN = "decode:call=decode;heads=16;q=[1];kv=[40];page=64;cache=fp8"
OTHER = "decode:call=decode;heads=64;q=[1];kv=[40];page=64;cache=fp8"
PREFILL = "lse:heads=16;q=[4]"
CASES = (OWN, OTHER, "decode:call=decode;heads=16;q=[1];kv=[40];page=64", PREFILL)
FRAMED = ("1280-light", "1280-dark", "400-light", "400-dark")
NASTY = "</script><script>alert(1)</script>"


def board() -> Board:
    """FLASHMLA is right, and was not on an H100; TRITON_MLA is wrong elsewhere, FLASHINFER_MLA[fa3] newly wrong."""
    old, new = {"flashinfer_python": "0.6.13"}, {"flashinfer_python": "0.7.2.post1"}
    outdated, h100 = "outdated; renew it: mla-conformance certify", "NVIDIA H100 80GB HBM3"
    entries = (
        entry("FLASHMLA", **new),
        entry("TRITON_MLA", [OTHER], **new),
        entry("FLASHINFER_MLA[fa3]", **old),
        entry("FLASHINFER_MLA[fa3]", [OWN], **new),
        entry("FLASH_ATTN_MLA[vllm]", old=outdated, suite="2025.1", **new),
        entry("CUTLASS_MLA", [OTHER], **new),
        entry("CUTLASS_MLA", device=h100, suite="2025.2", **new),
        entry("FLASHMLA", [OWN], device=h100, **old),
        entry(NASTY, device=NASTY, flashinfer_python="1"),
    )
    return Board(entries, (), profiles())


def test_a_kind_is_what_decides_whether_a_deployment_calls_it_and_the_page_knows_every_model() -> None:
    assert kind_of(OWN) == ("decode", 16, "r1", "bf16", "fp8", "")
    assert kind_of(PREFILL) == ("prefill", 16, "r1", "bf16", "", "")
    assert kind_of("dcp:call=decode;heads=2;q=[4];kv=[70];page=16;ranks=2")[-1] == "several ranks"
    assert kind_of("refusals:call=decode;heads=2;q=[1];kv=[40];page=48")[-1] == "refusals"
    assert kind_of("something else")[0] == "other"
    known = {model["name"]: model for model in models()}
    v3 = known["deepseek-v3"]
    assert (v3["heads"], v3["dims"], v3["roles"]) == (128, "r1", ["prefill", "decode"]) and 8 in v3["tp"]
    profile = find_model("deepseek-v3.2")
    assert known["deepseek-v3.2"]["roles"] == ["prefill", "sparse", "indexer"]
    assert known["deepseek-v3.2"]["caches"] == profile.cache_layouts


def test_the_data_names_the_cases_that_can_be_shown_and_no_text_of_a_record_ends_it() -> None:
    data: dict[str, Any] = json.loads(gzip.decompress(base64.b64decode(served(board()))))
    assert "<script>alert" not in page(board()) and data["records"][-1]["kernel"] == NASTY
    assert {case for case, _ in data["cases"] if case} == {OWN, OTHER} and len(data["cases"]) == len(CASES)
    assert {record["statuses"] for record in data["records"]} == {"p4", "w1p3", "p1w1p2"}


def test_a_run_of_a_model_is_shown_beside_the_records(tmp_path: Path) -> None:
    deployment = Deployment.of(find_model("deepseek-v3"), 8, "fp8")
    cases = [case.id for case in cases_of(find_model("deepseek-v3"), deployment)]
    records = [Record("FLASHMLA", "FLASHMLA", case.partition(":")[0], case, Status.PASS) for case in cases]
    plain = replace(run_of(records, environment={"device": "NVIDIA H200"}), date="2026-11-23")
    (tmp_path / "run").mkdir()
    for run, status in ((plain, 2), (replace(plain, deployment=deployment), 0)):
        (tmp_path / "run" / "report.json").write_text(to_text(report_form(run)), encoding="utf-8")
        assert main(["scoreboard", str(tmp_path / "run"), "--out", str(tmp_path / "site")]) == status
    text = (tmp_path / "site" / "index.html").read_text("utf-8")
    assert "deepseek-v3 at TP 8, fp8 cache" in text and '<span class="cell pass">right</span>' in text


CHOICE = (
    "model=deepseek-v3&gpu=NVIDIA+H200&engine=vLLM+0.33.0&dtype=bf16&cache=fp8&tp=8"
    "&package=flashinfer-python&from=0.6.13&to=0.7.2"
)
ASKS = f"<script>{Path(__file__).with_name('test_serving.js').read_text(encoding='utf-8')}</script>"


@pytest.fixture(scope="module")
def told(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    folder = tmp_path_factory.mktemp("serving")
    (folder / "index.html").write_text(page(board()).replace("</body>", f"{ASKS}</body>"), encoding="utf-8")
    return seen_in(folder, {name: FRAME.format(name, f"index.html#{CHOICE}", *name.split("-")) for name in FRAMED})


@pytest.fixture(params=FRAMED)
def answered(request: Any, told: Any) -> dict[str, Any]:
    return told[request.param]


@in_a_browser
def test_which_backend_is_right_and_whether_the_deployment_makes_a_call_that_fails(answered: dict[str, Any]) -> None:
    assert answered["title"] == "vLLM 0.33.0 on NVIDIA H200 · deepseek-v3 at TP 8: 16 heads a rank · bf16, fp8 cache"
    signs = {row[0].split(" ")[0]: row[1] for row in answered["rows"]}
    assert signs["FLASHMLA"] == "✔ right" and "FLASHINFER_MLA" not in signs
    assert signs["TRITON_MLA"] == "✔ right here, wrong elsewhere" and signs["FLASH_ATTN_MLA"] == "✔ right, outdated"
    assert signs["FLASH_ATTN"] == "? not known"
    judged = {row[0]: row[2] for row in answered["rows"]}
    assert "right on 1 of 1 judged case at this deployment's heads" in judged["TRITON_MLA"]
    assert "wrong on 1 of 1 judged case at other heads" in judged["TRITON_MLA"]
    assert "no record of FLASH_ATTN[fa3] on NVIDIA H200" in judged["FLASH_ATTN (FlashAttention 3) FLASH_ATTN[fa3]"]
    decode = "decode: right: FLASHMLA; right here, wrong elsewhere: TRITON_MLA"
    assert answered["says"] == ["prefill: none is known to be right", decode]
    assert answered["missing"].startswith("mla-conformance certify --model deepseek-v3 --tp 8 --kv-cache fp8 --device")
    assert answered["link"] == f"#{CHOICE}" and answered["width"][0] <= answered["width"][1]
    own, alike = "this deployment makes such calls", "calls of this kind, at other sizes"
    told = sorted(re.findall(f"{own}|{alike}", " ".join(answered["severities"])))
    assert told == sorted([own, own, alike, alike])


@in_a_browser
def test_what_changed_and_what_nobody_judged(answered: dict[str, Any]) -> None:
    assert "FLASHINFER_MLA[fa3] on NVIDIA H200" in answered["changes"]
    assert "1 case newly wrong" in answered["changes"] and OWN in answered["changes"]
    assert "no record with flashinfer-python 0.6.13 on NVIDIA H200" in answered["changes"]
    bump = "mla-conformance bump flashinfer-python==0.6.13 flashinfer-python==0.8 --backend 'FLASHINFER_MLA[fa3]'"
    assert "Records are of 0.6.13, 0.7.2.post1." in answered["unknown"]
    assert bump.split(" --backend")[0] in answered["unknown"]


@in_a_browser
def test_without_an_engine_right_kernels_come_first_and_an_alike_gpu_stands_in(answered: dict[str, Any]) -> None:
    assert answered["sorted"][0] in ("FLASHMLA", "FLASH_ATTN_MLA[vllm]") and answered["sorted"][-1] != "FLASHMLA"
    assert answered["roles"] == ["prefill", "sparse", "indexer"]
    assert answered["chosen_first"] == "NVIDIA H200"
    said = "decode: right: CUTLASS_MLA; right on a GPU of the same compute capability: FLASHMLA; right here, wrong else"
    assert answered["elsewhere"]["says"] == [f"{said}where: TRITON_MLA"]
    older = "on NVIDIA H100 80GB HBM3, flashinfer-python 0.6.13: wrong on 1 of 1 judged case"
    later = f"on NVIDIA H200, suite {SUITE_VERSION}: right on 1 of 1 judged case"
    for other in (older, later):
        assert any(note.startswith(other) for note in answered["elsewhere"]["note"])
    assert "judged on NVIDIA H200, also of compute capability 9.0" in answered["elsewhere"]["note"]

"""The page's two questions: which backend is right for a deployment, and what changed between two versions."""

import base64
import gzip
import json
import re
from pathlib import Path
from typing import Any

import pytest

from mla_conformance.certificate.certificate import Finding, Shown
from mla_conformance.cli import main
from mla_conformance.judging.record import BackendFacts, Record
from mla_conformance.judging.verdict import Status
from mla_conformance.models import caselist, config
from mla_conformance.models.profile import Deployment
from mla_conformance.report.json_report import report_json, to_text
from mla_conformance.report.summary import BackendSummary, Counts, RunSummary, summarise
from mla_conformance.scoreboard.board import Board, Entry, profiles
from mla_conformance.scoreboard.site import kind_of, models, page, served
from mla_conformance.tests.test_browser import BROWSER, FRAME, seen_in
from mla_conformance.version import SUITE_VERSION

OWN = "decode:call=decode;heads=16;q=[1];kv=[40];page=64;cache=fp8"
OTHER = "decode:call=decode;heads=64;q=[1];kv=[40];page=64;cache=fp8"
PLAIN = "decode:call=decode;heads=16;q=[1];kv=[40];page=64"
PREFILL = "lse:heads=16;q=[4]"
CASES = (OWN, OTHER, PLAIN, PREFILL)
FRAMED = ("1280-light", "1280-dark", "400-light", "400-dark")
NASTY = "</script><script>alert(1)</script>"


def entry(
    kernel: str, version: str, wrong: tuple[str, ...] = (), old: str = "", device: str = "NVIDIA H200", suite: str = ""
) -> Entry:
    found = tuple(Finding(case, Status.FAIL, "lse", "LSE is off", "file: bug: known") for case in wrong)
    statuses = {case: Status.EXPECTED_FAILURE if case in wrong else Status.PASS for case in CASES}
    environment = {"compute_capability": "" if device == NASTY else "9.0"}
    shown = Shown(
        suite=suite or SUITE_VERSION, date="2026-11-22", backend=kernel, reference=kernel, device=device,
        environment=environment, rounding={}, counts=Counts(), worst={}, findings=found, unjudged=(),
        lacking={}, cases=statuses, versions={"flashinfer-python": version},
    )  # fmt: skip
    return Entry(shown, old)


def board() -> Board:
    """FLASHMLA is right, and was not on an H100; TRITON_MLA is wrong elsewhere, FLASHINFER_MLA[fa3] newly wrong."""
    entries = (
        entry("FLASHMLA", "0.7.2.post1"),
        entry("TRITON_MLA", "0.7.2.post1", (OTHER,)),
        entry("FLASHINFER_MLA[fa3]", "0.6.13"),
        entry("FLASHINFER_MLA[fa3]", "0.7.2.post1", (OWN,)),
        entry("FLASH_ATTN_MLA[vllm]", "0.7.2.post1", (), "outdated; renew it: mla-conformance certify", suite="2025.1"),
        entry("CUTLASS_MLA", "0.7.2.post1", (OTHER,)),
        entry("CUTLASS_MLA", "0.7.2.post1", (), "", "NVIDIA H100 80GB HBM3", "2025.2"),
        entry("FLASHMLA", "0.6.13", (OWN,), "", "NVIDIA H100 80GB HBM3"),
        entry(NASTY, "1", (), "", NASTY),
    )
    return Board(entries, (), profiles())


def test_a_kind_is_what_decides_whether_a_deployment_calls_it() -> None:
    assert kind_of(OWN) == ("decode", 16, "r1", "bf16", "fp8", "")
    assert kind_of(PREFILL) == ("prefill", 16, "r1", "bf16", "", "")
    assert kind_of("dcp:call=decode;heads=2;q=[4];kv=[70];page=16;ranks=2")[-1] == "several ranks"
    assert kind_of("refusals:call=decode;heads=2;q=[1];kv=[40];page=48")[-1] == "refusals"
    assert kind_of("something else")[0] == "other"


def test_the_page_knows_every_model_as_certify_does() -> None:
    known = {model["name"]: model for model in models()}
    v3 = known["deepseek-v3"]
    assert (v3["heads"], v3["dims"], v3["roles"]) == (128, "r1", ["prefill", "decode"]) and 8 in v3["tp"]
    profile = config.find_model("deepseek-v3.2")
    assert known["deepseek-v3.2"]["roles"] == ["prefill", "sparse", "indexer"]
    assert known["deepseek-v3.2"]["caches"] == profile.cache_layouts


def data_of(board: Board) -> dict[str, Any]:
    data: dict[str, Any] = json.loads(gzip.decompress(base64.b64decode(served(board))))
    return data


def test_no_text_of_a_record_ends_the_data() -> None:
    text = page(board())
    assert "<script>alert" not in text
    assert data_of(board())["records"][-1]["kernel"] == NASTY


def test_the_data_names_the_cases_that_can_be_shown_and_no_others() -> None:
    data = data_of(board())
    assert {case for case, _ in data["cases"] if case} == {OWN, OTHER} and len(data["cases"]) == len(CASES)
    assert {record["statuses"] for record in data["records"]} == {"p4", "w1p3", "p1w1p2"}


def test_a_run_of_a_model_is_shown_beside_the_records(tmp_path: Path) -> None:
    deployment = Deployment.of(config.find_model("deepseek-v3"), 8, "fp8")
    cases = [case.id for case in caselist.cases_of(config.find_model("deepseek-v3"), deployment)]
    records = [Record("FLASHMLA", "FLASHMLA", case.partition(":")[0], case, Status.PASS) for case in cases]
    backend = BackendSummary(BackendFacts("FLASHMLA", "FLASHMLA"), summarise(records, cases))
    environment = {"suite": SUITE_VERSION, "tier": "full", "device": "NVIDIA H200", "torch": "2"}
    run = RunSummary(environment, (backend,), tuple(cases), deployment=deployment, date="2026-11-23")
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "report.json").write_text(to_text(report_json(run)), encoding="utf-8")
    assert main(["scoreboard", str(tmp_path / "run"), "--out", str(tmp_path / "site")]) == 0
    text = (tmp_path / "site" / "index.html").read_text("utf-8")
    assert "deepseek-v3 at TP 8, fp8 cache" in text and re.search(r'<span class="cell pass">right</span>', text)
    plain = RunSummary(environment, (backend,), tuple(cases), date="2026-11-23")
    (tmp_path / "run" / "report.json").write_text(to_text(report_json(plain)), encoding="utf-8")
    assert main(["scoreboard", str(tmp_path / "run"), "--out", str(tmp_path / "site")]) == 2


CHOICE = (
    "model=deepseek-v3&gpu=NVIDIA+H200&engine=vLLM+0.33.0&dtype=bf16&cache=fp8&tp=8"
    "&package=flashinfer-python&from=0.6.13&to=0.7.2"
)
STEPS = f"<script>{Path(__file__).with_suffix('.js').read_text(encoding='utf-8')}</script>"


@pytest.fixture(scope="module")
def told(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    """What the page says of a choice that stands in its address, in a frame of each width and colour scheme."""
    if BROWSER is None:
        pytest.skip("no Chromium is installed here")
    folder = tmp_path_factory.mktemp("serving")
    (folder / "index.html").write_text(page(board()).replace("</body>", f"{STEPS}</body>"), encoding="utf-8")
    return seen_in(folder, {name: FRAME.format(name, f"index.html#{CHOICE}", *name.split("-")) for name in FRAMED})


@pytest.fixture(params=FRAMED)
def answered(request: pytest.FixtureRequest, told: dict[str, dict[str, Any]]) -> dict[str, Any]:
    return told[request.param]


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
    assert sorted(re.findall("|".join((own, alike)), " ".join(answered["severities"]))) == sorted(
        [own, own, alike, alike]
    )


def test_what_changed_and_what_nobody_judged(answered: dict[str, Any]) -> None:
    assert "FLASHINFER_MLA[fa3] on NVIDIA H200" in answered["changes"]
    assert "1 case newly wrong" in answered["changes"] and OWN in answered["changes"]
    assert "no record with flashinfer-python 0.6.13 on NVIDIA H200" in answered["changes"]
    bump = "mla-conformance bump flashinfer-python==0.6.13 flashinfer-python==0.8 --backend 'FLASHINFER_MLA[fa3]'"
    assert "Records are of 0.6.13, 0.7.2.post1." in answered["unknown"]
    assert bump.split(" --backend")[0] in answered["unknown"]


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

"""The pages in a real browser without a window: keys, filter, jumps, names, contrast, nothing wider than a phone.

Chromium alone is enough: it runs a script of ours in a copy of the page and prints the document that comes out of it.
"""

import json
import os
import re
import shutil
import subprocess
from collections.abc import Mapping
from html import unescape
from itertools import product
from pathlib import Path
from typing import Any

import pytest

from mla_conformance.certificate.certificate import Finding, Worst
from mla_conformance.certificate.pins import Pins
from mla_conformance.certificate.records import RecordLine
from mla_conformance.diagnosis.heat_map import HeatMap
from mla_conformance.judging.record import BackendFacts, Record
from mla_conformance.judging.verdict import Status
from mla_conformance.report.html import html
from mla_conformance.report.summary import BackendSummary, RunSummary, summarise
from mla_conformance.scoreboard.board import Board, Entry, profiles
from mla_conformance.scoreboard.site import page
from mla_conformance.tests.test_handed_in import certificate
from mla_conformance.vocabulary.capabilities import CAPABILITIES

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
BROWSER = next(filter(None, map(shutil.which, NAMES)), None)
pytestmark = pytest.mark.skipif(BROWSER is None, reason=f"none of {', '.join(NAMES)} is installed here")

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
    """A page with two failing backends, refusals, an expected failure and an absent backend."""
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
    """A page with a wrong kernel, a right one, an old one and a file that is no record."""
    cases = [case.id for capability in CAPABILITIES.values() for case in capability.cases]
    entries = [
        _entry("wanted", cases, cases[::100]),
        _entry("TRITON_MLA", cases, []),
        _entry(LONG, cases, cases[::200]),
    ]
    old = Entry(entries[0].record, "of suite 1; renew it: mla-conformance certify")
    return page(Board((*entries, old), (RecordLine(LONG, "", None, LONG),), profiles()))


def _entry(backend: str, cases: list[str], wrong: list[str]) -> Entry:
    found = tuple(Finding(case, Status.FAIL, "lse", LONG, f"file: bug: {case[:12]} {LONG}") for case in wrong)
    statuses = dict.fromkeys(cases, Status.PASS) | dict.fromkeys(wrong, Status.EXPECTED_FAILURE)
    record = certificate(
        suite="2", date="2026-11-22", backend=backend, reference=backend, device="NVIDIA H200",
        environment={"compute_capability": "9.0"}, worst={"lse": Worst(0.5, cases[0])}, findings=found, cases=statuses,
        pins=Pins(versions={"torch": LONG}),
    )  # fmt: skip
    return Entry(record, "")


PAGES = {"report": report, "scoreboard": scoreboard}


TRIES = 4
"""The browser's own clock runs on while a page is read, and it ends by that clock."""
WIDTHS = (1200, 400)
"""Pixels; no window of a browser is as narrow as a phone, but a frame in it is."""
SHOWN = tuple(product(PAGES, WIDTHS, ("light", "dark")))


@pytest.fixture(scope="module")
def seen(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    """What the script saw on each page in a frame of each width; one browser for all of them."""
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


@pytest.mark.parametrize(("kind", "width", "scheme"), SHOWN)
def test_a_page_works_by_keys_and_fits_its_window(
    seen: dict[str, dict[str, Any]], kind: str, width: int, scheme: str
) -> None:
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

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

from mla_conformance.certificate.certificate import Finding, Shown, Worst
from mla_conformance.diagnosis.heat_map import HeatMap
from mla_conformance.judging.record import BackendFacts, Record
from mla_conformance.judging.verdict import Status
from mla_conformance.report.html import html
from mla_conformance.report.summary import BackendSummary, Counts, RunSummary, summarise
from mla_conformance.scoreboard.board import Board, Entry, RefusedRecord, profiles
from mla_conformance.scoreboard.site import page
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
STEPS = """<script>
const whole = typeof answering === "undefined" ? Promise.resolve() : answering;
whole.catch((error) => complaints.push(String(error))).then(() => {
const told = {};
const press = (key, target) => (target ?? document.activeElement).dispatchEvent(
  new KeyboardEvent("keydown", { key, bubbles: true, cancelable: true }));
const shown = () => entries.filter((entry) => entry.checkVisibility()).length;
const name = (each) => (each.getAttribute("aria-label") ?? each.labels?.[0]?.textContent ?? each.textContent).trim();
const type = (text) => { filter.value = text; filter.dispatchEvent(new Event("input")); };

told.maps = all("figure svg[role=img]").map((each) => {
  const { width, height } = each.getBoundingClientRect(), cells = each.viewBox.baseVal;
  return [each.querySelector("title").textContent, width / cells.width === height / cells.height, width > 100];
});
told.width = [document.documentElement.scrollWidth, innerWidth];
told.all = shown();
press("/"); told.filterHasFocus = document.activeElement === filter;
press("n"); told.keysAreTextInTheFilter = document.activeElement === filter;
type("wanted"); told.filtered = shown();
told.says = document.getElementById("shown").textContent;
told.strangers = entries.filter((entry) => entry.checkVisibility() && !entry.textContent.includes("wanted")).length;
type("nothing is called this"); told.none = [shown(), all("section[data-part]:not([hidden])").length];
press("Escape"); told.escaped = [shown(), filter.value];
press("f"); told.failing = shown();
told.innocent = entries.filter((entry) => entry.checkVisibility() && !("failing" in entry.dataset)).length;
press("f");
const places = [];
for (const key of ["n", "n", "p", "p"]) {
  press(key); places.push(all("[data-failure]").indexOf(document.activeElement));
}
told.places = places; told.failures = all("[data-failure]").length;
press("n");
told.outline = getComputedStyle(document.activeElement).outlineStyle;
const box = document.activeElement.getBoundingClientRect();
told.inSight = box.top >= 0 && box.top < innerHeight;
document.getElementById("next").click(); told.byButton = document.activeElement.matches("[data-failure]");
const scroll = all(".scroll").find((each) => each.querySelector(".held") && each.scrollWidth > each.clientWidth);
scroll.scrollLeft = 200;
const first = scroll.querySelector("tbody th").getBoundingClientRect(), place = scroll.getBoundingClientRect();
told.held = Math.abs(first.left - place.left) < 3 && scroll.scrollLeft > 0;
all("details").forEach((each) => { each.open = true; });
told.widthWhenOpen = [document.documentElement.scrollWidth, innerWidth];
const controls = all("button, summary, input, a, [role=region]").filter((each) => each.checkVisibility());
const names = controls.map((each) => each.getAttribute("aria-labelledby")
  ? document.getElementById(each.getAttribute("aria-labelledby")).textContent : name(each));
told.nameless = names.filter((each) => !each).length;
const parts = new Set(all("nav a").map(name));  // a link has its part's name
told.twice = names.filter((each, index) => names.indexOf(each) < index && !parts.has(each));
told.unreachable = controls.filter((each) => each.tabIndex < 0).length;
told.sticksOut = all("main *").filter((each) => !each.closest(".scroll, .apart")
  && each.getBoundingClientRect().right > innerWidth + 1).slice(0, 5).map((each) => each.outerHTML.slice(0, 120));
told.dark = matchMedia("(prefers-color-scheme: dark)").matches;
const rgba = (text) => { const [r, g, b, a = 1] = text.match(/[\\d.e-]+/g).map(Number); return [r, g, b, a]; };
const over = (above, below) => [0, 1, 2].map((i) => above[i] * above[3] + below[i] * (1 - above[3])).concat(1);
const behind = (each) => {
  const own = each ? rgba(getComputedStyle(each).backgroundColor) : told.dark ? [18, 18, 18, 1] : [255, 255, 255, 1];
  return own[3] === 1 ? own : over(own, behind(each.parentElement));
};
const light = (color) => color.slice(0, 3).map((part) => part / 255)
  .map((part) => part <= 0.04045 ? part / 12.92 : ((part + 0.055) / 1.055) ** 2.4)
  .reduce((sum, part, i) => sum + part * [0.2126, 0.7152, 0.0722][i], 0);
const contrast = (each) => {
  const below = behind(each), pair = [below, over(rgba(getComputedStyle(each).color), below)].map(light);
  return (Math.max(...pair) + 0.05) / (Math.min(...pair) + 0.05);
};
const texts = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT), faint = new Map();
for (let node = texts.nextNode(); node; node = texts.nextNode()) {
  const each = node.parentElement;
  if (!node.data.trim() || each.closest("script, style, svg") || !each.checkVisibility()) continue;
  if (contrast(each) < 4.5) faint.set(each.outerHTML.slice(0, 100), contrast(each).toFixed(2));
}
told.faint = [...faint].slice(0, 5);
parent.postMessage({ frame: window.name, ...told, complaints }, "*");
});</script>"""
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
    return page(Board((*entries, old), (RefusedRecord(LONG, LONG),), profiles()))


def _entry(backend: str, cases: list[str], wrong: list[str]) -> Entry:
    found = tuple(Finding(case, Status.FAIL, "lse", LONG, f"file: bug: {case[:12]} {LONG}") for case in wrong)
    statuses = dict.fromkeys(cases, Status.PASS) | dict.fromkeys(wrong, Status.EXPECTED_FAILURE)
    shown = Shown(
        suite="2", date="2026-11-22", backend=backend, reference=backend, device="NVIDIA H200",
        environment={"compute_capability": "9.0"}, rounding={}, counts=Counts(), worst={"lse": Worst(0.5, cases[0])},
        findings=found, unjudged=(), lacking={}, cases=statuses, versions={"torch": LONG},
    )  # fmt: skip
    return Entry(shown, "")


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

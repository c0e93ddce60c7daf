"""Every file that a command reads, with something wrong in it: a clear error or the right answer, and no traceback."""

import json
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import reduce
from operator import getitem
from pathlib import Path
from random import Random
from typing import Any

import msgspec
import pytest

from mla_conformance.cases.case import Case
from mla_conformance.cases.sharding import Shard
from mla_conformance.cli import main
from mla_conformance.diagnosis.heat_map import HeatMap
from mla_conformance.engine import journal as journals
from mla_conformance.engine.journal import JOURNAL_NAME, Journal
from mla_conformance.engine.messages import Found
from mla_conformance.engine.request import Plan, RunRequest
from mla_conformance.engine.run import Run
from mla_conformance.expectations import Expectation, to_toml
from mla_conformance.files.whole import InputError
from mla_conformance.judging.record import BackendFacts, Record, Status, Traced
from mla_conformance.models.config import stored_model
from mla_conformance.models.profile import Deployment
from mla_conformance.report.json_report import load_report, report_form, to_text
from mla_conformance.report.summary import BackendSummary, RunSummary, summarise
from mla_conformance.report.terminal import LINE
from mla_conformance.tests.test_handed_in import certificate as complete
from mla_conformance.version import SUITE_VERSION
from mla_conformance.vocabulary.capabilities import CAPABILITIES, write_case

EACH = 6
CASES = [case.id for case in CAPABILITIES["lse"].cases[:4]]
TOLD = {"suite": SUITE_VERSION, "version": "1", "tier": "full", "device": "cpu", "torch": "2.13.0"}
"""Of a run that failed, so that no gate may open on it whatever else is wrong with its report."""


def run_of_a_shard() -> RunSummary:
    passed = Record("MINE", "MINE", "lse", CASES[0], Status.PASS, 1, used={"lse": 0.3}, evidence={"kernel": "k"})
    failed = Record(
        "MINE", "MINE", "lse", CASES[1], Status.FAIL, message="the call raised E: no /tmp/x 7", check="call",
        clause="4.2", where={"head": 1}, used={"lse": 7.0}, detail="Traceback\n  line",
        sampled={"rows": 1, "of": 2, "drawn": 1}, confirmation="after", after=(CASES[0],),
    )  # fmt: skip
    known = Record("MINE", "MINE", "lse", CASES[2], Status.EXPECTED_FAILURE, judged=Status.FAIL, expectation="known")
    said = {"message": "LSE is 2", "check": "lse", "clause": "4.2", "explanation": "base 2"}
    wrong = Record("MINE", "MINE", "lse", CASES[3], Status.FAIL).with_fields(**said)
    heat = {wrong.case: HeatMap("LSE of new tokens", 2, 3, ("012", "900"))}
    facts = BackendFacts("MINE", "MINE", (), {"lib": "1.2"}, False, (("l", "a"),), {"p": "m"}, "f")
    traced = Traced({"lse": ("kernel_of_mine",)}, {"lib.so": "0" * 64})
    mine = BackendSummary(facts, summarise([passed, failed, known, wrong]), "gave up", traced, heat)
    absent = BackendSummary(BackendFacts("GONE", "GONE", ("why",)))
    return RunSummary(TOLD, (mine, absent), tuple(CASES), Shard(1, 1, tuple(CASES)))


def certificate(folder: Path) -> str:
    return to_text(complete(traced=Traced({"lse": ("kernel_of_mine",)}, {"lib.so": "0" * 64})))


def journal(folder: Path) -> str:
    written = Journal(folder / JOURNAL_NAME)
    request = RunRequest.of(["EAGER"], [], "full", "cpu", CASES)
    environment = {"torch": "2.13.0", "device": "cpu"}
    plan = Plan.of(request, "cpu", environment, [BackendFacts("EAGER", "EAGER", fingerprint="f")])
    written.append(journals.Planned(msgspec.to_builtins(plan)))
    written.append(journals.CaseStarted(CASES[0], "EAGER"))
    written.append(journals.Judgement(run_of_a_shard().records[1]))
    written.append(journals.Learned("EAGER", Found(Traced({"lse": ("k",)}, {}))))
    written.append(journals.Learned("EAGER", Found(heat=HeatMap("LSE of new tokens", 1, 2, ("09",))), CASES[1]))
    written.append(journals.GaveUp("EAGER", "5 equal failures"))
    return written.path.read_text(encoding="ascii")


def case_file(folder: Path) -> str:
    write_case(folder / "valid.json", Case.parse("chunked_context:q=[5,3];kv=[40,3];workspace=64"))
    return (folder / "valid.json").read_text(encoding="utf-8")


def _report(folder: Path) -> str:
    return to_text(report_form(run_of_a_shard()))


def _model_report(folder: Path) -> str:
    """Of a run that was asked about a model, all of whose cases it was to judge."""
    asked = Deployment(model="glm-5", tp=8, kv_cache="fp8", heads=8)
    return to_text(report_form(replace(run_of_a_shard(), shard=None, deployment=asked)))


def _expectations(folder: Path) -> str:
    entries = Expectation(
        backend="MINE", case=CASES[1], check="call", reason="known", link="here", category="design",
        when="torch >= 2.9 and not lib < 1.0", until="2099-01-01",
    )  # fmt: skip
    others = Expectation(backend="*", case=(*CASES[2:], "merge*"), reason="known as well", until="2999.1")
    return to_toml(entries) + to_toml(others)


MUST_PASS = "# mine\n" + "".join(f"core {case}\n" for case in CASES)
CONFIG = json.dumps(stored_model("deepseek-v3.2").config)
GATE = "gate {} --require-tier none"
RENDER = "report render @ --format {}"
SUBJECTS: dict[str, tuple[str, Callable[[Path], str], str, tuple[int, ...]]] = {
    "gate": ("r.json", _report, GATE.format("@"), (1, 2)),
    "gate whole": ("r.json", _report, "gate @ --require MINE --must-pass", (1, 2)),
    "gate baseline": ("r.json", _report, GATE.format("VALID --baseline @"), (1, 2)),
    "gate expectations": ("e.toml", _expectations, GATE.format("VALID --expectations @@"), (0, 1, 2)),
    "gate must-pass": ("m.txt", lambda _: MUST_PASS, GATE.format("VALID --must-pass @"), (1, 2)),
    "verify": ("c.json", certificate, "verify @", (0, 1, 2)),
    "replay report": ("r.json", _report, "replay --report @ --backend EAGER", (0, 2)),
    "replay case": ("c.json", case_file, "replay @ --backend EAGER", (0, 2)),
    **{f"render {kind}": ("r.json", _report, RENDER.format(kind), (0, 2)) for kind in ("annotations", "junit")},
    **{f"render a model's {kind}": ("r.json", _model_report, RENDER.format(kind), (0, 2)) for kind in
       ("text", "html", "markdown")},
    "diff before": ("r.json", _report, "report diff @ VALID", (0, 1, 2)),
    "diff after": ("r.json", _report, "report diff VALID @", (0, 1, 2)),
    "merge": ("r.json", _report, "report merge @ --out VALID.merged", (0, 2, 3)),
    "certify config": ("config.json", lambda _: CONFIG, "certify --backend EAGER --config @", (0, 2)),
    "certify cases": ("c.json", case_file, "certify --backend EAGER --cases @@", (0, 2)),
    "certify expectations": ("e.toml", _expectations, "certify --backend EAGER --expectations @@", (0, 2)),
    "certify resume": ("journal.jsonl", journal, "certify --resume @@", (0, 2)),
    "certify durations": ("r.json", _report, "certify --backend EAGER --shard 1/2 --durations @", (0, 2)),
}  # fmt: skip
"""The name and the text of a valid file; the command, with ``@`` for it, ``@@`` for its folder, and ``VALID`` for the
report as a run wrote it; exit statuses that a mutated file may have, that of the valid one first."""

_RAW = "written as it stands"
_LITERALS = ["NaN", "Infinity", "-1e999", "9" * 5000, "[" * 3000 + "]" * 3000, '{"a":' * 3000 + "1" + "}" * 3000, "01"]
"""What no JSON value of Python's writes."""
_TEXTS = [
    "", "x" * 40, "::error::forged", "a\n::set-output name=x::y", "%0A::error::z", "\u2028::error::u",
    "##[error]forged", "\x1b[2J\x07", "\u202egnp.exe\u2066", "\x00", "\x7f\x85", "\ufeff", "y" * 200_000,
    " " * 100_000 + "z", "." * 100_000, "lse:q=[1x3000000000]", "lse:q=[(1,2)x3000000000]",
    "lse:q=[1];heads=" + "9" * 5000, "lse:q=[2147483647,2147483647]", "lse:q=[1]\n",
    "chunked_context:q=[1];kv=[2000000000];workspace=1;page=1", "lse:q=[1];dims=" + "9" * 5000 + "-1-1-1",
    "../../etc/passwd", "2026." + "9" * 5000, "9" * 5000, "9999-99-99", "<script>", "|`*_[](x)",
    "mla-conformance-report/5",
]  # fmt: skip
_VALUES: list[Any] = [None, True, 7, -1, 0, 10**30, 2**63, 1e308, -0.5, [], {}, [[]], {"odd": {}}, ["lse:q=[1]"] * 3]
_BYTES = [b"\x00", b"\xff\xfe", b"\xc3\x28", b"\xed\xa0\x80", b"\n", b"\r\n", b"\xef\xbb\xbf", b"\\ud800", b'"', b"}"]


def mutated(text: str, seed: int) -> bytes:
    """A text with one thing wrong: one of its values if it is JSON, or lines of JSON, or else some of its bytes."""
    random = Random(seed)
    return (_bytes_changed if random.randrange(3) == 0 else _edited)(text, random)


def _edited(text: str, random: Random) -> bytes:
    """With one value removed, replaced, repeated under its own name, or renamed; of what is no JSON, with a word so."""
    lines = text.splitlines() if text.startswith('{"after"') else [text]
    number = random.randrange(len(lines))
    try:
        value = json.loads(lines[number])
    except ValueError:
        words, odd = text.split(" "), random.choice(_TEXTS)
        words[random.randrange(len(words))] = random.choice([odd, json.dumps(odd), random.choice(_LITERALS)])
        return " ".join(words).encode("utf-8", "surrogatepass")
    raw = _edit(*_place(value, random), random)
    lines[number] = json.dumps(value).replace(json.dumps(_RAW), raw)
    return "\n".join([*lines, ""]).encode("utf-8", "surrogatepass")


def _place(value: Any, random: Random) -> tuple[Any, Any]:
    """A container in a JSON value, and one of its keys or indices; one way in four ends at each level."""
    while True:
        key = random.choice(list(value) if isinstance(value, dict) else range(len(value)))
        below = value[key]
        if not isinstance(below, dict | list) or not below or random.randrange(4) == 0:
            return value, key
        value = below


def _edit(container: Any, key: Any, random: Random) -> str:
    """Changes what a container holds in a place; what stands for :data:`_RAW` in the text is returned."""
    kind, again, text = random.randrange(9), json.dumps(container[key]), random.choice(_TEXTS)
    if kind == 0:
        del container[key]
    elif kind == 1 and isinstance(container, dict):
        container[text] = container.pop(key)
    elif kind == 2:
        container[key] = random.choice(_VALUES)
    else:
        container[key] = text if kind > 4 else _RAW
    name = f"{json.dumps(key)}: " if isinstance(container, dict) else ""
    return random.choice(_LITERALS) if kind == 3 else f"{again}, {name}{again}"


def _bytes_changed(text: str, random: Random) -> bytes:
    whole, odd = text.encode(), random.choice(_BYTES)
    place = random.randrange(len(whole))
    further = place + 1 + random.randrange(40)
    before, behind = whole[:place], whole[further:]
    flipped = bytes([whole[place] ^ 1 << further % 8])
    encoded = text.encode(random.choice(["utf-16", "utf-16-le", "utf-32", "utf-7"]))
    return random.choice([
        before, before + behind, whole[:further] + whole[place:], before + odd + whole[place:], odd + whole, whole * 2,
        encoded, before + flipped + whole[place + 1 :],
    ])  # fmt: skip


def stopped(run: Run, **_: object) -> int:
    list(run.folder.journal.events())
    run.folder.discard()
    return 0


@pytest.fixture
def unrun(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """No command judges anything, and none reads the expectations that are shipped, which others test."""
    (tmp_path / "none").mkdir()
    for name in ("certify", "replay"):
        monkeypatch.setattr(f"mla_conformance.commands.{name}.run_and_report", stopped)
    for name in ("certify", "reports"):
        monkeypatch.setattr(f"mla_conformance.commands.{name}.KNOWN_FAILURES", tmp_path / "none")
    monkeypatch.chdir(tmp_path)


def require_shown(text: str, machine: bool) -> None:
    """Nothing that a terminal or a CI system would act upon, and no endless line."""
    assert all(character.isprintable() for character in text.replace("\n", ""))
    for line in text.splitlines():
        assert machine or not (line.lstrip().startswith("::") or "##[" in line), line
        assert len(line) < 11 * LINE


@pytest.mark.parametrize("name", SUBJECTS)
def test_a_mutated_file_is_answered_or_refused(name: str, unrun: None, tmp_path: Path, capsys: Any) -> None:
    called, text, line, right = SUBJECTS[name]
    folder = tmp_path / "read"
    folder.mkdir()
    (tmp_path / "VALID").write_text(_report(tmp_path), encoding="utf-8")
    file, valid = folder / called, text(tmp_path)
    for seal in Journal(tmp_path / JOURNAL_NAME).seals:
        seal.rename(folder / seal.name)
    command = [{"@": str(file), "@@": str(folder)}.get(word, word) for word in line.split()]
    seen: set[bytes] = set()

    def answer(content: bytes) -> tuple[int, str, str]:
        file.write_bytes(content)
        began = time.process_time()  # of this process: others may keep it waiting
        status, captured = main(command), capsys.readouterr()
        assert time.process_time() - began < 5 and status in right, (status, captured)
        return status, *captured

    assert answer(valid.encode())[0] == right[0]
    for seed in range(EACH):
        content = mutated(valid, seed)
        seen.add(content)
        status, out, err = answer(content)
        require_shown(out, machine="annotations" in name or "html" in name)
        require_shown(err, machine=False)
        if status == 2:
            assert err.startswith("mla-conformance: ") and err.count("\n") == 1 and "Error(" not in err
        if status == 0 and name == "verify":
            assert json.loads(content.decode("utf-8-sig")) == json.loads(valid)
    assert len(seen) > EACH * 0.6


ODD: tuple[Any, ...] = (None, -1, 10**30, "x" * 40, {"odd": {}})
FREE = {"where", "seconds", "used", "sampled", "shard", "heat"}
"""Beside texts, the entries that nothing else of a report follows from."""


def edits(whole: Any, *outer: Any) -> Iterator[tuple[tuple[Any, ...], Any]]:
    """A JSON value with one value inside replaced, each time where and by what; it is put back behind it."""
    inner = reduce(getitem, outer, whole)
    for key in inner if isinstance(inner, dict) else range(len(inner)) if isinstance(inner, list) else ():
        right = inner[key]
        for odd in (odd for odd in ODD if odd != right):
            inner[key] = odd
            yield (*outer, key, odd), whole
        inner[key] = right
        yield from edits(whole, *outer, key)


def test_what_follows_from_the_rest_of_a_report_cannot_be_replaced(tmp_path: Path) -> None:
    file = tmp_path / "bad.json"
    for where, edited in edits(json.loads(_report(tmp_path))):
        file.write_text(json.dumps(edited))
        try:
            load_report(file)
        except InputError as refused:
            assert str(refused).startswith(f"{file}: "), where
        else:
            assert isinstance(where[-1], str) or {*map(str, where)} & FREE, where

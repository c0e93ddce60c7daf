"""``scoreboard``: records as a static site, which is a page, a badge for each kernel, and its failures as SARIF 2.1.0.

The page needs no network and no other file; its script answers from models, and from every case in every record.
"""

import argparse
import base64
import gzip
import hashlib
import json
import re
from collections.abc import Iterable
from functools import cache, lru_cache
from importlib.resources import files
from itertools import groupby
from pathlib import Path
from typing import Any

import msgspec
from markupsafe import Markup

from mla_conformance.backends.roles import ROLES, Role
from mla_conformance.cases.case import Case
from mla_conformance.files.whole import InputError, write_output
from mla_conformance.judging.record import CLAUSES, FAILED, Check, Status, replay_line
from mla_conformance.judging.traits import NO_TRAITS
from mla_conformance.models.config import find_model, model_names
from mla_conformance.models.profile import Deployment, cases_of, dims_of
from mla_conformance.report import causes, html, json_report, outcome, summary
from mla_conformance.report.terminal import say, shown
from mla_conformance.scoreboard.board import Board, Entry, Profile, RankedKernel, profiles, read_entries, versions_of
from mla_conformance.version import SUITE_VERSION, __version__

_LETTER, _MARGIN = 6.6, 12  # pixels; the width of a letter is that of a common sans serif on average
_OTHER_RULE = "failure"  # the rule of a failure that names no check, such as a crash
_SHOWN_CASES = 20  # of a failure, whose others are in the SARIF


def scoreboard(options: argparse.Namespace) -> int:
    """Write the site; the exit status is 1 if a file was not taken for a record, which the site tells as well."""
    given = options.records or sorted(Path(str(files("mla_conformance.fixtures") / "records")).glob("*.jsonl"))
    reports = [path for path in given if json_report.is_report(path)]
    entries, refused = read_entries(path for path in given if path not in reports)
    deployed = tuple(map(json_report.load_report, reports))
    for run in deployed:
        if run.deployment is None:
            got = "got one of a whole list: hand in its record"
            raise InputError(f"{run.source}: expected a run of certify --model, {got}")
    board = Board(tuple(entries), tuple(refused), profiles(), deployed)
    badges: dict[str, str] = {}
    for kernel, (entry, *_) in board.by_kernel.items():
        plain = re.sub(r"[^\w.-]+", "-", kernel, flags=re.ASCII).strip("-")  # as a file may be called
        if (name := f"{plain or 'kernel'}.svg") in badges:
            raise InputError(f"{kernel}: expected another name, a second kernel has the badge {name}")
        badges[name] = badge(entry)
    for name, text in badges.items():  # once no name is taken twice
        write_output(options.out / "badges" / name, text)
    write_output(options.out / "scoreboard.sarif", json_report.to_text(sarif(board.newest)))
    write_output(options.out / "index.html", page(board))
    say(*(f"{each.source}: not shown: {each.why}" for each in refused), error=True)
    old = sum(bool(entry.old) for entry in entries)
    say(f"wrote {options.out / 'index.html'}: {len(entries)} records, {old} of them outdated, {len(refused)} not shown")
    return 1 if refused else 0


def page(board: Board) -> str:
    anchors = {id(entry): f"kernel-{number}" for number, entry in enumerate(board.newest, start=1)}
    numbers = {case: number for number, case in enumerate(board.cases)}
    current = [entry for entry in board.newest if not entry.old]
    named = [(f"{x.record.backend}, {x.versions}, {x.record.device}", x.record) for x in current]
    timed = [(name, record.speed) for name, record in named if record.speed]
    # The ids of the page's parts with their names, for links to them.
    parts = [("kernels", "Kernels"), *([("models", "Models by kernel")] if board.deployed else [])]
    parts += [("speed", "Speed")] if timed else []
    parts += [("engines", "What engines pick"), *((f"role-{role}", role) for role, _, _ in board.roles)]
    parts += [("failures", "Failures"), ("history", "History")]
    told: dict[str, Any] = {"board": board, "parts": parts, "timed": timed, "served": served(board)}
    told |= {"shown_cases": _SHOWN_CASES, "suite": SUITE_VERSION, "replay_line": replay_line}
    told |= {"cell": _cell, "build": _build, "answered": answered, "anchor": lambda entry: anchors[id(entry)]}
    told["traits_of"] = [(name, record.traits or NO_TRAITS) for name, record in named]
    told["sanitized"] = [(entry, found) for entry in current for found in entry.sanitized]
    told["places"] = lambda x: " ".join(str(numbers[each.case]) for each in x.findings if each.case in numbers)
    told["deployed_kernels"] = sorted({backend.name for run in board.deployed for backend in run.backends})
    return html.pages("mla_conformance.scoreboard").get_template("board.html.j2").render(told)


def _cell(capability: summary.CapabilitySummary) -> dict[str, str]:
    """In which a known failure is one: an expectation excuses it in a run, and makes no kernel right."""
    found, waived = html.cell(capability), capability.counts.waived
    return found | {"style": "fail", "sign": "✘", "note": f"{waived:,} known to fail"} if waived else found


def _build(profile: Profile, candidate: RankedKernel, entry: Entry) -> str:
    torch, own = entry.record.environment.get("torch", "not stated"), entry.versions
    if reported := ", ".join(f"{name} {version}" for name, version in candidate.packages.items()):
        is_own = candidate.packages.items() <= entry.record.distributions.items()
        own = f"the engine's own build ({reported})" if is_own else f"another build ({entry.versions})"
    same = torch.partition("+")[0] == profile.torch
    return own if same else f"{own}, judged with torch {torch}; the engine asks for {profile.torch}"


def badge(entry: Entry) -> str:
    record = entry.record
    verdict = f"right on {entry.counts.passed:,} cases" if entry.verdict.startswith("right") else entry.verdict
    texts = (shown(text, 200) for text in (record.backend, f"{verdict} · {record.device} · {entry.state}"))
    parts = [(text, len(text) * _LETTER + _MARGIN) for text in texts]
    colour = "#57606a" if entry.old else "#a8071a" if entry.is_wrong else "#12683a"
    template = html.pages("mla_conformance.scoreboard").get_template("badge.svg.j2")
    return template.render(parts=parts, colour=colour, margin=_MARGIN) + "\n"


def sarif(entries: Iterable[Entry]) -> dict[str, Any]:
    """A log with one run, as plain data; what an old record tells is a note, and says so."""
    results = []
    for entry in entries:
        record, about = entry.record, (entry.record.backend, entry.versions, entry.record.device)
        for failure, finding in ((known, each) for known in entry.failures for each in known.findings):
            full = f"{record.backend}/{finding.case}"
            replay = replay_line(finding.case, record.reference, salt=record.salt)
            said = f"{failure.reason}. {finding.message}. Replay: {replay}"
            same = "\n".join((*about, finding.case)).encode("utf-8", errors="replace")
            location = {"name": finding.case, "fullyQualifiedName": full, "kind": "member"}
            rule = finding.check if finding.check in set(Check) else _OTHER_RULE
            message = {"text": f"{', '.join(about)}, {entry.state}: {said}"}
            result: dict[str, Any] = {"ruleId": rule, "level": "note" if entry.old else "error", "message": message}
            result["locations"] = [{"logicalLocations": [location]}]
            result["partialFingerprints"] = {"kernelAndCase/v1": hashlib.sha256(same).hexdigest()}
            results.append(result)
    rules = {str(x): f"{causes.WRONG.get(x, x.replace('_', ' '))} (SPEC {CLAUSES[x]})" for x in Check}
    rules[_OTHER_RULE] = "the call did not end in a result"
    told = [{"id": name, "shortDescription": {"text": text}} for name, text in rules.items()]
    driver = {"name": "mla-conformance", "version": __version__, "rules": told}
    schema = "https://json.schemastore.org/sarif-2.1.0.json"
    return {"$schema": schema, "version": "2.1.0", "runs": [{"tool": {"driver": driver}, "results": results}]}


_STATES = {Status.PASS: "p", Status.UNSUPPORTED: "u", Status.EXPECTED_FAILURE: "w", **dict.fromkeys(FAILED, "w")}
_NOT_SERVED = {"refusals": "refusals", "large_offsets": "tensors of 2^31 elements"}  # what no deployment asks


def served(board: Board) -> Markup:
    """The data as JSON, packed by gzip, since ids of cases are long and alike, and by base64."""
    cases = board.cases
    # The cases whose ids the script may show: wrong ones, and those that differ between records of a kernel.
    groups, named = causes.grouped(board.entries, lambda entry: (entry.record.backend, entry.record.device)), set[str]()
    for records in ([entry.record.cases for entry in group] for group in groups.values()):
        named.update(case for each in records for case, status in each.items() if _STATES.get(status) == "w")
        if len(records) > 1:
            named.update(case for case in cases if len({each.get(case) for each in records} - {None}) > 1)
    kinds, engines = list(dict.fromkeys(map(kind_of, cases))), []
    for profile in board.profiles:
        about: dict[str, Any] = {"name": profile.engine, "capability": profile.compute_capability, "role": profile.role}
        engines.append({**about, "candidates": [msgspec.structs.asdict(each) for each in profile.candidates]})
    data: dict[str, Any] = {"suite": SUITE_VERSION, "models": models(), "kinds": kinds}
    place = {kind: number for number, kind in enumerate(kinds)}
    data["cases"] = [[case if case in named else "", place[kind_of(case)]] for case in cases]
    data |= {"records": [], "engines": engines, "runs": []}
    for entry in board.entries:
        record = entry.record
        # A dash for a status without a letter, such as unavailable; a blank for a case that the record does not list.
        letters = (_STATES.get(record.cases[case], "-") if case in record.cases else " " for case in cases)
        runs = "".join(f"{letter}{len(list(run))}" for letter, run in groupby(letters))  # each with its number in a row
        capability, renew = record.environment.get("compute_capability", ""), record.renewal
        about = {"kernel": record.backend, "device": record.device, "capability": capability}
        about |= {"versions": record.distributions, "suite": record.suite, "date": record.date, "old": bool(entry.old)}
        data["records"].append({**about, "order": entry.order, "renew": renew, "statuses": runs})
    for run in board.deployed:
        if deployed := run.deployment:
            device, suite = (run.environment.get(name, "") for name in ("device", "suite"))
            about = {"model": deployed.model, "tp": deployed.tp, "cache": deployed.kv_cache, "device": device}
            about |= {"date": run.date, "suite": suite, "old": suite != SUITE_VERSION, "kernels": answered(run)}
            data["runs"].append(about)
    packed = gzip.compress(json.dumps(data, separators=(",", ":")).encode(), mtime=0)
    return Markup(base64.b64encode(packed).decode())


@lru_cache(8192)
def kind_of(case: str) -> tuple[str, int, str, str, str, str]:
    """Role, heads, dims, dtype, cache, and what of it no deployment on one rank asks; of an old id nothing is known."""
    try:
        parsed = Case.parse(case)
    except ValueError:
        return ("other", 0, "", "", "", "of an earlier suite")
    special = [_NOT_SERVED[parsed.capability]] if parsed.capability in _NOT_SERVED else []
    special += ["several ranks"] if getattr(parsed, "ranks", 1) > 1 else []
    special += ["quantised output"] if getattr(parsed, "quant", "none") != "none" else []
    cache = "" if parsed.role is Role.PREFILL else getattr(parsed, "cache", "")
    return (str(parsed.role), parsed.heads, parsed.dims, parsed.dtype, cache, ", ".join(special))


@cache
def models() -> list[dict[str, Any]]:
    """Each model with its heads, head dims, roles, numbers of ranks and caches; without layers, which engines own."""
    found = []
    for name in model_names():
        profile = find_model(name)
        roles = {str(case.role) for case in cases_of(profile, Deployment.of(profile, 1, "auto"))} - {Role.LAYER}
        about = {"name": name, "heads": profile.heads, "dims": dims_of(profile.dims)}
        about["roles"] = [role for role in ROLES if role in roles]
        about["tp"] = [size for size in profile.tensor_parallel_sizes if size & (size - 1) == 0]  # GPUs of whole nodes
        indexer = profile.selection.index_heads if profile.selection else 0
        found.append({**about, "caches": profile.cache_layouts, "indexer": indexer})
    return found


def answered(run: summary.RunSummary) -> dict[str, dict[str, Any]]:
    """What a run of a model says of each backend: in words, as a style, and of which version and parts."""
    styles, found = {summary.Group.RIGHT: "pass", summary.Group.WRONG: "fail", summary.Group.WAIVED: "fail"}, {}
    for backend, said in outcome.answers(run):
        versions, style = versions_of(backend.facts.versions), styles.get(backend.group, "unavailable")
        found[backend.name] = {"says": str(backend.group), "style": style, "judged": said, "versions": versions}
    return found

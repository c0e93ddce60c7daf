"""What the page's script answers from: models as they are deployed, and what became of every case in every record."""

import base64
import gzip
import json
from functools import cache, lru_cache
from itertools import groupby
from typing import Any

from markupsafe import Markup

from mla_conformance.backends.roles import ROLES, Role
from mla_conformance.cases.case import Case
from mla_conformance.certificate.certificate import renewal
from mla_conformance.files.whole import InputError
from mla_conformance.judging.verdict import FAILED, Status
from mla_conformance.models.caselist import cases_of, dims_of
from mla_conformance.models.config import find_model, model_names
from mla_conformance.models.profile import Deployment
from mla_conformance.report.causes import grouped
from mla_conformance.report.outcome import answers
from mla_conformance.report.summary import Group, RunSummary
from mla_conformance.scoreboard.board import Board, Entry, versions_of
from mla_conformance.version import SUITE_VERSION

_LETTERS = {Status.PASS: "p", Status.UNSUPPORTED: "u", Status.EXPECTED_FAILURE: "w", **dict.fromkeys(FAILED, "w")}
"""Of any other status, such as unavailable, it is a dash."""
_NOT_SERVED = {"refusals": "refusals", "large_offsets": "tensors of 2^31 elements"}
"""Capabilities that ask more than a deployment does."""
Kind = tuple[str, int, str, str, str, str]


def served(board: Board) -> Markup:
    """The data as JSON, packed by gzip, since ids of cases are long and alike, and by base64."""
    cases = cases_on(board)
    kinds = list(dict.fromkeys(map(kind_of, cases)))
    place = {kind: number for number, kind in enumerate(kinds)}
    named, engines = _named(board, cases), []
    for profile in board.profiles:
        told = ("name", "kernel", "when", "packages")
        candidates = [{name: getattr(each, name) for name in told} for each in profile.candidates]
        asked = {"name": profile.engine, "capability": profile.compute_capability, "role": profile.role}
        engines.append({**asked, "candidates": candidates})
    data = {
        "suite": SUITE_VERSION,
        "models": models(),
        "kinds": kinds,
        "cases": [[case if case in named else "", place[kind_of(case)]] for case in cases],
        "records": [_record(entry, cases) for entry in board.entries],
        "engines": engines,
        "runs": [_run(run) for run in board.deployed],
    }
    packed = gzip.compress(json.dumps(data, separators=(",", ":")).encode(), mtime=0)
    return Markup(base64.b64encode(packed).decode())


def _named(board: Board, cases: list[str]) -> set[str]:
    """The cases whose ids the script may show: wrong ones, and those that differ between records of a kernel."""
    groups = grouped(board.entries, lambda entry: (entry.record.backend, entry.record.device)).values()
    found = set[str]()
    for records in ([entry.record.cases for entry in group] for group in groups):
        found.update(case for each in records for case, status in each.items() if _LETTERS.get(status) == "w")
        if len(records) > 1:
            found.update(case for case in cases if len({each.get(case) for each in records} - {None}) > 1)
    return found


def cases_on(board: Board) -> list[str]:
    return list(dict.fromkeys(case for entry in board.entries for case in entry.record.cases))


@lru_cache(8192)
def kind_of(case: str) -> Kind:
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
        cases = cases_of(profile, Deployment.of(profile, 1, "auto"))
        roles = {str(case.role) for case in cases} - {Role.LAYER}
        found.append(
            {
                "name": name,
                "heads": profile.heads,
                "dims": dims_of(profile),
                "roles": [role for role in ROLES if role in roles],
                # On GPUs of whole nodes.
                "tp": [size for size in profile.tensor_parallel_sizes if size & (size - 1) == 0],
                "caches": profile.cache_layouts,
                "indexer": profile.selection.indexer.heads if profile.selection else 0,
            }
        )
    return found


def _record(entry: Entry, cases: list[str]) -> dict[str, Any]:
    record = entry.record
    letters = (_LETTERS.get(record.cases[case], "-") if case in record.cases else " " for case in cases)
    return {
        "kernel": record.backend,
        "device": record.device,
        "capability": record.environment.get("compute_capability", ""),
        "versions": record.distributions,
        "suite": record.suite,
        "date": record.date,
        "old": bool(entry.old),
        "order": entry.order,
        "renew": renewal(record.reference, record.device),
        # Each with its number in a row; of a case that a record does not list, a blank.
        "statuses": "".join(f"{letter}{len(list(run))}" for letter, run in groupby(letters)),
    }


def _run(run: RunSummary) -> dict[str, Any]:
    """A run of ``certify --model``: what it says of each backend."""
    assert run.deployment is not None, "the board holds no other runs"
    return {
        "model": run.deployment.model,
        "tp": run.deployment.tp,
        "cache": run.deployment.kv_cache,
        "device": run.environment.get("device", ""),
        "date": run.date,
        "suite": run.environment.get("suite", ""),
        "old": run.environment.get("suite", "") != SUITE_VERSION,
        "kernels": answered(run),
    }


def answered(run: RunSummary) -> dict[str, dict[str, Any]]:
    """What a run of a model says of each backend: in words, as a style, and of which version and parts."""
    styles = {Group.RIGHT: "pass", Group.WRONG: "fail", Group.WAIVED: "fail"}
    found = {}
    for answer in answers(run):
        found[answer.backend.name] = {
            "says": str(answer.backend.group),
            "style": styles.get(answer.backend.group, "unavailable"),
            "judged": answer.reported,
            "versions": versions_of(answer.backend.facts.versions),
        }
    return found


def require_deployment(run: RunSummary) -> RunSummary:
    if run.deployment is None:
        raise InputError(
            f"{run.source}: expected a run of certify --model, got one of a whole list: hand in its record"
        )
    return run

"""The plan of a run, its journal's first event: what a resumed run must agree with to be the same run."""

import hashlib
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from mla_conformance.backends.platform import describe_device
from mla_conformance.cases.sharding import Shard
from mla_conformance.driving.subject import Subject
from mla_conformance.isolation.journal import Journal, JournalError
from mla_conformance.running.selection import Selection
from mla_conformance.version import __version__

PLAN_FORMAT = 1
_FIELDS: dict[str, type | tuple[type, ...]] = {
    "suite": str,
    "torch": str,
    "device": str,
    "device_name": str,
    "tier": str,
    "backends": dict,
    "capabilities": dict,
    "cases": list,
    "explore": int,
    "shard": (dict, type(None)),
    "arguments": list,
}


def plan_of(selection: Selection, arguments: Sequence[str], shard: Shard | None) -> dict[str, Any]:
    """The plan of a selection, or of one shard of it, and of further arguments for pytest, as plain data."""
    return {
        "format": PLAN_FORMAT,
        "suite": __version__,
        "torch": torch.__version__,
        "device": selection.device.type,
        "device_name": describe_device(selection.device),
        "tier": selection.tier.value,
        "backends": {subject.backend.reference: fingerprint(subject) for subject in selection.subjects},
        "capabilities": {name: _case_list(selection, name) for name in selection.capabilities},
        "cases": [case.id for case in selection.cases],
        "explore": selection.explore,
        "shard": {**asdict(shard), "cases": list(shard.cases)} if shard else None,
        "arguments": list(arguments),
    }


def recorded_plan(journal: Journal) -> dict[str, Any]:
    """The plan that a journal starts with.

    Raises:
        JournalError: there is no journal, or it starts otherwise, or with a plan of another format.
    """
    first = next(journal.events(), None) if journal.path.exists() else None
    plan = first.get("plan") if isinstance(first, dict) else None
    if not isinstance(plan, dict):
        raise JournalError(f"{journal.path}: expected a journal that starts with the plan of a run; start the run anew")
    if plan.get("format") != PLAN_FORMAT:
        raise JournalError(f"{journal.path}: expected plan format {PLAN_FORMAT}, got {plan.get('format')!r}")
    wrong = [name for name, kind in _FIELDS.items() if not isinstance(plan.get(name), kind)]
    if wrong:
        raise JournalError(f"{journal.path}: the plan lacks a right value of {', '.join(wrong)}")
    try:
        planned_shard(plan)
    except (KeyError, TypeError) as error:
        raise JournalError(f"{journal.path}: the plan lacks a right value of shard: {error}") from error
    return plan


def planned_shard(plan: dict[str, Any]) -> Shard | None:
    """The shard of a recorded plan."""
    shard = plan["shard"]
    return Shard(**{**shard, "cases": tuple(shard["cases"])}) if shard else None


def differences(recorded: dict[str, Any], current: dict[str, Any]) -> list[str]:
    """What two plans do not agree in, in words."""
    found = []
    for name in _FIELDS:
        old, new = recorded[name], current[name]
        if isinstance(old, dict):
            found += [
                f"{name}: {key} was {old.get(key, 'absent')}, is {new.get(key, 'absent')}" for key in _changed(old, new)
            ]
        elif old != new:
            found.append(f"{name}: was {old}, is {new}")
    return found


def _changed(old: dict[str, str], new: dict[str, str]) -> list[str]:
    return [key for key in {**old, **new} if old.get(key) != new.get(key)]


def fingerprint(subject: Subject) -> str:
    """What tells that a backend is still the same: its file, or its distributions' versions."""
    location = subject.backend.reference.rpartition(":")[0]
    if location.endswith(".py"):
        return "file " + _digest(Path(location).read_bytes())
    if subject.unavailable:
        return "unavailable"
    return ", ".join(f"{name} {version}" for name, version in subject.versions().items()) or "no distribution"


def _case_list(selection: Selection, capability: str) -> str:
    ids = [case.id for case in selection.cases_of(capability)]
    return f"{len(ids)} cases {_digest(chr(10).join(ids).encode())}"


def _digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()[:12]

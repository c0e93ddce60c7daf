"""Case files: one case each as JSON, so that a failure or a call of an engine can be kept, shared and judged."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from mla_conformance.cases.case import Case, CaseError
from mla_conformance.files.whole import InputError, decode, read_text, write_whole
from mla_conformance.vocabulary.capabilities import CapabilityError, find_capability


class _CaseFile(msgspec.Struct):
    case: dict[str, bool | int | str | tuple[int, ...]]
    id: str


def read_case(path: Path) -> Case:
    file = decode(read_text(path), _CaseFile, str(path))
    try:
        case = Case.from_json(file.case)
        find_capability(case.capability)
    except (CaseError, CapabilityError) as error:
        raise InputError(f"{path}: {error}") from error
    if file.id != case.id:
        raise InputError(f"{path}: expected id {case.id!r} as the fields give it, got {file.id!r}")
    return case


def read_cases(folder: Path) -> tuple[Case, ...]:
    if not folder.is_dir():
        raise InputError(f"{folder}: no such folder")
    cases = {case.id: case for case in map(read_case, sorted(folder.glob("*.json")))}
    if not cases:
        raise InputError(f"{folder}: no case file (*.json)")
    return tuple(cases.values())


def write_case(path: Path, case: Case, observed: Mapping[str, Any] | None = None) -> None:
    """Write a case into a file of its own, with its folder; what else is ``observed`` is for people, not read back."""
    path.parent.mkdir(parents=True, exist_ok=True)
    content = {"id": case.id, "case": case.to_json(), **({"observed": observed} if observed else {})}
    write_whole(path, json.dumps(content, indent=1, ensure_ascii=False) + "\n")


def place_of(case: Case, folder: Path) -> Path:
    return folder / f"{case.capability}-{case.digest}.json"

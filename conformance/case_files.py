"""Case files: one case each as JSON, so that what an engine really calls can be kept, shared and judged."""

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from mla_conformance.capabilities import CapabilityError, find_capability
from mla_conformance.case import Case, CaseError


class CaseFileError(ValueError):
    """A file or folder that holds no case; the message names it."""


def read_case(path: Path) -> Case:
    """The case of a file: the fields of :meth:`Case.to_json`, alone or under the key ``case``.

    Raises:
        CaseFileError: unreadable, not JSON, or no case of this suite.
    """
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
        if not isinstance(data, dict):
            raise CaseError(f"expected an object, got {type(data).__name__}")
        fields = data.get("case", data)
        if not isinstance(fields, dict):
            raise CaseError(f"expected the fields of a case under 'case', got {fields!r}")
        case = Case.from_json(fields)
        find_capability(case.capability)
    except OSError as error:
        raise CaseFileError(f"{path}: {error.strerror}") from error
    except (CaseError, CapabilityError) as error:
        raise CaseFileError(f"{path}: {error}") from error
    except ValueError as error:
        raise CaseFileError(f"{path}: not JSON, truncated perhaps: {error}") from error
    return case


def read_cases(folder: Path) -> tuple[Case, ...]:
    """The distinct cases of all ``*.json`` files of a folder, by file name.

    Raises:
        CaseFileError: no such folder, no case file in it, or a bad one.
    """
    if not folder.is_dir():
        raise CaseFileError(f"{folder}: no such folder")
    cases = {case.id: case for case in map(read_case, sorted(folder.glob("*.json")))}
    if not cases:
        raise CaseFileError(f"{folder}: no case file (*.json)")
    return tuple(cases.values())


def write_case(folder: Path, case: Case, observed: Mapping[str, Any] | None = None) -> Path:
    """Write a case, named by capability and digest, unless its file is there already.

    Args:
        folder: made if it does not exist.
        case: the case.
        observed: what else is known of the call that it stands for; for people, not read back.

    Raises:
        OSError: the file cannot be written.
    """
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{case.capability}-{case.digest}.json"
    if not path.exists():
        content = {"id": case.id, "case": case.to_json(), **({"observed": observed} if observed else {})}
        partial = path.with_suffix(f".{os.getpid()}.partial")  # several ranks write into one folder
        partial.write_text(json.dumps(content, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
        partial.replace(path)
    return path

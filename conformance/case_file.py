"""Cases from files: a case's own file, and the failures of a report."""

from pathlib import Path

from mla_conformance.case import Case, CaseError
from mla_conformance.inputs import InputError, read_json_object
from mla_conformance.report.json_report import SCHEMA, write_json


def read_case(path: Path) -> Case:
    """The case of a file that :func:`write_case` wrote.

    Raises:
        InputError: no such file, no JSON, or no case of this format.
    """
    try:
        return Case.from_json(read_json_object(path))
    except CaseError as error:
        raise InputError(f"{path}: {error}") from error


def write_case(path: Path, case: Case) -> None:
    """Write a case into a file of its own.

    Raises:
        OSError: the file cannot be written.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    write_json(path, case.to_json())


def read_failure(path: Path, number: int) -> tuple[str, str]:
    """Case id and backend reference of a report's failure, counted from 1.

    Raises:
        InputError: no such file, no report of this schema, or no such failure.
    """
    report = read_json_object(path)
    if report.get("schema") != SCHEMA:
        raise InputError(f"{path}: expected a report of schema {SCHEMA}, got {report.get('schema')!r}")
    try:
        failures = [
            (str(failure["case"]), str(failure.get("reference", name)))
            for name, backend in report["backends"].items()
            for capability in backend["capabilities"].values()
            for failure in capability["failures"]
        ]
    except (KeyError, TypeError, AttributeError) as error:
        raise InputError(f"{path}: expected backends, their capabilities and failures; {error!r}") from error
    if not 1 <= number <= len(failures):
        raise InputError(f"{path}: expected the number of one of its {len(failures)} failures, got {number}")
    return failures[number - 1]

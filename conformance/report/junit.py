"""The outcome of a run as JUnit XML, which CI systems show as tests: one suite per backend, one test per record."""

from xml.etree import ElementTree

from mla_conformance.judging.record import Record
from mla_conformance.judging.verdict import Status
from mla_conformance.report.shown import LINE, cut, shown, shown_lines
from mla_conformance.report.summary import BackendSummary, RunSummary

_BROKEN = (Status.CRASH, Status.TIMEOUT, Status.HARNESS_ERROR)


def junit(run: RunSummary) -> str:
    """The XML; a failure carries its replay line, and what was not judged is skipped with its reason."""
    root = ElementTree.Element("testsuites", name="mla-conformance")
    for backend in run.backends:
        root.append(_suite(backend))
    ElementTree.indent(root)
    # ASCII, whose declaration is true wherever the text goes: what else there is becomes character references.
    return ElementTree.tostring(root, encoding="us-ascii", xml_declaration=True).decode("ascii") + "\n"


def _suite(backend: BackendSummary) -> ElementTree.Element:
    tests = [_test(record) for record in backend.records]
    if backend.reasons:
        tests = [_unavailable(backend)]
    counts = {tag: sum(test.find(tag) is not None for test in tests) for tag in ("failure", "error", "skipped")}
    suite = ElementTree.Element(
        "testsuite",
        name=shown(backend.name),
        tests=str(len(tests)),
        failures=str(counts["failure"]),
        errors=str(counts["error"]),
        skipped=str(counts["skipped"]),
        time=f"{sum(record.seconds for record in backend.records):.3f}",
    )
    suite.extend(tests)
    return suite


def _test(record: Record) -> ElementTree.Element:
    place = {"classname": shown(f"{record.backend}.{record.capability}"), "name": shown(record.case, LINE)}
    test = ElementTree.Element("testcase", place, time=f"{record.seconds:.3f}")
    message = shown(record.message)
    if record.failed:
        kind = "error" if record.status in _BROKEN else "failure"
        told = ElementTree.SubElement(test, kind, message=message, type=shown(record.check or record.status))
        said = (*map(cut, record.remarks), f"replay: {record.replay}", record.detail)
        told.text = shown_lines("\n".join(filter(None, said)))
    elif record.status is not Status.PASS:
        ElementTree.SubElement(
            test, "skipped", message=shown(": ".join(filter(None, (record.status, record.expectation, record.message))))
        )
    return test


def _unavailable(backend: BackendSummary) -> ElementTree.Element:
    test = ElementTree.Element("testcase", classname=shown(backend.name), name="available", time="0")
    ElementTree.SubElement(test, "skipped", message=shown("; ".join(backend.reasons)))
    return test

"""The outcome of a run as JUnit XML, which CI systems show as tests: one suite per backend, one test per record."""

import re
from xml.etree import ElementTree

from mla_conformance.judging.record import Record
from mla_conformance.judging.verdict import Status
from mla_conformance.report.summary import BackendSummary, RunSummary

_NO_XML = re.compile("[^\t\n\r -\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")
_BROKEN = (Status.CRASH, Status.TIMEOUT, Status.HARNESS_ERROR)


def junit(run: RunSummary) -> str:
    """The XML; a failure carries its replay line, and what was not judged is skipped with its reason."""
    root = ElementTree.Element("testsuites", name="mla-conformance")
    for backend in run.backends:
        root.append(_suite(backend))
    ElementTree.indent(root)
    return ElementTree.tostring(root, encoding="unicode", xml_declaration=True) + "\n"


def _suite(backend: BackendSummary) -> ElementTree.Element:
    tests = [_test(record) for record in backend.records]
    if backend.reasons:
        tests = [_unavailable(backend)]
    counts = {tag: sum(test.find(tag) is not None for test in tests) for tag in ("failure", "error", "skipped")}
    suite = ElementTree.Element(
        "testsuite",
        name=_text(backend.name),
        tests=str(len(tests)),
        failures=str(counts["failure"]),
        errors=str(counts["error"]),
        skipped=str(counts["skipped"]),
        time=f"{sum(record.seconds for record in backend.records):.3f}",
    )
    suite.extend(tests)
    return suite


def _test(record: Record) -> ElementTree.Element:
    place = {"classname": _text(f"{record.backend}.{record.capability}"), "name": _text(record.case)}
    test = ElementTree.Element("testcase", place, time=f"{record.seconds:.3f}")
    message = _text(record.message)
    if record.failed:
        kind = "error" if record.status in _BROKEN else "failure"
        told = ElementTree.SubElement(test, kind, message=message, type=_text(record.check or record.status))
        told.text = _text("\n".join(filter(None, (*record.remarks, f"replay: {record.replay}", record.detail))))
    elif record.status is not Status.PASS:
        ElementTree.SubElement(
            test, "skipped", message=_text(": ".join(filter(None, (record.status, record.expectation, record.message))))
        )
    return test


def _unavailable(backend: BackendSummary) -> ElementTree.Element:
    test = ElementTree.Element("testcase", classname=_text(backend.name), name="available", time="0")
    ElementTree.SubElement(test, "skipped", message=_text("; ".join(backend.reasons)))
    return test


def _text(text: str) -> str:
    """Text without the characters that XML cannot hold."""
    return _NO_XML.sub("�", text)

"""What ``certify`` leaves behind beside a report: a certificate, a record, or a submission, signed or not."""

import argparse
import datetime
from dataclasses import dataclass
from pathlib import Path

from mla_conformance.backends.references import parse_reference
from mla_conformance.certificate.certificate import Certificate
from mla_conformance.certificate.issue import Refused, issue, record, require_certifiable, require_committed
from mla_conformance.certificate.pins import Pins
from mla_conformance.certificate.signature import require_key, sign, signature_of
from mla_conformance.certificate.submission import write_submission
from mla_conformance.engine.run import Run
from mla_conformance.files.inputs import InputError
from mla_conformance.files.outputs import write_output
from mla_conformance.judging.record import BackendFacts
from mla_conformance.report.json_report import to_text
from mla_conformance.report.summary import RunSummary
from mla_conformance.report.terminal import say


@dataclass
class Issuing:
    """What is to be issued of a run.

    Attributes:
        kind: certificate, record or submission.
        path: receives it.
        key: of SSH, which signs it; None if it is not signed.
        pins: what judges and what is judged, once the run is prepared.
    """

    kind: str
    path: Path
    key: Path | None
    pins: Pins | None = None

    @staticmethod
    def asked(options: argparse.Namespace) -> "Issuing | None":
        """What the options ask for; None for nothing.

        Raises:
            InputError: there is nothing to sign, or nothing to sign with.
        """
        kinds = ("certificate", "record", "submission")
        kind, path = next(((kind, getattr(options, kind)) for kind in kinds if getattr(options, kind)), ("", None))
        if options.sign:
            if path is None:
                raise InputError("--sign: expected --certificate, --record or --submission beside it")
            require_key(options.sign)
        return Issuing(kind, path, options.sign) if path else None

    def obstacle(self, run: Run) -> str:
        """Why a run that is prepared cannot be certified; empty if it can."""
        try:
            require_certifiable(run.facts, run.request.judged_ids, run.request.explore)
            self.pins = _pins(run.facts[0])
            require_committed(self.pins)
        except Refused as reason:
            self.pins = None
            return f"no {self.kind}: {reason}"
        return ""

    def write(self, run: RunSummary, status: int) -> int:
        """Write what a finished run is worth; the exit status."""
        if status:
            return status if self.pins is None else self._refused("the run is no success", status)
        try:
            certificate = self._certificate(run)
        except Refused as reason:
            return self._refused(str(reason), 1)
        path = self._written(certificate)
        if self.key:
            sign(path, self.key)
        say(f"wrote {path}", error=True)
        return 0

    def _certificate(self, run: RunSummary) -> Certificate:
        assert self.pins is not None  # a run that was not prepared is no success
        if _pins(run.backends[0].facts) != self.pins:
            raise Refused("the backend, a package of it or the harness was changed while it was judged")
        form = issue if self.kind == "certificate" else record
        return form(run, datetime.date.today(), self.pins)

    def _written(self, certificate: Certificate) -> Path:
        if self.kind == "submission":
            return write_submission(self.path, certificate)
        write_output(self.path, to_text(certificate.to_json()))
        signature_of(self.path).unlink(missing_ok=True)
        return self.path

    def _refused(self, reason: str, status: int) -> int:
        say(f"mla-conformance: no {self.kind}: {reason}", error=True)
        return status


def _pins(facts: BackendFacts) -> Pins:
    return Pins.of(parse_reference(facts.reference), facts.versions)

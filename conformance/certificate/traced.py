"""Which kernels a profiler saw, capability by capability, as the newest record of a kernel tells."""

from pathlib import Path

from msgspec import Struct

from mla_conformance.certificate.submission import RECORD_NAME, folder_of, suite_order
from mla_conformance.files.inputs import decode, read_text
from mla_conformance.judging.record import NOTHING_TRACED, Traced
from mla_conformance.judging.verdict import Status


class TracedRecord(Struct, frozen=True):
    """Of a record of any form what is needed to choose a case for each kernel."""

    suite: str
    traced: Traced = NOTHING_TRACED
    cases: dict[str, Status] = {}


def newest_traced(root: Path, backend: str) -> TracedRecord | None:
    """The record of the newest suite that names kernels; None if there is none below ``root``.

    Raises:
        InputError: a record of this kernel cannot be read.
    """
    paths = root.glob(f"*/{folder_of('', backend).name}/{RECORD_NAME}")
    records = [decode(read_text(path), TracedRecord, str(path)) for path in paths]
    telling = [record for record in records if record.traced.kernels]
    return max(telling, key=lambda record: suite_order(record.suite), default=None)

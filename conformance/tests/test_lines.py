"""Records as lines: packed and unpacked they are the same, and what was changed is refused with a reason."""

from pathlib import Path

import msgspec
import pytest

from mla_conformance.certificate.certificate import read_certificate
from mla_conformance.certificate.lines import KeptRecord, pack, unpack
from mla_conformance.certificate.sanitized import SanitizedKernel
from mla_conformance.version import SUITE_VERSION
from mla_conformance.vocabulary.capabilities import CAPABILITIES

IDS = [case.id for capability in CAPABILITIES.values() for case in capability.cases]
RECORDS = sorted((Path(__file__).parents[2] / "submissions" / SUITE_VERSION).glob("*/record.json"))


@pytest.mark.parametrize("path", RECORDS, ids=lambda path: path.parent.name)
def test_a_record_is_the_same_as_before(path: Path) -> None:
    tools = [msgspec.json.decode(each.read_bytes(), type=SanitizedKernel) for each in path.parent.glob("sanitize-*")]
    kept = KeptRecord(read_certificate(path), tuple(tools), "a signature")
    line = pack(kept, IDS)
    assert unpack(line, IDS, "line 2") == kept
    assert len(line) < path.stat().st_size / 4

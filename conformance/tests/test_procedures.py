"""Procedures: what the capabilities name exists, and nothing exists that none of them names."""

from mla_conformance.cases.capabilities import CAPABILITIES
from mla_conformance.trials.procedures import PROCEDURES


def test_the_capabilities_name_every_procedure_and_no_other() -> None:
    assert {capability.procedure for capability in CAPABILITIES.values()} == PROCEDURES.keys()

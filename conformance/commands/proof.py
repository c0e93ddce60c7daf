"""``models --proof``: the golden layer held against the modules of transformers, model by model."""

from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path

from mla_conformance.files.inputs import InputError
from mla_conformance.files.outputs import Section
from mla_conformance.proof.families import FAMILIES
from mla_conformance.proof.prove import BOUND, section
from mla_conformance.proof.prove import prove as prove_family
from mla_conformance.report.terminal import say

_REMEDY = "pip install mla-conformance[models]"


def prove(docs: Path | None = None) -> int:
    """Print the table of differences and, with a file, write it between its markers; 0 if all are within the bound.

    Raises:
        InputError: no transformers, one without a model, or a file without the markers.
    """
    if find_spec("transformers") is None:
        raise InputError(f"the proof compares with the code of transformers, which is not installed; {_REMEDY}")
    target = Section.of(docs, "proof") if docs else None
    try:
        proofs = [prove_family(family) for family in FAMILIES]
    except ImportError as error:
        raise InputError(f"transformers {version('transformers')}: {error}; {_REMEDY}") from error
    lines = section(proofs, version("transformers"))
    for line in lines:
        say(line)
    if target:
        target.write("\n".join(lines))
    apart = [proof.family.spec.model for proof in proofs if not proof.holds]
    say(f"more than {BOUND:.0e} apart: {'; '.join(apart)}" if apart else f"all {len(proofs)} agree to {BOUND:.0e}")
    return 1 if apart else 0

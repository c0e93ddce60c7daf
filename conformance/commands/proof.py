"""``models --proof``: the golden layer held against the modules of transformers, or an author's own code."""

from collections.abc import Mapping
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path

from mla_conformance.files.inputs import InputError
from mla_conformance.files.outputs import Section
from mla_conformance.proof.families import FAMILIES, ProofFamily
from mla_conformance.proof.oracles import Oracle, load, oracle_of
from mla_conformance.proof.prove import BOUND, agree, prove_by, section
from mla_conformance.proof.prove import prove as prove_family
from mla_conformance.report.terminal import say

_REMEDY = "pip install mla-conformance[models]"
_NEEDS = "it may need an older transformers: modules of checkpoints ran with 4.46.3"
_CHECKPOINTS = "modeling_deepseek.py or modeling_minicpm.py"


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
    return _conclude({proof.family.spec.model: proof.differences for proof in proofs})


def prove_by_author(path: Path) -> int:
    """Print the differences from the code in a file, which is executed; 0 if all are within the bound.

    Raises:
        InputError: no such file, code that is not known, or that does not run here.
    """
    oracle = _oracle(path)
    families = [family for family in FAMILIES if family.spec.model in oracle.models]
    differences = {family.spec.model: _differences(oracle, family, path) for family in families}
    for model, found in differences.items():
        say(f"{model:<24} " + " · ".join(f"{name} {difference:.0e}" for name, difference in found.items()))
    return _conclude(differences)


def _oracle(path: Path) -> Oracle:
    if not path.is_file():
        raise InputError(f"{path}: expected a Python file of an author's code, there is none")
    try:
        code = load(path)
    except (Exception, SystemExit) as error:
        raise InputError(f"{path}: cannot be imported: {type(error).__name__}: {error}; {_NEEDS}") from error
    oracle = oracle_of(code)
    if oracle is None:
        raise InputError(f"{path}: expected DeepSeek's inference/model.py or a checkpoint's {_CHECKPOINTS}")
    return oracle


def _differences(oracle: Oracle, family: ProofFamily, path: Path) -> dict[str, float]:
    try:
        return prove_by(oracle, family)
    except (Exception, SystemExit) as error:
        raise InputError(f"{path}: {family.spec.model}: {type(error).__name__}: {error}; {_NEEDS}") from error


def _conclude(differences: Mapping[str, Mapping[str, float]]) -> int:
    apart = [model for model, found in differences.items() if not agree(found)]
    count = len(differences)
    say(f"more than {BOUND:.0e} apart: {'; '.join(apart)}" if apart else f"all {count} agree to {BOUND:.0e}")
    return 1 if apart else 0

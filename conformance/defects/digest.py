"""A digest of everything that decides who is killed: a stored run is that of this code while the digest is the same."""

from importlib.resources import files
from pathlib import Path

from mla_conformance.defects.known import FAMILIES
from mla_conformance.driving.sources import judging_sources
from mla_conformance.files.meaning import meaning_digest
from mla_conformance.vocabulary.capabilities import CAPABILITIES

_HONEST_ROLES = ("honest", "honest_decode", "honest_indexer", "honest_layer", "honest_sparse")
_HONEST = (*_HONEST_ROLES, "e8m0", "layered", "split_keys", "eager_layer")
_EMULATION = ("eager", "eager_decode", "eager_indexer", "eager_sparse", "latent_entries", "online_softmax")
"""The kernels that the known defects are made from."""


def deciding_digest() -> str:
    """Digest of the cases, the judge, the suite's procedures, the data and the defects.

    Comments, descriptions and layout do not count, nor does the version of Python that reads the code.
    """
    lists = ("\n".join(case.id for case in capability.cases) for capability in CAPABILITIES.values())
    return meaning_digest(_sources(), *lists)[:16]


def _sources() -> list[Path]:
    defects, backends, reference = (
        Path(str(files(f"mla_conformance.{name}"))) for name in ("defects", "backends", "reference")
    )
    return [
        *judging_sources(),
        *(defects / f"{name}.py" for name in (*FAMILIES, *_HONEST)),
        *(backends / f"{name}.py" for name in _EMULATION),
        reference / "error_budget.py",
        reference / "index_scores.py",
    ]

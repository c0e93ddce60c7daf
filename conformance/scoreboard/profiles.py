"""What engines pick on a GPU, as ``fixtures/engines.toml`` states it with its sources."""

import tomllib
from importlib.resources import files

from msgspec import Struct

from mla_conformance.files.inputs import convert


class Candidate(Struct, frozen=True, forbid_unknown_fields=True):
    """A kernel that an engine may pick.

    Attributes:
        name: as the engine calls it.
        kernel: the backend that drives this kernel here; empty for none.
        packages: versions of the distributions that the engine's own build of it comes from.
        when: what it is picked for, in words.
    """

    name: str
    kernel: str = ""
    packages: dict[str, str] = {}
    when: str = ""


class Profile(Struct, frozen=True, forbid_unknown_fields=True):
    """The kernels that an engine tries for one role on one kind of GPU, in its order.

    Attributes:
        engine: name and version.
        gpu: as people call it.
        compute_capability: of the GPU, as records tell it.
        role: what of a layer it is for.
        torch: what the engine asks for; a kernel that is compiled where it runs may differ under another.
        source: where that order stands.
        candidates: in that order.
    """

    engine: str
    gpu: str
    compute_capability: str
    role: str
    torch: str
    source: str
    candidates: tuple[Candidate, ...]


class _File(Struct, frozen=True, forbid_unknown_fields=True):
    profile: tuple[Profile, ...]


def profiles() -> tuple[Profile, ...]:
    """Every profile that is known."""
    path = files("mla_conformance.fixtures") / "engines.toml"
    return convert(tomllib.loads(path.read_text(encoding="utf-8")), _File, str(path)).profile

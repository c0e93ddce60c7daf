"""The models that are known by name: published configurations, stored with their sources. No torch."""

from importlib.resources import files
from typing import Any

import msgspec

from mla_conformance.backends.references import unknown
from mla_conformance.files.inputs import InputError
from mla_conformance.models.config import profile_of
from mla_conformance.models.profile import ModelProfile

_STORED = files("mla_conformance.fixtures") / "models"


class _Stored(msgspec.Struct, forbid_unknown_fields=True):
    published: str
    source: str
    config: dict[str, Any]


def model_names() -> tuple[str, ...]:
    """The names, sorted."""
    return tuple(sorted(entry.name.removesuffix(".json") for entry in _STORED.iterdir()))


def find_model(name: str) -> ModelProfile:
    """The profile of the model of this name.

    Raises:
        InputError: there is none; the message says which one may be meant, or lists the names.
    """
    if name not in model_names():
        raise InputError(unknown("model", name, model_names(), "mla-conformance models", ", or --config PATH"))
    stored = msgspec.json.decode((_STORED / f"{name}.json").read_text(encoding="utf-8"), type=_Stored)
    return profile_of(stored.config, name, source=f"{stored.published}: {stored.source}")

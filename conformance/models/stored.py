"""Models that are known by name: what was read of each published configuration, and where. No torch."""

from importlib.resources import files
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from mla_conformance.backends.references import unknown
from mla_conformance.files.whole import InputError, decode, has_letters
from mla_conformance.models.config import FIGURES, profile_of
from mla_conformance.models.profile import ModelProfile

_STORED = files("mla_conformance.fixtures") / "models"


class Reading(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Figures that were read in one place."""

    source: str  # repository, commit and path; a thread; or a released package and its file
    config: Annotated[dict[str, Any], Meta(min_length=1)]  # the figures under their published names
    # why the source does not speak for the published model, and what was tried; None if it does
    unconfirmed: str | None = None


class StoredModel(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A published model; each of its figures stands in one reading."""

    published: str  # its name where it is published
    model_type: str  # its architecture
    readings: tuple[Reading, ...]  # what was read of its configuration

    @property
    def config(self) -> dict[str, Any]:
        figures = {figure: value for reading in self.readings for figure, value in reading.config.items()}
        return {"model_type": self.model_type, **figures}

    @property
    def unconfirmed(self) -> tuple[str, ...]:
        """Figures that no source speaks for."""
        return tuple(figure for reading in self.readings if reading.unconfirmed for figure in reading.config)


def model_names() -> tuple[str, ...]:
    return tuple(sorted(entry.name.removesuffix(".json") for entry in _STORED.iterdir()))


def stored_model(name: str) -> StoredModel:
    if name not in model_names():
        raise InputError(unknown("model", name, model_names(), "mla-conformance models", ", or --config PATH"))
    return parse_stored((_STORED / f"{name}.json").read_text(encoding="utf-8"), name)


def parse_stored(text: str, name: str) -> StoredModel:
    model = decode(text, StoredModel, name)
    read_in: dict[str, str] = {}
    for reading in model.readings:
        figures = ", ".join(reading.config)
        if not has_letters(reading.source):
            raise InputError(f"{name}: {figures}: expected where they were read, got {reading.source!r}")
        if reading.unconfirmed is not None and not has_letters(reading.unconfirmed):
            raise InputError(f"{name}: {figures}: unconfirmed: expected what was tried, got nothing")
        for figure in reading.config:
            if figure not in FIGURES:
                raise InputError(f"{name}: unknown figure {figure!r}; expected one of {', '.join(sorted(FIGURES))}")
            if figure in read_in:
                sources = f"{read_in[figure]!r} and {reading.source!r}"
                raise InputError(f"{name}: {figure}: expected one source, got {sources}")
            read_in[figure] = reading.source
    return model


def find_model(name: str) -> ModelProfile:
    return profile_of(stored_model(name).config, name)

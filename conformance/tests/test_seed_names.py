"""Nothing of the seed documents is silently missing: each name has a place that exists, or a reason why it has none."""

import inspect
import re
from collections import Counter
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

DOCUMENT = Path(__file__).with_name("seed_names.md").read_text(encoding="utf-8")
NO_PLACE = "no place: "


def sections() -> Iterator[tuple[str, str, str]]:
    """Seed, class or heading, and text of every section."""
    for chapter in re.split(r"^## ", DOCUMENT, flags=re.MULTILINE)[1:]:
        for section in re.split(r"^### ", chapter, flags=re.MULTILINE)[1:]:
            heading, _, text = section.partition("\n")
            yield chapter[:3], heading, text


def places() -> dict[tuple[str, str, str], str]:
    """Where the document puts each name: (seed, class, member) to a target or a reason; a class is its own member."""
    found = {}
    for seed, heading, text in sections():
        name, _, target = heading.replace("`", "").partition(": ")
        key = name if target else name.lower()
        if target:
            found[seed, key, name] = target
        for listed in re.findall(r"^Under the same name: (.*)\.$", text, flags=re.MULTILINE):
            for member in re.findall(r"`([^`]+)`", listed):
                found[seed, key, member] = f"{target}.{member.removesuffix('()')}"
        for member, place in re.findall(r"^\| `([^`]+)` \| (.+) \|$", text, flags=re.MULTILINE):
            found[seed, key, member] = place.strip("`")
    return found


PLACES = places()


def test_no_name_was_dropped() -> None:
    """The pages of these modules name as many."""
    assert Counter(seed for seed, _, _ in PLACES) == {"000": 46, "001": 27, "002": 116, "003": 15, "004": 118}


def test_a_place_exists_or_a_reason_is_given() -> None:
    for key, place in PLACES.items():
        if place.startswith(NO_PLACE):
            assert len(place.removeprefix(NO_PLACE).split()) > 2, key
        else:
            assert exists(place), f"{key}: {place} does not exist"


def exists(place: str) -> bool:
    """Whether ``room.module.Class.member`` below the package can be looked up."""
    found: Any = import_module("mla_conformance")
    parts = place.split(".")
    for name in parts:
        if inspect.ismodule(found) and not hasattr(found, name):
            found = import_module(f"{found.__name__}.{name}")
        elif not hasattr(found, name):
            return name == parts[-1] and is_instance_attribute(found, name)
        else:
            found = getattr(found, name)
    return True


def is_instance_attribute(cls: type, name: str) -> bool:
    """Whether instances get the attribute: a field without default, or one that a method assigns."""
    ours = [base for base in cls.__mro__ if base.__module__.startswith("mla_conformance.")]
    assigned = re.compile(rf"self\.{name}\b[^\n=]*=[^=]")
    return any(name in inspect.get_annotations(base) or assigned.search(inspect.getsource(base)) for base in ours)

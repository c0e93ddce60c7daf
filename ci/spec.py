"""Write what SPEC says of the case lists, hazards (``ci/hazards.toml``) and requirements (``ci/requirements.toml``):

``python ci/spec.py``. SPEC is of the list with which the suite's version began.
"""

import re
import tomllib
from collections.abc import Iterable, Iterator
from itertools import groupby
from operator import itemgetter
from pathlib import Path
from string import ascii_lowercase
from typing import Any

from mla_conformance.cases.case import Case
from mla_conformance.files.whole import InputError, write_section
from mla_conformance.problems.operands import REGIMES
from mla_conformance.roles.prefill.case import PrefillCase
from mla_conformance.vocabulary.capabilities import CAPABILITIES, first_cases

HERE = Path(__file__).parent
_UNITS = {"scale": 1e2, "oscale": 1e6, "kscale": 1e6}  # how many of a field's units are 1
_OF_LENGTHS = {
    "requests": lambda case: [len(case.q)],
    "tokens": lambda case: [sum(case.q)],
    "keys": lambda case: [sum(case.kv)],
    "queries": lambda case: case.q,
    "contexts": lambda case: case.kv,
    "sequences": lambda case: map(sum, zip(case.q, case.kv, strict=False)),
}
"""Requests, new tokens and context tokens of a call; new, context and all tokens of a request."""


class WordedValues(list[Any]):
    """Distinct values in the order of their size, or of the cases if they are names.

    Formatted they are a list in words; with ``least`` or ``most`` the smallest or the largest of them.
    """

    def __format__(self, wanted: str) -> str:
        distinct = list(dict.fromkeys(self))
        ordered = distinct if any(isinstance(value, str) for value in distinct) else sorted(distinct)
        chosen = {"": ordered, "least": ordered[:1], "most": ordered[-1:]}[wanted]
        words = (f"`{x}`" if isinstance(x, str) else f"{x:g}" if isinstance(x, float) else str(x) for x in chosen)
        return in_words(list(words))


class Facts:
    """What some cases run: each field of a case, and what follows from their lengths, is an attribute."""

    def __init__(self, cases: Iterable[Case], where: str = "") -> None:
        self._cases = tuple(cases)
        self.where = where  # the device that they need, with the space before it; empty if any will do

    def __getattr__(self, field: str) -> WordedValues:
        if field in _OF_LENGTHS:
            return WordedValues(value for case in self._cases for value in _OF_LENGTHS[field](case))
        have = [case for case in self._cases if field in case.defaults()]
        if not have:
            raise AttributeError(f"no case of these has a field {field!r}")
        unit = _UNITS.get(field, 1)
        return WordedValues(value if unit == 1 else value / unit for value in (getattr(case, field) for case in have))


def in_words(words: list[str]) -> str:
    return " and ".join([", ".join(words[:-1]), words[-1]] if len(words) > 1 else words)


def section_lines() -> Iterator[str]:
    """The list of hazards under its headings, then the table of data regimes."""
    # What sentences may name: data regimes, capabilities, a case of defaults, and what is captured on a GPU.
    facts: dict[str, Any] = {name: Facts(case for case in first_cases() if case.data == name) for name in REGIMES}
    for name, entry in CAPABILITIES.items():
        facts[name] = Facts(entry.first_cases, " on a GPU" if entry.needs_cuda else "")
    facts["usual"] = Facts([PrefillCase(capability="new_tokens", q=(1,))])
    facts["captured"] = in_words([f"`{name}`" for name, entry in CAPABILITIES.items() if entry.captures])
    hazards = tomllib.loads((HERE / "hazards.toml").read_text(encoding="utf-8"))["hazard"]
    for heading, group in groupby(hazards, itemgetter("group")):
        yield from (f"**{heading}**", "")
        for hazard in group:  # whose sentence says what generates it, or why nothing does; facts in braces
            sentence = " ".join(hazard["sentence"].split()).format_map(facts)
            yield f"- **5.{hazard['clause']} {hazard['id']}** {sentence}"
        yield ""
    yield from ("**Data regimes**", "", "| regime | reveals |", "|---|---|")
    yield from (f"| `{name}` | {regime.sentence} |" for name, regime in REGIMES.items())


def requirement_lines(spec: str) -> Iterator[str]:
    """A row for each sentence that says "must": its number, what decides it, and how many cases that are.

    InputError if the table has more or fewer entries for a clause than it has such sentences.
    """
    decided = tomllib.loads((HERE / "requirements.toml").read_text(encoding="utf-8"))["decided"]
    _, *parts = re.split(r"^### (\d+\.\d+) .*$", spec, flags=re.MULTILINE)
    musts = {}
    for clause, text in zip(parts[::2], parts[1::2], strict=True):
        sentences = re.split(r"(?<=[.:;])\s+(?=[A-Z`*|-])", " ".join(text.partition("\n## ")[0].split()))
        if found := [sentence for sentence in sentences if re.search(r"\b[Mm]ust\b", sentence)]:
            musts[clause] = found
    for clause in {**musts, **decided}:
        want, got = len(musts.get(clause, [])), len(decided.get(clause, []))
        if want != got:
            raise InputError(f"ci/requirements.toml: SPEC {clause} says must in {want} sentences, got {got} entries")
    yield from ("| requirement | begins | decided by | cases |", "|---|---|---|---|")
    for clause, sentences in musts.items():
        for letter, sentence, by in zip(ascii_lowercase, sentences, decided[clause], strict=False):
            number = f"{clause}{letter if len(sentences) > 1 else ''}"
            begins = " ".join(sentence.removeprefix("- ").replace("|", "").split()[:9])
            if by == "every":
                by, cases = "every case", str(len(first_cases()))
            elif by.startswith("excluded: "):
                cases = "0"
            else:
                cases = str(sum(len(CAPABILITIES[name].first_cases) for name in by.split()))
                by = ", ".join(f"`{name}`" for name in by.split())
            yield f"| {number} | {begins} … | {by} | {cases} |"


if __name__ == "__main__":
    _SPEC = HERE.parent / "conformance" / "SPEC.md"
    write_section(_SPEC, "hazards", "\n".join(section_lines()))
    write_section(_SPEC, "requirements", "\n".join(requirement_lines(_SPEC.read_text(encoding="utf-8"))))

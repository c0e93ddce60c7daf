"""A record as one line of text: statuses by runs, ids by what they share, and every text that comes twice once.

Unpacked it is the record that was packed, which its seal shows.
"""

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby, pairwise, takewhile
from typing import Any

import msgspec
from msgspec import Struct

from mla_conformance.certificate.certificate import SCHEMA, Certificate
from mla_conformance.certificate.sanitized import SanitizedKernel
from mla_conformance.files.inputs import InputError, convert, decode
from mla_conformance.judging.verdict import Status

_LETTERS: dict[Status | None, str] = dict(zip((*Status, None), "pfunchtwx-", strict=True))
"""By status; the last is that of a case which the record says nothing of."""
_STATUSES = {letter: status for status, letter in _LETTERS.items()}
_SHORT = 12
"""A text of as many characters is written out wherever it stands."""
_MOST_CHARACTERS = 2**24
"""Of a line's texts together, and of its ids: a fortieth of it is usual."""


@dataclass(frozen=True)
class KeptRecord:
    """A record, and what is kept with it."""

    certificate: Certificate  # the record
    sanitized: tuple[SanitizedKernel, ...] = ()  # what tools of compute-sanitizer reported of its kernel
    signature: str = ""  # of its seal; empty if it is not signed


class _Line(Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """What a line holds."""

    # all fields of it but the cases. ``@N`` is text N of the line, ``#N`` case N; a text that begins with either sign
    # has another @ in front
    record: dict[str, Any]
    listed: int  # so many of the file's ids were known when it was written; the record's cases are these, then its own
    statuses: str  # of the cases, a letter and how often it comes
    fitted: tuple[str, ...] = ()  # ids of the record's own cases, folded
    texts: tuple[str, ...] = ()  # what is said more than once
    sanitized: tuple[dict[str, Any], ...] = ()  # as the record
    signature: str = ""  # of the seal


def pack(kept: KeptRecord, ids: Sequence[str]) -> str:
    """The line of a record.

    Args:
        kept: the record.
        ids: of cases, which are written once for all records.
    """
    cases = kept.certificate.cases
    fitted = sorted(cases.keys() - set(ids))
    plain, sanitized = msgspec.json.decode(msgspec.json.encode((kept.certificate, kept.sanitized)))
    del plain["cases"]
    names = {id: f"#{number}" for number, id in enumerate((*ids, *fitted))}
    often = [text for text, times in Counter(_strings((plain, sanitized))).items() if times > 1 and len(text) > _SHORT]
    texts = [text for text in often if text not in names]
    names |= {text: f"@{number}" for number, text in enumerate(texts)}
    runs = groupby(_LETTERS[cases.get(id)] for id in (*ids, *fitted))
    line = _Line(
        record=_shortened(plain, names),
        listed=len(ids),
        statuses="".join(f"{letter}{len(list(run))}" for letter, run in runs),
        fitted=tuple(folded(fitted)),
        texts=tuple(texts),
        sanitized=_shortened(sanitized, names),
        signature=kept.signature,
    )
    return msgspec.json.encode(line).decode()


def unpack(text: str, ids: Sequence[str], source: str) -> KeptRecord:
    """The record of a line."""
    line = decode(text, _Line, source)
    try:
        known = [*ids[: line.listed], *unfolded(line.fitted)]
        statuses = dict(zip(known, _spread(line.statuses, len(known)), strict=True))
        plain, sanitized = _restored([line.record, [*line.sanitized]], line.texts, known)
        _bounded(_strings((plain, sanitized)))
    except (ValueError, IndexError, RecursionError) as error:
        raise InputError(f"{source}: expected a record as `certify --submission` writes it: {error}") from error
    if plain.get("schema") != SCHEMA:
        raise InputError(f"{source}: expected a record of schema {SCHEMA}, got {plain.get('schema')!r}")
    plain["cases"] = {id: status for id, status in statuses.items() if status is not None}
    tools = convert(sanitized, tuple[SanitizedKernel, ...], source)
    return KeptRecord(convert(plain, Certificate, source), tools, line.signature)


def folded(ids: Iterable[str]) -> Iterator[str]:
    """Each id as the number of characters that it shares with the one before, and the rest."""
    for before, id in pairwise(("", *ids)):
        shared = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(before, id, strict=False)))
        yield f"{shared} {id[shared:]}"


def unfolded(texts: Iterable[str]) -> list[str]:
    """The ids.

    Raises:
        ValueError: a text is none that was folded.
    """

    def each() -> Iterator[str]:
        id = ""
        for text in texts:
            shared, _, rest = text.partition(" ")
            id = id[: int(shared)] + rest
            yield id

    return _bounded(each())


def _bounded(texts: Iterable[str]) -> list[str]:
    """The texts, of which a line may name many by little: a text twice, or an id by the one before."""
    found, left = list[str](), _MOST_CHARACTERS
    for text in texts:
        found.append(text)
        left -= len(text)
        if left < 0:
            raise ValueError(f"its texts have more than {_MOST_CHARACTERS:,} characters")
    return found


def _spread(statuses: str, number: int) -> Iterator[Status | None]:
    """A status a case."""
    runs = re.findall(r"([a-z-])(\d{1,9})", statuses, re.ASCII)
    total = sum(int(times) for _, times in runs)
    if "".join(map("".join, runs)) != statuses or total != number or not {run[0] for run in runs} <= _STATUSES.keys():
        raise ValueError(f"its statuses are not those of {number} cases")
    for letter, times in runs:
        yield from [_STATUSES[letter]] * int(times)


def _strings(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict | list | tuple):
        for each in (*value, *value.values()) if isinstance(value, dict) else value:
            yield from _strings(each)


def _shortened(value: Any, names: Mapping[str, str]) -> Any:
    """With references for texts that have a name."""
    if isinstance(value, str):
        return names.get(value, f"@{value}" if value.startswith(("@", "#")) else value)
    if isinstance(value, dict):
        return {_shortened(name, names): _shortened(each, names) for name, each in value.items()}
    return [_shortened(each, names) for each in value] if isinstance(value, list) else value


def _restored(value: Any, texts: Sequence[str], ids: Sequence[str]) -> Any:
    """With the texts for references.

    Raises:
        ValueError, IndexError: a reference names nothing.
    """
    if isinstance(value, str):
        if value.startswith("#"):
            return ids[int(value[1:])]
        if value.startswith("@"):
            return value[1:] if value.startswith(("@@", "@#")) else texts[int(value[1:])]
        return value
    if isinstance(value, dict):
        return {_restored(name, texts, ids): _restored(each, texts, ids) for name, each in value.items()}
    return [_restored(each, texts, ids) for each in value] if isinstance(value, list) else value

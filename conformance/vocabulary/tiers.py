"""What the tiers hold: their number of cases and, role by role, the pairs of classes that these reach. No torch."""

import textwrap
from collections.abc import Iterator
from itertools import chain

from mla_conformance.cases import fitting, work
from mla_conformance.cases.covering import Pair, Pairs, Triples
from mla_conformance.cases.space import ClassOf
from mla_conformance.vocabulary.arrays import SPACES
from mla_conformance.vocabulary.capabilities import CAPABILITIES, Tier, counted, listed

_WIDTH = 80


def tier_lines() -> Iterator[str]:
    for tier in Tier:
        further = f", and up to {fitting.MOST_TRIPLES} a role fitted for triples" if tier is Tier.NIGHTLY else ""
        yield f"tier {tier:<8} {sum(len(entry.select(tier)) for entry in CAPABILITIES.values()):>5} cases{further}"
    for space in SPACES.values():
        rows = {case: tuple(space.rows((case,))) for case in listed(space)}
        held = Pairs(space, chain.from_iterable(rows.values()))  # the full tier holds every pair that is possible
        smoke = [*counted(space, Tier.SMOKE), *CAPABILITIES[space.capability].smoke]
        light = [case for case in rows if work.work_of(case) <= work.CPU_WORK]
        in_smoke, in_light = (
            len(Pairs(space, chain.from_iterable(map(rows.__getitem__, of)))) for of in (smoke, light)
        )
        pairs = f"smoke {in_smoke:,}, full {len(held):,}, {len(held) - in_light:,} due on a GPU"
        yield f"  {space.role:<7} {len(held):,} pairs possible: {pairs}"
        # Those that are possible two by two; the nightly tier holds more of what a backend declares.
        left = Triples(held)
        possible = len(left)
        for row in chain.from_iterable(rows.values()):
            left.drop(row)
        yield f"  {'':<7} {possible:,} triples of these: full {possible - len(left):,}"


def excluded_lines() -> Iterator[str]:
    """Of each role, the pairs of classes that no case can hold, by the rule that excludes them."""
    for space in SPACES.values():
        by_reason: dict[str, list[Pair]] = {}
        excluded = Pairs.every(space) - Pairs(space, space.rows(listed(space)))
        for pair in excluded:
            by_reason.setdefault(space.reason(pair), []).append(pair)
        yield f"{space.role}: {len(excluded)} pairs excluded"
        for reason, pairs in by_reason.items():
            yield from wrapped(f"{reason}: {len(pairs)} pairs", 2)
            partners: dict[ClassOf, list[ClassOf]] = {}
            for first, second in pairs:
                partners.setdefault(first, []).append(second)
            for value, others in partners.items():
                yield from wrapped(f"{'='.join(value)} with {', '.join(map('='.join, others))}", 4)


def wrapped(text: str, indent: int) -> list[str]:
    first, further = " " * indent, " " * (indent + 2)
    return textwrap.wrap(text, _WIDTH, initial_indent=first, subsequent_indent=further, break_on_hyphens=False)

"""What the tiers hold: their number of cases and, role by role, the combinations that these reach. No torch."""

from collections.abc import Iterator, Sequence

from mla_conformance.cases.case import Case
from mla_conformance.cases.combinations import PAIRS, TRIPLES, Space
from mla_conformance.vocabulary.capabilities import CAPABILITIES, SPACES, Tier

STRENGTHS = {1: "values", PAIRS: "pairs", TRIPLES: "triples"}


def tier_lines() -> Iterator[str]:
    """One line per tier, and one below it for each role."""
    for tier in Tier:
        cases = [case for capability in CAPABILITIES.values() for case in capability.select(tier)]
        yield f"tier {tier:<8} {len(cases):>5} cases"
        yield from (f"  {_reached(space, cases)}" for space in SPACES.values())


def _reached(space: Space, cases: Sequence[Case]) -> str:
    counts = {strength: (space.count(strength), len(space.lacking(cases, strength))) for strength in STRENGTHS}
    full = max((strength for strength, (_, lacking) in counts.items() if not lacking), default=0)
    reported = (f"{n - lacking} of {n} {STRENGTHS[strength]}" for strength, (n, lacking) in counts.items())
    return f"{space.role:<7} strength {full} over {len(space.dimensions)} dimensions: {', '.join(reported)}"

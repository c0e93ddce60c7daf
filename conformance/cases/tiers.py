"""What the tiers hold: their number of cases and the strength that their combinations reach."""

from collections.abc import Iterator

from mla_conformance.cases.capabilities import CAPABILITIES, Tier
from mla_conformance.cases.combinations import DIMENSIONS, PAIRS, TRIPLES, strength_share


def tier_lines() -> Iterator[str]:
    """One line per tier."""
    for tier in Tier:
        cases = [case for capability in CAPABILITIES.values() for case in capability.select(tier)]
        shares = {strength: strength_share(cases, strength) for strength in (1, PAIRS, TRIPLES)}
        strength = max((strength for strength, share in shares.items() if share == 1.0), default=0)
        reached = ", ".join(f"{share:.0%} of {name}" for name, share in zip(_NAMES, shares.values(), strict=True))
        yield f"tier {tier:<8} {len(cases):>3} cases · strength {strength} over {len(DIMENSIONS)} dimensions: {reached}"


_NAMES = ("values", "pairs", "triples")

"""Write the covering arrays of the spaces, ``fixtures/arrays.json``: ``python ci/arrays.py``."""

import json
import sys
from pathlib import Path

from mla_conformance.vocabulary.arrays import SPACES, found_array
from mla_conformance.vocabulary.capabilities import Tier, counted

ARRAYS = Path(__file__).parents[1] / "fixtures" / "arrays.json"


def main() -> None:
    found = {}
    for capability, space in SPACES.items():
        rows, impossible = found_array(space, counted(space, Tier.FULL))
        found[capability] = [space.case_of(row).id.partition(":")[2] for row in rows]
        sys.stdout.write(f"{capability}: {len(rows)} cases, {len(impossible)} pairs that no case holds\n")
    ARRAYS.write_text(json.dumps(found, indent=0) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()

"""Write the covering arrays of the spaces, ``fixtures/arrays.json``: ``python ci/arrays.py [CAPABILITY ...]``.

All are found again, in four minutes of a core, as must be done where a space has other classes or rules. Before them
stand cases that kill known defects, dense batches and long requests.
"""

import json
import sys
from pathlib import Path

from mla_conformance.cases.arrays import found_array
from mla_conformance.cases.covering import Pairs, filled
from mla_conformance.cases.dense import dense_cases
from mla_conformance.cases.work import is_light
from mla_conformance.vocabulary.arrays import SPACES, array_of
from mla_conformance.vocabulary.capabilities import Tier, counted, killing

ARRAYS = Path(__file__).parents[1] / "fixtures" / "arrays.json"


def main(arguments: list[str]) -> None:
    found = json.loads(ARRAYS.read_text(encoding="utf-8"))
    for capability in [name for name in arguments if name in SPACES] or SPACES:
        space = SPACES[capability]
        kill = [case for case in array_of(capability) if case.id in killing()]
        dense, left = [], Pairs.every(space) - Pairs(space, space.rows((*counted(space, Tier.FULL), *kill)))
        for case in dense_cases(space):
            dense.append(filled(space, case, left, is_light))
            for row in space.rows(dense[-1:]):
                left.drop(row)
        cases, without = found_array(space, (*counted(space, Tier.FULL), *kill, *dense))
        found[capability] = list(dict.fromkeys(case.id.partition(":")[2] for case in (*kill, *dense, *cases)))
        counts = f"{len(kill)} that kill, {len(dense)} dense, {len(cases)} others, {len(without)} pairs in no case"
        sys.stdout.write(f"{capability}: {counts}\n")
        sys.stdout.flush()
    ARRAYS.write_text(json.dumps(found, indent=0) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1:])

"""Cases as hypothesis draws them from a space: classes and members, never tensors, the plainest first."""

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace

from hypothesis import HealthCheck, Phase, Verbosity, reject, settings
from hypothesis import strategies as st

from mla_conformance.cases.case import Case, CaseError
from mla_conformance.cases.classes import Draw
from mla_conformance.cases.space import DATA, Row, Space

_MOST_SEEDS, _MOST_KEYS = 100, 2**16
_MOST_REGIMES = 7  # that requests have beside the first one
_DRAWS = 8  # of members of a row's classes; the key 0 stands for the plainest, to which failures shrink


def profile(draws: int) -> settings:
    """The same ``draws`` cases in every run of a seed, and nothing but them: no setting leaks in."""
    return settings(
        max_examples=draws,
        derandomize=False,
        database=None,
        verbosity=Verbosity.quiet,
        phases=(Phase.generate, Phase.shrink),
        stateful_step_count=1,
        report_multiple_bugs=False,
        suppress_health_check=list(HealthCheck),
        deadline=None,
        print_blob=False,
        backend="hypothesis",
    )


@st.composite
def cases(draw: st.DrawFn, space: Space, classes: Mapping[str, Sequence[str]]) -> Case:
    """A case of a space; ``classes`` are those of each dimension that are drawn, one at least."""
    drawn = {name: draw(st.sampled_from(labels)) for name, labels in classes.items() if labels}

    def prefer(name: str, labels: Sequence[str], row: Row) -> list[str]:
        return sorted([label for label in labels if label in classes[name]], key=lambda label: label != drawn.get(name))

    row = space.completed((), prefer)
    if row is None:
        reject()
    fields = {"seed": draw(st.integers(0, _MOST_SEEDS)), "capability": space.capability}
    key = draw(st.integers(0, _MOST_KEYS))
    draws = [Draw(f"{key}|{number}" if key else "") for number in range(_DRAWS)]
    regimes = draw(st.lists(st.sampled_from(classes[DATA]), max_size=_MOST_REGIMES)) if space.regimes else []
    for each in draws:
        with suppress(CaseError):  # a rule that only single members of classes break
            case = space.case_of(row, each, fields)
            break
    else:
        reject()
    return replace(case, data="+".join((case.data, *regimes))) if len(case.q) > 1 else case

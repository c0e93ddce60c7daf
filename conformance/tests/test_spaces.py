"""The lists reach every pair of classes that a row can hold; covering arrays are complete, small and allowed."""

from collections.abc import Iterator
from contextlib import suppress
from functools import cache
from itertools import combinations, islice, product
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given

from mla_conformance.backends.roles import Role
from mla_conformance.cases.arrays import cover
from mla_conformance.cases.case import Case, CaseError
from mla_conformance.cases.covering import Pairs, filled
from mla_conformance.cases.space import NOTHING, Dimension, Only, Row, Rule, Space, held, never
from mla_conformance.cases.work import CPU_WORK, is_light, work_of
from mla_conformance.commands import listing
from mla_conformance.judging.golden import memory_need
from mla_conformance.trials.explore import cases, profile
from mla_conformance.vocabulary import capabilities
from mla_conformance.vocabulary.arrays import SPACES, array_of
from mla_conformance.vocabulary.capabilities import CAPABILITIES, FITTED, Tier, counted, listed, long_contexts

every_space = pytest.mark.parametrize("space", SPACES.values(), ids=list(SPACES))


@cache
def pairs_of_lists(capability: str) -> Pairs:
    space = SPACES[capability]
    return Pairs(space, space.rows(listed(space)))


def cases_of(tier: Tier) -> list[Case]:
    return [case for capability in CAPABILITIES.values() for case in capability.select(tier)]


@every_space
def test_the_lists_hold_every_pair_that_a_row_can_hold(space: Space) -> None:
    held_pairs, every = pairs_of_lists(space.capability), Pairs.every(space)
    excluded = every - held_pairs
    assert not [pair for pair in excluded if space.completed(pair)]
    assert len(held_pairs) == len(every) - len(excluded) > 1000


@every_space
def test_the_smoke_tier_holds_every_class_of_an_array_that_a_cpu_is_asked_for(space: Space) -> None:
    light = [case for case in array_of(space.capability) if work_of(case) <= CPU_WORK]
    smoke = [*counted(space, Tier.SMOKE), *CAPABILITIES[space.capability].smoke]
    assert set().union(*map(space.classes_of, light)) <= set().union(*map(space.classes_of, smoke))


@every_space
def test_a_row_of_every_class_and_its_case_say_the_same(space: Space) -> None:
    for value in space.values:
        row = space.completed((value,))
        assert row, f"{value}: no row holds it"
        case = space.case_of(row)
        assert space.row_of(case) == row and Case.parse(case.id) == case, case.id


@every_space
def test_an_array_stays_in_its_space_and_has_batches_of_tens_of_requests_that_a_cpu_is_asked_for(space: Space) -> None:
    array = array_of(space.capability)
    assert not [case.id for case in array if space.outside(case)]
    assert len(set(array)) == len(array) == len(CAPABILITIES[space.capability].cases)
    light = [case for case in array if work_of(case) <= CPU_WORK]
    counts = {len(case.q) for case in light if len(case.q) > 32}
    assert len(counts) > (space.role is not Role.TREE)
    assert max(len(set(zip(case.q, case.kv or case.q, strict=True))) for case in light) > 8


@every_space
def test_what_is_drawn_holds_only_pairs_that_are_claimed_and_possible(space: Space) -> None:
    classes = {each.name: list(each.classes) for each in space.dimensions}
    possible = pairs_of_lists(space.capability)

    @profile(15)
    @given(case=cases(space, classes))
    def holds(case: Case) -> None:
        row = space.row_of(case)
        assert not space.outside(case) and Case.parse(case.id) == case
        assert all(label in classes[name] for name, label in held(row))
        assert not len(Pairs(space, [row]) - possible)

    holds()


def test_excluded_pairs_are_listed_by_reason(ours: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of one role: the others' pairs, which the lists are held to above, would be found a second time."""
    space = SPACES["decode_combinations"]
    monkeypatch.setattr(listing, "SPACES", {space.capability: space})
    monkeypatch.setenv("COLUMNS", "80")
    lines = ours("capabilities", "--excluded")[1].splitlines()
    assert max(map(len, lines)) <= 80
    excluded = Pairs.every(space) - pairs_of_lists(space.capability)
    assert f"{space.role}: {len(excluded)} pairs excluded" in lines
    assert "  ranks are merged by their LSE: 8 pairs" in lines and "    ranks=2 with lse=not asked" in lines


def test_each_tier_holds_the_one_below_and_one_gpu_has_room_for_each_case() -> None:
    smoke, full, nightly = (cases_of(tier) for tier in Tier)
    assert set(smoke) <= set(full) <= set(nightly) and len(set(nightly)) == len(nightly)
    assert set(long_contexts()) <= set(nightly) - set(full)
    assert max(max(case.kv, default=0) for case in long_contexts()) == 2**20
    for case in long_contexts():
        assert 2e9 < memory_need(case, "cuda") < 130e9, case.id
        assert case.operations() > 1e12
    # On 12 ranks one wanted more than an H200 has, so that no kernel that claimed it had a record.
    needs = {case.id: memory_need(case, "cuda") for case in cases_of(Tier.FULL)}
    assert max(needs.values()) < 120e9, max(needs, key=needs.__getitem__)
    rows = Case.parse("many_rows:call=sparse_prefill;heads=16;q=[65537];kv=[9]")
    assert memory_need(rows, "cuda") > 8 * 16 * 65537 * 16 * 512, "all of which are judged"


@pytest.mark.parametrize("capability", CAPABILITIES.values(), ids=list(CAPABILITIES))
def test_the_smoke_tier_meets_every_role(capability: capabilities.Capability) -> None:
    # One case of over a hundred calls tells enough at first.
    roles = {case.role for case in capability.cases[: 1 if capability.procedure == "many_batches" else None]}
    assert {case.role for case in capability.smoke} == roles
    assert capability.smoke[0] is capability.cases[0] or capability.name in SPACES


NARROW = """
from mla_conformance.backends.eager_decode import EagerDecodeBackend
class Narrow(EagerDecodeBackend):
    supported_kv_cache_dtypes = ["auto"]
    supports_nonuniform_queries = False
    @staticmethod
    def get_supported_kernel_block_sizes():
        return [64]
"""


def test_what_a_declaration_claims_and_refuses_is_told(here: Path, ours: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(FITTED, Tier.NIGHTLY, 6)  # each of which takes a while to be held
    (here / "narrow.py").write_text(NARROW)
    status, printed, _ = ours("capabilities", "--backend=narrow.py:Narrow", "--device=cpu")
    headline, *lines = printed.splitlines()
    assert status == 0 and headline.startswith("Narrow decode: ") and " cases fitted" in headline
    text = " ".join(" ".join(lines).split())
    assert "refused on cpu: cache=fp8, cache=fp8_ds_mla" in text and "page=16, page=32" in text
    assert "queries=mixed" in text and max(map(len, [headline, *lines])) <= 80


def test_a_backend_that_cannot_run_here_is_an_input_error(refused: Any) -> None:
    assert "TRTLLM_RAGGED cannot run here: " in refused("capabilities", "--backend=TRTLLM_RAGGED", "--device=cpu")


CLASSES = {"a": ("1", "2", "3"), "b": ("x", "y"), "c": ("p", "q", "r", "s"), "d": ("0", "1")}
DEPENDS = Only("a", ("2", "3"), "only beside another a")


def space(*rules: Rule, only: Only | None = None) -> Space:
    dimensions = [
        Dimension(name, {label: {} for label in labels}, lambda case: None, only if only and name == "d" else Only())
        for name, labels in CLASSES.items()
    ]
    small = {"c": ("p", "q", "r")}
    return Space(Role.PREFILL, "combinations", tuple(dimensions), rules, lambda row, draw: {}, small)


NO_1_WITH_Y = never("no 1 with y", {"a": ("1",), "b": ("y",)})
MADE = {
    "free": space(),
    "a pair": space(NO_1_WITH_Y),
    "a dimension that decides": space(
        Rule("s needs both", ("a", "c"), lambda a, c: c != "s" or a == "1"),
        Rule("s needs both", ("d", "c"), lambda d, c: c != "s" or d == "0"),
    ),
    "together": space(NO_1_WITH_Y, never("no x with p", {"b": ("x",), "c": ("p",)})),
    "dependent": space(only=DEPENDS),
}


def possible_rows(given: Space) -> list[Row]:
    labels = [(*each.classes, NOTHING) if each.only.name else tuple(each.classes) for each in given.dimensions]
    rows = (dict(zip(CLASSES, classes, strict=True)) for classes in product(*labels))
    return [row for row in rows if all((row[d.name] != NOTHING) == d.has_say(row) for d in given.dimensions)]


@pytest.mark.parametrize("given", MADE.values(), ids=list(MADE))
def test_every_pair_that_can_be_is_held_and_no_other(given: Space) -> None:
    rows, impossible = cover(given, Pairs.every(given), lambda row, left: dict(row), lambda row: [row])
    assert all(rule.allows(row) and list(row) == list(CLASSES) for row in rows for rule in given.all_rules)
    could_be = [held(row) for row in possible_rows(given) if all(rule.allows(row) for rule in given.all_rules)]
    possible = {frozenset(pair) for each in could_be for pair in combinations(each, 2)}
    assert set(map(frozenset, Pairs(given, rows))) == possible
    assert set(map(frozenset, Pairs.every(given))) - possible == set(map(frozenset, impossible))


def plain_cases(space: Space) -> Iterator[Case]:
    for row in map(space.row_of, array_of(space.capability)):
        with suppress(CaseError):  # the first members of its classes need not go together
            case = space.case_of(row)
            if is_light(case) and len(case.q) > 3 and "equal" not in row.values():
                yield case


@every_space
def test_other_requests_of_a_row_hold_more_pairs_and_leave_its_classes(space: Space) -> None:
    missing, more = Pairs.every(space), 0
    for plain in islice(plain_cases(space), 8):
        other = filled(space, plain, missing, is_light)
        assert space.row_of(other) == space.row_of(plain) and is_light(other)
        more += missing.new_in(space.rows((other,))) - missing.new_in(space.rows((plain,)))
        assert filled(space, plain, missing, lambda case: False) is plain
    assert more > 0 or space.role is Role.SPARSE_LAYER  # of whose requests none has classes of its own

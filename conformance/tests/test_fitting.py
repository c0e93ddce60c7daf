"""Fitted cases: all pairs of what a kernel declares, many triples, nothing else, and the same every time."""

from collections.abc import Callable, Sequence
from functools import partial
from importlib import import_module
from itertools import islice
from typing import ClassVar

import pytest
import torch

from mla_conformance.backends.eager_decode import EagerDecodeBackend
from mla_conformance.backends.loading import load_role
from mla_conformance.backends.platform import DeviceCapability
from mla_conformance.backends.references import parse_reference
from mla_conformance.backends.roles import Role
from mla_conformance.cases.case import Case
from mla_conformance.cases.covering import Pairs
from mla_conformance.cases.fitting import fit
from mla_conformance.cases.space import Row
from mla_conformance.cases.triples import Triples
from mla_conformance.cases.work import is_light
from mla_conformance.engine.request import RunRequest
from mla_conformance.problems.operands import TORCH_DTYPES
from mla_conformance.roles.table import definition_of
from mla_conformance.trials.regions import reachable, region_of
from mla_conformance.trials.subject import Subject
from mla_conformance.vocabulary.arrays import SPACES
from mla_conformance.vocabulary.capabilities import listed

HOPPER = DeviceCapability(9, 0)
DECODE = SPACES["decode_combinations"]
SAMPLE = {"TRITON_ATTN": Role.PREFILL, "FLASHMLA": Role.DECODE, "DEEPGEMM_INDEXER": Role.INDEXER}


def declared(name: str, role: Role) -> Callable[[Sequence[Case]], list[bool]]:
    """What a registered backend declares, asked as if its GPU and its library were here."""
    kernel = load_role(parse_reference(name), role).resolve(HOPPER)
    here = {
        "is_available": classmethod(lambda cls: True),
        "supports_compute_capability": classmethod(lambda cls, c: True),
    }
    kernel = type(kernel.__name__, (kernel,), here)

    def supports(cases: Sequence[Case]) -> list[bool]:
        dtypes = [(case, TORCH_DTYPES[case.dtype]) for case in cases]
        return [bool(dtype and not definition_of(role).reasons(kernel, case, dtype, HOPPER)) for case, dtype in dtypes]

    return supports


def alike(base: Row, name: str, labels: Sequence[str], row: Row) -> list[str]:
    """The classes of a supported row first."""
    return sorted(labels, key=lambda label: label != base.get(name))


@pytest.mark.parametrize("name", SAMPLE)
def test_every_pair_of_what_a_kernel_declares_is_held(name: str) -> None:
    space = next(space for space in SPACES.values() if space.role is SAMPLE[name])
    supports, all_pairs = declared(name, SAMPLE[name]), reachable(space, "cuda")
    region = fit(space, listed(space), supports, all_pairs)
    assert all(supports(region.cases)) and not [case.id for case in region.cases if space.outside(case)]
    missing, classes = all_pairs - Pairs(space, region.rows), region.classes
    claimed = [pair for pair in missing if all(label in classes[name] for name, label in pair)]
    for pair in islice(claimed, 0, None, max(1, len(claimed) // 5)):
        for base in region.rows[:: max(1, len(region.rows) // 5)]:
            row = space.completed(pair, partial(alike, base))
            assert row is None or not supports([space.case_of(row)])[0], f"{pair} is declared, and no case holds it"


class Narrow(EagerDecodeBackend):
    supported_kv_cache_dtypes: ClassVar[list[str]] = ["auto", "fp8"]
    supports_nonuniform_queries = False
    supported_latent_dims: ClassVar[list[tuple[int, int]]] = [(512, 64)]
    supported_query_len = 4

    @staticmethod
    def get_supported_kernel_block_sizes() -> list[int]:  # type: ignore[override]
        return [64]


def test_the_region_of_a_narrow_kernel_is_what_it_declares() -> None:
    subject = Subject.of(f"{Narrow.__module__}:Narrow", torch.device("cpu"))
    vars(subject).update(roles=(Role.DECODE,), _classes={Role.DECODE: Narrow}, _unavailable={Role.DECODE: []})
    region = region_of(subject, DECODE)
    expected = {
        "cache": ["auto", "fp8"],
        "page": ["64"],
        "queries": ["1", "2", "3", "4"],
        "dims": ["r1"],
        "tile scales": [],
    }
    classes = region.classes
    assert {name: classes[name] for name in expected} == expected
    assert region.cases and not [case.id for case in region.cases if case.page != 64 or len(set(case.q)) > 1]


def test_a_kernel_that_declares_nothing_has_no_region_and_is_asked_once() -> None:
    asked: list[int] = []

    def nothing(cases: Sequence[Case]) -> list[bool]:
        asked.append(len(cases))
        return [False] * len(cases)

    region = fit(DECODE, listed(DECODE), nothing, reachable(DECODE, "cpu"))
    assert (region.rows, region.cases, asked) == ([], [], [len(listed(DECODE))])


def test_dimensions_that_decide_only_together_are_learned() -> None:
    def supports(cases: Sequence[Case]) -> list[bool]:
        rows = map(DECODE.row_of, cases)
        return [row["ranks"] == "1" or row["queries"] == "1" for row in rows]

    region = fit(DECODE, listed(DECODE), supports, reachable(DECODE, "cuda"))
    missing = reachable(DECODE, "cuda") - Pairs(DECODE, region.rows)
    assert missing and all({name for name, _ in pair} & {"queries", "rows x heads", "ranks"} for pair in missing)
    assert (("queries", "2"), ("ranks", "2")) in set(missing)
    assert not [pair for pair in missing if pair[0][0] == "queries" and pair[1][0] not in ("ranks", "interleave")]


def test_triples_are_fitted_of_what_is_declared_and_of_the_devices_size_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """And the same every time, up to a number, with what is left out counted."""
    monkeypatch.setattr(import_module(fit.__module__), "MOST_TRIPLES", 30)

    def supports(cases: Sequence[Case]) -> list[bool]:
        return [row.get("ranks") == "1" and row.get("cache") != "fp8" for row in map(DECODE.row_of, cases)]

    pairs = reachable(DECODE, "cpu")
    plain = fit(DECODE, listed(DECODE), supports, pairs)
    region = fit(DECODE, listed(DECODE), supports, pairs, is_light)
    assert plain.triples is None and region.cases[: len(plain.cases)] == plain.cases
    further = region.cases[len(plain.cases) :]
    assert len(set(further)) == 30 and all(supports(further)) and all(map(is_light, further))
    assert further == fit(DECODE, listed(DECODE), supports, pairs, is_light).cases[len(plain.cases) :]
    assert region.triples is not None
    known = [case for case in listed(DECODE) if supports([case])[0]]
    left = Triples(Pairs(DECODE, map(DECODE.row_of, filter(is_light, [*known, *plain.cases]))))
    counted = [len(left)]
    for some in ([*known, *plain.cases], further):
        for case in some:
            left.drop(DECODE.row_of(case))
        counted.append(len(left))
    claimed, before, after = counted
    held = region.triples
    assert (held.claimed, held.before, held.held) == (claimed, claimed - before, claimed - after)
    assert held.before < held.held < held.claimed - held.vain


def test_the_nightly_tier_alone_asks_for_triples() -> None:
    asked = {tier: RunRequest.of(["EAGER"], tier=tier).triples for tier in ("smoke", "full", "nightly")}
    assert asked == {"smoke": False, "full": False, "nightly": True}

"""Requests of one shape together, against the definition, which does one after the other."""

from collections.abc import Callable
from functools import partial
from itertools import accumulate
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from torch import Tensor

from mla_conformance.reference.attention import AttentionState, attention
from mla_conformance.reference.blockwise import by_shape

Normal = Callable[..., Tensor]

BATCHES = [
    ([3, 3, 3, 3], [5, 5, 5, 5]),
    ([1] * 9, [1] * 9),
    ([2, 2, 4, 4, 4, 2], [7, 7, 7, 7, 3, 7]),
    ([0, 0, 3, 3], [4, 4, 0, 0]),
    ([6, 1, 1], [2, 2, 2]),
]


def _operands(normal: Normal, q_lens: list[int], kv_lens: list[int], shared: bool) -> dict[str, Any]:
    heads = 1 if shared else 2
    return {
        "q": normal(1, sum(q_lens), 2, 6),
        "k": normal(2, sum(kv_lens), heads, 6),
        "v": normal(3, sum(kv_lens), heads, 5),
        "query_start_loc": [0, *accumulate(q_lens)],
        "key_start_loc": [0, *accumulate(kv_lens)],
        "scale": 0.4,
        "with_terms": True,
    }


def _together(attend: Callable[..., AttentionState], options: dict[str, Any]) -> AttentionState:
    batch = {name: options[name] for name in ("q", "k", "v", "query_start_loc", "key_start_loc")}
    return by_shape(partial(attend, **{name: x for name, x in options.items() if name not in batch}), **batch)


def _assert_same(found: AttentionState, plain: AttentionState) -> None:
    same = partial(torch.testing.assert_close, rtol=1e-13, atol=1e-15, equal_nan=True)
    same(found.output, plain.output)
    same(found.lse, plain.lse)
    assert found.terms is not None and plain.terms is not None
    assert found.terms.by_name().keys() == plain.terms.by_name().keys()
    for name, term in plain.terms.by_name().items():
        same(getattr(found.terms, name), term)


@pytest.mark.parametrize("workspace", [1, 100, 2**22])
@pytest.mark.parametrize("shared", [True, False])
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize(("q_lens", "kv_lens"), BATCHES)
def test_agrees_with_the_definition(
    normal: Normal,
    q_lens: list[int],
    kv_lens: list[int],
    causal: bool,
    shared: bool,
    workspace: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    options = _operands(normal, q_lens, kv_lens, shared) | {"causal": causal, "with_key_terms": True}
    plain = attention(**options)
    monkeypatch.setattr("mla_conformance.reference.attention.WORKSPACE_ELEMENTS", workspace)
    _assert_same(_together(attention, options), plain)


@pytest.mark.parametrize("where", ["q", "k", "v"])
def test_a_bad_number_stays_in_its_request(normal: Normal, where: str) -> None:
    options = _operands(normal, [3, 3, 3], [4, 4, 4], False) | {"causal": True}
    options[where][4] = torch.nan
    found = _together(attention, options)
    _assert_same(found, attention(**options))
    assert found.output.isnan().any() and not found.output[:3].isnan().any() and not found.output[6:].isnan().any()


def test_thousands_of_requests_are_few_computations(normal: Normal) -> None:
    options = _operands(normal, [2] * 3000, [3] * 3000, False) | {"causal": True}
    definition = Mock(wraps=attention)
    assert _together(definition, options).output.shape == (6000, 2, 5)
    assert definition.call_count == 1


def test_a_key_that_heads_share_is_not_copied_for_a_request_alone(normal: Normal) -> None:
    options = _operands(normal, [2, 3], [5, 4], True) | {"causal": True}
    definition = Mock(wraps=attention)
    _together(definition, options)
    assert [call.args[1].shape[1] for call in definition.call_args_list] == [1, 1]

"""Other batches of a case's configuration, drawn by its id, so that a line that runs the case again has the same."""

from dataclasses import replace
from random import Random

from mla_conformance.backends.roles import Role
from mla_conformance.cases.case import Case


def of_size(case: Case, requests: int) -> Case:
    """So many requests as long as those of the case, in an order drawn anew, with other values."""
    known = range(len(case.q))
    rows = Random(f"{case.id}|{requests}").sample([*known] * -(-requests // len(known)), requests)
    q, kv = (tuple(lengths[row] for row in rows if lengths) for lengths in (case.q, case.kv))
    return replace(case, q=q, kv=kv, seed=case.seed + 100 + requests)


def captured(case: Case) -> Case:
    """The batch that is captured over the buffers of ``case``: its requests the other way round, half as long."""
    lengths = [_half(length) for length in reversed(_lengths(case))]
    return _with_lengths(case, lengths, padding=0, seed=1)


def replayed(case: Case, requests: int, seed: int) -> Case:
    """A batch that fits the buffers of ``case``: so many requests, and padding up to the captured number.

    Its lengths are those of the buffers in an order drawn anew, some of them cut, so that rows grow and shrink from
    replay to replay; one row is as long as when it was captured, one has no token, and one has a single one.
    """
    requests = len(case.q) if _cannot_be_padded(case) else requests
    draw, rooms = Random(f"{case.id}|{requests}|{seed}"), _lengths(case)[::-1]
    order = draw.sample(range(len(rooms)), len(rooms))
    special = draw.sample(range(requests), min(3, requests - 1))
    for row in special[:1]:  # its own room is the one that the captured length fits
        there = order.index(row)
        order[row], order[there] = row, order[row]
    lengths = [draw.choice((rooms[room], _drawn(draw, rooms[room]))) for room in order[:requests]]
    for row, length in zip(special, (_half(rooms[order[special[0]]]) if special else 0, 0, 1), strict=False):
        lengths[row] = min(length, rooms[order[row]])
    return _with_lengths(case, lengths, len(case.q) - requests, seed)


def _lengths(case: Case) -> tuple[int, ...]:
    """What differs between the batches of a graph: new tokens of a prefill, the context of a decode."""
    return case.q if case.role is Role.PREFILL else case.kv


def _with_lengths(case: Case, lengths: list[int], padding: int, seed: int) -> Case:
    if case.role is Role.PREFILL:
        return replace(case, q=(*lengths, *(0,) * padding), seed=case.seed + seed)
    return replace(case, q=case.q[: len(lengths)], kv=tuple(lengths), pad=padding, seed=case.seed + seed)


def _cannot_be_padded(case: Case) -> bool:
    """A row of padding has one token, so a batch of several tokens a request is never smaller."""
    return case.role is not Role.PREFILL and max(case.q) > 1


def _half(length: int) -> int:
    return -(-length // 2)


def _drawn(draw: Random, longest: int) -> int:
    return draw.randint(min(1, longest), longest)

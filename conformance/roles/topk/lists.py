"""The cases that decide each capability of a top-k, the most telling first; see ``prefill_caselists`` for the form."""

from collections.abc import Iterator
from typing import Any

from mla_conformance.cases.case import Layout
from mla_conformance.cases.grammar import Fields, Lengths
from mla_conformance.roles.topk.case import LOGITS

_LONG = 2**17 + 62


def best(*lengths: int, q: Lengths = (), **fields: Any) -> Fields:
    """The best columns of rows of these lengths, one for each or the first of ``q`` rows."""
    return {"call": "select", "q": q or (1,) * len(lengths), "kv": lengths, **fields}


def selections() -> Iterator[Fields]:
    """Lengths around the selected columns, tiles and none; numbers of columns; one row of 2^17."""
    yield best(63, 200, 5, 64, 65)
    yield best(0, 300, 0, 0, 130, 0)
    yield best(0)
    yield best(2500, 2048, 2049, 100, topk=2048)
    yield from (best(300, 130, topk - 1, topk, topk + 1, topk=topk) for topk in (1, 2, 63, 65, 100, 128, 257))
    yield best(1023, 600, 512, topk=512)
    yield best(5000, 4097, topk=1024)
    yield best(*range(1, 40), topk=7)
    yield best(300, 63, dtype="bf16")
    yield best(300, 63, dtype="fp16")
    yield best(_LONG, 40, topk=2048)
    yield best(_LONG, topk=2048, data="rising")
    yield best(33000, topk=512, data="rising")


def windows() -> Iterator[Fields]:
    """Rows that start at columns of their own, several rows of a request, strides, and what stands around them."""
    yield best(200, 90, 131, packed=True)
    yield best(57, 100, 0, q=(8, 3, 2), packed=True)
    yield best(0, 70, q=(70, 5), packed=True)
    yield best(64, 130, q=(4, 2))
    yield from (best(200, 90, 5, poison=poison, inflate=3) for poison in ("nan", "inf", "large"))
    yield from (best(200, 90, 5, poison=poison, packed=True, pad=3) for poison in ("nan", "inf", "large"))
    yield best(200, 90, 5, layout=Layout.SLICED, poison="inf")
    yield best(201, 93, 7, layout=Layout.ODD, packed=True, poison="inf")
    yield best(201, 93, 7, layout=Layout.ODD, topk=256)
    yield best(3000, 2900, topk=2048, packed=True, data="negative", poison="large")
    yield best(10, 4, 5, topk=64, packed=True, data="negative", poison="large")
    yield best(*(63, 5, 200) * 24, pad=4)
    yield best(*(63, 5, 200) * 24, packed=True, topk=16)


def ties() -> Iterator[Fields]:
    """Logits that a radix selection, a coarse histogram or a comparison may confuse; more ties than places."""
    yield from (best(300, 1000, 63, data=data) for data in LOGITS if data != "normal")
    yield from (best(2600, 700, data=data, topk=2048) for data in ("relu", "last_bits", "masked", "infinite"))
    yield from (best(9000, data=data, topk=1024) for data in ("relu", "last_bits", "integers", "beyond_half"))
    yield best(20000, data="last_bits", topk=2048)
    yield best(20000, data="ones", topk=2048)
    yield best(33, 40, data="masked", topk=16, poison="inf", inflate=2)
    yield best(300, 90, data="negative", packed=True, poison="large")
    yield from (best(301, 90, data=data, topk=100, packed=True) for data in ("nan", "infinite", "masked"))


def pools() -> Iterator[Fields]:
    """Rows that see whole pools and parts of one, fewer pools than are selected, none; with last tokens or without."""
    for tail in (True, False):
        pool: Fields = {"pool": 4, "tail": tail}
        yield best(43, 800, 3, 259, 0, topk=64, **pool)
        yield best(20, 505, 0, q=(9, 5, 6), topk=16, packed=True, poison="large", **pool)
        yield best(*range(28, 41), topk=32, **pool)
    yield from (
        best(61, 300, 7, topk=64, pool=4, tail=True, poison=name, inflate=3, pad=2) for name in ("inf", "large")
    )
    yield from (best(61, 300, 7, topk=8 * pool, pool=pool, tail=True) for pool in (2, 3, 128))
    yield best(*range(13), topk=4, pool=4, tail=True)
    yield best(8191, 9000, 8195, topk=2048, pool=4, tail=True)
    yield from (best(61, 300, 7, topk=64, pool=4, tail=True, data=data) for data in ("ones", "nan"))
    yield best(61, 300, 7, topk=64, pool=4, tail=True, layout=Layout.ODD, dtype="bf16")


def repeated() -> Iterator[Fields]:
    """Batches that are called again, changed, cut or reordered."""
    yield best(100, 300, 40, 70, q=(2, 1, 3, 1))
    yield best(100, 300, 0, 70, packed=True, topk=33)


def fenced() -> Iterator[Fields]:
    """Four rows, of which windows end exactly where memory does, from column 0 and from their own."""
    yield best(201, 63, 5, 90)
    yield best(57, 100, 0, q=(2, 1, 1), packed=True)
    yield best(301, 93, 7, 0, topk=128, layout=Layout.ODD)


def determinism() -> Iterator[Fields]:
    """Those, and ties that several blocks of a long row could break in any order."""
    yield from repeated()
    yield best(9000, 300, topk=512, data="ones")
    yield best(5000, topk=512, data="integers")


def many_rows() -> Iterator[Fields]:
    """As many rows as a batch has, of 2^18 columns, and as a prefill has."""
    yield best(*(2**18 - 3,) * 1024, topk=2048)
    yield best(*(2**18,) * 256, topk=2048, data="last_bits")
    yield best(3000, q=(4096,), topk=2048)

"""The cases that decide each capability, the most telling first; plain fields, to which the capability's name is added.

Lengths sit at and next to tile, page and chunk sizes; most data hold a dominant key at such an edge, because N(0,1)
averages a lost key away.
"""

from collections.abc import Iterator
from typing import Any

from mla_conformance.cases.case import Call, Layout
from mla_conformance.cases.grammar import Fields, Lengths, each

_CONTEXT = (64, 0, 1000, 17)
_TILES = (1, 15, 16, 17, 31, 32, 33, 63, 64, 65, 127, 128, 129, 255, 256, 257)
_SMALL = {"dims": "small", "heads": 1}
_NARROW = {"dims": "16-8-40-32"}


def new(q: Lengths, **fields: Any) -> Fields:
    """New tokens only."""
    return {"q": q, **fields}


def chunk(q: Lengths, kv: Lengths, **fields: Any) -> Fields:
    """One chunk of context."""
    return {"call": Call.CONTEXT_CHUNK, "q": q, "kv": kv, **fields}


def chunked(q: Lengths, kv: Lengths, **fields: Any) -> Fields:
    """Context in chunks, merged with the new tokens."""
    return {"call": Call.CHUNKED_CONTEXT, "q": q, "kv": kv, **fields}


def new_tokens() -> Iterator[Fields]:
    """Causal attention within each request, output only."""
    yield from each(
        [
            new((1, 7, 64, 129, 257), data="needle"),
            new((65, 130), data="outliers"),
            new((257, 1), data="hot_tail"),
            new((1, 7, 64, 129, 513)),
            *(new((length,), data="needle") for length in _TILES),
            new((1,) * 48),
            new((700, 1), data="needle"),
            new((1, 700), data="needle"),
            new((128, 128), data="large_logits"),
            new((9, 130), data="low_rank"),
            new((9, 130), data="integers"),
            new((9, 130), data="tiny_values"),
            new((40, 9), data="zero_keys"),
            new((1, 7, 64, 129), dtype="fp16", data="needle"),
            new((1, 7, 64, 129), dtype="fp32", data="needle"),
        ],
        lse=False,
    )


def lse() -> Iterator[Fields]:
    """The LSE of new tokens and of a context chunk, by value."""
    yield new((4,), heads=4)
    yield chunk((5, 1, 33, 64), (64, 9, 1000, 17))
    yield new((3,) * 12, data="needle")
    yield new((1, 7, 64, 129), data="needle")
    yield new((257, 1, 2))
    yield new((16,), heads=16, data="large_logits")
    yield new((9, 300), data="hot_tail")
    yield chunk((5, 9), (2000, 3), data="hot_tail")
    yield chunk((5, 9), (129, 257), data="large_logits")
    yield chunk((5,), (1,))
    yield chunk((2,) * 10, tuple(range(1, 11)))
    yield new((64, 5), data="ones", scale=100)
    for dtype in ("fp16", "fp32"):
        yield chunk((5, 1, 33, 64), (64, 9, 1000, 17), dtype=dtype)
    yield new((310, 300), heads=32, **_NARROW, data="needle")
    yield new((9,) * 70, heads=64, **_NARROW)


def context_chunk() -> Iterator[Fields]:
    """Unmasked attention to one chunk, queries and keys of different lengths."""
    yield chunk((5, 9, 3, 33), _CONTEXT, heads=16)
    yield chunk((5, 9, 3, 33), (64, 5, 1000, 17), data="needle")
    yield chunk((1, 1, 1), (300, 7, 40), data="outliers")
    yield chunk((1, 200), (1500, 1), data="hot_tail")
    yield from (chunk((2, 5), (length, 40), data="needle") for length in _TILES)
    yield chunk((3,) * 24, tuple(range(1, 25)))
    yield chunk((200, 1), (1, 200), data="needle")
    yield chunk((7, 7), (300, 300), data="large_logits")
    yield chunk((7,), (500,), data="tiny_values")
    yield chunk((7, 3), (130, 40), data="integers")
    for dtype in ("fp16", "fp32"):
        yield chunk((5, 9, 3, 33), _CONTEXT, dtype=dtype, data="needle")


def chunked_context() -> Iterator[Fields]:
    """Plan, gather, up-project, run and merge, with contexts on and around chunk ends."""
    yield chunked((5, 9, 3), (64, 0, 700), data="needle")
    yield chunked((5, 1), (5, 900), workspace=128)
    yield chunked((17,), (600,), data="hot_tail")
    yield from (chunked((4, 4), (context, 100), data="needle") for context in (127, 128, 129, 255, 256, 257, 384))
    for page, workspace in ((1, 96), (16, 64), (32, 96), (64, 320), (128, 512)):
        yield chunked((3, 6), (200, 333), page=page, workspace=workspace, data="needle")
    yield chunked((40, 40), (0, 0))
    yield chunked((1,) * 8, (1, 0, 16, 17, 0, 0, 31, 160), workspace=128)
    yield chunked((100,), (100,), dims="glm", heads=2)
    yield chunked((9, 30), (350, 20), dtype="fp16")
    yield chunked((9, 30), (350, 20), dtype="fp32")
    yield chunked((9, 30), (350, 20), data="large_logits")
    yield chunked((9, 30), (350, 20), data="ones")
    yield from each(
        [
            chunked((5, 9, 3), (64, 0, 700), data="needle"),
            chunked((3, 6, 2), (200, 333, 40), page=16, workspace=64, data="needle"),
            chunked((4, 4), (127, 130), page=1, workspace=128, data="hot_tail"),
            chunked((1,) * 8, (1, 0, 16, 17, 0, 0, 31, 160), workspace=128),
            chunked((9, 5, 7), (300, 256, 30), page=64, dtype="fp16", data="large_logits"),
            chunked((3, 0, 5), (0, 40, 300), workspace=96),
        ],
        planner="greedy",
    )


def merge_states() -> Iterator[Fields]:
    """The backend's own merge, rows without keys on either side and on both."""
    yield from each(
        [
            chunked((5, 9, 3), (64, 0, 700), data="needle"),
            chunked((5, 1, 4), (5, 900, 0), workspace=128),
            chunked((4, 4), (16, 300), workspace=64, data="hot_tail"),
            chunked((9, 30), (350, 20), dtype="fp16"),
            chunked((9, 30), (350, 20), dtype="fp32"),
            chunked((9, 3), (350, 20), data="large_logits"),
            chunked((150, 170), (700, 40), heads=32, **_NARROW, workspace=512, data="needle"),
            chunked((3,) * 40, (40, 3, 0, 65) * 10, heads=64, **_NARROW, workspace=1024, data="needle"),
        ],
        merge="own",
    )
    yield from each(
        [
            chunked((5, 9, 3), (64, 0, 300), workspace=96, data="needle"),
            chunked((4, 4), (16, 300), workspace=64, dtype="fp16", data="hot_tail"),
            chunked((3, 5), (40, 130), workspace=64, dtype="fp32"),
        ],
        merge="in_place",
    )


def empty_rows() -> Iterator[Fields]:
    """Requests without keys, or without queries, at every position."""
    yield chunk((3, 4, 5), (17, 0, 33))
    yield chunk((3, 4, 5), (0, 64, 0), dims="glm", heads=2)
    yield chunk((0, 1, 0, 1), (9, 17, 33, 5))
    yield chunk((3, 4), (0, 0))
    yield chunk((3, 4, 5), (0, 17, 33))
    yield chunk((3, 4, 5), (17, 33, 0))
    yield chunk((3, 4, 5, 2), (17, 0, 0, 33))
    yield chunk((0, 4, 5), (17, 33, 9))
    yield chunk((4, 5, 0), (33, 9, 17))
    yield chunk((4, 0, 5), (33, 0, 9))
    yield chunk((130, 2), (0, 300))
    yield chunk((3, 4, 5), (0, 64, 0), dtype="fp16")
    yield new((0, 7, 0, 0, 33, 0))
    yield chunked((3, 0, 5), (0, 40, 300), workspace=96)


def weights() -> Iterator[Fields]:
    """V = 1 must give 1, whatever the distribution of the weights."""
    yield chunk((3, 2), (4000, 129), heads=2, data="hot_ones")
    yield new((257,), data="rising_ones", lse=False)
    yield new((300,), data="ones", lse=False)
    yield chunk((3,), (9000,), data="hot_ones", dims="small")
    yield from (new((length,), data="rising_ones", lse=False) for length in (127, 128, 256))
    yield chunk((5, 9), (300, 1000), data="rising")
    yield chunk((3, 2), (4000, 129), data="hot_ones", dtype="fp16")


def logit_range() -> Iterator[Fields]:
    """Logits up to a hundred times the usual size."""
    yield new((130, 9), data="huge_logits")
    yield chunk((5, 64), (300, 129), data="extreme_logits")
    yield new((257,), data="rising")
    yield chunk((5, 64), (300, 129), data="huge_logits")
    yield new((130, 9), data="extreme_logits")
    yield new((130, 9), data="extreme_logits", dtype="fp32")


def shift_invariance() -> Iterator[Fields]:
    """A constant of ±1.6e5 on all raw scores of a row moves the LSE and nothing else."""
    yield new((5, 130), data="negative")
    yield chunk((5, 9), (300, 40), data="negative")
    yield new((5, 130), data="shifted")
    yield chunk((5, 9), (300, 40), data="shifted")
    yield chunked((5, 9), (300, 40), data="negative", workspace=128)
    yield new((5, 130), data="negative", dtype="fp32")
    for data in ("negative", "shifted"):
        yield new((5, 130), data=data, dtype="fp16")
        yield chunk((5, 9), (300, 40), data=data, dtype="fp16")


def softmax_scale() -> Iterator[Fields]:
    """Scales far from the inverse square root of any head dim."""
    for scale in (50, 237, 100, 10, 400):
        yield new((3, 130), scale=scale, lse=False)
        yield chunk((3, 40), (200, 9), scale=scale)


def mla_dims() -> Iterator[Fields]:
    """Head dims of the models, NoPE, and small ones; one request, so that nothing else can fail."""
    named = ("glm", "128-0-128-512", "64-64-128-256", "r1", "small", "256-0-256-512", "32-16-32-64")
    yield from (new((130,), dims=dims, heads=2, lse=False) for dims in named)
    yield from (chunk((30,), (130,), dims=dims, heads=2) for dims in named)
    yield new((300,), dims="glm", heads=2, data="needle")
    yield chunk((40,), (1100,), dims="glm", heads=2, data="needle")


def head_counts() -> Iterator[Fields]:
    """One head to the full 128; one request, so that nothing else can fail."""
    for heads in (20, 128, 1, 12, 4, 8, 16, 24, 32, 64, 96):
        yield new((40,), heads=heads, lse=False)
        yield chunk((5,), (40,), heads=heads)


def token_counts() -> Iterator[Fields]:
    """Many tokens in a call: offsets and indices beyond 2^14 and 2^15."""
    yield chunk((2, 1), (33000, 40), **_SMALL, data="needle")
    yield new((128,) * 128, **_SMALL, lse=False)
    yield chunk((2,), (16385,), **_SMALL, data="hot_tail")
    yield new((1,) * 1500, **_SMALL)
    yield new((64,) * 257, **_SMALL, lse=False)
    yield new((63,) * 520 + (9,), **_SMALL)
    yield chunk((1,) * 700, (5,) * 700, **_SMALL)


def dtypes() -> Iterator[Fields]:
    """Every dtype against its own budget."""
    for data in ("normal", "needle", "large_logits"):
        yield from (new((3, 140), dtype=dtype, data=data, lse=False) for dtype in ("bf16", "fp16", "fp32"))
    yield from (chunk((3, 40), (140, 5), dtype=dtype) for dtype in ("bf16", "fp16", "fp32"))


def v_padding() -> Iterator[Fields]:
    """V narrower than QK, as wide, and wider."""
    for dims in ("16-8-40-32", "r1", "small", "glm", "32-16-64-64"):
        yield new((5, 64), dims=dims, lse=False, data="needle")
        yield chunk((5, 40), (70, 9), dims=dims)


def strided_inputs() -> Iterator[Fields]:
    """Views of wider buffers, transposed queries, rows that no vector load is aligned to."""
    layouts = (Layout.SLICED, Layout.ODD, Layout.HEADS_FIRST, Layout.KV_B_PROJ, Layout.PACKED)
    yield from (new((5, 64, 130), layout=layout, lse=False) for layout in layouts)
    yield from (chunk((5, 64), (130, 17), layout=layout, data="needle") for layout in layouts)
    yield from (new((7, 33), layout=layout, dims="glm", heads=2, lse=False) for layout in layouts)


def out_tensor() -> Iterator[Fields]:
    """An output tensor between guard zones."""
    yield from each(
        [
            new((5, 64, 130), lse=False),
            new((5, 64, 130)),
            new((1, 17), dims="glm", heads=2),
            new((9,), dims="16-8-40-32"),
            new((3, 0, 9), data="needle"),
            new((5, 64), dtype="fp16"),
            new((5, 64), dtype="fp32"),
        ],
        out=True,
    )


def quant_output_fp8() -> Iterator[Fields]:
    """Fused e4m3 output: rounded, saturated, tiny, with poisoned padding rows."""
    yield from each(
        [
            new((5, 64, 130)),
            new((5, 64, 130), oscale=300),
            new((5, 33), pad=3),
            new((5, 64), data="needle", oscale=2300),
            new((33,), oscale=1000000),
            new((33,), data="tiny_values", oscale=70),
            new((9, 40), data="ones", oscale=30000),
            new((9, 40), dtype="fp16"),
            new((9, 40), dims="glm", heads=2),
            new((0, 9, 0)),
            new((330, 290), heads=32, **_NARROW, data="needle"),
        ],
        quant="fp8",
        lse=False,
    )
    yield from each(
        [
            new((5, 64, 130)),
            new((5, 33), pad=3),
            new((5, 64), data="needle", oscale=2300),
            new((33,), data="tiny_values", oscale=70),
            new((9, 40), data="ones", oscale=1000),
            new((0, 9, 0), dims="glm", heads=2),
            new((1, 1)),
        ],
        dtype="e4m3",
        quant="fp8",
        lse=False,
    )
    yield new((5, 64, 130), data="needle", oscale=2300, quant="fp8")
    yield new((310,), heads=16, quant="fp8")


def fp8_operands() -> Iterator[Fields]:
    """q, k and v in e4m3: every entry, empty rows, tails that P in e4m3 loses unless it is scaled, any layout."""
    yield from each(
        [
            new((1, 7, 64, 129), data="needle"),
            chunk((3, 2), (2000, 129), heads=2, data="hot_ones"),
            chunked((5, 9, 3), (64, 0, 700), data="needle"),
            chunk((3, 4, 5, 2), (17, 0, 0, 33)),
            new((65, 130), data="outliers"),
            new((257, 1), data="rising_ones"),
            chunk((5, 1, 33), (64, 9, 1000), data="large_logits"),
            new((5, 64, 130), out=True, lse=False),
            chunk((5, 9), (64, 33), layout=Layout.SLICED, pad=5),
            new((5, 64), layout=Layout.ODD, data="needle"),
            new((5, 64), dims="glm", heads=2, data="needle"),
            chunk((5, 40), (70, 9), dims="16-8-40-32"),
            new((5, 64), dims="128-0-128-512", lse=False),
            chunked((5, 0, 1), (5, 40, 900), workspace=96, data="hot_tail"),
            new((330, 290), heads=32, **_NARROW, data="needle"),
            chunk((310,), (620,), heads=64, **_NARROW, data="needle"),
            chunked((150, 170), (700, 40), heads=16, **_NARROW, workspace=512, data="needle"),
        ],
        dtype="e4m3",
    )


def no_side_effects() -> Iterator[Fields]:
    """Poison in everything that the lengths exclude, guard zones around everything that is written."""
    yield new((5, 64, 1), pad=3)
    yield chunk((5, 9), (64, 33), layout=Layout.SLICED, pad=5, poison="inf")
    yield chunked((5, 9), (64, 333), workspace=128, poison="large")
    yield new((33, 9), out=True, layout=Layout.SLICED, poison="large")
    yield chunk((5, 9), (64, 33), pad=5)
    yield new((40, 2), out=True, pad=2, lse=False, poison="inf")


def call_order() -> Iterator[Fields]:
    """Shapes whose second call must not remember the first."""
    yield new((33, 140), heads=2)
    yield chunk((5, 40), (140, 33), heads=2, data="needle")
    yield chunked((9, 5), (40, 300), heads=2, workspace=128)
    yield new((5, 140), heads=2, out=True, data="needle")


def determinism() -> Iterator[Fields]:
    """Shapes that a kernel splits in more than one way."""
    yield new((140, 7), heads=2)
    yield chunk((3, 5), (500, 40), heads=2, data="hot_tail")
    yield new((40, 130), heads=2, lse=False)


def batches() -> Iterator[Fields]:
    """A long request among short ones, and many alike."""
    yield new((130, 1, 40, 5), data="needle")
    yield chunk((5, 1, 9, 3), (300, 1, 40, 129), data="needle")
    yield chunk((1,) * 8, (64, 1, 200, 17, 64, 300, 5, 129))
    yield new((17,) * 8)
    yield new((3,) * 64, **_SMALL, data="needle")


def neighbours() -> Iterator[Fields]:
    """Short requests one after the other, so that a tile of one reaches into the next."""
    yield new((5, 130, 1, 64), heads=2)
    yield chunk((5, 9, 3, 33), (64, 5, 300, 17), heads=2, data="needle")
    yield chunked((5, 9, 3), (64, 0, 300), heads=2, workspace=96)
    yield new((5, 64, 5, 64), heads=2, dtype="fp16")


def fenced() -> Iterator[Fields]:
    """Three and four requests: either way the ends of some tensors of metadata are multiples of 16 bytes."""
    yield new((5, 33, 1, 64), heads=2, out=True)
    yield new((9, 130, 5), heads=2, dtype="fp16")
    yield chunk((5, 9, 3), (64, 5, 300), heads=2)
    yield chunk((3, 1, 2, 6), (40, 129, 0, 7), heads=2)
    yield chunked((5, 9, 3), (64, 0, 300), heads=2, workspace=96)
    yield chunked((5, 9, 3, 2), (64, 0, 130, 5), heads=2, workspace=256, page=64)
    yield new((33, 5, 9), heads=2, out=True, quant="fp8")
    yield new((33, 5, 9), heads=2, dtype="e4m3")


def prefixes() -> Iterator[Fields]:
    """New tokens only: the first rows of a request do not know the later ones."""
    yield new((130, 65), data="needle")
    yield new((257,), data="hot_tail")


def splits() -> Iterator[Fields]:
    """Contexts that several workspaces cut differently."""
    yield chunked((9, 5), (300, 40), heads=2)
    yield chunked((4, 4, 4), (0, 700, 16), heads=2, data="hot_tail")


def value_factors() -> Iterator[Fields]:
    """Values times a power of two."""
    yield new((5, 130))
    yield chunk((5, 9), (300, 17), data="needle")
    yield new((40,), dtype="fp32")


def loose_maxima() -> Iterator[Fields]:
    """Maxima in the metadata a hundred times the true ones."""
    yield from each([new((5, 64, 1)), chunk((5, 9), (64, 330)), chunked((5, 9), (64, 333), workspace=128)], inflate=100)


def refusals() -> Iterator[Fields]:
    """Configurations that some backend does not declare."""
    yield from each(
        [
            new((9,), quant="fp8", lse=False),
            new((9,), dtype="fp64"),
            new((9,), dtype="e4m3"),
            new((9,), dtype="fp32"),
            new((9,), dtype="fp16"),
            chunk((9,), (20,), dtype="fp64"),
            new((9,), dims="16-8-40-32"),
            new((9,), dims="24-8-24-16"),
            chunk((9,), (20,), dims="256-64-320-512"),
            new((9,), dtype="fp64", out=True, lse=False),
            new((9,), dims="24-8-24-16", out=True, lse=False),
        ],
        heads=2,
    )

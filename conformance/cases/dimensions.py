"""Dimensions that the cases of several roles vary in, and what excludes some of their classes. No torch."""

from mla_conformance.cases.cached import TAILS, CachedCase
from mla_conformance.cases.case import POISON, Layout
from mla_conformance.cases.classes import Draw, Numbers, exactly
from mla_conformance.cases.grammar import Data, Fields, dimensions_of
from mla_conformance.cases.space import ALWAYS, NOTHING, Dimension, Only, Row, measured, plain, values
from mla_conformance.reference.entry_formats import TILE_SCALES, TILED_FORMATS


def numbers(name: str, field: str, classes: Numbers, only: Only = ALWAYS) -> Dimension:
    """A dimension whose classes are numbers of one field."""
    fields = {label: {field: classes.first(label)} for label in classes}
    return Dimension(name, fields, lambda case: classes.class_of(getattr(case, field)), only, (field, classes))


def data(*first: str) -> Dimension:
    """Every data regime, these first."""
    return values("data", "data", *dict.fromkeys((*first, *Data)))


def cache(*layouts: str, only: Only = ALWAYS) -> tuple[Dimension, ...]:
    """Layouts of a cache, and what the codes of some of them are scaled by."""
    fp8 = Only("cache", ("fp8",), "only an fp8 cache is read with k_scale")
    tiles = Only("cache", ("fp8_ds_mla",), "only the tiles of fp8_ds_mla have scales of either kind")
    return (
        values("cache", "cache", *layouts, only=only),
        numbers("k_scale", "kscale", K_SCALES, fp8),
        values("tile scales", "scales", *TILE_SCALES, only=tiles),
    )


_FEW_SLOTS = 6000
K_SCALES = Numbers(
    {
        "usual": ((13_000,), range(5_000, 100_000)),
        "small": ((777,), range(1, 5_000)),
        "large": ((2_300_000, 998_700, 1_002_900), range(100_000, 2**31)),
    },
    sizes=False,
)
SCALES = Numbers(
    {
        "usual": ((159,), range(100, 200)),
        "small": ((50,), range(1, 100)),
        "large": ((237,), range(200, 2**31)),
    },
    most=400,
    sizes=False,
)
RANKS = Numbers({**exactly(1, 2, 3, 4), "5 to 8": ((8,), range(5, 9)), "9 to 16": ((16,), range(9, 17))})
SEVERAL_RANKS = tuple(label for label in RANKS if label != "1")

SCALE = numbers("scale", "scale", SCALES)
LAYOUT = values("layout", "layout", *(layout.value for layout in Layout))
PADDING = numbers("padding", "pad", Numbers({"none": ((0,),), "some": ((3,), range(1, 2**16))}, most=40))
POISONS = values("poison", "poison", *POISON)
LSE = plain("lse", {"asked": {"lse": True}, "not asked": {"lse": False}})
MAXIMA = numbers("maxima", "inflate", Numbers({"true": ((1,),), "loose": ((100,), range(2, 2**31))}, most=200))


def storage(only: Only = ALWAYS, most: int = 16) -> tuple[Dimension, ...]:
    """What stands behind a block table's rows, layers that share a buffer, and slots that no request holds.

    Args:
        only: where they have a say.
        most: the slots that are told apart, in powers of two.
    """
    powers = range(most, 14, -1)

    def unused(case: CachedCase) -> str:
        return next((f"2^{power} slots" for power in powers if case.spare * case.page >= 2**power), "few")

    return (
        values("tails", "tails", *TAILS, only=only),
        numbers("layers", "layers", Numbers({"1": ((1,),), "several": (range(2, 9),)}), only),
        measured("unused", ("few", *(f"2^{power} slots" for power in powers[::-1])), unused, only),
    )


def ranks(only: Only = ALWAYS) -> tuple[Dimension, ...]:
    """Ranks that share the tokens, and by how many in a row."""
    shared = Only("ranks", SEVERAL_RANKS, "one rank has all tokens")
    runs = Numbers(exactly(1, 16, 64))
    return numbers("ranks", "ranks", RANKS, only), numbers("interleave", "interleave", runs, shared)


def room(layout: str, dims: str, dtype: str) -> bool:
    """Whether an entry of a layout has room for the head dims and values of the dtype."""
    form = TILED_FORMATS.get(layout)
    head, rank = dimensions_of(dims)
    latent = (rank, head.qk_rope_head_dim)
    return form is None or (latent in form.dims and (not form.plain or dtype in ("bf16", "fp16")))


def spare_blocks(row: Row, page: int, draw: Draw) -> Fields:
    """The blocks that no request holds; others are drawn from all."""
    few = draw.near(1, _FEW_SLOTS, "unused") if draw else 3 * page
    slots = {NOTHING: 3 * page, "few": few, "2^15 slots": 2**15, "2^16 slots": 2**16}[row["unused"]]
    return {"spare": -(-slots // page)}

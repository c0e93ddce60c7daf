"""Cases of a sparse backend: queries against selected entries of a paged cache, or of gathered keys."""

from dataclasses import dataclass
from typing import ClassVar

from mla_conformance.backends.index_space import IndexSpace
from mla_conformance.backends.roles import Role
from mla_conformance.cases.cached import CACHES, CachedCase
from mla_conformance.cases.case import Call, at_least, one_of
from mla_conformance.cases.grammar import CaseError
from mla_conformance.reference.entry_formats import TILED_FORMATS

MAIN_CACHES = tuple(dict.fromkeys((*CACHES, *(name for name, form in TILED_FORMATS.items() if form.cache == "latent"))))
EXTRA_CACHES = ("none", *MAIN_CACHES, *(name for name, form in TILED_FORMATS.items() if form.cache == "extra"))
_EXTRA_RATIO = 4
"""Tokens that an entry of a second cache stands for, as V4 compresses them."""
_TILE = 64


@dataclass(frozen=True, kw_only=True)
class SparseCase(CachedCase):
    """A question to a sparse backend.

    Attributes:
        cache: layout of the cache; gathered keys are plain.
        topk: columns of the lists.
        fill: how many keys a list names: as many as there are and fit, or fewer by chance, none among it.
        order: how the keys of a list are ordered.
        holes: where a list that names fewer keys than it has columns holds -1.
        length: whether lengths are handed over beside the lists.
        behind: what a list holds from its length on: -1, 0, keys of any request, or what no cache has.
        space: what the numbers of a list count.
        repeats: whether lists name some keys twice.
        unselected: whether keys that no list names are as drawn, or poison.
        sink: the sinks' logits: none handed over, drawn, or infinite ones of either sign among them.
        extra: layout of a second cache; none without one.
        extra_topk: columns of its lists.
        extra_page: tokens of its pages.
    """

    role: ClassVar[Role] = Role.SPARSE
    calls: ClassVar[tuple[Call, ...]] = (Call.SPARSE_DECODE, Call.SPARSE_PREFILL)

    cache: str = one_of(MAIN_CACHES, "auto")
    topk: int = at_least(1, 64)
    fill: str = one_of(("full", "ragged"), "full")
    order: str = one_of(("drawn", "ascending", "descending"), "drawn")
    holes: str = one_of(("end", "front", "scattered"), "end")
    length: bool = False
    behind: str = one_of(("minus", "zero", "stale", "huge"), "minus")
    space: str = one_of(IndexSpace, IndexSpace.SLOT)
    repeats: bool = False
    unselected: str = one_of(("drawn", "poison"), "drawn")
    sink: str = one_of(("none", "drawn", "extreme"), "none")
    extra: str = one_of(EXTRA_CACHES, "none")
    extra_topk: int = at_least(1, 64)
    extra_page: int = at_least(1, 64)

    @property
    def is_paged(self) -> bool:
        """Whether the keys lie in a paged cache."""
        return self.call == Call.SPARSE_DECODE

    @property
    def has_extra(self) -> bool:
        """Whether there is a second cache."""
        return self.extra != "none"

    @property
    def extra_lens(self) -> tuple[int, ...]:
        """Entries of each request in the second cache."""
        return tuple(-(-(q + kv) // _EXTRA_RATIO) for q, kv in zip(self.q, self.kv, strict=True))

    @property
    def holds_codes(self) -> bool:
        """Whether either cache stores codes."""
        return super().holds_codes or self.extra not in ("none", "auto")

    @property
    def is_causal(self) -> bool:
        """No: the lists alone say what is seen."""
        return False

    @property
    def visible_lens(self) -> tuple[int, ...]:
        """Keys that a row of each request sees at most."""
        main = (min(self.topk, q + kv) for q, kv in zip(self.q, self.kv, strict=True))
        extra = (min(self.extra_topk, length) if self.has_extra else 0 for length in self.extra_lens)
        return tuple(map(sum, zip(main, extra, strict=True)))

    @property
    def columns(self) -> int:
        """Columns of a head that q·k and p·v take together; the first columns of a key are its value."""
        return 2 * self.kv_lora_rank + self.dimensions.qk_rope_head_dim

    @property
    def output_elements(self) -> int:
        """Elements of a row's output."""
        return self.heads * self.kv_lora_rank

    @property
    def key_elements(self) -> int:
        """Elements of a key, which heads share, and which holds its value."""
        return sum(self.latent_dims)

    @property
    def profile(self) -> str:
        """The entry that is driven, since a kernel may have one alone."""
        return self.call

    @property
    def asks(self) -> tuple[str, ...]:
        """Beyond 64 heads or more, lists of slots in whole tiles, which -1 pads, a plain cache and no LSE."""
        return (
            *super().asks,
            f"heads_{self.heads}" if self.heads % _TILE else "",
            "topk" if self.topk % _TILE else "",
            "topk_length" if self.length else "",
            str(self.space) if self.space != IndexSpace.SLOT else "",
            "duplicates" if self.repeats else "",
            "sink" if self.sink != "none" else "",
            f"extra_{self.extra}" if self.has_extra else "",
            "lse" if self.lse else "",
        )

    def validate(self) -> None:
        """Hold every field against what it may be, and against the call and the other fields.

        Raises:
            CaseError: a value that it may not have, or that another field contradicts.
        """
        super().validate()
        if self.has_extra:
            self.require_room(self.extra)
        if not self.is_paged and (self.cache != "auto" or self.has_extra or self.ranks > 1):
            raise CaseError(
                "call sparse_prefill: expected cache=auto, extra=none and ranks=1, since gathered keys are plain, got "
                f"cache={self.cache}, extra={self.extra} and ranks={self.ranks}"
            )
        if self.ranks > 1 and (self.sink != "none" or self.has_extra or not self.lse):
            raise CaseError(
                f"field ranks: expected sink=none, extra=none and lse=1 where {self.ranks} ranks share the tokens, got "
                f"sink={self.sink}, extra={self.extra} and lse={int(self.lse)}"
            )
        if self.space == IndexSpace.RANK_LOCAL and not self.is_paged:
            raise CaseError("field space: gathered keys are on one rank, expected slot or position, got rank_local")
        if not self.length and self.behind != "minus":
            raise CaseError(f"field behind: without lengths every entry counts, expected minus, got {self.behind}")

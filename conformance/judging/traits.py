"""What numbers alone do not show of a kernel: when its bits are the same, and how its errors are spread. No torch."""

import math
from collections import Counter
from collections.abc import Iterable
from enum import StrEnum
from typing import Annotated, Self

from msgspec import Meta, Struct


class Question(StrEnum):
    """What is asked of the bits of a row's result: are they the same, as the words behind each say."""

    said: str

    def __new__(cls, name: str, said: str = "") -> Self:
        member = str.__new__(cls, name)
        member._value_, member.said = name, said
        return member

    REPEATS = "repeats", "from run to run"
    ALONE = "alone", "alone and in a batch"
    PLACE = "place", "at any place of the batch"
    BATCH_SIZE = "batch_size", "for any batch size"
    SPLITS = "splits", "for any maxima, by which kernels choose their splits"
    CHUNKING = "chunking", "for any chunking of the context"
    PAGES = "pages", "on any pages"
    PADDING = "padding", "with and without padding"
    GRAPH = "graph", "in a graph and without"
    PHASE = "phase", "in prefill and in decode"
    RANKS = "ranks", "on two ranks and on one"


ASKED = {question: question.said for question in Question}


class Answer(StrEnum):
    YES = "yes"
    NO = "no"
    NOT_APPLICABLE = "not applicable"


class BitwiseAnswer(Struct, frozen=True, forbid_unknown_fields=True):
    question: Question
    role: str
    answer: Answer
    compared: Annotated[int, Meta(ge=0)] = 0  # variants that were compared with what they are variants of
    why: str = ""  # the smallest case that differs and what was changed; or why it is not applicable


class ErrorSpread(Struct, frozen=True, forbid_unknown_fields=True):
    """How the errors of one role's output elements are spread, over cases of one dtype and one data regime."""

    role: str
    dtype: str  # of the operands
    data: str
    cases: Annotated[int, Meta(ge=1)]
    elements: Annotated[int, Meta(ge=1)]
    budget: tuple[float, float, float]  # median, 99th percentile and worst error in units of its element's budget
    ulp: tuple[float, float, float]  # the same in units of the last place of the expected value in the output's dtype


class Traits(Struct, frozen=True, forbid_unknown_fields=True):
    bitwise: tuple[BitwiseAnswer, ...] = ()
    accuracy: tuple[ErrorSpread, ...] = ()

    def answers(self, question: Question) -> dict[str, BitwiseAnswer]:
        return {each.role: each for each in self.bitwise if each.question is question}

    def __bool__(self) -> bool:
        return bool(self.bitwise or self.accuracy)


NO_TRAITS = Traits()


def summed_up(answers: Iterable[BitwiseAnswer]) -> Answer:
    """Over roles: no if any says so, yes if one says that."""
    found = Counter(each.answer for each in answers)
    return Answer.NO if found[Answer.NO] else Answer.YES if found[Answer.YES] else Answer.NOT_APPLICABLE


class Repeated(Struct, frozen=True, forbid_unknown_fields=True):
    calls: int = 0
    seconds: float = 0.0  # they took together
    differing: int = 0  # calls whose bits are not those of the first
    first: int = 0  # number of the first of these, counted from 1; 0 without one
    what: str = ""  # how its result differs
    wrong: str = ""  # what is wrong with it; empty if it is right, or none differs
    failed: str = ""  # why nothing could be compared: the case does not hold as it is, or is not supported
    deterministic: bool = True  # whether the kernel declares equal bits

    @property
    def breaks(self) -> bool:
        return bool(self.wrong or (self.differing and self.deterministic))

    def calls_for(self, probability: float) -> int:
        return math.ceil(math.log(1 - probability) / math.log1p(-min(self.differing / self.calls, 1 - 1e-9)))

    def rarest(self, probability: float) -> float:
        return -math.expm1(math.log(1 - probability) / self.calls)

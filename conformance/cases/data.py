"""Names of the data regimes, whose transforms stand in ``hazards.py``. No torch."""

from enum import StrEnum


class Data(StrEnum):
    """What the values of a case's inputs are like."""

    NORMAL = "normal"
    NEEDLE = "needle"
    HOT_TAIL = "hot_tail"
    HOT_ONES = "hot_ones"
    LARGE_LOGITS = "large_logits"
    HUGE_LOGITS = "huge_logits"
    EXTREME_LOGITS = "extreme_logits"
    NEGATIVE = "negative"
    SHIFTED = "shifted"
    RISING = "rising"
    RISING_ONES = "rising_ones"
    ONES = "ones"
    INTEGERS = "integers"
    OUTLIERS = "outliers"
    LOW_RANK = "low_rank"
    TINY_VALUES = "tiny_values"
    ZERO_KEYS = "zero_keys"

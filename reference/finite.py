"""Numbers that come from a model's configuration, where anything may stand."""

import math
from typing import TypeGuard


def is_finite(value: object) -> TypeGuard[float]:
    """Whether it is an int or a float, no bool, and finite."""
    return type(value) in (int, float) and math.isfinite(value)  # type: ignore[arg-type]

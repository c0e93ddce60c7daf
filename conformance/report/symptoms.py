"""What is seen of a failure where nothing is known of its cause. No torch."""

import re

from mla_conformance.judging.record import Record
from mla_conformance.judging.verdict import Check

WRONG: dict[str, str] = {
    Check.SHAPE: "tensors of a wrong number, kind or shape were returned",
    Check.DTYPE: "a tensor of a wrong dtype was returned",
    Check.DEVICE: "a tensor on a wrong device was returned",
    Check.MASK: "rows without keys, NaN or infinities are not as they have to be",
    Check.LSE: "the LSE is wrong",
    Check.OUTPUT: "the output is wrong",
    Check.SELECTION: "keys are not selected as they have to be",
    Check.SCORE: "an index score is wrong",
    Check.OUT_TENSOR: "the given output tensor is not what was returned",
    Check.CACHE: "the cache does not hold what was to be written",
    Check.MUTATED_INPUT: "inputs were changed",
    Check.OUT_OF_BOUNDS_WRITE: "memory beside the output tensor was written",
    Check.PROCESS_STATE: "the state of the process was changed",
    Check.STALE_RESULT: "an earlier result was overwritten",
    Check.NONDETERMINISM: "the same call returns other bits",
    Check.BATCH_DEPENDENCE: "a result depends on the other requests of its batch",
    Check.NONLINEARITY: "the output is not linear in V",
    Check.UNDECLARED_SUPPORT: "what is declared unsupported is accepted, and comes out wrong",
    Check.UNSAFE_REFUSAL: "a refusal comes too late",
}
"""What failing a check means, of failures of which nothing more is known."""
_MASKED: dict[str, str] = {
    r"\boutput is nan\b": "the output is NaN where a number is expected",
    r"\boutput is -?inf\b": "the output is infinite where a number is expected",
    r"\boutput is not 0 where no key is visible": "the output is not 0 where no key is visible",
    r"\boutput is not 0 in \d+ rows of padding": "the output is not 0 in rows of padding",
    r"\bLSE is nan\b.*expected finite": "the LSE is NaN where a number is expected",
    r"\bLSE is -?inf\b.*expected finite": "the LSE is infinite where a number is expected",
    r"\bLSE is nan\b.*expected -inf": "the LSE is NaN where -inf is expected",
    r"\bLSE is inf\b.*expected -inf": "the LSE is +inf where -inf is expected",
    r"\bLSE is .*expected -inf": "the LSE is a number where -inf is expected",
}
"""What was seen of a failure of the check of masks, by what its message says."""


def symptom(record: Record) -> str:
    """What is wrong with a result, as far as that is seen; the message of a failure that names no check."""
    if record.check == Check.MASK:
        return next((what for said, what in _MASKED.items() if re.search(said, record.message)), WRONG[Check.MASK])
    return WRONG.get(record.check, record.check) if record.check else record.message

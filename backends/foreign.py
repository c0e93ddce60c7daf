"""Code of others: whatever it raises becomes one line, and what it answers is checked before it is believed."""

import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from threading import current_thread, main_thread
from types import FrameType
from typing import Any, TypeVar

_Answer = TypeVar("_Answer")
MESSAGE = 4 * 2**10  # bytes that are shown of a message
LINE = 64 * 2**10  # bytes of the longest line or text; a command to copy may be that long
HUB = "hub:"  # what references of a hub's kernels begin with


class ForeignError(Exception):
    """What code of others raised, as one line; the exception itself is the cause."""


class BackendReferenceError(ValueError):
    """A backend reference that names nothing that can be judged."""


class AnswerError(TypeError):
    """An answer of another type than the one that was asked for."""


def call_foreign(call: Callable[[], _Answer], passing: tuple[type[Exception], ...] = ()) -> _Answer:
    """The result of a call into code of others; whatever it raises, ``SystemExit`` too, becomes a ForeignError.

    Exceptions in ``passing``, and a KeyboardInterrupt that a user sent meanwhile, are raised as they are.
    """
    with user_interrupts() as came:
        try:
            return call()
        except BaseException as error:
            if came or isinstance(error, passing):
                raise
            raise ForeignError(one_line(error)) from error


class _Interrupts(list[int]):
    """A handler of interrupts that notes them, in the blocks around its own as well, and has them raised as ever."""

    before: Any

    def __call__(self, number: int, frame: FrameType | None) -> None:
        self.append(number)
        self.before(number, frame)


@contextmanager
def user_interrupts() -> Iterator[list[int]]:
    """The interrupts that come from outside during the block, raised as ever; code of others may raise its own."""
    came = _Interrupts()
    came.before = before = signal.getsignal(signal.SIGINT)
    raised = before is signal.default_int_handler or isinstance(before, _Interrupts)
    # Only the main thread receives signals and may say what becomes of them.
    noted = raised and current_thread() is main_thread()
    if noted:
        signal.signal(signal.SIGINT, came)
    try:
        yield came
    finally:
        if noted:
            signal.signal(signal.SIGINT, before)


def cut(text: str, limit: int = MESSAGE) -> str:
    """The first ``limit`` bytes of a text, and how many characters are left out behind them."""
    kept = len(text[:limit].encode("utf-8", "replace")[:limit].decode("utf-8", "ignore"))
    return text if kept == len(text) else f"{text[:kept]}… and {len(text) - kept:,} more characters"


def one_line(error: BaseException) -> str:
    """An exception's type and text on one line that every encoding can carry, whatever they do to prevent it."""
    try:
        said = "".join([str(error), ""])  # of a plain text, should a subclass of one have been returned
    except BaseException:
        said = "(its text cannot be made)"
    text = " ".join(f"{type_name(error)}: {cut(said, MESSAGE // 2)}".split()).removesuffix(":")
    return text.encode("utf-8", "backslashreplace").decode("utf-8")


def type_name(value: Any) -> str:
    """The name of an object's type, in any encoding, whatever its metaclass makes of names."""
    name = type.__dict__["__name__"].__get__(type(value))
    return cut(str(name.encode("utf-8", "backslashreplace").decode("utf-8")))


def reasons_of(answer: Any, method: str = "validate_configuration") -> list[str]:
    """The reasons that ``method`` gave; AnswerError of no list: a bare string would fall apart into letters."""
    if isinstance(answer, list | tuple) and all(isinstance(reason, str) for reason in answer):
        return list(map(cut, answer))
    raise AnswerError(f"{method} returned {_described(answer)}, expected a list of reasons (strings)")


def yes_or_no(answer: Any, method: str) -> bool:
    """The answer that ``method`` gave; AnswerError where it is neither True nor False."""
    if isinstance(answer, bool):
        return answer
    raise AnswerError(f"{method} returned {_described(answer)}, expected True or False")


def _described(answer: Any) -> str:
    if isinstance(answer, str | int | float | None):
        return cut(repr(answer))
    if isinstance(answer, list | tuple):
        kinds = dict.fromkeys(type(item).__name__ for item in answer)
        return f"a {type(answer).__name__} of {', '.join(kinds)}"
    return f"a value of type {type(answer).__name__}"


def is_from_vllm(cls: type) -> bool:
    """Whether a class is one of vLLM's or derived from one."""
    return any(base.__module__.partition(".")[0] == "vllm" for base in cls.__mro__)

"""One field by which cases are selected: its values, or classes of the role's space. No torch."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from mla_conformance.backends.references import nearest
from mla_conformance.cases.case import Case
from mla_conformance.cases.grammar import format_value
from mla_conformance.cases.space import Space
from mla_conformance.files.inputs import InputError

_SHOWN = 24


@dataclass(frozen=True)
class FieldFilter:
    """What was asked of one field, or of one dimension of the role's space.

    Attributes:
        name: of the field.
        values: any of them will do; of a list of lengths, each length is one of them.
        label_of: the class of a case; None where no dimension has the name.
    """

    name: str
    values: tuple[object, ...]
    label_of: Callable[[Case], str | None]

    @staticmethod
    def of(space: Space, listed: Sequence[Case], name: str, value: object) -> "FieldFilter":
        """What is asked by ``name=value``; each value must be one that some case has.

        Raises:
            InputError: an unknown field, or a value that no listed case has.
        """
        labels = {each.name.replace(" ", "_"): each.class_of for each in space.dimensions}
        known = [*listed[0].defaults(), *labels]
        if name not in known:
            near = nearest(name, known)
            hint = f"did you mean {near}?" if near else f"expected one of {', '.join(dict.fromkeys(known))}"
            raise InputError(f"cases: unknown field {name!r} of a {space.role} case; {hint}")
        values = tuple(value) if isinstance(value, list | tuple | set | frozenset | range) else (value,)
        asked = FieldFilter(name, values, labels.get(name, lambda case: None))
        for each in values:
            if not any(FieldFilter(name, (each,), asked.label_of).touches(case) for case in listed):
                raise InputError(f"cases: no {space.role} case has {name}={each}; {asked.expected(listed)}")
        return asked

    def holds(self, case: Case) -> bool:
        """Whether a case has one of the values, or its class is one of them."""
        got = getattr(case, self.name, None)
        lengths = got if isinstance(got, tuple) else ()
        each = bool(lengths) and all(length in self.values for length in lengths)
        return each or self._is(case, got)

    def touches(self, case: Case) -> bool:
        """Whether a case has one of the values at all, if only as one length among others."""
        got = getattr(case, self.name, None)
        return self._is(case, got) or (isinstance(got, tuple) and any(length in self.values for length in got))

    def _is(self, case: Case, got: object) -> bool:
        texts = [str(value) for value in self.values if isinstance(value, str)]
        plain = not isinstance(got, tuple) and got in self.values
        return plain or (got is not None and format_value(got) in texts) or self.label_of(case) in texts

    def expected(self, listed: Iterable[Case]) -> str:
        """The values that there are."""
        got = [getattr(case, self.name, None) for case in listed]
        parts = {part for each in got if each is not None for part in (each if isinstance(each, tuple) else (each,))}
        labels = {str(label) for case in listed if (label := self.label_of(case)) is not None}
        shown = [format_value(part) for part in sorted(parts)]
        shown = [*shown, *sorted(labels - set(shown))]
        more = f" and {len(shown) - _SHOWN} more" if len(shown) > _SHOWN else ""
        return f"expected one of {', '.join(shown[:_SHOWN])}{more}"

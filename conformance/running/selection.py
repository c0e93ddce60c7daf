"""What a run judges: subjects, capabilities, tier, device and cases, checked before anything is launched."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib.util import find_spec

import torch

from mla_conformance.backends.references import (
    BackendReference,
    BackendReferenceError,
    known_backends,
    known_variants,
    parse_reference,
)
from mla_conformance.cases.capabilities import CAPABILITIES, CapabilityError, Tier, find_capability, find_tier
from mla_conformance.cases.case import Case, CaseError
from mla_conformance.cases.hazards import REGIMES
from mla_conformance.driving.subject import Subject
from mla_conformance.trials.explore import DRAWN


class SelectionError(ValueError):
    """A request that names something that does not exist here."""


def known_names(references: Sequence[str] = ()) -> list[str]:
    """Names of the registered backends, of their variants, and of those that ``references`` adds."""
    registered = [backend.name for backend in (*known_backends(), *known_variants())]
    return list(dict.fromkeys(registered + [parse_reference(r).name for r in references]))


def find_device(name: str | None) -> torch.device:
    """The device to judge on; None is CUDA where there is one.

    Raises:
        SelectionError: an unknown device, or CUDA where there is none.
    """
    available = torch.cuda.is_available()
    if name is None:
        name = "cuda" if available else "cpu"
    if name not in ("cpu", "cuda"):
        raise SelectionError(f"unknown device '{name}'; expected cpu or cuda")
    if name == "cuda" and not available:
        raise SelectionError(
            f"device cuda asked for, but torch {torch.__version__} sees no CUDA device; use --device cpu"
        )
    return torch.device("cuda", torch.cuda.current_device()) if name == "cuda" else torch.device("cpu")


def _distinct(references: Sequence[BackendReference]) -> list[BackendReference]:
    """Without repetitions; reports tell backends apart by name, so a name stands for one backend only."""
    found: dict[str, BackendReference] = {}
    for reference in references:
        other = found.setdefault(reference.name, reference)
        if other != reference:
            raise SelectionError(
                f"two backends named '{reference.name}': {other.reference} and {reference.reference}; "
                "judge them in two runs, or rename a class"
            )
    return list(found.values())


def _require_regimes(cases: Sequence[Case]) -> None:
    for case in cases:
        if case.data not in REGIMES:
            raise SelectionError(f"unknown data regime {case.data!r}; expected one of {', '.join(REGIMES)}")


def _require_exploration(draws: int, capabilities: Sequence[str]) -> None:
    if draws < 0:
        raise SelectionError(f"--explore: expected a number of cases, got {draws}")
    if draws and find_spec("hypothesis") is None:
        raise SelectionError("--explore draws its cases with hypothesis: pip install 'hypothesis>=6.130'")
    if draws and not set(DRAWN) & set(capabilities):
        raise SelectionError(f"--explore draws cases of {', '.join(DRAWN)}; none of these capabilities is selected")


@dataclass(frozen=True)
class Selection:
    """A checked request.

    Attributes:
        subjects: the backends; every registered one if none was named.
        capabilities: names of the capabilities.
        tier: how many of their cases.
        device: where they run.
        cases: exactly these cases, or all of the tier if empty.
        explore: how many further cases are drawn for each subject.
    """

    subjects: tuple[Subject, ...]
    capabilities: tuple[str, ...]
    tier: Tier
    device: torch.device
    cases: tuple[Case, ...]
    explore: int

    @staticmethod
    def of(
        backends: Sequence[str],
        capabilities: Sequence[str],
        tier: str,
        device: str | None,
        cases: Sequence[str],
        explore: int = 0,
    ) -> "Selection":
        """Check a request.

        Raises:
            SelectionError: something in it is unknown or malformed; the message says what was expected.
        """
        try:
            target = find_device(device)
            references = [parse_reference(r) for r in backends] or known_backends()
            parsed = tuple(Case.parse(text) for text in cases)
            wanted = [find_capability(name).name for name in [*capabilities, *(c.capability for c in parsed)]]
            chosen = tuple(dict.fromkeys(wanted)) or tuple(CAPABILITIES)
            _require_regimes(parsed)
            _require_exploration(explore, chosen)
            subjects = tuple(Subject(reference, target) for reference in _distinct(references))
            for subject in subjects:
                _ = subject.unavailable
            return Selection(subjects, chosen, find_tier(tier), target, parsed, explore)
        except (BackendReferenceError, CapabilityError, CaseError) as error:
            raise SelectionError(str(error)) from error

    @property
    def drawn(self) -> tuple[str, ...]:
        """Capabilities that cases are drawn of."""
        return tuple(name for name in DRAWN if name in self.capabilities)

    def cases_of(self, capability: str) -> tuple[Case, ...]:
        """The cases of one capability in this run."""
        if capability not in self.capabilities:
            return ()
        if self.cases:
            return tuple(case for case in self.cases if case.capability == capability)
        return find_capability(capability).select(self.tier)

    @property
    def case_ids(self) -> tuple[str, ...]:
        """Ids of all cases of this run, capability by capability."""
        return tuple(case.id for name in self.capabilities for case in self.cases_of(name))

    def pairs(self, capability: str) -> Iterator[tuple[Subject, Case, str]]:
        """Every (subject, case, why unavailable); an unavailable subject stands with its first case only."""
        for index, case in enumerate(self.cases_of(capability)):
            for subject in self.subjects:
                unavailable = "; ".join(subject.unavailable)
                if not unavailable or index == 0:
                    yield subject, case, unavailable

    def explored(self) -> Iterator[tuple[Subject, str]]:
        """Every (subject, why unavailable) that cases are drawn for."""
        return ((subject, "; ".join(subject.unavailable)) for subject in self.subjects if self.explore)

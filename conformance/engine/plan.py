"""The plan of a run, its journal's first event: what a resumed run must agree with to be the same run."""

import hashlib
from collections.abc import Iterable, Mapping
from typing import Any

import msgspec

from mla_conformance.cases.sharding import Shard
from mla_conformance.engine.journal import Journal, JournalError, Planned
from mla_conformance.engine.request import Request
from mla_conformance.judging.backend_facts import BackendFacts
from mla_conformance.models.deployment import Deployment
from mla_conformance.version import __version__

PLAN_FORMAT = 2


class Plan(msgspec.Struct, frozen=True, kw_only=True):
    """What a run is to judge, and with what.

    Attributes:
        format: version of this form.
        suite: version of the suite.
        torch: version of torch.
        device: ``cpu`` or ``cuda``.
        device_name: name of the device.
        tier: tier of the cases.
        backends: what tells that each backend, by reference, is still the same.
        capabilities: number and digest of each capability's cases.
        cases: ids of cases that were asked for one by one.
        explore: further cases that are drawn for each backend.
        shard: the part of the list that is judged.
        deployment: the model that the cases are of, if they are.
        salt: what inputs are drawn with beside their case.
        apart: whether inputs, kernel and judge are in processes of their own.
    """

    format: int
    suite: str
    torch: str
    device: str
    device_name: str
    tier: str
    backends: dict[str, str]
    capabilities: dict[str, str]
    cases: tuple[str, ...]
    explore: int
    shard: Shard | None = None
    deployment: Deployment | None = None
    salt: str = ""
    apart: bool = False

    @staticmethod
    def of(request: Request, device: str, environment: Mapping[str, str], facts: Iterable[BackendFacts]) -> "Plan":
        """The plan of a request on a device, for backends as they are now."""
        return Plan(
            format=PLAN_FORMAT,
            suite=__version__,
            torch=environment["torch"],
            device=device,
            device_name=environment["device"],
            tier=request.tier.value,
            backends={each.reference: each.fingerprint for each in facts},
            capabilities={name: _case_list(request, name) for name in request.capabilities},
            cases=tuple(case.id for case in request.cases),
            explore=request.explore,
            shard=request.shard,
            deployment=request.deployment,
            salt=request.salt,
            apart=request.apart,
        )

    @staticmethod
    def recorded(journal: Journal) -> "Plan":
        """The plan that a journal starts with.

        Raises:
            JournalError: there is no journal, or it starts otherwise, or with a plan of another format.
        """
        first = next(journal.events(), None)
        if not isinstance(first, Planned):
            raise JournalError(
                f"{journal.path}: expected a journal that starts with the plan of a run; start the run anew"
            )
        if first.plan.get("format") != PLAN_FORMAT:
            raise JournalError(f"{journal.path}: expected plan format {PLAN_FORMAT}, got {first.plan.get('format')!r}")
        try:
            return msgspec.convert(first.plan, Plan, strict=True)
        except msgspec.ValidationError as error:
            raise JournalError(f"{journal.path}: the plan is not right: {error}") from error

    def to_json(self) -> dict[str, Any]:
        """Plain data."""
        data: dict[str, Any] = msgspec.to_builtins(self)
        return data

    def differences(self, current: "Plan") -> list[str]:
        """What another plan does not agree in, in words."""
        found = []
        for name in Plan.__struct_fields__:
            old, new = getattr(self, name), getattr(current, name)
            if isinstance(old, dict):
                changed = [key for key in {**old, **new} if old.get(key) != new.get(key)]
                found += [f"{name}: {key} was {old.get(key, 'absent')}, is {new.get(key, 'absent')}" for key in changed]
            elif old != new:
                found.append(f"{name}: was {_text(old)}, is {_text(new)}")
        return found


def _text(value: Any) -> str:
    return str(list(value)) if isinstance(value, tuple) else str(value)


def _case_list(request: Request, capability: str) -> str:
    ids = [case.id for case in request.cases_of(capability)]
    return f"{len(ids)} cases {hashlib.sha256(chr(10).join(ids).encode()).hexdigest()[:12]}"

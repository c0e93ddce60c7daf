"""What is asked of a run: backends, capabilities, tier, device, cases; checked before anything starts. No torch.

And the plan, which its journal begins with: what a run must be to go on with another one.
"""

import ast
import hashlib
import re
import sys
from collections.abc import Container, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from importlib.util import find_spec
from pathlib import Path

import msgspec

from mla_conformance.backends import references, roles
from mla_conformance.cases.case import Call, Case
from mla_conformance.cases.sharding import ROUND, Extent, Shard
from mla_conformance.engine.journal import Journal, Planned
from mla_conformance.engine.machine import may_have_gpu
from mla_conformance.engine.messages import Explore, Judge
from mla_conformance.files.whole import InputError
from mla_conformance.judging.record import BackendFacts, RecordKey
from mla_conformance.models.profile import Deployment
from mla_conformance.version import __version__
from mla_conformance.vocabulary.arrays import SPACES
from mla_conformance.vocabulary.capabilities import CAPABILITIES, Tier, usual_capabilities

NOTHING_DRAWN = Extent()
_PARTS = 4  # of an exploration of each role for each worker at most, some of which take longer than others
DEVICES = ("cpu", "cuda")
PLAN_FORMAT = 4
NO_TORCH = f"torch is not installed for {sys.executable}, which judges with it; {sys.executable} -m pip install torch"


def known_names(added: Sequence[str] = ()) -> list[str]:
    registered = [backend.name for backend in (*references.known_backends(), *references.known_variants())]
    return list(dict.fromkeys(registered + [references.parse_reference(r).name for r in added]))


@dataclass(frozen=True)
class RunRequest:
    backends: tuple[references.BackendReference, ...]  # every registered one if none was named
    capabilities: tuple[str, ...]
    tier: Tier
    device: str  # ``cpu``, ``cuda``, or empty for CUDA where there is one
    cases: tuple[Case, ...]  # exactly these, or all of the tier if empty
    explore: Extent = NOTHING_DRAWN  # how much is drawn for each backend beside them
    salt: str = ""  # what inputs are drawn with beside their case, so that nobody knows them before
    shard: Shard | None = None  # judge only this part of the cases
    deployment: Deployment | None = None  # the model that the cases are of, if they are
    bitwise: bool = False  # whether each backend is asked, too, when its bits are the same
    accuracy: bool = False  # whether it is measured how its errors are spread
    speed: bool = False  # whether those that are right are timed
    is_usual: bool = False  # whether no backend was named, of which those that cannot run here were not asked for
    arrays: tuple[str, ...] = ()  # capabilities whose covering arrays are judged whole, to which cases are fitted
    surely_cpu: bool = False  # whether it is known without torch that no GPU is used

    @staticmethod
    def of(
        backends: Sequence[str] = (),
        capabilities: Sequence[str] = (),
        tier: str = "full",
        device: str | None = None,
        cases: Sequence[str] = (),
        explore: Extent = NOTHING_DRAWN,
        salt: str = "",
    ) -> "RunRequest":
        chosen_backends = [references.parse_reference(r) for r in backends] or references.usual_backends()
        for reference in backends:
            references.require_class(reference)
            location, _, name = reference.rpartition(":")
            if location.endswith(".py") and _is_function(Path(location), name):
                said = "expected a class, got a function, which mla.cases judges: docs/python-api.md"
                raise InputError(f"'{reference}': {said}")
        parsed = tuple(Case.parse(text) for text in cases)
        wanted = dict.fromkeys([*capabilities, *(case.capability for case in parsed)])
        for name in wanted:
            if name not in CAPABILITIES:
                about = [x for x, entry in CAPABILITIES.items() if any(name in (c.role, c.call) for c in entry.cases)]
                if about:
                    said = f"'{name}' is a role or a call, not a capability; expected one of {', '.join(about)}"
                    raise InputError(said)
                raise InputError(references.unknown("capability", name, CAPABILITIES, "mla-conformance capabilities"))
        _require_calls(parsed)
        chosen = tuple(wanted) or usual_capabilities()
        if device is not None and device not in DEVICES:
            raise InputError(f"unknown device '{device}'; expected {' or '.join(DEVICES)}")
        if any(explore) and find_spec("hypothesis") is None:
            raise InputError("--explore draws its cases with hypothesis: pip install 'hypothesis>=6.130'")
        if any(explore) and not set(SPACES) & set(chosen):
            raise InputError(f"--explore draws cases of {', '.join(SPACES)}; none of these capabilities is selected")
        require_salt(salt)
        if find_spec("torch") is None:
            raise InputError(NO_TORCH)
        named: dict[str, references.BackendReference] = {}
        for each in chosen_backends:  # reports tell backends apart by name, so a name stands for one backend only
            if (other := named.setdefault(each.name, each)) != each:
                said = f"{other.reference} and {each.reference}; judge them in two runs, or rename a class"
                raise InputError(f"two backends named '{each.name}': {said}")
        found = RunRequest(tuple(named.values()), chosen, Tier(tier), device or "", parsed, explore, salt)
        usual = (references.usual_backends(), references.usual_backends(on_gpu=True), references.known_backends())
        is_usual = set(found.backends) in map(set, usual)
        arrays = () if parsed or found.tier is Tier.SMOKE else found.drawn
        return replace(found, is_usual=is_usual, arrays=arrays, surely_cpu=device == "cpu" or not may_have_gpu())

    def cases_of(self, capability: str) -> tuple[Case, ...]:
        if capability not in self.capabilities:
            return ()
        if self.cases:
            return tuple(case for case in self.cases if case.capability == capability)
        return CAPABILITIES[capability].select(self.tier)

    @cached_property
    def case_ids(self) -> tuple[str, ...]:
        return tuple(case.id for name in self.capabilities for case in self.cases_of(name))

    @property
    def judged_ids(self) -> tuple[str, ...]:
        return self.shard.cases if self.shard else self.case_ids

    def judged_of(self, facts: BackendFacts) -> tuple[str, ...]:
        return (*self.judged_ids, *(self.shard.share(facts.fitted) if self.shard else facts.fitted))

    @property
    def drawn(self) -> tuple[str, ...]:
        return tuple(name for name in SPACES if name in self.capabilities)

    def tasks(
        self,
        backends: Sequence[BackendFacts],
        before: Sequence[str] = (),  # cases that each process runs before each of its own
        told: Container[RecordKey] = (),  # what has a record already
        first: Sequence[str] = (),  # cases that come before the others
        workers: int = 1,
    ) -> list[list[Judge | Explore]]:
        sides: dict[str, list[str]] = {case: [] for case in (*first, *self.judged_ids)}
        for facts in backends:
            for case in self.judged_of(facts):
                sides.setdefault(case, []).append(facts.reference)
        groups = list[list[Judge | Explore]]()
        for case, asked in sides.items():
            groups.append([Judge(r, case, tuple((r, earlier) for earlier in before)) for r in asked])
        if any(self.explore):
            share = max(1, workers // max(1, len(backends)))
            groups += [[task] for facts in backends for task in self.explorations(facts.reference, share)]
        left = ([task for task in group if (task.reference, task.case) not in told] for group in groups)
        return list(filter(None, left))

    def explorations(self, reference: str, workers: int) -> list[Explore]:
        """Parts of an exploration for so many workers: the same cases for any number, where no time ends it."""
        extent, names = self.explore, sorted(self.drawn, key=lambda name: -len(SPACES[name].dimensions))
        turns = min(-(-extent.draws // ROUND), _PARTS * workers)
        if extent.seconds:  # which are over when no worker has a part left
            turns = max(1, workers // len(names))
            extent = Extent(seconds=max(1, extent.seconds // -(-turns * len(names) // workers)))
        asked = [(name, extent, (number, turns)) for number in range(turns) for name in names]
        return [Explore(reference, *task, part, len(asked)) for part, task in enumerate(asked)]


def _require_calls(cases: Sequence[Case]) -> None:
    """Refuse a case of another role than its capability: one that says no call is a prefill's, whatever it decides.

    Also one of operands far apart that no such call of the capability has: it would not be asked for what it says.
    """
    for case in cases:
        listed = CAPABILITIES[case.capability].select(Tier.FULL)
        calls = dict.fromkeys(each.call for each in listed)
        if calls and case.call == Call.NEW_TOKENS and case.call not in calls:
            expected = f"expected a call of {case.capability}, such as call={next(iter(calls))}"
            raise InputError(f"case {case.id}: {expected}, got {case.call}")
        far = sorted({each.far for each in listed if each.call == case.call} - {"none"})
        if case.far != "none" and not any(each[:-2] == case.far[:-2] for each in far):
            expected = f"expected {' or '.join(('none', *far))} of a {case.call} under {case.capability}"
            raise InputError(f"case {case.id}: field far: {expected}, got {case.far}")


def _is_function(file: Path, name: str) -> bool:
    try:
        statements = ast.parse(file.read_bytes()).body
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return False  # whoever imports it says what is wrong
    named = [node for node in statements if getattr(node, "name", "") == name]
    return bool(named) and isinstance(named[-1], ast.FunctionDef) and not named[-1].decorator_list


def require_salt(salt: str) -> str:
    if not re.fullmatch(r"[\w.-]{0,64}", salt, re.ASCII):
        raise InputError(f"expected a salt of up to 64 letters, digits, dots and dashes, got {salt!r}")
    return salt


class Plan(msgspec.Struct, frozen=True):
    format: int  # version of this form
    suite: str
    torch: str
    device: str
    device_name: str
    tier: str
    backends: dict[str, str]  # what tells that each backend, by reference, is still the same
    capabilities: dict[str, str]  # number and digest of each capability's cases
    cases: tuple[str, ...]  # ids of cases that were asked for one by one
    explore: str  # how much is drawn for each backend; 0 for nothing
    shard: Shard | None = None
    deployment: Deployment | None = None
    salt: str = ""
    role: str = ""  # the file of one from outside

    @staticmethod
    def of(request: RunRequest, device: str, environment: Mapping[str, str], facts: Iterable[BackendFacts]) -> "Plan":
        lists = {}
        for name in request.capabilities:
            ids = [case.id for case in request.cases_of(name)]
            lists[name] = f"{len(ids)} cases {hashlib.sha256(chr(10).join(ids).encode()).hexdigest()[:12]}"
        where = __version__, environment["torch"], device, environment["device"]
        backends = {x.reference: f"{x.fingerprint}, region {x.region}" if x.region else x.fingerprint for x in facts}
        cases, drawn = tuple(case.id for case in request.cases), str(request.explore) if any(request.explore) else "0"
        rest = request.shard, request.deployment, request.salt, roles.outside()
        return Plan(PLAN_FORMAT, *where, request.tier.value, backends, lists, cases, drawn, *rest)

    @staticmethod
    def recorded(journal: Journal) -> "Plan":
        first, *_ = journal.sealed().values()
        if not isinstance(first, Planned):
            raise InputError(f"{journal.path}: expected a journal that starts with the plan of a run")
        if first.plan.get("format") != PLAN_FORMAT:
            raise InputError(f"{journal.path}: expected plan format {PLAN_FORMAT}, got {first.plan.get('format')!r}")
        try:
            return msgspec.convert(first.plan, Plan, strict=True)
        except msgspec.ValidationError as error:
            raise InputError(f"{journal.path}: malformed plan: {error}") from error

    def differences(self, current: "Plan") -> list[str]:
        found = []
        for name in Plan.__struct_fields__:
            old, new = getattr(self, name), getattr(current, name)
            if isinstance(old, dict):
                changed = [key for key in {**old, **new} if old.get(key) != new.get(key)]
                found += [f"{name}: {key} was {old.get(key, 'absent')}, is {new.get(key, 'absent')}" for key in changed]
            elif old != new:
                was, now = (list(value) if isinstance(value, tuple) else value for value in (old, new))
                found.append(f"{name}: was {was}, is {now}")
        return found

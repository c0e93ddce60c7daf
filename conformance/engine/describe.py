"""What a worker tells of its device and of a backend to a parent that imports neither torch nor the backend."""

import hashlib
import sys
from pathlib import Path

import torch

from mla_conformance.backends.foreign import one_line
from mla_conformance.backends.platform import describe_device, get_device_capability
from mla_conformance.backends.references import BackendReferenceError
from mla_conformance.engine.devices import driver_version
from mla_conformance.judging.record import BackendFacts
from mla_conformance.trials.subject import Subject


def find_device(name: str) -> torch.device | None:
    """The device of this name, by default CUDA where there is one; None if it is not there."""
    available = name != "cpu" and torch.cuda.is_available()
    if name == "cuda" and not available:
        return None
    return torch.device("cuda", torch.cuda.current_device()) if available else torch.device("cpu")


def device_facts(device: torch.device) -> dict[str, str]:
    capability, versions = get_device_capability(device), dict[str, str]()
    if device.type == "cuda":
        cudnn = torch.backends.cudnn.version()
        cuda = {"cuda": str(torch.version.cuda), "cudnn": "" if cudnn is None else str(cudnn)}
        versions = {"driver": driver_version(), **cuda}
    return {
        "device": describe_device(device),
        "compute_capability": str(capability) if capability else "",
        "torch": str(torch.__version__),
        "python": sys.version.split()[0],
        "platform": sys.platform,
        **versions,
    }


def describe(subject: Subject) -> BackendFacts:
    """The facts of a backend; one that raises when it is asked is unavailable."""
    try:
        name, reference, reasons = subject.name, subject.backend.reference, tuple(subject.unavailable)
        if reasons:
            return BackendFacts(name, reference, reasons, fingerprint=_fingerprint(subject, {}))
        declaration, versions = subject.declaration, subject.versions()
        return BackendFacts(
            name,
            reference,
            versions=versions,
            emulated=declaration.emulated,
            deviations=tuple((each.library, each.adapter) for each in declaration.deviations),
            rounding=subject.rounding,
            fingerprint=_fingerprint(subject, versions),
        )
    except BackendReferenceError as error:
        return unavailable(subject, one_line(error).removeprefix(f"{BackendReferenceError.__name__}: "))
    except BaseException as error:
        return unavailable(subject, f"could not be described: {one_line(error)}")


def unavailable(subject: Subject, reason: str) -> BackendFacts:
    return BackendFacts(subject.name, subject.backend.reference, (reason,), fingerprint="unavailable")


def _fingerprint(subject: Subject, versions: dict[str, str]) -> str:
    """What tells that a backend is still the same: its file, or its distributions' versions."""
    location = subject.backend.reference.rpartition(":")[0]
    if location.endswith(".py"):
        return "file " + hashlib.sha256(Path(location).read_bytes()).hexdigest()[:12]
    if subject.unavailable:
        return "unavailable"
    return ", ".join(f"{name} {version}" for name, version in versions.items()) or "no distribution"

"""``backends``, ``capabilities``, ``models`` and ``completion``, without torch unless an option asks for it."""

import argparse
import re
import sys
from collections.abc import Iterator
from itertools import chain
from pathlib import Path

from mla_conformance.backends.references import known_backends, unknown
from mla_conformance.cases.covering import Pairs, Triples
from mla_conformance.cases.work import CPU_WORK, work_of
from mla_conformance.commands.parser import commands_of
from mla_conformance.engine.request import RunRequest, known_names
from mla_conformance.engine.run import passing_run
from mla_conformance.files.whole import InputError, write_section
from mla_conformance.judging.record import BackendFacts
from mla_conformance.models.config import StoredModel, find_model, model_names, stored_model
from mla_conformance.models.profile import Deployment, ModelProfile, cases_of
from mla_conformance.report.causes import grouped
from mla_conformance.report.terminal import columns, put, say, say_wrapped, side_by_side, wrapped
from mla_conformance.vocabulary.arrays import SPACES
from mla_conformance.vocabulary.capabilities import CAPABILITIES, FITTED, Tier, counted, listed

_NO_GPU = "they need a GPU, and a package"
_LACKS_GPU = re.compile(r"needs (a CUDA device|compute capability .*this device has none)").match
_LACKS_PACKAGE = re.compile(r"package (\S+) not installed").match
_EXPLAINED = (
    "P-R-V-L: head dims of keys without and with rotation, of values, of latents. Figures are confirmed by the sources "
    "that this names: mla-conformance models NAME"
)
_VALUES = " " * 19  # before the column in which facts stand
_WIDTH = 80  # of what is listed of pairs


def list_backends(options: argparse.Namespace) -> int:
    names = known_names()
    for name in options.names:
        if name not in names:
            raise InputError(unknown("backend", name, names, "mla-conformance backends"))
    with passing_run(RunRequest.of(options.names or names, tier="smoke", device=options.device)) as run, run:
        run.prepare()
    found = sorted(run.facts, key=lambda facts: names.index(facts.name.partition("[")[0]))
    if options.names:
        for facts in found:
            state = "unavailable: " + "; ".join(facts.reasons) if facts.reasons else "available"
            say_wrapped(f"{facts.name} {state}", "    ")
        return 0
    lacking = grouped(found, lambda facts: _NO_GPU if any(map(_LACKS_GPU, facts.reasons)) else "; ".join(facts.reasons))
    for reasons, group in sorted(lacking.items(), key=lambda each: (bool(each[0]), -len(each[1]))):
        state = f"unavailable: {reasons}" if reasons else "available"
        say_wrapped(f"{len(group)} {state}:", "    ")
        for package, some in (grouped(group, _package) if reasons == _NO_GPU else {"": group}).items():
            further = " " * (8 if package else 4)
            say(*side_by_side([facts.name for facts in some], ", ", columns(), f"    {package}", further))
    say_wrapped("certify without --backend leaves out those with a [variant]", "    ")
    say("what one of them needs: mla-conformance backends NAME")
    return 0


def _package(facts: BackendFacts) -> str:
    return next((f"{found[1]}: " for found in map(_LACKS_PACKAGE, facts.reasons) if found), "none: ")


def list_capabilities(options: argparse.Namespace) -> int:
    if options.backend is not None:
        return _list_declared(options.backend, options.device)
    if options.excluded:  # of each role, the pairs of classes that no case can hold, by the rule that excludes them
        for space in SPACES.values():
            excluded = Pairs.every(space) - Pairs(space, space.rows(listed(space)))
            say(f"{space.role}: {len(excluded)} pairs excluded")
            for reason, pairs in grouped(excluded, space.reason).items():
                say(*wrapped(f"{reason}: {len(pairs)} pairs", _WIDTH, "  ", "    "))
                for value, with_it in grouped(pairs, lambda pair: pair[0]).items():
                    others = ", ".join("=".join(other) for _, other in with_it)
                    say(*wrapped(f"{'='.join(value)} with {others}", _WIDTH, "    ", "      "))
        return 0
    roles = {name: sorted({case.role for case in capability.cases}) for name, capability in CAPABILITIES.items()}
    of_one = {name: found[0] if len(found) == 1 else "several roles" for name, found in roles.items()}
    for role, group in grouped(CAPABILITIES.values(), lambda capability: of_one[capability.name]).items():
        say(f"{role}:")
        for capability in group:
            count = f"{len(capability.cases):>3} cases"
            say_wrapped(f"{capability.name:<18} {count} · SPEC {capability.clause} · {capability.definition}", _VALUES)
    say(*tier_lines())
    return 0


def _list_declared(reference: str, device: str | None) -> int:
    from mla_conformance.engine.machine import find_device  # with torch, as the others
    from mla_conformance.trials.facts import region_of
    from mla_conformance.trials.subject import Subject

    request = RunRequest.of([reference], device=device)
    found = find_device(request.device)
    if found is None:
        raise InputError("--device cuda: torch sees no CUDA device; use --device cpu")
    sys.path.append(str(Path.cwd()))  # where a plug-in's module often is
    (backend,) = request.backends
    subject = Subject(backend, found)
    if subject.unavailable:
        raise InputError(f"{subject.backend.name} cannot run here: {'; '.join(subject.unavailable)}")
    for space in (space for space in SPACES.values() if space.role in subject.roles):
        region = region_of(subject, space, FITTED[Tier.NIGHTLY])
        claimed, pairs = sum(map(len, region.classes.values())), len(Pairs(space, region.rows))
        said = f"{claimed} of {len(space.values)} classes and {pairs:,} pairs claimed, {len(region.cases)} cases fitted"
        lines = wrapped(f"{subject.backend.name} {space.role}: {said}", _WIDTH, further="  ")
        if region.triples:
            triples, before, held, vain = region.triples
            left = triples - held - vain
            without = f"no row found for {vain:,}, {left:,} left out behind {FITTED[Tier.NIGHTLY]} cases"
            said = f"{triples:,} triples claimed two by two: listed {before:,}, nightly {held:,}; {without}"
            lines += wrapped(said, _WIDTH, "  ", "    ")
        if refused := [(name, label) for name, label in space.values if label not in region.classes[name]]:
            lines += wrapped(f"refused on {found.type}: {', '.join(map('='.join, refused))}", _WIDTH, "  ", "    ")
        say(*lines)
    return 0


def list_models(options: argparse.Namespace) -> int:
    if options.docs:
        lines = []
        for name in model_names():
            for reading in (each for each in stored_model(name).readings if each.unconfirmed):
                figures = ", ".join(f"`{figure}`" for figure in reading.config)
                lines.append(f"- `{name}`: {figures}: {reading.source}; **unconfirmed**: {reading.unconfirmed}")
        write_section(options.docs, "models", "\n".join(lines))
    elif options.name:
        for line in _detail(find_model(options.name), stored_model(options.name)):
            say_wrapped(line, _VALUES)
    else:
        for name in model_names():
            stored, profile = stored_model(name), find_model(name)
            summary = [f"{profile.name:<18} {profile.heads} heads", f"P-R-V-L {'-'.join(map(str, profile.dims))}"]
            summary += [f"scale {profile.scale} %", f"rope {profile.rope}"]
            summary += [*(f"{count} × {kind}" for kind, count in profile.layers), *_selection(profile)]
            summary += [f"cache {', '.join(profile.cache_layouts)}"]
            say(*side_by_side(summary, " · ", columns(), further=" " * 8))
            say_wrapped(f"{' ' * 8}{stored.published}: {_confirmed(stored)}", " " * 16)
        say_wrapped(_EXPLAINED, "    ")
    return 0


def _confirmed(stored: StoredModel) -> str:
    confirmed = f"{len(stored.config) - 1 - len(stored.unconfirmed)} figures confirmed"
    return confirmed + (f", unconfirmed: {', '.join(stored.unconfirmed)}" if stored.unconfirmed else "")


def _detail(profile: ModelProfile, stored: StoredModel) -> Iterator[str]:
    facts = {
        "architecture": profile.model_type,
        "published": f"{stored.published}: {_confirmed(stored)}",
        "hidden size": str(profile.hidden_size),
        "heads": str(profile.heads),
        "P-R-V-L": "-".join(map(str, profile.dims)),
        "query latent": str(profile.q_lora_rank or "none"),
        "softmax scale": f"{profile.scale} % of (P + R)^-1/2",
        "rope": profile.rope,
        "layers": ", ".join(f"{count} × {kind}" for kind, count in profile.layers),
        "selection": "; ".join(_selection(profile)) or "none: all keys are attended to",
        "outside kernels": "; ".join(("norms of the latents", "rotation", *profile.outside)),
    }
    yield profile.name
    for name, value in facts.items():
        yield f"  {name:<16} {value}"
    for reading in stored.readings:
        yield f"  {'unconfirmed' if reading.unconfirmed else 'confirmed':<16} {', '.join(reading.config)}"
        yield f"  {'':<16} {reading.source}{f'; {reading.unconfirmed}' if reading.unconfirmed else ''}"
    yield f"  {'--tp':<16} {', '.join(map(str, profile.tensor_parallel_sizes))}"
    for cache, layouts in profile.cache_layouts.items():
        count = len(cases_of(profile, Deployment.of(profile, 1, cache)))
        yield f"  --kv-cache {cache:<12} cache layouts {', '.join(layouts)}; {count} cases at --tp 1"


def _selection(profile: ModelProfile) -> list[str]:
    selection = profile.selection
    if selection is None:
        return []
    found = [f"window {selection.topk}" if selection.second else f"top {selection.topk}"]
    found += [f"indexer {selection.index_heads} × {selection.index_dim}, top {selection.index_topk}"]
    found += [f"second cache, lists of {' or '.join(map(str, selection.second))}"] if selection.second else []
    return found + (["sinks"] if selection.sinks else [])


def print_completion(options: argparse.Namespace) -> int:
    import shtab

    backends = [backend.name for backend in known_backends()]
    known = {"backend": backends, "require": backends, "capability": list(CAPABILITIES)}
    for _, command in commands_of(options.parser):
        for action in command._actions:
            if action.type is Path:  # shtab reads these attributes; the parser parses nothing any more
                action.complete = shtab.DIRECTORY if action.metavar == "DIR" else shtab.FILE  # type: ignore[attr-defined]
            else:
                action.choices = known.get(action.dest, action.choices)
    put(shtab.complete(options.parser, options.shell))
    return 0


def tier_lines() -> Iterator[str]:
    for tier in Tier:
        further = f", and up to {FITTED[tier]} a role fitted for triples" if tier in FITTED else ""
        yield f"tier {tier:<8} {sum(len(entry.select(tier)) for entry in CAPABILITIES.values()):>5} cases{further}"
    for space in SPACES.values():
        rows = {case: tuple(space.rows((case,))) for case in listed(space)}
        held = Pairs(space, chain.from_iterable(rows.values()))  # the full tier holds every pair that is possible
        smoke = [*counted(space, Tier.SMOKE), *CAPABILITIES[space.capability].smoke]
        easy = [case for case in rows if work_of(case) <= CPU_WORK]
        in_smoke, in_easy = (len(Pairs(space, chain.from_iterable(map(rows.__getitem__, of)))) for of in (smoke, easy))
        pairs = f"smoke {in_smoke:,}, full {len(held):,}, {len(held) - in_easy:,} due on a GPU"
        yield f"  {space.role:<7} {len(held):,} pairs possible: {pairs}"
        left = Triples(held)  # possible two by two; the nightly tier holds more of what a backend declares
        possible = len(left)
        for row in chain.from_iterable(rows.values()):
            left.drop(row)
        yield f"  {'':<7} {possible:,} triples of these: full {possible - len(left):,}"

"""The kill matrix and the rates, as data, as text for a terminal, and as the table of the README."""

import hashlib
import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from importlib.resources import files
from pathlib import Path
from typing import Any

from mla_conformance.cases.capabilities import CAPABILITIES
from mla_conformance.defects.known import FAMILIES, KnownDefect, known_defects
from mla_conformance.defects.matrix import CHOSEN, NORMAL, OURS, Outcome, kernels
from mla_conformance.defects.not_emulated import NOT_EMULATED
from mla_conformance.judging.sources import judging_sources

_EMULATION = ("eager", "eager_decode", "latent_entries", "online_softmax")
"""The kernels that the known defects are made from."""


@dataclass(frozen=True)
class Rate:
    """How a rule fares on one kind of data.

    Attributes:
        rule: the rule.
        data: the data.
        killed: known defects that it rejects on a case on which it accepts the honest kernel.
        false_alarms: honest (kernel, case) pairs that it rejects.
        honest: honest pairs that it was asked about.
        wrong: known defects that it was asked about.
    """

    rule: str
    data: str
    killed: int
    false_alarms: int
    honest: int
    wrong: int


@dataclass(frozen=True)
class DefectReport:
    """The outcome of a run over all defects.

    Attributes:
        digest: of everything that decides a verdict.
        tier: cases that were run.
        kills: for each defect the capabilities that kill it, in the order of the vocabulary.
        false_alarms: honest (kernel, case) pairs that the suite fails.
        honest_pairs: honest pairs in the run.
        rates: of this suite's rules and of others', on the same plain results.
    """

    digest: str
    tier: str
    kills: dict[str, list[str]]
    false_alarms: list[str]
    honest_pairs: int
    rates: list[Rate]

    @property
    def survivors(self) -> list[str]:
        """Defects that their expected capability does not kill, or that something unrelated kills first."""
        return [entry.id for entry in known_defects().values() if not as_expected(entry, self.kills[entry.id])]

    def to_json(self) -> dict[str, Any]:
        """Plain data."""
        return asdict(self)

    @staticmethod
    def from_json(data: dict[str, Any]) -> "DefectReport":
        """The report that :meth:`to_json` wrote."""
        return DefectReport(**{**data, "rates": [Rate(**rate) for rate in data["rates"]]})


def as_expected(entry: KnownDefect, killers: Sequence[str]) -> bool:
    """Killed by the expected capability, and before it by related ones at most."""
    if entry.killed_by not in killers:
        return False
    return set(killers[: list(killers).index(entry.killed_by)]) <= set(entry.related)


def deciding_digest() -> str:
    """Digest of the cases, the judge, the suite's procedures, the data and the defects."""
    digest = hashlib.sha256()
    for capability in CAPABILITIES.values():
        digest.update("\n".join(case.id for case in capability.cases).encode())
    folder = Path(str(files("mla_conformance")))
    names = (*FAMILIES, "honest", "honest_decode", "honest_layer", "layered", "split_keys", "eager_layer")
    sources = [*judging_sources(), *(folder / "defects" / f"{name}.py" for name in names)]
    backends = Path(str(files("mla_conformance.backends")))
    sources += [backends / f"{name}.py" for name in _EMULATION]
    sources.append(Path(str(files("mla_conformance.reference"))) / "error_budget.py")
    for source in sorted(sources, key=lambda source: source.name):
        digest.update(source.read_bytes())
    return digest.hexdigest()[:16]


def summarise(outcomes: Iterable[Outcome], tier: str, digest: str) -> DefectReport:
    """Count what a run over all kernels showed; ``digest`` is of when it began."""
    rows = list(outcomes)
    honest = {kernel.name for kernel in kernels() if kernel.honest}
    killed = {(row.kernel, row.capability) for row in rows if row.killed}
    kills = {id: [name for name in CAPABILITIES if (id, name) in killed] for id in known_defects()}
    alarms = [f"{row.kernel} on {row.case}: {row.message}" for row in rows if row.killed and row.kernel in honest]
    pairs = sum(row.kernel in honest for row in rows)
    return DefectReport(digest, tier, kills, alarms, pairs, list(_rates(rows, honest)))


def _rates(rows: Sequence[Outcome], honest: set[str]) -> Iterator[Rate]:
    asked = sorted({key for row in rows for key in row.asked}, key=lambda key: (key[0] != OURS, key))
    eager = [row for row in rows if row.kernel == "EagerPrefillBackend"]
    accepted = {(row.case, key) for row in eager for key in row.asked - row.rejected}
    for key in asked:
        wrong = {row.kernel for row in rows if key in row.rejected and (row.case, key) in accepted}
        of_honest = [row for row in rows if row.kernel in honest and key in row.asked]
        defects = {row.kernel for row in rows if key in row.asked} - honest
        yield Rate(
            *key, len(wrong & defects), sum(key in row.rejected for row in of_honest), len(of_honest), len(defects)
        )


def terminal_lines(report: DefectReport) -> Iterator[str]:
    """The matrix, a defect a line, then the rates."""
    for entry in known_defects().values():
        killers = report.kills[entry.id]
        sign = "✔" if as_expected(entry, killers) else "✘"
        others = [name for name in killers if name != entry.killed_by]
        yield f"{sign} {entry.family:<12} {entry.id:<52} {entry.killed_by:<18} also: {', '.join(others) or '–'}"
    yield from (f"FALSE ALARM {alarm}" for alarm in report.false_alarms)
    yield f"{len(NOT_EMULATED)} reported bugs of these layers are not emulated:"
    yield from (f"  {id}: {reason}" for id, reason in NOT_EMULATED.items())
    for rate in report.rates:
        yield (
            f"{rate.rule:<22} {rate.data:<18} kills {rate.killed:>2} of {rate.wrong} by values alone, "
            f"{rate.false_alarms} false alarms of {rate.honest}"
        )
    yield closing_line(report)


def closing_line(report: DefectReport) -> str:
    """The whole suite in one line."""
    alive = len(report.survivors)
    total = len(report.kills)
    return (
        f"{total - alive} of {total} known defects killed as expected · {len(report.false_alarms)} false alarms of "
        f"{report.honest_pairs} honest (kernel, case) pairs · tier {report.tier}"
    )


_TABLE_NOTE = """The same plain results (output and LSE of single bf16 calls) under the rules of other projects' tests.
A defect counts as killed where the rule also accepts the honest kernel on the same case. State, padding, quantised
output and refusals are outside of every rule here, which is why the suite has procedures for them; kernels with an
e4m3 P are left out, because these rules were written for 16 bits (FlashInfer's for fp16)."""


def markdown(report: DefectReport) -> str:
    """The table of the README."""
    by_rule: dict[str, dict[str, Rate]] = {}
    for rate in report.rates:
        by_rule.setdefault(rate.rule, {})[rate.data] = rate
    rest = f"{len(NOT_EMULATED)} further reports are not emulated; `mla-conformance defects` says why."
    head = f"| rule | killed, {NORMAL} data | false alarms | killed, {CHOSEN} | false alarms |"
    lines = [f"{closing_line(report)}. {rest}", "", _TABLE_NOTE, "", head, "|---|---|---|---|---|"]
    for rule, rates in by_rule.items():
        cells = [
            f"{rates[d].killed}/{rates[d].wrong} | {rates[d].false_alarms}/{rates[d].honest}" for d in (NORMAL, CHOSEN)
        ]
        lines.append(f"| {rule} | {' | '.join(cells)} |")
    return "\n".join(lines)


_BEGIN, _END = "<!-- defects:begin -->", "<!-- defects:end -->"


class SectionError(ValueError):
    """A text that lacks the markers of the table, or has them more than once."""


def section(text: str) -> str:
    """What stands between the markers of the table.

    Raises:
        SectionError: the text does not hold each marker once, in their order.
    """
    before, begin, rest = text.partition(_BEGIN)
    found, end, after = rest.partition(_END)
    if not begin or not end or any(marker in before + found + after for marker in (_BEGIN, _END)):
        raise SectionError(f"expected {_BEGIN} and {_END}, once each and in this order")
    return found


def with_section(text: str, report: DefectReport) -> str:
    """The text with the report's table between the markers.

    Raises:
        SectionError: the text does not hold each marker once, in their order.
    """
    return text.replace(f"{_BEGIN}{section(text)}{_END}", f"{_BEGIN}\n{markdown(report)}\n{_END}")


def stored() -> DefectReport:
    """The report of the last full run that was committed."""
    text = (files("mla_conformance.fixtures") / "defects.json").read_text(encoding="utf-8")
    return DefectReport.from_json(json.loads(text))

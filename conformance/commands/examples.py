"""What ``--help`` of each command ends with: how it is called, and what its exit status says."""

import argparse
from collections.abc import Iterator
from textwrap import fill

_ENDED = "129, 130, 143 ended by SIGHUP, Ctrl-C, SIGTERM"
_JUDGED = f"0 all judged capabilities hold · 1 one failed · 2 usage · 3 nothing, or not all, could be judged · {_ENDED}"
_TOLD = "0 told · 2 usage"
_WIDTH = 80

EXAMPLES: dict[str, tuple[tuple[str, ...], str]] = {
    "certify": (
        (
            "--backend TORCH_SDPA",
            "--backend my_backend.py:MyBackend --capability lse --tier smoke",
            "--resume build/mla-conformance/latest",
        ),
        _JUDGED,
    ),
    "watch": (("my_backend.py:MyBackend", "my_backend.py:MyBackend --capability lse"), "130 Ctrl-C · 2 usage"),
    "replay": (
        ("'lse:q=[4]' --backend my_backend.py:MyBackend", "--report build/mla-conformance/latest --failure 2"),
        _JUDGED,
    ),
    "minimize": (
        ("'lse:q=[64,3]' --backend my_backend.py:MyBackend --out small.json",),
        f"0 a simplest case was found · 2 usage, or the case does not fail · 3 no process can be started · {_ENDED}",
    ),
    "export": (
        ("'lse:q=[4]' --backend my_backend.py:MyBackend --out repro.py",),
        "0 written · 2 usage, or one call alone does not show it",
    ),
    "backends": (("", "--device cpu"), _TOLD),
    "capabilities": (("", "--backend TORCH_SDPA"), _TOLD),
    "models": (("", "deepseek-r1"), _TOLD),
    "cheats": (("", "--out cheats.json"), "0 all fare as expected · 1 one does not · 2 usage"),
    "defects": (
        ("--tier smoke", "--out defects.json"),
        "0 every wrong kernel is found and no honest one · 1 not so · 2 usage",
    ),
    "bench": (("--suite TORCH_SDPA --tier smoke", "--kernels --device cuda"), "0 measured · 2 usage"),
    "gate": (
        (
            "reports/TORCH_SDPA reports/FLASHMLA --require TORCH_SDPA FLASHMLA --must-pass",
            "after/report.json --baseline before/report.json --require-tier smoke",
        ),
        "0 open · 1 closed · 2 usage",
    ),
    "expectations update": (
        ("build/mla-conformance/latest/report.json --dir expectations",),
        "0 rewritten · 2 usage",
    ),
    "verify": (
        ("submissions/2026.4", "certificate.json --rerun 20 --device cuda"),
        "0 all hold · 1 one does not · 2 usage",
    ),
    "mustpass": (("",), _TOLD),
    "bump": (
        ("flashinfer-python==0.6.13 flashinfer-python==0.7.2.post1 --backend FLASHINFER",),
        "0 innocent · 1 something got worse · 2 usage · 3 not everything could be judged",
    ),
    "report render": (
        ("build/mla-conformance/latest/report.json", "report.json --format html --out report.html"),
        _TOLD,
    ),
    "report diff": (("before.json after.json --drift 0.2",), "0 no regression · 1 regressions · 2 usage"),
    "report merge": (
        ("1/report.json 2/report.json --out report.json",),
        "0 a verdict on every case · 2 usage, or not shards of one list · 3 cases lack",
    ),
    "report schema": (("",), _TOLD),
    "scoreboard": (
        ("submissions --out site", "before.json after.json --out site"),
        "0 written · 1 written without records that cannot be read · 2 usage",
    ),
    "completion": (("bash > ~/.local/share/bash-completion/completions/mla-conformance",), _TOLD),
}
"""Arguments of calls that make sense, and exit statuses, by the words behind the program's name."""


def add_examples(parser: argparse.ArgumentParser) -> None:
    """Give every command of a parser the end of its help."""
    for words, command in commands_of(parser):
        calls, statuses = EXAMPLES[words]
        lines = [f"  {parser.prog} {words} {call}".rstrip() for call in calls]
        status = fill(f"exit status: {statuses}", _WIDTH, subsequent_indent="  ")
        command.epilog = "\n".join(["examples:", *lines, "", status])
        command.formatter_class = argparse.RawDescriptionHelpFormatter


def commands_of(parser: argparse.ArgumentParser, words: str = "") -> Iterator[tuple[str, argparse.ArgumentParser]]:
    """The parsers that carry something out, with the words that lead to each."""
    rooms = [action for action in parser._actions if isinstance(action, argparse._SubParsersAction)]
    if not rooms:
        yield words, parser
    for room in rooms:
        for word, inner in room.choices.items():
            yield from commands_of(inner, f"{words} {word}".lstrip())

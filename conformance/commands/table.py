"""Every command, declared once: what it is called, what it takes, and what carries it out when it is asked for."""

from pathlib import Path

from mla_conformance.commands.options import (
    Command,
    count,
    drift,
    extent,
    flag,
    number,
    option,
    path,
    seconds,
    several,
    workers,
)
from mla_conformance.report.commands import FORMATS
from mla_conformance.report.compare import DRIFT
from mla_conformance.traits.sanitizer import TOOLS

_REFERENCE = "NAME|module:Class|file.py:Class"
_TIERS = "smoke|full|nightly"
_ENDED = "129, 130, 143 ended by SIGHUP, Ctrl-C, SIGTERM"
_JUDGED = f"0 all judged capabilities hold · 1 one failed · 2 usage · 3 nothing, or not all, could be judged · {_ENDED}"
_TOLD = "0 listed · 2 usage"

_CASE = option("case", "CASE_ID|FILE.json")
_DEVICE = option("--device", "cpu|cuda")
_BACKEND = option("--backend", _REFERENCE)
_NEEDED_BACKEND = option("--backend", _REFERENCE, required=True)
_EXPECTATIONS = several("--expectations", "DIR", type=Path)
_TIMEOUT = option("--timeout", "TIME", "end a process whose case takes longer", type=seconds)
_JSON = path("--out", "FILE", "also write the outcome as JSON")
_SELECTION = (
    several("--backend", _REFERENCE),
    several("--capability", "NAME"),
    option("--tier", _TIERS, "by default full"),
    _DEVICE,
    path("--cases", "DIR", "judge the case files of a folder instead"),
)

GROUPS = {"expectations": "known failures with reasons", "report": "show, compare and merge report.json files"}
"""Words that begin several commands."""

COMMANDS = (
    Command(
        "certify",
        "judge backends",
        "mla_conformance.commands.certify:certify",
        (
            *_SELECTION,
            option(
                "--explore",
                "N|TIME",
                "judge N drawn cases of each role as well, or as many as 10m allow; what fails is made small",
                type=extent,
            ),
            option("--salt", "TEXT", "draw all inputs anew, those that this text stands for"),
            option("--shard", "I/N", "judge one part of the cases; report merge joins the parts"),
            path("--durations", "REPORT", "balance the shards by an earlier run"),
            (
                path("--out", "DIR", "by default a new folder of build/mla-conformance, and latest beside it"),
                path("--resume", "DIR", "go on with the interrupted run of this folder"),
            ),
            flag("--fresh", "with --out: keep an unfinished run beside, and start another"),
            _TIMEOUT,
            option("--deadline", "TIME", "end the run after so long, as 40m", type=seconds),
            option("--give-up-after", "N", "equal failures of a backend's process, 5", type=count, default=5),
            (
                option("--model", "NAME", "judge what a deployment of this model calls; see models"),
                path("--config", "PATH", "the same of the model of this config.json"),
            ),
            option("--tp", "N", "ranks that share the model's heads, 1", type=count),
            option("--kv-cache", "NAME", "what the model's cache is called, auto"),
            option("-n --workers", "N", "processes that run cases, at most four a core", type=workers),
            flag("--bitwise", "tell when a row's bits are the same, too"),
            flag("--accuracy", "tell how errors are spread, too"),
            option(
                "--sanitize",
                "TOOL",
                "instead, call small cases under a tool of compute-sanitizer, on a GPU",
                choices=TOOLS,
            ),
            flag("--apart", "inputs, kernel and judge in processes of their own, as for a certificate"),
            flag("--json", "print the report as JSON instead of text"),
            _EXPECTATIONS,
            (
                path("--certificate", "FILE", "certify a complete run of one backend"),
                path("--submission", "DIR", "its record as a folder to hand in, below DIR"),
                path("--record", "FILE", "the same for a kernel that lacks must-pass cases, and lists them"),
            ),
            path("--sign", "KEY", "sign what is issued with an SSH key"),
        ),
        (
            "--backend TORCH_SDPA",
            "--backend my_backend.py:MyBackend --capability lse --tier smoke",
            "--resume build/mla-conformance/latest",
        ),
        _JUDGED,
    ),
    Command(
        "watch",
        "judge a backend whenever its file changes, what failed last first",
        "mla_conformance.commands.watch:watch",
        (
            option("backend", "file.py:Class"),
            several("--capability", "NAME", "by default all"),
            _DEVICE,
            _TIMEOUT,
        ),
        ("my_backend.py:MyBackend", "my_backend.py:MyBackend --capability lse"),
        "130 Ctrl-C · 2 usage · 3 no process can be started, or nobody reads what is printed",
    ),
    Command(
        "replay",
        "run one case again",
        "mla_conformance.commands.replay:replay",
        (
            option("case", "CASE_ID|FILE.json", nargs="?"),
            path("--report", "FILE", "run a failure of this report again"),
            option("--failure", "K", "which one, counted from 1", type=count, default=1),
            several("--after", "CASE_ID", "run this case before it, in the same process"),
            option("--salt", "TEXT", "draw the inputs that this text stands for"),
            _BACKEND,
            _DEVICE,
            option("--timeout", "TIME", type=seconds),
            option("--repeats", "N", "instead, make so many calls and compare their bits, to find a race", type=count),
            path("--dump", "DIR", "also write operands, result, golden result and error"),
        ),
        ("'lse:q=[4]' --backend my_backend.py:MyBackend", "--report build/mla-conformance/latest --failure 2"),
        _JUDGED,
    ),
    Command(
        "minimize",
        "find the simplest case that fails in the same way",
        "mla_conformance.commands.replay:minimize_case",
        (
            _CASE,
            option("--salt", "TEXT", "draw the inputs that this text stands for"),
            _NEEDED_BACKEND,
            _DEVICE,
            option("--timeout", "TIME", "a longer case hangs", type=seconds, default=60.0),
            option("--tries", "N", "candidates at most", type=count, default=500),
            path("--out", "FILE", "receives the case"),
        ),
        ("'lse:q=[64,3]' --backend my_backend.py:MyBackend --out small.json",),
        f"0 a simplest case was found · 2 usage, or the case does not fail · 3 no process can be started · {_ENDED}",
    ),
    Command(
        "export",
        "write one call as a script that needs torch and the library alone, or a failure as an issue",
        "mla_conformance.commands.export:export",
        (
            option("case", "CASE_ID|FILE.json", nargs="?"),
            path("--issue", "REPORT", "instead, a failure of this report or record as the text of an issue"),
            option("--failure", "K", "which one, counted from 1 as certify lists causes", type=count, default=1),
            _BACKEND,
            _DEVICE,
            path("--out", "FILE", "receives the script; an issue is printed without"),
        ),
        (
            "'lse:q=[4]' --backend my_backend.py:MyBackend --out repro.py",
            "--issue build/mla-conformance/latest --failure 2",
        ),
        "0 written · 2 usage, or one call alone does not show it",
    ),
    Command(
        "backends",
        "list the backends, and why one cannot run here",
        "mla_conformance.commands.listing:list_backends",
        (_DEVICE,),
        ("", "--device cpu"),
        _TOLD,
    ),
    Command(
        "capabilities",
        "list the capabilities with their definitions",
        "mla_conformance.commands.listing:list_capabilities",
        (
            (
                option("--backend", _REFERENCE, "instead, what it declares of each role, and the cases fitted to it"),
                flag("--excluded", "instead, the pairs that no case can hold, with the reason"),
            ),
            option("--device", "cpu|cuda", "of --backend"),
        ),
        ("", "--backend TORCH_SDPA", "--excluded"),
        _TOLD,
    ),
    Command(
        "models",
        "list the models that certify --model knows, or all of one",
        "mla_conformance.commands.listing:list_models",
        (
            option("name", "NAME", nargs="?"),
            flag("--proof", "instead, hold the golden layer against their own code"),
            (
                path("--oracle", "FILE", "of --proof: against an author's own code, this file, not transformers"),
                path("--docs", "FILE", "rewrite its section: where figures were read, or with --proof its tables"),
            ),
        ),
        ("", "deepseek-r1", "--proof --oracle DeepSeek-V3/inference/model.py"),
        "0 listed, or all agree · 1 a difference of --proof is too large · 2 usage",
    ),
    Command(
        "defects",
        "judge the judge: known wrong kernels and honest ones",
        "mla_conformance.commands.defects:run_defects",
        (
            option("--tier", _TIERS, default="full"),
            _JSON,
            path("--page", "FILE", "rewrite the section between this file's markers"),
        ),
        ("--tier smoke", "--out defects.json"),
        "0 every wrong kernel is found and no honest one · 1 not so · 2 usage",
    ),
    Command(
        "cheats",
        "kernels that cheat, and what catches them",
        "mla_conformance.commands.defects:try_cheats",
        (_JSON, path("--table", "FILE", "rewrite the section between this file's markers")),
        ("", "--out cheats.json"),
        "0 all fare as expected · 1 one does not · 2 usage",
    ),
    Command(
        "bench",
        "time and memory of the golden pass and of the suite, as ratios",
        "mla_conformance.commands.bench:run_bench",
        (
            _DEVICE,
            flag("--scale", "the golden pass over contexts and numbers of heads"),
            flag("--sparse", "the golden sparse pass beside a dense one with a mask"),
            flag("--kernels", "throughput of the backends that can run here"),
            option("--suite", "NAME", "where the time of a run on this backend goes"),
            option("--runs", _REFERENCE, "runs of each backend, of all, and of all by one worker", nargs="+"),
            flag("--apart", "of --runs: all of them once more, judged apart"),
            option("--tier", _TIERS, "of --suite and --runs", default="smoke"),
            several("--capability", "NAME", "of --suite and --runs, else all"),
            several("--case", "ID", "of --suite: this case, not a tier"),
        ),
        ("--suite TORCH_SDPA --tier smoke", "--kernels --device cuda"),
        "0 measured · 2 usage",
    ),
    Command(
        "gate",
        "decide by reports whether a change may be merged",
        "mla_conformance.commands.gating:gate",
        (
            path("reports", "REPORT", nargs="+"),
            several("--baseline", "REPORT", "of an earlier run", type=Path),
            _EXPECTATIONS,
            option("--require", _REFERENCE, "backends that have to be judged", nargs="+", action="extend", default=[]),
            option("--require-tier", f"{_TIERS}|none", "of which every case needs a verdict, full", default="full"),
            option(
                "--must-pass",
                "FILE|NAME[@VERSION]",
                "what has to be passed: by default shipped, the suite's own list; or profiles of it, which then bind",
                nargs="*",
            ),
            option("--max-drift", "SHARE", "close on a larger growth in error-budget use", type=drift),
            option(
                "--require-bitwise",
                "QUESTION",
                "a row's bits have to be the same, of certify --bitwise: repeats, alone, pages …",
                nargs="+",
                default=[],
            ),
            several("--allow-suite", "VERSION", "take the verdicts of reports of this other suite, too"),
        ),
        (
            "reports/TORCH_SDPA reports/FLASHMLA --require TORCH_SDPA FLASHMLA --must-pass",
            "after/report.json --baseline before/report.json --require-tier smoke",
        ),
        "0 open · 1 closed · 2 usage",
    ),
    Command(
        "expectations update",
        "rewrite a folder of expectations from what a report found",
        "mla_conformance.commands.gating:update_expectations",
        (path("report", "REPORT"), path("--dir", "DIR", required=True)),
        ("build/mla-conformance/latest/report.json --dir expectations",),
        "0 rewritten · 2 usage",
    ),
    Command(
        "verify",
        "check certificates and submissions, and what of them is here",
        "mla_conformance.commands.verify:verify",
        (
            path("certificates", "FILE|DIR", nargs="+"),
            option("--rerun", "K", "also run K random judged cases of each again", type=number(0), default=0),
            option("--backend", _REFERENCE, "what to run again"),
            _DEVICE,
            option("--salt", "TEXT", "what their inputs are drawn with, by default something new"),
            flag("--signature", "each has to be signed by one of the --signers"),
            path("--signers", "FILE", "allowed signers, as ssh-keygen describes them"),
        ),
        ("submissions/2026.4", "certificate.json --rerun 20 --device cuda"),
        "0 all hold · 1 one does not · 2 usage",
    ),
    Command(
        "mustpass",
        "print the must-pass list of this suite version",
        "mla_conformance.commands.gating:list_must_pass",
        (),
        ("",),
        _TOLD,
    ),
    Command(
        "bump",
        "judge two versions of a library, and list what the new one changes",
        "mla_conformance.commands.bump:bump",
        (
            option("before", "NAME==OLD", "as flashinfer-python==0.6.13"),
            option("after", "NAME==NEW"),
            *_SELECTION,
            path("--find-links", "DIR", "install from these wheels, and no index"),
            path("--markdown", "FILE", "write the outcome for a pull request, too"),
            path("--out", "DIR", "new or empty; by default one of build/mla-conformance"),
        ),
        ("flashinfer-python==0.6.13 flashinfer-python==0.7.2.post1 --backend FLASHINFER",),
        "0 no regression · 1 something got worse · 2 usage · 3 not everything could be judged",
    ),
    Command(
        "report render",
        "a report for people",
        "mla_conformance.report.commands:render",
        (
            path("report", "REPORT"),
            option("--format", None, choices=FORMATS, default="text"),
            path("--out", "FILE", "write a file instead of standard output"),
        ),
        ("build/mla-conformance/latest/report.json", "report.json --format html --out report.html"),
        _TOLD,
    ),
    Command(
        "report diff",
        "what changed; exit status 1 for regressions",
        "mla_conformance.report.commands:diff",
        (
            path("before", "BEFORE"),
            path("after", "AFTER"),
            option("--drift", "SHARE", "growth in error-budget use that is a regression", type=drift, default=DRIFT),
        ),
        ("before.json after.json --drift 0.2",),
        "0 no regression · 1 regressions · 2 usage",
    ),
    Command(
        "report merge",
        "one report from those of all shards",
        "mla_conformance.report.commands:merge",
        (path("shards", "SHARD", nargs="+"), path("--out", "FILE", required=True)),
        ("1/report.json 2/report.json --out report.json",),
        "0 a verdict on every case · 2 usage, or not shards of one list · 3 cases lack",
    ),
    Command(
        "report schema",
        "print the JSON Schema of report.json",
        "mla_conformance.report.commands:print_schema",
        (),
        ("",),
        _TOLD,
    ),
    Command(
        "scoreboard",
        "records of many kernels as a static site",
        "mla_conformance.scoreboard.site:scoreboard",
        (
            path("records", "FILE|DIR", "records, submissions, or reports of certify --model", nargs="+"),
            path("--out", "DIR", "receives the site", required=True),
        ),
        ("submissions --out site", "before.json after.json --out site"),
        "0 written · 1 written without records that cannot be read · 2 usage",
    ),
    Command(
        "completion",
        "print a script that completes this command line in a shell",
        "mla_conformance.commands.listing:print_completion",
        (option("shell", None, choices=("bash", "zsh", "tcsh")),),
        ("bash > ~/.local/share/bash-completion/completions/mla-conformance",),
        _TOLD,
    ),
)

"""Every command, declared once: what it is called, what it takes, and what carries it out when it is asked for."""

from functools import partial

from mla_conformance.commands.parser import Command, Option, number, several
from mla_conformance.commands.reports import FORMATS
from mla_conformance.engine.machine import machine_cores
from mla_conformance.engine.request import DEVICES
from mla_conformance.judging.traits import Question
from mla_conformance.report.differences import DRIFT
from mla_conformance.traits.sanitizer import TOOLS
from mla_conformance.vocabulary.capabilities import Tier

_NAMES = "NAME, module:Class, file.py:Class or hub:REPOSITORY"
_TIERS = "|".join(Tier)
_SHELLS = ("bash", "zsh", "fish", "tcsh")
_ENDED = "129, 130, 143 ended by SIGHUP, Ctrl-C, SIGTERM"
_JUDGED = f"0 all judged capabilities hold; 1 one failed; 2 usage; 3 nothing, or not all, could be judged; {_ENDED}"

_WORKERS = partial(number, most=4 * machine_cores())  # more would wait for each other, until there is no memory left
_CASE = partial(Option, "case CASE_ID|FILE.json", "a case's id, or its file")
_USES = f"--device {'|'.join(DEVICES)}"
_DEVICE = Option(_USES, "by default a GPU, if present")
_BACKEND = partial(Option, "--backend BACKEND", _NAMES)
_USUAL = "by default all without a [variant] but what compiles for minutes and, on a GPU, EAGER"
_BACKENDS = several("--backend BACKEND", f"{_NAMES}; {_USUAL}")
_CAPABILITIES = several("--capability NAME", "judge this capability only; see capabilities")
_EXPECTATIONS = several("--expectations DIR", "known failures, with reasons")
_SALT = Option("--salt TEXT", "draw other inputs of the same cases, from this text")
_ROLE = Option("--role FILE.py", "take up the role that this file defines")
_SECTION = "rewrite the section between this file's markers"
_REPORT = Option("report REPORT", "report.json, or a run's folder")
_TIMEOUT = Option("--timeout TIME", "the most that a case may take; by default 5m, on a GPU 30m")
_EXPLAIN = Option("--no-explain", "compare failures with no known mistakes, which takes seconds for each kind of them")
_JSON = Option("--out FILE", "also write the outcome as JSON")
_CASES = Option("--cases DIR", "judge this folder's case files instead")
_TIER = Option(f"--tier {_TIERS}", "how many cases; by default full")
_PLACE = (_ROLE, _DEVICE, _TIMEOUT, _EXPLAIN)
_MANY = partial(Option, nargs="+", default=[])
_BITWISE = "require these answers of certify --bitwise: repeats, alone, pages …"
_FAILURE = partial(Option, "--failure K", "number of a cause as certify prints it, by default 1", default=1)

GROUPS = {"expectations": "known failures with reasons", "report": "show, compare and merge report.json files"}
"""Words that begin several commands."""

COMMANDS = (
    Command(
        "certify = mla_conformance.commands.certify:certify",
        "judge kernels, case by case, and say which are right",
        "what is judged",
        _BACKENDS,
        Option("--all", "also judge what compiles for minutes, and EAGER"),
        *(_CAPABILITIES, _TIER, _CASES, _ROLE),
        (
            Option("--model NAME", "judge what a deployment of this model calls; see models"),
            Option("--config PATH", "the same for the model of this config.json"),
        ),
        Option("--tp N", "ranks that share the model's heads; by default 1", "--model --config"),
        Option("--kv-cache NAME", "the engine's name of the model's cache; by default auto", "--model --config"),
        Option("--explore N|TIME", "also judge N drawn cases of each role, or for 10m; minimise failing ones"),
        _SALT,
        Option("--shard I/N", "judge this part of the cases; report merge joins the parts"),
        Option("--durations REPORT", "balance shards by this earlier run", only_with="--shard"),
        "where, and for how long",
        _DEVICE,
        Option("-n --workers N", "processes that run cases; at most four per core", type=_WORKERS),
        _TIMEOUT,
        Option("--deadline TIME", "end the run after this time, as 40m"),
        Option(
            "--give-up-after N",
            "leave out the rest of a call's cases after N crashes, or N timeouts; by default 5",
            default=5,
        ),
        (
            Option("--out DIR", "the run's folder; by default a new one in build/mla-conformance, linked as latest"),
            Option("--resume DIR", "continue this folder's interrupted run"),
        ),
        Option("--fresh", "with --out: set an unfinished run aside", only_with="--out"),
        "what is reported",
        (
            Option("-q --quiet", "only a line for each right kernel, and what is wrong with the others"),
            Option("-v --verbose", "also each capability that passed, what is unsupported, and what is declared"),
        ),
        *(_EXPLAIN, _EXPECTATIONS),
        Option("--bitwise", "also report when a row's bits stay the same"),
        Option("--accuracy", "also report how errors are spread"),
        Option("--speed", "then time each right kernel, at the shapes of the model or of DeepSeek-V3"),
        Option("--json", "print the report as JSON"),
        "certificates, and other runs",
        (
            Option("--certificate FILE", "certify a complete run of one backend"),
            Option("--submission FILE", "add its record to FILE.jsonl, to hand in"),
            Option("--record FILE", "write a record even if must-pass cases are missing, which it lists"),
        ),
        Option("--sign KEY", "sign it with this SSH key", only_with="--certificate --submission --record"),
        Option("--sanitize TOOL", "instead, run small cases under this tool of compute-sanitizer", choices=TOOLS),
        examples=(
            "--backend TORCH_SDPA",
            "--backend my_backend.py:MyBackend --capability lse --tier smoke",
            "--resume build/mla-conformance/latest",
        ),
        statuses=_JUDGED,
    ),
    Command(
        "watch = mla_conformance.commands.replay:watch",
        "judge a backend whenever its file changes, what failed last first",
        Option("backend file.py:Class", "the class to judge"),
        *(_CAPABILITIES, *_PLACE),
        examples=("my_backend.py:MyBackend --capability lse",),
        statuses="130 Ctrl-C; 2 usage; 3 no process can be started, or nobody reads the output",
    ),
    Command(
        "replay = mla_conformance.commands.replay:replay",
        "run one case again",
        _CASE(nargs="?"),
        Option("--report FILE", "run the simplest failure of a cause in this report"),
        _FAILURE("--report"),
        several("--after CASE_ID", "run this case before it, in the same process"),
        *(_SALT, _BACKEND(), *_PLACE),
        (
            Option("--repeats N", "instead, call it N times and compare the bits, to find a race"),
            Option("--dump DIR", "also write operands, result, golden result and error"),
        ),
        examples=("'lse:q=[4]' --backend my_backend.py:MyBackend", "--report build/mla-conformance/latest --failure 2"),
        statuses=_JUDGED,
    ),
    Command(
        "minimize = mla_conformance.commands.replay:minimize_case",
        "find the simplest case that fails in the same way",
        *(_CASE(), _SALT, _BACKEND(required=True), _ROLE, _DEVICE),
        Option("--timeout TIME", "a case that takes longer hangs; by default 60", default=60.0),
        Option("--tries N", "try at most N candidates; by default 500", default=500),
        Option("--out FILE", "write the case here"),
        examples=("'lse:q=[64,3]' --backend my_backend.py:MyBackend --out small.json",),
        statuses="0 a simplest case was found; 2 usage, or the case does not fail; 3 no process can be started; "
        + _ENDED,
    ),
    Command(
        "export = mla_conformance.commands.export:export",
        "write one call as a script that needs torch and the library alone, or a failure as an issue",
        _CASE(nargs="?"),
        Option("--issue REPORT", "instead, write a cause in this report or record as an issue"),
        *(_FAILURE("--issue"), _BACKEND(), _DEVICE),
        Option("--out FILE", "write here; an issue is printed by default"),
        examples=(
            "'lse:q=[4]' --backend my_backend.py:MyBackend --out repro.py",
            "--issue build/mla-conformance/latest --failure 2",
        ),
        statuses="0 written; 2 usage, or one call alone does not show it",
    ),
    Command(
        "backends = mla_conformance.commands.listing:list_backends",
        "list the backends that can run here, and what the others lack",
        Option("names NAME", "say of these alone, with every reason", nargs="*"),
        _DEVICE,
        examples=("", "FLASHMLA"),
    ),
    Command(
        "capabilities = mla_conformance.commands.listing:list_capabilities",
        "list the capabilities with their definitions",
        (
            Option("--backend BACKEND", "instead, list what it declares of each role, and its fitted cases"),
            Option("--excluded", "instead, list the pairs that no case can hold, with reasons"),
        ),
        _ROLE,
        Option(_USES, "with --backend: where it runs", "--backend"),
        examples=("", "--backend TORCH_SDPA", "--excluded"),
    ),
    Command(
        "models = mla_conformance.commands.listing:list_models",
        "list the models that certify --model knows, or all of one",
        Option("name NAME", "show everything about this model", nargs="?"),
        Option("--docs FILE", _SECTION),
        examples=("", "deepseek-r1"),
    ),
    Command(
        "defects = mla_conformance.commands.reports:run_defects",
        "judge the judge: known wrong kernels and honest ones",
        Option(f"--tier {_TIERS}", "by default full", default="full"),
        _JSON,
        Option("--page FILE", _SECTION),
        examples=("--tier smoke",),
        statuses="0 every wrong kernel is found and no honest one; 1 not so; 2 usage",
    ),
    Command(
        "cheats = mla_conformance.commands.reports:try_cheats",
        "try kernels that cheat, and say what catches each",
        _JSON,
        Option("--table FILE", _SECTION),
        statuses="0 all fare as expected; 1 one does not; 2 usage",
    ),
    Command(
        "gate = mla_conformance.commands.reports:gate",
        "decide by reports whether a change may be merged",
        Option("reports REPORT", "reports of one run", nargs="+"),
        several("--baseline REPORT", "report of an earlier run"),
        _EXPECTATIONS,
        _MANY("--require BACKEND", "close unless these backends were judged", action="extend"),
        Option(
            f"--require-tier {_TIERS}|none", "every case of this tier needs a verdict; by default full", default="full"
        ),
        Option(
            "--must-pass FILE|NAME[@VERSION]",
            "what must pass: the suite's list (shipped, the default) or a file's, as far as a backend supports it; "
            "profiles that are named, of every backend",
            nargs="*",
        ),
        Option("--max-drift SHARE", "close if an error grew by more of its budget", "--baseline"),
        _MANY("--require-bitwise QUESTION", _BITWISE, choices=list(Question)),
        several("--allow-suite VERSION", "also accept verdicts of this other suite"),
        examples=(
            "reports/TORCH_SDPA reports/FLASHMLA --require TORCH_SDPA FLASHMLA --must-pass",
            "after/report.json --baseline before/report.json --require-tier smoke",
        ),
        statuses="0 open; 1 closed; 2 usage",
    ),
    Command(
        "expectations update = mla_conformance.commands.reports:update_expectations",
        "rewrite a folder of expectations from what a report found",
        _REPORT,
        Option("--dir DIR", "rewrite this folder", required=True),
        examples=("build/mla-conformance/latest/report.json --dir expectations",),
        statuses="0 rewritten; 2 usage",
    ),
    Command(
        "expectations explain = mla_conformance.commands.verify:write_reasons",
        "write reasons that were found after a run into its record, which must be signed again",
        Option("records RECORD", "records that verify", nargs="+"),
        _EXPECTATIONS,
        examples=("fixtures/records/2026.5.jsonl --expectations expectations",),
        statuses="0 written; 2 usage",
    ),
    Command(
        "verify = mla_conformance.commands.verify:verify",
        "check certificates and records, and what of them is here",
        Option("certificates FILE", "certificates or files of records", nargs="+"),
        Option("--rerun K", "also run K random judged cases of each again", type=partial(number, least=0), default=0),
        Option("--backend BACKEND", "run this backend again; by default the certificate's"),
        Option(_USES, "by default a GPU, if present", "--rerun"),
        Option("--salt TEXT", "draw their inputs from this text", only_with="--rerun"),
        Option("--signature", "require a signature of one of the --signers", only_with="--signers"),
        Option("--signers FILE", "allowed signers, in the format of ssh-keygen"),
        examples=("fixtures/records/2026.5.jsonl", "certificate.json --rerun 20 --device cuda"),
        statuses="0 all hold; 1 one does not; 2 usage",
    ),
    Command(
        "mustpass = mla_conformance.commands.reports:list_must_pass", "print the must-pass list of this suite version"
    ),
    Command(
        "bump = mla_conformance.bump.outcome:bump",
        "judge two versions of a library, and list what the new one changes",
        Option("before NAME==OLD", "as flashinfer-python==0.6.13"),
        Option("after NAME==NEW", "as flashinfer-python==0.7.2.post1"),
        *(_BACKENDS, _CAPABILITIES, _TIER, _DEVICE, _CASES),
        Option("--speed", "then time each right kernel, at DeepSeek-V3's shapes"),
        Option("--find-links DIR", "install from these wheels, without an index"),
        Option("--markdown FILE", "also write the outcome for a pull request"),
        Option("--out DIR", "a new or empty folder; by default one in build/mla-conformance"),
        examples=("flashinfer-python==0.6.13 flashinfer-python==0.7.2.post1 --backend FLASHINFER",),
        statuses="0 no regression; 1 something got worse; 2 usage; 3 not everything could be judged",
    ),
    Command(
        "report render = mla_conformance.commands.reports:render",
        "show a report: as a page, Markdown, annotations, JUnit XML or text",
        _REPORT,
        _ROLE,
        Option("--format FORMAT", f"{', '.join(FORMATS)} (default)", choices=FORMATS, default="text"),
        Option("--out FILE", "write this file instead of standard output"),
        examples=("build/mla-conformance/latest/report.json", "report.json --format html --out report.html"),
    ),
    Command(
        "report diff = mla_conformance.commands.reports:diff",
        "say what changed between two reports, and whether anything got worse",
        Option("before BEFORE", "report of the earlier run"),
        Option("after AFTER", "report of the later run"),
        _ROLE,
        Option("--drift SHARE", "growth of error-budget use that is a regression", default=DRIFT),
        examples=("before.json after.json --drift 0.2",),
        statuses="0 no regression; 1 regressions; 2 usage",
    ),
    Command(
        "report merge = mla_conformance.commands.reports:merge",
        "make one report of those of all shards",
        Option("shards SHARD", "report of a shard", nargs="+"),
        _ROLE,
        Option("--out FILE", "write the report here", required=True),
        examples=("1/report.json 2/report.json --out report.json",),
        statuses="0 a verdict on every case; 2 usage, or not shards of one list; 3 cases are missing",
    ),
    Command("report schema = mla_conformance.commands.reports:print_schema", "print the JSON Schema of report.json"),
    Command(
        "scoreboard = mla_conformance.scoreboard.site:scoreboard",
        "write a static site that shows the records of many kernels",
        Option("records FILE|DIR", "records, or reports of certify --model; by default our records", nargs="*"),
        Option("--out DIR", "write the site here", required=True),
        examples=("--out site", "fixtures/records/2026.5.jsonl --out site", "before.json after.json --out site"),
        statuses="0 written; 1 written without records that cannot be read; 2 usage",
    ),
    Command(
        "completion = mla_conformance.commands.listing:print_completion",
        "print a script that completes this command line in a shell",
        Option("shell SHELL", ", ".join(_SHELLS), choices=_SHELLS),
        examples=(
            "bash > ~/.local/share/bash-completion/completions/mla-conformance",
            "fish > ~/.config/fish/completions/mla-conformance.fish",
        ),
    ),
)

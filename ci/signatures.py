"""Record the signatures that the adapters call, from unpacked packages and without importing them.

``python ci/signatures.py LABEL=FOLDER ...`` prints what stands in ``backends/tests/signatures.json``; a folder is the
target of ``pip install --no-deps --target FOLDER PACKAGE==VERSION`` (or an unpacked source distribution).
"""

import ast
import json
import sys
from collections.abc import Iterator
from pathlib import Path

_MLA_WRAPPER = tuple(f"BatchMLAPagedAttentionWrapper.{name}" for name in ("__init__", "plan", "run"))
FUNCTIONS = {
    "flash_attn/flash_attn_interface.py": ("flash_attn_varlen_func",),
    "fa3_fwd_interface.py": ("flash_attn_varlen_func",),
    "flash_attn/cute/interface.py": ("flash_attn_varlen_func",),
    "flashinfer/prefill.py": (
        "trtllm_ragged_attention_deepseek",
        "BatchPrefillWithRaggedKVCacheWrapper.__init__",
        "BatchPrefillWithRaggedKVCacheWrapper.plan",
        "BatchPrefillWithRaggedKVCacheWrapper.run",
    ),
    "flashinfer/cudnn/prefill.py": ("cudnn_batch_prefill_with_kv_cache",),
    "flashinfer/mla/_core.py": _MLA_WRAPPER,
    "flashinfer/mla/_batch_mla/_wrapper.py": _MLA_WRAPPER,
    "flashinfer/mla/_batch_mla/_contracts.py": ("MLAPlanMetadata.csr",),
    "flash_mla/flash_mla_interface.py": ("get_mla_metadata", "flash_mla_with_kvcache"),
    "tokenspeed_mla/mla_prefill.py": ("tokenspeed_mla_prefill",),
}


def recorded(folder: Path) -> dict[str, list[list[object]]]:
    """``FILE:FUNCTION`` to its parameters as [name, kind, has a default]."""
    found = {}
    for file, names in FUNCTIONS.items():
        if (folder / file).is_file():
            defined = dict(_functions(ast.parse((folder / file).read_text(encoding="utf-8"))))
            # A class may have moved to another file from one version to the next.
            found |= {f"{file}:{name}": _parameters(defined[name]) for name in names if name in defined}
    return found


def _functions(tree: ast.Module) -> Iterator[tuple[str, ast.arguments]]:
    """Functions and methods by qualified name; of overloads the last, which is the implementation."""
    for node in tree.body:
        if isinstance(node, ast.FunctionDef):
            yield node.name, node.args
        if isinstance(node, ast.ClassDef):
            for method in node.body:
                if isinstance(method, ast.FunctionDef):
                    yield f"{node.name}.{method.name}", method.args


def _parameters(arguments: ast.arguments) -> list[list[object]]:
    positional = [*arguments.posonlyargs, *arguments.args]
    required = len(positional) - len(arguments.defaults)
    listed: list[list[object]] = [
        [argument.arg, "POSITIONAL_OR_KEYWORD", index >= required] for index, argument in enumerate(positional)
    ]
    if arguments.vararg:
        listed.append([arguments.vararg.arg, "VAR_POSITIONAL", False])
    for argument, default in zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True):
        listed.append([argument.arg, "KEYWORD_ONLY", default is not None])
    return listed


if __name__ == "__main__":
    folders = (argument.split("=", 1) for argument in sys.argv[1:])
    signatures = {label: recorded(Path(folder)) for label, folder in folders}
    sys.stdout.write(json.dumps(signatures).replace('{"', '{\n "').replace(']], "', ']],\n "') + "\n")

"""``models --proof --oracle``: an author's code agrees, or the command says where it is apart or why it does not run.

The authors' files are not kept here. These have their classes, arguments and names, and compute in the plainest way.
"""

from pathlib import Path

import pytest

from mla_conformance.cli import main

DEEPSEEK = """
from dataclasses import dataclass
import torch
from torch import nn
from kernel import act_quant
from mla_conformance.reference.rope import Rotation
from mla_conformance.reference.yarn import Yarn

@dataclass
class ModelArgs:
    max_batch_size: int; max_seq_len: int; dim: int; n_heads: int; q_lora_rank: int; kv_lora_rank: int
    qk_nope_head_dim: int; qk_rope_head_dim: int; v_head_dim: int; original_seq_len: int; rope_theta: float
    rope_factor: float; mscale: float

    @property
    def yarn(self):
        return Yarn(factor=self.rope_factor, original_positions=self.original_seq_len, mscale_all_dim=self.mscale)

class Linear(nn.Linear):
    def __init__(self, inside, outside):
        super().__init__(inside, outside, bias=False, dtype=Linear.dtype)

def precompute_freqs_cis(args):
    frequencies = Rotation.extended(args.yarn, args.qk_rope_head_dim, interleaved=True).frequencies
    angles = torch.outer(torch.arange(args.max_seq_len), torch.tensor(frequencies, dtype=torch.float64))
    return torch.polar(torch.ones_like(angles), angles)

def turned(x, angles):
    pairs = torch.view_as_complex(x.unflatten(-1, (-1, 2)).contiguous()) * angles[:, None]
    return torch.view_as_real(pairs).flatten(-2)

class MLA(nn.Module):
    def __init__(self, args):
        super().__init__()
        self.args, ranks = args, args.n_heads * (args.qk_nope_head_dim + args.qk_rope_head_dim)
        if args.q_lora_rank:
            self.wq_a, self.q_norm = Linear(args.dim, args.q_lora_rank), nn.RMSNorm(args.q_lora_rank, 1e-6)
            self.wq_b = Linear(args.q_lora_rank, ranks)
        else:
            self.wq = Linear(args.dim, ranks)
        self.wkv_a = Linear(args.dim, args.kv_lora_rank + args.qk_rope_head_dim)
        self.kv_norm = nn.RMSNorm(args.kv_lora_rank, 1e-6)
        self.wkv_b = Linear(args.kv_lora_rank, args.n_heads * (args.qk_nope_head_dim + args.v_head_dim))
        self.wo = Linear(args.n_heads * args.v_head_dim, args.dim)
        self.before = []

    def forward(self, x, start_pos, freqs_cis, mask):
        args = self.args
        q = self.wq_b(self.q_norm(self.wq_a(x))) if args.q_lora_rank else self.wq(x)
        q_nope, q_pe = q[0].unflatten(1, (args.n_heads, -1)).split([args.qk_nope_head_dim, args.qk_rope_head_dim], -1)
        latent, k_pe = self.wkv_a(x)[0].split([args.kv_lora_rank, args.qk_rope_head_dim], -1)
        self.before.append((self.kv_norm(latent), turned(k_pe[:, None], freqs_cis)))
        latent, k_pe = (torch.cat(kept) for kept in zip(*self.before))
        kv = self.wkv_b(latent).unflatten(1, (args.n_heads, -1))
        k_nope, v = kv.split([args.qk_nope_head_dim, args.v_head_dim], -1)
        k = torch.cat((k_nope, k_pe.expand(-1, args.n_heads, -1)), -1)
        q = torch.cat((q_nope, turned(q_pe, freqs_cis)), -1)
        scores = torch.einsum("thd,shd->hts", q, k) * q.shape[-1] ** -0.5 * args.yarn.softmax_factor
        weights = (scores + (0 if mask is None else mask) + self.chosen(x, start_pos, freqs_cis, mask)).softmax(-1)
        return self.wo(torch.einsum("hts,shd->thd", weights, v).flatten(1))[None]

    def chosen(self, *inputs):
        return 0
"""
SELECTING = DEEPSEEK.replace(
    """    def chosen(self, *inputs):
        return 0
""",
    """    def chosen(self, x, start_pos, freqs_cis, mask):
        named = self.indexer(x, None, start_pos, freqs_cis, mask)[0]
        return torch.full((len(named), start_pos + len(named)), -torch.inf).scatter_(-1, named, 0)

class Indexer:
    pass
""",
)
CHECKPOINT = """
import torch
from torch import nn
from .beside import norm

class MiniCPMAttention(nn.Module):
    def __init__(self, config, layer_idx):
        super().__init__()
        self.config, heads, keys = config, config.num_attention_heads, config.qk_nope_head_dim + config.qk_rope_head_dim
        def linear(a, b): return nn.Linear(a, b, bias=config.attention_bias)
        self.q_a_proj, self.q_a_layernorm = linear(config.hidden_size, config.q_lora_rank), norm(config.q_lora_rank)
        self.q_b_proj = linear(config.q_lora_rank, heads * keys)
        self.kv_a_proj_with_mqa = linear(config.hidden_size, config.kv_lora_rank + config.qk_rope_head_dim)
        self.kv_a_layernorm = norm(config.kv_lora_rank)
        self.kv_b_proj = linear(config.kv_lora_rank, heads * (config.qk_nope_head_dim + config.v_head_dim))
        self.o_proj = linear(heads * config.v_head_dim, config.hidden_size)

    def turned(self, x, positions):
        rope, half = self.config.rope_scaling, x.shape[-1] // 2
        powers = torch.arange(half, dtype=torch.float32) / half
        slowed = self.config.rope_theta**powers * torch.tensor(rope["short_factor"], dtype=torch.float32)
        angles = positions[:, None] / slowed
        cos, sin = angles.cos()[:, None], angles.sin()[:, None]
        return torch.cat((x[..., :half] * cos - x[..., half:] * sin, x[..., half:] * cos + x[..., :half] * sin), -1)

    def forward(self, hidden_states, attention_mask, position_ids):
        config, heads = self.config, self.config.num_attention_heads
        q = self.q_b_proj(self.q_a_layernorm(self.q_a_proj(hidden_states)))[0].unflatten(1, (heads, -1))
        q_nope, q_pe = q.split([config.qk_nope_head_dim, config.qk_rope_head_dim], -1)
        kv = self.kv_a_proj_with_mqa(hidden_states)[0]
        latent, k_pe = kv.split([config.kv_lora_rank, config.qk_rope_head_dim], -1)
        k_nope, v = self.kv_b_proj(self.kv_a_layernorm(latent)).unflatten(1, (heads, -1)).split(
            [config.qk_nope_head_dim, config.v_head_dim], -1)
        q = torch.cat((q_nope, self.turned(q_pe, position_ids[0])), -1)
        k = torch.cat((k_nope, self.turned(k_pe[:, None], position_ids[0]).expand(-1, heads, -1)), -1)
        scores = torch.einsum("thd,shd->hts", q, k) * q.shape[-1] ** -0.5 + attention_mask[0]
        return self.o_proj(torch.einsum("hts,shd->thd", scores.softmax(-1), v).flatten(1))[None], None, None
"""
BESIDE = "from torch import nn\ndef norm(columns): return nn.RMSNorm(columns, 1e-6)\n"
CODES = {
    "DeepSeek-V2, DeepSeek-V2-Lite, DeepSeek-V3, R1, Kimi-K2": DEEPSEEK,
    "DeepSeek-V3.2": SELECTING,
    "MiniCPM3": CHECKPOINT,
}


def prove(tmp_path: Path, code: str) -> int:
    path = tmp_path / "code.py"
    path.write_text(code)
    (tmp_path / "beside.py").write_text(BESIDE)
    return main(["models", "--proof", "--oracle", str(path)])


@pytest.mark.parametrize("models", CODES)
def test_an_authors_code_agrees(tmp_path: Path, capsys: pytest.CaptureFixture[str], models: str) -> None:
    assert prove(tmp_path, CODES[models]) == 0
    *lines, last = capsys.readouterr().out.splitlines()
    assert ", ".join(line.partition(" expanded ")[0].strip() for line in lines) == models
    assert last == f"all {len(lines)} agree to 1e-12"


@pytest.mark.parametrize("models", CODES)
def test_a_layer_that_is_apart_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str], models: str) -> None:
    assert prove(tmp_path, CODES[models].replace("** -0.5", "** -0.51")) == 1
    named = models.replace(", DeepSeek", "; DeepSeek")
    assert capsys.readouterr().out.splitlines()[-1] == f"more than 1e-12 apart: {named}"


def test_a_rotation_or_a_choice_that_differs_is_seen(tmp_path: Path) -> None:
    assert prove(tmp_path, DEEPSEEK.replace("angles[:, None]", "angles[:, None].conj()")) == 1
    assert prove(tmp_path, SELECTING.replace(", -torch.inf).scatter_(-1, named, 0)", ", 0.0)")) == 1


REFUSED = {
    "neither": ("pass", "expected DeepSeek's inference/model.py or a checkpoint's modeling_deepseek.py"),
    "not importable": ("from .elsewhere import x", "cannot be imported: ModuleNotFoundError"),
    "an exit": ("raise SystemExit(0)", "cannot be imported: SystemExit"),
    "a GPU kernel": (
        DEEPSEEK.replace("        args = self.args\n", "        act_quant(x)\n"),
        "DeepSeek-V2: RuntimeError: the author's kernel act_quant is not loaded",
    ),
}


@pytest.mark.parametrize("what", REFUSED)
def test_code_that_does_not_run_here_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str], what: str) -> None:
    code, said = REFUSED[what]
    assert prove(tmp_path, code) == 2
    error = capsys.readouterr().err
    assert said in error and "code.py: " in error and "Traceback" not in error


def test_a_missing_file_is_a_usage_error(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["models", "--proof", "--oracle", "missing.py"]) == 2
    assert "missing.py: expected a Python file" in capsys.readouterr().err

"""The README holds: its snippets run, its tables are what the code says, its links lead somewhere."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from moe_audit.hooks import Recorder, TrainingGate
from moe_audit.record import LayerInfo, LayerRecord, Record
from moe_audit.run import open_run
from moe_audit.store import Store
from moe_audit.table import METRICS
from moe_audit.thresholds.gate_names import GATES
from moe_audit.thresholds.policy import load_policy, preset_text

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text(encoding="utf-8")
SNIPPETS = {
    name: code
    for name, _, code in re.findall(r"<!-- test: (\w+) -->\n```(\w+)\n(.*?)```", README, flags=re.S)
}
IN_PARITY = {"huggingface", "huggingface_trainer", "olmo_core"}  # tests/parity/test_readme_snippets.py


def test_every_code_block_is_tested() -> None:
    blocks = re.findall(r"^```(\w+)$", README, flags=re.M)
    assert len(blocks) == len(SNIPPETS)
    assert set(SNIPPETS) == IN_PARITY | {"own_router", "check", "gate", "policy"}


class MyRouter(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.num_experts = 4
        self.proj = nn.Linear(8, 4)

    def forward(self, x: Tensor) -> SimpleNamespace:
        logits = self.proj(x)
        return SimpleNamespace(expert_ids=logits.topk(2).indices, logits=logits)


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.ModuleDict({"router": MyRouter()}) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + layer["router"](x).logits.sum(-1, keepdim=True)
        return x.square().mean()


def test_own_router_and_gate(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    model = Model()
    names = {"model": model, "MyRouter": MyRouter, "optimizer": torch.optim.AdamW(model.parameters())}
    exec(SNIPPETS["own_router"], names)
    exec(SNIPPETS["gate"], names)
    assert isinstance(names["gate"], TrainingGate)
    recorder = names["recorder"]
    assert isinstance(recorder, Recorder)
    with recorder.microbatch():
        model(torch.randn(10, 8)).backward()
    names["optimizer"].step()
    recorder.step(1)
    recorder.close()
    with open_run(tmp_path / "runs" / "a") as run:
        assert [int(run.counts(info.layer).sum()) for info in run.layers] == [20, 20]


def test_check_and_statement(tmp_path: Path) -> None:
    store = Store.create(tmp_path / "runs" / "a" / "routing.db", [LayerInfo(0, "layers.0.moe", 4, 1)])
    store.begin_attempt(1)
    rng = np.random.default_rng(0)
    for step in range(1, 301, 5):
        counts_SE = rng.multinomial(20_000, [0.25] * 4)[None]
        rows = {0: LayerRecord(counts_SE, np.array([20_000]))}
        store.append(Record("train", step, step + 4, rows, tokens=20_000))
    store.close()
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    done = subprocess.run(
        ["bash", "-euc", SNIPPETS["check"]], cwd=tmp_path, env={**os.environ, "PATH": path},
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    assert (tmp_path / "release" / "routing_statement.json").is_file()


def test_trainer_commands(tmp_path: Path) -> None:
    """As they stand in the README, for a few steps only."""
    (tmp_path / "moe_trainer").symlink_to(ROOT / "moe_trainer")
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    commands = re.findall(r"^    (moe-train .*)$", README, flags=re.M)
    assert [c.split()[1] for c in commands] == ["prepare", "run", "resume", "resume", "plan"]
    few = ["", " train.steps=2 train.micro_batch_sequences=2", " train.steps=3", " train.steps=4", ""]
    for command, settings in zip(commands, few, strict=True):
        done = subprocess.run(
            ["bash", "-c", command + settings], cwd=tmp_path,
            env={**os.environ, "PATH": path}, capture_output=True, text=True, check=False,
        )  # fmt: skip
        assert done.returncode == 0, command + done.stdout + done.stderr


def test_policy(tmp_path: Path) -> None:
    (tmp_path / "policy.toml").write_text(SNIPPETS["policy"])
    policy = load_policy(tmp_path / "policy.toml")
    here = {"num_experts": 8, "top_k": 2, "capacity_factor": None, "source": "all"}
    assert policy.limit("max_load", layer=5, **here) == (">", 2.05, 2.5)
    assert policy.limit("min_load", layer=2, **here) is None
    assert policy.limit("min_load", layer=4, **here) is not None
    assert [waiver.owner for waiver in policy.waivers] == ["ada"]


def gate_rows() -> list[str]:
    """The table of gates, from the registry and the preset `default`."""
    limits = tomllib.loads(preset_text("default"))["gates"]
    rows = []
    for gate in GATES.values():
        limit = limits.get(gate.name)
        shown = f"{limit.get('warn', '-')} / {limit.get('fail', '-')}" if limit else "reported"
        rows.append(f"| `{gate.name}` {gate.op} | {gate.formula} | {shown} |")
    return rows


def test_the_table_of_gates_is_that_of_the_code() -> None:
    assert [row for row in gate_rows() if row not in README] == []


def test_every_metric_has_its_formula() -> None:
    assert [name for name in METRICS if f"`{name}`" not in README] == []


def test_links_lead_somewhere() -> None:
    anchors = {
        re.sub(r"[^\w -]", "", h.lower()).replace(" ", "-") for h in re.findall(r"^#+ (.*)$", README, re.M)
    }
    for target in re.findall(r"\]\(([^)]+)\)", README):
        if target.startswith("#"):
            assert target[1:] in anchors, target
        else:
            assert (ROOT / target).exists(), target
    assert "http" not in README  # nothing here needs the network


def test_no_placeholder_is_left() -> None:
    assert re.findall(r"<!-- (?!test: )[^>]*-->", README) == []

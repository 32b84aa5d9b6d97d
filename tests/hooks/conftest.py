"""Toy models with routers of their own, and stores read back."""

from __future__ import annotations

import functools
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from moe_audit.hooks import Recorder
from moe_audit.hooks.adapters import FunctionAdapter, Routing
from moe_audit.run import open_run


class TopKRouter(nn.Module):
    """A router as people write it: weights, indices, logits."""

    def __init__(self, d: int = 8, num_experts: int = 4, top_k: int = 2) -> None:
        super().__init__()
        self.proj = nn.Linear(d, num_experts, bias=False)
        self.num_experts, self.top_k = num_experts, top_k

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        logits = self.proj(x.reshape(-1, x.shape[-1]))
        weights, indices = logits.softmax(-1).topk(self.top_k, -1)
        return weights, indices, logits


class Block(nn.Module):
    def __init__(self, d: int, router_last: bool) -> None:
        super().__init__()
        self.router, self.ff, self.router_last = TopKRouter(d), nn.Linear(d, d), router_last

    def forward(self, x: Tensor) -> Tensor:
        if self.router_last:
            x = torch.tanh(self.ff(x))
            return x * self.router(x)[0].sum(-1).view(*x.shape[:-1], 1)
        weights = self.router(x)[0]
        return x + torch.tanh(self.ff(x)) * weights[:, 0].view(*x.shape[:-1], 1)


def _save_matmuls(context: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    mm = (torch.ops.aten.mm.default, torch.ops.aten.addmm.default)
    return CheckpointPolicy.MUST_SAVE if op in mm else CheckpointPolicy.PREFER_RECOMPUTE


class ToyModel(nn.Module):
    """Blocks of a router and a feed-forward, with a form of activation checkpointing around each."""

    def __init__(
        self, layers: int = 3, d: int = 8, remat: str = "none", router_last: bool = False, fail_in: int = -1
    ) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Block(d, router_last) for _ in range(layers))
        self.remat, self.fail_in = remat, fail_in

    def forward(self, x: Tensor) -> Tensor:
        for i, block in enumerate(self.layers):
            if i == self.fail_in:
                raise RuntimeError("the loader lost a shard")
            if self.remat == "none":
                x = block(x)
            elif self.remat == "selective":
                contexts = functools.partial(create_selective_checkpoint_contexts, _save_matmuls)
                x = checkpoint(block, x, use_reentrant=False, context_fn=contexts)
            else:
                x = checkpoint(block, x, use_reentrant=self.remat == "reentrant")
        return x.square().mean()


class ScriptedRouter(nn.Module):
    """Returns the picks that it is given: the truth is known."""

    def __init__(self, num_experts: int) -> None:
        super().__init__()
        self.num_experts = num_experts

    def forward(self, picks: Any) -> Any:
        return picks


class Scripted(nn.Module):
    def __init__(self, num_experts: int, layers: int = 1) -> None:
        super().__init__()
        self.layers = nn.ModuleList(ScriptedRouter(num_experts) for _ in range(layers))

    def forward(self, picks: Any) -> Any:
        for router in self.layers:
            picks = router(picks)
        return picks


def brute_force(model: ToyModel, batches: list[Tensor]) -> list[list[int]]:
    """Counts per layer, taken by plain hooks on the routers, without checkpointing."""
    counts = [[0] * block.router.num_experts for block in model.layers]

    def hook(i: int, indices: Tensor) -> None:
        for expert in indices.flatten().tolist():
            counts[i][expert] += 1

    handles = [
        block.router.register_forward_hook(lambda module, args, output, i=i: hook(i, output[1]))
        for i, block in enumerate(model.layers)
    ]
    remat, model.remat = model.remat, "none"
    with torch.no_grad(), torch.compiler.set_stance("force_eager"):
        for x in batches:
            model(x)
    model.remat = remat
    for handle in handles:
        handle.remove()
    return counts


TOP_K = FunctionAdapter(TopKRouter, lambda out: Routing(indices=out[1], weights=out[0], logits=out[2]))


def scripted(top_k: int | str = 1, **fields: Callable[[Any], Any]) -> FunctionAdapter:
    """An adapter for `ScriptedRouter`: its output is the picks, or what `fields` take out of it."""

    def routing(out: Any) -> Routing:
        return Routing(**{name: take(out) for name, take in (fields or {"indices": lambda o: o}).items()})

    return FunctionAdapter(ScriptedRouter, routing, top_k=top_k)  # type: ignore[arg-type]


@pytest.fixture
def toy() -> SimpleNamespace:
    """The models and their adapters."""
    torch.manual_seed(0)
    return SimpleNamespace(
        Model=ToyModel, Scripted=Scripted, scripted=scripted, adapter=TOP_K, brute_force=brute_force
    )


@pytest.fixture
def attach(tmp_path: Path) -> Callable[..., Recorder]:
    """`Recorder.attach` to a store in the test's folder."""

    def attach(model: nn.Module, adapter: FunctionAdapter = TOP_K, **options: Any) -> Recorder:
        path = options.pop("path", tmp_path / "routing.db")
        return Recorder.attach(model, path, adapter=adapter, **options)

    return attach


@pytest.fixture
def stored(tmp_path: Path) -> Callable[..., SimpleNamespace]:
    """What the store holds, as plain lists: counts[layer][source][expert], summed over the records."""

    def stored(phase: str = "train", path: Path | None = None) -> SimpleNamespace:
        with open_run(path or tmp_path, phase) as run:
            layers = [info.layer for info in run.layers]
            sums = {layer: run.counts(layer).sum(0) for layer in layers}
            return SimpleNamespace(
                sources=run.sources,
                layers=run.layers,
                records=run.records,
                counts=[sums[layer].tolist() for layer in layers],
                total=[sums[layer].sum(0).tolist() for layer in layers],
                tokens=[t.sum(0).tolist() for layer in layers if (t := run.tokens(layer)) is not None],
                invalid=[int(run.invalid(layer).sum()) for layer in layers],
                broken=[event.detail["invariant"] for event in run.events if event.kind == "invariant"],
                stat=lambda name: [run_stat(path or tmp_path, phase, layer, name) for layer in layers],
                prob_sum=lambda: [read(path or tmp_path, phase, layer, "prob_sum") for layer in layers],
                top1=lambda: [read(path or tmp_path, phase, layer, "top1") for layer in layers],
            )

    return stored


def run_stat(path: Path, phase: str, layer: int, name: str) -> Any:
    with open_run(path, phase) as run:
        return run.stat(layer, name)


def read(path: Path, phase: str, layer: int, what: str) -> Any:
    with open_run(path, phase) as run:
        return getattr(run, what)(layer)


@pytest.fixture(scope="session")
def torchrun() -> Callable[[int, Path, Path], None]:
    """torchrun(ranks, script, folder): runs the script on so many gloo ranks."""

    def torchrun(ranks: int, script: Path, folder: Path) -> None:
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node"]
        done = subprocess.run(
            [*command, str(ranks), str(script), str(folder)],
            env={"OMP_NUM_THREADS": "1", "PATH": "/usr/bin:/bin"},
            capture_output=True,
            text=True,
            timeout=300,
        )
        assert done.returncode == 0, done.stderr[-4000:]

    return torchrun

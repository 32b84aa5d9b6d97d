"""torchtitan 0.3.0: a tiny real Qwen3-MoE, compared with what its experts are given."""

from __future__ import annotations

import runpy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from moe_audit.hooks import Recorder
from moe_audit.hooks.adapters import find_routers
from moe_audit.run import open_run

pytest.importorskip("torchtitan")
pytestmark = pytest.mark.parity
EXAMPLE = Path(__file__).parents[2] / "examples" / "torchtitan_recipe.py"


@pytest.fixture
def model() -> nn.Module:
    """That of the example: Qwen3-MoE, two layers, 8 experts, top-2."""
    torch.manual_seed(0)
    model: nn.Module = runpy.run_path(str(EXAMPLE))["tiny_model"]()
    return model


def test_counts_are_what_the_experts_got(model: nn.Module, tmp_path: Path) -> None:
    seen = {layer: torch.zeros(2, 8, dtype=torch.int64) for layer in (0, 1)}
    sources = [torch.tensor([0, 1]), torch.tensor([1, 1])]
    now = sources[0]

    def keep(layer: int) -> Any:
        def hook(module: nn.Module, args: Any) -> None:
            for source, ids_LK in zip(now.tolist(), args[2], strict=True):
                seen[layer][source] += torch.bincount(ids_LK.flatten(), minlength=8)

        return hook

    for name, block in model.layers.items():
        block.moe.routed_experts.register_forward_pre_hook(keep(int(name)))
    with Recorder.attach(model, tmp_path / "routing.db", ["code", "prose"]) as recorder:
        for now in sources:
            with recorder.microbatch(sources=now):
                model(torch.randint(0, 64, (2, 6))).float().pow(2).mean().backward()
        recorder.step(1)
    run = open_run(tmp_path / "routing.db")
    assert [(i.layer, i.name, i.gating) for i in run.layers] == [
        (0, "layers.0.moe.router", "softmax"),
        (1, "layers.1.moe.router", "softmax"),
    ]
    for layer in (0, 1):
        assert torch.equal(torch.from_numpy(run.counts(layer).sum(0)), seen[layer])
    # The model counts by itself, all sources together.
    assert torch.equal(model.layers["1"].moe.tokens_per_expert_E.long(), seen[1].sum(0))


def test_scores_are_probabilities_and_may_be_sharded(model: nn.Module) -> None:
    found = find_routers(model)[0]
    x = torch.randn(2, 5, 32)
    output = found.module(x)
    seen = found.adapter.observe(found.module, (x,), {}, output)
    assert (seen.full_kind, tuple(seen.full_TE.shape)) == ("probs", (10, 8))
    assert torch.equal(seen.full_TE.topk(2).indices.sort().values, seen.indices_TK.sort().values)
    flat = tuple(part.reshape(10, -1) for part in output)  # later versions return two dimensions
    assert torch.equal(found.adapter.observe(found.module, (x,), {}, flat).indices_TK, seen.indices_TK)


def test_sharded_outputs_are_read_locally(model: nn.Module) -> None:
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        mesh = init_device_mesh("cpu", (1,))
        found = find_routers(model)[0]
        output = found.module(torch.randn(2, 5, 32))
        sharded = tuple(distribute_tensor(part.detach(), mesh, [Shard(1)]) for part in output)
        seen = found.adapter.observe(found.module, (), {}, sharded)
        assert type(seen.indices_TK) is Tensor
        assert torch.equal(seen.indices_TK, output[1].reshape(-1, 2))
    finally:
        dist.destroy_process_group()

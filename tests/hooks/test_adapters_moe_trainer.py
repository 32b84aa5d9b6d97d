"""The adapter of our own trainer: demand before the drop, what was dropped, expert choice."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from moe_audit.hooks import Recorder
from moe_audit.hooks.adapters import find_routers
from moe_audit.run import Run, open_run
from moe_trainer.moe.config import MoEConfig, RouterOptions, SharedExpertsConfig
from moe_trainer.moe.layer import MoE

SOURCES = torch.tensor([1, 0, 1])


def layer(**settings: Any) -> MoE:
    torch.manual_seed(0)
    router = RouterOptions(**settings.pop("router", {"top_k": 2}))
    moe = MoE(MoEConfig(num_experts=6, hidden_size=16, router=router, **settings), d_model=8)
    nn.init.normal_(moe.router.weight)
    return moe


def record(moe: MoE, x: Tensor, path: Path) -> Run:
    with Recorder.attach(nn.ModuleDict({"moe": moe}), path, ["code", "prose"]) as recorder:
        with recorder.microbatch(sources=SOURCES):
            moe(x)[0].sum().backward()
        recorder.step(1)
    return open_run(path)


def by_source(chosen_TE: Tensor) -> Tensor:
    rows = SOURCES.repeat_interleave(len(chosen_TE) // len(SOURCES))
    return torch.stack([chosen_TE[rows == source].sum(0) for source in (0, 1)]).long()


def test_demand_is_recorded_before_the_drop_and_the_drop_beside_it(tmp_path: Path) -> None:
    moe, x = layer(capacity_factor=0.5), torch.randn(3, 16, 8)
    logits_TE = x.reshape(-1, 8) @ moe.router.weight.T
    demand_TE = torch.zeros(48, 6).scatter(1, logits_TE.topk(2).indices, 1.0)
    run = record(moe, x, tmp_path / "routing.db")
    assert (run.layers[0].capacity_factor, run.layers[0].top_k) == (0.5, 2)
    assert torch.equal(torch.from_numpy(run.counts(0).sum(0)), by_source(demand_TE))
    dropped = run.stat(0, "dropped")
    capacity = 8  # 0.5 of the fair share of 48 * 2 / 6, up to a multiple of 8
    assert dropped is not None and dropped.sum() > 0
    assert dropped.sum(0).tolist() == (demand_TE.sum(0) - capacity).clamp(min=0).tolist()


def test_expert_choice_has_no_fixed_number_of_picks(tmp_path: Path) -> None:
    moe = layer(router={"top_k": 2, "routing": "expert_choice"})
    x = torch.randn(3, 16, 8)
    best_TE = (x.reshape(-1, 8) @ moe.router.weight.T).softmax(-1).topk(16, dim=0).indices
    run = record(moe, x, tmp_path / "routing.db")
    assert run.layers[0].top_k is None
    expected = by_source(torch.zeros(48, 6).scatter(0, best_TE, 1.0))
    assert torch.equal(torch.from_numpy(run.counts(0).sum(0)), expected)


@pytest.mark.parametrize("gating", ["softmax", "topk_softmax", "sigmoid"])
def test_the_router_of_shared_experts_is_left_out(gating: str) -> None:
    shared = SharedExpertsConfig(num_experts=2, hidden_size=16, router=RouterOptions())
    moe = layer(router={"top_k": 2, "gating_function": gating}, shared_mlp=shared)
    (found,) = find_routers(nn.ModuleList([moe]))
    assert (found.info.name, found.info.gating) == ("0", gating)
    assert found.router is moe.router

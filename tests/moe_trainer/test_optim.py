"""Parameter groups and the learning-rate schedule."""

from __future__ import annotations

import math

import pytest
import torch

from moe_trainer.config import ModelConfig, OptimConfig
from moe_trainer.model import Transformer
from moe_trainer.moe.config import MoEConfig, RouterOptions
from moe_trainer.optim import build_optimizer, build_scheduler, load_optimizer_state, parameter_groups

MODEL = ModelConfig(
    num_layers=2,
    d_model=16,
    num_heads=2,
    num_kv_heads=1,
    moe_every=2,
    moe=MoEConfig(num_experts=4, hidden_size=8, bias=True, router=RouterOptions(top_k=2, bias=True)),
)


def test_every_parameter_is_in_one_group_with_its_own_rate_and_decay() -> None:
    model = Transformer(MODEL)
    groups = parameter_groups(
        model, OptimConfig(lr=1e-3, router_lr_multiplier=0.25, expert_lr_multiplier=2.0)
    )
    by_name = {group["name"]: group for group in groups}
    seen = [id(p) for group in groups for p in group["params"]]
    assert sorted(seen) == sorted(id(p) for p in model.parameters())
    names = {id(p): name for name, p in model.named_parameters()}
    assert by_name["router"]["lr"] == by_name["router.no_decay"]["lr"] == 0.25e-3
    assert by_name["experts"]["lr"] == 2e-3 and by_name["dense"]["lr"] == 1e-3
    for group in groups:
        for parameter in group["params"]:
            name = names[id(parameter)]
            assert (".router." in name) == group["name"].startswith("router")
            assert (".experts." in name) == group["name"].startswith("experts")
            no_decay = "norm" in name or "bias" in name or ".b_" in name
            assert (group["weight_decay"] == 0.0) == no_decay, name


def rates(warmup: int, steps: int, done: int = 0, lr: float = 0.5) -> list[float]:
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=lr)
    config = OptimConfig(lr=lr, warmup_steps=warmup, min_lr_ratio=0.1)
    scheduler = build_scheduler(optimizer, config, steps, done)
    values = []
    for _ in range(steps - done):
        values.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        scheduler.step()
    return values


def test_schedule_is_linear_then_half_a_cosine() -> None:
    values = rates(warmup=4, steps=15)
    assert values[:5] == pytest.approx([0.125, 0.25, 0.375, 0.5, 0.5])
    assert values[9] == pytest.approx(0.5 * (0.1 + 0.9 / 2))  # half-way down
    assert values[-1] == pytest.approx(0.05)
    expected = [0.5 * (0.1 + 0.45 * (1 + math.cos(math.pi * i / 10))) for i in range(11)]
    assert values[4:] == pytest.approx(expected)


def test_schedule_without_warm_up_and_with_warm_up_only() -> None:
    assert rates(warmup=0, steps=3) == pytest.approx([0.5, 0.5 * 0.55, 0.05])
    assert rates(warmup=8, steps=3) == pytest.approx([0.0625, 0.125, 0.1875])
    assert rates(warmup=0, steps=1) == pytest.approx([0.5])


@pytest.mark.parametrize("done", [0, 1, 4, 11])
def test_schedule_goes_on_exactly_after_a_resume(done: int) -> None:
    assert rates(warmup=4, steps=12, done=done) == rates(warmup=4, steps=12)[done:]


def test_restored_moments_keep_the_configured_rates() -> None:
    model = Transformer(MODEL)
    first = build_optimizer(model, OptimConfig(lr=1e-3))
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    first.step()
    second = build_optimizer(model, OptimConfig(lr=5e-3, weight_decay=0.0))
    load_optimizer_state(second, first.state_dict())
    assert {group["lr"] for group in second.param_groups} == {5e-3}
    assert {group["weight_decay"] for group in second.param_groups} == {0.0}
    for parameter in model.parameters():
        assert torch.equal(second.state[parameter]["exp_avg"], first.state[parameter]["exp_avg"])

"""The layer as a whole: combined parts, counters, score bias, recompute, compile, losses."""

from __future__ import annotations

import copy
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from moe_trainer.moe import ConfigError, MoEConfig
from moe_trainer.moe.freezing import FrozenExperts
from moe_trainer.moe.layer import MoE, orthogonal_losses, post_step

FULL: dict[str, Any] = {
    "num_experts": 8,
    "hidden_size": 12,
    "bias": True,
    "router": {"top_k": 2, "bias_gamma": 1e-3, "gating_function": "sigmoid", "normalize_expert_weights": 1.0},
    "shared_mlp": {"num_experts": 2, "hidden_size": 8},
    "latent": {"latent_dim": 8, "norm": True},
    "z_loss_weight": 1e-3,
}


def make(**settings: Any) -> MoE:
    torch.manual_seed(0)
    layer = MoE(MoEConfig(**{**FULL, **settings}), 16)
    for parameter in layer.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    return layer


def run(layer: Any, x: torch.Tensor) -> list[torch.Tensor]:
    """Output, total loss, and all gradients."""
    leaf = x.clone().requires_grad_()
    y, losses = layer(leaf)
    (y.square().mean() + losses.total).backward()
    return [y, losses.total, leaf.grad, *(p.grad for p in layer.parameters())]


@pytest.mark.parametrize("latent", [None, FULL["latent"]])
@pytest.mark.parametrize("shared", [None, {"hidden_size": 8}, FULL["shared_mlp"]])
@pytest.mark.parametrize("capacity", [None, 0.5])
@pytest.mark.parametrize("backend", ["torch", "loop"])
def test_every_combination_trains_every_parameter(
    latent: Any, shared: Any, capacity: float | None, backend: str
) -> None:
    layer = make(latent=latent, shared_mlp=shared, capacity_factor=capacity, backend=backend)
    y, _, *gradients = run(layer, torch.randn(2, 40, 16))
    assert y.shape == (2, 40, 16)
    assert all(g is not None and g.isfinite().all() and g.abs().sum() > 0 for g in gradients)


def test_dropped_tokens_pass_by_and_are_counted() -> None:
    layer = make(shared_mlp=None, latent=None, bias=False, capacity_factor=0.2)
    x = torch.randn(2, 100, 16)
    y, _ = layer(x)
    kept = layer.dispatcher(layer.router(x)).kept_TK
    assert kept is not None
    gone = ~kept.any(-1)
    assert gone.any() and (y.view(-1, 16)[gone] == 0).all() and (y.view(-1, 16)[~gone] != 0).any()
    (stats,) = post_step([layer])
    assert int(stats.counts_E.sum()) == 400 and int(stats.dropped_E.sum()) == int((~kept).sum())
    assert stats.drop_rate == pytest.approx(float((~kept).float().mean()))


def test_no_tokens_give_zero_gradients_and_no_values() -> None:
    layer = make(capacity_factor=1.0)
    y, losses, _, *gradients = run(layer, torch.randn(0, 5, 16))
    assert y.shape == (0, 5, 16) and losses == 0
    assert all(g is None or (g.nan_to_num() == 0).all() for g in gradients)
    assert all(p.grad is not None for p in layer.experts.parameters())
    (stats,) = post_step([layer])
    assert stats.load_imbalance is None and stats.drop_rate is None


def test_counters_stay_exact_in_a_bf16_model() -> None:
    """A bf16 counter stops at 256."""
    layer = make().to(torch.bfloat16)
    for _ in range(20):
        layer(torch.randn(4, 64, 16).bfloat16())
    assert layer.load.counts_E.dtype == torch.int64
    assert int(layer.load.counts_E.sum()) == 20 * 4 * 64 * 2
    layer.eval()(torch.randn(4, 64, 16).bfloat16())
    (stats,) = post_step([layer])
    assert int(stats.counts_E.sum()) == 20 * 4 * 64 * 2 and int(layer.load.counts_E.sum()) == 0


def test_bias_moves_by_the_whole_batch_once_per_step() -> None:
    layer = make()
    assert layer.router.score_bias is not None
    counts = torch.tensor([5, 1, 3, 3, 3, 3, 3, 3])
    for _ in range(3):
        layer.load(counts, None)
    assert post_step([layer])[0].counts_E.tolist() == (3 * counts).tolist()
    expected = torch.tensor([-1, 1, 0, 0, 0, 0, 0, 0]) * torch.tensor(1e-3)
    assert torch.equal(layer.router.score_bias, expected)
    post_step([layer])
    assert torch.equal(layer.router.score_bias, expected)
    layer.router.requires_grad_(False)
    layer.load(counts, None)
    post_step([layer])
    assert torch.equal(layer.router.score_bias, expected)


@pytest.mark.parametrize("reentrant", [False, True])
def test_recompute_changes_no_number_and_counts_once(reentrant: bool) -> None:
    plain = make(router={**FULL["router"], "jitter_eps": 0.1})
    again = copy.deepcopy(plain)
    x = torch.randn(2, 30, 16)

    def body(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        y, losses = again(x)
        return y, losses.total

    torch.manual_seed(5)
    expected = run(plain, x)
    leaf = x.clone().requires_grad_()
    torch.manual_seed(5)
    y, total = checkpoint(body, leaf, use_reentrant=reentrant)
    (y.square().mean() + total).backward()
    got = [y, total, leaf.grad, *(p.grad for p in again.parameters())]
    # A reentrant first pass runs without gradients, where there are no router losses to report.
    for a, b in list(zip(got, expected, strict=True))[2 if reentrant else 0 :]:
        assert a is not None and torch.equal(a, b)
    assert torch.equal(again.load.counts_E, plain.load.counts_E)


def test_compiled_layer_gives_the_same_numbers_and_counts() -> None:
    plain = make(shared_mlp={"hidden_size": 8}, hidden_size=16)
    compiled = copy.deepcopy(plain)
    fast = torch.compile(compiled, backend="aot_eager", fullgraph=True)
    x = torch.randn(2, 30, 16)
    for a, b in zip(run(fast, x), run(plain, x), strict=True):
        torch.testing.assert_close(a, b)
    assert torch.equal(compiled.load.counts_E, plain.load.counts_E)
    assert torch.equal(compiled.router(x).indices_TK, plain.router(x).indices_TK)


def test_losses_do_not_grow_with_micro_batches() -> None:
    layer = make(lb_loss_granularity="instance")
    x = torch.randn(4, 30, 16)
    whole = layer(x)[1].total
    parts = sum(layer(part, loss_divisor=120)[1].total for part in x.split(1))
    torch.testing.assert_close(whole, parts)


def test_losses_only_in_training_with_gradients() -> None:
    layer, x = make(), torch.randn(2, 30, 16)
    assert layer(x)[1].balance is not None
    with torch.no_grad():
        assert layer(x)[1].balance is None
    assert layer.eval()(x)[1] == (0, None, None, None)


def test_loss_scale_and_weights() -> None:
    torch.manual_seed(0)
    x = torch.randn(2, 30, 16)
    for number, scaled in ((4, True), (4, False)):
        config = MoEConfig(**{**FULL, "scale_loss_by_num_layers": scaled, "orth_loss_weight": 0.5})
        layer = MoE(config, 16, num_layers=number)
        losses = layer(x)[1]
        assert losses.balance is not None and losses.z is not None
        factor = 1 / number if scaled else 1
        torch.testing.assert_close(losses.total.detach(), factor * (0.01 * losses.balance + 1e-3 * losses.z))
        total = orthogonal_losses([layer, layer])
        assert float(total) > 0 and total.requires_grad
    assert float(orthogonal_losses([make()])) == 0


def test_dispatch_loss_pushes_only_over_and_underloaded_experts() -> None:
    """Equal loads: no gradient. A busy expert: the tokens near its threshold are pushed away."""
    from moe_trainer.moe.losses import dispatch_loss

    logits = torch.tensor([[1.0, 0.9, -4.0], [3.0, 0.0, -4.0]], requires_grad=True)
    indices = torch.tensor([[0], [0]])
    dispatch_loss(logits, indices, torch.tensor([2, 2, 2]), 1.0).backward()
    assert logits.grad is not None and float(logits.grad.abs().max()) < 1e-7
    logits.grad = None
    dispatch_loss(logits, indices, torch.tensor([2, 0, 0]), 1.0).backward()
    near, far = logits.grad[0], logits.grad[1]
    assert near[0] > far[0] > 0 and near[1] < 0


@pytest.mark.parametrize("backend", ["torch", "loop"])
def test_layer_is_deterministic(backend: str) -> None:
    x = torch.randn(4, 300, 16)
    first, second = (run(make(capacity_factor=0.9, backend=backend), x) for _ in range(2))
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


def test_expert_choice_layer_trains() -> None:
    layer = make(router={"top_k": 2, "routing": "expert_choice"})
    _, _, *gradients = run(layer, torch.randn(2, 30, 16))
    assert all(g.isfinite().all() for g in gradients)
    assert layer.load.counts_E.tolist() == [15] * 8


def test_frozen_experts_stay_bit_equal_under_momentum_and_decay() -> None:
    layer = make()
    optimizer = torch.optim.AdamW(layer.parameters(), lr=0.1, weight_decay=0.1)
    run(layer, torch.randn(2, 30, 16))
    optimizer.step()
    before = {name: p.detach().clone() for name, p in layer.experts.named_parameters()}
    frozen = FrozenExperts([layer], [1, 5], optimizer)
    for _ in range(2):
        run(layer, torch.randn(2, 30, 16))
        optimizer.step()
    for name, p in layer.experts.named_parameters():
        changed = (p != before[name]).flatten(1).any(-1)
        assert changed.tolist() == [e not in (1, 5) for e in range(8)]
    frozen.release()
    optimizer.step()
    assert (layer.experts.w_down[1] != before["w_down"][1]).any()
    for index in (8, -1, 1.0, True):
        with pytest.raises(ConfigError, match=f"frozen experts = {index}"):
            FrozenExperts([layer], [index], optimizer)  # type: ignore[list-item]


@pytest.mark.distributed
def test_global_balancing_uses_the_counts_of_all_ranks() -> None:
    """Two ranks: each loss has the averaged counts and its own scores; one collective for all layers."""
    script = Path(__file__).with_name("ranks_global_balance.py")
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", script]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("equal on rank") == 2

"""Router, losses and bias update against OLMo-core 3.0.0, with its faults tested as such."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from moe_trainer.moe import MoEConfig, RouterConfig
from moe_trainer.moe.layer import MoE, post_step
from moe_trainer.moe.router import DenseRouter, Router

pytest.importorskip("olmo_core")
from olmo_core.nn.moe.router import MoERouterGatingFunction
from olmo_core.nn.moe.v2.router import MoERouterConfigV2

pytestmark = pytest.mark.parity
B, S, D, E, K = 3, 10, 16, 12, 4

SETTINGS: list[dict[str, Any]] = [
    {},
    {"bias": True},
    {"normalize_expert_weights": 1.0},
    {"normalize_expert_weights": 2.5, "restore_weight_scale": True},
    {"expert_weight_scale": 2.5, "original_top_k": 8},
    {"score_correction_bias": True},
    {"bias_gamma": 1e-3},
    {"uniform_expert_assignment": True},
    {"jitter_eps": 0.1},
    {"top_k": 1, "normalize_expert_weights": 1.0},
]
GROUPS = [
    {"n_group": 4, "topk_group": 2, "score_correction_bias": True},
    {"n_group": 12, "topk_group": 5},
    {"n_group": 1, "topk_group": 1},
]
CASES = [
    {"gating_function": gating, **setting}
    for gating in ("softmax", "topk_softmax", "sigmoid")
    for setting in (SETTINGS + (GROUPS if gating != "topk_softmax" else []))
]


def pair(**settings: Any) -> tuple[Router, Any]:
    torch.manual_seed(0)
    config = RouterConfig(**{"d_model": D, "num_experts": E, "top_k": K, **settings})
    theirs = MoERouterConfigV2(
        **{
            "d_model": D,
            "num_experts": E,
            "top_k": K,
            **settings,
            "gating_function": MoERouterGatingFunction(config.gating_function),
        }
    ).build()
    ours = Router(config)
    with torch.no_grad():
        ours.weight.normal_()
        theirs.weight.copy_(ours.weight.flatten())
        if ours.bias is not None:
            theirs.bias.copy_(ours.bias.normal_())
        if ours.score_bias is not None:
            theirs.score_bias.copy_(ours.score_bias.normal_(std=0.3))
    return ours, theirs


def same(a: torch.Tensor, b: torch.Tensor) -> None:
    torch.testing.assert_close(a, b.reshape(a.shape), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("settings", CASES, ids=str)
def test_router_selects_weighs_and_differentiates_as_olmo_core(settings: dict[str, Any]) -> None:
    ours, theirs = pair(**settings)
    x = torch.randn(B, S, D)
    gradients = []
    for router in (ours, theirs):
        torch.manual_seed(1)
        leaf = x.clone().requires_grad_()
        out = router(leaf) if router is ours else router(leaf, False)
        torch.manual_seed(2)
        cotangent = torch.randn(out[0].numel())
        (out[0].flatten() * cotangent).sum().backward()
        gradients.append((out, leaf.grad, router.weight.grad))
    (a, dx, dw), (b, their_dx, their_dw) = gradients
    assert torch.equal(a.indices_TK, b[1].view(a.indices_TK.shape))
    assert torch.equal(a.counts_E, b[2].long())
    same(a.weights_TK, b[0])
    same(a.scores_TE, b[3][0])
    same(a.logits_TE, b[3][1])
    same(dx, their_dx)
    same(dw, their_dw)


@pytest.mark.parametrize("gating", ["softmax", "sigmoid"])
@pytest.mark.parametrize("norm", [None, 1.0])
def test_scores_that_mix_shared_experts_equal_scores_only(gating: str, norm: float | None) -> None:
    ours, theirs = pair(gating_function=gating, normalize_expert_weights=norm)
    dense = DenseRouter(ours.config)
    dense.load_state_dict(ours.state_dict())
    x = torch.randn(B, S, D)
    same(dense(x), theirs(x, True)[0])


@pytest.mark.parametrize("gating", ["softmax", "topk_softmax", "sigmoid"])
@pytest.mark.parametrize("granularity", ["local_batch", "instance"])
@pytest.mark.parametrize("divisor", [None, 77.0])
def test_balance_and_z_loss_and_their_gradients(gating: str, granularity: str, divisor: float | None) -> None:
    from olmo_core.nn.moe.loss import MoELoadBalancingLossGranularity

    _, theirs = pair(gating_function=gating)
    theirs = MoERouterConfigV2(
        d_model=D,
        num_experts=E,
        top_k=K,
        gating_function=MoERouterGatingFunction(gating),
        lb_loss_weight=0.02,
        lb_loss_granularity=MoELoadBalancingLossGranularity(granularity),
        z_loss_weight=1e-3,
    ).build()
    config = MoEConfig(
        num_experts=E,
        hidden_size=8,
        router={"top_k": K, "gating_function": gating},
        lb_loss_weight=0.02,
        lb_loss_granularity=granularity,
        z_loss_weight=1e-3,
    )
    layer = MoE(config, D)
    with torch.no_grad():
        layer.router.weight.normal_()
        theirs.weight.copy_(layer.router.weight.flatten())
    x = torch.randn(B, S, D)
    *_, info = theirs(x, False, loss_div_factor=divisor)
    expected = theirs.compute_aux_loss(*info)
    expected.backward()
    losses = layer(x, loss_divisor=divisor)[1]
    losses.total.backward()
    same(losses.total, expected)
    same(losses.balance, theirs.load_balancing_loss)
    same(losses.z, theirs.z_loss)
    same(layer.router.weight.grad, theirs.weight.grad)


def test_bias_updates_agree_in_fp32_and_stay_exact_where_olmo_core_freezes() -> None:
    """2,000 updates of 1e-3 under a bf16 model: ours moves by 2, theirs stops at 0.5."""
    gamma, updates = 1e-3, 2000
    config = MoEConfig(
        num_experts=4, hidden_size=8, router={"top_k": 1, "bias_gamma": gamma}, lb_loss_weight=None
    )
    layer = MoE(config, 8)
    theirs = MoERouterConfigV2(d_model=8, num_experts=4, top_k=1, bias_gamma=gamma).build()
    theirs_bf16 = MoERouterConfigV2(d_model=8, num_experts=4, top_k=1, bias_gamma=gamma).build()
    layer.to(torch.bfloat16)
    theirs_bf16.to(torch.bfloat16)
    counts = torch.tensor([30, 2, 2, 2])
    for _ in range(updates):
        layer.load.counts_E += counts
        post_step([layer])
        for router in (theirs, theirs_bf16):
            router.score_bias_batch_size_per_expert += counts
            router.post_batch()
    assert layer.router.score_bias is not None and layer.router.score_bias.dtype == torch.float32
    expected = torch.tensor([-1.0, 1.0, 1.0, 1.0]) * updates * gamma
    assert torch.equal(layer.router.score_bias, expected)
    # Theirs adds in fp32, which drifts.
    torch.testing.assert_close(layer.router.score_bias, theirs.score_bias, rtol=1e-4, atol=0)
    assert float(theirs_bf16.score_bias.abs().max()) <= 0.51


def test_settings_that_olmo_core_takes_and_we_refuse() -> None:
    """k = 0 is accepted there without a word."""
    MoERouterConfigV2(d_model=8, num_experts=4, top_k=0).build()
    with pytest.raises(Exception, match="top_k = 0"):
        RouterConfig(d_model=8, num_experts=4, top_k=0)


def test_tie_break_prefers_the_lower_index_at_any_magnitude() -> None:
    """Their offset of 1e-7 an index prefers the higher one, and vanishes above 1."""
    _, theirs = pair()
    ties = torch.zeros(1, E)
    assert int(theirs._break_ties(ties).argmax()) == E - 1
    assert theirs._break_ties(ties + 8).unique().numel() < E
    exact = Router(RouterConfig(d_model=D, num_experts=E, top_k=K, tie_break=True))
    for magnitude in (0.0, 1.0, 1e3, 1e30):
        assert exact.select(ties + magnitude).tolist() == [[0, 1, 2, 3]]

"""The whole layer against the MoE blocks of transformers and torchtitan, with copied weights, in fp32."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from moe_trainer.moe import MoEConfig
from moe_trainer.moe.layer import MoE

transformers = pytest.importorskip("transformers", minversion="5.10")
pytestmark = pytest.mark.parity
D, H, E, K = 16, 24, 8, 3


def mixtral() -> tuple[nn.Module, dict[str, Any]]:
    from transformers.models.mixtral.modeling_mixtral import MixtralSparseMoeBlock as Block

    config = transformers.MixtralConfig(
        hidden_size=D, intermediate_size=H, num_local_experts=E, num_experts_per_tok=K
    )
    return Block(config), {"router": {"top_k": K, "normalize_expert_weights": 1.0}}


def qwen3(normalize: bool) -> tuple[nn.Module, dict[str, Any]]:
    from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeSparseMoeBlock as Block

    config = transformers.Qwen3MoeConfig(
        hidden_size=D,
        moe_intermediate_size=H,
        num_experts=E,
        num_experts_per_tok=K,
        norm_topk_prob=normalize,
    )
    norm = 1.0 if normalize else None
    return Block(config), {"router": {"top_k": K, "normalize_expert_weights": norm}}


def deepseek() -> tuple[nn.Module, dict[str, Any]]:
    from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3MoE as Block

    config = transformers.DeepseekV3Config(
        hidden_size=D,
        moe_intermediate_size=H,
        n_routed_experts=E,
        num_experts_per_tok=K,
        n_shared_experts=2,
        n_group=4,
        topk_group=2,
        routed_scaling_factor=2.5,
    )
    router = {
        "top_k": K,
        "gating_function": "sigmoid",
        "sigmoid_stability_epsilon": 0.0,
        "normalize_expert_weights": 1.0,
        "expert_weight_scale": 2.5,
        "score_correction_bias": True,
        "n_group": 4,
        "topk_group": 2,
    }
    return Block(config), {"router": router, "shared_mlp": {"hidden_size": 2 * H}}


def gpt_oss() -> tuple[nn.Module, dict[str, Any]]:
    from transformers.models.gpt_oss.modeling_gpt_oss import GptOssMLP as Block

    config = transformers.GptOssConfig(
        hidden_size=D, intermediate_size=H, num_local_experts=E, num_experts_per_tok=K
    )
    settings = {
        "router": {"top_k": K, "gating_function": "topk_softmax", "bias": True},
        "activation": "gpt_oss_swiglu",
        "activation_limit": 7.0,
        "bias": True,
    }
    return Block(config), settings


@torch.no_grad()
def copy_weights(theirs: Any, ours: MoE) -> None:
    """From a transformers block. Their gate is the first half, ours the second."""
    experts, gate = theirs.experts, getattr(theirs, "gate", None) or theirs.router
    ours.router.weight.copy_(gate.weight)
    if ours.router.bias is not None:
        ours.router.bias.copy_(gate.bias)
    if ours.router.score_bias is not None:
        ours.router.score_bias.copy_(gate.e_score_correction_bias)
    if ours.config.activation == "gpt_oss_swiglu":
        ours.experts.w_up_gate.copy_(experts.gate_up_proj.transpose(1, 2))
        ours.experts.w_down.copy_(experts.down_proj)
        assert ours.experts.b_up_gate is not None and ours.experts.b_down is not None
        ours.experts.b_up_gate.copy_(experts.gate_up_proj_bias)
        ours.experts.b_down.copy_(experts.down_proj_bias)
    else:
        ours.experts.w_up_gate.copy_(experts.gate_up_proj.roll(H, 1))
        ours.experts.w_down.copy_(experts.down_proj.transpose(1, 2))
    if ours.shared is not None:
        mlp, shared = theirs.shared_experts, ours.shared.experts
        shared.w_up_gate[0].copy_(torch.cat([mlp.up_proj.weight, mlp.gate_proj.weight]))
        shared.w_down[0].copy_(mlp.down_proj.weight.T)


def same(a: Tensor | None, b: Tensor | None) -> None:
    assert a is not None and b is not None
    torch.testing.assert_close(a, b.reshape(a.shape), rtol=1e-5, atol=1e-5 * float(b.detach().abs().max()))


BLOCKS: dict[str, Callable[[], tuple[nn.Module, dict[str, Any]]]] = {
    "mixtral": mixtral,
    "qwen3": lambda: qwen3(True),
    "qwen3-raw": lambda: qwen3(False),
    "deepseek-v3": deepseek,
    "gpt-oss": gpt_oss,
}


@pytest.mark.parametrize("backend", ["torch", "loop"])
@pytest.mark.parametrize("name", BLOCKS)
def test_whole_layer_forward_and_backward(name: str, backend: str) -> None:
    theirs, settings = BLOCKS[name]()
    ours = MoE(MoEConfig(num_experts=E, hidden_size=H, backend=backend, **settings), D)
    torch.manual_seed(0)
    for tensor in [*theirs.parameters(), *theirs.buffers()]:
        nn.init.normal_(tensor, std=0.4)
    copy_weights(theirs, ours)
    x, cotangent = torch.randn(2, 29, D), torch.randn(2, 29, D)
    outputs: list[tuple[Tensor, Tensor]] = []
    for layer in (ours, theirs):
        leaf = x.clone().requires_grad_()
        y = layer(leaf)
        y = y[0] if isinstance(y, tuple) else y
        y.backward(cotangent)
        assert leaf.grad is not None
        outputs.append((y, leaf.grad))
    same(outputs[0][0], outputs[1][0])
    same(outputs[0][1], outputs[1][1])
    gate: Any = getattr(theirs, "gate", None) or theirs.router
    experts: Any = theirs.experts
    same(ours.router.weight.grad, gate.weight.grad)
    if name == "gpt-oss":
        same(ours.experts.w_down.grad, experts.down_proj.grad)
        same(ours.experts.w_up_gate.grad, experts.gate_up_proj.grad.transpose(1, 2))
        assert ours.experts.b_down is not None
        same(ours.experts.b_down.grad, experts.down_proj_bias.grad)
    else:
        same(ours.experts.w_up_gate.grad, experts.gate_up_proj.grad.roll(H, 1))
        same(ours.experts.w_down.grad, experts.down_proj.grad.transpose(1, 2))


@pytest.mark.parametrize("score", ["softmax", "sigmoid"])
def test_router_of_torchtitan(score: str) -> None:
    """Its experts compute in bf16 only; its router is exact."""
    pytest.importorskip("torchtitan")
    from torchtitan.models.common.linear import Linear
    from torchtitan.models.common.moe import TokenChoiceTopKRouter

    theirs = TokenChoiceTopKRouter.Config(
        num_experts=E,
        gate=Linear.Config(in_features=D, out_features=E, bias=False),
        num_expert_groups=4,
        num_limited_groups=2,
        top_k=K,
        score_func=score,
        route_norm=True,
        route_scale=2.5,
    ).build()
    config = MoEConfig(
        num_experts=E,
        router={
            "top_k": K,
            "gating_function": score,
            "sigmoid_stability_epsilon": 0.0,
            "normalize_expert_weights": 1.0,
            "expert_weight_scale": 2.5,
            "n_group": 4,
            "topk_group": 2,
            "score_correction_bias": True,
        },
    )
    ours = MoE(config, D).router
    torch.manual_seed(0)
    nn.init.normal_(ours.weight)
    assert ours.score_bias is not None
    ours.score_bias.normal_(std=0.2)
    with torch.no_grad():
        theirs.gate.weight.copy_(ours.weight)
    x = torch.randn(2, 29, D)
    weights, indices, scores = theirs(x, ours.score_bias)
    out = ours(x)
    order = indices.view(-1, K).argsort(-1)
    mine = out.indices_TK.argsort(-1)
    assert torch.equal(indices.view(-1, K).gather(-1, order), out.indices_TK.gather(-1, mine))
    same(out.weights_TK.gather(-1, mine), weights.view(-1, K).gather(-1, order))
    same(out.scores_TE, scores)

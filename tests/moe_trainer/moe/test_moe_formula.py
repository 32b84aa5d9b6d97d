"""The layer in all combinations of its settings against the written formulas, one token at a time.

Nothing of the layer's own arithmetic is used: the formulas here are those of the layer's description, in
float64 from the fp32 logits on, and autograd differentiates them.
"""

from __future__ import annotations

import math
from fractions import Fraction
from typing import Any

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from moe_trainer.moe import MoEConfig
from moe_trainer.moe.experts import Experts
from moe_trainer.moe.layer import MoE

D, E = 16, 8
ACTIVATIONS = [("swiglu", None), ("relu2", None), ("gpt_oss_swiglu", None), ("gpt_oss_swiglu", 0.5)]


def activated(up: Tensor, kind: str, limit: float | None) -> Tensor:
    if kind == "relu2":
        return torch.where(up > 0, up**2, 0.0)
    if kind == "swiglu":
        value, gate = up[: len(up) // 2], up[len(up) // 2 :]
        return value * gate / (1 + torch.exp(-gate))
    gate, value = up[0::2], up[1::2]
    if limit is not None:
        gate, value = gate.clamp(max=limit), value.clamp(-limit, limit)
    return (value + 1) * gate / (1 + torch.exp(-1.702 * gate))


def one_expert(experts: Experts, e: int, x: Tensor) -> Tensor:
    up = experts.w_up_gate[e].double() @ x
    if experts.b_up_gate is not None:
        up = up + experts.b_up_gate[e].double()
    y = activated(up, experts.activation, experts.limit) @ experts.w_down[e].double()
    return y if experts.b_down is None else y + experts.b_down[e].double()


def scores_of(logits: Tensor, gating: str, epsilon: float) -> Tensor:
    if gating == "sigmoid":
        return 1 / (1 + torch.exp(-logits)) + epsilon
    return torch.exp(logits) / torch.exp(logits).sum(-1, keepdim=True)


def routing(layer: MoE, x: Tensor) -> tuple[list[list[int]], list[list[Tensor]], Tensor, Tensor]:
    """Selected experts and their weights for each token, scores and logits."""
    c, router = layer.router.config, layer.router
    logits = x @ router.weight.double().T
    if router.bias is not None:
        logits = logits + router.bias.double()
    logits = logits / c.temperature
    scores = scores_of(logits, c.gating_function, c.sigmoid_stability_epsilon)
    topk = c.gating_function == "topk_softmax"
    chosen, weights = [], []
    for t in range(len(x)):
        value = (logits if topk else scores)[t].detach()
        if router.score_bias is not None:
            value = value + router.score_bias.double()
        allowed = set(range(E))
        if c.n_group is not None and c.topk_group is not None:
            size = E // c.n_group
            groups = [list(range(g * size, (g + 1) * size)) for g in range(c.n_group)]
            best = {g: sum(sorted(value[m].tolist())[-2:]) for g, m in enumerate(groups)}
            kept = sorted(best, key=lambda g: -best[g])[: c.topk_group]
            allowed = {e for g in kept for e in groups[g]}
        picks = sorted(allowed, key=lambda e: -float(value[e]))[: c.top_k]
        w = torch.softmax(logits[t, picks], -1) if topk else scores[t, picks]
        p = c.normalize_expert_weights
        if p is not None:
            w = w / (w.max() if math.isinf(p) else (w**p).sum() ** (1 / p))
        w = w * (c.top_k if c.restore_weight_scale else 1) * (c.expert_weight_scale or 1)
        w = w * ((c.original_top_k or c.top_k) / c.top_k) ** 0.5
        chosen.append(picks)
        weights.append(list(w))
    return chosen, weights, scores, logits


def drop(layer: MoE, chosen: list[list[int]], weights: list[list[Tensor]]) -> list[list[Tensor]]:
    """Weights after the capacity has been applied."""
    c = layer.config
    if c.capacity_factor is None:
        return weights
    ideal = Fraction(str(c.capacity_factor)) * c.router.top_k * len(chosen) / E
    capacity = math.ceil(ideal / 8) * 8
    out = [list(w) for w in weights]
    for e in range(E):
        slots = [(t, j) for t, picks in enumerate(chosen) for j, pick in enumerate(picks) if pick == e]
        if c.drop_policy == "probs":
            slots.sort(key=lambda slot: -float(weights[slot[0]][slot[1]].detach()))
        for t, j in slots[capacity:]:
            out[t][j] = 0 * weights[t][j]
    if c.renormalize_after_drop:
        for t, w in enumerate(out):
            left = sum(w, torch.zeros(()))
            if float(left.detach()) > 0:
                out[t] = [v * sum(weights[t], torch.zeros(())) / left for v in w]
    return out


def formula(layer: MoE, x_BSD: Tensor) -> tuple[Tensor, Tensor]:
    """Output and total router loss."""
    c, x = layer.config, x_BSD.double().flatten(0, 1)
    chosen, weights, scores, logits = routing(layer, x)
    used = drop(layer, chosen, weights)
    rows = []
    for t in range(len(x)):
        routed_x = x[t]
        if layer.latent is not None:
            routed_x = layer.latent.down.weight.double() @ routed_x + layer.latent.down.bias.double()
        terms = [w * one_expert(layer.experts, e, routed_x) for e, w in zip(chosen[t], used[t], strict=True)]
        y = torch.stack(terms).sum(0)
        if layer.latent is not None:
            assert layer.latent.norm is not None
            y = y / (y.square().mean() + 1e-5).sqrt() * layer.latent.norm.weight.double()
            y = layer.latent.up.weight.double() @ y + layer.latent.up.bias.double()
        if layer.shared is not None:
            parts = [
                one_expert(layer.shared.experts, e, x[t]) for e in range(layer.shared.experts.num_experts)
            ]
            mix = torch.ones(1, dtype=torch.float64)
            if layer.shared.router is not None:
                mix = torch.softmax(layer.shared.router.weight.double() @ x[t], -1)
            y = y + sum(m * part for m, part in zip(mix, parts, strict=True))
        rows.append(y)
    probs = scores / scores.sum(-1, keepdim=True) if c.router.gating_function == "sigmoid" else scores
    instances = x_BSD.shape[0] if c.lb_loss_granularity == "instance" else 1
    balance = torch.zeros((), dtype=torch.float64)
    for part in torch.arange(len(x)).chunk(instances):
        counts = torch.tensor([sum(e in chosen[t] for t in part.tolist()) for e in range(E)])
        balance = balance + E / c.router.top_k * (counts * probs[part].mean(0)).sum() / len(x)
    z = torch.log(torch.exp(logits).sum(-1)).square().sum() / len(x)
    assert c.lb_loss_weight is not None and c.z_loss_weight is not None
    return torch.stack(rows).view_as(x_BSD), c.lb_loss_weight * balance + c.z_loss_weight * z


routers = st.fixed_dictionaries(
    {
        "gating_function": st.sampled_from(["softmax", "topk_softmax", "sigmoid"]),
        "top_k": st.integers(1, 4),
        "bias": st.booleans(),
        "score_correction_bias": st.booleans(),
        "normalize_expert_weights": st.sampled_from([None, 0.5, 1.0, 2.0, 3.0, math.inf]),
        "restore_weight_scale": st.booleans(),
        "expert_weight_scale": st.sampled_from([None, 2.5]),
        "original_top_k": st.sampled_from([None, 1, 8]),
        "temperature": st.sampled_from([1.0, 0.7]),
    },
    optional={"n_group": st.just(4), "topk_group": st.just(2)},
).filter(
    lambda r: (
        ("n_group" in r) == ("topk_group" in r)
        and not ("n_group" in r and r["gating_function"] == "topk_softmax")
    )
)
layers = st.fixed_dictionaries(
    {
        "router": routers,
        "bias": st.booleans(),
        "backend": st.sampled_from(["torch", "loop"]),
        "latent": st.sampled_from([None, {"latent_dim": 8, "bias": True, "norm": True}]),
        "shared_mlp": st.sampled_from([None, {"hidden_size": 4}, {"num_experts": 3, "hidden_size": 4}]),
        "capacity_factor": st.sampled_from([None, 0.3, 0.9, 1e300]),
        "drop_policy": st.sampled_from(["position", "probs"]),
        "renormalize_after_drop": st.booleans(),
        "lb_loss_granularity": st.sampled_from(["local_batch", "instance"]),
    }
).filter(lambda c: not c["renormalize_after_drop"] or c["capacity_factor"] is not None)


@settings(deadline=None, max_examples=25, derandomize=True)
@given(layers, st.sampled_from(ACTIVATIONS), st.integers(0, 99))
def test_layer_is_the_formula_for_every_combination(
    given_layer: dict[str, Any], activation: tuple[str, float | None], seed: int
) -> None:
    torch.manual_seed(seed)
    config = MoEConfig(
        num_experts=E,
        hidden_size=8,
        activation=activation[0],
        activation_limit=activation[1],
        lb_loss_weight=0.3,
        z_loss_weight=0.2,
        **given_layer,
    )
    layer = MoE(config, D)
    for parameter in layer.parameters():
        torch.nn.init.normal_(parameter, std=0.4)
    if layer.router.score_bias is not None:
        layer.router.score_bias.normal_(std=0.2)
    x, cotangent = torch.randn(2, 12, D), torch.randn(2, 12, D)
    results: list[list[Tensor]] = []
    for run in (layer, lambda leaf: formula(layer, leaf)):
        leaf = x.clone().requires_grad_()
        y, losses = run(leaf)
        total = losses if isinstance(losses, Tensor) else losses.total
        inputs = [leaf, *layer.parameters()]
        gradients = torch.autograd.grad([y, total], inputs, [cotangent.to(y.dtype), torch.ones_like(total)])
        results.append([y, total, *gradients])
    for got, expected in zip(*results, strict=True):
        # Terms of the size of 1 cancel, as in the weights' gradient where there is one expert of weight 1.
        scale = max(1.0, float(expected.detach().abs().max()))
        torch.testing.assert_close(got.double(), expected.double(), rtol=1e-4, atol=2e-5 * scale)

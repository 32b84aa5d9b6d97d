"""Balancing rules compared on a task that wants uneven experts: loss, evenness and flatness of the router.

Tokens come from 24 clusters with Zipf frequencies, and each cluster has a linear map to learn. A router that
follows the clusters is uneven; a balancing rule must spread the tokens without flattening the probabilities.

    python benchmarks/balancing.py
"""

from __future__ import annotations

import statistics
from typing import Any

import torch

from moe_trainer.moe import MoEConfig
from moe_trainer.moe.layer import MoE, post_step

D_MODEL, EXPERTS, CLUSTERS, TOKENS, STEPS, SEEDS = 16, 8, 24, 512, 600, 5
RULES: dict[str, dict[str, Any]] = {
    "none": {"lb_loss_weight": None},
    "mean probabilities, 0.01": {"lb_loss_weight": 0.01},
    "mean probabilities, 0.1": {"lb_loss_weight": 0.1},
    "dispatch, 0.01": {"lb_loss_weight": 0.01, "lb_loss_kind": "dispatch"},
    "dispatch, 0.1": {"lb_loss_weight": 0.1, "lb_loss_kind": "dispatch"},
    "score bias, 1e-3": {"lb_loss_weight": None, "bias_gamma": 1e-3},
    "score bias, 1e-2": {"lb_loss_weight": None, "bias_gamma": 1e-2},
}


def train(rule: dict[str, Any], seed: int) -> tuple[float, float, float, float]:
    """Mean loss, max load in fair shares, entropy and largest probability of the router, last 100 steps."""
    torch.manual_seed(seed)
    centres = torch.randn(CLUSTERS, D_MODEL) * 1.5
    maps = torch.randn(CLUSTERS, D_MODEL, D_MODEL) / D_MODEL**0.5
    frequency = 1 / torch.arange(1, CLUSTERS + 1).float()
    rule = dict(rule)
    router = {"top_k": 2, "normalize_expert_weights": 1.0, "bias_gamma": rule.pop("bias_gamma", None)}
    layer = MoE(MoEConfig(num_experts=EXPERTS, hidden_size=32, router=router, **rule), D_MODEL)
    for parameter in layer.experts.parameters():
        torch.nn.init.normal_(parameter, std=D_MODEL**-0.5)
    optimizer = torch.optim.AdamW(layer.parameters(), lr=3e-3)
    kept = []
    for step in range(STEPS):
        cluster = torch.multinomial(frequency, TOKENS, replacement=True)
        x = centres[cluster] + 0.5 * torch.randn(TOKENS, D_MODEL)
        target = torch.einsum("td,tde->te", x, maps[cluster])
        y, losses = layer(x)
        loss = (y - target).square().mean()
        optimizer.zero_grad()
        torch.autograd.backward(loss + losses.total)
        (load,) = post_step([layer])
        optimizer.step()
        if step >= STEPS - 100:
            probabilities = layer.router(x).scores_TE.detach()
            entropy = float(torch.special.entr(probabilities).sum(-1).mean())
            assert load.load_imbalance is not None
            kept.append(
                (float(loss.detach()), load.load_imbalance, entropy, float(probabilities.amax(-1).mean()))
            )
    loss_, imbalance, entropy, top = (statistics.mean(column) for column in zip(*kept, strict=True))
    return loss_, imbalance, entropy, top


def main() -> None:
    torch.set_num_threads(1)
    print("| rule | loss | max load | entropy, nats | largest probability |")
    print("| --- | ---: | ---: | ---: | ---: |")
    for name, rule in RULES.items():
        runs = [train(rule, seed) for seed in range(SEEDS)]
        loss, imbalance, entropy, top = (statistics.mean(column) for column in zip(*runs, strict=True))
        print(f"| {name} | {loss:.3f} | {imbalance:.2f} | {entropy:.2f} | {top:.2f} |", flush=True)


if __name__ == "__main__":
    main()

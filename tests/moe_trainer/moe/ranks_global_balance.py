"""Run by torchrun: global balancing losses of two layers against the formula, on each rank."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from moe_trainer.moe import MoEConfig
from moe_trainer.moe.balance import resolve_global_balance
from moe_trainer.moe.layer import MoE, post_step

dist.init_process_group("gloo")
rank, calls = dist.get_rank(), []
config = MoEConfig(
    num_experts=8,
    hidden_size=12,
    global_load_balancing=True,
    router={"top_k": 2, "gating_function": "sigmoid", "bias_gamma": 1e-3},
)
torch.manual_seed(0)
layers = [MoE(config, 16, init_std=0.3) for _ in range(2)]
torch.manual_seed(rank)
x = torch.randn(2, 30, 16)
waiting = [layer(x)[1] for layer in layers]
routed_before = [layer.router(x) for layer in layers]

all_reduce = dist.all_reduce


def counted(*args: Any, **kwargs: Any) -> Any:
    calls.append(args)
    return all_reduce(*args, **kwargs)


dist.all_reduce = counted
complete = resolve_global_balance(waiting)
stats = post_step(layers)
assert len(calls) == 2, "one collective for the losses of all layers, one for their counters"
dist.all_reduce = all_reduce

for layer, losses, load, routed in zip(layers, complete, stats, routed_before, strict=True):
    counts = routed.counts_E.clone()
    dist.all_reduce(counts)
    assert torch.equal(load.counts_E, counts) and int(counts.sum()) == 240
    scores = routed.scores_TE / routed.scores_TE.sum(-1, keepdim=True)
    expected = 8 / 2 / 60 * torch.dot(counts / 2, scores.mean(0))
    torch.testing.assert_close(losses.balance, expected.detach())
    torch.testing.assert_close(losses.total.detach(), 0.01 * expected.detach())
    losses.total.backward()
    assert layer.router.weight.grad is not None
    sign = (counts.double().mean() - counts).sign()
    torch.testing.assert_close(layer.router.score_bias, (1e-3 * sign).float())
print(f"equal on rank {rank}", flush=True)
dist.destroy_process_group()

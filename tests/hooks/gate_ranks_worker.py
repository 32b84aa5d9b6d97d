"""Run by torchrun from test_gate_ranks.py: a gate on several ranks, some of which record nothing.

Every rank trains the same model on scripted picks, collapsed from step 9 on; each writes down the learning
rate of each step, and what the gate said.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn

from moe_audit.hooks import Recorder, TrainingGate
from moe_audit.hooks.adapters import FunctionAdapter, Routing
from moe_audit.thresholds.errors import UsageError

STEPS, SICK_FROM, EXPERTS, TOKENS, COOLDOWN = 40, 9, 4, 4000, 8


class Router(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.num_experts = EXPERTS
        self.weight = nn.Parameter(torch.ones(()))

    def forward(self, picks: Tensor) -> Tensor:
        return picks


ADAPTER = FunctionAdapter(Router, lambda picks: Routing(indices=picks), top_k=1)


def picks(rank: int, step: int) -> Tensor:
    generator = torch.Generator().manual_seed(1000 * rank + step)
    even = torch.randint(EXPERTS, (TOKENS, 1), generator=generator)
    return (even == 0).long() if step >= SICK_FROM else even


def scenario(folder: Path, name: str, group: dist.ProcessGroup | None = None, **options: str) -> None:
    rank = dist.get_rank()
    model = nn.ModuleDict({"layers": nn.ModuleList([Router()])})
    (router,) = model["layers"]
    optimizer = torch.optim.SGD([router.weight], lr=1.0)
    scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, 0.5, 1.0, STEPS)
    recorder = Recorder.attach(model, folder / f"{name}.db", flush_every=2, adapter=ADAPTER, group=group)
    gate = TrainingGate(recorder, optimizer, check_every=4, cooldown=COOLDOWN, **options)
    rates, statuses, weights = [], [], []
    for step in range(1, STEPS + 1):
        with recorder.microbatch():
            router(picks(rank, step))
        router.weight.grad = torch.ones(())
        rates.append(gate.rate(optimizer.param_groups[0]))
        optimizer.step()
        scheduler.step()
        recorder.step(step)
        statuses.append(gate.line())
        weights.append(float(router.weight))
        if gate.pause_requested:
            break
    recorder.close()
    told = {"rates": rates, "statuses": statuses, "weights": weights}
    (folder / f"{name}.{rank}.json").write_text(json.dumps(told))


def refused(path: Path) -> None:
    """A store a rank is INVALID on its own, so nothing could ever act on it."""
    model = nn.ModuleDict({"layers": nn.ModuleList([Router()])})
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    with Recorder.attach(model, path, adapter=ADAPTER, mode="per_rank") as recorder:
        try:
            TrainingGate(recorder, optimizer)
        except UsageError as error:
            assert "reduce" in str(error), error
        else:
            raise AssertionError("a gate on the counts of one rank")


def main(folder: Path) -> None:
    dist.init_process_group("gloo")
    ranks = dist.get_world_size()
    scenario(folder, "all", action="scale")
    # The first rank repeats what others see: it records nothing, and has no store.
    scenario(folder, "without_first", dist.new_group(list(range(1, ranks))), action="hold")
    scenario(folder, "without_last", dist.new_group(list(range(ranks - 1))), action="zero_router")
    scenario(folder, "pause", action="pause")
    refused(folder / "per_rank.db")
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]))

"""Run by torchrun from test_more_ranks.py: ranks that make different numbers of micro-batches.

Rank r picks expert r, for 4 tokens in each of the r + 1 micro-batches of a step, and none in step 3 if it is
the last rank.
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn

from moe_audit.hooks import Recorder
from moe_audit.hooks.adapters import FunctionAdapter, Routing

STEPS, TOKENS, EXPERTS = 5, 4, 4


class Router(nn.Module):
    num_experts = EXPERTS

    def forward(self, picks: Tensor) -> Tensor:
        return picks


def microbatches(rank: int, ranks: int, step: int) -> int:
    return 0 if (rank, step) == (ranks - 1, 3) else rank + 1


def main(folder: Path) -> None:
    dist.init_process_group("gloo")
    rank, ranks = dist.get_rank(), dist.get_world_size()
    adapter = FunctionAdapter(Router, lambda picks: Routing(indices=picks), top_k=1)
    for mode in ("reduce", "per_rank"):
        model = nn.Sequential(Router())
        with Recorder.attach(
            model, folder / f"{mode}.db", flush_every=4, adapter=adapter, mode=mode
        ) as recorder:
            for step in range(1, STEPS + 1):
                for _ in range(microbatches(rank, ranks, step)):
                    with recorder.microbatch():
                        model(torch.full((TOKENS, 1), rank))
                # Training has collectives of its own, which must not meet those of a flush.
                gradient = torch.ones(1)
                dist.all_reduce(gradient)
                assert gradient == ranks
                recorder.step(step)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]))

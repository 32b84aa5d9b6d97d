"""Run by test_recorder_ranks.py, once a rank: `unequal_ranks_worker.py SCENARIO RANK FOLDER`.

full: few counts fit a record; rank 1 has three times the tokens of rank 0, and more micro-batches.
lost: rank 1 ends in the middle of step 3, without a word.
"""

from __future__ import annotations

import os
import sys
from datetime import timedelta
from pathlib import Path
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor, nn

from moe_audit.hooks import Recorder
from moe_audit.hooks.adapters import FunctionAdapter

STEPS = 12


class Router(nn.Module):
    num_experts, top_k = 4, 1

    def forward(self, picks: Tensor) -> Tensor:
        return picks


def train(recorder: Recorder, model: nn.Module, rank: int, lost: bool) -> None:
    for step in range(1, STEPS + 1):
        for _ in range(2 if rank and step % 2 else 1):
            with recorder.microbatch():
                model(torch.full((30 if rank else 10, 1), step % 4))
                if lost and rank and step == 3:
                    os._exit(1)
        recorder.step(step)


def main(scenario: str, rank: int, folder: Path) -> None:
    store = f"file://{folder}/rendezvous"
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=2, timeout=timedelta(seconds=15))
    adapter = FunctionAdapter(Router, lambda picks: picks)
    model, path = nn.Sequential(Router()), folder / "routing.db"
    lost = scenario == "lost"
    fit = mock.patch("moe_audit.hooks.ranks.MAX_COUNT", 2**32 - 1 if lost else 500)
    with fit, Recorder.attach(model, path, flush_every=4 if lost else 1000, adapter=adapter) as recorder:
        train(recorder, model, rank, lost)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), Path(sys.argv[3]))

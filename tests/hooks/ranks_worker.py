"""Run by torchrun from test_recorder_ranks.py: every way in which ranks share a model, one store each.

Each rank trains on its own micro-batches (`batch`); the test does the same in one process and compares.
"""

from __future__ import annotations

import sys
from pathlib import Path
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from moe_audit.hooks import Recorder
from moe_audit.hooks.adapters import FunctionAdapter, Routing
from moe_audit.thresholds.errors import UsageError

STEPS, SEQUENCES, LENGTH, WIDTH, EXPERTS = 4, 2, 5, 8, 4


class Router(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.proj = nn.Linear(WIDTH, EXPERTS, bias=False)
        self.num_experts, self.top_k = EXPERTS, 2

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        logits = self.proj(x.reshape(-1, WIDTH))
        weights, indices = logits.softmax(-1).topk(2, -1)
        return weights, indices, logits


class Block(nn.Module):
    """A router and experts; with expert parallelism rank r holds the experts r, r + ranks, … of all."""

    def __init__(self, expert_parallel: bool = False) -> None:
        super().__init__()
        self.router = Router()
        self.experts = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(EXPERTS))
        self.expert_parallel = expert_parallel

    def forward(self, x: Tensor) -> Tensor:
        weights, indices, _ = self.router(x)
        flat = x.reshape(-1, WIDTH)
        if self.expert_parallel:
            return x + self.dispatch(flat, indices, weights).view_as(x)
        out = torch.zeros_like(flat)
        for e, expert in enumerate(self.experts):
            share = torch.where(indices == e, weights, 0.0).sum(-1, keepdim=True)
            out = out + share * torch.tanh(expert(flat))
        return x + out.view_as(x)

    @torch.no_grad()
    def dispatch(self, flat: Tensor, indices: Tensor, weights: Tensor) -> Tensor:
        """Every rank sends each pick to the owner of its expert, with the local id there."""
        ranks = dist.get_world_size()
        owner = (indices % ranks).flatten()
        order = owner.argsort(stable=True)
        sent = owner.bincount(minlength=ranks)
        received = torch.empty_like(sent)
        dist.all_to_all_single(received, sent)
        rows, local = flat.repeat_interleave(2, 0)[order], (indices.flatten() // ranks)[order]
        there = rows.new_empty(int(received.sum()), WIDTH)
        there_ids = local.new_empty(int(received.sum()))
        splits = received.tolist(), sent.tolist()
        dist.all_to_all_single(there, rows, *splits)
        dist.all_to_all_single(there_ids, local, *splits)
        done = there.clone()
        for row, i in enumerate(there_ids.tolist()):
            done[row] = torch.tanh(self.experts[i * ranks + dist.get_rank()](there[row]))
        back = torch.empty_like(rows)
        dist.all_to_all_single(back, done, sent.tolist(), received.tolist())
        out = torch.empty_like(back)
        out[order] = back
        return (out.view(-1, 2, WIDTH) * weights.unsqueeze(-1)).sum(1)


class Model(nn.Module):
    def __init__(self, layers: range = range(3), expert_parallel: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        blocks = {str(i): Block(expert_parallel) for i in range(3)}
        self.layers = nn.ModuleDict({str(i): blocks[str(i)] for i in layers})

    def forward(self, x: Tensor) -> Tensor:
        for block in self.layers.values():
            x = block(x)
        return x.square().mean()


ADAPTER = FunctionAdapter(Router, lambda out: Routing(indices=out[1], weights=out[0], logits=out[2]))
SOURCES = ["a", "b"]


def batch(rank: int, step: int) -> tuple[Tensor, Tensor, Tensor]:
    """Tokens, sources of the sequences, mask of one micro-batch of one rank."""
    generator = torch.Generator().manual_seed(1000 * rank + step)
    x = torch.randn(SEQUENCES, LENGTH, WIDTH, generator=generator)
    sources = torch.randint(-1, 2, (SEQUENCES,), generator=generator)
    mask = torch.rand(SEQUENCES, LENGTH, generator=generator) < 0.8
    return x, sources, mask


def train(recorder: Recorder, model: nn.Module, rank: int, evaluate: bool = False) -> None:
    for step in range(1, STEPS + 1):
        x, sources, mask = batch(rank, step)
        with recorder.microbatch(sources=sources, mask=mask):
            loss = model(x)
            if loss.requires_grad and not evaluate:
                loss.backward()
        recorder.step(step, lr=0.1, loss=loss.detach())
        if evaluate:
            with recorder.phase("eval"):
                model(x)


def attach(model: nn.Module, path: Path, **options: object) -> Recorder:
    return Recorder.attach(model, path, SOURCES, flush_every=2, adapter=ADAPTER, **options)  # type: ignore[arg-type]


def main(folder: Path) -> None:
    dist.init_process_group("gloo")
    rank, ranks = dist.get_rank(), dist.get_world_size()

    model = Model()
    counted = mock.patch.object(dist, "all_reduce", side_effect=dist.all_reduce)
    with counted as collectives, attach(model, folder / "plain.db") as recorder:
        train(recorder, model, rank)
    # Two records of two micro-batches, and what close() may still have to ask: at most three each.
    assert collectives.call_count <= 9, collectives.call_count

    model = Model()
    with attach(model, folder / "ddp.db") as recorder:
        train(recorder, DistributedDataParallel(model), rank)

    model = DistributedDataParallel(Model())
    with attach(model, folder / "ddp_first.db") as recorder:
        train(recorder, model, rank)

    model = Model()
    for block in model.layers.values():
        fully_shard(block)
    fully_shard(model)
    with attach(model, folder / "fsdp.db") as recorder:
        train(recorder, model, rank)

    model = Model(expert_parallel=True)
    with attach(model, folder / "ep.db") as recorder:
        train(recorder, model, rank)

    model = Model()
    refused = mock.patch.object(dist, "all_reduce", side_effect=AssertionError("a collective"))
    with refused, attach(model, folder / "per_rank.db", mode="per_rank") as recorder:
        train(recorder, model, rank)

    # Ranks 2i and 2i + 1 see the same tokens (tensor parallel): only the first of each pair counts.
    group = dist.new_group(list(range(0, ranks, 2)))
    model = Model()
    with attach(model, folder / "tp.db", group=group) as recorder:
        train(recorder, model, rank // 2)

    # A pipeline: the first half of the ranks has layer 0, the others layers 1 and 2.
    whole = Model()
    model = Model(range(1) if rank < ranks // 2 else range(1, 3))
    with attach(model, folder / "pp.db") as recorder:
        for step in range(1, STEPS + 1):
            x, sources, mask = batch(rank % (ranks // 2), step)
            with torch.no_grad(), recorder.microbatch(sources=sources, mask=mask):
                # Layers of other stages run too, unrecorded.
                for block in (dict(whole.layers.items()) | dict(model.layers.items())).values():
                    x = block(x)
            recorder.step(step, lr=0.1)

    # Only rank 0 evaluates.
    model = Model()
    with attach(model, folder / "eval.db") as recorder:
        train(recorder, model, rank, evaluate=rank == 0)

    # What ranks must agree on is an error on all of them, and so is a path that is taken.
    for options in ({"flush_every": 1 + rank}, {}):
        path = folder / ("disagree.db" if options else "plain.db")
        try:
            Recorder.attach(Model(), path, SOURCES, adapter=ADAPTER, **{"flush_every": 2, **options})
        except UsageError as error:
            assert ("flush_every" if options else "exists") in str(error), error
        else:
            raise AssertionError("attached")

    # One rank crashes: the others do not wait for it in close().
    try:
        model = Model()
        with attach(model, folder / "crash.db") as recorder:
            x, sources, mask = batch(rank, 1)
            with recorder.microbatch(sources=sources, mask=mask):
                model(x)
            recorder.step(1)
            raise RuntimeError("a rank crashed")
    except RuntimeError:
        (folder / f"crashed.{rank}").touch()
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]))

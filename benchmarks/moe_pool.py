"""Cost of a larger pool of experts at fixed active parameters: forward and backward, and the optimizer step.

    python benchmarks/moe_pool.py --tokens 16384 --rounds 7

One layer per pool size, top-4, all in one process, taking turns; ratios to the smallest pool within each
round.
`real` routes by random router weights, `random` ignores the scores, as system tests do.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from collections.abc import Callable

import torch

from moe_trainer.moe import MoEConfig
from moe_trainer.moe.layer import MoE
from moe_trainer.moe.memory import keep_freed_memory

TOP_K = 4


def layer_step(layer: MoE, x: torch.Tensor, cotangent: torch.Tensor) -> Callable[[], None]:
    def run() -> None:
        layer.zero_grad(set_to_none=True)
        y, losses = layer(x)
        torch.autograd.backward([y, losses.total], [cotangent, torch.ones(())])

    return run


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tokens", type=int, default=16384)
    parser.add_argument("--experts", type=int, nargs="+", default=[8, 16, 32, 64, 128])
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--hidden", type=int, default=512)
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    parser.add_argument("--clock", choices=("wall", "cpu"), default="wall")
    args = parser.parse_args()
    clock = time.perf_counter if args.clock == "wall" else time.process_time
    torch.set_num_threads(args.threads)
    torch.manual_seed(0)
    keep_freed_memory()
    x = torch.randn(args.tokens, args.width, requires_grad=True)
    cotangent = torch.randn(args.tokens, args.width)

    steps: dict[tuple[str, int], Callable[[], None]] = {}
    for routing in ("real", "random"):
        for experts in args.experts:
            router = {"top_k": TOP_K, "random_expert_assignment": routing == "random"}
            config = MoEConfig(num_experts=experts, hidden_size=args.hidden, router=router)
            layer = MoE(config, args.width)
            steps[routing, experts] = layer_step(layer, x, cotangent)
            if routing == "real":
                steps[routing, experts]()
                optimizer = torch.optim.AdamW(layer.parameters(), lr=1e-9, fused=True)
                steps["AdamW step", experts] = optimizer.step
    times: dict[tuple[str, int], list[float]] = {key: [] for key in steps}
    for step in steps.values():
        step()
    for _ in range(args.rounds):
        for routing, experts in steps:
            if routing == "AdamW step":
                steps["real", experts]()
            start = clock()
            steps[routing, experts]()
            times[routing, experts].append(clock() - start)

    sizes = f"{args.tokens:,} tokens, d={args.width}, H={args.hidden}, top-{TOP_K}"
    print(f"{sizes}, {args.threads} threads, {args.clock} time")
    print("| what | " + " | ".join(f"E={experts}" for experts in args.experts) + " |")
    print("| --- |" + " ---: |" * len(args.experts))
    for routing in ("real", "random", "AdamW step"):
        cells = []
        for experts in args.experts:
            mine, base = times[routing, experts], times[routing, args.experts[0]]
            ratio = statistics.median(a / b for a, b in zip(mine, base, strict=True))
            cells.append(f"{1e3 * statistics.median(mine):.0f} ms ({ratio:.2f})")
        print(f"| {routing} | " + " | ".join(cells) + " |")


if __name__ == "__main__":
    main()

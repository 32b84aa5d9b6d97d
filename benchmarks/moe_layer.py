"""Speed and memory of the MoE layer, forward and backward, beside other implementations.

Every side runs as shipped in a process of its own, with the same weights and inputs. The sides take turns,
and each round gives one ratio per peer, so that a change of the machine's speed hits all of them. fp32.

    python benchmarks/moe_layer.py run --point 1 --pairs 15      # one point; results are merged into --out
    python benchmarks/moe_layer.py table                         # the table of the README
    python benchmarks/moe_layer.py parts --point 6               # what is not experts: router, plan, losses

Needs the packages of the extra `parity`. Sides whose package is missing are reported, not skipped in silence.
On a machine with other work `--clock cpu --threads 1` compares processor time, which waiting does not change.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import random
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

TOP_K = 4
PEAK = "one large matmul"
OURS = "moe_trainer"
OURS_BF16 = "moe_trainer (bf16 autocast)"
# Sides whose experts compute in bf16 whatever goes in; they are compared with ours in bf16.
IN_BF16 = ("torchtitan", OURS_BF16)
REPEATABLE_SEED = 0


@dataclass(frozen=True)
class Point:
    """Sizes of a layer and the routing of its tokens."""

    d_model: int
    hidden: int
    experts: int
    tokens: int
    routing: str = "uniform"

    @property
    def flops(self) -> int:
        """Of the expert matmuls, forward and backward: three matrices, three passes, two per product."""
        return 18 * self.tokens * TOP_K * self.d_model * self.hidden

    def __str__(self) -> str:
        return f"d={self.d_model} H={self.hidden} E={self.experts} {self.tokens:,} tokens, {self.routing}"


POINTS = {
    1: Point(256, 512, 8, 4096),
    2: Point(256, 512, 32, 4096),
    3: Point(256, 512, 64, 4096),
    4: Point(256, 512, 128, 4096),
    5: Point(512, 1024, 8, 16384),
    6: Point(512, 1024, 64, 16384),
    7: Point(256, 512, 128, 16384, "skewed"),
    8: Point(256, 512, 128, 16384),
}


def tensors(point: Point) -> dict[str, Any]:
    """Weights and input. Skew: the loads of the experts fall off like 1 / rank^0.7, seen in real runs."""
    import torch

    torch.manual_seed(REPEATABLE_SEED)
    d, hidden, experts = point.d_model, point.hidden, point.experts
    x = torch.randn(point.tokens, d)
    router = torch.randn(experts, d) / d**0.5
    if point.routing == "skewed":
        common = torch.ones(d) / d**0.5
        x += 4 * common
        ranks = torch.arange(1, experts + 1).float()
        router = 0.7 * router + common * (-0.7 * ranks.log() / 4).unsqueeze(-1)
    return {
        "x": x.view(4, -1, d),
        "cotangent": torch.randn(4, point.tokens // 4, d),
        "router": router,
        "gate": torch.randn(experts, hidden, d) * 0.02,
        "up": torch.randn(experts, hidden, d) * 0.02,
        "down": torch.randn(experts, hidden, d) * 0.02,
    }


def ours(
    point: Point, t: dict[str, Any], allocator: bool = True, compiled: bool = False
) -> Callable[[Any], Any]:
    import torch

    from moe_trainer.moe import MoEConfig
    from moe_trainer.moe.layer import MoE
    from moe_trainer.moe.memory import keep_freed_memory

    if allocator:
        keep_freed_memory()
    config = MoEConfig(
        num_experts=point.experts,
        hidden_size=point.hidden,
        router={"top_k": TOP_K, "normalize_expert_weights": 1.0},
        lb_loss_weight=None,
    )
    layer = MoE(config, point.d_model)
    with torch.no_grad():
        layer.router.weight.copy_(t["router"])
        layer.experts.w_up_gate.copy_(torch.cat([t["up"], t["gate"]], 1))
        layer.experts.w_down.copy_(t["down"])
    forward = torch.compile(layer) if compiled else layer
    return _module(layer, lambda x: forward(x)[0])


def ours_bf16(point: Point, t: dict[str, Any]) -> Callable[[Any], Any]:
    import torch

    step = ours(point, t)

    def autocast(batch: Any) -> Any:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return step(batch)

    return autocast


def transformers_block(
    implementation: str, allocator: bool = False
) -> Callable[[Point, dict[str, Any]], Callable[[Any], Any]]:
    def build(point: Point, t: dict[str, Any]) -> Callable[[Any], Any]:
        import torch
        from transformers import Qwen3MoeConfig
        from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeSparseMoeBlock

        if allocator:
            from moe_trainer.moe.memory import keep_freed_memory

            keep_freed_memory()
        copies = point.tokens * TOP_K * 3 * point.d_model * point.hidden * 4
        if implementation == "batched_mm" and copies > 8e9:
            raise MemoryError(f"gathers one copy of the weights per assignment, {copies / 1e9:.0f} GB")
        config = Qwen3MoeConfig(
            hidden_size=point.d_model,
            moe_intermediate_size=point.hidden,
            num_experts=point.experts,
            num_experts_per_tok=TOP_K,
            norm_topk_prob=True,
        )
        config._experts_implementation = implementation
        block = Qwen3MoeSparseMoeBlock(config)
        with torch.no_grad():
            block.gate.weight.copy_(t["router"])
            block.experts.gate_up_proj.copy_(torch.cat([t["gate"], t["up"]], 1))
            block.experts.down_proj.copy_(t["down"].transpose(1, 2))
        return _module(block, block)

    return build


def torchtitan_moe(point: Point, t: dict[str, Any]) -> Callable[[Any], Any]:
    import torch
    from torchtitan.models.common import moe, token_dispatcher
    from torchtitan.models.common.linear import Linear

    layer = moe.MoE.Config(
        num_experts=point.experts,
        load_balance_coeff=None,
        routed_experts=moe.RoutedExperts.Config(
            inner_experts=moe.GroupedExperts.Config(
                dim=point.d_model, hidden_dim=point.hidden, num_experts=point.experts
            ),
            token_dispatcher=token_dispatcher.LocalTokenDispatcher.Config(
                num_experts=point.experts, top_k=TOP_K
            ),
        ),
        router=moe.TokenChoiceTopKRouter.Config(
            num_experts=point.experts,
            gate=Linear.Config(in_features=point.d_model, out_features=point.experts, bias=False),
            top_k=TOP_K,
            score_func="softmax",
            route_norm=True,
        ),
    ).build()
    with torch.no_grad():
        layer.router.gate.weight.copy_(t["router"])
        experts = layer.routed_experts.inner_experts
        experts.w1_EFD.copy_(t["gate"])
        experts.w3_EFD.copy_(t["up"])
        experts.w2_EDF.copy_(t["down"].transpose(1, 2))
        layer.tokens_per_expert_E.zero_()
    return _module(layer, layer)


def olmo_core(point: Point, t: dict[str, Any]) -> Callable[[Any], Any]:
    import torch
    from olmo_core.config import DType
    from olmo_core.nn.moe.v2 import routed_experts
    from olmo_core.nn.moe.v2.router import MoERouterConfigV2

    # Its layer needs CUDA for the permutation, so that part is the plain one.
    routed_experts.REQUIRES_HOST_SIDE_SPLIT_SIZES = True
    router = MoERouterConfigV2(
        d_model=point.d_model,
        num_experts=point.experts,
        top_k=TOP_K,
        normalize_expert_weights=1.0,
    ).build()
    experts = routed_experts.RoutedExpertsConfig(
        d_model=point.d_model,
        hidden_size=point.hidden,
        num_experts=point.experts,
        bias=False,
        dtype=DType.float32,
    ).build()
    with torch.no_grad():
        router.weight.copy_(t["router"].flatten())
        experts.w_up_gate.copy_(torch.cat([t["up"], t["gate"]], 1))
        experts.w_down.copy_(t["down"])

    def forward(x: Any) -> Any:
        weights, indices, counts, _ = router(x, False)
        order = indices.flatten().argsort(stable=True)
        rows = order // TOP_K
        flat = x.reshape(-1, point.d_model)
        y = experts(flat.index_select(0, rows), counts) * weights.reshape(-1, 1).index_select(0, order)
        return torch.zeros_like(flat).index_add(0, rows, y).view_as(x)

    return _module(torch.nn.ModuleList([router, experts]), forward)


def plain_loop(point: Point, t: dict[str, Any]) -> Callable[[Any], Any]:
    import torch
    import torch.nn.functional as F

    names = ("router", "gate", "up", "down")
    p = torch.nn.ParameterDict({name: torch.nn.Parameter(t[name].clone()) for name in names})

    def forward(x: Any) -> Any:
        flat = x.reshape(-1, point.d_model)
        weights, indices = F.linear(flat, p["router"]).softmax(-1).topk(TOP_K, dim=-1)
        weights = weights / weights.sum(-1, keepdim=True)
        out = torch.zeros_like(flat)
        parts = zip(p["gate"].unbind(0), p["up"].unbind(0), p["down"].unbind(0), strict=True)
        for e, (gate, up, down) in enumerate(parts):
            rows, column = (indices == e).nonzero(as_tuple=True)
            if len(rows):
                chosen = flat[rows]
                hidden = F.silu(F.linear(chosen, gate)) * F.linear(chosen, up)
                out = out.index_add(0, rows, hidden @ down * weights[rows, column].unsqueeze(-1))
        return out.view_as(x)

    return _module(p, forward)


def _module(module: Any, forward: Callable[[Any], Any]) -> Callable[[Any], Any]:
    module.train()

    def step(batch: Any) -> Any:
        x, cotangent = batch
        module.zero_grad(set_to_none=True)
        leaf = x.detach().requires_grad_()
        y = forward(leaf)
        y.backward(cotangent)
        return y.detach()

    return step


SIDES: dict[str, Callable[[Point, dict[str, Any]], Callable[[Any], Any]]] = {
    OURS: ours,
    "moe_trainer (torch.compile)": lambda point, t: ours(point, t, compiled=True),
    "moe_trainer (default allocator)": lambda point, t: ours(point, t, allocator=False),
    "transformers grouped_mm": transformers_block("grouped_mm"),
    "transformers eager": transformers_block("eager"),
    "transformers batched_mm": transformers_block("batched_mm"),
    "torchtitan": torchtitan_moe,
    OURS_BF16: ours_bf16,
    "OLMo-core": olmo_core,
    "plain loop": plain_loop,
    "transformers grouped_mm (our allocator setting)": transformers_block("grouped_mm", True),
}


def worker(side: str, point: Point, threads: int) -> None:
    """Answer each line on stdin with one timed forward and backward pass."""
    import torch

    torch.set_num_threads(threads)
    if side == PEAK:
        a, b, out = (torch.randn(2048, 2048) for _ in range(3))
        step, flops = (lambda _: torch.mm(a, b, out=out)), 2 * 2048**3
        batch = None
        norm = 0.0
    else:
        t = tensors(point)
        try:
            step = SIDES[side](point, t)
        except (ImportError, MemoryError) as error:
            print(json.dumps({"unavailable": f"{type(error).__name__}: {error}"}), flush=True)
            return
        batch, flops = (t["x"], t["cotangent"]), point.flops
        norm = float(step(batch).double().norm())
    step(batch)
    print(json.dumps({"norm": norm, "flops": flops}), flush=True)
    for _ in sys.stdin:
        before = _resident()
        Path("/proc/self/clear_refs").write_text("5")
        faults = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
        cpu, start = time.process_time(), time.perf_counter()
        step(batch)
        answer = {
            "wall": time.perf_counter() - start,
            "cpu": time.process_time() - cpu,
            "faults": resource.getrusage(resource.RUSAGE_SELF).ru_minflt - faults,
            "memory": _status("VmHWM"),
            "grown": _status("VmHWM") - before,
        }
        print(json.dumps(answer), flush=True)


def _status(field: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(field):
            return int(line.split()[1]) * 1024
    return 0


def _resident() -> int:
    return _status("VmRSS")


class Side:
    """A worker process and its answers."""

    def __init__(self, name: str, number: int, threads: int) -> None:
        self.name, self.answers = name, list[dict[str, float]]()
        command = [sys.executable, __file__, "worker", name, str(number), str(threads)]
        self.process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
        )
        self.ready: dict[str, Any] = self._read()

    def _read(self) -> dict[str, Any]:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            if line.startswith("{"):
                answer: dict[str, Any] = json.loads(line)
                return answer
        return {"unavailable": f"the process ended with {self.process.wait()}"}

    def step(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write("\n")
        self.process.stdin.flush()
        self.answers.append(self._read())

    def close(self) -> None:
        if self.process.stdin is not None:
            self.process.stdin.close()
        self.process.wait()


def median_interval(values: list[float]) -> tuple[float, float, float]:
    """Median with its distribution-free 95 % interval from the binomial order statistics."""
    from math import comb

    ordered, n = sorted(values), len(values)
    below, rank = 0.0, 0
    while rank < n // 2 and below + comb(n, rank) / 2**n <= 0.025:
        below += comb(n, rank) / 2**n
        rank += 1
    low = max(0, rank - 1)
    return statistics.median(ordered), ordered[low], ordered[n - 1 - low]


def measure(number: int, pairs: int, names: list[str], threads: int, clock: str) -> dict[str, Any]:
    """All sides of one point, taking turns in a new order each round."""
    sides = {name: Side(name, number, threads) for name in [PEAK, *names]}
    absent = {s.name: s.ready["unavailable"] for s in sides.values() if "unavailable" in s.ready}
    present = [s for s in sides.values() if s.name not in absent]
    order = random.Random(REPEATABLE_SEED)
    for _ in range(pairs):
        for side in order.sample(present, len(present)):
            side.step()
    result: dict[str, Any] = {"point": str(POINTS[number]), "pairs": pairs, "threads": threads}
    result["clock"] = clock
    result["absent"] = absent
    result["sides"] = {}
    for side in present:
        seconds = [answer[clock] for answer in side.answers]
        base = sides.get(OURS_BF16 if side.name in IN_BF16 else OURS)
        ratios = [s / o[clock] for s, o in zip(seconds, base.answers, strict=True)] if base else [0.0]
        peak = [p[clock] / sides[PEAK].ready["flops"] for p in sides[PEAK].answers]
        rate = [side.ready["flops"] * p / s for s, p in zip(seconds, peak, strict=True)]
        result["sides"][side.name] = {
            "milliseconds": 1e3 * statistics.median(seconds),
            "best_milliseconds": 1e3 * min(seconds),
            "gflops": side.ready["flops"] / statistics.median(seconds) / 1e9,
            "share_of_peak": statistics.median(rate),
            "times_ours": median_interval(ratios),
            "wall_milliseconds": 1e3 * statistics.median(a["wall"] for a in side.answers),
            "cpu_milliseconds": 1e3 * statistics.median(a["cpu"] for a in side.answers),
            "page_faults": statistics.median(a["faults"] for a in side.answers),
            "peak_memory_mb": statistics.median(a["memory"] for a in side.answers) / 2**20,
            "grown_mb": statistics.median(a["grown"] for a in side.answers) / 2**20,
            "output_norm": side.ready["norm"],
        }
        side.close()
    for name in absent:
        sides[name].close()
    return result


def table(results: dict[str, Any], names: list[str]) -> str:
    """Markdown: times, one row a point and one column a peer; then peak memory; then what is absent."""
    peers = [n for n in names if any(n in result["sides"] for result in results.values()) and n != OURS]
    ordered = [results[number] for number in sorted(results)]
    head = f"| point | {OURS}, ms | of peak | " + " | ".join(peers) + " |"
    lines = [head, "| --- | ---: | ---: |" + " ---: |" * len(peers)]
    for result in ordered:
        own = result["sides"][OURS]
        cells = [_times(result["sides"].get(name)) for name in peers]
        time_and_rate = f"{own['milliseconds']:.0f} | {own['share_of_peak']:.0%}"
        lines.append(f"| {result['point']} | {time_and_rate} | {' | '.join(cells)} |")
    lines += [
        "",
        "| peak memory, MB | " + " | ".join([OURS, *peers]) + " |",
        "| --- |" + " ---: |" * (1 + len(peers)),
    ]
    for result in ordered:
        sides = [result["sides"].get(name) for name in (OURS, *peers)]
        cells = [f"{side['peak_memory_mb']:,.0f}" if side else "-" for side in sides]
        lines.append(f"| {result['point']} | {' | '.join(cells)} |")
    fastest = [best for result in ordered if (best := _fastest_peer(result)) is not None]
    if fastest:
        mean = statistics.geometric_mean(fastest)
        lines += ["", f"Fastest fp32 peer over ours, geometric mean of {len(fastest)} points: {mean:.2f}x"]
    absent = {
        f"{result['point']}, {name}: {why}" for result in ordered for name, why in result["absent"].items()
    }
    return "\n".join([*lines, *sorted(absent)])


def _times(side: dict[str, Any] | None) -> str:
    """How many times as long as ours, with the interval."""
    return "{:.2f} ({:.2f} to {:.2f})".format(*side["times_ours"]) if side else "-"


def _fastest_peer(result: dict[str, Any]) -> float | None:
    """The smallest median ratio to ours among the packages' and the plain fp32 sides as shipped."""
    ratios = [
        side["times_ours"][0]
        for name, side in result["sides"].items()
        if name != PEAK and OURS not in name and name not in IN_BF16 and "our allocator" not in name
    ]
    return min(ratios, default=None)


def parts(number: int, repeats: int, threads: int) -> str:
    """Milliseconds of router, dispatch and losses beside the whole layer, forward and backward."""
    import torch

    from moe_trainer.moe import MoEConfig
    from moe_trainer.moe.layer import MoE
    from moe_trainer.moe.memory import keep_freed_memory

    torch.set_num_threads(threads)
    keep_freed_memory()
    point = POINTS[number]
    t = tensors(point)
    config = MoEConfig(
        num_experts=point.experts,
        hidden_size=point.hidden,
        router={"top_k": TOP_K, "normalize_expert_weights": 1.0},
        z_loss_weight=1e-3,
    )
    layer = MoE(config, point.d_model)
    x = t["x"].requires_grad_()
    cotangent = t["cotangent"]

    def whole() -> None:
        y, losses = layer(x)
        torch.autograd.backward([y, losses.total], [cotangent, torch.ones(())])

    def router_and_losses() -> None:
        routed = layer.router(x)
        losses = layer.router_losses(routed)
        plan = layer.dispatcher(routed)
        weights = torch.ones_like(plan.weights_TK)
        torch.autograd.backward([plan.weights_TK, losses.total], [weights, torch.ones(())])

    times: dict[str, list[float]] = {"layer": [], "router, dispatch plan, losses": []}
    for i in range(repeats + 1):
        for name, run in zip(times, (whole, router_and_losses), strict=True):
            start = time.perf_counter()
            run()
            if i:
                times[name].append(time.perf_counter() - start)
    layer_ms, router_ms = (1e3 * statistics.median(values) for values in times.values())
    return (
        f"{point}: layer {layer_ms:.0f} ms, of which router, dispatch plan and losses {router_ms:.1f} ms "
        f"= {router_ms / layer_ms:.1%}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    commands = parser.add_subparsers(dest="command", required=True)
    run = commands.add_parser("run", help="measure one point")
    run.add_argument("--point", type=int, choices=POINTS, required=True)
    run.add_argument("--pairs", type=int, default=15)
    run.add_argument("--threads", type=int, default=os.cpu_count())
    run.add_argument("--clock", choices=("wall", "cpu"), default="wall")
    shares = commands.add_parser("parts", help="router, dispatch and losses beside the layer")
    shares.add_argument("--point", type=int, choices=POINTS, required=True)
    shares.add_argument("--repeats", type=int, default=15)
    shares.add_argument("--threads", type=int, default=os.cpu_count())
    show = commands.add_parser("table", help="print the results as Markdown")
    for command in (run, show):
        command.add_argument("--sides", default=",".join(SIDES), help="separated by commas")
        command.add_argument("--out", type=Path, default=Path(__file__).with_name("moe_layer.json"))
    inner = commands.add_parser("worker")
    inner.add_argument("side")
    inner.add_argument("point", type=int)
    inner.add_argument("threads", type=int)
    args = parser.parse_args()

    if args.command == "worker":
        worker(args.side, POINTS[args.point], args.threads)
    elif args.command == "parts":
        print(parts(args.point, args.repeats, args.threads))
    else:
        results = json.loads(args.out.read_text()) if args.out.exists() else {}
        names = [name.strip() for name in args.sides.split(",")]
        if args.command == "run":
            result = measure(args.point, args.pairs, names, args.threads, args.clock)
            result["machine"] = platform.processor() or platform.machine()
            results[str(args.point)] = result
            args.out.write_text(json.dumps(results, indent=1) + "\n")
            results = {str(args.point): result}
        print(table(results, names))


if __name__ == "__main__":
    main()

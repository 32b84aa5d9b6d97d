"""What recording costs: tables of `python benchmarks/recorder_overhead.py [--pairs N] [--only SIZE]`.

Two sizes: the demo model (4 layers, width 128, 2,048 tokens a step), and one MoE layer that costs what a real
one does (width 256, 8,192 tokens, top-8). One thread and CPU time throughout, so that a busy machine does not
blur the figures:

- share: time inside hooks, ends of micro-batches and flushes, divided by the time of a training step;
- ratio: step with the recorder / step without, of the whole process (the writer thread too), in pairs that
  alternate; median and 95 % bootstrap interval.

Beside it the usual hand-written hook (counts and mean probabilities copied to Python lists per micro-batch),
and `output_router_logits` where transformers is installed.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import functools
import itertools
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch
from torch import Tensor, nn

from moe_audit.hooks import Recorder
from moe_audit.hooks.attach import RootHook, RouterHook
from moe_audit.hooks.counting import Microbatch
from moe_trainer.config import ModelConfig
from moe_trainer.model import Transformer
from moe_trainer.moe import MoEConfig
from moe_trainer.moe.layer import MoE
from moe_trainer.moe.router import Router

CASES = [
    ("demo", 8, 1), ("demo", 8, 4), ("demo", 8, 32), ("demo", 64, 8), ("demo", 256, 32),
    ("real", 8, 8), ("real", 64, 1), ("real", 64, 8), ("real", 64, 32), ("real", 256, 8), ("real", 256, 32),
]  # fmt: skip
PAIRS = {"demo": 20, "real": 6}
WARM_UP = 2


class Demo(nn.Module):
    """The demo's transformer with a loss."""

    batch, length = 16, 128

    def __init__(self, experts: int) -> None:
        super().__init__()
        self.model = Transformer(ModelConfig(moe=MoEConfig(num_experts=experts, hidden_size=256)))
        self.x = torch.randint(0, 256, (self.batch, self.length))

    def forward(self) -> Tensor:
        logits, losses = self.model(self.x)
        return nn.functional.cross_entropy(logits.flatten(0, 1), self.x.flatten()) + losses


class Real(nn.Module):
    """One MoE layer of the cost of a real one, whatever the number of experts."""

    batch, length = 8, 1024

    def __init__(self, experts: int) -> None:
        super().__init__()
        top_k = min(8, experts // 2)
        config = MoEConfig(num_experts=experts, hidden_size=512 * 8 // top_k, router={"top_k": top_k})
        self.layer = MoE(config, 256)
        self.x = torch.randn(self.batch, self.length, 256)

    def forward(self) -> Tensor:
        y, losses = self.layer(self.x)
        return y.square().mean() + losses.total


class Clock:
    """CPU time of this thread inside the functions it is put around; inner calls count once."""

    def __init__(self) -> None:
        self.inside, self._depth = 0.0, 0

    def around(self, function: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*args: Any, **kwargs: Any) -> Any:
            self._depth += 1
            begin = time.thread_time()
            try:
                return function(*args, **kwargs)
            finally:
                self._depth -= 1
                if not self._depth:
                    self.inside += time.thread_time() - begin

        return timed


def train_step(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    model().backward()
    optimizer.step()
    optimizer.zero_grad()


def hand_hook(model: nn.Module, clock: Clock) -> None:
    """What people write: bincount and mean probabilities, to Python lists."""
    log: list[Any] = []

    def hook(module: nn.Module, args: Any, output: Any) -> None:
        counts = torch.bincount(output.indices_TK.flatten(), minlength=output.logits_TE.shape[-1])
        log.append((counts.tolist(), output.logits_TE.softmax(-1).mean(0).tolist()))

    for module in model.modules():
        if isinstance(module, Router):
            module.register_forward_hook(clock.around(hook))


def paired(
    plain: Callable[[], None], other: Callable[[], None], pairs: int, clock: Clock | None = None
) -> tuple[float, str, float]:
    """Steps that alternate, by CPU time: seconds of plain ones, ratio other / plain, share on the clock."""
    seconds: dict[int, list[float]] = {0: [], 1: []}
    for pair in range(WARM_UP + pairs):
        if clock is not None and pair == WARM_UP:
            clock.inside = 0.0
        for which in (0, 1) if pair % 2 else (1, 0):
            begin = time.process_time()
            (plain, other)[which]()
            if pair >= WARM_UP:
                seconds[which].append(time.process_time() - begin)
    ratios = np.array(seconds[1]) / np.array(seconds[0])
    medians = np.median(np.random.default_rng(0).choice(ratios, (2000, pairs)), axis=1)
    low, high = np.quantile(medians, [0.025, 0.975])
    share = clock.inside / sum(seconds[1]) if clock is not None else 0.0
    return float(np.median(seconds[0])), f"{np.median(ratios):.3f} ({low:.3f} to {high:.3f})", share


def case(name: str, experts: int, sources: int, pairs: int) -> str:
    """One row of the table."""
    torch.manual_seed(0)
    original = {"demo": Demo, "real": Real}[name](experts)
    plain, recorded, by_hand = (copy.deepcopy(original) for _ in range(3))
    optimizers = {m: torch.optim.AdamW(m.parameters(), lr=1e-4) for m in (plain, recorded, by_hand)}
    ids = torch.randint(0, sources, (original.batch, original.length))
    clock, hand_clock = Clock(), Clock()
    hand_hook(by_hand, hand_clock)
    hooks = [(RouterHook, "__call__"), (RootHook, "__call__")]
    timed = [*hooks, (Microbatch, "__enter__"), (Microbatch, "__exit__")]
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as patches:
        for owner, method in timed:
            patches.enter_context(mock.patch.object(owner, method, clock.around(getattr(owner, method))))
        names = [f"source{i}" for i in range(sources)]
        recorder = Recorder.attach(recorded, Path(folder) / "routing.db", names, flush_every=10)
        micro_batch, step = clock.around(recorder.microbatch), clock.around(recorder.step)
        done = itertools.count(1)

        def with_recorder() -> None:
            with micro_batch(sources=ids):
                train_step(recorded, optimizers[recorded])
            step(next(done), lr=1e-4)

        without = functools.partial(train_step, plain, optimizers[plain])
        seconds, ratio, share = paired(without, with_recorder, pairs, clock)
        recorder.close()
    hand = functools.partial(train_step, by_hand, optimizers[by_hand])
    _, hand_ratio, hand_share = paired(without, hand, pairs, hand_clock)
    return (
        f"| {name} | {experts} | {sources} | {1e3 * seconds:.0f} | {100 * share:.2f} % | {ratio} |"
        f" {100 * hand_share:.2f} % | {hand_ratio} |"
    )


def transformers_case(pairs: int) -> list[str]:
    """A small Mixtral: `output_router_logits=True`, and the recorder, each against plain steps."""
    from transformers import MixtralConfig, MixtralForCausalLM

    torch.manual_seed(0)
    config = MixtralConfig(
        vocab_size=256, hidden_size=128, intermediate_size=256, num_hidden_layers=4, num_attention_heads=4,
        num_key_value_heads=2, num_local_experts=8, num_experts_per_tok=2,
    )  # fmt: skip
    models = [MixtralForCausalLM(config)]
    models.append(copy.deepcopy(models[0]))
    optimizers = [torch.optim.AdamW(model.parameters(), lr=1e-4) for model in models]
    tokens = torch.randint(0, 256, (16, 128))

    def steps(which: int, **options: Any) -> None:
        models[which](input_ids=tokens, labels=tokens, **options).loss.backward()
        optimizers[which].step()
        optimizers[which].zero_grad()

    logits = paired(lambda: steps(0), lambda: steps(0, output_router_logits=True), pairs)
    with tempfile.TemporaryDirectory() as folder:
        recorder = Recorder.attach(models[1], Path(folder) / "routing.db", ["a", "b"], flush_every=10)
        done = itertools.count(1)

        def recorded() -> None:
            with recorder.microbatch(sources=[0, 1] * 8):
                steps(1)
            recorder.step(next(done))

        ours = paired(lambda: steps(0), recorded, pairs)
        recorder.close()
    rows = (("output_router_logits=True", logits), ("recorder", ours))
    return [f"| {what} | {1e3 * seconds:.0f} | {ratio} |" for what, (seconds, ratio, _) in rows]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--pairs", type=int, help="pairs of steps per row (demo 20, real 6)")
    parser.add_argument("--only", choices=PAIRS, help="the rows of one size alone")
    options = parser.parse_args()
    pairs = options.pairs
    torch.set_num_threads(1)
    print("| model | experts | sources | step, ms | share | ratio (95 %) | by hand: share | ratio (95 %) |")
    print("| --- | --- | --- | --- | --- | --- | --- | --- |")
    for name, experts, sources in CASES:
        if options.only in (None, name):
            print(case(name, experts, sources, pairs or PAIRS[name]), flush=True)
    if options.only is not None:
        return
    try:
        rows = transformers_case(pairs or PAIRS["demo"])
    except ImportError:
        print("\ntransformers is not installed: no comparison with output_router_logits")
        return
    print("\n| Mixtral, 4 layers, 8 experts | step, ms | ratio (95 %) |\n| --- | --- | --- |")
    print("\n".join(rows))


if __name__ == "__main__":
    main()

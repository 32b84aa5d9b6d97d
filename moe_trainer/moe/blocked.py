"""The whole path of the routed experts on a CPU: gather, two matmuls, weights, scatter, block by block.

Shape suffixes: T tokens, K selected experts per token, S = T*K slots, N kept assignments in expert order,
E experts, D width, H hidden units, U = H or 2H rows of the first matmul's result.

Three choices make it fast, each measured in `benchmarks/moe_layer.py`:

- The rows of an expert go through both matmuls in blocks that fit the cache; only the result of the first
  matmul is kept for the backward pass, the activation is recomputed from it.
- Blocks are transposed, (U, n): the gate and the value are then contiguous halves.
- Each thread takes an equal share of the rows, in expert order, and runs its matmuls alone. Splitting every
  small matmul over the threads instead costs a barrier each. The split is static, so that the result does
  not change from run to run.

Both passes are custom operators, so that `torch.compile` calls them as they are.
"""

from __future__ import annotations

import ctypes
import os
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor

from moe_trainer.moe.activations import block_backward, block_forward

# Rows of a block: large enough for the matmul rate, small enough for the second-level cache.
BLOCK_ROWS = 1024
# Below this many rows a thread's share is not worth handing over.
MIN_ROWS_PER_THREAD = 256
# Every thread accumulates an output of its own.
MAX_THREADS = 16


class Block(NamedTuple):
    """Rows start:end of one expert; `first` where the share has no earlier block of this expert."""

    expert: int
    start: int
    end: int
    first: bool


def shares(offs: list[int], parts: int) -> list[list[Block]]:
    """Cut the rows into `parts` equal shares, and each share into blocks of one expert."""
    total = offs[-1] if offs else 0
    cuts = [total * i // parts for i in range(parts + 1)]
    out = []
    for low, high in pairwise(cuts):
        blocks: list[Block] = []
        for expert, (start, end) in enumerate(zip([0, *offs], offs, strict=False)):
            start, end = max(start, low), min(end, high)
            for at in range(start, end, BLOCK_ROWS):
                blocks.append(Block(expert, at, min(at + BLOCK_ROWS, end), at == start))
        out.append(blocks)
    return out


class _Threads:
    """Threads that run torch with one thread each; created on first use, and anew after a fork."""

    def __init__(self) -> None:
        self.forget()

    def forget(self) -> None:
        self.pool: ThreadPoolExecutor | None = None
        self.size = 0
        self.lock = threading.Lock()

    def map(self, work: Callable[[int], Any], count: int) -> list[Any]:
        """work(0), ..., work(count - 1), each in a thread of its own; a single one in the caller's."""
        if count == 1:
            return [work(0)]

        def run(part: int) -> Any:
            with torch.no_grad():
                return work(part)

        pool = self._at_least(count)
        end_openmp_threads()
        return list(pool.map(run, range(count)))

    def _at_least(self, count: int) -> ThreadPoolExecutor:
        with self.lock:
            if self.pool is None or self.size < count:
                threads = torch.get_num_threads()
                self.size = count
                self.pool = ThreadPoolExecutor(count, "moe-experts", initializer=_use_one_thread)
                # All of them start now, because threads that start later inherit the last setting.
                barrier = threading.Barrier(count)
                for started in [self.pool.submit(barrier.wait) for _ in range(count)]:
                    started.result()
                torch.set_num_threads(threads)
            return self.pool


def end_openmp_threads() -> None:
    """Ends the OpenMP threads that this thread started; its next parallel region starts them anew (0.1 ms).

    After a region they spin for some milliseconds, on the cores that the experts' threads are to run on: 4 %
    of a layer of 230 ms. Nothing happens where the OpenMP library cannot do it (before version 5.0).
    """
    if _pause_openmp is not None:
        _pause_openmp(_OMP_PAUSE_SOFT)


_OMP_PAUSE_SOFT = 1
_pause_openmp = getattr(ctypes.CDLL(None), "omp_pause_resource_all", None)


def _use_one_thread() -> None:
    # A thread's first question sets it to the process-wide number: ask first, then set.
    torch.get_num_threads()
    torch.set_num_threads(1)


_threads = _Threads()
os.register_at_fork(after_in_child=_threads.forget)


def _parts(rows: int) -> int:
    wanted = min(torch.get_num_threads(), MAX_THREADS, rows // MIN_ROWS_PER_THREAD)
    return max(1, wanted)


@torch.library.custom_op("moe_trainer::blocked_forward", mutates_args=())
def blocked_forward(
    x_TD: Tensor,
    weights_TK: Tensor,
    slots_N: Tensor,
    offs_E: Tensor,
    w_up_gate: Tensor,
    w_down: Tensor,
    b_up_gate: Tensor | None,
    b_down: Tensor | None,
    activation: str,
    alpha: float,
    limit: float | None,
    keep: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """The experts' weighted outputs, summed for each token.

    Args:
        keep: Whether a backward pass will follow.

    Returns:
        Output (T, D); the results of the first matmul, flat, one (U, n) block after the other (empty unless
        `keep`); the number of shares that the rows were cut into.
    """
    up, hidden, width = w_up_gate.shape[1], w_down.shape[1], w_down.shape[2]
    rows_N = slots_N // weights_TK.shape[-1]
    weights_N1 = weights_TK.reshape(-1)[slots_N].unsqueeze(-1)
    kept = x_TD.new_empty(len(slots_N) * up if keep else 0)
    wide = torch.promote_types(x_TD.dtype, torch.float32)
    blocks = shares(offs_E.tolist(), _parts(len(slots_N)))

    def work(part: int) -> Tensor:
        y_TD = x_TD.new_zeros(x_TD.shape, dtype=wide)
        if not blocks[part]:
            return y_TD
        size = max(block.end - block.start for block in blocks[part])
        x_buffer, y_buffer = x_TD.new_empty(size, width), x_TD.new_empty(size, width)
        act_buffer = x_TD.new_empty(hidden * size)
        up_buffer = x_TD.new_empty(0 if keep else up * size)
        for expert, start, end, _ in blocks[part]:
            n = end - start
            rows = rows_N[start:end]
            x = torch.index_select(x_TD, 0, rows, out=x_buffer[:n])
            flat = kept[start * up : end * up] if keep else up_buffer[: n * up]
            up_gate = flat.view(up, n)
            torch.mm(w_up_gate[expert], x.T, out=up_gate)
            if b_up_gate is not None:
                up_gate.add_(b_up_gate[expert].unsqueeze(-1))
            act = act_buffer[: hidden * n].view(hidden, n)
            block_forward(up_gate, act, activation, alpha, limit)
            y = torch.mm(act.T, w_down[expert], out=y_buffer[:n])
            if b_down is not None:
                y.add_(b_down[expert])
            y_TD.index_add_(0, rows, y.mul_(weights_N1[start:end]).to(wide))
        return y_TD

    y_TD = _sum(_threads.map(work, len(blocks))).to(x_TD.dtype)
    return y_TD, kept, torch.tensor(len(blocks))


@blocked_forward.register_fake
def _(x_TD, weights_TK, slots_N, offs_E, w_up_gate, *rest):  # type: ignore[no-untyped-def]
    kept = x_TD.new_empty(slots_N.shape[0] * w_up_gate.shape[1] if rest[-1] else 0)
    return torch.empty_like(x_TD), kept, torch.empty((), dtype=torch.int64)


@torch.library.custom_op("moe_trainer::blocked_backward", mutates_args=())
def blocked_backward(
    grad_TD: Tensor,
    kept: Tensor,
    parts: Tensor,
    x_TD: Tensor,
    weights_TK: Tensor,
    slots_N: Tensor,
    offs_E: Tensor,
    w_up_gate: Tensor,
    w_down: Tensor,
    b_up_gate: Tensor | None,
    b_down: Tensor | None,
    activation: str,
    alpha: float,
    limit: float | None,
    train_experts: bool,
) -> list[Tensor]:
    """Gradients of x, the weights and, with `train_experts`, both matrices and both biases (empty: none)."""
    up, hidden, width = w_up_gate.shape[1], w_down.shape[1], w_down.shape[2]
    rows_N = slots_N // weights_TK.shape[-1]
    weights_N = weights_TK.reshape(-1)[slots_N]
    wide = torch.promote_types(x_TD.dtype, torch.float32)
    grad_weights_N = torch.empty_like(weights_N)
    offs = offs_E.tolist()
    blocks = shares(offs, int(parts))
    params = [w_up_gate, w_down, b_up_gate, b_down] if train_experts else []
    grads = [None if p is None else torch.empty_like(p) for p in params]
    for expert, (start, end) in enumerate(zip([0, *offs], offs, strict=False)):
        if start == end:
            for grad in grads:
                if grad is not None:
                    grad[expert].zero_()

    def work(part: int) -> tuple[Tensor, int, list[Tensor | None]]:
        grad_x_TD = x_TD.new_zeros(x_TD.shape, dtype=wide)
        if not blocks[part]:
            return grad_x_TD, -1, []
        # An expert that an earlier share began is summed up after the threads have met.
        begun = blocks[part][0]
        split = begun.expert if begun.start > ([0, *offs])[begun.expert] else -1
        split_grads = [None if g is None else torch.empty_like(g[split]) for g in grads] if split >= 0 else []
        size = max(block.end - block.start for block in blocks[part])
        rows_buffers = [x_TD.new_empty(size, width) for _ in range(3)]
        act_buffer, grad_act_buffer = x_TD.new_empty(hidden * size), x_TD.new_empty(hidden * size)
        grad_up_buffer = x_TD.new_empty(up * size)
        for expert, start, end, first in blocks[part]:
            n = end - start
            rows = rows_N[start:end]
            weights = weights_N[start:end].to(x_TD.dtype)
            x_out, g_out, grad_x = (buffer[:n] for buffer in rows_buffers)
            g = torch.index_select(grad_TD, 0, rows, out=g_out)
            grad_act = grad_act_buffer[: hidden * n].view(hidden, n)
            act = act_buffer[: hidden * n].view(hidden, n)
            grad_up = grad_up_buffer[: up * n].view(up, n)
            torch.mm(w_down[expert], g.T, out=grad_act)
            grad_weights_N[start:end] = block_backward(
                kept[start * up : end * up].view(up, n),
                grad_act,
                weights,
                act_HN=act,
                grad_x_UN=grad_up,
                activation=activation,
                alpha=alpha,
                limit=limit,
            )
            if b_down is not None:
                grad_weights_N[start:end] += torch.mv(g, b_down[expert])
            if grads:
                into = split_grads if expert == split else [None if q is None else q[expert] for q in grads]
                x = torch.index_select(x_TD, 0, rows, out=x_out)
                _accumulate(into[0], grad_up, x, first)
                _accumulate(into[1], act, g, first)
                if b_up_gate is not None:
                    _accumulate(into[2], grad_up, None, first)
                    _accumulate(into[3], g.T, weights, first)
            torch.mm(grad_up.T, w_up_gate[expert], out=grad_x)
            grad_x_TD.index_add_(0, rows, grad_x.to(wide))
        return grad_x_TD, split, split_grads

    results = _threads.map(work, len(blocks))
    for _, split, split_grads in results:
        for grad, part_grad in zip(grads, split_grads, strict=False):
            if grad is not None and part_grad is not None:
                grad[split].add_(part_grad)
    grad_weights_S = torch.zeros_like(weights_TK).view(-1)
    grad_weights_S[slots_N] = grad_weights_N
    return [
        _sum([result[0] for result in results]).to(x_TD.dtype),
        grad_weights_S.view_as(weights_TK),
        *(grad_TD.new_empty(0) if grad is None else grad for grad in grads),
    ]


@blocked_backward.register_fake
def _(grad_TD, kept, parts, x_TD, weights_TK, slots_N, offs_E, *rest):  # type: ignore[no-untyped-def]
    *params, _, _, _, train_experts = rest
    grads = [grad_TD.new_empty(0) if p is None else torch.empty_like(p) for p in params]
    return [torch.empty_like(x_TD), torch.empty_like(weights_TK), *(grads if train_experts else [])]


def _accumulate(into: Tensor | None, a: Tensor, b: Tensor | None, first: bool) -> None:
    """into = a @ b for the first block of an expert, += for the others; b = None sums the columns of a."""
    if into is None:
        return
    if b is None or b.dim() == 1:
        value = a.sum(-1) if b is None else torch.mv(a, b)
        if first:
            into.copy_(value)
        else:
            into.add_(value)
    elif first:
        torch.mm(a, b, out=into)
    else:
        into.addmm_(a, b)


def _sum(parts: list[Tensor]) -> Tensor:
    total = parts[0]
    for part in parts[1:]:
        total.add_(part)
    return total


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor, Tensor]) -> None:
    *tensors, activation, alpha, limit, _ = inputs
    ctx.save_for_backward(*output[1:], *tensors)
    ctx.mark_non_differentiable(*output[1:])
    ctx.set_materialize_grads(False)  # else zeros of the size of `kept` are filled in for it
    ctx.settings = activation, alpha, limit


def _backward(ctx: Any, grad_TD: Tensor | None, *_: None) -> tuple[Tensor | None, ...]:
    if grad_TD is None:
        return (None,) * len(ctx.needs_input_grad)
    train_experts = any(ctx.needs_input_grad[4:8])
    grad_x, grad_weights, *grads = blocked_backward(
        grad_TD.contiguous(), *ctx.saved_tensors, *ctx.settings, train_experts
    )
    params = [
        grad if need and grad.numel() else None
        for grad, need in zip(grads or [grad_x] * 4, ctx.needs_input_grad[4:8], strict=True)
    ]
    return grad_x, grad_weights, None, None, *params, None, None, None, None


blocked_forward.register_autograd(_backward, setup_context=_save)

"""Counters over an optimizer step, the score bias that follows them, and losses over a process group.

Shape suffixes: E experts.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from moe_trainer.moe.router import Router


@torch.library.custom_op("moe_trainer::accumulate", mutates_args={"total"})
def accumulate(total: Tensor, counts: Tensor) -> None:
    """total += counts, except in the recompute of activation checkpointing.

    There a backward pass is running, and the forward pass has counted already. An operator of its own,
    because the question must be asked when the step runs, not when `torch.compile` traces it.
    """
    if torch._C._current_graph_task_id() == -1:
        total.add_(counts)


@accumulate.register_fake
def _(total: Tensor, counts: Tensor) -> None: ...


class LoadCounter(nn.Module):
    """int64 assignments and drops per expert since the last optimizer step; not part of checkpoints."""

    counts_E: Tensor
    dropped_E: Tensor

    def __init__(self, num_experts: int, device: torch.device | str | None = None) -> None:
        super().__init__()
        for name in ("counts_E", "dropped_E"):
            zeros = torch.zeros(num_experts, dtype=torch.int64, device=device)
            self.register_buffer(name, zeros, persistent=False)

    def forward(self, counts_E: Tensor, dropped_E: Tensor | None) -> None:
        """Add the counts of one forward pass in training."""
        if self.training:
            accumulate(self.counts_E, counts_E)
            if dropped_E is not None:
                accumulate(self.dropped_E, dropped_E)

    def reset(self) -> None:
        """Start a new optimizer step."""
        self.counts_E.zero_()
        self.dropped_E.zero_()


class LoadStats(NamedTuple):
    """Loads of one layer over one optimizer step, summed over the ranks.

    Attributes:
        counts_E: Assignments per expert, before any drop.
        dropped_E: Dropped ones.
    """

    counts_E: Tensor
    dropped_E: Tensor

    @property
    def load_imbalance(self) -> float | None:
        """max / mean load; None without tokens."""
        total = int(self.counts_E.sum())
        return int(self.counts_E.max()) * len(self.counts_E) / total if total else None

    @property
    def drop_rate(self) -> float | None:
        """Dropped / all assignments; None without tokens."""
        total = int(self.counts_E.sum())
        return int(self.dropped_E.sum()) / total if total else None


class PendingBalance(NamedTuple):
    """A balance loss that waits for the counts of the other ranks.

    Attributes:
        mean_E: Mean score per expert of this rank, with gradient.
        counts_E: Its assignments.
        factor: (E/k) / D.
        weight: Weight of the loss, layer scale included.
    """

    mean_E: Tensor
    counts_E: Tensor
    factor: float
    weight: float


class MoELosses(NamedTuple):
    """Router losses of one forward pass of one layer.

    Attributes:
        total: Differentiable scalar: the weighted sum, scaled by layers; 0 outside training.
        balance, z: Detached, without weight and scale; None where switched off or outside training.
        pending: The part that `resolve_global_balance` still has to add; None without global balancing.
    """

    total: Tensor
    balance: Tensor | None = None
    z: Tensor | None = None
    pending: PendingBalance | None = None


def resolve_global_balance(
    layers: Sequence[MoELosses], group: dist.ProcessGroup | None = None
) -> list[MoELosses]:
    """Complete the losses of all layers with counts averaged over the group, in one collective.

    Args:
        layers: Losses of one forward pass of the model, one entry a layer.
        group: Data-parallel ranks; None: all.
    """
    waiting = [losses_.pending for losses_ in layers if losses_.pending is not None]
    if not waiting:
        return list(layers)
    flat = torch.cat([pending.counts_E for pending in waiting]).double()
    dist.all_reduce(flat, group=group)
    flat /= dist.get_world_size(group)
    counts = iter(flat.split_with_sizes([len(pending.counts_E) for pending in waiting]))
    return [
        entry if entry.pending is None else _resolved(entry, entry.pending, next(counts)) for entry in layers
    ]


def _resolved(entry: MoELosses, pending: PendingBalance, counts_E: Tensor) -> MoELosses:
    loss = pending.factor * torch.dot(counts_E.to(pending.mean_E.dtype), pending.mean_E)
    return entry._replace(total=entry.total + pending.weight * loss, balance=loss.detach(), pending=None)


@torch.no_grad()
def update_score_bias(router: Router, counts_E: Tensor) -> None:
    """bias += gamma * sign(mean load - load); nothing without `bias_gamma` or for a frozen router.

    A bias that is a whole number of steps stays one: n steps make exactly n * gamma, where adding in fp32
    would drift by 2e-5 in 2,000 steps.
    """
    gamma, bias_E = router.config.bias_gamma, router.score_bias
    if gamma is not None and bias_E is not None and router.weight.requires_grad:
        load_E = counts_E.double()
        sign_E = (load_E.mean() - load_E).sign()
        steps_E = (bias_E.double() / gamma).round()
        whole_E = (steps_E * gamma).to(bias_E.dtype) == bias_E
        bias_E.copy_(torch.where(whole_E, (steps_E + sign_E) * gamma, bias_E.double() + sign_E * gamma))

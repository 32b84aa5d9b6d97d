"""Which assignment goes to which row of the experts' input, and which are dropped.

Shape suffixes: T tokens, K selected experts per token, E experts, N kept assignments in expert order.
A slot is the flat position t*K + j of an assignment.
"""

from __future__ import annotations

from fractions import Fraction
from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor, nn

from moe_trainer.moe.router import RouterOutput, expert_counts


class DispatchPlan(NamedTuple):
    """What `Dispatcher.forward` returns; forward hooks may rely on these fields and their order.

    Attributes:
        slots_N: int64 slots sorted by expert, then by position: the order of the experts' rows.
        offs_E: int32 end of each expert's rows.
        weights_TK: Weights to combine with: the router's, zero where dropped, renormalised if so configured.
        kept_TK: bool, False where the assignment was dropped; None when dropless.
        dropped_E: int64 dropped assignments per expert; None when dropless.
    """

    slots_N: Tensor
    offs_E: Tensor
    weights_TK: Tensor
    kept_TK: Tensor | None
    dropped_E: Tensor | None


def expert_capacity(
    tokens: int, top_k: int, num_experts: int, capacity_factor: float, ep_degree: int = 1
) -> int:
    """Assignments one expert keeps: factor * k * tokens / E rounded up to a multiple of 8, times the ranks.

    The factor is read as the decimal it prints as, so 1.1 * 400 is 440 and not a little more.

    Args:
        tokens: Tokens of one rank.
        ep_degree: Ranks that send to the same expert.
    """
    factor = Fraction(str(capacity_factor))
    # Whole numbers only: the tokens may be a symbol of `torch.compile`.
    return ep_degree * 8 * -(-factor.numerator * top_k * tokens // (factor.denominator * num_experts * 8))


class Dispatcher(nn.Module):
    """Sorts the assignments by expert and drops those beyond the capacity.

    Args:
        num_experts: Number of experts.
        capacity_factor: None for dropless.
        drop_policy: ``position`` keeps the first, ``probs`` those with the largest weights.
        renormalize: Scale the surviving weights of a token so that they sum to what they did before.
        expert_choice: The router output has slots that no expert chose.
    """

    def __init__(
        self,
        num_experts: int,
        capacity_factor: float | None = None,
        drop_policy: str = "probs",
        renormalize: bool = False,
        expert_choice: bool = False,
    ) -> None:
        super().__init__()
        self.num_experts = num_experts
        self.capacity_factor = capacity_factor
        self.drop_policy = drop_policy
        self.renormalize = renormalize
        self.expert_choice = expert_choice

    def forward(self, routed: RouterOutput) -> DispatchPlan:
        """Plan the dispatch of one router output."""
        indices_S = routed.indices_TK.reshape(-1)
        offs_E = routed.counts_E.cumsum(0).to(torch.int32)
        if self.capacity_factor is None:
            slots_N = indices_S.argsort(stable=True)
            if self.expert_choice:
                # The slots that no expert chose are -1 and sort first.
                slots_N = slots_N[len(slots_N) - int(routed.counts_E.sum()) :]
            return DispatchPlan(slots_N, offs_E, routed.weights_TK, None, None)
        tokens, top_k = routed.indices_TK.shape
        capacity = expert_capacity(tokens, top_k, self.num_experts, self.capacity_factor)
        capacity = min(capacity, tokens * top_k)  # a huge factor fits no integer of torch
        by_weight = routed.weights_TK if self.drop_policy == "probs" else None
        kept_S = keep_within_capacity(indices_S, routed.counts_E, capacity, by_weight)
        dropped_E = expert_counts(indices_S[~kept_S], self.num_experts)
        kept_E = routed.counts_E - dropped_E
        # Dropped slots sort behind the last expert, where they are cut off.
        slots_N = indices_S.masked_fill(~kept_S, self.num_experts).argsort(stable=True)
        slots_N = slots_N[: int(kept_E.sum())]
        kept_TK = kept_S.view(tokens, top_k)
        weights_TK = routed.weights_TK * kept_TK
        if self.renormalize:
            left_T1 = weights_TK.sum(-1, keepdim=True)
            scale_T1 = routed.weights_TK.sum(-1, keepdim=True) / left_T1.where(left_T1 > 0, 1.0)
            weights_TK = weights_TK * scale_T1
        return DispatchPlan(slots_N, kept_E.cumsum(0).to(torch.int32), weights_TK, kept_TK, dropped_E)


@torch.no_grad()
def keep_within_capacity(
    indices_S: Tensor, counts_E: Tensor, capacity: int, weights: Tensor | None = None
) -> Tensor:
    """Bool mask of the assignments that fit.

    Args:
        indices_S: Expert of each assignment, in order of position.
        counts_E: Assignments per expert.
        capacity: How many each expert keeps.
        weights: Keep the largest of these, equal ones by position; None keeps the first.
    """
    if weights is None:
        order_S = indices_S.argsort(stable=True)
    else:
        order_S = weights.reshape(-1).argsort(descending=True, stable=True)
        order_S = order_S[indices_S[order_S].argsort(stable=True)]
    starts_E = counts_E.cumsum(0) - counts_E
    rank_S = torch.arange(len(order_S), device=order_S.device) - starts_E[indices_S[order_S]]
    kept_S = torch.empty_like(order_S, dtype=torch.bool)
    kept_S[order_S] = rank_S < capacity
    return kept_S


@lru_cache(maxsize=32)
def parallel_bins(
    num_experts: int, num_local_experts: int, local_capacity: int, device: torch.device | str
) -> tuple[Tensor, Tensor]:
    """How a rank reorders the fixed-size bins it receives from all ranks; built once per shape and device.

    The bins arrive by sending rank, and by local expert within it: bin i holds `local_capacity` rows of the
    local expert i mod `num_local_experts`.

    Args:
        num_experts: All experts, i.e. the number of bins.
        num_local_experts: Experts of this rank.
        local_capacity: Rows per bin.

    Returns:
        int32 row order that sorts the bins by local expert, and the int32 ends of the local experts' rows.
    """
    expert_of_row = torch.arange(num_experts) % num_local_experts
    order = expert_of_row.repeat_interleave(local_capacity).argsort(stable=True)
    rows = num_experts // num_local_experts * local_capacity
    ends = torch.arange(1, num_local_experts + 1) * rows
    return order.to(device, torch.int32), ends.to(device, torch.int32)

"""Experts as stacked weights, applied to rows that are sorted by expert.

Shape suffixes: E experts, N rows, D input width, H hidden units, U = H or 2H columns of the first matmul.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from moe_trainer.moe.config import UP_FACTOR
from moe_trainer.moe.router import DTYPES


class Experts(nn.Module):
    """E feed-forward experts: y = act(x W_up_gate[e]^T + b) W_down[e] + b.

    Args:
        num_experts, width, hidden_size: E, D, H.
        activation, alpha, limit: See `MoEConfig`.
        bias: Biases on both matmuls.

    Attributes:
        w_up_gate: (E, U, D); for swiglu the first half of U is the value, the second the gate; for
            gpt_oss_swiglu they are interleaved, the gate first.
        w_down: (E, H, D).
        b_up_gate, b_down: (E, U) and (E, D), or None.
    """

    def __init__(
        self,
        num_experts: int,
        width: int,
        hidden_size: int,
        *,
        activation: str = "swiglu",
        alpha: float = 1.702,
        limit: float | None = None,
        bias: bool = False,
        dtype: str = "float32",
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__()
        self.activation, self.alpha, self.limit = activation, alpha, limit
        self.num_experts = num_experts
        up = UP_FACTOR[activation] * hidden_size

        def parameter(*shape: int) -> nn.Parameter:
            return nn.Parameter(torch.empty(*shape, dtype=DTYPES[dtype], device=device))

        self.w_up_gate = parameter(num_experts, up, width)
        self.w_down = parameter(num_experts, hidden_size, width)
        self.b_up_gate = parameter(num_experts, up) if bias else None
        self.b_down = parameter(num_experts, width) if bias else None
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self, std: float = 0.02, generator: torch.Generator | None = None) -> None:
        """Truncated normal weights (cut at 3 std), zero biases."""
        for weight in (self.w_up_gate, self.w_down):
            nn.init.trunc_normal_(weight, std=std, a=-3 * std, b=3 * std, generator=generator)
        for bias in (self.b_up_gate, self.b_down):
            if bias is not None:
                bias.zero_()

    def forward(self, x_ND: Tensor, offs_E: Tensor) -> Tensor:
        """Apply expert e to rows offs[e-1]:offs[e]; every row belongs to an expert."""
        hidden_NU = F.grouped_mm(x_ND, self.w_up_gate.transpose(1, 2), offs=offs_E)
        hidden_NH = activate(hidden_NU, self.activation, self.alpha, self.limit)
        return F.grouped_mm(hidden_NH, self.w_down, offs=offs_E)


def activate(x_NU: Tensor, activation: str, alpha: float, limit: float | None) -> Tensor:
    """The activation of an expert, from the columns of the first matmul to the hidden units."""
    if activation == "relu2":
        return x_NU.relu().square()
    if activation == "swiglu":
        value_NH, gate_NH = x_NU.chunk(2, dim=-1)
        return value_NH * F.silu(gate_NH)
    gate_NH, value_NH = x_NU[..., ::2], x_NU[..., 1::2]
    if limit is not None:
        gate_NH = gate_NH.clamp(max=limit)
        value_NH = value_NH.clamp(-limit, limit)
    return (value_NH + 1) * gate_NH * torch.sigmoid(alpha * gate_NH)
